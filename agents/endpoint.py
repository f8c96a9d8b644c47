"""An OpenAI endpoint on this machine over the run's own engine: one URL, with a key that nobody can guess, per rollout.

A thread serves HTTP and moves JSON, nothing else. All that has tokens is the main thread's: `Engine.step` calls
`before_step`, which answers what has ended and starts what was asked for.
"""

import asyncio
import json
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agents.calls import Call, Refused, Request, Rollout, fill
from config import DataError, shortened
from data import Sample
from envs import StepResult
from hf.tokenizer import Tokenizer
from system.ranks import Ranks

MAX_BYTES = 16 << 20  # of a request
IDLE_SECONDS = 0.005  # how long a step of an idle engine waits for a request
KEEP_ALIVE_SECONDS = 10.0  # between comments in a stream that has nothing to say yet
# By the run: what was sampled in another way would be trained as if it were the policy's.
DECIDED = "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed logit_bias".split()


@dataclass(slots=True)
class Ask:
    """A request, and its calls by the engine's request ids."""

    number: int
    rollout: Rollout
    calls: dict[str, Call]


class Endpoint:
    """Answers the agents of this rank's engine. All ranks of an engine make the same calls: its first rank has the
    thread, and tells the others what was asked. parse: a replies.ReplyParser."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, ranks: Ranks, parse: Any):
        self.engine, self.tokenizer, self.ranks, self.parse = engine, tokenizer, ranks, parse
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # from the thread: (number of an ask, what, ...)
        self.rollouts: dict[int, tuple[Rollout, Any, int]] = {}  # with sampling options and priority
        self.asks: dict[int, Ask] = {}  # of the open rollouts
        self.running: dict[int, Ask] = {}  # of them, those that have not ended
        self.keys: dict[str, int] = {}  # of the rollouts that are open
        self.futures: dict[int, Future] = {}
        self.numbers, self.ask_numbers = count(), count()
        self.said: set[str] = set()
        self.server = None
        if ranks.leads_engine:
            self._listen()
        engine.before_step = self.before_step

    # -------------------------------------------------------------------------------------------- the main thread

    def open(self, seed_key: tuple[int, ...], options: Any, priority: int, max_calls: int) -> tuple[int, str]:
        """A new rollout: (its number, its base URL; "" on ranks without the thread)."""
        number = next(self.numbers)
        self.rollouts[number] = Rollout(seed_key, self.engine.max_total_tokens, max_calls), options, priority
        if self.server is None:
            return number, ""
        self.keys[key := secrets.token_urlsafe(16)] = number
        return number, f"http://127.0.0.1:{self.port}/rollout/{key}/v1"

    def close(self, number: int) -> Rollout:
        """Ends a rollout: its key opens nothing any more, and the engine drops what is under way for it."""
        rollout, *_ = self.rollouts.pop(number)
        self.keys = {key: each for key, each in self.keys.items() if each != number}
        for ask in [ask for ask in self.running.values() if ask.rollout is rollout]:
            self._drop(ask)
            self._answer(ask.number, Refused("the rollout has ended", 404, "not_found"))
        self.asks = {name: ask for name, ask in self.asks.items() if ask.rollout is not rollout}
        return rollout

    def finish(self, number: int, sample: Sample, result: StepResult, is_trained: bool) -> None:
        """Ends a rollout and fills the sample: its longest row, the others as forks, the agent's result."""
        rollout = self.close(number)
        rows = rollout.rows()
        sample.is_led, sample.num_calls = True, sum(map(len, rows))
        sample.forks = [replace(sample, forks=[]) for _ in rows[1:]]
        for row, each in zip(rows, (sample, *sample.forks), strict=False):
            fill(each, row, is_trained)
        was_cut = rollout.was_refused_for_room or (rows and rows[0][-1].completion.finish_reason == "length")
        sample.finish_reason = "length" if was_cut else "stop"
        sample.reward, sample.outcome, sample.rewards = result.reward, result.outcome, result.rewards
        sample.extracted, sample.message = result.extracted, result.state["message"]
        sample.crashed = bool(rows) and result.outcome == "error" and result.state["counts"]
        sample.num_turns, sample.turn_rewards = 1, [sample.reward]
        if not rows:
            sample.reward, sample.outcome = 0.0, "error"
            sample.message = sample.message or "the agent never asked"
            sample.weight_version = sample.newest_version = self.engine.weight_version
        sample.count_tokens()
        sample.turn_tokens = [sample.num_trained_tokens]

    def shut_down(self) -> None:
        """Ends the thread and frees the port."""
        if self.server:
            self.server.should_exit = True
            self.thread.join(5.0)

    def before_step(self) -> None:
        """Answers the requests that have ended, then starts what was asked for. All ranks of an engine call it."""
        for ask in [ask for ask in self.running.values() if self.engine.unclaimed.keys() >= ask.calls.keys()]:
            del self.running[ask.number]
            for request_id, call in ask.calls.items():
                call.completion = self.engine.unclaimed.pop(request_id)
            self._answer(ask.number, self._reply(ask))
        for number, *arguments in self.ranks.broadcast_from_tp_leader(self._take):
            if arguments:
                self._start(number, *arguments)
            elif ask := self.asks.get(number):
                self._drop(ask)
                self.futures.pop(number, None)

    def _take(self) -> list[tuple]:
        events = []
        with suppress(queue.Empty):
            events.append(self.inbox.get(timeout=IDLE_SECONDS) if self.engine.is_idle else self.inbox.get_nowait())
            while True:
                events.append(self.inbox.get_nowait())
        return events

    def _start(self, number: int, rollout_number: int, request: Request, num_bytes: int) -> None:
        try:
            if rollout_number not in self.rollouts:
                raise Refused("the rollout has ended", 404, "not_found")
            rollout, options, priority = self.rollouts[rollout_number]
            calls = rollout.ask(request, num_bytes, self.tokenizer)
        except Refused as refused:
            self._answer(number, refused)
        except (
            DataError,
            RecursionError,
            StopIteration,
        ) as error:  # the template refuses them, or they use all of Unicode
            self._answer(number, Refused(f"messages: {error}"))
        else:
            limits = (request.max_completion_tokens, request.max_tokens, options.max_new_tokens)
            options = replace(options, max_new_tokens=min(filter(None, limits)), stop_strings=request.stop_strings)
            ids = [self.engine.start([call.prompt_ids], [call.seed], options, priority)[0] for call in calls]
            self.asks[number] = self.running[number] = Ask(number, rollout, dict(zip(ids, calls, strict=True)))

    def _drop(self, ask: Ask) -> None:
        """As if it had never been asked: the client has not had the answer."""
        self.running.pop(ask.number, None)
        del self.asks[ask.number]
        self.engine.abort(list(ask.calls))
        ask.rollout.forget(list(ask.calls.values()))

    def _answer(self, number: int, answer: dict | Refused) -> None:
        if future := self.futures.pop(number, None):  # else another rank has it, or the client has gone
            future.set_result(answer)

    def _reply(self, ask: Ask) -> dict:
        """The object of chat.completion."""
        choices = []
        for index, call in enumerate(ask.calls.values()):
            message, cut_at = self._message(call)
            ask.rollout.add_reply(call, message, cut_at)
            ids, end = call.completion.ids.tolist(), call.completion.finish_reason
            end = "tool_calls" if "tool_calls" in message and end == "stop" else end
            choice = {"index": index, "message": message, "finish_reason": end, "logprobs": None}
            if call.request.logprobs:
                texts = [self.tokenizer.decode([token_id], special=True) for token_id in ids]
                pairs = zip(texts, call.completion.logps.tolist(), strict=True)
                content = [{"token": t, "logprob": x, "bytes": list(t.encode()), "top_logprobs": []} for t, x in pairs]
                choice["logprobs"] = {"content": content, "refusal": None}
            choices.append(choice | ({"token_ids": ids} if call.request.return_token_ids else {}))
        num_new = sum(len(call.completion.ids) for call in ask.calls.values())
        usage = {"prompt_tokens": len(call.prompt_ids), "completion_tokens": num_new}
        usage["total_tokens"] = len(call.prompt_ids) + num_new
        head = {"id": f"chatcmpl-{call.seed:012x}", "object": "chat.completion", "created": int(time.time())}
        head |= {"prompt_token_ids": call.prompt_ids} if call.request.return_token_ids else {}
        return head | {"model": "policy", "choices": choices, "usage": usage}

    def _message(self, call: Call) -> tuple[dict, str]:
        """(the reply as the client gets it, the stop string that is missing at its end, if any)."""
        ids, asked = call.completion.ids.tolist(), call.request
        if call.completion.finish_reason == "stop" and ids[-1] in self.engine.stop_token_ids:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, special=self.parse.needs_special_tokens)
        stops = [(text.index(string), string) for string in asked.stop_strings if string in text]
        length, cut_at = min(stops, default=(len(text), ""))
        tools = asked.tools if asked.tool_choice != "none" else None
        reasoning, content, calls = self.parse(text[:length], tools)
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            ids = [f"call_{call.seed:012x}_{i}" for i in range(len(calls))]
            pairs = zip(ids, functions, strict=True)
            message["tool_calls"] = [{"id": name, "type": "function", "function": each} for name, each in pairs]
        return message, cut_at

    # ------------------------------------------------------------------------------------------ the thread of HTTP

    def _listen(self) -> None:
        routes = [Route("/rollout/{key}/v1/chat/completions", self._chat, methods=["POST"])]
        routes.append(Route("/rollout/{key}/v1/models", self._models, methods=["GET"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Refused: _refusal})
        settings: dict = {"host": "127.0.0.1", "port": 0, "lifespan": "off", "ws": "none", "loop": "asyncio"}
        settings |= {"log_config": None, "log_level": "error", "access_log": False, "timeout_graceful_shutdown": 1}
        settings["timeout_keep_alive"] = 86400  # a connection that closes amid a request makes its client ask again
        self.server = uvicorn.Server(uvicorn.Config(app, **settings))
        self.thread = threading.Thread(target=self.server.run, name="endpoint of agents", daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the endpoint of agents did not start"
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def _rollout_of(self, request: HTTPRequest) -> int:
        number = self.keys.get(request.path_params["key"])
        if number is None:
            raise Refused("no rollout that is under way has this key", 404, "not_found")
        return number

    async def _models(self, request: HTTPRequest) -> Response:
        self._rollout_of(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo.py"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: HTTPRequest) -> Response:
        rollout = self._rollout_of(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                raise Refused(f"a request of more than {MAX_BYTES >> 20} MiB", 413, "request_too_large")
        try:
            asked = Request.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise Refused(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
        self._say_what_is_decided(asked)
        number = next(self.ask_numbers)
        self.futures[number] = future = Future()
        self.inbox.put((number, rollout, asked, len(body)))
        answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnect(request))
        seconds = KEEP_ALIVE_SECONDS if asked.stream else None
        await asyncio.wait({answer, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.inbox.put((number,))
            return Response(status_code=499)  # nobody reads it
        gone.cancel()
        if answer.done() and isinstance(answer.result(), Refused):
            raise answer.result()
        if asked.stream:
            return StreamingResponse(self._stream(number, answer, asked), media_type="text/event-stream")
        return JSONResponse(answer.result())

    async def _stream(self, number: int, answer: asyncio.Future, asked: Request) -> AsyncIterator[str]:
        """The whole reply in one piece: nobody knows what of it is a tool call before it has ended."""
        is_sent = False
        try:
            while not (await asyncio.wait({answer}, timeout=KEEP_ALIVE_SECONDS))[0]:
                yield ": the policy has not ended its reply\n\n"
            for chunk in _chunks(answer.result(), asked):
                yield f"data: {json.dumps(chunk)}\n\n"
            is_sent = True
            yield "data: [DONE]\n\n"
        finally:
            if not is_sent:  # the client has gone
                self.inbox.put((number,))

    def _say_what_is_decided(self, asked: Request) -> None:
        given = {name: asked.model_extra[name] for name in DECIDED if asked.model_extra.get(name) is not None}
        if asked.tool_choice not in (None, "auto", "none"):
            given["tool_choice"] = asked.tool_choice
        for name in sorted(given.keys() - self.said):
            self.said.add(name)
            why = "calls are not forced" if name == "tool_choice" else "the run's config decides it"
            self.ranks.print_rank0(f"NOTE: an agent asks for {name}={shortened(given[name])}, without effect: {why}")


async def _disconnect(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(refused: Refused) -> dict:
    return {"error": {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}}


async def _refusal(request: HTTPRequest, refused: Refused) -> Response:
    # Or clients would ask again after a 429.
    return JSONResponse(_error(refused), refused.status, {"x-should-retry": "false"})


async def _no_route(request: HTTPRequest, error: HTTPException) -> Response:
    return await _refusal(request, Refused("here are chat/completions and models only", error.status_code, "not_found"))


def _chunks(answer: dict | Refused, asked: Request) -> list[dict]:
    """Of each choice the message, then why it ended; the usage if the client wants it."""
    if isinstance(answer, Refused):
        return [_error(answer)]
    head = {key: value for key, value in answer.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    chunks: list[dict] = []
    for choice in answer["choices"]:
        delta, end = choice.pop("message"), choice.pop("finish_reason")
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        chunks.append(choice | {"delta": delta, "finish_reason": None})
        chunks.append({"index": choice["index"], "delta": {}, "finish_reason": end})
    wants_usage = (asked.stream_options or {}).get("include_usage")
    usage = [head | {"choices": [], "usage": answer["usage"]}] if wants_usage else []
    return [head | {"choices": [chunk]} for chunk in chunks] + usage
