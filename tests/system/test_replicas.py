"""HSDP: four ranks as two replicas of two compute what four and one do, and the replicas stay one policy.

The same four ranks compute as two replicas of two, as one of four, as four of one, and, beside each other, as ranks of
jobs of one. vLLM is a stand-in: nothing here generates.
"""

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from dist_case import make_samples, packs_of
from hf_folders import FAMILIES, layout_of, make_hf_folder
from loop import make_run, train, train_once
from optimizer_case import ADAMW
from ranks import ranks
from samples import of_version
from torch.distributed.fsdp import FSDPModule

import config
import grpo
from base.hf.weights import save_hf
from base.plan.memory_plan import Plan
from base.system.exits import StopRun
from base.system.ranks import Ranks, fsdp_mesh, gather, start_process_group
from gap import check_canary
from head import HeadOptions, response_logps
from model import load_policy
from optim import build_optimizer
from records import Completion, make_tokens
from run import checkpoint, restore

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCAB = 211
HEAD = HeadOptions(temperature=0.8)


def policy_of(folder, mesh, **options):
    return load_policy(folder, device=CPU, mesh=mesh, **options)


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
        metrics, grads = train_once(make(mesh), samples, adv_B, packs_of(60), place(mesh), vocab=None)
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
    return make_run(model, cfg, place(mesh), optimizer=optimizer, num_steps=num_steps, vocab=None), samples, adv_B


def train_all(run, samples, adv_B):
    """The steps of the run, each on these samples as the weights before it would have drawn them."""
    for version in range(run.num_steps):
        run.num_steps = version + 1
        train(run, [of_version(sample, version) for sample in samples], adv_B)


def replicas_after(folder, mesh, num_steps):
    """Digests of weights and moments of every rank before and after."""
    run, samples, adv_B = long_run(folder, mesh, num_steps)
    before = digest(param.to_local() for param in run.model.parameters())
    norms = []
    clip = grpo.clip_grad_norm
    with mock.patch.object(grpo, "clip_grad_norm", lambda *args: norms.append(clip(*args)) or norms[-1]):
        train_all(run, samples, adv_B)
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


def verdicts(folder, mesh):
    """A gradient of rank 3 goes wrong after the reductions, so of one replica alone. Of every rank: number of bad
    steps, whether weights moved, whether they are finite."""
    clip = grpo.clip_grad_norm

    def clip_grad_norm(model, max_norm):
        if dist.get_rank() == 3:
            next(model.parameters()).grad.to_local()[0] = float("nan")
        return clip(model, max_norm)

    run, samples, adv_B = long_run(folder, mesh, 1, max_bad_steps=1, logp_gap_limit=100)
    before = digest(param.to_local() for param in run.model.parameters())
    with mock.patch.object(grpo, "clip_grad_norm", clip_grad_norm):
        train(run, samples, adv_B)
    shards = [param.to_local() for param in run.model.parameters()]
    is_finite = all(bool(shard.isfinite().all()) for shard in shards)
    return gather([run.state.num_bad_steps, digest(shards) != before, is_finite])


class Sampling:
    """An engine of each rank that samples from the policy; a stale one is off by 0.05 nats a token."""

    max_total_tokens, vocab_size = 64, VOCAB

    def __init__(self, model, error):
        self.model = model
        self.error = error

    @torch.no_grad()
    def generate(self, prompts, seeds, options, *, may_stop=True):
        new = np.random.default_rng(dist.get_rank()).integers(0, VOCAB, options.max_new_tokens).astype(np.int32)
        ids = torch.tensor([*prompts[0], *new.tolist()])
        position_T = torch.arange(len(ids) - 1)
        pos_R, target_R = position_T[-len(new) :], ids[-len(new) :]
        inputs = (ids[:-1], position_T, layout_of(len(position_T)), pos_R)
        logp_R, _ = response_logps(self.model, inputs, target_R, HEAD)
        return [Completion(make_tokens(new, logp=logp_R.numpy() + self.error, mask=True), "length")]


def canary(folder, mesh):
    """Of every rank: the gap, and what stops the run where rank 3's engine alone is off by 0.05 nats, or by NaN."""
    model = policy_of(folder, mesh)
    found = {"gap": gather(check_canary(model, HEAD, Sampling(model, 0.0), 1e-5, CPU, "first"))}
    for name, error in (("stale", 0.05), ("nan", np.nan)):
        engine = Sampling(model, np.float32(error if dist.get_rank() == 3 else 0))
        try:
            reason = check_canary(model, HEAD, engine, 1e-5, CPU, "then")
        except StopRun as stop:
            reason = str(stop)
        found[name] = gather(reason)
    return found


