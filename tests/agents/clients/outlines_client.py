"""outlines: text, a schema over OpenAI's endpoint, and over vLLM's. The endpoint enforces no schema."""

import outlines
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


def solve(base_url, messages):
    client = OpenAI(base_url=base_url, api_key="none")
    text = messages[-1]["content"]
    model = outlines.from_openai(client, "policy")
    replies = [model(text), model(text, Sum), outlines.from_vllm(client, "policy")(text, Sum)]
    return float(sum(map(len, replies)) % 3)
