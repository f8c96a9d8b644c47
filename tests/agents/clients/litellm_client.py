"""LiteLLM: a loop with a tool, a stream, and a context that is full, which it must recognize."""

import json

import litellm

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"q": {"type": "integer"}}}}


def solve(base_url, messages):
    ask = {"model": "openai/policy", "api_base": base_url, "api_key": "none"}
    messages = list(messages)
    for _ in range(3):
        reply = litellm.completion(messages=messages, tools=[{"type": "function", "function": TOOL}], **ask)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = str(len(json.dumps(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    streamed = ""
    for chunk in litellm.completion(messages=messages[:1], stream=True, **ask):
        streamed += chunk.choices[0].delta.content or ""
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 90_000}], **ask)
    except litellm.ContextWindowExceededError:
        return float(len(streamed) % 2)
    raise AssertionError("no context is that long")
