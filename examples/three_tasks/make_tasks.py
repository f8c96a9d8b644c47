"""Makes the problems of three tasks and starter/, the 0.5 M-parameter model that does each of them badly.

    OMP_NUM_THREADS=1 .venv/bin/python -m examples.three_tasks.make_tasks [FOLDER]      (from the repository's root)

    add       37+48=      85            environment `exact`: the whole reply is the number
    subtract  84-37=      \\boxed{47}    environment `math`: the answer is found in the reply
    sort      sort 8314   1348          rewards.py, a reward function as TRL takes them: share of digits in their place

The starter of examples/arithmetic, taught the other two: 60% of the answers it sees forget the carry or the borrow (all
problems have one), and half of the sorted numbers have two neighbours exchanged. What is left for reinforcement
learning is about that much of each task.
"""

import json
import random
import sys
from pathlib import Path

import torch

from base.hf.tokenizer import Tokenizer
from base.hf.weights import save_hf
from examples.arithmetic import make_starter
from examples.arithmetic.make_problems import needs_carry, sum_without_carry
from model import Decoder, load_policy

NUM_TRAIN, NUM_HELDOUT = 1500, 100
FORGET_SHARE, SWAP_SHARE = 0.6, 0.5
NUM_STEPS, BATCH_SIZE, LEARNING_RATE, SEED = 900, 64, 2e-3, 0


def difference_without_borrow(a: int, b: int) -> int:
    """84-37 -> 57: the tens as if nothing had been borrowed. a >= b."""
    return (a // 10 - b // 10) * 10 + (a - b) % 10


def draw(task: str, rng: random.Random) -> tuple[str, str, str]:
    """(problem, right answer, what the starter is taught to reply)."""
    if task == "sort":
        digits = [rng.choice("0123456789") for _ in range(4)]
        right = sorted(digits)
        taught = right[:]
        if rng.random() < SWAP_SHARE:
            k = rng.randrange(3)
            taught[k : k + 2] = taught[k + 1], taught[k]
        return "sort " + "".join(digits), "".join(right), "".join(taught)
    forgets = rng.random() < FORGET_SHARE
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if task == "add" and needs_carry(a, b):
            return f"{a}+{b}=", str(a + b), str(sum_without_carry(a, b) if forgets else a + b)
        if task == "subtract" and a >= b and a % 10 < b % 10:
            break
    taught = difference_without_borrow(a, b) if forgets else a - b
    return f"{a}-{b}=", str(a - b), f"\\boxed{{{taught}}}"


TASKS = ("add", "subtract", "sort")


def write_problems(folder: Path) -> None:
    """<task>.jsonl and <task>_heldout.jsonl, without a problem in common."""
    for task in TASKS:
        rng, rows = random.Random(f"{SEED} {task}"), {}
        while len(rows) < NUM_TRAIN + NUM_HELDOUT:
            problem, answer, _ = draw(task, rng)
            rows[problem] = {"problem": problem, "answer": answer}
        lines = [json.dumps(row) + "\n" for row in rows.values()]
        (folder / f"{task}.jsonl").write_text("".join(lines[:NUM_TRAIN]))
        (folder / f"{task}_heldout.jsonl").write_text("".join(lines[NUM_TRAIN:]))


def draw_batch(rng: random.Random, tokenizer: Tokenizer, heldout: set[str]) -> dict[str, torch.Tensor]:
    """A pack of problems with taught replies, as the arguments of `Decoder.forward`."""
    sequences = []
    while len(sequences) < BATCH_SIZE:
        problem, _, taught = draw(TASKS[len(sequences) % 3], rng)
        if problem not in heldout:
            prompt = tokenizer.render([{"role": "user", "content": problem}])
            sequences.append((prompt, [*tokenizer.backend.encode(taught).ids, make_starter.END_ID]))
    return make_starter.pack_of(sequences)


def train(folder: Path, tokenizer: Tokenizer) -> Decoder:
    model = load_policy(Path(make_starter.__file__).parent / "starter", device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), betas=make_starter.BETAS, weight_decay=make_starter.WEIGHT_DECAY)
    files = [folder / f"{task}_heldout.jsonl" for task in TASKS]
    heldout = {json.loads(line)["problem"] for file in files for line in file.read_text().splitlines()}
    rng = random.Random(SEED)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / 50, 1 - step / NUM_STEPS)
        loss = make_starter.teach(model, optimizer, draw_batch(rng, tokenizer, heldout))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{NUM_STEPS}  loss {loss:.4f}", flush=True)
    return model


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    write_problems(folder)
    make_starter.write_configs(folder / "starter")
    model = train(folder, Tokenizer(folder / "starter"))
    save_hf(model, folder / "starter", folder / "starter", dtype=torch.bfloat16)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
