"""Chat messages behind a sampled reply -> token ids: several turns, and a reply that goes on with a given beginning.

A run of one turn does without this file.
"""

import re
from collections.abc import Sequence
from functools import partial

from base.hf.tokenizer import Dicts, Tokenizer, encodable, unused_characters
from config import DataError

HALF_A_TAG = re.compile(r"[<\[][^<>\[\]]*\Z")  # with which two texts may go on alike


def observation_ids(
    tokenizer: Tokenizer,
    messages: Dicts,
    reply_ids: Sequence[int],
    observation: Dicts,
    tools: Dicts | None = None,
    *,
    calling: dict | None = None,
    template_kwargs: dict | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Ids to append to a sampled reply: everything the template writes up to the opening of the next reply.

    messages: the conversation before the reply. The reply itself is never encoded: the template gets one private
    character in its place; or `calling`, the message of a reply that calls tools, with the character in its last
    call. The reply's sampled end token is not repeated. Control tokens in the observation are escaped. Where a
    template rewrites earlier turns (drops their thinking), the sampled ids stay as they were sampled.
    template_kwargs, max_tokens: as in `Tokenizer.render`. Raises DataError if the template refuses the observation, or
    leaves out the reply or a message of the observation.
    """
    end = ""
    if len(reply_ids) > 0:
        end = tokenizer.added.get(int(reply_ids[-1]), "")
    hole, mark = unused_characters([messages, calling, observation, tools, template_kwargs], 2)
    behind = partial(_behind, tokenizer, hole, mark, observation, tools, template_kwargs)
    text = None
    if calling is not None:
        text = behind([*messages, _with_hole(calling, hole)], [end, *turn_ends(tokenizer)])
    if text is None:
        text = behind([*messages, {"role": "assistant", "content": hole}])
    if text is None:
        raise DataError("the chat template leaves out the assistant's last message: it cannot do several turns")
    text = encodable(text)
    if end:
        text = re.sub(rf"\A\s*{re.escape(end)}", "", text)  # Llama 2 has a space before it
    # Behind what is before it: a tokenizer may open a text that stands alone with a space (Metaspace).
    before = tokenizer.encode(hole + end, max_tokens)
    whole = tokenizer.encode(hole + end + text, max_tokens)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return tokenizer.encode(text, max_tokens)


def _behind(
    tokenizer: Tokenizer,
    hole: str,
    mark: str,
    observation: Dicts,
    tools: Dicts | None,
    template_kwargs: dict | None,
    messages: Dicts,
    ends: Sequence[str] = (),
) -> str | None:
    """What the template writes behind the messages, the last of which has the hole; None if it does not write it.
    mark: a character that nothing has, either. ends: where the hole stands in a call, the tokens one of which ends
    the reply; without one the reply ends with the marks that close the call."""
    write = partial(tokenizer.write, tools=tools, template_kwargs=template_kwargs, escape=True)
    text = write([*messages, *observation], add_generation_prompt=True)
    if hole not in text:
        return None
    behind = text[text.rindex(hole) + 1 :]
    texts = [message["content"] for message in observation if isinstance(message["content"], str)]
    if not all(content.strip() in behind for content in texts):  # written in another way?
        marked = [_marked(message, mark) for message in observation]
        text = write([*messages, *marked], add_generation_prompt=True)
        if text[text.rindex(hole) :].count(mark) < len(texts):
            raise DataError(f"the chat template leaves out a message behind a reply: {observation!r:.200}")
    if not ends:
        return behind
    alone = write(messages, add_generation_prompt=False)
    closing = HALF_A_TAG.sub("", _common_start(behind, alone[alone.rindex(hole) + 1 :]))
    places = [closing.index(token) for token in ends if token and token in closing]
    return behind[min(places, default=len(closing)) :]


def open_reply_ids(
    tokenizer: Tokenizer,
    messages: Dicts,
    tools: Dicts | None = None,
    *,
    template_kwargs: dict | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Chat messages -> ids up to the last character of the last message, an assistant's, with which the reply goes
    on. Control tokens are escaped. template_kwargs, max_tokens: as in `Tokenizer.render`. Raises DataError if the
    template refuses the messages or leaves out the last one."""
    *before, last = messages
    [hole] = unused_characters([messages, tools, template_kwargs])
    opened = {**last, "content": last["content"] + hole}
    text = tokenizer.write([*before, opened], tools, False, template_kwargs, escape=True)
    if hole not in text:
        raise DataError("the chat template leaves out the assistant's last message: a reply cannot go on with it")
    return tokenizer.whole_ids(encodable(text[: text.rindex(hole)]), max_tokens)


def turn_ends(tokenizer: Tokenizer) -> list[str]:
    """The tokens that end an assistant's turn."""
    ids = [*tokenizer.eos_token_ids, tokenizer.turn_end]
    return [tokenizer.added[token_id] for token_id in ids if token_id in tokenizer.added]


def _common_start(one: str, other: str) -> str:
    size = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        size += 1
    return one[:size]


def _marked(message: dict, mark: str) -> dict:
    if isinstance(message["content"], str):
        return message | {"content": mark + message["content"]}
    return message


def _with_hole(calling: dict, hole: str) -> dict:
    """The message with the hole at the end of its last call."""
    *others, last = calling["tool_calls"]
    arguments = last["function"]["arguments"]
    if isinstance(arguments, dict):
        filled = {**arguments, hole: hole}
    else:
        filled = f"{arguments}{hole}"
    last = last | {"function": last["function"] | {"arguments": filled}}
    return calling | {"tool_calls": [*others, last]}
