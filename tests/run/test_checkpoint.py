"""Checkpoints: what is restored is bitwise what was saved, on 1 and 2 ranks; what is not whole is never loaded."""

import errno
import json
import math
import os
import random
import shutil
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_case import alone, make_samples
from families import make_family
from ranks import ranks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import cat, equal
from torch.distributed.tensor import DTensor

from base.hf.weights import full_tensors
from base.inputs.checkpoints import committed, digest
from base.system.exits import EXIT_SAVED, Saved, StopRun, host_name, report_exit
from base.system.optimizer import Optimizer
from base.system.ranks import start_process_group
from config import CheckpointingConfig, Config, ConfigError, LoggerConfig, LoRAConfig
from head import HeadOptions, response_logps
from model import load_policy
from pack import pack_samples, to_device
from reference import Reference
from run import checkpoint, restore
from run.folder import open_run_folder

STATE = {"consumed_samples": 96, "num_bad_steps": 0, "fingerprint": "abc", "last_validation": {"accuracy": 0.5}}


NUM_FORGED = 200
LORA = LoRAConfig(enabled=True, dim=3)  # of 2 ranks, one holds 2 rows of A and the other 1


def fresh(folder, device, mesh, lora=None):
    model = load_policy(folder, device=device, mesh=mesh, lora=lora)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)


def train_step(model, optimizer, seed, place):
    """One optimizer step on this rank's own pack, which differs from step to step."""
    samples, adv_B = make_samples(200)
    (pack, *_) = pack_samples(alone(samples, adv_B)[seed + place.rank :], 60)
    micro = to_device(pack, torch.device("cpu"))
    logp_R, _ = response_logps(model, micro.model_inputs, micro.target_R, HeadOptions())
    (logp_R * micro.adv_R).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def snapshot(model, optimizer):
    """name in the file -> copy of this rank's shard of every trained weight and of every tensor of the optimizer."""
    tensors = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        tensors[f"param.{name}"] = param.to_local().detach().clone()
        for key, tensor in optimizer.state[param].items():
            if isinstance(tensor, DTensor):
                tensors[f"sharded.{key}.{name}"] = tensor.to_local().clone()
            else:
                tensors[f"replicated.{key}.{name}"] = tensor.clone()
    return tensors


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    same = {name: equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours}
    assert all(same.values()), same


def check_resume(folder, work, place, device, mesh, lora=None):
    """Two steps, save, a third; then load into a fresh model and optimizer, and the third again."""
    model, optimizer = fresh(folder, device, mesh, lora)
    start = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    base = "a" * 64 if lora else None
    for seed in (0, 1):
        train_step(model, optimizer, seed, place)
    saved = snapshot(model, optimizer)
    saver, state = checkpoint.Saver(work, CheckpointingConfig(), place), {**STATE, "base_sha256": base}
    saver.save(2, model, optimizer, state, {}, {})
    train_step(model, optimizer, 2, place)  # while it is being written
    state["consumed_samples"] = 0
    third = snapshot(model, optimizer)
    saver.finish()
    assert committed(work) == [work / "step_000002"]

    model, optimizer = fresh(folder, device, mesh, lora)
    with pytest.raises(ConfigError, match=r"adapters belong to other weights: name those in policy.model_name"):
        restore.load(work, CheckpointingConfig(), model, optimizer, place, {}, base="b" * 64)
    loaded = restore.load(work, CheckpointingConfig(), model, optimizer, place, {}, base=base)
    assert loaded == {"step": 2, **STATE, "base_sha256": base}
    assert_equal(snapshot(model, optimizer), saved)
    train_step(model, optimizer, 2, place)
    assert_equal(snapshot(model, optimizer), third)
    shard = load_file(work / "step_000002" / f"rank_{place.rank:05d}.safetensors")
    assert_equal(shard, saved)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert all(equal(param.to_local(), start[name]) for name, param in model.named_parameters() if name in frozen)
    assert len(frozen) == (len(start) - 28 if lora else 0)
    # Or all of it would be equal without anything having been loaded.
    trained = {name: shard for name, shard in start.items() if name not in frozen}
    changed = [name for name, shard in trained.items() if len(shard) and not equal(shard, saved[f"param.{name}"])]
    moment = f"sharded.exp_avg.{changed[0]}"
    assert len(changed) > 10 and not equal(saved[moment], third[moment])
    assert {float(tensor) for name, tensor in third.items() if name.startswith("replicated.step.")} == {3.0}


