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
    dumped_steps = [(k + 1) * num_steps // num_dumps for k in range(num_dumps)]
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            if step % max(num_steps // 10, 1) == 0:
                greedy = 0.2 + 0.7 * step / num_steps
                values = {"validation/greedy/accuracy": greedy, "validation/sampled/accuracy": greedy - 0.1}
                metrics.write(json.dumps({"step": step, **values}) + "\n")
            if step:
                metrics.write(json.dumps({"step": step, **metrics_of(rng)}) + "\n")
                samples = [sample_of(step, i, envs, texts, rng) for i in range(num_samples)]
                numbers = [numbers_of(sample, rng) for sample in samples[: num_samples if step in dumped_steps else 16]]
                for i, sample in enumerate(samples):
                    if i < 16:  # as run/log.py does
                        tokens = {"tokens": tokens_of(sample), "sampler_logps": for_json(numbers[i]["logp_T"])}
                        sample = sample | tokens
                    file.write(json.dumps(sample) + "\n")
                if step in dumped_steps:
                    make_dump(folder / "rollouts" / f"step_{step:06d}", samples, numbers)
    end = {"code": 0, "reason": f"trained to step {num_steps}", "rank": 0}
    (folder / "exit.json").write_text(json.dumps(end) + "\n")


def sample_of(step: int, i: int, envs: list[str], texts: list[str], rng: random.Random) -> dict:
    outcome = rng.choices(OUTCOMES, (50, 40, 8, 1.5, 0.5))[0]
    reward = float(outcome == "ok")
    sample = {"step": step, "kind": "train", "prompt": texts[(step * 31 + i // 8) % 2000], "reply": rng.choice(texts)}
    sample |= {"row_id": i // 8, "index": i % 8, "env_name": envs[i // 8 % len(envs)], "reward": reward}
    sample |= {"outcome": outcome, "unshaped_reward": reward, "advantage": reward - 0.5 + rng.gauss(0, 0.1)}
    return sample | {"finish_reason": "stop", "weight_version": step - 1, "num_gen_tokens": rng.randrange(30, 900)}


def tokens_of(sample: dict) -> list[str]:
    """The words of a reply, each with the space behind it."""
    words = sample["reply"].split(" ")
    return [*(word + " " for word in words[:-1]), words[-1]]


def numbers_of(sample: dict, rng: random.Random) -> dict[str, np.ndarray]:
    """Invented numbers of each token, as a dump has them; three of a hundred are not trained."""
    noise = np.random.default_rng(rng.randrange(2**31))
    num_tokens = len(tokens_of(sample))
    mask_T = noise.random(num_tokens) > 0.03
    logp_T = np.where(mask_T, -noise.exponential(0.7, num_tokens), math.nan)
    return {
        "mask_T": mask_T,
        "trainer_logp_T": logp_T.astype(np.float32),
        "logp_T": (logp_T + noise.normal(0, 0.02, num_tokens)).astype(np.float32),
        "entropy_T": np.where(mask_T, noise.exponential(0.8, num_tokens), math.nan).astype(np.float32),
        "id_T": np.zeros(num_tokens, np.int32),
        "version_T": np.zeros(num_tokens, np.int32),
    }


def for_json(numbers_T: np.ndarray) -> list[float | None]:
    return [round(x, 4) if math.isfinite(x) else None for x in numbers_T.tolist()]


def make_dump(folder: Path, samples: list[dict], numbers: list[dict[str, np.ndarray]]) -> None:
    """A dumped step of two ranks: the even samples on the first."""
    folder.mkdir(parents=True)
    records = []
    for sample in samples:
        record = {name: value for name, value in sample.items() if name not in ("step", "kind", "num_gen_tokens")}
        record |= {"prompt_text": record.pop("prompt"), "prompt_ids": [1] * 20, "tokens": tokens_of(sample)}
        del record["reply"]
        records.append(record)
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for rank in (0, 1):
        lines = range(rank, len(samples), 2)
        arrays = {name: np.concatenate([numbers[line][name] for line in lines]) for name in numbers[0]}
        arrays["sample_S"] = np.array(lines, np.int32)
        arrays["num_tokens_S"] = np.array([len(records[line]["tokens"]) for line in lines], np.int32)
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


def call_of(number: int, messages: list[dict], text: str, advantage: float, **reply) -> dict:
    """A call as run/log.py writes it: each word of its reply is a token."""
    words = [word for word in text.replace(" ", " \0").split("\0") if word]
    record = {"number": number, "messages": messages, "reply": {"role": "assistant", "content": text, **reply}}
    record |= {"ids": [7] * len(words), "is_trained": True, "reward": advantage + 0.5, "advantage": advantage}
    return record | {"tokens": words, "sampler_logps": [-0.1 * i for i in range(len(words))]}


def branching_rows() -> list[list[dict]]:
    """Three sequences of a rollout: a plan; two goes from there, of which one calls a tool and is asked to check; and a
    judge in a conversation of its own."""
    system = {"role": "system", "content": "You add numbers. A calculator may be asked once."}
    question = {"role": "user", "content": "A farmer has 37 sheep and buys 48. How many has he now?"}
    plan = call_of(0, [system, question], "I add the two numbers: 37 and 48.", 0.125)
    function = {"name": "calculator", "arguments": '{"a": 37, "b": 48}'}
    go_on = {"role": "user", "content": "Go on."}
    with_tool = call_of(1, [go_on], "I ask the calculator. <tool_call>", 0.4375, tool_calls=[{"function": function}])
    answer = call_of(3, [{"role": "tool", "content": "85"}], "The answer is 85 sheep.", 0.4375)
    alone = call_of(
        2, [system, question, plan["reply"], go_on], "7 and 8 are 15, 3 and 4 are 7: it is 75 sheep.", -0.625
    )
    check = call_of(4, [{"role": "user", "content": "Did you carry the one?"}], "No. Then it is 85 sheep.", -0.125)
    asked = {"role": "user", "content": "Which is right, 85 or 75? Say the number alone."}
    judge = call_of(5, [asked], "85", 0.25) | {"is_trained": False}
    return [[plan, with_tool, answer], [alone, check], [judge]]
