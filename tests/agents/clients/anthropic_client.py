"""Anthropic's own client: a loop with a tool, then a stream."""

import anthropic

TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"q": {"type": "integer"}}}}


def solve(base_url, messages):
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    ask = {"model": "policy", "max_tokens": 16, "system": "Be brief."}
    messages = list(messages)
    for _ in range(3):
        reply = client.messages.create(messages=messages, tools=[TOOL], **ask)
        messages.append({"role": "assistant", "content": reply.content})
        results = []
        for part in reply.content:
            if part.type == "tool_use":
                results.append({"type": "tool_result", "tool_use_id": part.id, "content": str(len(str(part.input)))})
        if not results:
            break
        messages.append({"role": "user", "content": results})
    with client.messages.stream(messages=messages[:1], **ask) as stream:
        text = "".join(stream.text_stream)
    return float(len(text) % 2)
