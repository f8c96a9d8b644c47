"""Golden runs: what a change of the code does to training, to the bit, on rollouts that were recorded before it.

    python bench/golden.py record FOLDER [TASK ...]            run each task with the real engine, keep what it sampled
    python bench/golden.py replay FOLDER OUT [TASK ...]        train on what was sampled, without vLLM
    python bench/golden.py compare FOLDER OUT [--out=FILE]     every number of every step, side by side

A recording holds the reply to each request, a digest of the weights that each sync sent, the gradients that the
optimizer saw, the weights that each of its steps left, and the metrics of each step. In a replay a stand-in for vLLM
answers each request from the recording, and the recorded weights take the place of the policy's after each optimizer
step, so that every step is compared on its own; all else is the code of the checkout where it is run.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path[:0] = [str(Path.cwd()), str(Path.cwd() / "tests" / "helpers")]

STEPS = 20
SMOKE = "configs/smoke.yaml"
TASKS = {
    "smoke": [SMOKE],
    "three_tasks": ["configs/three_tasks.yaml"],
    "two_turns": ["examples/arithmetic/two_turns.yaml"],
    "dr_grpo": [
        *(SMOKE, "grpo.normalize_rewards=false", "grpo.use_leave_one_out_baseline=false"),
        *("loss_fn.token_level_loss=false", "loss_fn.loss_scale_factor=8"),
    ],
    "dapo": [
        *(SMOKE, "loss_fn.ratio_clip_max=0.28", "grpo.use_leave_one_out_baseline=false"),
        *("grpo.use_dynamic_sampling=true", "grpo.reward_shaping.enabled=true"),
        "grpo.reward_shaping.overlong_buffer_length=3",
    ],
    "gspo": [SMOKE, "loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
    "cispo": [SMOKE, "loss_fn.use_cispo=true"],
    "reinforce_plus_plus": [SMOKE, "grpo.adv_estimator.name=reinforce_plus_plus"],
    "kl": [SMOKE, "loss_fn.reference_policy_kl_penalty=0.01"],
    "minibatches": [SMOKE, "policy.train_global_batch_size=64", "policy.ppo_epochs=2"],
}
QUIET = [
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("checkpointing.enabled=false", "checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false"),
]
# Metrics that measure rounding itself: they may be twice as large, and change in every digit.
ROUNDING = ("gen_kl_error", "policy_kl_error", "js_divergence_error", "logp_gap", "canary_logp_gap")


def request_key(prompt, seed, temperature, version: int) -> str:
    return hashlib.blake2b(repr((version, list(prompt), seed, temperature)).encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def kept_gradients(folder: Path, rank: int, recording: Path | None):
    """Writes the gradients that each optimizer step of this rank sees, and when recording the weights it leaves. In a
    replay the recorded weights take the place of its own: so every optimizer step is compared on its own, too."""
    import torch
    from safetensors.torch import load_file, save_file
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    count = 0

    def local(optimizer):
        return {f"{i:04d}": p for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}

    def before(optimizer, *_):
        grads = {name: p.grad.to_local().clone() for name, p in local(optimizer).items() if p.grad is not None}
        save_file(grads, folder / f"grad_{rank}_{count:04d}.safetensors")

    @torch.no_grad()
    def after(optimizer, *_):
        nonlocal count
        name, weights = f"after_{rank}_{count:04d}.safetensors", local(optimizer)
        if recording is None:
            save_file({key: p.to_local().clone() for key, p in weights.items()}, folder / name)
        else:
            for key, tensor in load_file(recording / name).items():
                weights[key].to_local().copy_(tensor)
        count += 1

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def recorder(engine_class: type, folder: Path, rank: int) -> type:
    """The engine, which writes down what it samples, and digests of the weights that it is given."""
    import numpy as np
    import torch

    samples = (folder / f"samples_{rank}.jsonl").open("w", buffering=1)
    syncs = (folder / f"syncs_{rank}.jsonl").open("w", buffering=1)
    asked: dict[str, str] = {}

    class Recorder(engine_class):
        def start(self, prompts, seeds, options, *more):
            request_ids = super().start(prompts, seeds, options, *more)
            for request_id, prompt, seed in zip(request_ids, prompts, seeds, strict=True):
                seed = seed if options.temperature > 0 else None
                asked[request_id] = request_key(prompt, seed, options.temperature, self.weight_version)
            return request_ids

        def step(self):
            ended = super().step()
            for request_id in ended:
                reply = self.finished[request_id]
                line = [asked.pop(request_id), reply.ids.tolist(), reply.logps.tolist(), reply.finish_reason]
                samples.write(json.dumps(line) + "\n")
            return ended

        def sync(self, weights, version):
            digest = hashlib.blake2b(digest_size=12)

            def digested():
                for name, tensor in weights:
                    digest.update(name.encode() + np.asarray(tensor.contiguous().view(torch.uint8)).tobytes())
                    yield name, tensor

            num_bytes = super().sync(digested(), version)
            self.llm.version = version
            syncs.write(json.dumps([version, digest.hexdigest()]) + "\n")
            return num_bytes

    return Recorder


def replayer(recording: Path) -> type:
    """A stand-in for vLLM that knows only the replies of the recording."""
    import fake_vllm

    known = {}
    for file in recording.glob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            key, *reply = json.loads(line)
            known[key] = reply

    class Requests(fake_vllm.LLMEngine):
        def add_request(self, request_id, prompt, params, priority=0):
            super().add_request(request_id, prompt, params, priority=priority)
            ids = prompt["prompt_token_ids"]
            key = request_key(ids, params.seed, params.temperature, self.llm.version)
            assert key in known, f"the recording has no reply to {ids} of the weights of step {self.llm.version}"
            reply = self.requests[request_id].reply
            reply.token_ids, logps, reply.finish_reason = known[key]
            for token, logp in zip(reply.token_ids, logps, strict=True):
                reply.logprobs.append({token: logp})

        def step(self):
            replies = {name: request.reply for name, request in self.requests.items()}
            self.requests.clear()
            return [SimpleNamespace(request_id=n, outputs=[reply], finished=True) for n, reply in replies.items()]

    class Replayer(fake_vllm.LLM):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.llm_engine = Requests(self)

    return Replayer


def run(words: list[str], recording: Path | None, out: Path, rank: int) -> int:
    """This rank's part of a run, written to `out`: with vLLM, or from a recording. Returns its exit code."""
    engine, build, grpo = (importlib.import_module(name) for name in ("engine", "run.build", "grpo"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_gradients(out, rank, recording))
        stack.enter_context(mock.patch.object(build, "Engine", recorder(build.Engine, out, rank)))
        if recording:
            stack.enter_context(mock.patch.object(engine, "LLM", replayer(recording)))
        words = [words[0], *QUIET, *words[1:], f"logger.log_dir={out / 'logs'}"]
        stack.enter_context(mock.patch.object(sys, "argv", ["grpo.py", *words]))
        return grpo.main()


def rank_main(mode: str, recording: Path, out: Path, task: str) -> None:
    """One rank of one task."""
    if mode == "replay":  # without the minutes and the memory of vLLM
        importlib.import_module("fake_vllm").install()
    code = run(TASKS[task], recording if mode == "replay" else None, out, int(os.environ["RANK"]))
    importlib.import_module("system.exits").exit_process(code)


def launch(mode: str, recording: Path, out: Path, task: str) -> bool:
    """Both ranks of a task, with a thread each; whether they trained to the end."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    log = (out / "log").open("w")
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, "rank", mode, str(recording), str(out), task], env=env, stdout=log, stderr=log)
    lines = (out / "log").read_text().splitlines()
    print(task, mode, "done" if done.returncode == 0 else "\n".join(["FAILED:", *lines[-30:]]), flush=True)
    return done.returncode == 0


def metrics_of(folder: Path) -> list[dict]:
    lines = next(folder.glob("logs/exp_*/metrics.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines]


def compare_task(old: Path, new: Path) -> dict:
    """Gradients: ||new - old|| / ||old|| of each optimizer step. Metrics: |new - old|, and how often it is not 0."""
    from safetensors.torch import load_file

    squares = defaultdict(lambda: [0.0, 0.0])
    for file in sorted(old.glob("grad_*.safetensors")):
        a, b, number = load_file(file), load_file(new / file.name), int(file.stem.split("_")[2])
        for name in a:
            squares[number][0] += (a[name].double() - b[name].double()).square().sum().item()
            squares[number][1] += a[name].double().square().sum().item()
    assert squares and len(list(new.glob("grad_*"))) == len(list(old.glob("grad_*"))), (old, new)
    gradients = [math.sqrt(d / n) if n else (0.0 if d == 0 else math.inf) for d, n in squares.values()]
    changed, missing, extra = {}, set(), set()
    for a, b in zip(metrics_of(old), metrics_of(new), strict=True):
        missing |= {name for name in a if name.startswith("train/")} - b.keys()
        extra |= {name for name in b if name.startswith("train/")} - a.keys()
        for name in (name for name in a if name.startswith("train/") and name in b):
            if a[name] != b[name] and not (a[name] != a[name] and b[name] != b[name]):
                kept = changed.setdefault(name, {"steps": 0, "largest": 0.0, "of": 0.0, "ratio": 0.0})
                kept["steps"] += 1
                difference = abs(a[name] - b[name])
                if difference >= kept["largest"]:
                    kept["largest"], kept["of"] = difference, a[name]
                kept["ratio"] = max(kept["ratio"], abs(b[name]) / abs(a[name]) if a[name] else math.inf)
    syncs = [[(folder / file.name).read_text() for folder in (old, new)] for file in old.glob("syncs_*.jsonl")]
    syncs = [pair for texts in syncs for pair in zip(*map(str.splitlines, texts), strict=True)]
    report = {
        "optimizer_steps": len(gradients),
        "gradients_bitwise": sum(g == 0 for g in gradients),
        "gradient_largest_relative_difference": max(gradients),
        "syncs_changed": sum(a != b for a, b in syncs),
        "metrics_changed": {n: v for n, v in changed.items() if not any(word in n for word in ROUNDING)},
        "rounding_changed": {n: v for n, v in changed.items() if any(word in n for word in ROUNDING)},
        "metrics_missing": sorted(missing),
        "metrics_new": sorted(extra),
    }
    same = report["gradients_bitwise"] == len(gradients)
    return {"equal": same and not (report["syncs_changed"] or changed or missing), **report}


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    mode, *rest = words or ["help"]
    if mode == "rank":
        rank_main(rest[0], Path(rest[1]), Path(rest[2]), rest[3])
    folders = [Path(word).absolute() for word in rest[: 1 if mode == "record" else 2]]
    if mode in ("record", "replay"):
        tasks = rest[len(folders) :] or TASKS
        return not all([launch(mode, folders[0] / task, folders[-1] / task, task) for task in tasks])
    if mode != "compare":
        raise SystemExit(__doc__)
    old, new = folders
    found = {task: compare_task(old / task, new / task) for task in TASKS if (new / task).is_dir()}
    text = json.dumps({"steps": STEPS, "tasks": found}, indent=1)
    print(text)
    for word in sys.argv[1:]:
        if word.startswith("--out="):
            Path(word.removeprefix("--out=")).write_text(text + "\n")
    print("differ:", [task for task in found if not found[task]["equal"]], "equal to the bit:", end=" ")
    print([task for task in found if found[task]["equal"]])
    return not (found and all(report["equal"] for report in found.values()))


if __name__ == "__main__":
    sys.exit(main())
