"""LiteLLM's bridges: Responses over chat completions, and Anthropic's messages over Responses."""

import asyncio

import litellm


def solve(base_url, messages):
    ask = {"model": "openai/policy", "api_base": base_url, "api_key": "none"}
    replies = [litellm.responses(input=messages[-1]["content"], **ask)]
    replies.append(asyncio.run(litellm.anthropic_messages(messages=list(messages), max_tokens=16, **ask)))
    return float(len(str(replies[-1])) % 2)
