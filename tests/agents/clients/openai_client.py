"""openai for Python: a tool, then a stream."""

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def solve(base_url, messages):
    client, messages = OpenAI(base_url=base_url, api_key="none"), list(messages)
    for _ in range(2):
        reply = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call.function.arguments})
        messages.append({"role": "user", "content": "Go on."})
    stream = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS, stream=True)
    return sum(len(choice.delta.content or "") for chunk in stream for choice in chunk.choices) % 2
