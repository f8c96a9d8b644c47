"""Golden runs: what a change of the code does to training, to the bit, on rollouts that were recorded before it.

    python bench/golden.py record FOLDER [TASK ...]            run each task with the real engine, keep what it sampled
    python bench/golden.py replay FOLDER OUT [TASK ...]        train on what was sampled, without vLLM
    python bench/golden.py compare FOLDER OUT [--out=FILE]     every number of every step, side by side

--ranks=N: this many ranks train, 2 without it; a split job has one more, which generates.

A recording holds the reply to each request, a digest of the weights that each sync sent, the gradients that the
optimizer saw, the weights that each of its steps left, and the metrics of each step. In a replay a stand-in for vLLM
answers each request from the recording, and the recorded weights take the place of the policy's after each optimizer
step, so that every step is compared on its own; all else is the code of the checkout where it is run.

How far a response has come when new weights arrive depends on time, with grpo.async_grpo. So the recording also has
the number of tokens that each reply had at each sync, and a replay gives as many, whenever it is asked for them.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path[:0] = [str(Path.cwd()), str(Path.cwd() / "tests" / "helpers")]

STEPS = 20
SMOKE = "configs/smoke.yaml"
ASYNC = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
# Some responses outlast their step: hot ones ramble, and a rank's engine has room for 256 at once.
LONG = ("grpo.num_prompts_per_step=32", "policy.generation.temperature=1.3", "policy.generation.max_new_tokens=24")
LONG += ("policy.max_total_sequence_length=64", "grpo.async_grpo.max_trajectory_age_steps=2")
SPLIT = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
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
    "filter": [SMOKE, "policy.generation.top_p=0.9", "policy.generation.top_k=6", "policy.ppo_epochs=2"],
    "lora": [
        *(SMOKE, "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=8"),
        *("policy.optimizer.kwargs.lr=3e-3", "loss_fn.reference_policy_kl_penalty=0.01"),
    ],
    "async": [SMOKE, *ASYNC, *LONG],
    "async_carried": [SMOKE, *ASYNC, *LONG, "policy.generation.max_new_tokens=6"],  # on two ranks, too
    "async_two_turns": [
        *("examples/arithmetic/two_turns.yaml", *ASYNC, *LONG, "grpo.use_dynamic_sampling=true"),
        "grpo.dynamic_sampling_max_gen_batches=99",
    ],
    "split": [SMOKE, *SPLIT],
    "async_split": [
        *(SMOKE, *ASYNC, *LONG, *SPLIT, "grpo.async_grpo.in_flight_weight_updates=true"),
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false",
    ],
    "async_split_drained": [SMOKE, *ASYNC, *LONG, *SPLIT],
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
    replay the recorded weights take the place of its own, which must differ by nothing: how much they do is written."""
    import torch
    from safetensors.torch import load_file, save_file
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    count = 0
    moved = (folder / f"moved_{rank}.jsonl").open("w", buffering=1)

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
            largest = 0.0
            for key, tensor in load_file(recording / name).items():
                own = weights[key].to_local()
                if not torch.equal(own, tensor):
                    largest = max(largest, (own - tensor).abs().max().item())
                own.copy_(tensor)
            moved.write(json.dumps([count, largest]) + "\n")
        count += 1

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def recorder(engine_class: type, folder: Path, rank: int, recording: Path | None) -> type:
    """The engine, which writes down what it samples, and digests of the weights that it is given."""
    import numpy as np
    import torch

    samples = (folder / f"samples_{rank}.jsonl").open("w", buffering=1)
    syncs = (folder / f"syncs_{rank}.jsonl").open("w", buffering=1)
    asked: dict[str, tuple[str, list]] = {}  # request -> its key, and [version, number of tokens at its end] of each

    class Recorder(engine_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.llm.version = -1
            self.inner = self.llm.llm_engine
            self.inner_add, self.inner_step = self.inner.add_request, self.inner.step
            self.inner.add_request, self.inner.step = self.add_request, self.step_of_inner

        def add_request(self, request_id, prompt, params, **more):
            key = request_key(prompt["prompt_token_ids"], params.seed, params.temperature, self.llm.version)
            asked[request_id] = key, []
            return self.inner_add(request_id, prompt, params, **more)

        def step_of_inner(self):
            outputs = self.inner_step()
            for output in outputs:
                if output.finished:
                    reply, (key, versions) = output.outputs[0], asked.pop(output.request_id)
                    ids, flat = list(reply.token_ids), reply.logprobs
                    places = zip(ids, flat.start_indices, flat.end_indices, strict=True)
                    logps = [flat.logprobs[flat.token_ids.index(*place)] for place in places]
                    versions.append([self.llm.version, len(ids)])
                    samples.write(json.dumps([key, ids, logps, reply.finish_reason, versions]) + "\n")
            return outputs

        def sync(self, weights, version):
            if recording and self.inner.has_unfinished_requests():
                self.step()  # else what is drawn while this rank waits for others depends on time
            for state in self.inner.output_processor.request_states.values():
                asked[state.external_req_id][1].append([self.llm.version, state.detokenizer.num_output_tokens()])
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
            self.requests[request_id].known = known[key]

        def step(self):
            """Each reply comes as far as it came with these weights."""
            outputs = []
            for name, request in list(self.requests.items()):
                (ids, logps, finish_reason, versions), reply = request.known, request.reply
                num_tokens = max((num for version, num in versions if version <= self.llm.version), default=0)
                for i in range(len(reply.token_ids), num_tokens):
                    reply.token_ids.append(ids[i])
                    reply.logprobs.append({ids[i]: logps[i]})
                    request.detokenizer.update([ids[i]], False)  # it says how many there are
                if self.llm.version >= versions[-1][0]:
                    reply.finish_reason = finish_reason
                    del self.requests[name]
                    outputs.append(SimpleNamespace(request_id=name, outputs=[reply], finished=True))
            if not outputs:
                time.sleep(0.001)  # others use the core
            return outputs

    class Replayer(fake_vllm.LLM):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.llm_engine = Requests(self)

    return Replayer


def run(words: list[str], recording: Path | None, out: Path, rank: int) -> int:
    """This rank's part of a run, written to `out`: with vLLM, or from a recording. Returns its exit code."""
    engine, grpo = (importlib.import_module(name) for name in ("engine", "grpo"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_gradients(out, rank, recording))
        patched = recorder(engine.VLLMEngine, out, rank, recording)
        engine_class = engine.VLLMEngine  # of which the first patch leaves no name
        for module in list(sys.modules.values()):
            if vars(module).get("VLLMEngine") is engine_class:
                stack.enter_context(mock.patch.object(module, "VLLMEngine", patched))
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
    importlib.import_module("base.system.exits").exit_process(code)


def launch(mode: str, recording: Path, out: Path, task: str, num_ranks: int) -> bool:
    """All ranks of a task, with a thread each; whether they trained to the end."""
    out.mkdir(parents=True)
    num_processes = num_ranks + (SPLIT[0] in TASKS[task])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command.append(__file__)
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
    moved = [json.loads(line)[1] for file in new.glob("moved_*.jsonl") for line in file.read_text().splitlines()]
    syncs = [[(folder / file.name).read_text() for folder in (old, new)] for file in old.glob("syncs_*.jsonl")]
    syncs = [pair for texts in syncs for pair in zip(*map(str.splitlines, texts), strict=True)]
    report = {
        "optimizer_steps": len(gradients),
        "gradients_bitwise": sum(g == 0 for g in gradients),
        "gradient_largest_relative_difference": max(gradients),
        "weights_changed": sum(largest > 0 for largest in moved),
        "weight_largest_difference": max(moved, default=0.0),
        "syncs_changed": sum(a != b for a, b in syncs),
        "metrics_changed": {n: v for n, v in changed.items() if not any(word in n for word in ROUNDING)},
        "rounding_changed": {n: v for n, v in changed.items() if any(word in n for word in ROUNDING)},
        "metrics_missing": sorted(missing),
        "metrics_new": sorted(extra),
    }
    same = report["gradients_bitwise"] == len(gradients) and not (report["weights_changed"] or report["syncs_changed"])
    return {"equal": same and not (changed or missing), **report}


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
    mode, *rest = words or ["help"]
    if mode == "rank":
        rank_main(rest[0], Path(rest[1]), Path(rest[2]), rest[3])
    folders = [Path(word).absolute() for word in rest[: 1 if mode == "record" else 2]]
    if mode in ("record", "replay"):
        tasks = rest[len(folders) :] or TASKS
        num_ranks = int(options.get("ranks", 2))
        return not all([launch(mode, folders[0] / task, folders[-1] / task, task, num_ranks) for task in tasks])
    if mode != "compare":
        raise SystemExit(__doc__)
    old, new = folders
    found = {task: compare_task(old / task, new / task) for task in TASKS if (new / task).is_dir()}
    text = json.dumps({"steps": STEPS, "tasks": found}, indent=1)
    print(text)
    if "out" in options:
        Path(options["out"]).write_text(text + "\n")
    print("differ:", [task for task in found if not found[task]["equal"]], "equal to the bit:", end=" ")
    print([task for task in found if found[task]["equal"]])
    return not (found and all(report["equal"] for report in found.values()))


if __name__ == "__main__":
    sys.exit(main())
