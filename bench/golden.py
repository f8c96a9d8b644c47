"""Golden runs: what a change of the code does to training, to the bit, on rollouts that were recorded before it.

    python bench/golden.py record FOLDER [TASK ...]            run each task with the real engine, keep what it sampled
    python bench/golden.py replay FOLDER OUT [TASK ...]        train on what was sampled, without an engine
    python bench/golden.py compare FOLDER OUT [--out=FILE]     every number of every step, side by side

A recording holds what the engine returned, the weights it was given, the gradients that the optimizer saw, the weights
that each of its steps left, and the metrics of each step. A replay answers each request of the rollout from the
recording, and puts the recorded weights into the policy after each optimizer step and at each sync, so that every
step is compared on its own. Run it in the checkout that is to be measured; it finds the engine in `engine.py`, or in
`rollout.py` as it was before the house was built.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
import types
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, os.getcwd())

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


def keep_gradients(folder: Path, rank: int, recording: Path | None) -> None:
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

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def recorder(engine_class: type, folder: Path, rank: int) -> type:
    """The engine, which writes down what it samples and the weights that it is given."""
    from safetensors.torch import save_file

    file = (folder / f"samples_{rank}.jsonl").open("w", buffering=1)
    asked: dict[str, tuple] = {}

    class Recorder(engine_class):
        def generate(self, prompts, seeds, *options, **more_options):
            completions = super().generate(prompts, seeds, *options, **more_options)
            temperature = options[0].temperature if options else more_options["temperature"]
            for prompt, seed, completion in zip(prompts, seeds, completions, strict=True):
                key = request_key(prompt, seed, temperature, self.weight_version)
                ids, logps = completion.ids.tolist(), completion.logps.tolist()
                file.write(json.dumps([key, ids, logps, completion.finish_reason]) + "\n")
            return completions

        def start(self, prompts, seeds, options, *more):
            request_ids = super().start(prompts, seeds, options, *more)
            asked.update(zip(request_ids, ((*pair, options) for pair in zip(prompts, seeds, strict=True)), strict=True))
            return request_ids

        def wait(self, request_ids, *more, **more_options):
            completions = super().wait(request_ids, *more, **more_options)
            for request_id, completion in zip(request_ids, completions, strict=True):
                prompt, seed, options = asked.pop(request_id)
                key = request_key(prompt, seed, options.temperature, self.weight_version)
                ids, logps = completion.ids.tolist(), completion.logps.tolist()
                file.write(json.dumps([key, ids, logps, completion.finish_reason]) + "\n")
            return completions

        def sync(self, weights, version):
            weights = {name: tensor.clone() for name, tensor in weights}
            if rank == 0:
                save_file(weights, folder / f"weights_{version:04d}.safetensors")
            super().sync(weights.items(), version)

    return Recorder


def replayer(completion_class: type, recording: Path, policy: list) -> type:
    """An engine that knows only the recording. policy: holds the model as soon as it is loaded."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from torch.distributed.tensor import DTensor, distribute_tensor

    known = {}
    for file in recording.glob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            key, *found = json.loads(line)
            known[key] = found

    class Replayer:
        weight_version = -1

        def __init__(self, folder, tokenizer, cfg):
            self.vocab_size, self.max_total_tokens = tokenizer.vocab_size, cfg.policy.max_total_sequence_length
            self.dtype = getattr(torch, cfg.policy.generation.vllm_cfg.precision or cfg.policy.precision)

        def generate(self, prompts, seeds, options=None, *, temperature=None, **_):
            temperature = options.temperature if options else temperature
            found = [
                known[request_key(p, s, temperature, self.weight_version)] for p, s in zip(prompts, seeds, strict=True)
            ]
            versions = [np.full(len(i), self.weight_version, np.int32) for i, _, _ in found]
            found = [(np.array(i, np.int32), np.array(p, np.float32), end) for i, p, end in found]
            return [completion_class(*each, version) for each, version in zip(found, versions, strict=True)]

        def start(self, prompts, seeds, options, priority=0):
            return self.generate(prompts, seeds, options)

        def wait(self, completions, *_, **__):
            return completions

        @torch.no_grad()
        def sync(self, weights, version):
            sent, kept = dict(weights), load_file(recording / f"weights_{version:04d}.safetensors")
            assert sent.keys() == kept.keys()
            for name, param in policy[0].named_parameters():
                whole = kept[name]
                if isinstance(param, DTensor):
                    whole = distribute_tensor(whole, param.device_mesh, param.placements)
                param.copy_(whole)
            self.weight_version = version
            return 0

        def sleep(self, **_):
            pass

        def wake(self, *_):
            pass

    return Replayer


