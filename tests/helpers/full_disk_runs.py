"""Whole runs on a disk that is full, in a mount namespace of their own: full_disk_runs.py FOLDER [all]

Each run is a forked process over the stand-in for vLLM. One that did not end with the weights of the run with room is
started again, with room. Prints a JSON object: name of the run -> how it ended.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fake_vllm

fake_vllm.install()

import torch
from safetensors.torch import load_file
from small_run import arguments, write_rows

import grpo
from base.inputs.checkpoints import numbered, read_meta
from base.system.disk import keep_console
from run import steps

SETTINGS = ("checkpointing.save_period=1", "checkpointing.keep_latest=9", "logger.dump_rollouts=1")
SETTINGS += ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.max_num_steps=3")


def take(file: Path) -> None:
    """As another program would, up to the last byte."""
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1):
            try:
                while stream.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == 28, error


def end_of(work: Path, words: list[str], full=(), ballast: Path | None = None, limit=None, unread=False) -> int:
    """Exit code of a run. The disk is full in the steps `full`; no file grows beyond `limit` bytes; nobody reads the
    output."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if unread:
        read_end, output = os.pipe()
        os.close(read_end)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))
    keep_console()
    dump_if_due = steps.dump_if_due

    def fill(run, samples, adv_B, step):
        if step in full:
            take(ballast)
        elif full:
            ballast.unlink(missing_ok=True)
        dump_if_due(run, samples, adv_B, step)

    steps.dump_if_due = fill
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["grpo.py", *arguments(work), *SETTINGS, *words]
    os._exit(grpo.main())


def found_in(run: Path, weights: dict | None) -> dict:
    """What is there, all of it whole: JSON raises for half a line."""
    lines = {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        content = (run / name).read_bytes() if (run / name).exists() else b""
        assert not content or content.endswith(b"\n"), name
        lines[name] = [json.loads(line)["step"] for line in content.splitlines()]
    for name in ("provenance.json", "exit.json"):
        assert not (run / name).exists() or json.loads((run / name).read_text())
    metas = {path: read_meta(path) for path in numbered(run / "checkpoints", "step_").values()}
    last = next(iter(metas), None)
    same = bool(last) and weights is not None and last.name == "step_000003"
    if same:
        saved = load_file(last / "rank_00000.safetensors")
        same = all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    return {
        "metrics": lines["metrics.jsonl"],
        "samples": sorted(set(lines["samples.jsonl"])),
        "checkpoints": [meta["step"] if isinstance(meta, dict) else meta for meta in metas.values()],
        "exported": (run / "hf_model").exists(),
        "left": [str(path) for path in run.rglob("*.tmp")],
        "same": same,
    }


def main(work: Path, everything: bool) -> dict:
    write_rows(work)
    whole, disk = work / "whole", work / "disk"
    disk.mkdir()
    assert end_of(work, [f"logger.log_dir={whole}"]) == 0, (work / "log").read_text()
    weights = load_file(whole / "exp_001" / "checkpoints" / "step_000003" / "rank_00000.safetensors")
    found = {}

    def run(name, words, resumed=False, **how):
        folder, ballast = disk / name, disk / "ballast"
        if resumed:
            shutil.copytree(whole / "exp_001", folder / "exp_001")
            for gone in ("checkpoints/step_000003", "checkpoints/step_000002", "hf_model"):
                shutil.rmtree(folder / "exp_001" / gone)
        code = end_of(work, [f"logger.log_dir={folder}", *words], ballast=ballast, **how)
        found[name] = {"code": code} | found_in(folder / "exp_001", weights)
        ballast.unlink(missing_ok=True)
        if not found[name]["same"]:
            found[name]["again"] = end_of(work, [f"logger.log_dir={folder}", "checkpointing.resume=auto"])
            found[name]["same"] = found_in(max(folder.glob("exp_*")), weights)["same"]
        shutil.rmtree(folder)

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)], check=True)
    auto = ["checkpointing.resume=auto"]
    run("full in step 2, unread", [], full=(2,), unread=True)
    run("limit 9000, resumed", auto, resumed=True, limit=9000)
    for step in (1, 2, 3) if everything else ():
        run(f"full from step {step}", [], full=range(step, 9))
        run(f"full in step {step}", [], full=(step,))
    for limit in (200, 1000, 20_000, 60_000, 300_000, 1_500_000, 3_000_000) if everything else ():
        run(f"limit {limit}", [], limit=limit)
        run(f"limit {limit}, resumed", auto, resumed=True, limit=limit)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), "all" in sys.argv)))
