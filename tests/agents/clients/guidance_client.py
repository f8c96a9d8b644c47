"""guidance, which always asks for top_logprobs."""

from guidance import assistant, gen, models, user


def solve(base_url, messages):
    lm = models.OpenAI("policy", echo=False, base_url=base_url, api_key="none")
    for question in (messages[-1]["content"], "Sure?"):
        with user():
            lm += question
        with assistant():
            lm += gen("reply", max_tokens=16)
    return float(len(lm["reply"]) % 2)
