"""Runs of `grpo.main` whose responses outlast steps, with everything else switched on: carry_worker.py FOLDER

Two ranks with an engine each, a stand-in for vLLM; three environments, of which one has two turns and one is a reward
model's; dynamic sampling; age 2. In the first life rank 1's engine never returns a request of step 4; the second goes
on from what the first has saved. Writes answer.json as split_worker.py, and tokens.jsonl (record_samples.py).
"""

import sys
from pathlib import Path

import split_worker  # puts the stand-in where vllm is imported
from fake_vllm import LLMEngine
from record_samples import give_places, record
from small_run import STARTER

import envs
import grpo
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.inputs import run_inputs
from run import build

LOST_STEP = 4
SETS = ("train", "heldout", "third")
EVERYTHING = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2", "grpo.max_rollout_turns=2"]
EVERYTHING += ["loss_fn.use_importance_sampling_correction=true", "grpo.use_dynamic_sampling=true", "grpo.val_period=3"]
EVERYTHING += ["grpo.dynamic_sampling_max_gen_batches=99", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=6"]
EVERYTHING += ["checkpointing.save_period=1", "policy.generation.temperature=1.8"]
EVERYTHING += ["policy.generation.max_new_tokens=12", "policy.max_total_sequence_length=64", "grpo.max_num_epochs=9"]
EVERYTHING += ["data.train.2.env_name=reward_model"]
EVERYTHING += ["data.train.1.env_name=carry_worker:TwoTurns", "data.validation.env_name=carry_worker:TwoTurns"]


class TwoTurns(envs.Environment):
    """A hint after the first reply. Rewards that nearly always differ."""

    def step(self, turns):
        return [self.judge(turn) for turn in turns]

    def judge(self, turn):
        reward = len(turn.messages[-1]["content"]) / 4
        hint = ({"role": "user", "content": "12+34"},)
        return envs.StepResult(reward, "ok", done=bool(turn.state), observation=hint, state={"hinted": True})


class Score:
    """In place of the reward model."""

    def __init__(self, *_):
        pass

    def score(self, conversations):
        return [score(messages[-1]["content"]) for messages in conversations]


def score(reply):
    return sum(map(ord, reply)) % 7 / 7


def lose(fault):
    """The engine of this rank takes a request of LOST_STEP, and never returns it, though it says that it goes on."""
    add, has_unfinished = LLMEngine.add_request, LLMEngine.has_unfinished_requests
    lost = []

    def add_request(self, request_id, prompt, params, priority=0):
        if priority == LOST_STEP and not lost:
            lost.append(request_id)
        else:
            add(self, request_id, prompt, params, priority)

    assert fault == "lost"
    LLMEngine.add_request = add_request
    LLMEngine.has_unfinished_requests = lambda self: bool(lost) or has_unfinished(self)


def main(work: Path) -> None:
    folder = work / "lost"
    folder.mkdir(parents=True)
    split_worker.write_rows(folder)
    rows = (folder / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "third.jsonl").write_text("".join(rows[20:]))
    words = [*EVERYTHING, "watchdog.first_seconds=20"]
    words += [f"data.train.{i}.data_path={folder / name}.jsonl" for i, name in enumerate(SETS)]
    words += [f"data.train.{i}.output_key=answer" for i in (1, 2)]
    run_inputs.read_reward_model = lambda *_: (STARTER, read_model_config(STARTER), Tokenizer(STARTER))
    build.RewardModel = Score
    record(grpo, work / "tokens.jsonl")
    give_places(6)
    split_worker.put_in = lose
    split_worker.JOBS = {
        "lost": (2, (*words, *split_worker.HASTY), None, 1, "lost"),
        "resumed": (2, tuple(words), "lost", None, None),
    }
    split_worker.main(work, ["lost", "resumed"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
