"""A reply's text -> reasoning, other text and tool calls, by vLLM's parsers for the model's family."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple, Protocol

from base.hf.tokenizer import Tokenizer
from config import ChatServerConfig, ConfigError

CALL_OPENINGS = "<[{"  # with which the calls of the families begin
LOGGERS = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")  # they trace each malformed call


class Parsed(NamedTuple):
    """tool_calls: {name, arguments in JSON} of each. with_thought: the content as clients may write it who put the
    reasoning back into the text."""

    reasoning: str | None
    content: str | None
    tool_calls: list[dict]
    with_thought: tuple[str, ...] = ()


class ReplyParser:
    """Without a name in the config all is text. ConfigError for a name that vLLM, or the tokenizer, does not know.
    parsers: of engine.reply_parsers."""

    def __init__(self, parsers: tuple[Callable, Callable, type], tokenizer: Tokenizer, cfg: ChatServerConfig):
        get_tool_parser, get_reasoning_parser, self.make_request = parsers
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.tokenizer = tokenizer
        backend = tokenizer.backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        asked = SimpleNamespace(  # by parsers, of a tokenizer
            get_vocab=lambda: vocabulary,
            encode=lambda text, **_: backend.encode(text, add_special_tokens=False).ids,
            decode=lambda ids, **_: backend.decode(ids, skip_special_tokens=False),
        )
        self.needs_special_tokens = bool(cfg.tool_parser or cfg.reasoning_parser)
        self.reads_calls = cfg.tool_parser is not None
        self.tool_parser = self.reasoning_parser = None
        try:
            if cfg.tool_parser:
                self.tool_parser = partial(get_tool_parser(cfg.tool_parser), asked)
                self.tool_parser()
            if cfg.reasoning_parser:
                self.reasoning_parser = partial(get_reasoning_parser(cfg.reasoning_parser), asked)
                self.reasoning_parser()
        except Exception as error:
            raise ConfigError(f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs: {error}") from error

    def content_of_beginning(
        self, text: str, tools: list[dict] | None, template_kwargs: dict | None = None, prompt_ids: Sequence[int] = ()
    ) -> str:
        """What is content, of a reply that begins with this text: what stands before anything that may become a call.
        Where thoughts are taken out, only the end of a reply says what was one. The rest as in `__call__`."""
        try:
            if self._thoughts_of(template_kwargs, prompt_ids):
                return ""
        except Exception:  # as in __call__, which reads all of the reply
            return ""
        if not tools or not self.tool_parser:
            return text
        size = len(text)
        for character in CALL_OPENINGS:
            if character in text:
                size = min(size, text.index(character))
        return text[:size].rstrip()  # some parsers drop the blanks before a call

    def __call__(
        self, text: str, tools: list[dict] | None, template_kwargs: dict | None = None, prompt_ids: Sequence[int] = ()
    ) -> Parsed:
        """A reply that the parser cannot read, or a call that no client can be sent, stays text. template_kwargs: of
        the request. prompt_ids: what it replies to."""
        reasoning = None
        forms: tuple[str, ...] = ()
        try:
            request = self.make_request(messages=[{"role": "user", "content": ""}], tools=tools)
            thoughts = self._thoughts_of(template_kwargs, prompt_ids)
            if thoughts:
                sampled = text
                reasoning, content = thoughts.extract_reasoning(text, request)
                text = content or ""
                forms = _with_thought(sampled, reasoning, text, thoughts)
            if tools and self.tool_parser:
                found = self.tool_parser(request.tools).extract_tool_calls(text, request)
                calls = [call.function.model_dump(include={"name", "arguments"}) for call in found.tool_calls]
                for call in calls:
                    for part in (call["name"], call["arguments"]):
                        part.encode()  # "\ud800" in JSON makes half of a surrogate pair, which UTF-8 lacks
                if thoughts:
                    forms = _with_thought(sampled, reasoning, found.content, thoughts)
                return Parsed(reasoning, found.content, calls, forms)
        except Exception as error:  # whatever a policy writes ends no run
            logging.getLogger("vllm.parser").debug("a reply stays text: %r", error)
        return Parsed(reasoning, text, [], forms)

    def _thoughts_of(self, template_kwargs: dict | None, prompt_ids: Sequence[int]) -> "ThoughtParser | None":
        """vLLM's parser of the thought in a reply to this prompt, which the template's arguments may turn off
        (enable_thinking=false). None without one, and where the prompt itself has closed the thought."""
        if self.reasoning_parser is None:
            return None
        parser = self.reasoning_parser(chat_template_kwargs=self.tokenizer.template_kwargs | (template_kwargs or {}))
        end = parser.reasoning_end_str
        if not end:
            return parser
        _, mark, behind = self.tokenizer.decode(prompt_ids, special=True).rpartition(end)
        is_open_again = bool(parser.reasoning_start_str) and parser.reasoning_start_str in behind
        is_of_this_turn = next(self.tokenizer.control_tokens(behind), None) is None
        if mark and is_of_this_turn and not is_open_again:
            return None
        return parser


class ThoughtParser(Protocol):
    """vLLM's ReasoningParser."""

    reasoning_start_str: str | None
    reasoning_end_str: str | None

    def extract_reasoning(self, model_output: str, request: object) -> tuple[str | None, str | None]: ...


def _with_thought(sampled: str, reasoning: str | None, content: str | None, thoughts: ThoughtParser) -> tuple[str, ...]:
    """As it was sampled, between the family's marks, and between them as templates of chat models write it."""
    if not reasoning:
        return ()
    start = thoughts.reasoning_start_str
    end = thoughts.reasoning_end_str
    content = content or ""
    forms = [sampled]
    if start and end:
        forms.append(f"{start}{reasoning}{end}{content}")
        forms.append(f"{start}\n{reasoning.strip()}\n{end}\n\n{content.strip()}")
    return tuple(forms)
