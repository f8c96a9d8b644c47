"""The thread that speaks HTTP with the agents of an engine. It moves JSON, and knows no tokens.

One hostile text costs one request. What is the request's own fault is a 400; an exception of this program is a 500 that
no client repeats. It is said in a line and counted, and too many of them end the run.
"""

import asyncio
import json
import queue
import re
import socket
import threading
import traceback
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import uvicorn
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from config import shortened
from support.agents.chat import Refused, Request, stream_of
from support.system.disk import say
from support.system.exits import StopRun, place_of

MAX_BYTES = 16 << 20  # of a request
KEEP_ALIVE_SECONDS = 10.0  # between comments in a stream that has nothing to say yet
LINGER_SECONDS = 5.0  # a worker's next rollout may begin at once, on the connection of the last one
MAX_FAULTS = 100  # requests of a run that this program, and not the client, failed
ROLLOUT = r"/rollout/(?P<key>\w+)/v1"
CHAT = re.compile(f"POST {ROLLOUT}/chat/completions")
MODELS = re.compile(f"GET {ROLLOUT}/models")
ONE_MODEL = re.compile(f"GET {ROLLOUT}/models/.+")
# By the run: what was sampled in another way would be trained as if it were the policy's.
DECIDED = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "tool_choice")
DECIDED += ("presence_penalty", "frequency_penalty", "repetition_penalty")
# What changes no reply, and the values that ask for what is served.
HARMLESS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
SERVED_VALUES = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
MAX_NOTES = 30  # of a run: an agent may send any key
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo.py"}


class Asked(NamedTuple):
    """A request has come. number: of the request."""

    key: str
    number: int
    request: Request
    num_bytes: int


class Gone(NamedTuple):
    """The client will not read the answer: as if it had never asked."""

    key: str
    number: int


