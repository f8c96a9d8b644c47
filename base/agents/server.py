"""The thread that speaks HTTP with the agents of an engine. It moves JSON, and knows no tokens.

One hostile text costs one request. What is the request's own fault is a 400; an exception of this program is a 500 that
no client repeats. It is said in a line and counted, and too many of them end the run; what it fails at because of what
the policy writes is not counted.
"""

import asyncio
import json
import queue
import re
import socket
import threading
import traceback
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from base.agents.wire_anthropic import Messages
from base.agents.wire_chat import Answer, Chat, Conversations, News, Refused, Request, Wire
from base.agents.wire_responses import Responses
from base.system.disk import say
from base.system.exits import StopRun
from base.system.failure import place_of
from config import shortened

MAX_BYTES = 16 << 20  # of a request
KEEP_ALIVE_SECONDS = 10.0  # between comments in a stream that has nothing to say yet
LINGER_SECONDS = 5.0  # a worker's next rollout may begin at once, on the connection of the last one
RESET_SECONDS = 0.2  # in which a client that has left answers a word
MAX_FAULTS = 100  # requests of a run that this program, and not the client, failed
# Anthropic's clients add /v1 to their base URL, OpenAI's do not.
PATH = re.compile(r"(?P<method>GET|POST) /rollout/(?P<key>\w+)(/v1){0,2}/(?P<name>[a-z].*)")
SERVED = "chat/completions, responses, messages, models"
# By the run: what was sampled in another way would be trained as if it were the policy's.
DECIDED = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "tool_choice")
DECIDED += ("presence_penalty", "frequency_penalty", "repetition_penalty")
# What changes no reply, and the values that ask for what is served.
HARMLESS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
HARMLESS += ("prompt_cache_retention", "include", "max_tool_calls", "stream_options", "client_metadata")
SERVED_VALUES = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
MAX_NOTES = 30  # of a run: an agent may send any key
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "grpo.py"}
MODEL |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's keys


WIRES: dict[str, type[Wire]] = {"chat/completions": Chat, "responses": Responses, "messages": Messages}


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


