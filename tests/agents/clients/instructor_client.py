"""instructor in each of its modes for OpenAI's endpoint, with a retry."""

import instructor
from instructor.core import InstructorError
from openai import OpenAI
from pydantic import BaseModel

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON)


class Sum(BaseModel):
    total: int


def solve(base_url, messages, seed):
    client = OpenAI(base_url=base_url, api_key="none")
    reward = float(seed % 2)
    for mode in MODES:
        typed = instructor.from_openai(client, mode=mode)
        try:
            typed.chat.completions.create(model="policy", messages=messages, response_model=Sum, max_retries=2)
            reward += 1
        except InstructorError:  # no try had a sum, or a reply was cut
            reward -= 0.5
    return reward
