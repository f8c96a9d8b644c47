"""An OpenAI endpoint on this machine over the run's own engine: one URL, with a key that nobody can guess, per rollout.

All that has tokens is the main thread's: between two decode steps the sampler calls `before_step`, which answers what
has ended and starts what was asked for. server.py has the thread that speaks HTTP.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from base.agents.calls import Call, Rollout, sequence_of
from base.agents.environment import LOOPBACK, Agent
from base.agents.parser import ReplyParser
from base.agents.server import Asked, Gone, Server
from base.agents.wire_chat import Answer, Delta, News, Refused, Reply, Request, Sampling, Token
from base.hf.tokenizer import Tokenizer
from base.system.exits import Interrupted, StopRun
from base.system.ranks import Ranks
from config import DataError
from envs import StepResult
from records import Completion, Engine, Sample, SamplingOptions

IDLE_SECONDS = 0.005  # how long a step of an idle engine waits for a request
LEAST_LOGP = -9999.0  # JSON has no infinity; vLLM's own server writes this number, too
FAULTS_OF_THE_REQUEST = (DataError, RecursionError)  # what a request's own messages cause
PARSERS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


@dataclass(slots=True, eq=False)
class Stream:
    """A reply that is told while it is decoded. number: of its request. index: of the reply among the request's. The
    next piece is told when it has next_size ids."""

    number: int
    index: int
    seed: int
    call: Call
    next_size: int = 1


class Endpoint:
    """Answers the agents of this rank's engine. All ranks of an engine make the same calls: its first rank has the
    server, and tells the others what was asked. clients_sample: temperature, top_p and top_k of a chat request
    count."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        ranks: Ranks,
        parse: ReplyParser,
        agents: Sequence[Agent] = (),
        clients_sample: bool = False,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.parse = parse
        self.clients_sample = clients_sample
        self.rollouts: dict[str, Rollout] = {}  # that are open, by their keys
        self.running: dict[int, dict[str, Call]] = {}  # number of a request -> its calls by the engine's request ids
        self.streams: dict[str, Stream] = {}  # by the engine's request ids
        self.noted: set[str] = set()
        self.server: Server | None = None
        if ranks.is_tp_leader:
            addresses = {agent.cfg.address for agent in agents if agent.cfg.address}
            self.server = Server(lambda key: key in self.rollouts, ranks.print_rank0, [LOOPBACK, *sorted(addresses)])
            if clients_sample:
                self.server.enforced = Sampling.model_fields
        for agent in agents:
            if agent.max_starting is not None:
                agent.pool.may_start = partial(self.may_start, agent.max_starting)

    def open(
        self, seed_key: tuple[int, ...], options: SamplingOptions, priority: int, max_calls: int
    ) -> tuple[str, str]:
        """A new rollout: (its key, its base URL)."""
        key = self.ranks.broadcast_from_tp_leader(lambda: secrets.token_hex(16))
        self.rollouts[key] = Rollout(seed_key, self.engine.max_total_tokens, max_calls, options, priority)
        port = self.server.port if self.server else 0  # only the first rank starts agents
        return key, f"http://{LOOPBACK}:{port}/rollout/{key}/v1"

    def may_start(self, max_starting: int, jobs: Sequence[dict]) -> bool:
        """Whether fewer of these rollouts have asked for nothing yet."""
        rollouts = [self.rollouts[job["base_url"].split("/")[-2]] for job in jobs]
        starting = [rollout for rollout in rollouts if not rollout.has_asked]
        return len(starting) < max_starting

    def close(self, key: str) -> Rollout:
        """Ends a rollout: its key opens nothing any more, and the engine drops what is under way for it."""
        rollout = self.rollouts.pop(key)
        for number in {call.ask for call in rollout.calls} & self.running.keys():
            self._answer(number, Refused("the rollout has ended", 404, "not_found"))
            self._drop(rollout, number)
        if self.server:
            self.server.hang_up(key)
        return rollout

    def finish(self, key: str, sample: Sample, result: StepResult, is_trained: bool) -> StepResult:
        """Ends a rollout and gives the sample its sequences, the longest first. Returns the result: the agent's,
        if it has asked."""
        rollout = self.close(key)
        rows = rollout.rows()
        turns = rollout.turns
        message = result.state.get("message", "")
        rewards = result.state.get("call_rewards", [])
        if not rows:  # the policy is not the reason
            result = StepResult(0.0, "error")
            message = message or "the agent never called the endpoint"
            sample.sequence.oldest_version = self.engine.weight_version
            sample.sequence.newest_version = self.engine.weight_version
        elif result.state.get("crashed"):
            result = replace(result, outcome="crashed")
        elif rewards and len(rewards) != len(turns):
            result = StepResult(0.0, "crashed")
            message = f"the agent returned {len(rewards)} call_rewards for {len(turns)} replies"
            rewards = []
        sample.grade.turn_rewards = rewards or [result.reward] * len(turns)
        if rows:
            holder = sample.sequence.holder
            sample.sequences = [sequence_of(row, turns, is_trained) for row in rows]
            for sequence in sample.sequences:
                sequence.holder = holder
        was_cut = rollout.was_refused_for_room
        if rows and rows[0][-1].completion.finish_reason == "length":
            was_cut = True
        sample.finish_reason = "length" if was_cut else "stop"
        sample.num_calls = sum(len(row) for row in rows)
        sample.grade.message = " ".join(message.split())  # one line
        return result

    def shut_down(self) -> None:
        """Ends the server's thread and frees the port."""
        if self.server:
            self.server.shut_down()

    def before_step(self) -> None:
        """Answers the requests that have ended, then starts what was asked for. All ranks of an engine call it."""
        ended = [number for number, calls in self.running.items() if calls.keys() <= self.engine.unclaimed.keys()]
        for number in ended:
            calls = self.running.pop(number)
            for request_id, call in calls.items():
                call.completion = self.engine.unclaimed.pop(request_id)
                self.streams.pop(request_id, None)
            self._reply(number, [*calls.values()])
        for event in self.ranks.broadcast_from_tp_leader(self._take):
            if isinstance(event, Asked):
                self._start(event)
            elif event.key in self.rollouts:
                self._drop(self.rollouts[event.key], event.number)
        if self.streams:
            self._tell_streams()

    def _take(self) -> list[Asked | Gone]:
        return self.server.take(IDLE_SECONDS if self.engine.is_idle else 0.0)

    def _start(self, asked: Asked) -> None:
        rollout = self.rollouts.get(asked.key)
        request = asked.request
        if rollout is None:
            self._answer(asked.number, Refused("no running rollout has this key", 404, "not_found"))
            return
        try:
            self._check_stop_ids(request)
            sampling = Sampling.asked_by(request) if self.clients_sample else {}
            calls = rollout.ask(asked.number, request, asked.num_bytes, self.tokenizer)
        except Refused as refused:
            self._answer(asked.number, refused)
            return
        except FAULTS_OF_THE_REQUEST as error:
            self._answer(asked.number, Refused(f"messages: {error or type(error).__name__}"))
            return
        except Exception as error:
            self._fail(asked.number, error)
            return
        limits = [rollout.options.max_new_tokens]
        for limit in (request.max_completion_tokens, request.max_tokens):
            if limit is not None:
                limits.append(limit)
        options = replace(
            rollout.options,
            max_new_tokens=min(limits),
            stop_strings=tuple(request.stop or ()),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            top_logprobs=_num_likeliest(request),
            **sampling,
        )
        prompts = [call.prompt_ids for call in calls]
        seeds = [call.seed for call in calls]
        try:
            request_ids = self.engine.start(prompts, seeds, options, rollout.priority)
        except (StopRun, Interrupted):
            raise
        except Exception as error:  # the values are the client's
            rollout.forget(asked.number)
            self._answer(asked.number, Refused(f"the engine refuses the request: {error!s:.300}"))
            return
        self.running[asked.number] = dict(zip(request_ids, calls, strict=True))
        parent = calls[0].parent
        has_new_tools = parent is None or not parent.request.callable_tools
        if self.server and request.callable_tools and has_new_tools:
            self._note_lost_tools(request)
        if request.stream:
            for index, (request_id, call) in enumerate(zip(request_ids, calls, strict=True)):
                self.streams[request_id] = Stream(asked.number, index, seeds[-1], call)

    def _check_stop_ids(self, request: Request) -> None:
        for token_id in request.stop_token_ids or ():
            if token_id >= self.engine.vocab_size:
                size = self.engine.vocab_size
                raise Refused(f"stop_token_ids: {token_id} is outside of the model's vocabulary of {size} tokens")

    def _note_lost_tools(self, request: Request) -> None:
        """Tells the user once why none of the tools may ever be called."""
        if not self.parse.reads_calls:
            fix = f"select the parser of the model's family by {PARSERS}.tool_parser"
            self._note(f"an agent sends tools, but no parser reads calls: they stay text; {fix}")
        if not self.tokenizer.shows_tools(request.messages, request.tools, request.chat_template_kwargs):
            fix = "the agent's own prompt must describe them, or policy.tokenizer.chat_template write them"
            self._note(f"an agent sends tools, but the chat template does not write them: {fix}")

    def _note(self, note: str) -> None:
        if note not in self.noted:
            self.noted.add(note)
            self.server.note(f"NOTE: {note}")

    def _tell_streams(self) -> None:
        """Tells what the replies have gained, each when it is longer by an eighth. So what it costs to decode a reply
        from its start each time is in proportion to its length."""
        sampled = self.engine.ids_so_far()
        for request_id, stream in self.streams.items():
            ids = sampled.get(request_id, ())
            if len(ids) < stream.next_size:
                continue
            stream.next_size = len(ids) + 1 + len(ids) // 8
            call = stream.call
            text = self.tokenizer.decode(ids, special=self.parse.needs_special_tokens)
            text = certain_text(text, call.request.stop or ())
            text = self.parse.content_of_beginning(text, *_asked_of(call))
            if len(text) > len(call.sent) and text.startswith(call.sent):
                gained = text[len(call.sent) :]
                call.sent = text
                self._answer(stream.number, Delta(stream.seed, len(call.prompt_ids), stream.index, gained))

    def _drop(self, rollout: Rollout, number: int) -> None:
        """As if it had never been asked: the client has not had the answer."""
        request_ids = [*self.running.pop(number, ())]
        self.engine.abort(request_ids)
        for request_id in request_ids:
            self.streams.pop(request_id, None)
        rollout.forget(number)

    def _answer(self, number: int, answer: News) -> None:
        if self.server:  # else another rank has the clients
            self.server.tell(number, answer)

    def _fail(self, number: int, error: Exception, *, is_of_reply: bool = False) -> None:
        """This program failed at a request, or at the reply, which costs no other."""
        for rollout in self.rollouts.values():
            rollout.forget(number)
        if self.server:
            self.server.tell(number, self.server.fault(error, is_of_reply=is_of_reply))

    def _reply(self, number: int, calls: list[Call]) -> None:
        """Answers a request whose calls have ended."""
        try:
            replies = [self._read(call) for call in calls]
        except Exception as error:
            self._fail(number, error, is_of_reply=True)
            return
        self._answer(number, Answer(calls[0].prompt_ids, replies))

    def _read(self, call: Call) -> Reply:
        """The reply as the client gets it; the call can now be gone on from."""
        request = call.request
        completion = call.completion
        ids = completion.ids
        text = self._text_of(completion, request)
        found = [(text.index(string), string) for string in request.stop or () if string in text]
        length, cut_at = min(found, default=(len(text), None))
        parsed = self.parse(text[:length], *_asked_of(call))
        content = parsed.content
        # A parser may drop the text before a call; bytes may be a character alone, and none beside those that follow.
        if call.sent:
            content = call.sent + (content or "")[len(call.sent) :]
        tokens = []
        likeliest = []
        if request.logprobs:
            tokens = [self._token(*pair) for pair in zip(ids, completion.tokens["logp"].tolist(), strict=True)]
        if _num_likeliest(request):
            likeliest = [[self._token(*pair) for pair in others.items()] for others in completion.likeliest]
        reply = Reply(
            call.seed,
            parsed.reasoning,
            content,
            parsed.tool_calls,
            completion.finish_reason,
            cut_at,
            ids,
            tokens,
            likeliest,
        )
        contents = [content or "", parsed.content or "", *parsed.with_thought]
        endings = {"", cut_at or ""}  # a client may put the stop string back
        call.add_reply(reply.message, [content + ending for content in contents for ending in endings])
        return reply

    def _token(self, token_id: int, logp: float) -> Token:
        return Token(self.tokenizer.decode([token_id], special=True), max(logp, LEAST_LOGP))

    def _text_of(self, completion: Completion, request: Request) -> str:
        ids = completion.ids
        ends = [*self.engine.stop_token_ids, *(request.stop_token_ids or ())]
        if completion.finish_reason == "stop" and ids[-1] in ends:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, special=self.parse.needs_special_tokens)


def _asked_of(call: Call) -> tuple[list[dict] | None, dict | None, list[int]]:
    """What decides how a reply is read: the tools, the template's arguments and the prompt's ids."""
    return call.request.callable_tools, call.request.chat_template_kwargs, call.prompt_ids


def _num_likeliest(request: Request) -> int:
    """How many tokens at each place the client wants to see, besides the sampled one."""
    if request.logprobs and request.top_logprobs:
        return request.top_logprobs
    return 0


def certain_text(text: str, stop_strings: Sequence[str]) -> str:
    """Without an end that more ids may change: part of a character, or of a stop string."""
    text = text.rstrip("\ufffd")
    size = len(text)
    for string in stop_strings:
        for start in range(max(0, len(text) - len(string) + 1), size):
            if string.startswith(text[start:]):
                size = start
                break
    return text[:size]
