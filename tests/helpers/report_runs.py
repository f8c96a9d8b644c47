"""Folders as runs leave them, with invented numbers, dumped tokens, and texts that attack the page of the report."""

import json
import math
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WORDS = "so we have the sum of all first then subtract seven and check it again which gives answer therefore".split()
OUTCOMES = ("ok", "wrong", "parse_fail", "timeout", "error")
ATTACKS = (
    "</script><img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "\u2028\u2029\0\x07\x1b[31mred\x1b]0;owned\x07",
    "half \ud800 and \udfff",
    "\u202egnp.exe\u202c \u2066bidi\u2069 \u05e9\u05dc\u05d5\u05dd",
    "javascript:document.title='owned'",
    "long " * 600_000,
    "\u4e2d\u6587" * 50_000,
    "a" * 300_000,
    "",
)


def metrics_of(rng: random.Random) -> dict[str, float]:
    numbers = {f"train/number_{i}": rng.gauss(0, 1) for i in range(110)}
    return numbers | {"train/reward": rng.random(), "train/health/truncated": 1.0}


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) + str(rng.randrange(99)) for _ in range(num_words))


def make_run(
    folder: Path, *, num_steps: int, num_envs: int, num_samples: int, num_dumps: int = 0, seed: int = 0
) -> None:
    rng = random.Random(seed)
    envs = [f"env_{i}" for i in range(num_envs)]
    folder.mkdir(parents=True)
    texts = [text_of(rng, rng.randrange(20, 200)) for _ in range(2000)]
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as samples:
        for step in range(num_steps + 1):
            if step % max(num_steps // 10, 1) == 0:
                greedy = 0.2 + 0.7 * step / num_steps
                values = {"validation/greedy/accuracy": greedy, "validation/sampled/accuracy": greedy - 0.1}
                metrics.write(json.dumps({"step": step, **values}) + "\n")
            if step:
                metrics.write(json.dumps({"step": step, **metrics_of(rng)}) + "\n")
                for i in range(num_samples):
                    samples.write(json.dumps(sample_of(step, i, envs, texts, rng)) + "\n")
    end = {"code": 0, "reason": f"trained to step {num_steps}", "rank": 0}
    (folder / "exit.json").write_text(json.dumps(end) + "\n")
    for k in range(num_dumps):
        make_dump(folder / "rollouts" / f"step_{(k + 1) * num_steps // num_dumps:06d}", num_samples, envs, texts, rng)


def sample_of(step: int, i: int, envs: list[str], texts: list[str], rng: random.Random) -> dict:
    outcome = rng.choices(OUTCOMES, (50, 40, 8, 1.5, 0.5))[0]
    reward = float(outcome == "ok")
    sample = {"step": step, "kind": "train", "prompt": texts[(step * 31 + i // 8) % 2000], "reply": rng.choice(texts)}
    sample |= {"row_id": i // 8, "index": i % 8, "env_name": envs[i % len(envs)], "reward": reward, "outcome": outcome}
    sample |= {"unshaped_reward": reward, "advantage": reward - 0.5 + rng.gauss(0, 0.1), "finish_reason": "stop"}
    return sample | {"weight_version": step - 1, "num_gen_tokens": rng.randrange(30, 900)}


def make_dump(folder: Path, num_samples: int, envs: list[str], texts: list[str], rng: random.Random) -> None:
    """A dumped step of two ranks: the even samples on the first."""
    folder.mkdir(parents=True)
    samples = [sample_of(0, i, envs, texts, rng) for i in range(num_samples)]
    for sample in samples:
        sample |= {"prompt_text": sample.pop("prompt"), "prompt_ids": [1] * 20}
        sample["tokens"] = [word + " " for word in sample.pop("reply").split()]
        del sample["step"], sample["kind"], sample["num_gen_tokens"]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    noise = np.random.default_rng(rng.randrange(2**31))
    for rank in (0, 1):
        lines = range(rank, num_samples, 2)
        lengths = [len(samples[line]["tokens"]) for line in lines]
        total = sum(lengths)
        mask_T = noise.random(total) > 0.03
        logp_T = np.where(mask_T, -noise.exponential(0.7, total), math.nan)
        arrays = {"sample_S": np.array(lines, np.int32), "num_tokens_S": np.array(lengths, np.int32), "mask_T": mask_T}
        arrays |= {"output_ids_T": np.zeros(total, np.int32), "version_T": np.zeros(total, np.int32)}
        arrays |= {"logp_T": logp_T, "sampler_logp_T": logp_T + noise.normal(0, 0.02, total)}
        arrays |= {"entropy_T": np.where(mask_T, noise.exponential(0.8, total), math.nan)}
        arrays = {name: x.astype(np.float32) if x.dtype == float else x for name, x in arrays.items()}
        save_file(arrays, folder / f"rank_{rank:03d}.safetensors")


def make_hostile(folder: Path) -> None:
    """Each attack as every text of a sample, as the name of a metric, and as why the run ended; then half a line."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as samples:
        for step, attack in enumerate(ATTACKS, 1):
            values = {"train/reward": step / 10, "train/loss": math.nan if step % 2 else -math.inf, "train/lr": 10**400}
            metrics.write(json.dumps({"step": step, **values, f"train/{attack[:60]}": 1.0}) + "\n")
            names = ("prompt", "reply", "kind", "env_name", "outcome", "finish_reason", "row_id")
            record = {name: attack if name in ("prompt", "reply") else attack[:60] for name in names}
            samples.write(json.dumps({"step": step, "reward": None, **record}) + "\n")
            samples.write(json.dumps({"step": step, "reward": [attack[:9]], "reply": {"a": 1}}) + "\nno json\n")
        samples.write('{"step": 99, "reply": "half')
    (folder / "exit.json").write_text(json.dumps({"code": 1, "reason": ATTACKS[0], "rank": 0}) + "\n")
