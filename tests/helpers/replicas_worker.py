"""The four ranks of tests/system/test_replicas.py: replicas_worker.py MODEL_FOLDERS RESULT_FOLDER

Writes what the same four ranks compute as two replicas of two, as one of four, as four of one, and, beside each other,
as ranks of jobs of one. vLLM is a stand-in: nothing here generates.
"""

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import fake_vllm

fake_vllm.install()

import numpy as np
import torch
import torch.distributed as dist
from collectives import Collectives
from count_memory import differences
from dist_case import adapted_policy, make_samples, packs_of
from loop import make_run, train, train_once
from optimizer_case import ADAMW, check_offload
from safetensors.torch import load_file

import config
import grpo
from check.memory_plan import Plan
from engine import Completion, check_canary, sync_weights
from hf.weights import full_tensors, save_adapter, save_hf
from model import load_policy
from optim import build_optimizer
from run import checkpoint
from system.exits import StopRun, exit_process
from system.ranks import Ranks, fsdp_mesh, gather, start_process_group

CPU = torch.device("cpu")
VOCAB = 211


def policy_of(folder, mesh, **options):
    model = load_policy(folder, device=CPU, mesh=mesh, **options)
    model.temperature = 0.8
    return model


def place(mesh) -> Ranks:
    """This rank's among those that share the samples: all of a mesh with replicas."""
    coordinate = mesh.get_coordinate()
    rank = int(np.ravel_multi_index(coordinate, mesh.shape))
    return Ranks(rank, mesh.size(), rank, 1)


def relative(a, b):
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in a)


def gradients(meshes, make):
    """By mesh, against one rank: of a step of the loop in several packs the largest relative error of a gradient, and
    that of its norm."""
    samples, adv_B = make_samples(VOCAB)
    found = {}
    for name, mesh in meshes.items():
        metrics, grads = train_once(make(mesh), samples, adv_B, packs_of(60), place(mesh))
        alike = 4 // mesh.size()  # jobs beside each other, whose tokens the loss counted together
        found[name] = alike * metrics["grad_norm"], {key: alike * grad for key, grad in grads.items()}
    norm, alone = found["1"]
    return {name: [relative(grads, alone), abs(its / norm - 1)] for name, (its, grads) in found.items()}