@pytest.mark.parametrize("lora", [None, LORA])
def test_one_rank_resumes_to_the_bit(tiny, one_rank, tmp_path, lora):
    check_resume(tiny[0], tmp_path, *one_rank, lora)


@ranks(2)
def save_by_two(folder, work):
    place, device = start_process_group(tp_size=1)
    mesh = dist.init_device_mesh("cpu", (2,))
    check_resume(folder, work, place, device, mesh)
    check_resume(folder, work / "lora", place, device, mesh, LORA)
    file = work / "damaged" / "step_000002" / "rank_00001.safetensors"
    if place.rank == 0:
        shutil.copytree(work / "step_000002", file.parent)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    dist.barrier()
    with pytest.raises(ConfigError) as error:  # on both, or the other would wait in the next collective
        restore.load(file.parent.parent, CheckpointingConfig(), *fresh(folder, device, mesh), place, {})
    assert str(error.value).startswith(f"{file}: content differs from its checksum in meta.json: the checkpoint is")


@ranks(2)
def load_by_two_again(folder, work):
    """What one rank wrote, of what two had written, is for two the same as before."""
    place, device = start_process_group(tp_size=1)
    mesh, snapshots = dist.init_device_mesh("cpu", (2,)), []
    for source in (work, work / "of_one"):
        model, optimizer = fresh(folder, device, mesh)
        reference = Reference(model).shards if source != work else {}
        state = restore.load(source, CheckpointingConfig(), model, optimizer, place, reference)
        assert state.items() >= STATE.items()
        snapshots.append(snapshot(model, optimizer))
    assert_equal(*snapshots)
    stored = {f"param.{name}": tensor for name, tensor in reference.items()}
    assert_equal(stored, {name: snapshots[0][name] for name in stored})


def test_two_ranks_then_one_then_two(tiny, one_rank, tmp_path):
    save_by_two(tiny[0], tmp_path)
    meta = json.loads((tmp_path / "step_000002" / "meta.json").read_text())
    assert sorted(meta["files"]) == ["rank_00000.safetensors", "rank_00001.safetensors"] and meta["world_size"] == 2

    place, device, mesh = one_rank
    model, optimizer = fresh(tiny[0], device, mesh)
    assert restore.load(tmp_path, CheckpointingConfig(), model, optimizer, place, {}).items() >= STATE.items()
    ours, shards = snapshot(model, optimizer), [load_file(tmp_path / "step_000002" / name) for name in meta["files"]]
    assert_equal(ours, {name: x if x.dim() == 0 else cat([s[name] for s in shards]) for name, x in shards[0].items()})
    kinds = {name.partition(".model.")[0] for name in ours}
    assert kinds == {"param", "replicated.step", "sharded.exp_avg", "sharded.exp_avg_sq"}

    saver = checkpoint.Saver(tmp_path / "of_one", CheckpointingConfig(), place)
    saver.save(2, model, optimizer, STATE, Reference(model).shards, {})
    saver.finish()
    for folder, reference in ((tmp_path, Reference(model).shards), (tmp_path / "of_one", {})):  # as replay.py may ask
        with pytest.raises(ConfigError, match="reference_policy_kl_penalty"):
            restore.load(folder, CheckpointingConfig(), model, optimizer, place, reference)
    load_by_two_again(tiny[0], tmp_path)


@pytest.mark.slow
def test_what_a_mixture_of_experts_does_not_train_is_stored(one_rank, tmp_path):
    """Routers, and their bias, a buffer: other ones of the model folder do not matter."""
    make_family("glm4_moe").save_pretrained(tmp_path / "model")
    make_family("glm4_moe", seed=1).save_pretrained(tmp_path / "other")
    save_mixture(tmp_path)
    place, device, mesh = one_rank
    expected = dict(full_tensors(load_policy(tmp_path / "model", device=device), torch.float32))
    again, optimizer = fresh(tmp_path / "other", device, mesh)
    restore.load(tmp_path / "work", CheckpointingConfig(), again, optimizer, place, {})
    found = dict(full_tensors(again, torch.float32))
    assert_equal(found, expected)
    file = tmp_path / "work" / "step_000001" / "rank_00001.safetensors"
    assert sum(name.endswith("e_score_correction_bias") for name in load_file(file)) == 2  # of two layers with experts


@ranks(2)
def save_mixture(folder):
    place, device = start_process_group(tp_size=1)
    model, optimizer = fresh(folder / "model", device, dist.init_device_mesh("cpu", (2,)))
    with checkpoint.Saver(folder / "work", CheckpointingConfig(), place) as saver:
        saver.save(1, model, optimizer, STATE, {}, {})


