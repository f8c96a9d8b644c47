"""An agent whose rollouts branch: two drafts of an answer, a second try after each, a judge in its own conversation.

For a report to look at. In the root, with tests/helpers in PYTHONPATH:

    ./train.sh examples/agents/calculator.yaml env.agents.function=branching_agent:solve 'env.custom={}'
"""

from openai import OpenAI

from examples.agents.calculator import calculator

CLIENT = OpenAI(base_url="http://localhost", api_key="none")


def solve(base_url: str, messages: list[dict], answer: str) -> float:
    """The reward: the share of branches with a right answer."""
    ask = CLIENT.with_options(base_url=base_url).chat.completions.create
    tries = []
    num_right = 0
    for draft in ask(model="policy", messages=messages, n=2).choices:
        told = calculator(draft.message.content, answer)
        second = [*messages, draft.message, {"role": "user", "content": told}]
        tries.append(ask(model="policy", messages=second).choices[0].message.content)
        num_right += answer in (draft.message.content, tries[-1])
    ask(model="policy", messages=[{"role": "user", "content": f"{tries[0]}={tries[1]}?"[:9]}])
    return num_right / len(tries)
