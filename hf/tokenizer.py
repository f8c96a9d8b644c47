"""Chat messages -> token ids and back: the tokenizer of a model folder and its chat template.

A template is a program that writes one text. That text is encoded as transformers would, with one difference: what a
message says never becomes a control token. Control tokens are the tokenizer's special tokens, what ends a reply, and
added tokens that look like `<|this|>`; other added tokens (`<think>`) are words a message may use.

To know which of the control tokens in a text were written by the template, the template runs again with one character
that nobody uses put into those of the messages (`<?|im_end|>`). Where that comes out, the text is cut before it is
encoded, so it is spelled in ordinary tokens. The text itself is always the template's of the real messages.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from config import DataError
from hf.files import read_json, read_text

# -------------------------------------------------------------------------------------------------------- tokenizer

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")  # DeepSeek's turn marks are not flagged special
PRIVATE_USE = range(0xF0000, 0x10FFFE)


class Tokenizer:
    """`tokenizer.json` plus a chat template: messages -> prompt ids, ids -> text.

    template: "default" for the model's own (none where it has none), None for none, a file's name, or the text.
    template_kwargs: what templates may ask for by name (`enable_thinking`, `date_string`). `vocab_size` is one past the
    largest id the tokenizer knows. A checkpoint's vocabulary may be padded beyond it; those ids are banned on both
    sides (DESIGN 4), or the engine samples ids that cannot be decoded (vllm#13175).
    """

    def __init__(self, folder: Path, template: str | None = "default", template_kwargs: dict[str, Any] | None = None):
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for a malformed file
            raise DataError(f"{folder / 'tokenizer.json'}: not a usable tokenizer ({error})") from error
        self.backend.no_truncation()  # the file may ask for both; transformers ignores it too
        self.backend.no_padding()
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise DataError(f"{folder / 'tokenizer.json'}: its vocabulary is empty")
        self.settings_file = folder / "tokenizer_config.json"
        self.settings = read_json(self.settings_file) if self.settings_file.is_file() else {}
        special = {name: text for name in SPECIAL if (text := self._special(name))}
        self.names = special | dict(template_kwargs or {})
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & self.names.keys()
        if reserved:
            raise DataError(f"policy.tokenizer.chat_template_kwargs: {min(reserved)} is not yours to set")
        self.now = datetime.now()  # one date for all that this process renders, also past midnight
        self.templates = {name: self._compile(text, folder) for name, text in self._texts(folder, template).items()}
        self.eos_token_ids = self._eos_token_ids(folder, special.get("eos_token"))
        self._find_control_tokens()

    def _texts(self, folder: Path, template: str | None) -> dict[str, str]:
        """Name -> template, of which one is "default"; {} for none."""
        if template != "default":
            if template is None or "{" in template:
                return {} if template is None else {"default": template}
            if not Path(template).is_file():
                raise DataError(
                    f"policy.tokenizer.chat_template={template!r}: no such file, and no template either; default = the "
                    "model's own, null = none"
                )
            return {"default": read_text(template)}
        file = folder / "chat_template.jinja"
        text = read_text(file) if file.is_file() else self.settings.get("chat_template")
        if isinstance(text, list):  # HF's named templates: [{"name": "default", "template": ...}, ...]
            if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in text):
                raise DataError(f"{self.settings_file}: chat_template: a list must be of {{name, template}}")
            texts = {entry["name"]: entry["template"] for entry in text if entry["name"] in ("default", "tool_use")}
            texts = texts if "default" in texts else {}
        else:
            texts = {} if text is None else {"default": text}
        for text in texts.values():
            if not isinstance(text, str):
                raise DataError(f"{self.settings_file}: chat_template: expected text, got {type(text).__name__}")
        return texts

    def _compile(self, text: str, folder: Path) -> jinja2.Template:
        """With all that transformers gives to templates, so that models' own run as they are."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = self.now.strftime
        try:
            return environment.from_string(text)
        except Exception as error:  # jinja2 compiles it to Python, which has errors of its own
            raise DataError(f"{folder}: the chat template does not parse ({error})") from error

    def _eos_token_ids(self, folder: Path, token: str | None) -> list[int]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
            found = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token_id) is not int or token_id < 0 for token_id in found):
                raise DataError(f"{folder / name}: eos_token_id: expected an id or a list of ids, got {value!r}")
            ids += found
        if token and (token_id := self.backend.token_to_id(token)) is not None:
            ids.append(token_id)
        if not ids:
            raise DataError(
                f"{folder}: no eos_token_id in generation_config.json, config.json or tokenizer_config.json"
            )
        return sorted(set(ids))

    def _special(self, key: str) -> str:
        value = self.settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value or ""
        if not isinstance(text, str):
            raise DataError(f"{self.settings_file}: {key}: expected text or {{content: text}}, got {value!r}")
        return text

    def _find_control_tokens(self) -> None:
        decoder = self.backend.get_added_tokens_decoder()
        self.added = {token_id: token.content for token_id, token in decoder.items()}
        control = {
            text
            for token_id, text in self.added.items()
            if decoder[token_id].special or token_id in self.eos_token_ids or LOOKS_SPECIAL.fullmatch(text)
        }
        longest_first = sorted(control, key=lambda token: (-len(token), token))
        first, any_rank = re.escape("".join({token[0] for token in control})), "|".join(map(re.escape, longest_first))
        # Looking ahead, so that those that overlap are found as well; the first lookahead is for speed.
        self.control = re.compile(f"(?=[{first}])(?=({any_rank}))" if control else "(?!)")
        self.starts = {token[:k] for token in control for k in range(1, len(token))}
        self.ends = {token[k:] for token in control for k in range(1, len(token))}
        self.longest = max(map(len, control), default=0)

    def render(
        self, messages: Sequence[dict], tools: Sequence[dict] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Chat messages -> ids, with the template's own opening of the assistant's turn at the end where it is asked.

        Without a template (a base model): the messages' text, behind what the tokenizer opens a text with (Llama's
        BOS). What it closes a text with is left off: the reply goes on from there. Raises whatever a template raises.
        """
        ids = self._encode(*self._write(messages, tools, add_generation_prompt))
        if self.templates or not ids:
            return ids
        plain, whole = (self.backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        return whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)] + ids

    def observation_ids(
        self,
        messages: Sequence[dict],
        reply_ids: Sequence[int],
        observation: Sequence[dict],
        tools: Sequence[dict] | None = None,
    ) -> list[int]:
        """Ids to append to a sampled reply: all that the template writes from its end to the opening of the next one.

        messages: those before the reply. The reply itself is never encoded: the template gets one private character
        in its place. The end token it was sampled with is not repeated. A template that rewrites earlier turns (drops
        their thinking) does so for its readers only; what was sampled stays as it was sampled. Raises what it raises.
        """
        hole = _unused(messages, observation, tools)
        reply = {"role": "assistant", "content": hole}
        try:
            text, cuts = self._write([*messages, reply, *observation], tools)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template refuses what the environment answers {observation} ({error})"
            ) from error
        if hole not in text:
            raise DataError("the chat template leaves out the assistant's last message: it is not for several turns")
        start = text.rindex(hole) + 1
        if len(reply_ids) and (end := self.added.get(int(reply_ids[-1]))):
            closing = re.compile(rf"\s*{re.escape(end)}").match(text, start)  # Llama 2 has a space before it
            start = closing.end() if closing else start
        return self._encode(text[start:], [cut - start for cut in cuts if cut > start])

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text without special tokens: for graders and people, never to be encoded again (slime#117)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def _encode(self, text: str, cuts: Sequence[int]) -> list[int]:
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [token_id for piece in pieces for token_id in self.backend.encode(piece, add_special_tokens=False).ids]

    def _write(
        self, messages: Sequence[dict], tools: Sequence[dict] | None, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """The text, and where to cut it: inside each control token that the template did not write."""
        if not self.templates:
            text = "".join(message["content"] for message in messages)
            return text, self._in_control_tokens(text, {inside for _, (inside, _, _) in self._suspects(text)})
        template = self.templates["tool_use" if tools and "tool_use" in self.templates else "default"]

        def write(parts: Sequence[Any]) -> str:
            names = dict(messages=parts[:-1], tools=parts[-1], documents=None)
            return template.render(add_generation_prompt=add_generation_prompt, **names, **self.names)

        parts = [*messages, list(tools) if tools else None]
        text = write(parts)
        return text, self._cuts(text, parts, write)

    def _cuts(self, text: str, parts: Sequence[Any], write: Callable[[Sequence[Any]], str]) -> list[int]:
        """Where control tokens of `text` come from the strings in `parts` (messages, then tools)."""
        found = [{token for string in _strings(part) for token, _ in self._suspects(*string)} for part in parts]
        if not any(found):
            return []
        mark = _unused(text, parts)

        def places(tokens: Sequence[set[str]], side: int) -> set[int] | None:
            """Where in `text` the marks are that are put into these tokens of the parts (side 0), before them (-1) or
            behind them (1). None where the template minds them: what it writes then is another text."""

            def marked(string: str, is_key: bool, tokens: set[str]) -> str:
                at = sorted({sides[side] for token, sides in self._suspects(string, is_key) if token in tokens})
                return mark.join(string[a:b] for a, b in pairwise([0, *at, len(string)]))

            written = write(
                [
                    _map_strings(p, lambda s, is_key, t=t: marked(s, is_key, t))
                    for p, t in zip(parts, tokens, strict=True)
                ]
            )
            found_at = {m.start() - k - side for k, m in enumerate(re.finditer(mark, written))}
            return found_at if written.replace(mark, "") == text else None

        cuts = places(found, 0)
        if cuts is None:
            cuts = set()
            for i, token in [(i, token) for i, tokens in enumerate(found) for token in sorted(tokens)]:
                only = [{token} if k == i else set() for k in range(len(parts))]
                seen = next((at for side in (0, -1, 1) if (at := places(only, side)) is not None), None)
                # In the assistant's it is for the template to say: think tags are special tokens in some models.
                if seen is None and not (isinstance(parts[i], dict) and parts[i].get("role") == "assistant"):
                    raise jinja2.TemplateError(f"it looks for {token!r}, which here is text of a message")
                cuts |= seen or set()
        return self._in_control_tokens(text, cuts)

    def _in_control_tokens(self, text: str, cuts: set[int]) -> list[int]:
        """Only elsewhere would a cut change how `text` is spelled."""
        inside = {at for found in self.control.finditer(text) for at in range(found.start() + 1, found.end(1))}
        return sorted(cuts & inside)

    def _suspects(self, string: str, is_key: bool = False) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(token, where to mark it: inside, behind, before) of the control tokens in `string`, and of what is a part of
        one at either end, which its neighbour in the text could complete. A marked key would not be found any more."""
        for found in self.control.finditer(string):
            if len(found[1]) == 1:
                raise jinja2.TemplateError(f"a text has {found[1]!r}, a control token that cannot be spelled otherwise")
            yield found[1], (found.start() + 1, found.end(1), found.start())
        head, tail = len(string) - len(string.lstrip()), len(string.rstrip())
        for length in range(1, 0 if is_key else min(tail - head, self.longest - 1) + 1):
            if (part := string[tail - length : tail]) in self.starts:
                yield part, (tail - length + 1, tail, tail - length)
            if (part := string[head : head + length]) in self.ends:
                yield part, (head, head + length, head)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: how templates mark the assistant's words; those trained on here are the sampled ones."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body, lineno=line)  # a scope of its own

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Unlike jinja2's own, leaves <, > and & as they are; transformers' options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _map_strings(value: Any, change: Callable[[str, bool], str], is_key: bool = False) -> Any:
    """A copy of nested dicts and lists with `change(string, is it a key)` for its strings."""
    if isinstance(value, dict):
        return {_map_strings(k, change, True): _map_strings(entry, change) for k, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(entry, change) for entry in value]
    return change(value, is_key) if isinstance(value, str) else value


def _strings(value: Any) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    _map_strings(value, lambda string, is_key: found.append((string, is_key)) or string)
    return found


def _unused(*values: Any) -> str:
    """A character of the private use planes that no string in `values` has."""
    used = set().union(*(string for string, _ in _strings(values)))
    return next(char for char in map(chr, PRIVATE_USE) if char not in used)
