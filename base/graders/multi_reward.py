"""The environment `math_multi_reward`: a right answer, a whole number and a form, each a reward of its own."""

import re
from collections.abc import Sequence

from envs import Environment, StepResult, Turn


class MathMultiReward(Environment):
    """Three rewards of 0 or 1 for GDPO, as in NeMo RL, and their sum: `correctness`, the text in <answer> equals the
    answer; `integer`, it consists of digits; `format`, the reply is <think>..</think>, one or two new lines and one
    <answer>..</answer>, with a thought, which NeMo RL does not ask for. Where the marks are missing, the text is the
    whole reply."""

    self_tests = (
        ("<think>\n1+1\n</think>\n<answer> 2 </answer>", "2", "ok"),
        ("2", "2", "ok"),
        ("<answer>2.0</answer>", "2", "wrong"),
    )
    reward_names = ("correctness", "integer", "format")
    FORM = re.compile(r"^<think>\s*(?!</think>)\S.*?</think>\n{1,2}<answer>.*</answer>$", re.DOTALL)

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.grade(turn.whole_reply, turn.answer, turn.opened) for turn in turns]

    def grade(self, reply: str, answer: str, opened: str) -> StepResult:
        _, _, from_answer = reply.rpartition("<answer>")
        text = from_answer.partition("</answer>")[0].strip()
        is_right = text == answer
        message = opened + reply
        has_one_answer = message.count("<answer>") == 1 and message.count("</answer>") == 1
        is_in_form = has_one_answer and self.FORM.search(message) is not None
        rewards = {"correctness": float(is_right), "integer": float(text.isdigit()), "format": float(is_in_form)}
        outcome = "ok" if is_right else "wrong"
        return StepResult(sum(rewards.values()), outcome, rewards=rewards, extracted=text)
