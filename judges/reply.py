"""What of a reply is judged: `behind_thought`."""

import re

# The ends of a thought, as DeepSeek and Qwen, Seed-OSS, Magistral, Kimi and Sky-T1 write it.
_END_OF_THOUGHT = re.compile(
    r"</(?:seed:)?(?:think|thinking|thought)>|\[/THINK\]|\u25c1/think\u25b7|<\|end_of_thought\|>"
)


def behind_thought(reply: str) -> str:
    """What follows the last thought that is closed; the whole reply, if none is. A candidate that stands in a thought
    is no answer."""
    ends = [match.end() for match in _END_OF_THOUGHT.finditer(reply)]
    return reply[ends[-1] :] if ends else reply
