"""Chat messages -> token ids and back: the tokenizer of a model folder and its chat template.

A template is a program that writes one text from the messages. `Tokenizer.render` encodes that text to the same ids as
transformers, and guarantees that the text of a message never becomes a control token, alone or together with its
neighbours: it refuses such a text, or escapes it where the caller cannot choose its texts (an environment's answer, a
reply that a reward model scores). Control tokens are the tokenizer's special tokens, the tokens that end a reply, and
added tokens that look like `<|this|>`. Other added tokens (`<think>`) are words that a message may use.
"""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from config import DataError
from hf.files import read_bytes, read_json, read_text

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>")  # DeepSeek's turn marks are not flagged special
# `{% generation %}` marks the assistant's words; those trained on here are the sampled ones. It is a scope of its own.
GENERATION_TAG = re.compile(r"({%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%})")
PRIVATE_USE = range(0xF0000, 0x10FFFE)
MAX_TOKENIZER_BYTES = 256 * 2**20  # ten times those in use
MAX_TEMPLATE = 2**18  # characters of a template, or of what it writes for TRIAL: ten times those in use
RENDER_SECONDS = 3  # to compile a template, or for a text of it: a thousand times what is usual
ADDRESS = re.compile("0x[0-9a-f]{8,}")  # in what Python writes for an object that is no text
TRIAL_TEXT = "12 + 345 = ?\n\n\tIs  it <b>so</b>, \u00fc \u65e5\u672c \U0001f9ee " + "a " * 64 + "a" * 64
TRIAL = [{"role": "user", "content": TRIAL_TEXT}, {"role": "assistant", "content": "<think>\none\n</think>\n\n357"}]
TRIAL += [{"role": "user", "content": "And 1/7?"}]
Dicts = Sequence[dict]  # messages, or tools
ESCAPE = "\u200b"  # a space of no width: inside a control token, it makes ordinary text of it


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

    def __init__(self, folder: Path, template: str | None = "default", template_kwargs: dict[str, Any] | None = None):
        self.file = folder / "tokenizer.json"
        content = read_bytes(self.file, MAX_TOKENIZER_BYTES)
        ids = []
        with _usable(self.file):
            self.backend = tokenizers.Tokenizer.from_buffer(content)
            self.backend.no_truncation()  # the file may ask for both; transformers ignores it too
            self.backend.no_padding()
            with suppress(Exception):  # a small vocabulary may lack these words
                ids = self.backend.encode(TRIAL_TEXT).ids
                self.decode(ids)
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise DataError(f"{self.file}: its vocabulary is empty")
        if max(ids, default=0) >= self.vocab_size:
            raise DataError(f"{self.file}: its post_processor writes id {max(ids)}, which is no token's")
        self.settings_file = folder / "tokenizer_config.json"
        self.settings = read_json(self.settings_file) if os.path.lexists(self.settings_file) else {}
        self.names: dict[str, Any] = {"documents": None}
        for name in SPECIAL:
            value = self.settings.get(name) or ""
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise DataError(f"{self.settings_file}: {name}: expected text or {{content: text}}, got {value!r}")
            if text:
                self.names[name] = text
        eos_token = self.names.get("eos_token", "")
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & (template_kwargs or {}).keys()
        if reserved:
            raise DataError(f"policy.tokenizer.chat_template_kwargs: {min(reserved)} is not yours to set")
        self.names |= template_kwargs or {}
        signal.signal(signal.SIGALRM, _raise_timeout)  # here, not for each text: that takes as long as a short one
        # One date for all that this process renders, also past midnight; each rank would have a time of its own.
        self.now = datetime.combine(datetime.now(), datetime.min.time())
        self.templates = {name: self._compile(text, folder) for name, text in self._texts(folder, template).items()}
        self.eos_token_ids = self._eos_token_ids(folder, eos_token)
        self._find_control_tokens()
        self._try_templates(folder)

    def _texts(self, folder: Path, template: str | None) -> dict[str, str]:
        """Name -> template, of which one is "default"; {} for none."""
        if template is None or "{" in template:
            return {} if template is None else {"default": template}
        if template != "default":
            if not os.path.isfile(template):
                raise DataError(
                    f"policy.tokenizer.chat_template={template!r:.80}: no such file, and no template either; default = "
                    "the model's own, null = none"
                )
            return {"default": read_text(template)}
        file = folder / "chat_template.jinja"
        entries = read_text(file) if os.path.lexists(file) else self.settings.get("chat_template")
        if not isinstance(entries, list):  # else HF's named templates: [{"name": "default", "template": ...}, ...]
            entries = [] if entries is None else [{"name": "default", "template": entries}]
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in entries):
            raise DataError(f"{self.settings_file}: chat_template: a list must be of {{name, template}}")
        texts = {entry["name"]: entry["template"] for entry in entries if entry["name"] in ("default", "tool_use")}
        for text in texts.values():
            if not isinstance(text, str):
                raise DataError(f"{self.settings_file}: chat_template: expected text, got {type(text).__name__}")
        return texts if "default" in texts else {}

    def _compile(self, text: str, folder: Path) -> jinja2.Template:
        """With all that transformers gives to templates, so that models' own run as they are."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # unlike jinja2's, leaves < > & as is
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = self.now.strftime
        environment.intercepted_binops = frozenset(("*", "**", "%"))  # else jinja2's compiler computes them
        del environment.filters["random"], environment.globals["lipsum"]  # a prompt is a function of its row
        if len(text) > MAX_TEMPLATE:
            raise DataError(f"{folder}: the chat template has more than {MAX_TEMPLATE:,} characters")
        try:
            with _time_limit(folder):
                return environment.from_string(GENERATION_TAG.sub(r"\1with", text))
        except Exception as error:  # jinja2 compiles it to Python, which has errors of its own
            raise DataError(f"{folder}: the chat template does not parse ({error})") from error

    def _eos_token_ids(self, folder: Path, token: str) -> list[int]:
        ids = {self.backend.token_to_id(token)} - {None}
        if token and not ids:
            raise DataError(f"{self.settings_file}: eos_token={token!r:.80} is no token of {self.file.name}")
        for file in (folder / "generation_config.json", folder / "config.json"):
            value = read_json(file).get("eos_token_id") if os.path.lexists(file) else None
            file_ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token_id) is not int or token_id < 0 for token_id in file_ids):
                raise DataError(f"{file}: eos_token_id: expected an id or a list of ids, got {value!r:.80}")
            if max(file_ids, default=0) >= self.vocab_size:  # the ids of a padded vocabulary are never sampled
                limit = f"the ids of {self.file.name} end at {self.vocab_size - 1}"
                raise DataError(f"{file}: eos_token_id={value!r:.80}: {limit}, so no reply would end with it")
            ids |= set(file_ids)
        if not ids:
            files = "generation_config.json, config.json or tokenizer_config.json"
            raise DataError(f"{folder}: no eos_token_id in {files}")
        return sorted(ids)

    def _find_control_tokens(self) -> None:
        decoder = self.backend.get_added_tokens_decoder()
        self.added = {token_id: token.content for token_id, token in decoder.items()}
        control = {
            text
            for token_id, text in self.added.items()
            if text and (decoder[token_id].special or token_id in self.eos_token_ids or LOOKS_SPECIAL.fullmatch(text))
        }
        first = re.escape("".join({token[0] for token in control}))
        any_token = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        # It consumes one character, so that overlapping tokens are found as well; the first lookahead is for speed.
        self.control = re.compile(f"(?=[{first}])(?=({any_token}))(.)" if control else "(?!)", re.DOTALL)
        self.starts = tuple({token[:k] for token in control for k in range(1, len(token))})
        self.ends = tuple({token[k:] for token in control for k in range(1, len(token))})

    def _try_templates(self, folder: Path) -> None:
        """DataError where one takes or writes too much for a short conversation, or does not write the same twice. It
        may refuse that conversation."""
        for template in self.templates.values():
            try:
                with _time_limit(folder):
                    texts = [template.render({"messages": TRIAL, "tools": None} | self.names) for _ in range(2)]
            except DataError:
                raise
            except Exception:  # a template is a program
                continue
            if len(texts[0]) > MAX_TEMPLATE:
                raise DataError(f"{folder}: the chat template writes {len(texts[0]):,} characters for a few words")
            if texts[0] != texts[1] or ADDRESS.search(texts[0]):
                raise DataError(f"{folder}: the chat template writes another prompt each time: take out what differs")

    def control_tokens(self, *values: Any) -> Iterator[str]:
        """The control tokens in the strings of `values`, which may be nested in dicts and lists, in order."""
        return (match[1] for string in _strings(values) for match in self.control.finditer(string))

    def render(
        self,
        messages: Dicts,
        tools: Dicts | None = None,
        *,
        add_generation_prompt: bool = True,
        escape: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Chat messages -> ids. add_generation_prompt: with the template's opening of the assistant's turn at the end.

        Without a template (a base model): the messages' text, after what the tokenizer puts before a text (Llama's
        BOS); the reply goes on from there. A text with a control token is escaped where the caller asks for it; else it
        raises ControlTokenInText. Raises whatever a template raises, and DataError for tools or tool_calls that it does
        not write. Of a prompt of more than `max_tokens`, it may give no more than the first ids, and more than
        `max_tokens`: the whole of 25 MB takes 24 s.
        """
        text = self._write(messages, tools, add_generation_prompt, escape=escape)
        # Of twice as many tools, a template that writes them writes more; transformers would leave them out in silence.
        if tools and text == self._write(messages, [*tools, *tools], add_generation_prompt, escape=escape):
            raise DataError(
                "`tools`: the chat template does not write them; leave them out or name a template that does"
            )
        without = [message | {"tool_calls": None} for message in messages]
        calls = any(message.get("tool_calls") for message in messages)
        if calls and text == self._write(without, tools, add_generation_prompt, escape=escape):
            raise DataError("`tool_calls`: the chat template does not write them; name a template that does")
        ids = self._encode(text, max_tokens)
        if self.templates or not ids:
            return ids
        plain, whole = (self.backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        return whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)] + ids

    def observation_ids(
        self, messages: Dicts, reply_ids: Sequence[int], observation: Dicts, tools: Dicts | None = None
    ) -> list[int]:
        """Ids to append to a sampled reply: all that the template writes from its end to the opening of the next one.

        messages: those before the reply. The reply itself is never encoded: the template gets one private character
        in its place. The end token it was sampled with is not repeated. Control tokens in the observation are escaped.
        Where a template rewrites earlier turns (drops their thinking), the sampled ids stay as they were sampled.
        Raises DataError where the template refuses the observation or leaves out the reply.
        """
        used = set().union(*_strings([messages, observation, tools]))
        hole = next(char for char in map(chr, PRIVATE_USE) if char not in used)
        reply = {"role": "assistant", "content": hole}
        try:
            text = self._write([*messages, reply, *observation], tools, escape=True)
        except jinja2.TemplateError as error:
            refusal = f"the chat template refuses what the environment answers {observation}"
            raise DataError(f"{refusal} ({error})") from error
        if hole not in text:
            raise DataError("the chat template leaves out the assistant's last message: it is not for several turns")
        text = text[text.rindex(hole) + 1 :]
        if len(reply_ids) and (end := self.added.get(int(reply_ids[-1]))):
            text = re.sub(rf"\A\s*{re.escape(end)}", "", text)  # Llama 2 has a space before it
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text without special tokens: for graders and people, never to be encoded again (THUDM/slime#117)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def _encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        with _usable(self.file):
            num_chars = len(text) if max_tokens is None else 16 * max_tokens + 256
            while num_chars < len(text):
                ids = self.backend.encode(text[:num_chars], add_special_tokens=False).ids
                if len(ids) > 2 * max_tokens:  # where the text is cut, a word may have other tokens than in the whole
                    return ids
                num_chars *= 4
            return self.backend.encode(text, add_special_tokens=False).ids

    def _write(self, messages: Dicts, tools: Dicts | None, add_generation_prompt: bool = True, *, escape: bool) -> str:
        """The template's text, in which all control tokens are the template's. ControlTokenInText where some would not
        be, unless `escape`."""

        def write(parts: Sequence[Any]) -> str:
            if not self.templates:
                return "".join(message["content"] for message in parts[:-1])
            template = self.templates["tool_use" if tools and "tool_use" in self.templates else "default"]
            values = {"messages": parts[:-1], "tools": parts[-1], "add_generation_prompt": add_generation_prompt}
            with _time_limit(self.file.parent):
                return template.render(self.names | values)

        parts = [*messages, list(tools) if tools else None]
        escaped = self._escape(parts)
        if escaped == parts:
            return write(parts)
        token = next(self.control_tokens(parts), None)
        if token is None:  # a text begins or ends with a part of one: do its neighbours complete it?
            text = write(parts)
            tokens = zip_longest(self.control_tokens(text), self.control_tokens(write(escaped)))
            token = next((first or second for first, second in tokens if first != second), None)
            if token is None:
                return text
        if not escape:
            raise ControlTokenInText(token)
        return write(escaped)

    def _escape(self, value: Any) -> Any:
        """A copy of nested dicts and lists in which no string holds a control token, nor can complete one together with
        its neighbours in the text."""
        if isinstance(value, dict):
            return {self._escape(key): self._escape(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(entry) for entry in value]
        if not isinstance(value, str):
            return value
        text = self.control.sub(lambda match: match[2] + ESCAPE if len(match[1]) > 1 else "\ufffd", value)
        bare = text.strip()  # templates may trim
        before, after = ESCAPE * bare.startswith(self.ends), ESCAPE * bare.endswith(self.starts)
        return text.replace(bare, before + bare + after)


@contextmanager
def _usable(file: Path) -> Iterator[None]:
    """DataError where the tokenizers library fails: with a bare Exception, or with a panic of its Rust code, which is
    none. A TypeError is about a text that is none."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TypeError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        raise DataError(f"{file}: not a usable tokenizer ({error!s:.200})") from error


@contextmanager
def _time_limit(folder: Path) -> Iterator[None]:
    """DataError where a template takes more than RENDER_SECONDS. For the main thread, which alone gets signals."""
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS, 0.1)  # again and again: jinja2 may swallow the first
    try:
        yield
    except TimeoutError as error:
        raise DataError(f"{folder}: the chat template takes more than {RENDER_SECONDS} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested dicts, with their keys, and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.items()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
