"""What a run writes for people and programs: metrics.jsonl, samples.jsonl, TensorBoard events, W&B, the console.

Metrics are logged raw: a NaN stays visible. samples.jsonl is strict JSON: a number that is not finite becomes null.
"""

import io
import itertools
import json
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from config import LoggerConfig, WandbConfig, shortened
from data import Sample
from metrics import Numbers
from support.inputs.files import read_records
from support.inputs.tokenizer import Tokenizer
from support.run.health import Health
from support.system.disk import append, write_whole
from support.system.exits import host_name

TIMING_NAMES = {"prepare_for_generation": "prepare_for_generation/total"}  # NeMo RL's name
PHASES = {"gen": "generation", "data": "data_processing", "train": "policy_training", "sync": "prepare_for_generation"}
WRITTEN = ("metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "hf_model", "hf_adapter")
SAMPLE_FIELDS = """row_id index env_name reward unshaped_reward outcome advantage finish_reason weight_version
num_gen_tokens""".split()
MAX_EXPECTED = 2000  # characters of an expected answer: the tests of a program may be long


class RunLog:
    """Files of a run folder and the console, written by rank 0 only. What a full disk refuses is counted, and lost."""

    def __init__(self, folder: Path, cfg: LoggerConfig, *, first_step: int, num_steps: int):
        self.folder = folder
        self.cfg = cfg
        self.num_steps = num_steps
        self.num_lost: Counter[str] = Counter()  # file -> writes that failed
        for name in ("metrics.jsonl", "samples.jsonl"):
            self._write(name, _drop_from, first_step)
            self._write(name, append, b"")  # there from the start
        before = read_records(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else ()
        self.health = Health(record for _, record in before)
        self.events = f"tensorboard/events.out.tfevents.{time.time():.0f}.{host_name()}.{os.getpid()}"
        if cfg.tensorboard_enabled:
            self._write("tensorboard", os.makedirs, 0o777, True)
            self._event(file_version="brain.Event:2")
            # TensorBoard hides what it has of these steps: the part of the run that is resumed wrote it.
            self._event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self.wandb: Any = None  # W&B's run, from the first row on
        self.logs_to_wandb = cfg.wandb_enabled
        self.start, self.first_step = time.perf_counter(), first_step
        self.tokens_per_sec: list[float] = []
        self.partial: set[str] = set()  # prefixes of metrics: there, some reward was neither 0 nor 1

    def _write(self, name: str, write: Callable, *arguments: Any) -> None:
        """Calls `write` with the path of a file in the run folder. What the disk refuses is said once, and counted."""
        try:
            write(self.folder / name, *arguments)
        except OSError as error:
            if name not in self.num_lost:
                problem = f"{self.folder / name} cannot be written ({error.strerror})"
                print(f"WARNING: {problem}: training continues, and what is not written is lost", flush=True)
            self.num_lost[name] += 1

    def _event(self, **content: Any) -> None:
        """Adds a record to TensorBoard's file. Its own writer has a thread, which ends when a disk is full."""
        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        self._write(self.events, append, record.getvalue())

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Writes an object of metrics.jsonl, and the same numbers to TensorBoard and W&B."""
        row = {"step": step, **values}
        self._write("metrics.jsonl", append, json.dumps(row).encode() + b"\n")
        if self.cfg.tensorboard_enabled:
            numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._event(step=step, summary=Summary(value=numbers))
        if self.logs_to_wandb:
            self._log_to_wandb(row)

    def _log_to_wandb(self, row: dict[str, float]) -> None:
        """Sends a row to W&B, over the x-axis `step`. W&B's own step, which may not fall and has one row each, is
        2 * step for training and 2 * step + 1 for the validation after it. `exit_process` ends the run at W&B."""
        try:
            self.wandb = self.wandb or _start_wandb(self.folder, self.cfg.wandb)
            is_validation = any(name.startswith("validation/") for name in row)
            self.wandb.log(row, step=2 * row["step"] + is_validation, commit=True)
        except Exception as error:  # W&B's own, the network's, an import that fails: no reason to end a run
            self.logs_to_wandb = False
            text = f"WARNING: W&B failed ({error!r:.300}): the run continues as with logger.wandb_enabled=false"
            print(text, flush=True)

    def samples(self, step: int, kind: str, samples: list[Sample], tokenizer: Tokenizer) -> None:
        """Writes the first conversations to samples.jsonl, and prints some of those of a greedy validation."""
        decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
        num_logged = self.cfg.num_samples_to_log
        num_print = self.cfg.num_val_samples_to_print * kind.endswith("/greedy")
        lines = []
        for i, sample in enumerate(samples[: max(num_logged, num_print)]):
            prompt, reply = decode(sample.prompt_ids), decode(sample.output_ids.tolist())
            record = {"step": step, "kind": kind, "prompt": prompt, "reply": reply}
            record |= {name: getattr(sample, name) for name in SAMPLE_FIELDS}
            record["expected"] = sample.expected[:MAX_EXPECTED]
            record |= {"message": sample.message} if sample.message else {}  # of an agent that failed
            if i < num_logged:
                finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
                lines.append(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
            if i < num_print:
                ends = f"{sample.outcome}, reward {sample.reward:g}, expected {shortened(sample.expected)}"
                print(f"    [{kind}] {prompt!r} -> {reply!r}  {ends}", flush=True)
        # backslashreplace: a row may contain half a surrogate pair, which UTF-8 cannot encode; JSON's escape can.
        self._write("samples.jsonl", append, "".join(lines).encode(errors="backslashreplace"))

    def step(self, step: int, train: Numbers, seconds: Numbers, performance: Numbers) -> None:
        """Logs a training step: an object in metrics.jsonl, a line, and what has newly gone wrong with the run."""
        total, tokens_per_sec = seconds["total_step_time"], performance["performance/tokens_per_sec"]
        health, warnings = self.health.add(step, train)
        values = {f"train/{name}": value for name, value in (train | health).items() if name != "train_tokens"}
        values |= {f"timing/train/{TIMING_NAMES.get(name, name)}": value for name, value in seconds.items()}
        self.metrics(step, values | performance)
        self.tokens_per_sec.append(tokens_per_sec)
        now, eta = time.perf_counter(), "-"
        if step == self.first_step:  # compiles: says nothing about the others
            self.first_end = now
        else:
            left = (now - self.first_end) / (step - self.first_step) * (self.num_steps - step)
            eta = f"{int(left) // 60}m{int(left) % 60:02d}s"
        phases = " ".join(f"{label} {seconds[name]:.2f}" for label, name in PHASES.items())
        score = self._score("", train, "unshaped_reward")
        gap = "-"  # with async_grpo a step may have no token of the newest weights, and then no gap
        if train["logp_gap_max"]:
            gap = f"{train['logp_gap_mean']:.0e} max {train['logp_gap_max']:.0e}"
        print(
            f"step {step}/{self.num_steps} | {score} {train[score]:.3f} | "
            f"loss {train['loss']:+.4f} grad {train['grad_norm']:.3f} | logp gap {gap} | "
            f"{tokens_per_sec:,.0f} tok/s | {total:.2f}s ({phases}) | ETA {eta}",
            *warnings,
            sep="\n",
            flush=True,
        )

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Logs a validation: an object of its own in metrics.jsonl, and a line."""
        self.metrics(step, values)
        scores = ", ".join(f"{label} {text}" for label, (text,) in self._scores(values).items())
        seconds = f"{values['timing/validation/total_validation_time']:.1f}s"
        print(f"validation after step {step} | {scores} | {seconds}", flush=True)

    def _score(self, prefix: str, values: Numbers, reward: str = "reward") -> str:
        """The name of the accuracy; or of the reward, from the first reward on that is neither 0 nor 1: an accuracy
        that counts part of an answer as right would mislead."""
        if values.get(prefix + reward) != values.get(f"{prefix}accuracy"):
            self.partial.add(prefix)
        return prefix + ("reward" if prefix in self.partial else "accuracy")

    def _scores(self, *validations: Numbers) -> dict[str, list[str]]:
        """For each set and mode, such as "greedy accuracy", the score of each validation; with a reward that is neither
        0 nor 1 also the share of replies with the outcome ok."""
        found, rows = [key for values in validations for key in values], {}
        for key in filter(re.compile("validation/.+/accuracy").fullmatch, found):
            name = [self._score(key.removesuffix("accuracy"), values) for values in validations][-1]
            label = name.removeprefix("validation/").replace("/", " ")
            rows[label] = [shown(values, name) for values in validations]
            if name != key:
                rows[label.replace("reward", "outcome ok")] = [shown(values, key) for values in validations]
        return rows

    def close(self, state) -> None:
        """Prints the table at the end of a run. state: the `RunState`."""
        scores = self._scores(state.first_validation, state.last_validation)
        rows = {label: " -> ".join(texts[texts[0] == "?" :]) for label, texts in scores.items()}
        rows["health"] = self.health.summary()
        rows["steps"] = f"{state.step}, {len(self.tokens_per_sec)} of them in {time.perf_counter() - self.start:.0f} s"
        if self.tokens_per_sec:
            rows["tokens/s, median step"] = f"{np.median(self.tokens_per_sec):,.0f}"
        written = [name for name in WRITTEN if (self.folder / name).exists()]
        rows["run folder"] = f"{self.folder}: {', '.join(written)}"
        if self.num_lost:
            rows["not written"] = ", ".join(f"{name}: {num} times" for name, num in self.num_lost.items())
        here = os.getcwd()
        words = [sys.executable.removeprefix(f"{here}/"), "-m", "tools.report", str(self.folder)]
        rows["report"] = f"cd {shlex.quote(here)} && {shlex.join(words)}"
        width = max(map(len, rows))
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()) + "\n", flush=True)