def units_of(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def step_collectives(folders, mesh):
    """[family, blocks, micro-batches, group -> collective -> [number, bytes]] of a step."""
    found = []
    samples, adv_B = make_samples(VOCAB)
    for family, max_tokens, is_once in [("qwen3", 10_000, False), ("three blocks", 60, False), ("qwen2", 60, True)]:
        micros = []
        make = grpo.make_minibatches
        recording = mock.patch.object(grpo, "make_minibatches", lambda *a: micros.append(make(*a)) or micros[-1])  # noqa: B023
        model = policy_of(folders / family, mesh, defers_sync=is_once, keeps_gathered=is_once)
        optimizer = build_optimizer(model, ADAMW)
        run = make_run(model, packs_of(max_tokens), place(mesh), optimizer=optimizer, vocab=None)
        with recording, Collectives() as collectives:
            train(run, samples, adv_B)
        group_names = dict(zip((group.group_name for group in mesh.get_all_groups()), mesh.mesh_dim_names, strict=True))
        numbers, sizes = Counter(), Counter()
        for collective, num_bytes, group in collectives.seen:
            key = f"{group_names.get(group, 'world')} {collective}"
            numbers[key] += 1
            sizes[key] += num_bytes
        found.append(
            {
                "case": [family, is_once],
                "gathered": sum(not unit._get_fsdp_state()._fsdp_param_group.is_sharded for unit in units_of(model)),
                "blocks": len(model.model.layers),
                "micro_batches": len(micros[0][0].micros),
                "numbers": numbers,
                "bytes": sizes,
                "shard_bytes": sum(param.to_local().nbytes for param in model.parameters()),
            }
        )
    return found


def whole_state(model, optimizer):
    """Digest of the whole weights and moments."""
    moments = [x for param in model.parameters() for x in optimizer.state[param].values() if x.dim()]
    return digest(x.full_tensor() for x in [*model.parameters(), *moments])


def checkpoints_and_exports(folder, meshes, work):
    """A checkpoint of replicas, and one without, loaded and exported by other meshes."""
    found = {"states": {}, "files": {}, "exports": []}
    for saved, loaded in (("2 x 2", ["4", "1"]), ("4", ["2 x 2"])):
        run, samples, adv_B = long_run(folder, meshes[saved], 2)
        train_all(run, samples, adv_B)
        states = [whole_state(run.model, run.optimizer)]
        with checkpoint.Saver(work / saved, config.CheckpointingConfig(), place(meshes[saved])) as saver:
            reference = {n: p.to_local().detach().clone() for n, p in run.model.named_parameters()}
            saver.save(2, run.model, run.optimizer, {}, reference, {})
        for name in loaded:
            model, mesh = policy_of(folder, meshes[name]), meshes[name]
            optimizer = build_optimizer(model, ADAMW)
            shards = {n: torch.zeros_like(p.to_local()) for n, p in model.named_parameters()}
            restore.load(work / saved, config.CheckpointingConfig(), model, optimizer, place(mesh), shards)
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


@ranks(4, seconds=900, stand_in=True)
def facts_of_ranks(folders, work):
    start_process_group(tp_size=1)
    meshes = {"2 x 2": fsdp_mesh("cpu", 2), "4": fsdp_mesh("cpu"), "4 x 1": fsdp_mesh("cpu", 4)}
    meshes |= {"1": meshes["4 x 1"]["shard"]}
    folder, mesh = folders / "qwen3", meshes["2 x 2"]
    late = {name: meshes[name] for name in ("2 x 2", "1")}
    replicated = {name: meshes[name] for name in ("2 x 2", "4 x 1", "1")}
    return {
        "gradients": gradients(replicated, lambda its: policy_of(folder, its)),
        "late gradients": gradients(late, lambda its: policy_of(folder, its, defers_sync=True)),
        "replicas": replicas_after(folder, mesh, 8),
        "verdicts": verdicts(folder, mesh),
        "canary": canary(folder, mesh),
        "collectives": step_collectives(folders, mesh),
        "checkpoints": checkpoints_and_exports(folder, meshes, work),
    }


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folders = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen3"):  # tied, untied
        make_hf_folder(folders / family, **FAMILIES[family])
    make_hf_folder(folders / "three blocks", **FAMILIES["qwen3"], num_hidden_layers=3)
    return facts_of_ranks(folders, tmp_path_factory.mktemp("four_ranks"))


def test_gradient_and_its_norm_are_those_of_one_rank(four_ranks):
    """Of packs that differ in number and tokens. (tests/system/test_ranks.py has LoRA.)"""
    for rank in four_ranks:
        assert rank["gradients"].keys() == {"2 x 2", "4 x 1", "1"}
        found = [rank["gradients"], rank["late gradients"]]
        for errors in (error for by_mesh in found for error in by_mesh.values()):
            assert max(errors) <= 2e-6, errors


def test_after_eight_steps_the_replicas_are_equal_to_the_bit(four_ranks):
    """Weights and moments; the gradients were clipped. The clip norm of all ranks is one number."""
    facts = four_ranks[0]["replicas"]
    first, second, *others = facts["after"]
    assert [first, second] == others and first != second
    assert all(before != after for before, after in zip(facts["before"], facts["after"], strict=True))
    norms = facts["norms"]
    assert len(norms[0]) == 8 == len({*norms[0]}) and min(norms[0]) > 0.05 and all(its == norms[0] for its in norms)


def test_the_memory_plan_divides_by_the_ranks_of_a_replica(four_ranks):
    for (planned_weights, weights), (planned_moments, moments) in four_ranks[0]["replicas"]["memory"]:
        assert weights <= planned_weights <= 1.01 * weights and planned_moments == 2 * planned_weights
        assert moments == 2 * weights


def test_a_gradient_that_goes_wrong_on_one_replica_stops_the_step_on_all(four_ranks):
    """tests/command/test_numbers.py has the loss and the sampler's log-probabilities."""
    assert four_ranks[0]["verdicts"] == [[1, False, True]] * 4  # one bad step; weights did not move; they are finite


def test_an_engine_that_one_rank_left_stale_stops_all(four_ranks):
    canary = four_ranks[0]["canary"]
    assert max(canary["gap"]) <= 1e-6
    assert len({*canary["stale"]}) == 1
    assert canary["stale"][0].startswith("then: on a fixed prompt, sampler and trainer disagree by 0.0")
    assert len({*canary["nan"]}) == 1 and "disagree by nan" in canary["nan"][0]


def test_collectives_of_a_step_depend_on_blocks_and_micro_batches(four_ranks):
    """Of the model's part: of U units each is gathered in a forward, each block again in its backward, and all
    gradients reduced. Between replicas each unit's gradient goes once, and the norm. The rest is the samples' and the
    metrics', which neither blocks nor micro-batches make more."""
    cases = four_ranks[0]["collectives"]
    assert [case["micro_batches"] for case in cases] == [1, 2, 2] and not any(c["gathered"] for c in cases)
    assert all([c["numbers"] for c in rank["collectives"]] == [c["numbers"] for c in cases] for rank in four_ranks)
    for case in cases:
        blocks, packs, (family, is_once) = case["blocks"], case["micro_batches"], case["case"]
        units = blocks + (1 if family == "qwen2" else 3)
        numbers = {
            "shard _allgather_base_": packs * (units + blocks),
            "shard _reduce_scatter_base_": packs * units,
            "shard all_reduce": 1,  # the norm
            "shard all_gather_into_tensor": blocks + 2,  # the weight sync
        }
        if is_once:  # for both packs
            numbers["shard _allgather_base_"] = units
            numbers["shard _reduce_scatter_base_"] = units
        samples_and_metrics = {"world allreduce_": 3, "world allgather_": 4}
        assert case["numbers"] == numbers | samples_and_metrics | {"replicate allreduce_": units + 1}
        assert case["bytes"]["replicate allreduce_"] == case["shard_bytes"] + 4  # float32, not once for each pack


def test_checkpoints_and_exports_are_those_of_every_mesh(four_ranks):
    """Weights, moments and the reference to the bit."""
    facts = four_ranks[0]["checkpoints"]
    for saved, num_loads in (("2 x 2", 2), ("4", 1)):
        states = facts["states"][saved]
        assert len({state for of_rank in states for state in of_rank}) == 1 and len(states[0]) == 1 + num_loads
        assert len({export for mesh, export in facts["exports"] if mesh == saved}) == 1
    assert len(facts["exports"]) == 3


def test_one_replica_writes(four_ranks):
    files = four_ranks[0]["checkpoints"]["files"]
    numbers = {mesh: sorted(int(name[5:10]) for name in its) for mesh, its in files.items()}
    assert numbers == {"2 x 2": [0, 1], "4": [0, 1, 2, 3]}
    sizes = {mesh: sum(of_mesh.values()) for mesh, of_mesh in files.items()}
    assert sizes["2 x 2"] < sizes["4"] < 1.05 * sizes["2 x 2"]  # headers
