"""Chat messages -> token ids and back: the tokenizer of a model folder and its chat template.

A template is a program that writes one text from the messages. `Tokenizer.render` encodes that text to the same ids as
transformers, and guarantees that the text of a message never becomes a control token, alone or together with its
neighbours: it refuses such a text, or escapes it if the caller cannot choose the text (an environment's answer, a reply
that a reward model scores). Control tokens are the tokenizer's special tokens, the tokens that end a reply, and
added tokens that look like `<|this|>`. Other added tokens (`<think>`) are words that a message may use.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers.decoders import DecodeStream

from base.hf.config_forms import check_fields
from base.system.files import read_bytes, read_json, read_text
from base.system.users_code import describe
from config import DataError

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FORMS = dict.fromkeys(SPECIAL, "str or object or null") | {"chat_template": "str or list of object or null"}
LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")  # DeepSeek's turn marks are not flagged special
# `{% generation %}` marks the assistant's words. Only its scope matters here: the sampled tokens are trained on.
GENERATION_TAG = re.compile(r"({%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%})")
PRIVATE_USE = range(0xF0000, 0x10FFFE)
Dicts = Sequence[dict]  # messages, or tools
Nested = dict | list | tuple | str | float | bool | None  # what messages, tools and template arguments are made of
ESCAPE = "\u200b"  # zero-width space: inserted into a control token, it makes it ordinary text


class ControlTokenInText(DataError):
    """A message or a tool has text that the tokenizer would read as the control token `token`."""

    def __init__(self, token: str):
        super().__init__(f"the text holds the control token {token!r}")
        self.token = token


class Tokenizer:
    """`tokenizer.json` plus a chat template: messages -> prompt ids, ids -> text.

    template: "default" for the model's own (none where it has none), None for none, a file's name, or the text.
    template_kwargs: what templates may ask for by name (`enable_thinking`, `date_string`). `vocab_size` is one past the
    largest id the tokenizer knows; engine and trainer both ban the ids of a padded vocabulary beyond it, because they
    cannot be decoded (vllm-project/vllm#13175).
    """

    def __init__(self, folder: Path, template: str | None = "default", template_kwargs: dict | None = None):
        self.file = folder / "tokenizer.json"
        content = read_bytes(self.file)
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no more precise one
            raise DataError(f"{self.file}: not a usable tokenizer ({error!s:.200})") from error
        self.backend.no_truncation()  # the file may ask for both; transformers ignores it too
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        settings_file = folder / "tokenizer_config.json"
        self.settings = {}
        if settings_file.exists():
            self.settings = read_json(settings_file)
            check_fields(self.settings, FORMS, f"{settings_file}")
        special = self._special_tokens()
        self.template_kwargs = template_kwargs or {}
        self.names: dict[str, Nested] = {"documents": None, **special, **self.template_kwargs}
        # The start's date for the whole run, even past midnight. The time of day would differ between ranks.
        self.now = datetime.combine(datetime.now(), datetime.min.time())
        self.templates = {}
        for name, text in self._texts(folder, template).items():
            self.templates[name] = self._compile(text, folder)
        self.eos_token_ids = self._eos_token_ids(folder, special.get("eos_token", ""))
        self._find_control_tokens()

    def _special_tokens(self) -> dict[str, str]:
        """The special tokens of tokenizer_config.json: name -> text."""
        tokens = {}
        for name in SPECIAL:
            token = self.settings.get(name)
            if isinstance(token, dict) and token:
                check_fields({"content": token.get("content")}, {"content": "str"}, f"tokenizer_config.json: {name}")
                tokens[name] = token["content"]
            elif token:
                tokens[name] = token
        return tokens

    def _texts(self, folder: Path, template: str | None) -> dict[str, str]:
        """Name -> template, of which one is "default"; {} for none."""
        if template is None:
            return {}
        if template != "default":
            try:
                return {"default": template if "{" in template else read_text(template)}
            except DataError as error:
                fix = "default = the model's own template, null = none"
                raise DataError(f"policy.tokenizer.chat_template: neither template nor file: {error}; {fix}") from error
        file = folder / "chat_template.jinja"
        if file.exists():
            return {"default": read_text(file)}
        entries = self.settings.get("chat_template") or []
        if isinstance(entries, str):
            return {"default": entries}
        texts = {}
        for entry in entries:  # HF's named templates
            named = {name: entry.get(name) for name in ("name", "template")}
            check_fields(named, dict.fromkeys(named, "str"), f"{folder}: chat_template")
            texts[named["name"]] = named["template"]
        if "default" not in texts:
            return {}
        return texts

    def _compile(self, text: str, folder: Path) -> jinja2.Template:
        """The template in jinja's sandbox, with everything that transformers gives to templates."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # unlike jinja2's, leaves < > & as is
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = self.now.strftime
        del environment.filters["random"]  # a prompt is a function of its row
        del environment.globals["lipsum"]
        text = GENERATION_TAG.sub(r"\1with", text)
        try:
            return environment.from_string(text)
        except Exception as error:  # jinja2 compiles to Python, which raises its own errors
            raise DataError(f"{folder}: the chat template does not parse ({error})") from error

    def _eos_token_ids(self, folder: Path, token: str) -> list[int]:
        ids = set()
        token_id = self.backend.token_to_id(token)
        if token_id is not None:
            ids.add(token_id)
        for file in (folder / "generation_config.json", folder / "config.json"):
            if not file.exists():
                continue
            fields = read_json(file)
            check_fields(fields, {"eos_token_id": "int or list of int or null"}, f"{file}")
            value = fields.get("eos_token_id")
            if isinstance(value, list):
                ids |= set(value)
            elif value is not None:
                ids.add(value)
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:  # the ids of a padded vocabulary are never sampled
            expected = f"expected ids below {self.vocab_size} in generation_config.json or config.json (eos_token_id)"
            raise DataError(f"{folder}: end tokens {ids or '{}'}: {expected}, or tokenizer_config.json (eos_token)")
        return sorted(ids)

    def _find_control_tokens(self) -> None:
        self.added: dict[int, str] = {}
        control = set()
        for token_id, token in self.backend.get_added_tokens_decoder().items():
            text = token.content
            self.added[token_id] = text
            is_control = token.special or token_id in self.eos_token_ids or LOOKS_SPECIAL.fullmatch(text)
            if text and is_control:
                control.add(text)
        pattern = "(?!)"  # matches nothing
        if control:
            first = re.escape("".join({token[0] for token in control}))
            any_token = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
            # A match consumes one character, so that overlapping tokens are found; the first lookahead is for speed.
            pattern = f"(?=[{first}])(?=({any_token}))(.)"
        self.control = re.compile(pattern, re.DOTALL)
        starts = set()
        ends = set()
        for token in control:
            for k in range(1, len(token)):
                starts.add(token[:k])
                ends.add(token[k:])
        self.starts = tuple(starts)
        self.ends = tuple(ends)

    @cached_property
    def turn_end(self) -> int | None:
        """The token that the template writes behind an assistant's message; None if it writes none there."""
        asked, said = unused_characters([], 2)
        user = {"role": "user", "content": asked}
        reply = {"role": "assistant", "content": said}
        # A template may refuse to go on, leave the last turn open (vLLM's for ChatML), or want a system message.
        for before, after in (([user], [user]), ([user], []), ([{"role": "system", "content": "a"}, user], [])):
            talk = [*before, reply, *after]
            try:
                text = self._render_template(talk, None, {}, False)
                opens_always = text == self._render_template(talk, None, {}, True)
            except DataError:
                continue
            _, found, behind = text.rpartition(said)
            opening = ""
            marks = [token for token in self.added.values() if token and token in behind]
            if asked in behind:
                opening = text.partition(asked)[0]
            elif opens_always and len(marks) == 1:  # it opens the next reply
                opening = behind
            tokens = {token: token_id for token_id, token in self.added.items() if token and token not in opening}
            ends = [token for token in tokens if found and behind.lstrip().startswith(token)]
            if ends:
                return tokens[max(ends, key=len)]
        return None

    def shows_tools(self, messages: Dicts, tools: Dicts, template_kwargs: dict | None = None) -> bool:
        """Whether the template writes the tools into this prompt, each with its name; True where it refuses it."""
        talk, options = list(messages), template_kwargs or {}
        try:
            text = self._render_template(talk, list(tools), options, True)
            if text == self._render_template(talk, None, options, True):
                return False
        except DataError:
            return True
        names = [tool.get("function", tool).get("name") for tool in tools]
        return all(name in text for name in names if isinstance(name, str))

    def control_tokens(self, value: Nested) -> Iterator[str]:
        """The control tokens in the strings of `value`, which may be nested in dicts and lists, in order."""
        for string in _strings(value):
            for match in self.control.finditer(string):
                yield match[1]

    def render(
        self,
        messages: Dicts,
        tools: Dicts | None = None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict | None = None,
        escape: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Chat messages -> ids. add_generation_prompt: with the template's opening of the assistant's turn at the end.
        template_kwargs: go before those of the tokenizer.

        Without a template (a base model): the messages' text, after what the tokenizer puts before a text (Llama's
        BOS); the reply goes on from there. A text with a control token is escaped where the caller asks for it; else it
        raises ControlTokenInText. DataError if the template refuses the messages. Of a prompt of more than `max_tokens`
        it may return only the first ids, but more than `max_tokens`: to encode 25 MB takes 24 s.
        """
        text = self.write(messages, tools, add_generation_prompt, template_kwargs, escape=escape)
        if escape:
            text = encodable(text)
        return self.whole_ids(text, max_tokens)

    def whole_ids(self, text: str, max_tokens: int | None) -> list[int]:
        """Of a text that begins a prompt."""
        ids = self.encode(text, max_tokens)
        if self.templates or not ids:
            return ids
        return self._ids_before_text() + ids

    def _ids_before_text(self) -> list[int]:
        """What the tokenizer itself puts before a text, such as Llama's BOS."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        start = 0
        while whole[start : start + len(plain)] != plain:
            start += 1
            assert start < len(whole), (whole, plain)
        return whole[:start]

    def stop_string(self, ids: Sequence[int], strings: Sequence[str]) -> str | None:
        """The string of `strings` that the last of the ids completes, if any. Ids may be parts of characters."""
        size = max(len(string.encode()) for string in strings)
        last_ids = ids[-size - 8 :]  # an id has a byte or more
        for first in range(4):  # the first ids may end a character: then the bytes next to them may not be decoded
            text = self.backend.decode(last_ids[first:], skip_special_tokens=False)
            for string in strings:
                if string in text:
                    return string
            if not text.startswith("\ufffd"):
                break
        return None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Ids -> text, without special tokens unless `special`. Never encode it again (THUDM/slime#117)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds; joined, they are `decode(ids, special=True)`. An id that ends inside a character
        adds nothing."""
        if len(ids) == 0:
            return []
        stream = DecodeStream(skip_special_tokens=False)
        texts = [stream.step(self.backend, int(token_id)) or "" for token_id in ids]
        texts[-1] += self.decode(ids, special=True).removeprefix("".join(texts))
        return texts

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Text -> ids, control tokens too; max_tokens: as in `render`."""
        if max_tokens is not None:
            start = text[: 16 * max_tokens + 256]
            if len(start) < len(text):
                ids = self.backend.encode(start, add_special_tokens=False).ids
                if len(ids) > 2 * max_tokens:  # at the cut, a word may have other tokens than in the whole text
                    return ids
        return self.backend.encode(text, add_special_tokens=False).ids

    def write(
        self,
        messages: Dicts,
        tools: Dicts | None,
        add_generation_prompt: bool,
        template_kwargs: dict | None,
        *,
        escape: bool,
    ) -> str:
        """The text that the template writes. ControlTokenInText if a message would add a token, unless `escape`."""
        plain = [list(messages), list(tools) if tools else None, template_kwargs or {}]
        escaped = self._escape(plain)
        if escaped == plain:
            return self._render_template(*plain, add_generation_prompt)
        token = next(self.control_tokens(plain), None)
        if token is None:  # a text begins or ends with part of a token: do its neighbours complete it?
            text = self._render_template(*plain, add_generation_prompt)
            escaped_text = self._render_template(*escaped, add_generation_prompt)
            token = self._first_difference(text, escaped_text)
            if token is None:
                return text
        if not escape:
            raise ControlTokenInText(token)
        return self._render_template(*escaped, add_generation_prompt)

    def _render_template(
        self, messages: list[dict], tools: list[dict] | None, template_kwargs: dict, add_generation_prompt: bool
    ) -> str:
        if not self.templates:
            return "".join(message["content"] or "" for message in messages)
        template = self.templates["default"]
        if tools and "tool_use" in self.templates:
            template = self.templates["tool_use"]
        values = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        refusal = None
        for form in _forms(messages):
            try:
                return template.render(self.names | template_kwargs | values | {"messages": form})
            except Exception as error:  # a template is a program
                refusal = refusal or error
        raise DataError(f"the chat template refuses {messages!r:.200}: {describe(refusal)}") from refusal

    def _first_difference(self, text: str, escaped_text: str) -> str | None:
        """The first control token that only one of the two texts has at its place."""
        for token, escaped_token in zip_longest(self.control_tokens(text), self.control_tokens(escaped_text)):
            if token != escaped_token:
                return token or escaped_token
        return None

    def _escape(self, value: Nested) -> Nested:
        """A copy of nested dicts and lists whose strings hold no control token, nor complete one with a neighbour."""
        if isinstance(value, dict):
            return {self._escape(key): self._escape(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(entry) for entry in value]
        if not isinstance(value, str):
            return value
        text = self.control.sub(_escaped_token, value)
        bare = text.strip()  # templates may trim
        safe = bare
        if bare.startswith(self.ends):
            safe = ESCAPE + safe
        if bare.endswith(self.starts):
            safe += ESCAPE
        return text.replace(bare, safe)


def _escaped_token(match: re.Match) -> str:
    """What replaces a control token's first character."""
    token = match[1]
    if len(token) == 1:
        return "\ufffd"
    return token[0] + ESCAPE


def unused_characters(value: Nested, number: int = 1) -> list[str]:
    """As many characters for private use that no string in `value` has."""
    used = set()
    for string in _strings(value):
        used.update(string)
    unused = []
    for code in PRIVATE_USE:
        if chr(code) not in used:
            unused.append(chr(code))
        if len(unused) == number:
            return unused
    raise DataError("the messages use all characters for private use")


def _forms(messages: list[dict]) -> Iterator[list[dict]]:
    """The messages; and where they call tools, as templates ask for them that refuse these: with arguments as JSON
    texts (DeepSeek's), and with an empty text for a content that is null."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_texts(message) for message in messages]
        messages = [message | {"content": message["content"] or ""} for message in messages]
        yield messages
        yield [_with_texts(message) for message in messages]


def _with_texts(message: dict) -> dict:
    """With the arguments of its calls as JSON texts."""
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: dict) -> dict:
    if "function" in call:
        return call | {"function": _with_text(call["function"])}
    if isinstance(call["arguments"], str):
        return call
    return call | {"arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strings(value: Nested) -> Iterator[str]:
    """All strings in nested dicts, with their keys, and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.items()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