def shown(values: Numbers, name: str) -> str:
    """A validation's number; an accuracy with its 95% interval and the number of problems."""
    if name not in values:
        return "?"
    low, high = (values.get(f"{name}_ci95_{end}", math.nan) for end in ("low", "high"))
    num = values.get(f"{name.removesuffix('accuracy')}num_problems", 0)
    sure = f" ({low:.3f} to {high:.3f}, {num:,.0f} problems)" if low == low else ""
    return f"{values[name]:.3f}{sure}"


def _drop_from(file: Path, first_step: int) -> None:
    """Removes what a run wrote after the checkpoint that it now resumes from, and a last line that a kill cut."""
    if file.exists():
        kept = itertools.takewhile(lambda line: line[1].get("step", 0) < first_step, read_records(file))
        os.truncate(file, max((end for end, _ in kept), default=0))


def _start_wandb(folder: Path, cfg: WandbConfig) -> Any:
    """The run at W&B. `wandb_id` in the run folder keeps its id, so a resumed run is the same one there."""
    import wandb

    file = folder / "wandb_id"
    if not file.exists():
        write_whole(file, secrets.token_hex(4))
    run = wandb.init(
        project=cfg.project,
        name=cfg.name or folder.name,
        id=file.read_text(),
        resume="allow",
        dir=folder,
        config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
        settings=wandb.Settings(console="off", finish_timeout=60.0),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


class Timers:
    """Seconds of each named phase of a step, and on CUDA its peaks of the bytes that torch allocated and reserved, and
    those reserved but not allocated at its end. `enter` is called with each phase that begins, for the watchdog."""

    def __init__(self, enter: Callable[[str], None]):
        self.enter = enter
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, tuple[int, int, int]] = {}
        self.step_start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.enter(name)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a phase ends when its kernels have ended
                unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
                self.peaks[name] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), unused
            self.seconds[name] += time.perf_counter() - start

    def start_step(self) -> None:
        self.step_start = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Phase -> seconds since the last call, and total_step_time since the step began."""
        seconds = {**self.seconds, "total_step_time": time.perf_counter() - self.step_start}
        self.seconds.clear()
        return seconds
