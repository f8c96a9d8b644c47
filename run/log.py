"""What a run writes for people and programs: metrics.jsonl, samples.jsonl, TensorBoard events, W&B, the console.

Metrics are logged raw: a NaN stays visible. samples.jsonl is strict JSON: a number that is not finite becomes null.
"""

import io
import json
import math
import os
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from base.hf.tokenizer import Tokenizer
from base.system.disk import append
from base.system.exits import host_name
from base.system.files import read_records
from config import LoggerConfig, shortened
from metrics import Numbers
from records import Sample, TokenSequence
from run.health import Health

T = TypeVar("T")
TIMING_NAMES = {"prepare_for_generation": "prepare_for_generation/total"}  # NeMo RL's name
PHASES = {"gen": "generation", "data": "data_processing", "train": "policy_training", "sync": "prepare_for_generation"}
WRITTEN = ("metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "hf_model", "hf_adapter")
SAMPLE_FIELDS = (
    """row_id index env_name reward unshaped_reward outcome advantage finish_reason num_gen_tokens""".split()
)
GRADE_FIELDS = ("reward", "unshaped_reward", "outcome")
MAX_WITH_TOKENS = 16  # samples of a step: tokens with their numbers take three times the room of the text
MAX_EXPECTED = 2000  # characters of an expected answer: the tests of a program may be long


class EndState(Protocol):
    """What the table at the end of a run needs of `RunState`."""

    step: int
    first_validation: Numbers
    last_validation: Numbers


class RunLog:
    """Files of a run folder and the console, written by rank 0 only. What a full disk refuses is counted, and lost."""

    def __init__(self, folder: Path, cfg: LoggerConfig, *, first_step: int, num_steps: int):
        self.folder = folder
        self.cfg = cfg
        self.num_steps = num_steps
        self.num_lost: Counter[str] = Counter()  # file -> writes that failed
        for name in ("metrics.jsonl", "samples.jsonl"):
            self._write(name, partial(_drop_from, first_step=first_step))
            self._append(name, b"")  # there from the start
        self.health = Health(_metrics_so_far(folder))
        self.events = f"tensorboard/events.out.tfevents.{time.time():.0f}.{host_name()}.{os.getpid()}"
        if cfg.tensorboard_enabled:
            self._write("tensorboard", partial(os.makedirs, exist_ok=True))
            self._event(Event(wall_time=time.time(), file_version="brain.Event:2"))
            # TensorBoard hides what it has of these steps: the part of the run that is resumed wrote it.
            started = SessionLog(status=SessionLog.START)
            self._event(Event(wall_time=time.time(), step=first_step, session_log=started))
        self.wandb = None
        if cfg.wandb_enabled:
            from run.wandb_log import WandbLog  # a run without W&B does without

            self.wandb = WandbLog(folder, cfg.wandb)
        self.start = time.perf_counter()
        self.first_step = first_step
        self.tokens_per_sec: list[float] = []
        self.has_partial_rewards: set[str] = set()  # prefixes of metrics: there, some reward was neither 0 nor 1

    def _append(self, name: str, lines: bytes) -> None:
        self._write(name, partial(append, lines=lines))

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        """Calls `write` with the path of a file in the run folder. What the disk refuses is said once, and counted."""
        try:
            write(self.folder / name)
        except OSError as error:
            if name not in self.num_lost:
                problem = f"{self.folder / name} cannot be written ({error.strerror})"
                print(f"WARNING: {problem}: training continues, and what is not written is lost", flush=True)
            self.num_lost[name] += 1

    def _event(self, event: Event) -> None:
        """Adds a record to TensorBoard's file. Its own writer has a thread, which ends when a disk is full."""
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._append(self.events, record.getvalue())

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Writes an object of metrics.jsonl, and the same numbers to TensorBoard and W&B."""
        row = {"step": step, **values}
        line = json.dumps(row) + "\n"
        self._append("metrics.jsonl", line.encode())
        if self.cfg.tensorboard_enabled:
            numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._event(Event(wall_time=time.time(), step=step, summary=Summary(value=numbers)))
        if self.wandb:
            self.wandb.log(row)

    def samples(self, step: int, kind: str, samples: list[Sample], tokenizer: Tokenizer) -> None:
        """Writes the first conversations to samples.jsonl, and prints some of those of a greedy validation."""
        text = ""
        for place, sample in enumerate(samples[: self.cfg.num_samples_to_log]):
            record = {"step": step, "kind": kind} | _record_of(sample, tokenizer)
            if kind == "train" and place < MAX_WITH_TOKENS:
                _add_tokens(record, sample, tokenizer)
            text += json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
        # backslashreplace: a row may contain half a surrogate pair, which UTF-8 cannot encode; JSON's escape can.
        self._append("samples.jsonl", text.encode(errors="backslashreplace"))
        if kind.endswith("/greedy"):
            for sample in samples[: self.cfg.num_val_samples_to_print]:
                prompt = _decoded(tokenizer, sample.sequence.prompt_ids)
                reply = _decoded(tokenizer, sample.sequence.output_ids)
                grade = f"{sample.grade.outcome}, reward {sample.grade.reward:g}, expected {shortened(sample.expected)}"
                print(f"    [{kind}] {prompt!r} -> {reply!r}  {grade}", flush=True)

    def step(self, step: int, train: Numbers, seconds: Numbers, performance: Numbers) -> None:
        """Logs a training step: an object in metrics.jsonl, a line, and what has newly gone wrong with the run."""
        health, warnings = self.health.add(step, train)
        values = {}
        for name, value in (train | health).items():
            if name != "train_tokens":  # stands in `performance`
                values[f"train/{name}"] = value
        for name, value in seconds.items():
            values[f"timing/train/{TIMING_NAMES.get(name, name)}"] = value
        values |= performance
        self.metrics(step, values)
        tokens_per_sec = performance["performance/tokens_per_sec"]
        self.tokens_per_sec.append(tokens_per_sec)
        phases = " ".join(f"{label} {seconds[name]:.2f}" for label, name in PHASES.items())
        score = self._score("", train, "unshaped_reward")
        gap = "-"  # with async_grpo a step may have no token of the newest weights, and then no gap
        if train["logp_gap_max"]:
            gap = f"{train['logp_gap_mean']:.0e} max {train['logp_gap_max']:.0e}"
        print(
            f"step {step}/{self.num_steps} | {score} {train[score]:.3f} | "
            f"loss {train['loss']:+.4f} grad {train['grad_norm']:.3f} | logp gap {gap} | "
            f"{tokens_per_sec:,.0f} tok/s | {seconds['total_step_time']:.2f}s ({phases}) | ETA {self._eta(step)}",
            *warnings,
            sep="\n",
            flush=True,
        )

    def _eta(self, step: int) -> str:
        """Time until the last step ends, by the steps so far without the first one, which compiles."""
        now = time.perf_counter()
        if step == self.first_step:
            self.first_end = now
            return "-"
        seconds_per_step = (now - self.first_end) / (step - self.first_step)
        seconds_left = int(seconds_per_step * (self.num_steps - step))
        return f"{seconds_left // 60}m{seconds_left % 60:02d}s"

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Logs a validation: an object of its own in metrics.jsonl, and a line."""
        self.metrics(step, values)
        scores = ", ".join(f"{label} {text}" for label, (text,) in self._scores([values]).items())
        seconds = values["timing/validation/total_validation_time"]
        print(f"validation after step {step} | {scores} | {seconds:.1f}s", flush=True)

    def _score(self, prefix: str, values: Numbers, reward: str = "reward") -> str:
        """The name of the accuracy; or of the reward, from the first reward on that is neither 0 nor 1: an accuracy
        that counts part of an answer as right would mislead."""
        if values.get(f"{prefix}{reward}") != values.get(f"{prefix}accuracy"):
            self.has_partial_rewards.add(prefix)
        if prefix in self.has_partial_rewards:
            return f"{prefix}reward"
        return f"{prefix}accuracy"

    def _scores(self, validations: Sequence[Numbers]) -> dict[str, list[str]]:
        """For each set and mode, such as "greedy accuracy", the score of each validation; with a reward that is neither
        0 nor 1 also the share of replies with the outcome ok."""
        rows = {}
        for accuracy in dict.fromkeys(chain.from_iterable(validations)):
            if not re.fullmatch("validation/.+/accuracy", accuracy):
                continue
            score = accuracy
            for values in validations:
                score = self._score(accuracy.removesuffix("accuracy"), values)
            label = score.removeprefix("validation/").replace("/", " ")
            rows[label] = [shown(values, score) for values in validations]
            if score != accuracy:
                rows[label.replace("reward", "outcome ok")] = [shown(values, accuracy) for values in validations]
        return rows

    def close(self, state: EndState) -> None:
        """Prints the table at the end of a run."""
        rows = {}
        for label, (first, last) in self._scores([state.first_validation, state.last_validation]).items():
            rows[label] = f"{first} -> {last}"
            if first == "?":  # no validation at the start
                rows[label] = last
        rows["health"] = self.health.summary()
        seconds = time.perf_counter() - self.start
        rows["steps"] = f"{state.step}, {len(self.tokens_per_sec)} of them in {seconds:.0f} s"
        if self.tokens_per_sec:
            rows["tokens/s, median step"] = f"{np.median(self.tokens_per_sec):,.0f}"
        written = [name for name in WRITTEN if (self.folder / name).exists()]
        rows["run folder"] = f"{self.folder}: {', '.join(written)}"
        if self.num_lost:
            rows["not written"] = ", ".join(f"{name}: {num} times" for name, num in self.num_lost.items())
        rows["report"] = self._report_command()
        width = max(map(len, rows))
        print()
        for name, value in rows.items():
            print(f"{name:<{width}}  {value}")
        print(flush=True)

    def _report_command(self) -> str:
        here = os.getcwd()
        python = sys.executable.removeprefix(f"{here}/")
        command = shlex.join([python, "-m", "tools.report", str(self.folder)])
        return f"cd {shlex.quote(here)} && {command}"


def shown(values: Numbers, name: str) -> str:
    """A validation's number; an accuracy with its 95% interval and the number of problems."""
    if name not in values:
        return "?"
    text = f"{values[name]:.3f}"
    if f"{name}_ci95_low" in values:
        low = values[f"{name}_ci95_low"]
        high = values[f"{name}_ci95_high"]
        num = values[f"{name.removesuffix('accuracy')}num_problems"]
        text += f" ({low:.3f} to {high:.3f}, {num:,.0f} problems)"
    return text


def _record_of(sample: Sample, tokenizer: Tokenizer) -> dict:
    """The line of samples.jsonl for a sample, without step and kind."""
    sequence = sample.sequence
    record = {"prompt": _decoded(tokenizer, sequence.prompt_ids), "reply": _decoded(tokenizer, sequence.output_ids)}
    for name in SAMPLE_FIELDS:
        owner = sample.grade if name in GRADE_FIELDS else sample
        record[name] = getattr(owner, name)
    record["weight_version"] = sample.oldest_version
    if sample.grade.rewards:
        record["rewards"] = sample.grade.rewards
    record["expected"] = sample.expected[:MAX_EXPECTED]
    if sample.grade.message:  # of an agent that failed
        record["message"] = sample.grade.message
    if sample.by_agent:
        record["rows"] = [_calls_of(sample, sequence) for sequence in sample.sequences]
    return record


def _calls_of(sample: Sample, sequence: TokenSequence) -> list[dict]:
    """The calls of an agent's sequence, in their order: number of the call in its rollout, messages that the agent
    added, reply, ids of the reply as they were drawn, whether they are trained, reward and advantage."""
    calls = []
    for call, number in zip(sequence.calls, sequence.turns, strict=True):
        tokens = sequence.tokens[call["start"] : call["end"]]
        record = {"number": number, "messages": call["messages"], "reply": call["reply"]}
        if "tools" in call:
            record["tools"] = call["tools"]
        record["ids"] = tokens["id"].tolist()
        record["is_trained"] = bool(tokens["mask"].all()) and not sample.is_filtered
        record["reward"] = sample.grade.turn_rewards[number]
        record["advantage"] = sample.advantage
        if isinstance(sample.advantage, list):
            record["advantage"] = sample.advantage[number]
        calls.append(record)
    return calls


def _add_tokens(record: dict, sample: Sample, tokenizer: Tokenizer) -> None:
    """Adds the tokens, for the report's colours: of each the text, and the sampler's log-probability, null where the
    mask is False. An agent's calls get their own. Nothing is computed: rank 0 has all of it."""
    if sample.by_agent:
        for sequence, calls in zip(sample.sequences, record["rows"], strict=True):
            for call, record_of_call in zip(sequence.calls, calls, strict=True):
                record_of_call |= _texts_and_logps(sequence.tokens[call["start"] : call["end"]], tokenizer)
        return
    record |= _texts_and_logps(sample.sequence.tokens, tokenizer)
    if isinstance(sample.advantage, list):  # each turn has its own
        record["turn_tokens"] = sample.sequence.turn_tokens


def _texts_and_logps(tokens: np.ndarray, tokenizer: Tokenizer) -> dict[str, list]:
    logps = np.where(tokens["mask"], tokens["logp"], math.nan).astype(float)
    texts = tokenizer.token_texts(tokens["id"].tolist())
    return {"tokens": texts, "sampler_logps": [round(logp, 4) for logp in logps.tolist()]}


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, special=True)


def _finite(value: T) -> T | None:
    """The value with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _metrics_so_far(folder: Path) -> Iterator[dict]:
    """The objects of metrics.jsonl that the earlier parts of a run wrote."""
    file = folder / "metrics.jsonl"
    if file.exists():  # a full disk may have refused it
        for _, record in read_records(file):
            yield record


def _drop_from(file: Path, first_step: int) -> None:
    """Removes what a run wrote after the checkpoint that it now resumes from, and a last line that a kill cut."""
    if not file.exists():
        return
    size = 0
    for end, record in read_records(file):
        if record.get("step", 0) >= first_step:
            break
        size = end
    os.truncate(file, size)


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
                allocated = torch.cuda.max_memory_allocated()
                reserved = torch.cuda.max_memory_reserved()
                unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
                self.peaks[name] = allocated, reserved, unused
            self.seconds[name] += time.perf_counter() - start

    def start_step(self) -> None:
        self.step_start = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Phase -> seconds since the last call, and total_step_time since the step began."""
        seconds = dict(self.seconds)
        seconds["total_step_time"] = time.perf_counter() - self.step_start
        self.seconds.clear()
        return seconds
