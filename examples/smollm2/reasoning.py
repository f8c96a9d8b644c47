"""A task of reasoning-gym as chats for a small model: one problem with its answer, then the problem to solve.

dataset_name: examples.smollm2.reasoning:train (or :held_out), subset: a task with its arguments, as in
examples/envs/reasoning_gym.py. The first problem is the example, the next 300 are held out, the others train.
"""

from examples.envs.reasoning_gym import rows

NUM_HELD_OUT = 300


def train(cfg):
    return chats(cfg)[NUM_HELD_OUT:]


def held_out(cfg):
    return chats(cfg)[:NUM_HELD_OUT]


def chats(cfg):
    example, *drawn = rows(cfg)  # without repetition: nothing is in two sets
    shown = [{"role": "user", "content": example["problem"]}, {"role": "assistant", "content": example["answer"]}]
    for row in drawn:
        row["messages"] = [*shown, {"role": "user", "content": row.pop("problem")}]
    return drawn
