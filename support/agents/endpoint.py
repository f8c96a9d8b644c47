"""An OpenAI endpoint on this machine over the run's own engine: one URL, with a key that nobody can guess, per rollout.

A thread serves HTTP and moves JSON, nothing else. All that has tokens is the main thread's: `Engine.step` calls
`before_step`, which answers what has ended and starts what was asked for.
"""

import asyncio
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from config import ChatServerConfig, ConfigError, DataError, shortened
from data import Sample
from envs import StepResult
from support.agents.calls import Call, Refused, Request, Rollout, fill
from support.inputs.tokenizer import Tokenizer
from support.system.ranks import Ranks

MAX_BYTES = 16 << 20  # of a request
IDLE_SECONDS = 0.005  # how long a step of an idle engine waits for a request
KEEP_ALIVE_SECONDS = 10.0  # between comments in a stream that has nothing to say yet
# By the run: what was sampled in another way would be trained as if it were the policy's.
DECIDED = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "tool_choice"}
DECIDED |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}


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


class Endpoint:
    """Answers the agents of this rank's engine. All ranks of an engine make the same calls: its first rank has the
    thread, and tells the others what was asked. parse: a ReplyParser."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, ranks: Ranks, parse: ReplyParser):
        self.engine, self.tokenizer, self.ranks, self.parse = engine, tokenizer, ranks, parse
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # from the thread: (key, number of a request[, what])
        self.rollouts: dict[str, Rollout] = {}  # that are open, by their keys
        self.running: dict[int, dict[str, Call]] = {}  # number of a request -> its calls by the engine's request ids
        self.futures: dict[int, Future] = {}
        self.asked = count()
        self.said: set[str] = set()
        self.server, self.port = None, 0
        if ranks.leads_engine:
            self._listen()
        engine.before_step = self.before_step

    # -------------------------------------------------------------------------------------------- the main thread

    def open(self, seed_key: tuple[int, ...], options: Any, priority: int, max_calls: int) -> tuple[str, str]:
        """A new rollout: (its key, its base URL)."""
        key = self.ranks.broadcast_from_tp_leader(lambda: secrets.token_hex(16))
        self.rollouts[key] = Rollout(seed_key, self.engine.max_total_tokens, max_calls, options, priority)
        return key, f"http://127.0.0.1:{self.port}/rollout/{key}/v1"

    def close(self, key: str) -> Rollout:
        """Ends a rollout: its key opens nothing any more, and the engine drops what is under way for it."""
        rollout = self.rollouts.pop(key)
        for number in {call.ask for call in rollout.calls} & self.running.keys():
            self._answer(number, Refused("the rollout has ended", 404, "not_found"))
            self._drop(rollout, number)
        return rollout

    def finish(self, key: str, sample: Sample, result: StepResult, is_trained: bool) -> StepResult:
        """Ends a rollout and fills the sample: its longest row, the others as forks. Returns the result: the agent's,
        if it has asked."""
        rollout = self.close(key)
        rows = rollout.rows()
        message = result.state.get("message", "")
        if not rows:
            result, message = StepResult(0.0, "error"), message or "the agent never called the endpoint"
            sample.weight_version = sample.newest_version = self.engine.weight_version
        sample.forks = [replace(sample, forks=[]) for _ in rows[1:]]
        for row, each in zip(rows, (sample, *sample.forks), strict=False):
            fill(each, row, is_trained)
        sample.count_tokens()
        was_cut = rollout.was_refused_for_room or (rows and rows[0][-1].completion.finish_reason == "length")
        sample.finish_reason = "length" if was_cut else "stop"
        sample.num_calls, sample.turn_tokens = sum(map(len, rows)), [sample.num_trained_tokens]
        sample.message, sample.crashed = message, result.outcome == "error" and result.state.get("counts", False)
        return result

    def shut_down(self) -> None:
        """Ends the thread and frees the port."""
        if self.server:
            self.server.should_exit = True
            self.thread.join(5.0)

    def before_step(self) -> None:
        """Answers the requests that have ended, then starts what was asked for. All ranks of an engine call it."""
        for number in [each for each, calls in self.running.items() if self.engine.unclaimed.keys() >= calls.keys()]:
            calls = self.running.pop(number)
            for request_id, call in calls.items():
                call.completion = self.engine.unclaimed.pop(request_id)
            self._answer(number, self._reply([*calls.values()]))
        for key, number, *what in self.ranks.broadcast_from_tp_leader(self._take):
            if what:
                self._start(key, number, *what)
            elif key in self.rollouts:
                self._drop(self.rollouts[key], number)

    def _take(self) -> list[tuple]:
        events = []
        with suppress(queue.Empty):
            while True:
                events.append(self.inbox.get(timeout=0.0 if events or not self.engine.is_idle else IDLE_SECONDS))
        return events

    def _start(self, key: str, number: int, request: Request, num_bytes: int) -> None:
        try:
            rollout = self._rollout_of(key)
            calls = rollout.ask(number, request, num_bytes, self.tokenizer)
        except (Refused, DataError, RecursionError, StopIteration) as error:  # StopIteration: they use all of Unicode
            self._answer(number, error if isinstance(error, Refused) else Refused(f"messages: {error}"))
            return
        limits = (request.max_completion_tokens, request.max_tokens, rollout.options.max_new_tokens)
        stops = tuple(request.stop or ())
        options = replace(rollout.options, max_new_tokens=min(filter(None, limits)), stop_strings=stops)
        prompts, seeds = [call.prompt_ids for call in calls], [call.seed for call in calls]
        request_ids = self.engine.start(prompts, seeds, options, rollout.priority)
        self.running[number] = dict(zip(request_ids, calls, strict=True))

    def _drop(self, rollout: Rollout, number: int) -> None:
        """As if it had never been asked: the client has not had the answer."""
        self.engine.abort([*self.running.pop(number, ())])
        self.futures.pop(number, None)
        rollout.forget(number)

    def _rollout_of(self, key: str) -> Rollout:
        if key not in self.rollouts:
            raise Refused("no running rollout has this key", 404, "not_found")
        return self.rollouts[key]

    def _answer(self, number: int, answer: dict | Refused) -> None:
        if future := self.futures.pop(number, None):  # else another rank has it, or the client has gone
            future.set_result(answer)

    def _reply(self, calls: list[Call]) -> dict:
        """The object of chat.completion."""
        choices, request, prompt_ids = [], calls[0].request, calls[0].prompt_ids
        for index, call in enumerate(calls):
            message, cut_at = self._message(call)
            call.add_reply(message, cut_at)
            ids, end = call.completion.ids.tolist(), call.completion.finish_reason
            end = "tool_calls" if "tool_calls" in message and end == "stop" else end
            choice = {"index": index, "message": message, "finish_reason": end, "logprobs": None}
            if request.logprobs:
                texts = [self.tokenizer.decode([token_id], special=True) for token_id in ids]
                pairs = zip(texts, call.completion.logps.tolist(), strict=True)
                content = [{"token": t, "logprob": x, "bytes": list(t.encode()), "top_logprobs": []} for t, x in pairs]
                choice["logprobs"] = {"content": content, "refusal": None}
            choices.append(choice | ({"token_ids": ids} if request.return_token_ids else {}))
        num_old, num_new = len(prompt_ids), sum(len(call.completion.ids) for call in calls)
        usage = {"prompt_tokens": num_old, "completion_tokens": num_new, "total_tokens": num_old + num_new}
        head = {"id": f"chatcmpl-{call.seed:012x}", "object": "chat.completion", "created": int(time.time())}
        head |= {"prompt_token_ids": prompt_ids} if request.return_token_ids else {}
        return head | {"model": "policy", "choices": choices, "usage": usage}

    def _message(self, call: Call) -> tuple[dict, str]:
        """(the reply as the client gets it, the stop string that is missing at its end, if any)."""
        ids, asked = call.completion.ids.tolist(), call.request
        if call.completion.finish_reason == "stop" and ids[-1] in self.engine.stop_token_ids:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, special=self.parse.needs_special_tokens)
        stops = [(text.index(string), string) for string in asked.stop or () if string in text]
        length, cut_at = min(stops, default=(len(text), ""))
        tools = asked.tools if asked.tool_choice != "none" else None
        reasoning, content, calls = self.parse(text[:length], tools)
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        head = {"type": "function", "id": f"call_{call.seed:012x}"}
        calls = [head | {"id": f"{head['id']}_{i}", "index": i, "function": each} for i, each in enumerate(calls)]
        return message | ({"tool_calls": calls} if calls else {}), cut_at

    # ------------------------------------------------------------------------------------------ the thread of HTTP

    def _listen(self) -> None:
        routes = [Route("/rollout/{key}/v1/chat/completions", self._chat, methods=["POST"])]
        routes.append(Route("/rollout/{key}/v1/models", self._models, methods=["GET"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refusal, Refused: _refusal})
        settings: dict = {"ws": "none", "loop": "asyncio", "log_config": None, "log_level": "error"}
        settings["timeout_keep_alive"] = 86400  # a connection that closes amid a request makes its client ask again
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **settings))
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listener],), name="endpoint", daemon=True)
        self.thread.start()

    async def _models(self, request: HTTPRequest) -> Response:
        self._rollout_of(request.path_params["key"])
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo.py"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: HTTPRequest) -> Response:
        self._rollout_of(key := request.path_params["key"])
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                raise Refused(f"the request is larger than {MAX_BYTES >> 20} MiB", 413, "request_too_large")
        try:
            asked = Request.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise Refused(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
        self._say_what_is_decided(asked)
        number = next(self.asked)
        self.futures[number] = future = Future()
        self.inbox.put((key, number, asked, len(body)))
        answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnect(request))
        seconds = KEEP_ALIVE_SECONDS if asked.stream else None
        await asyncio.wait({answer, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.inbox.put((key, number))
            return Response(status_code=499)  # nobody reads it
        gone.cancel()
        if answer.done() and isinstance(answer.result(), Refused):
            raise answer.result()
        if not asked.stream:
            return JSONResponse(answer.result())
        return StreamingResponse(self._stream(key, number, answer, asked), media_type="text/event-stream")

    async def _stream(self, key: str, number: int, answer: asyncio.Future, asked: Request) -> AsyncIterator[str]:
        """The whole reply in one piece: nobody knows what of it is a tool call before it has ended."""
        try:
            while not (await asyncio.wait({answer}, timeout=KEEP_ALIVE_SECONDS))[0]:
                yield ": the policy has not ended its reply\n\n"
            yield _events(answer.result(), asked)
        except BaseException:  # the client has gone
            self.inbox.put((key, number))
            raise

    def _say_what_is_decided(self, asked: Request) -> None:
        given = asked.model_extra | {"tool_choice": asked.tool_choice}
        for name in DECIDED - self.said:
            if given.get(name) not in (None, "auto", "none"):
                self.said.add(name)
                what = f"an agent asks for {name}={shortened(given[name])}"
                self.ranks.print_rank0(f"NOTE: {what}, to no effect: the run's config decides how replies are sampled")


async def _disconnect(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(request: HTTPRequest, error: Refused | HTTPException) -> Response:
    if isinstance(error, HTTPException):
        error = Refused("only chat/completions and models are served", error.status_code, "not_found")
    return JSONResponse(error.body, error.status, {"x-should-retry": "false"})  # or clients repeat what had a 429


def _events(answer: dict | Refused, asked: Request) -> str:
    """A stream: the reply, and the usage if the client wants it."""
    if isinstance(answer, Refused):
        chunks = [answer.body]
    else:
        usage, head = answer.pop("usage"), answer | {"object": "chat.completion.chunk"}
        choices = [{"delta": choice.pop("message")} | choice for choice in answer["choices"]]
        wants_usage = (asked.stream_options or {}).get("include_usage")
        chunks = [head | {"choices": choices}, head | {"choices": [], "usage": usage}][: 2 if wants_usage else 1]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
