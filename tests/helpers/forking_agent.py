"""An agent whose rollouts have one to four rows, by its seed; it waits as long as chance has it."""

import asyncio
import random
import time

from bad_agents import ask


async def solve(base_url, messages, answer, seed, keys_file=None):
    text = messages[-1]["content"]
    if keys_file:
        with open(keys_file, "a") as file:
            file.write(base_url.split("/")[-2] + "\n")
    time.sleep(random.random() / 20)
    reply = await asyncio.to_thread(ask, base_url, text)
    asks = [asyncio.to_thread(ask, base_url, f"{n}+{n}=") for n in range(seed % 4)]
    await asyncio.gather(*asks)
    return float(reply.strip() == answer)


async def scored_by_length(base_url, messages, seed):
    await solve(base_url, messages, "", seed)
    return float(seed % 3)


def scored_by_call(base_url, messages, seed):
    """Calls one after the other, of which each has a row and a reward of its own."""
    rewards = [seed % 5]
    ask(base_url, messages[-1]["content"])
    for n in range(seed % 4):
        ask(base_url, f"{n}+{n}=")
        rewards.append(seed // (n + 2) % 3)
    return {"reward": sum(rewards), "call_rewards": rewards}