class Server:
    """is_open: whether a key is a running rollout's. note: tells the user something once. addresses: to listen at, with
    one port."""

    def __init__(self, is_open: Callable[[str], bool], note: Callable[[str], None], addresses: Sequence[str]):
        self.is_open = is_open
        self.note = note
        self.inbox: queue.SimpleQueue[Asked | Gone] = queue.SimpleQueue()
        self.futures: dict[int, Future[dict | Refused]] = {}  # of requests that wait for an answer, by their numbers
        self.numbers = count()
        self.noted: set[str] = set()
        self.faults: list[str] = []
        # A connection that closes amid a request makes its client ask again: only hang_up and shut_down close any.
        settings = uvicorn.Config(
            self._serve,
            interface="asgi3",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            log_level="critical",  # what goes wrong is said here
            timeout_keep_alive=86400,
            timeout_graceful_shutdown=1,
        )
        self.uvicorn = uvicorn.Server(settings)
        self.port = 0
        listeners = []
        for address in addresses:
            listener = socket.create_server((address, self.port), backlog=2048)
            # Its connections inherit this: else a body waits 40 ms for the acknowledgement of its headers.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.port = listener.getsockname()[1]
            listeners.append(listener)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=(listeners,), name="endpoint", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------------------------------------- for the main thread

    def take(self, seconds: float) -> list[Asked | Gone]:
        """What has come; with nothing, waits for it up to `seconds`. Raises StopRun after too many faults."""
        if len(self.faults) > MAX_FAULTS:
            fix = "this is a fault of this program, not of the agent"
            raise StopRun(f"{len(self.faults)} requests of agents failed, the last by {self.faults[-1]}: {fix}")
        events = []
        with suppress(queue.Empty):
            events.append(self.inbox.get(timeout=seconds))
            while True:
                events.append(self.inbox.get_nowait())
        return events

    def answer(self, number: int, answer: dict | Refused) -> None:
        future = self.futures.pop(number, None)
        if future is not None:  # else the client has gone
            future.set_result(answer)

    def forget(self, number: int) -> None:
        """Nobody waits for the answer."""
        self.futures.pop(number, None)

    def fault(self, error: Exception) -> Refused:
        """The answer to a request at which this program failed."""
        text = "".join(traceback.format_exception_only(error)).strip()
        problem = f"{text:.300}{place_of(error)}"
        self.faults.append(problem)
        say(f"WARNING: a request of an agent failed ({len(self.faults)} so far): {problem}", is_error=True)
        return Refused(f"the endpoint failed: {problem}", 500, "server_error")

    def hang_up(self, key: str) -> None:
        """Soon ends the connections over which a rollout, which has ended, was the last to ask."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.call_later, LINGER_SECONDS, self._hang_up, f"/rollout/{key}/")

    def shut_down(self) -> None:
        """Ends the thread and frees the port."""
        for number in list(self.futures):
            self.answer(number, Refused("the run has ended", 503, "server_error"))
        self.uvicorn.should_exit = True
        self.thread.join(5.0)

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self, listeners: list[socket.socket]) -> None:
        self.loop.run_until_complete(self.uvicorn.serve(listeners))
        self.loop.close()

    def _hang_up(self, path: str) -> None:
        for connection in list(self.uvicorn.server_state.connections):
            if connection.scope and connection.scope["path"].startswith(path):
                connection.shutdown()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, as ASGI has it."""
        request = HTTPRequest(scope, receive, send)
        with suppress(ClientDisconnect):
            try:
                response = await self._respond(request)
            except Refused as refused:
                response = _refusal(refused)
            except ClientDisconnect:
                raise
            except Exception as error:
                response = _refusal(self.fault(error))
            await response(scope, receive, send)

    async def _respond(self, request: HTTPRequest) -> Response:
        asked = f"{request.method} {request.scope['path']}"
        if path := CHAT.fullmatch(asked):
            self._check_key(path["key"])
            return await self._chat(request, path["key"])
        if path := MODELS.fullmatch(asked):
            self._check_key(path["key"])
            return _json({"object": "list", "data": [MODEL]})
        if path := ONE_MODEL.fullmatch(asked):
            self._check_key(path["key"])
            return _json(MODEL)
        fix = "choose chat completions in your client, not responses, messages or completions"
        raise Refused(f"only chat/completions and models are served: {fix}", 404, "not_found")

    def _check_key(self, key: str) -> None:
        if not self.is_open(key):
            raise Refused("no running rollout has this key", 404, "not_found")

    async def _chat(self, http: HTTPRequest, key: str) -> Response:
        body = await _read_body(http)
        request = _read_request(body)
        self._note_what_is_not_served(request)
        number = next(self.numbers)
        future: Future[dict | Refused] = Future()
        self.futures[number] = future
        self.inbox.put(Asked(key, number, request, len(body)))
        answer = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_disconnect(http))
        seconds = KEEP_ALIVE_SECONDS if request.stream else None
        await asyncio.wait({answer, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.inbox.put(Gone(key, number))
            raise ClientDisconnect
        gone.cancel()
        if answer.done() and isinstance(answer.result(), Refused):
            raise answer.result()
        if request.stream:
            return StreamingResponse(self._stream(key, number, answer, request), media_type="text/event-stream")
        return _json(answer.result())

    async def _stream(self, key: str, number: int, answer: asyncio.Future, request: Request) -> AsyncIterator[str]:
        """The whole reply in one piece: nobody knows what of it is a tool call before it has ended."""
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=KEEP_ALIVE_SECONDS)
                if done:
                    break
                yield ": the policy has not ended its reply\n\n"
            yield stream_of(request, answer.result())
        except BaseException:  # the client has gone
            self.inbox.put(Gone(key, number))
            raise

    def _note_what_is_not_served(self, request: Request) -> None:
        """Each key once."""
        given = dict(request.model_extra)
        for name in ("tool_choice", "response_format", "top_logprobs"):
            given[name] = getattr(request, name)
        for name, value in given.items():
            if value is None or name in HARMLESS or value in SERVED_VALUES.get(name, ()):
                continue
            if name in self.noted or len(self.noted) == MAX_NOTES:
                continue
            self.noted.add(name)
            why = "the run's config decides how replies are sampled" if name in DECIDED else "it is not served"
            key = name if name.isidentifier() else shortened(name)
            self.note(f"NOTE: an agent asks for {key}={shortened(value)}, to no effect: {why}")


async def _read_body(http: HTTPRequest) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise _too_large()
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "gzip":
        return _unpack(bytes(body))
    if encoding != "identity":
        raise Refused(f"content-encoding {encoding!r:.80}: served are identity and gzip", 415)
    return bytes(body)


def _unpack(body: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=31)  # 31: gzip's head and end
    try:
        unpacked = stream.decompress(body, MAX_BYTES + 1)
    except zlib.error as error:
        raise Refused(f"body: not gzip ({error})") from error
    if len(unpacked) > MAX_BYTES:
        raise _too_large()
    if not stream.eof:
        raise Refused("body: the gzip stream has no end")
    return unpacked


def _too_large() -> Refused:
    return Refused(f"the request is larger than {MAX_BYTES >> 20} MiB", 413, "request_too_large")


def _read_request(body: bytes) -> Request:
    try:
        return Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refused(f"{place}: {first['msg']}") from error


async def _disconnect(http: HTTPRequest) -> None:
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            return


def _json(body: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """In ASCII, in which JSON writes any text."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _refusal(refused: Refused) -> Response:
    return _json(refused.body, refused.status, {"x-should-retry": "false"})  # or clients repeat what had a 429
