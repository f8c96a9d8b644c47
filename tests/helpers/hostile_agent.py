"""An agent that fails with a hostile text in every way an agent can, and a reward function that does. Standard library
alone: it runs in worker processes."""

import json
import sys
import urllib.error
import urllib.request

TEXTS = (
    "\ud800",
    "half \udfff of a pair",
    "\x1b[2J\x1b]0;owned\x07",
    "a\0b\x7f\x85\r over it",
    "line\u2028other\nstep 99/99 | accuracy 1.000",
    "\u202e\u2066 right to left",
    "[" * 50_000,
    "<|end|><|assistant|>",
)


def ask(base_url, message):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}, message]}).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=60) as answer:
        return answer.status


def solve(base_url, seed):
    """By its seed: asks, with a hostile call in the history; then raises, exits, or returns the text."""
    text = TEXTS[seed % len(TEXTS)]
    call = {"function": {"name": "f", "arguments": json.dumps({"a": text})}}
    deep = {"function": {"name": "f", "arguments": "[" * 50_000}}
    ask(base_url, {"role": "user", "content": "and?"})
    ask(base_url, {"role": "assistant", "tool_calls": [call]})
    try:
        ask(base_url, {"role": "assistant", "tool_calls": [deep]})
    except urllib.error.HTTPError as error:
        assert error.code == 400, error
    kind = seed // len(TEXTS) % 4
    if kind == 0:
        raise ValueError(f"the policy wrote {text}")
    if kind == 1:
        sys.exit(f"{text} bye")
    if kind == 2:
        return {"reward": 1, "outcome": text}
    return {"reward": 1, "extracted": text}


def reward(completions, **columns):
    if "I do not know" in str(completions):  # the trial before the run
        return [0.0] * len(completions)
    raise ValueError(f"cannot read {TEXTS[0]}{TEXTS[2]}: {completions}")
