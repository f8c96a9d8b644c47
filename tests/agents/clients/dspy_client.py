"""DSPy: a prediction, and ReAct with a tool. Its adapters ask for JSON where a text of the policy does not parse."""

import dspy
from dspy.utils.exceptions import AdapterParseError


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    lm = dspy.LM("openai/policy", api_base=base_url, api_key="none", cache=False, num_retries=0)
    reward = 0.0
    for module in (dspy.Predict("question -> answer"), dspy.ReAct("question -> answer", tools=[f], max_iters=2)):
        try:
            with dspy.context(lm=lm):
                reward += 1 + len(module(question=messages[-1]["content"]).answer) % 2
        except (AdapterParseError, ValueError):  # neither of the two forms
            reward -= 0.5
    return reward