def test_whatever_an_optimizer_keeps_for_a_parameter_comes_back(tiny, one_rank, tmp_path):
    """Each kind of value: dtype, placement and content are those that were saved. A number becomes a tensor."""
    place, device, mesh = one_rank
    model = load_policy(tiny[0], device=device, mesh=mesh)
    saved, loaded = (SimpleNamespace(state=defaultdict(dict)) for _ in range(2))
    for i, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(i)
        rows = torch.randn(param.to_local().shape, generator=generator)
        saved.state[param] = {
            "moment": DTensor.from_local(rows.bfloat16(), mesh, param.placements),
            "error_feedback": rows.mul(10).to(torch.int8),
            "scale": torch.tensor(0.1 * i),
            "preconditioner": torch.randn(2, 3, generator=generator, dtype=torch.float64),
            "count": 2**40 + i,
            "decay": 0.1 + i,
        }
    with checkpoint.Saver(tmp_path, CheckpointingConfig(), place) as saver:
        saver.save(1, model, saved, {}, {}, {})
    assert restore.load(tmp_path, CheckpointingConfig(), model, loaded, place, {}) == {"step": 1}
    assert len(saved.state) > 10 and saved.state.keys() == loaded.state.keys()
    for param, state in saved.state.items():
        again = loaded.state[param]
        assert state.keys() == again.keys()
        for key, value in state.items():
            if isinstance(value, DTensor):
                assert value.placements == again[key].placements and again[key].shape == param.shape
                assert equal(value.to_local(), again[key].to_local())
            else:
                value = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
                assert value.dtype == again[key].dtype and equal(value, again[key]), key


# ------------------------------------------------------------------- folders, with a model of 3 weights in place of one


@pytest.fixture
def run(one_rank, tmp_path):
    """save(step) writes a checkpoint whose weights are all `step`; load() gives (its state, the weight)."""

    class Run:
        folder, ranks = tmp_path / "checkpoints", one_rank[0]

        def save(self, step, metric=None, **options):
            with checkpoint.Saver(self.folder, CheckpointingConfig(**options), self.ranks) as saver:
                saver.save(step, *self.model(step), {"at": step}, {}, {} if metric is None else {"reward": metric})
            return self.folder / f"step_{step:06d}"

        def load(self, mode=None):
            model, optimizer = self.model(-1.0)
            state = restore.load(self.folder, CheckpointingConfig(resume=mode), model, optimizer, self.ranks, {})
            assert not optimizer.state[model.weight]  # saved before the first optimizer step: there are no moments
            return state, model.weight.unique().tolist()

        def model(self, value):
            model = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.constant_(model.weight, value)
            return model, torch.optim.AdamW(model.parameters())

    return Run()


def names(run):
    return sorted(path.name for path in run.folder.iterdir())


def test_newest_is_loaded_and_the_oldest_go(run):
    for step in (8, 9, 999_999, 1_000_000):
        run.save(step, keep_latest=3)
    assert names(run) == ["step_000009", "step_1000000", "step_999999"]
    assert [path.name for path in committed(run.folder)] == ["step_1000000", "step_999999", "step_000009"]
    assert run.load() == ({"step": 1_000_000, "at": 1_000_000}, [1_000_000.0])


def test_the_best_stay_too(run):
    """A step without the metric, or with NaN, is not among the best."""
    best = {"keep_top_k": 2, "keep_latest": 2, "metric_name": "train/reward"}
    for step, metric in enumerate([None, 0.9, math.nan, 0.5, 0.9, 0.2, 0.3], start=1):
        run.save(step, metric, **best)
    assert names(run) == ["step_000002", "step_000005", "step_000006", "step_000007"]
    run.save(8, 0.0, higher_is_better=False, **best)
    assert names(run) == ["step_000006", "step_000007", "step_000008"]


def test_old_ones_go_only_after_the_new_one_is_whole(run, monkeypatch):
    run.save(1), run.save(2)
    seen, flushed, rename, fsync = [], [], os.rename, os.fsync

    def on_the_disk(descriptor):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".")[0])
        fsync(descriptor)

    def watched(source, target):
        flushed.append("renamed")
        seen.append((Path(source).name, names(run), sorted(path.name for path in Path(source).iterdir())))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    monkeypatch.setattr(os, "fsync", on_the_disk)
    run.save(3)
    assert flushed[:4] == ["rank_00000", "meta", "step_000003", "renamed"]
    files = ["meta.json", "rank_00000.safetensors"]
    assert seen == [
        ("step_000003.tmp", ["step_000001", "step_000002", "step_000003.tmp"], files),
        ("step_000001", ["step_000001", "step_000002", "step_000003"], files),  # out of the way, then removed
    ]
    assert names(run) == ["step_000002", "step_000003"]


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room_for_tensors(*_):
    raise SafetensorError("No space left on device")


