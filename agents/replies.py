"""A reply as a client of OpenAI reads it: reasoning and tool calls apart from the text, by vLLM's parsers."""

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from config import ChatServerConfig, ConfigError
from hf.tokenizer import Tokenizer


class ReplyParser:
    """A reply's text -> reasoning, other text and tool calls. Without a name in the config all is text. ConfigError for
    a name that vLLM, or the tokenizer, does not know. parsers: of engine.reply_parsers."""

    def __init__(self, parsers: tuple[Callable, Callable, type], tokenizer: Tokenizer, cfg: ChatServerConfig):
        get_tool_parser, get_reasoning_parser, self.make_request = parsers
        for name in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):  # they trace each malformed call
            logging.getLogger(name).setLevel(logging.CRITICAL)
        backend = tokenizer.backend
        asked = SimpleNamespace(  # by parsers, of a tokenizer
            get_vocab=lambda: backend.get_vocab(with_added_tokens=True),
            encode=lambda text, **_: backend.encode(text, add_special_tokens=False).ids,
            decode=lambda ids, **_: backend.decode(ids, skip_special_tokens=False),
        )
        self.needs_special_tokens = bool(cfg.tool_parser or cfg.reasoning_parser)
        try:
            self.tool_parser = cfg.tool_parser and partial(get_tool_parser(cfg.tool_parser), asked)
            self.reasoning_parser = cfg.reasoning_parser and get_reasoning_parser(cfg.reasoning_parser)(asked)
            if self.tool_parser:
                self.tool_parser()
        except Exception as error:
            raise ConfigError(f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs: {error}") from error

    def __call__(self, text: str, tools: list[dict] | None) -> tuple[str | None, str | None, list[dict]]:
        """(reasoning, other text, {name, arguments in JSON} of each call)."""
        reasoning = None
        try:
            request = self.make_request(messages=[{"role": "user", "content": ""}], tools=tools)
            if self.reasoning_parser:
                reasoning, content = self.reasoning_parser.extract_reasoning(text, request)
                text = content or ""
            if tools and self.tool_parser:
                found = self.tool_parser(request.tools).extract_tool_calls(text, request)
                calls = [each.function.model_dump(include={"name", "arguments"}) for each in found.tool_calls]
                return reasoning, found.content, calls
        except Exception as error:  # whatever a policy writes ends no run
            logging.getLogger("vllm.parser").debug("a reply stays text: %r", error)
        return reasoning, text, []
