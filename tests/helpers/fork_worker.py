"""python fork_worker.py WORK, in a copy of the repository that a fork has edited: uses it, in one process.

WORK/job.json names what; WORK/answer.json and gradients.safetensors have the answers. The keys of job.json:
    loss_fn      keys of the loss: its gradients and metrics at WORK/case.safetensors, by each path
    advantages   [rewards of each group, keys of `grpo`] each: the advantages
    sources      data files: their rows, or why they are refused
    models       model folders: logits of WORK/ids.safetensors, or why they are refused
    runs         overrides of a run each, with a stand-in for vLLM. "cut" in their place copies the run before it to
                 WORK/cut, without its newest checkpoint
"""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
sys.path[:0] = [os.getcwd(), str(Path(__file__).resolve().parent)]

import fake_vllm

fake_vllm.install()

import torch
from safetensors.torch import load_file, save_file
from small_run import arguments, write_rows

import grpo
from advantages import estimate_advantages
from config import AdvEstimatorConfig, ConfigError, DatasetConfig, GRPOConfig, LossConfig
from dataset.sources import open_source
from kernels import KernelBackend, linear_loss
from loss import policy_loss
from loss_path import choose_loss_path
from model import load_policy

CPU = torch.device("cpu")
BACKENDS = (KernelBackend("torch"), KernelBackend("triton", 16))


def read_loss(work: Path, keys: dict) -> dict:
    """Backend -> what the start-up line says of its path, whether it moves tokens of advantage 0, and the metrics."""
    case, cfg = load_file(work / "case.safetensors"), LossConfig(**keys)
    num_rows = len(case["target"])
    pack = {name: x for name, x in case.items() if name.endswith("_T")}
    counts = {"num_valid_tokens": num_rows, "num_valid_seqs": 1, "num_positive_tokens": 0}
    pack_loss = partial(policy_loss, **pack, **counts, ref_logp_T=None, cfg=cfg)
    gradients, answers = {}, {}
    for backend in BACKENDS:
        options = {"has_old": True, "has_ref": False, "backend": backend, "device": CPU}
        path = choose_loss_path(policy_loss, cfg, **options)
        hidden_RD, weight_VD = (case[name].clone().requires_grad_() for name in ("hidden", "weight"))
        options = {"temperature": 1.0, "num_grad_rows": num_rows, "path": path, "backend": backend}
        loss, metrics = linear_loss(hidden_RD, weight_VD, case["target"], pack_loss=pack_loss, **options)
        loss.backward()
        gradients |= {f"{backend.name}.hidden": hidden_RD.grad, f"{backend.name}.weight": weight_VD.grad}
        values = {name: (x[0] / x[1] if isinstance(x, tuple) else x).item() for name, x in metrics.items()}
        answers[backend.name] = {"path": path.describe(), "zero_adv_moves": path.zero_adv_has_grad, "metrics": values}
    save_file(gradients, work / "gradients.safetensors")
    return answers


def read_advantages(groups: list[list[float]], keys: dict) -> list[float]:
    """Of the groups, one after the other."""
    reward_B = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    group_B = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    cfg = GRPOConfig(**keys | {"adv_estimator": AdvEstimatorConfig(**keys["adv_estimator"])})
    return estimate_advantages(reward_B, group_B, torch.ones_like(group_B), cfg, LossConfig(), {}).tolist()


def read_source(file: str) -> list[dict] | str:
    try:
        source = open_source(DatasetConfig(data_path=file))
        return [source.read(number) for number in source.numbers]
    except ConfigError as error:
        return str(error)


def read_model(folder: str, ids_T: torch.Tensor) -> list[list[float]] | str:
    try:
        model = load_policy(folder, device=CPU)
    except ConfigError as error:
        return str(error)
    with torch.no_grad():
        return model(ids_T, torch.arange(len(ids_T)), torch.tensor([0, len(ids_T)])).tolist()


def run(work: Path, overrides: list[str]) -> str:
    """Its folder."""
    sys.argv = ["grpo.py", *arguments(work), *overrides]
    assert grpo.main() == 0, "the reason stands above"
    return str(sorted(work.glob("exp_*"))[-1])


def main() -> None:
    work = Path(sys.argv[1])
    job = json.loads((work / "job.json").read_text())
    answer = {
        "advantages": [read_advantages(*case) for case in job.get("advantages", ())],
        "sources": [read_source(file) for file in job.get("sources", ())],
        "models": [read_model(folder, load_file(work / "ids.safetensors")["ids"]) for folder in job.get("models", ())],
        "loss": read_loss(work, job["loss_fn"]) if "loss_fn" in job else None,
    }
    write_rows(work)
    place = grpo.start_process_group(1)
    grpo.start_process_group = lambda *_: place  # a process has one, which its runs share
    runs = []
    for overrides in job["runs"]:
        if overrides == "cut":
            shutil.copytree(runs[-1], work / "cut")
            shutil.rmtree(sorted((work / "cut" / "checkpoints").glob("step_*"))[-1])
        else:
            runs.append(run(work, overrides))
    (work / "answer.json").write_text(json.dumps(answer | {"runs": runs}))


if __name__ == "__main__":
    main()
    grpo.exit_process(0)
