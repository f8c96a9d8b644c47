"""Checkpoints: what is restored is bitwise what was saved, on 1 and 2 ranks; what is not whole is never loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dist_case import make_samples
from torch import equal
from torch.distributed.tensor import DTensor

import checkpoint
import data
from config import ConfigError
from model import load_policy
from runtime import EXIT_SAVED, Ranks, finish, leave, open_run_folder

STATE = {"consumed_samples": 96, "num_bad_steps": 0, "fingerprint": "abc", "last_validation": {"accuracy": 0.5}}


def fresh(folder, device, mesh):
    model = load_policy(folder, device=device, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def train_step(model, optimizer, seed, ranks):
    """One optimizer step on this rank's own pack, which differs from step to step."""
    samples, adv_B = make_samples(200)
    (pack, *_) = data.pack_samples(samples[seed + ranks.rank :], adv_B[seed + ranks.rank :], 60)
    tensors = (torch.from_numpy(x) for x in (pack.token_T, pack.position_T, pack.row_R, pack.target_R))
    token_T, position_T, row_R, target_R = tensors
    logp_R, _ = model(token_T, position_T, pack.cu_seqlens, row_R, target_R, temperature=1.0, vocab_size=259)
    (logp_R * torch.from_numpy(pack.adv_R)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def snapshot(model, optimizer):
    """name -> copy of this rank's shard of every weight and moment."""
    tensors = {}
    for name, param in model.named_parameters():
        for kind, tensor in {"param": param, **optimizer.state[param]}.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            tensors[f"{kind}.{name}"] = local.detach().clone()
    return tensors


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [
        name for name in ours if not equal(ours[name], theirs[name]) or ours[name].dtype != theirs[name].dtype
    ] == []


def check_resume(folder, work, ranks, device, mesh):
    """Two steps, save, a third; then load into a fresh model and optimizer, and the third again."""
    model, optimizer = fresh(folder, device, mesh)
    start = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    for seed in (0, 1):
        train_step(model, optimizer, seed, ranks)
    torch.manual_seed(100 + ranks.rank)
    torch.rand(3)
    saved = snapshot(model, optimizer)
    path = checkpoint.save(work, 2, model, optimizer, STATE, ranks, keep_latest=2)
    assert path == work / "step_000002" and checkpoint.committed(work) == [path]
    drawn = torch.rand(5)
    train_step(model, optimizer, 2, ranks)
    third = snapshot(model, optimizer)

    torch.manual_seed(0)
    model, optimizer = fresh(folder, device, mesh)
    assert checkpoint.load(work, model, optimizer, ranks) == {"step": 2, **STATE}
    assert equal(torch.rand(5), drawn)
    assert_equal(snapshot(model, optimizer), saved)
    train_step(model, optimizer, 2, ranks)
    assert_equal(snapshot(model, optimizer), third)
    # Or all of it would be equal without anything having been loaded.
    changed = [name for name, shard in start.items() if len(shard) and not equal(shard, saved[f"param.{name}"])]
    assert len(changed) > 10 and not equal(saved[f"exp_avg.{changed[0]}"], third[f"exp_avg.{changed[0]}"])
    assert {float(tensor) for name, tensor in third.items() if name.startswith("step.")} == {3.0}


def test_one_rank_resumes_to_the_bit(tiny, one_rank, tmp_path):
    check_resume(tiny[0], tmp_path, *one_rank)


def two_ranks(rank, folder, work):
    dist.init_process_group("gloo", init_method=f"file://{work / 'meet'}", rank=rank, world_size=2)
    ranks, mesh = Ranks(rank, 2, rank, 1), dist.init_device_mesh("cpu", (2,))
    check_resume(folder, work, ranks, torch.device("cpu"), mesh)
    file = work / "damaged" / "step_000002" / "rank_00001.safetensors"
    if rank == 0:
        shutil.copytree(work / "step_000002", file.parent)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    dist.barrier()
    with pytest.raises(ConfigError) as error:  # on both, or the other would wait in the next collective
        checkpoint.load(file.parent.parent, *fresh(folder, torch.device("cpu"), mesh), ranks)
    assert str(error.value) == (
        f"{file}: content differs from its checksum in meta.json: the checkpoint is damaged; remove {file.parent}"
    )
    leave(0)


def test_two_ranks_resume_to_the_bit_and_one_rank_cannot(tiny, one_rank, tmp_path):
    mp.spawn(two_ranks, (tiny[0], tmp_path), nprocs=2)
    ranks, device, mesh = one_rank
    model, optimizer = fresh(tiny[0], device, mesh)
    with pytest.raises(ConfigError, match="written by 2 ranks, this run has 1; use --nproc_per_node=2"):
        checkpoint.load(tmp_path, model, optimizer, ranks)
    meta = json.loads((tmp_path / "step_000002" / "meta.json").read_text())
    assert sorted(meta["files"]) == ["rank_00000.safetensors", "rank_00001.safetensors"] and meta["world_size"] == 2


# ------------------------------------------------------------------- folders, with a model of 3 weights in place of one


@pytest.fixture
def run(one_rank, tmp_path):
    """save(step) writes a checkpoint whose weights are all `step`; load() gives (its state, the weight)."""

    class Run:
        folder, ranks = tmp_path / "checkpoints", one_rank[0]

        def save(self, step, keep_latest=2):
            model, optimizer = self.model(step)
            return checkpoint.save(
                self.folder, step, model, optimizer, {"at": step}, self.ranks, keep_latest=keep_latest
            )

        def load(self):
            model, optimizer = self.model(-1.0)
            state = checkpoint.load(self.folder, model, optimizer, self.ranks)
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
    assert [path.name for path in checkpoint.committed(run.folder)] == ["step_1000000", "step_999999", "step_000009"]
    assert run.load() == ({"step": 1_000_000, "at": 1_000_000}, [1_000_000.0])


def test_old_ones_go_only_after_the_new_one_is_whole(run, monkeypatch):
    run.save(1), run.save(2)
    seen, rename = [], os.rename

    def watched(source, target):
        seen.append((names(run), sorted(path.name for path in Path(source).iterdir())))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    run.save(3)
    files = ["meta.json", "rank_00000.safetensors"]
    assert seen == [(["step_000001", "step_000002", "step_000003.tmp"], files)]
    assert names(run) == ["step_000002", "step_000003"]


def test_crash_before_the_rename_leaves_the_older_ones(run, monkeypatch):
    run.save(1), run.save(2)

    def crash(source, target):
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(OSError, match="killed here"):
            run.save(3)
    assert names(run) == ["step_000001", "step_000002", "step_000003.tmp"]
    assert run.load() == ({"step": 2, "at": 2}, [2.0])
    run.save(3)  # over what the crash left
    assert names(run) == ["step_000002", "step_000003"] and run.load()[0]["step"] == 3


def test_a_step_written_again_replaces_the_first(run):
    model, optimizer = run.model(5.0)
    checkpoint.save(run.folder, 2, model, optimizer, {"at": 5}, run.ranks, keep_latest=2)
    run.save(2)
    assert names(run) == ["step_000002"] and run.load() == ({"step": 2, "at": 2}, [2.0])


def spoil(path, how):
    shard, meta = path / "rank_00000.safetensors", path / "meta.json"
    if how == "never renamed":
        path.rename(f"{path}.tmp")
    elif how == "no meta.json":
        meta.unlink()
    elif how == "meta.json cut":
        meta.write_bytes(meta.read_bytes()[:-20])
    elif how == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()


@pytest.mark.parametrize("how", ["never renamed", "no meta.json", "meta.json cut", "shard cut", "no shard"])
def test_what_is_not_whole_is_no_candidate(run, how):
    run.save(1)
    spoil(run.save(2), how)
    assert [path.name for path in checkpoint.committed(run.folder)] == ["step_000001"]
    assert run.load() == ({"step": 1, "at": 1}, [1.0])
    run.save(3)
    assert {"step_000001", "step_000003"} <= set(names(run)), "a damaged one must not count as one to keep"


def test_a_users_copy_is_left_alone(run):
    shutil.copytree(run.save(1), run.folder / "step_000001_best")
    run.save(2), run.save(3)
    assert names(run) == ["step_000001_best", "step_000002", "step_000003"] and run.load()[0]["step"] == 3


def test_flipped_bit_is_refused_by_name(run):
    run.save(1)
    file = run.save(2) / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # within a weight: the file parses, and has its size
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        run.load()
    assert str(file) in str(error.value) and f"remove {file.parent}" in str(error.value)
    shutil.rmtree(file.parent)  # as the message says
    assert run.load()[0] == {"step": 1, "at": 1}


def test_other_format_is_refused(run):
    meta = run.save(1) / "meta.json"
    meta.write_text(meta.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="step_000001: checkpoint format 2, this program reads 1"):
        run.load()


def test_no_checkpoint(run):
    run.folder.mkdir()
    (run.folder / "step_000003.tmp").mkdir()
    with pytest.raises(ConfigError, match=r"checkpointing\.resume_from: no whole checkpoint in .*checkpoints"):
        run.load()


def test_resumed_run_says_anew_how_it_ended(one_rank, tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_EXIT_FILE", raising=False)
    folder = open_run_folder(str(tmp_path), None, one_rank[0])
    assert folder == tmp_path / "exp_001" and open_run_folder(str(tmp_path), None, one_rank[0]).name == "exp_002"
    finish(EXIT_SAVED, "saved: signal", folder)
    finish(1, "crashed: a rank that only lost its peer", folder)  # the first to end has the word
    assert json.loads((folder / "exit.json").read_text()) == {"code": EXIT_SAVED, "reason": "saved: signal", "rank": 0}
    assert open_run_folder(str(tmp_path), str(folder), one_rank[0]) == folder
    finish(0, "trained to step 9", folder)
    assert json.loads((folder / "exit.json").read_text()) == {"code": 0, "reason": "trained to step 9", "rank": 0}