@pytest.mark.parametrize(
    ("where", "what", "refuse", "said"),
    [
        (shutil, "disk_usage", lambda _: SimpleNamespace(free=0), "a checkpoint needs "),
        (checkpoint, "save_file", no_room_for_tensors, "No space left on device"),
        (checkpoint, "flush", no_room, "No space left on device"),
        (os, "rename", no_room, "No space left on device"),
    ],
)
def test_a_full_disk_costs_the_checkpoint_not_the_run(run, monkeypatch, capsys, where, what, refuse, said):
    """Until three in a row. tests/command/test_disk_full.py fills a real one."""
    run.save(1), run.save(2)
    saver = checkpoint.Saver(run.folder, CheckpointingConfig(), run.ranks)

    def save(step):
        saver.save(step, *run.model(step), {"at": step}, {}, {})
        saver.finish()

    with monkeypatch.context() as patch:
        patch.setattr(where, what, refuse)
        save(3)
    assert names(run) == ["step_000001", "step_000002"] and run.load()[0]["step"] == 2
    warning = capsys.readouterr().out
    for part in ("WARNING: ", "step_000003", said, str(run.folder / "step_000002"), "training continues"):
        assert part in warning
    save(3)
    assert saver.num_failures == 0 and names(run) == ["step_000002", "step_000003"]
    monkeypatch.setattr(where, what, refuse)
    save(4), save(5)
    with pytest.raises(StopRun, match=r"(?s)the newest saved one: .*step_000003.*3 failed in a row: make room in "):
        save(6)
    assert names(run) == ["step_000002", "step_000003"] and run.load()[0]["step"] == 3


def test_training_goes_on_while_it_is_written(run, monkeypatch):
    release, write = threading.Event(), checkpoint.save_file

    def slow(*arguments):
        assert release.wait(20)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    model, optimizer = run.model(1.0)
    saver = checkpoint.Saver(run.folder, CheckpointingConfig(), run.ranks)
    saver.save(1, model, optimizer, {"at": 1}, {}, {})
    torch.nn.init.constant_(model.weight, 5.0)
    saver.poll()
    assert committed(run.folder) == [] and names(run) == ["step_000001.tmp"]
    release.set()
    saver.written.result()
    saver.poll()
    assert run.load() == ({"step": 1, "at": 1}, [1.0])


@pytest.mark.parametrize(
    ("error", "whole"), [(StopRun("a check"), 1), (Saved("a signal"), 1), (RuntimeError("bug"), 0)]
)
def test_what_all_ranks_raise_together_still_commits(run, error, whole):
    with pytest.raises(type(error)), checkpoint.Saver(run.folder, CheckpointingConfig(), run.ranks) as saver:
        saver.save(1, *run.model(1), {"at": 1}, {}, {})
        written = saver.written
        raise error
    written.result()
    assert len(committed(run.folder)) == whole


def test_a_step_written_again_replaces_the_first(run):
    with checkpoint.Saver(run.folder, CheckpointingConfig(), run.ranks) as saver:
        saver.save(2, *run.model(5.0), {"at": 5}, {}, {})
    run.save(2)
    assert names(run) == ["step_000002"] and run.load() == ({"step": 2, "at": 2}, [2.0])