def digest(tensors):
    return sha256(b"".join(x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


def long_run(folder, mesh, num_steps, **keys):
    """A run of AdamW whose gradients are clipped, and what has rested of it."""
    samples, adv_B = make_samples(VOCAB)
    cfg = packs_of(10_000)
    cfg = replace(cfg, policy=replace(cfg.policy, max_grad_norm=0.05), grpo=replace(cfg.grpo, **keys))
    model = policy_of(folder, mesh)
    optimizer = build_optimizer(model, ADAMW)
    return make_run(model, cfg, place(mesh), optimizer=optimizer, num_steps=num_steps), samples, adv_B


def replicas_after(folder, mesh, num_steps):
    """Digests of weights and moments of every rank before and after."""
    run, samples, adv_B = long_run(folder, mesh, num_steps)
    before = digest(param.to_local() for param in run.model.parameters())
    norms = []
    clip = grpo.clip_grad_norm
    with mock.patch.object(grpo, "clip_grad_norm", lambda *args: norms.append(clip(*args)) or norms[-1]):
        train(run, samples, adv_B)
    states = [x.to_local() for state in run.optimizer.state.values() for x in state.values() if x.dim()]
    weights = [param.to_local() for param in run.model.parameters()]
    after = digest([*weights, *states])
    plan = Plan(run.cfg, run.model.config, VOCAB, dist.get_world_size())
    replicated = replace(run.cfg.policy.dtensor_cfg, dp_replicate_size=mesh.size(0))
    plan = replace(plan, cfg=replace(run.cfg, policy=replace(run.cfg.policy, dtensor_cfg=replicated)))
    memory = [
        [plan.shards[name], sum(x.nbytes for x in its)] for name, its in (("weights", weights), ("moments", states))
    ]
    return {"before": gather(before), "after": gather(after), "norms": gather(norms), "memory": gather(memory)}


def spoiled(fault):
    """On this rank a number goes wrong in the next step."""
    loss, clip, minibatches = grpo.compute_loss, grpo.clip_grad_norm, grpo.make_minibatches

    def compute_loss(*args):
        value, metrics = loss(*args)
        return value, metrics | {"loss": metrics["loss"] + float("inf")}

    def clip_grad_norm(model, max_norm):  # behind the reductions: of one replica alone
        next(model.parameters()).grad.to_local()[0] = float("nan")
        return clip(model, max_norm)

    def make_minibatches(*args):
        made = minibatches(*args)
        made[-1].micros[-1].sampler_logp_R[-1] = float("nan")
        return made

    return mock.patch.object(grpo, fault, locals()[fault])


def verdicts(folder, mesh):
    """Fault -> of every rank: number of bad steps, whether weights moved, whether they are finite."""
    found = {}
    for fault in ("compute_loss", "clip_grad_norm", "make_minibatches"):
        run, samples, adv_B = long_run(folder, mesh, 1, max_bad_steps=1, logp_gap_limit=100)
        before = digest(param.to_local() for param in run.model.parameters())
        with spoiled(fault) if dist.get_rank() == 3 else nullcontext():
            train(run, samples, adv_B)
        shards = [param.to_local() for param in run.model.parameters()]
        is_finite = all(bool(shard.isfinite().all()) for shard in shards)
        found[fault] = gather([run.state.num_bad_steps, digest(shards) != before, is_finite])
    return found


class OwnCopy:
    """An engine of one rank: the whole model beside its shards, as far as a sync has brought it."""

    dtype = torch.float32
    max_total_tokens, vocab_size = 64, VOCAB

    def __init__(self, folder):
        self.model = policy_of(folder, None)
        self.is_stale = False

    def wake(self, part):
        pass

    def sync(self, weights, version):
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                params[name].copy_(params[name] if self.is_stale else tensor)
        return 0

    @torch.no_grad()
    def generate(self, prompts, seeds, options, *, may_stop=True):
        new = np.random.default_rng(dist.get_rank()).integers(0, VOCAB, options.max_new_tokens).astype(np.int32)
        ids = torch.tensor([*prompts[0], *new.tolist()])
        position_T = torch.arange(len(ids) - 1)
        pos_R, target_R = position_T[-len(new) :], ids[-len(new) :]
        logp_R, _ = self.model(ids[:-1], position_T, np.array([0, len(position_T)]), pos_R, target_R)
        return [Completion(new, logp_R.numpy(), "length", np.zeros_like(new))]


def canary(folder, mesh):
    """Of every rank: the gap after a sync, and what stops the run where rank 3 alone was left out of one."""
    run, samples, adv_B = long_run(folder, mesh, 1)
    train(run, samples, adv_B)
    engine = OwnCopy(folder)
    sync_weights(run.model, engine, 1)
    gap = check_canary(run.model, engine, 1e-5, CPU, "first")
    run.num_steps = 2
    train(run, samples, adv_B)
    engine.is_stale = dist.get_rank() == 3
    sync_weights(run.model, engine, 2)
    try:
        stale = check_canary(run.model, engine, 1e-5, CPU, "then")
    except StopRun as error:
        stale = str(error)
    return {"gap": gather(gap), "stale": gather(stale)}


def step_collectives(folders, meshes):
    """[family, mesh, blocks, micro-batches, group -> collective -> [number, bytes]] of a step."""
    found = []
    samples, adv_B = make_samples(VOCAB)
    for family, name, max_tokens in [
        ("qwen3", "2 x 2", 10_000),
        ("qwen3", "4", 10_000),
        ("three blocks", "2 x 2", 60),
        ("qwen2", "2 x 2", 60),
    ]:
        mesh, micros = meshes[name], []
        make = grpo.make_minibatches
        recording = mock.patch.object(grpo, "make_minibatches", lambda *a: micros.append(make(*a)) or micros[-1])  # noqa: B023
        model = policy_of(folders / family, mesh)
        optimizer = build_optimizer(model, ADAMW)
        run = make_run(model, packs_of(max_tokens), place(mesh), optimizer=optimizer)
        with recording, Collectives() as collectives:
            train(run, samples, adv_B)
        group_names = dict(zip((group.group_name for group in mesh.get_all_groups()), mesh.mesh_dim_names, strict=True))
        numbers, sizes = Counter(), Counter()
        for collective, num_bytes, group in collectives.seen:
            key = f"{group_names.get(group, 'world') if mesh.ndim > 1 else 'shard or world'} {collective}"
            numbers[key] += 1
            sizes[key] += num_bytes
        found.append(
            {
                "case": [family, name],
                "blocks": len(model.model["layers"]),
                "micro_batches": len(micros[0][0].micros),
                "numbers": numbers,
                "bytes": sizes,
                "shard_bytes": sum(param.to_local().nbytes for param in model.parameters()),
            }
        )
    return found


def sync_gathers(folder, meshes):
    """Whether a sync is of all replicas the same, and over which group it gathers."""
    model = policy_of(folder, meshes["2 x 2"])
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(1 + 2**-13)  # the files' numbers fit into bfloat16
    expected = {name: param.full_tensor() for name, param in model.named_parameters()}
    with Collectives() as collectives:
        sent = dict(full_tensors(model, torch.bfloat16))
    shard = meshes["2 x 2"].get_group("shard").group_name
    return {
        "same": all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in sent.items()),
        "complete": list(sent) == list(expected),
        "by_shard_group": [(name, group == shard) for name, _, group in collectives.seen],
        "bytes": [sum(bytes for _, bytes, _ in collectives.seen), sum(tensor.nbytes for tensor in sent.values())],
        "digests": gather(digest(sent.values())),
    }


def whole_state(model, optimizer):
    """Digest of the whole weights and moments."""
    moments = [x for param in model.parameters() for x in optimizer.state[param].values() if x.dim()]
    return digest(x.full_tensor() for x in [*model.parameters(), *moments])


def checkpoints_and_exports(folder, meshes, work):
    """A checkpoint of each mesh of all ranks, loaded by each mesh."""
    found = {"states": {}, "files": {}, "exports": []}
    for saved in ("2 x 2", "4", "4 x 1"):
        run, samples, adv_B = long_run(folder, meshes[saved], 2)
        train(run, samples, adv_B)
        states = [whole_state(run.model, run.optimizer)]
        with checkpoint.Saver(work / saved, config.CheckpointingConfig(), place(meshes[saved])) as saver:
            reference = {n: p.to_local().detach().clone() for n, p in run.model.named_parameters()}
            saver.save(2, run.model, run.optimizer, {}, reference, {})
        for name in meshes if saved == "2 x 2" else ["2 x 2"]:
            model, mesh = policy_of(folder, meshes[name]), meshes[name]
            optimizer = build_optimizer(model, ADAMW)
            shards = {n: torch.zeros_like(p.to_local()) for n, p in model.named_parameters()}
            checkpoint.load(work / saved, model, optimizer, place(mesh), shards, mode=None)
            assert all(torch.equal(p.to_local(), shards[n]) for n, p in model.named_parameters())
            states.append(whole_state(model, optimizer))
            export = work / f"{saved} by {name}"
            save_hf(model, export, folder, dtype=torch.bfloat16)
            if dist.get_rank() == 0:
                found["exports"].append([saved, sha256((export / "model.safetensors").read_bytes()).hexdigest()])
        found["states"][saved] = gather(states)
        files = sorted((work / saved / "step_000002").glob("*.safetensors"))
        found["files"][saved] = {file.name: file.stat().st_size for file in files}
    return found


def lora(folder, meshes, work):
    """Adapters' gradients, as `gradients` has them; digests of what a sync sends and of a PEFT folder, by mesh."""

    def make(mesh):
        model = adapted_policy(folder, mesh)
        model.temperature = 0.8
        return model

    sent = {}
    meshes = {name: meshes[name] for name in ("2 x 2", "1")}
    for name, mesh in meshes.items():
        model = make(mesh)
        save_adapter(model, work / f"adapter of {name}", {}, "0" * 64)
        stored = load_file(work / f"adapter of {name}" / "adapter_model.safetensors")
        in_order = (stored[key] for key in sorted(stored))  # its header's order is free
        sent[name] = [digest(dict(full_tensors(model, torch.float32)).values()), digest(in_order)]
    return {"gradients": gradients(meshes, make), "sent": gather(sent)}


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    folders, results = Path(sys.argv[1]), Path(sys.argv[2])
    ranks, _ = start_process_group(tp_size=1)
    meshes = {"2 x 2": fsdp_mesh("cpu", 2), "4": fsdp_mesh("cpu"), "4 x 1": fsdp_mesh("cpu", 4)}
    meshes |= {"2": meshes["2 x 2"]["shard"], "1": meshes["4 x 1"]["shard"]}
    if sys.argv[3:] == ["memory"]:
        cases = (("qwen3", "2 x 2"), ("qwen3 tied", "4 x 1"), ("lora", "2 x 2"))
        facts = {f"{case}, {name}": differences(case, meshes[name]) for case, name in cases}
    else:
        facts = measured(folders, results, meshes)
    (results / f"rank_{ranks.rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    exit_process(0)


def measured(folders, results, meshes):
    grpo.check_versions = lambda *_: None  # each step trains the same samples
    folder, mesh = folders / "qwen3", meshes["2 x 2"]
    check_offload(folder, mesh, ADAMW, 2)
    return {
        "gradients": gradients(meshes, lambda its: policy_of(folder, its)),
        "lora": lora(folder, meshes, results),
        "replicas": replicas_after(folder, mesh, 20),
        "verdicts": verdicts(folder, mesh),
        "canary": canary(folder, mesh),
        "collectives": step_collectives(folders, meshes),
        "sync": sync_gathers(folder, meshes),
        "checkpoints": checkpoints_and_exports(folder, meshes, results),
    }


if __name__ == "__main__":  # by forks: torchrun's ranks import everything four times, in half of the test's time
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    torch.multiprocessing.start_processes(main, nprocs=4, start_method="fork")
