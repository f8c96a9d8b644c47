"""An agent of one tool: the policy adds two numbers, a calculator checks it, and the policy may answer once more.

    ./train.sh examples/agents/calculator.yaml

It is a program like any other: it knows the OpenAI client and nothing of the trainer.
"""

from openai import OpenAI

CLIENT = OpenAI(base_url="http://localhost", api_key="none")  # creating one takes 30 ms


def solve(base_url: str, messages: list[dict], answer: str, second_reward: float = 0.5) -> float:
    """The reward: 1 if the first answer is right, second_reward if the second is (0: no second try), else 0."""
    client = CLIENT.with_options(base_url=base_url)
    for reward in filter(None, (1.0, second_reward)):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        if reply.content.strip() == answer:
            return reward
        messages = [*messages, reply, {"role": "user", "content": calculator(reply.content, answer)}]
    return 0.0


def calculator(guess: str, answer: str) -> str:
    """What to add to the guess, such as "+10"."""
    return f"{int(answer) - int(guess):+d}" if guess.isdecimal() and len(guess) < 6 else "?"