@pytest.mark.parametrize("spoiled", ["meta.json", "rank_00000.safetensors", "a bit"])
def test_what_is_not_whole_is_refused_or_passed_over_loudly(run, spoiled, capsys):
    """With a bit flipped within a weight, the file parses and has its size."""
    run.save(1)
    file = run.save(2) / spoiled.replace("a bit", "rank_00000.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if spoiled == "a bit" else b""))
    if spoiled != "a bit":
        assert [path.name for path in committed(run.folder)] == ["step_000001"]
    with pytest.raises(ConfigError, match=f"^{file}: .*checkpointing.resume=auto.* remove {file.parent}"):
        run.load()
    assert run.load("auto") == ({"step": 1, "at": 1}, [1.0])
    assert f"WARNING: {file}: " in capsys.readouterr().out
    run.save(3)
    if spoiled != "a bit":
        assert {"step_000001", "step_000003"} <= set(names(run)), "a damaged one must not count as one to keep"


@pytest.mark.slow
def test_resumed_run_says_anew_how_it_ended(one_rank, tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_EXIT_FILE", raising=False)
    cfg = Config(logger=LoggerConfig(log_dir=str(tmp_path)))
    folder = open_run_folder(cfg, one_rank[0])
    assert folder == tmp_path / "exp_001" and open_run_folder(cfg, one_rank[0]).name == "exp_002"
    report_exit(EXIT_SAVED, "saved: signal", folder)
    report_exit(1, "crashed: a rank that only lost its peer", folder)  # the first to end has the word
    end = json.loads((folder / "exit.json").read_text())
    assert end == {"code": EXIT_SAVED, "reason": "saved: signal", "rank": 0, "host": host_name()}
    cfg = replace(cfg, checkpointing=CheckpointingConfig(resume_from=str(folder)))
    assert open_run_folder(cfg, one_rank[0]) == folder
    report_exit(0, "trained to step 9", folder)
    end = json.loads((folder / "exit.json").read_text())
    assert end == {"code": 0, "reason": "trained to step 9", "rank": 0, "host": host_name()}


# ------------------------------------------------------------------------- forged: another content, and right checksums


def forged(tensors, rng):
    """The tensors of a shard, one of which has another name, type or shape, or is gone, or one more."""
    name = rng.choice([*tensors, *(name for name in tensors if not name.startswith("param."))])
    tensor = tensors[name]
    kind, key, param = name.split(".", 2)
    ways = {
        "gone": lambda: tensors.pop(name),
        "renamed": lambda: tensors.update({f"{kind}.{key}x.{param}": tensors.pop(name)}),
        "of another kind": lambda: tensors.update(
            {f"{rng.choice(['replicated', 'local', 'other', 'buffer'])}.{key}.{param}": tensors.pop(name)}
        ),
        "of no parameter": lambda: tensors.update({f"{kind}.{key}.none": tensor.clone()}),
        "without a key": lambda: tensors.update({kind: tensor.clone()}),
        "one more": lambda: tensors.update({f"{kind}.extra.{param}": tensor.clone()}),
        "integers": lambda: tensors.update({name: tensor.to(torch.int64)}),
        "doubles": lambda: tensors.update({name: tensor.to(torch.float64)}),
        "texts of bits": lambda: tensors.update({name: tensor.bool()}),
        "one number": lambda: tensors.update({name: tensor.new_zeros(())}),
        "no number": lambda: tensors.update({name: tensor.new_zeros((0,))}),
        "a row more": lambda: tensors.update({name: tensor.new_zeros((3, *tensor.shape[1:]))}),
        "another width": lambda: tensors.update({name: tensor.new_zeros((*tensor.shape, 2))}),
    }
    way = rng.choice([*ways])
    ways[way]()
    return way, name


def test_a_forged_checkpoint_ends_in_a_sentence_or_trains(tiny, one_rank, tmp_path):
    """red_team4: 2 of 200 with wrong tensors of the optimizer ended in a traceback."""
    place, device, mesh = one_rank
    model = load_policy(tiny[0], device=device, mesh=mesh)
    parts = [(partial(torch.optim.AdamW, fused=True), [*model.parameters()])]
    optimizer = Optimizer(parts, offloads=False, first_moment_dtype=torch.float32)
    train_step(model, optimizer, 0, place)
    with checkpoint.Saver(tmp_path, CheckpointingConfig(), place) as saver:
        saver.save(1, model, optimizer, STATE, {}, {})
    folder = tmp_path / "step_000001"
    shard = folder / "rank_00000.safetensors"
    tensors = load_file(shard)
    rng = random.Random(4)
    refused = Counter()
    for _ in range(NUM_FORGED):
        changed = dict(tensors)
        way, name = forged(changed, rng)
        save_file(changed, shard)
        meta = json.loads((folder / "meta.json").read_text())
        meta["files"][shard.name] = {"sha256": checkpoint.sha256_of(shard), "bytes": shard.stat().st_size}
        del meta["sha256"]
        (folder / "meta.json").write_text(json.dumps(meta | {"sha256": digest(meta)}))
        optimizer.state.clear()
        try:
            restore.load(tmp_path, CheckpointingConfig(), model, optimizer, place, {})
        except ConfigError as error:
            assert "\n" not in str(error), (way, name)
            refused[way] += 1
            continue
        train_step(model, optimizer, 1, place)
    assert refused.total() > NUM_FORGED / 2 and len(refused) > 9