def rank_main(mode: str, recording: Path, out: Path, task: str) -> int:
    """One rank of one task."""
    rank, policy = int(os.environ["RANK"]), []
    new = Path("engine.py").is_file()
    model = importlib.import_module("model")
    load_policy = model.load_policy

    def load_and_keep(*args, **kwargs):
        policy[:] = [load_policy(*args, **kwargs)]
        return policy[0]

    model.load_policy = load_and_keep
    if mode == "replay":  # without the minutes and the memory of vLLM
        fake = types.ModuleType("vllm")
        fake.LLM = fake.SamplingParams = type("Absent", (), {})
        params = types.ModuleType("vllm.sampling_params")
        params.RequestOutputKind = fake.LLM
        sys.modules |= {"vllm": fake, "vllm.sampling_params": params}
    home = importlib.import_module("engine" if new else "rollout")
    if mode == "replay":
        home.Engine = replayer(home.Completion, recording, policy)
    else:
        home.Engine = recorder(home.Engine, out, rank)
    keep_gradients(out, rank, recording if mode == "replay" else None)
    sys.argv = ["grpo.py", *TASKS[task], *QUIET, f"logger.log_dir={out / 'logs'}"]
    grpo = importlib.import_module("grpo")
    code = grpo.main()
    leave = importlib.import_module("system.exits").exit_process if new else importlib.import_module("runtime").leave
    leave(code)
    return code


def launch(mode: str, recording: Path, out: Path, task: str) -> None:
    """Both ranks of a task, with a thread each."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    log = (out / "log").open("w")
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, "rank", mode, str(recording), str(out), task], env=env, stdout=log, stderr=log)
    lines = (out / "log").read_text().splitlines()
    print(task, mode, "done" if done.returncode == 0 else f"FAILED: {lines[-30:]}", flush=True)


def metrics_of(folder: Path) -> list[dict]:
    lines = next(folder.glob("logs/exp_*/metrics.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines]


def compare_task(old: Path, new: Path) -> dict:
    """Gradients: ||new - old|| / ||old|| of each optimizer step. Metrics: |new - old|, and how often it is not 0."""
    import torch
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
    with contextlib.suppress(ValueError):
        torch.set_num_threads(1)
    bitwise = sum(g == 0 for g in gradients)
    return {
        "optimizer_steps": len(gradients),
        "gradients_bitwise": bitwise,
        "gradient_largest_relative_difference": max(gradients),
        "metrics_changed": {n: v for n, v in changed.items() if not any(word in n for word in ROUNDING)},
        "rounding_changed": {n: v for n, v in changed.items() if any(word in n for word in ROUNDING)},
        "metrics_missing": sorted(missing),
        "metrics_new": sorted(extra),
    }


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    mode, *rest = words
    if mode == "rank":
        rank_main(rest[0], Path(rest[1]), Path(rest[2]), rest[3])
    elif mode == "record":
        for task in rest[1:] or TASKS:
            launch("record", Path(rest[0]) / task, Path(rest[0]).absolute() / task, task)
    elif mode == "replay":
        for task in rest[2:] or TASKS:
            launch("replay", Path(rest[0]).absolute() / task, Path(rest[1]).absolute() / task, task)
    elif mode == "compare":
        tasks = [task for task in TASKS if (Path(rest[1]) / task).is_dir()]
        found = {task: compare_task(Path(rest[0]) / task, Path(rest[1]) / task) for task in tasks}
        text = json.dumps({"steps": STEPS, "tasks": found}, indent=1)
        print(text)
        for word in sys.argv[1:]:
            if word.startswith("--out="):
                Path(word.removeprefix("--out=")).write_text(text + "\n")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
