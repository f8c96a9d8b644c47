"""An agent whose rollouts branch: two drafts of an answer, a second try after each, a judge in its own conversation.

For a report to look at. In the root, with tests/helpers in PYTHONPATH:

    ./train.sh examples/agents/calculator.yaml env.agents.function=branching_agent:solve 'env.custom={}'
"""

import asyncio

from openai import AsyncOpenAI

from examples.agents.calculator import calculator

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")


async def solve(base_url: str, messages: list[dict], answer: str) -> float:
    """The reward: the share of right second tries."""
    ask = CLIENT.with_options(base_url=base_url).chat.completions.create
    drafts = (await ask(model="policy", messages=messages, n=2)).choices

    async def try_again(draft: str) -> str:
        said = [{"role": "assistant", "content": draft}, {"role": "user", "content": calculator(draft, answer)}]
        reply = await ask(model="policy", messages=[*messages, *said])
        return reply.choices[0].message.content or ""

    tries = await asyncio.gather(*[try_again(draft.message.content or "") for draft in drafts])
    judged = [{"role": "user", "content": "=".join(tries)[:8] + "="}]
    await ask(model="policy", messages=judged)
    num_right = sum(reply.strip() == answer for reply in tries)
    return num_right / len(tries)
