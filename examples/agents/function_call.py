"""An agent that offers a function: the policy may call `multiply`, reads the product, and answers.

    ./train.sh examples/agents/function_call.yaml

The chat template shows the policy the function; the parser that the yaml names reads the calls in its replies.
"""

import json
import random
import re

from openai import OpenAI

CLIENT = OpenAI(base_url="http://localhost", api_key="none")
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def rows(cfg):
    """A product of five digits each for each seed in the subset, such as "0:1000"."""
    found = []
    for seed in range(*map(int, cfg.subset.split(":"))):
        draw = random.Random(seed)
        a, b = draw.randrange(10_000, 100_000), draw.randrange(10_000, 100_000)
        found.append({"problem": f"What is {a} * {b}? End with the number.", "answer": str(a * b)})
    return found


def solve(base_url: str, messages: list[dict], answer: str, max_turns: int = 3) -> float:
    """The reward: whether a reply without a call, among the first max_turns, ends with the answer."""
    client = CLIENT.with_options(base_url=base_url)
    messages = list(messages)
    for _ in range(max_turns):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not reply.tool_calls:
            numbers = re.findall(r"\d+", reply.content.replace(",", ""))
            return float(numbers[-1:] == [answer])
        messages.append(reply)
        for call in reply.tool_calls:
            result = multiply(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def multiply(name: str, arguments: str) -> str:
    """The result of a call, which may be anything that a policy writes."""
    if name != "multiply":
        return f"error: there is no function {name}"
    try:
        given = json.loads(arguments)
        a, b = int(given["a"]), int(given["b"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "error: give two whole numbers, a and b"
    return str(a * b) if max(abs(a), abs(b)) < 10**18 else "error: the numbers are too large"