class Connection(HttpToolsProtocol):
    """A client may close its side behind a request and still read the answer. One that has left closes it, too: it has
    no place for a word in between, which every client else passes over, and resets the connection."""

    def eof_received(self) -> bool:
        """Whether the connection stays open."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        if not cycle.response_started and not self.pipeline and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(RESET_SECONDS, self._end_if_reset)
        return True

    def _end_if_reset(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()


class Server:
    """is_open: whether a key is a running rollout's. note: tells the user something once. addresses: to listen at, with
    one port."""

    def __init__(self, is_open: Callable[[str], bool], note: Callable[[str], None], addresses: Sequence[str]):
        self.is_open = is_open
        self.note = note
        self.inbox: queue.Queue[Asked | Gone] = queue.Queue()  # SimpleQueue.get: see grading.py
        # Of each request that waits for its answer, by its number: what has come of it.
        self.waiting: dict[int, asyncio.Queue[News | ClientDisconnect]] = {}
        self.conversations: dict[str, Conversations] = {}  # by the rollout's key
        self.numbers = count()
        self.noted: set[str] = set()
        self.enforced: Collection[str] = ()  # of DECIDED, what a request over the wire of chat completions may decide
        self.faults: list[str] = []
        # A connection that closes amid a request makes its client ask again: only hang_up and shut_down close any.
        settings = uvicorn.Config(
            self._serve,
            interface="asgi3",
            http=Connection,
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

    def tell(self, number: int, news: News) -> None:
        """An answer to the request, or more of one."""
        self._soon(self._tell, number, news)

    def _soon(self, function: Callable, *args: News | int | str) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def fault(self, error: Exception, *, is_of_reply: bool = False) -> Refused:
        """The answer to a request at which this program failed; is_of_reply: at the policy's reply."""
        text = "".join(traceback.format_exception_only(error)).strip()
        problem = f"{text:.300}{place_of(error)}"
        if not is_of_reply:
            self.faults.append(problem)
            say(f"WARNING: a request of an agent failed ({len(self.faults)} so far): {problem}", is_error=True)
        elif problem not in self.noted and len(self.noted) < MAX_NOTES:
            self.noted.add(problem)
            say(f"WARNING: a reply cannot be given to an agent, and is not trained: {problem}", is_error=True)
        return Refused(f"the endpoint failed: {problem}", 500, "server_error")

    def hang_up(self, key: str) -> None:
        """Soon ends the connections over which a rollout, which has ended, was the last to ask."""
        self._soon(self._forget, key)

    def shut_down(self) -> None:
        """Ends the thread and frees the port."""
        for number in list(self.waiting):
            self.tell(number, Refused("the run has ended", 503, "server_error"))
        self.uvicorn.should_exit = True
        self.thread.join(5.0)

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self, listeners: list[socket.socket]) -> None:
        self.loop.run_until_complete(self.uvicorn.serve(listeners))
        self.loop.close()

    def _tell(self, number: int, news: News) -> None:
        inbox = self.waiting.get(number)
        if inbox is not None:  # else the client has gone
            inbox.put_nowait(news)

    def _forget(self, key: str) -> None:
        self.conversations.pop(key, None)
        self.loop.call_later(LINGER_SECONDS, self._hang_up, f"/rollout/{key}/")

    def _hang_up(self, path: str) -> None:
        for connection in list(self.uvicorn.server_state.connections):
            if connection.scope and connection.scope["path"].startswith(path):
                connection.shutdown()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, as ASGI has it."""
        http = HTTPRequest(scope, receive, send)
        path = PATH.fullmatch(f"{http.method} {scope['path']}")
        wire = WIRES.get(path["name"], Chat) if path else Chat
        with suppress(ClientDisconnect):
            try:
                response = await self._respond(http, path, wire)
            except Refused as refused:
                response = _refusal(wire, refused)
            except ClientDisconnect:
                raise
            except Exception as error:
                response = _refusal(wire, self.fault(error))
            await response(scope, receive, send)

    async def _respond(self, http: HTTPRequest, path: re.Match | None, wire: type[Wire]) -> Response:
        if path is None:
            raise Refused(f"served are {SERVED}", 404, "not_found")
        key = path["key"]
        name = path["name"]
        if not self.is_open(key):
            raise Refused("no running rollout has this key", 404, "not_found")
        if path["method"] == "POST" and name in WIRES:
            return await self._ask(http, key, wire)
        if path["method"] == "GET" and name == "models":
            return _json({"object": "list", "has_more": False, "data": [MODEL]})
        if path["method"] == "GET" and name.startswith("models/"):
            return _json(MODEL)
        raise Refused(f"{path['method']} {name!r:.80} is not served: {SERVED} are", 404, "not_found")

    async def _ask(self, http: HTTPRequest, key: str, kind: type[Wire]) -> Response:
        conversations = self.conversations.setdefault(key, {})
        body = await _read_body(http)
        wire = kind(body, conversations)
        enforced = self.enforced if kind is Chat else ()
        self._note_what_is_not_enforced(wire.not_enforced, enforced)
        request = wire.request
        number = next(self.numbers)
        inbox = asyncio.Queue()
        self.waiting[number] = inbox
        self.inbox.put(Asked(key, number, request, len(body)))
        gone = asyncio.ensure_future(_tell_disconnect(http, inbox))
        try:
            news = await _next(inbox, KEEP_ALIVE_SECONDS if request.stream else None)
        finally:
            gone.cancel()
        if request.stream and not isinstance(news, Refused | ClientDisconnect):
            return StreamingResponse(self._stream(key, number, wire, news), media_type="text/event-stream")
        del self.waiting[number]
        if isinstance(news, Refused):
            raise news
        try:
            if isinstance(news, ClientDisconnect):
                raise news
            return _json(wire.reply(news))
        except Exception as error:
            self.inbox.put(Gone(key, number))
            if isinstance(error, ClientDisconnect):
                raise
            raise self.fault(error, is_of_reply=True) from error

    async def _stream(self, key: str, number: int, wire: Wire, news: News | None) -> AsyncIterator[str]:
        """The events: what of the reply is content for certain, while it is decoded, and the rest at its end."""
        inbox = self.waiting[number]
        try:
            while not isinstance(news, Answer | Refused):
                if news is None:
                    yield ": the policy has not ended its reply\n\n"
                else:
                    yield wire.stream_delta(news)
                news = await _next(inbox, KEEP_ALIVE_SECONDS)
            if isinstance(news, Refused):
                yield wire.stream_failure(news)
            else:
                yield wire.stream_end(news)
        except BaseException as error:
            self.inbox.put(Gone(key, number))
            if not isinstance(error, Exception):  # the client has gone
                raise
            yield wire.stream_failure(self.fault(error, is_of_reply=True))
        finally:
            del self.waiting[number]

    def _note_what_is_not_enforced(self, given: dict, enforced: Collection[str]) -> None:
        """Each key once."""
        for name, value in given.items():
            if value is None or name in HARMLESS or name in enforced or value in SERVED_VALUES.get(name, ()):
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


async def _next(inbox: asyncio.Queue, seconds: float | None) -> News | ClientDisconnect | None:
    """What comes next; None if nothing has come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await inbox.get()
    except TimeoutError:
        return None


async def _tell_disconnect(http: HTTPRequest, inbox: asyncio.Queue) -> None:
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            inbox.put_nowait(ClientDisconnect())
            return


def _json(body: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """In ASCII, in which JSON writes any text."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _refusal(wire: type[Wire], refused: Refused) -> Response:
    return _json(wire.failure(refused), refused.status, {"x-should-retry": "false"})  # or clients repeat what had a 429
