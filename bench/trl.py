r"""One optimizer step of this program beside one of TRL's GRPOTrainer on a CPU: seconds of each part, peak memory.

    python -m bench.trl MODEL [key.sub=value ...] [--cases bfloat16 float32 small] [--pairs 3] [--out FILE]
    python -m bench.trl MODEL --sweep trl|ours [--cases ...]       the settings of BEST: which are fastest on a machine

Both programs run as their users run them, in one process each (ours: one per rank) that stays for all its steps and
is held between them: ours, TRL, ours, TRL, ... after a first step of each that does not count. Same model, prompts (ids
compared), reward, number of new tokens (exactly; counted on both sides), temperature 1, AdamW with lr 2e-5, no KL, one
optimizer step on all samples. Cases: a real model, 8 prompts x 8 samples x 24 tokens, float32 weights that compute in
bfloat16 (TRL: autocast) or in float32; `small`: a random Qwen3 of 0.8 M parameters, made here, 16 x 16 x 64, float32.
TRL generates with transformers: on a CPU it has no vLLM. Its settings are BEST's, by `--sweep trl`: gradient
checkpointing, micro-batch, threads. key.sub=value are keys of our config, for both layouts.

training = step - generation - sync; TRL has no sync. Peaks are VmHWM of whole processes, summed over ranks, which count
shared libraries once each: ours with the engine and its cache, TRL's without vLLM, which it does not need here.

TRL goes into a folder of its own, so that no pin moves (110 MB):
    python -m pip install --no-deps --target .gpu/trl trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1 \
        xxhash==4.1.0 multiprocess==0.70.19 python-dateutil==4.0.0
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from base.system.exits import die_with_parent
from bench.head import ROOT, facts

TRL = ROOT / ".gpu" / "trl"
NEEDED = ("trl", "accelerate", "datasets", "pandas", "xxhash", "multiprocess", "dateutil")
STARTER = ROOT / "examples/arithmetic/starter"
REAL = {"prompts": 8, "samples": 8, "new_tokens": 24, "max_total": 128}
CASES = {
    "bfloat16": REAL | {"precision": "bfloat16"},
    "float32": REAL | {"precision": "float32"},
    "small": {"precision": "float32", "prompts": 16, "samples": 16, "new_tokens": 64, "max_total": 96},
}
# The fastest of --sweep on 2 cores. For TRL in bfloat16, checkpointing on (22.6 s) and off (23.3) were within noise.
BEST = {
    "bfloat16": {
        "ours": {"ranks": 1, "threads": 2},
        "trl": {"gradient_checkpointing": True, "micro_batch": 16, "threads": 2},
    },
    "float32": {
        "ours": {"ranks": 1, "threads": 2},
        "trl": {"gradient_checkpointing": False, "micro_batch": 16, "threads": 2},
    },
    "small": {
        "ours": {"ranks": 2, "threads": 1},
        "trl": {"gradient_checkpointing": False, "micro_batch": 64, "threads": 2},
    },
}
OURS = [
    *("loss_fn.reference_policy_kl_penalty=0", "policy.ppo_epochs=1", "policy.scheduler.warmup_steps=0"),
    *("policy.optimizer.kwargs.lr=2e-5", "policy.dtensor_cfg.activation_checkpointing=false"),
    *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.canary_period=0"),
    *("grpo.logp_gap_limit=null", "checkpointing.enabled=false", "checkpointing.save_hf_at_end=false"),
    *("logger.tensorboard_enabled=false", "data.shuffle=false", "data.validation=null"),
    "data.train.env_name=bench.trl_step:reward",
]
PARTS = ("sampler", "forward", "backward", "clip", "optimizer")
SLOWEST = 600  # seconds that a start or a step may take


class Side:
    """One of the two programs, started, and held before its first step."""

    def __init__(self, name: str, command: list[str], ranks: int, threads: int, folder: Path):
        self.name, self.ranks, self.folder, self.steps = name, ranks, folder, 0
        self.log = folder / "output.txt"
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        env |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(TRL) if name == "TRL" else ""}
        env |= {"CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=die_with_parent
            )

    def wait_for(self, pattern: str) -> list[Path]:
        """The file of each rank, once all are there."""
        files = [self.folder / pattern.format(rank) for rank in range(self.ranks)]
        end = time.monotonic() + SLOWEST
        while not all(file.exists() for file in files):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                sys.exit(f"{self.name} ended or hangs: see {self.log}\n" + self.log.read_text()[-3000:])
            time.sleep(0.05)
        return files

    def step(self) -> dict:
        """One step. Seconds and parts are those of the rank that took longest, CPU seconds and peaks are summed."""
        self.steps += 1
        self.wait_for(f"ready_{self.steps}_{{}}")
        (self.folder / f"go_{self.steps}").touch()
        records = [json.loads(file.read_text()) for file in self.wait_for(f"done_{self.steps}_{{}}.json")]
        record = max(records, key=lambda record: record["seconds"])
        for name in ("cpu_seconds", "peak_bytes"):
            record[name] = sum(record_of_rank[name] for record_of_rank in records)
        parts = record["parts"]
        record["generation"], record["sync"] = parts["generation"], parts.get("sync", 0.0)
        record["training"] = record["seconds"] - record["generation"] - record["sync"]
        return record

    def close(self) -> None:
        self.process.wait(SLOWEST)


def start_ours(case: dict, setting: dict, steps: int, work: Path, overrides: list[str]) -> Side:
    folder = Path(tempfile.mkdtemp(prefix="ours_", dir=work))
    config = [
        *(f"grpo.num_prompts_per_step={case['prompts']}", f"grpo.num_generations_per_prompt={case['samples']}"),
        *(f"grpo.max_num_steps={steps}", f"policy.model_name={case['model']}", f"policy.precision={case['precision']}"),
        f"policy.generation.max_new_tokens={case['new_tokens']}",
        *(f"policy.max_total_sequence_length={case['max_total']}", f"data.train.data_path={case['data']}"),
        *(f"logger.log_dir={folder}", *OURS, *overrides),
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={setting['ranks']}"]
    command = [sys.executable, *launch, "-m", "bench.trl_step", "ours", str(folder), "configs/smoke.yaml", *config]
    return Side("ours", command, setting["ranks"], setting["threads"], folder)


def start_trl(case: dict, settings: list[dict], steps: int, work: Path) -> Side:
    folder = Path(tempfile.mkdtemp(prefix="trl_", dir=work))
    spec = folder / "spec.json"
    spec.write_text(json.dumps(case | {"folder": str(folder), "settings": settings, "steps": steps}))
    threads = max(setting["threads"] for setting in settings)
    return Side("TRL", [sys.executable, "-m", "bench.trl_step", "trl", str(spec)], 1, threads, folder)


# ------------------------------------------------------------------------------------------------------- what is asked


def write_problems(case: dict, small: bool, file: Path) -> None:
    """As many as any run here has steps for; 45 tokens each in SmolLM2's template."""
    rng = random.Random(0)
    rows = []
    for _ in range(40 * case["prompts"]):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        text = f"{a}+{b}=" if small else f"Add {a} and {b}. Reply with the number."
        rows.append({"messages": [{"role": "user", "content": text}], "answer": str(a + b)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_small_model(folder: Path) -> None:
    """A random Qwen3 of 0.8 M parameters with the tokenizer of the arithmetic example."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    own = json.loads((STARTER / "config.json").read_text())
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "initializer_range": 0.02}
    kept = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    kept += ("tie_word_embeddings", "max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
    model = Qwen3ForCausalLM(Qwen3Config(**{name: own[name] for name in kept} | sizes))
    print(f"small: a random Qwen3 of {sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STARTER / name, folder)


def prepare(name: str, args: argparse.Namespace, work: Path) -> dict:
    case = dict(CASES[name])
    if args.shape:
        case |= dict(zip(("prompts", "samples", "new_tokens"), args.shape, strict=True))
    model = work / "small" if name == "small" else Path(args.model).resolve()
    if name == "small":
        make_small_model(model)
    data = work / f"{name}.jsonl"
    write_problems(case, name == "small", data)
    return case | {"model": str(model), "data": str(data)}


# ------------------------------------------------------------------------------------------------------- what is shown

COLUMNS = ("seconds", "generation", "training", "sync", *PARTS, "cpu_seconds")
HEAD = f"{'':56}{'step':>8}{'gener.':>8}{'train.':>8}{'sync':>8}" + "".join(f"{p:>10}" for p in PARTS)
HEAD += f"{'CPU s':>8}{'peak GiB':>10}"


def show(label: str, record: dict) -> None:
    numbers = [record[name] if name in record else record["parts"].get(name, 0.0) for name in COLUMNS]
    widths = [8] * 4 + [10] * len(PARTS) + [8]
    cells = "".join(f"{number:{width}.2f}" for number, width in zip(numbers, widths, strict=True))
    print(f"{label:56}{cells}{record['peak_bytes'] / 2**30:10.2f}", flush=True)


def middle(records: list[dict]) -> dict:
    """Medians over the steps; the peak is the highest."""
    names = [name for name in records[0] if isinstance(records[0][name], float)]
    result = {name: statistics.median(record[name] for record in records) for name in names}
    parts = {part: statistics.median(record["parts"].get(part, 0.0) for record in records) for part in PARTS}
    return result | {"parts": parts, "peak_bytes": max(record["peak_bytes"] for record in records)}


def check_tokens(case: dict, one: dict, other: dict) -> None:
    """Both trained on the same prompts, and on as many new tokens each as may be."""
    assert one["prompts"] == other["prompts"], "the two programs did not get the same prompts"
    samples = case["prompts"] * case["samples"]
    for record in (one, other):
        assert record["length_range"] == [case["new_tokens"]] * 2, record
        assert record["samples"] == samples and record["new_tokens"] == samples * case["new_tokens"], record
    assert one["prompt_tokens"] == other["prompt_tokens"]


def tell_tokens(records: dict[str, dict]) -> None:
    for side, record in records.items():
        text = f"  {side} trains on {record['samples']} samples: {record['prompt_tokens']} prompt tokens"
        text += f", {record['new_tokens']} new ones, {record['length_range'][0]} each"
        print(text + (f"; computes {record['computed_tokens']:.0f} tokens" if "computed_tokens" in record else ""))


def describe(setting: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())


def compare(name: str, case: dict, args: argparse.Namespace, work: Path) -> dict:
    """Pairs of steps in turn, then two steps of our plain layout for its memory."""
    best, shape = BEST[name], " x ".join(str(case[key]) for key in ("prompts", "samples", "new_tokens"))
    print(f"\n{name}: {shape} tokens, {case['precision']}\n  ours: {describe(best['ours'])} {' '.join(args.overrides)}")
    print(f"  TRL: {describe(best['trl'])}\n{HEAD}", flush=True)
    sides = [start_ours(case, best["ours"], args.pairs + 1, work, args.overrides)]
    sides.append(start_trl(case, [best["trl"]], args.pairs + 1, work))
    steps: dict[str, list[dict]] = {side.name: [] for side in sides}
    for number in range(args.pairs + 1):
        records = {side.name: side.step() for side in sides}
        check_tokens(case, *records.values())
        if number == 0:
            tell_tokens(records)
        for side, record in records.items():
            show(f"{side} {number or 'first step'}", record)
            steps[side].append(record)
    for side in sides:
        side.close()
    result = {side: {"first": all_[0], "median": middle(all_[1:]), "steps": all_[1:]} for side, all_ in steps.items()}
    plain = start_ours(case, best["ours"], 2, work, [*args.overrides, "policy.sequence_packing.share_prefix=false"])
    result["ours, plain layout"] = {"first": plain.step(), "steps": [plain.step()]}
    plain.close()
    result["ours, plain layout"]["median"] = middle(result["ours, plain layout"]["steps"])
    for side, values in result.items():
        show(f"{side}: median", values["median"])
    pairs = list(zip(steps["TRL"][1:], steps["ours"][1:], strict=True))
    ratios = {key: [theirs[key] / mine[key] for theirs, mine in pairs] for key in ("seconds", "generation", "training")}
    print("TRL / ours of each pair:", {key: [round(r, 2) for r in all_] for key, all_ in ratios.items()}, flush=True)
    return facts() | {"case": shape, "precision": case["precision"], "settings": best, "ratios": ratios} | result


def sweep(name: str, case: dict, side: str, args: argparse.Namespace, work: Path) -> dict:
    """One step of each setting, after one that does not count: of our programs, and of one of TRL, whose
    trainers each make their optimizer's state in it. So it chooses settings; a ratio takes pairs. One thread is tried
    with one setting of TRL's."""
    print(f"\n{name}: sweep of {side}\n{HEAD}", flush=True)
    results = []
    if side == "ours":
        for setting in ({"ranks": 2, "threads": 1}, {"ranks": 1, "threads": 2}):
            program = start_ours(case, setting, 2, work, args.overrides)
            program.step()
            results.append({"setting": setting} | program.step())
            program.close()
            show(describe(setting), results[-1])
        return facts() | {"sweep": results}
    grid = [(checkpointing, size, 2) for checkpointing in (False, True) for size in (8, 16, 64)]
    grid.append((False, 8, 1))
    settings = [dict(zip(BEST[name]["trl"], values, strict=True)) for values in grid]
    program = start_trl(case, [settings[0], *settings], 1, work)
    show("first step", program.step())
    for setting in settings:
        results.append({"setting": setting} | program.step())
        show(describe(setting), results[-1])
        del results[-1]["peak_bytes"]  # one process runs all settings: what those before left is in it
    program.close()
    return facts() | {"sweep": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, such as SmolLM2-135M-Instruct's")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="of our config")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--sweep", choices=("trl", "ours"))
    parser.add_argument(
        "--shape", type=int, nargs=3, help="other prompts, samples and new tokens: does it run? Writes nothing"
    )
    parser.add_argument("--out", type=Path, default=ROOT / f"bench/results/trl_{datetime.date.today()}.json")
    args = parser.parse_args()
    sys.path.insert(1, str(TRL))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; `python -m bench.trl --help` has the command, for {TRL}")
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "accelerate")}
    print(facts()["machine"], versions, sep="\n")
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        for name in args.cases:
            case = prepare(name, args, Path(work))
            if args.sweep:
                results[f"{name}, sweep of {args.sweep}"] = sweep(name, case, args.sweep, args, Path(work)) | versions
            else:
                results[name] = compare(name, case, args, Path(work)) | versions
            if not args.shape:
                args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
