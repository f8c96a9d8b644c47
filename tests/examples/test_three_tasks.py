"""examples/three_tasks: its problems and reward function, and that batches of configs/three_tasks.yaml are as mixed."""

import json
from collections import Counter
from pathlib import Path

import pytest

from base.check import rules
from base.hf.tokenizer import Tokenizer
from base.inputs import reader
from base.inputs.mixing import Mixture
from base.inputs.scan import load_dataset
from examples.three_tasks import make_tasks
from examples.three_tasks.rewards import digits_in_place

HERE = Path(make_tasks.__file__).parent
RIGHT = {
    "add": lambda problem: str(sum(map(int, problem.removesuffix("=").split("+")))),
    "subtract": lambda problem: str(int(problem[:2]) - int(problem[3:5])),
    "sort": lambda problem: "".join(sorted(problem.removeprefix("sort "))),
}


def rows_of(name):
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", make_tasks.TASKS)
def test_problems(task, tmp_path):
    train, heldout = rows_of(task), rows_of(f"{task}_heldout")
    assert (len(train), len(heldout)) == (1500, 100)
    assert len({row["problem"] for row in train + heldout}) == 1600
    assert all(row["answer"] == RIGHT[task](row["problem"]) for row in train + heldout)
    make_tasks.write_problems(tmp_path)
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in HERE.glob("*.jsonl"))


def test_digits_in_place():
    got = digits_in_place(["1348", "1384", "134", "13489", "", "8431"], ["1348"] * 6, problem=["sort 8314"] * 6)
    assert got == [1.0, 0.5, 0.75, 0.8, 0.0, 0.0]


def test_batches_follow_the_configured_mix_exactly(monkeypatch):
    """Each step has 8 prompts of each task, in its environment, and no problem comes again before all have come."""
    monkeypatch.chdir(HERE.parent.parent)
    cfg = reader.load("configs/three_tasks.yaml", [])
    rules.check_config(cfg, world_size=2)
    tokenizer, sections = Tokenizer(HERE / "starter"), cfg.data.train
    max_prompt = cfg.max_prompt_tokens
    sets = [load_dataset(section, tokenizer, max_prompt, {}, lambda *_: None)[0] for section in sections]
    mixture = Mixture(sets, cfg)
    cursor, seen = mixture.start(), Counter()
    task_of = {"exact": "add", "math": "subtract", "examples.three_tasks.rewards:digits_in_place": "sort"}
    for step in range(1, 376):  # two passes over the 1500 problems of each
        rows, cursor = mixture.draw(cursor, cfg.grpo.num_prompts_per_step)
        assert Counter(row.env_name for row in rows) == dict.fromkeys(task_of, 8)
        assert all(row.dataset == task_of[row.env_name] for row in rows)
        assert all(row.answer == RIGHT[row.dataset](row.messages[0]["content"]) for row in rows)
        seen.update(row.messages[0]["content"] for row in rows)
        assert step != 187 or max(seen.values()) == 1
    assert len(seen) == 4500 and set(seen.values()) == {2}
