"""What an agent has asked: the tree of a rollout's calls, and the rows that are trained.

A sampled id is never encoded again. The prompt of a call that goes on from one of our replies is that reply's ids and
what the chat template writes after them. Knows no HTTP and no engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from base.agents.wire_chat import Refused, Request, digest, link_of, read_message
from base.hf.tokenizer import Tokenizer
from base.hf.turns import observation_ids, open_reply_ids
from config import DataError
from records import Completion, SamplingOptions, TokenSequence, sample_seed

CHARS_PER_TOKEN = 64  # no text has more of them


@dataclass(slots=True, eq=False)
class Call:
    """A prompt and, once it has ended, the engine's completion. parent: the call whose reply the prompt goes on from.
    ask: number of the request. links: digests of what the template gets beside the messages, and of each message but
    the one with which the reply goes on. seed: of what was asked and how often, never of when. sent: what a stream has
    told of the reply. reply: the message that the agent got; read_reply: as the template gets it; reply_links: of the
    forms in which the agent may send it back."""

    parent: "Call | None"
    ask: int
    request: Request
    links: list[bytes]
    prompt_ids: list[int]
    seed: int
    completion: Completion | None = None
    sent: str = ""
    reply: dict = field(default_factory=dict)
    read_reply: dict = field(default_factory=dict)
    reply_links: set[bytes] = field(default_factory=set)

    @property
    def is_trained(self) -> bool:
        return self.completion is not None and self.request.train is not False

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion.ids

    def add_reply(self, message: dict, contents: Iterable[str]) -> None:
        """From now on a call can go on from the reply. contents: the texts that the message may come back with."""
        self.reply = message
        self.read_reply = read_message(message)
        if self.request.train is False:
            return
        for content in contents:
            whole = self.request.opening + content
            self.reply_links.add(link_of(read_message(message | {"content": whole})))

    def is_continued_by(self, links: Sequence[bytes]) -> bool:
        """Whether these messages are the call's, then its reply, and maybe others."""
        size = len(self.links)
        return len(links) > size and self.links == links[:size] and links[size] in self.reply_links


@dataclass(slots=True)
class Rollout:
    """What an agent has asked: a tree of calls. seed_key: as of a sample's seed. max_tokens: of a row. options,
    priority: as Engine.start takes them."""

    seed_key: tuple[int, ...]
    max_tokens: int
    max_calls: int
    options: SamplingOptions | None = None
    priority: int = -1
    has_asked: bool = False
    was_refused_for_room: bool = False
    calls: list[Call] = field(default_factory=list)  # under way, and ended

    def ask(self, number: int, request: Request, num_bytes: int, tokenizer: Tokenizer) -> list[Call]:
        """The n calls of a request of this size. Raises Refused, DataError where the template refuses the messages, and
        RecursionError where they are too deep."""
        self.has_asked = True
        num_calls = request.n or 1
        if len(self.calls) + num_calls > self.max_calls:
            raise Refused(f"this agent has used up max_calls={self.max_calls}", 429, "rate_limit_exceeded")
        if num_bytes > 65536 + CHARS_PER_TOKEN * self.max_tokens:  # to encode 16 MiB would take 16 s
            raise self._no_room(f"{num_bytes:,} bytes")
        beside = [request.tools or None, request.chat_template_kwargs or None]
        links = [digest(beside), *map(link_of, request.messages)]
        known = [call for call in self.calls if call.is_continued_by(links)]
        parent = max(known, key=lambda call: (len(call.links), -call.seed), default=None)
        if request.continue_final_message:
            reply_link = links.pop()
            parent = self._cut_call(links, reply_link)
            if parent is None:
                kwargs = request.chat_template_kwargs
                prompt_ids = open_reply_ids(
                    tokenizer, request.messages, request.tools, template_kwargs=kwargs, max_tokens=self.max_tokens
                )
            else:
                prompt_ids = parent.ids
        else:
            prompt_ids = self._prompt_ids(request, parent, known, tokenizer)
        if len(prompt_ids) >= self.max_tokens:
            raise self._no_room(f"{len(prompt_ids):,} tokens")
        seeds = self._free_seeds(prompt_ids, num_calls)
        asked = [Call(parent, number, request, links, prompt_ids, seed) for seed in seeds]
        self.calls += asked
        return asked

    def _prompt_ids(
        self, request: Request, parent: Call | None, known: Sequence[Call], tokenizer: Tokenizer
    ) -> list[int]:
        """What is known of the messages stays as it was sampled; the template writes the rest."""
        messages = request.messages
        tools = request.tools
        options = {"template_kwargs": request.chat_template_kwargs, "max_tokens": self.max_tokens}
        if parent is None:
            return tokenizer.render(messages, tools, escape=True, **options)
        reply_at = len(parent.links) - 1  # a link is the tools'
        before = list(messages[:reply_at])
        after = messages[reply_at + 1 :]
        own = [call for call in known if len(call.links) < len(parent.links)]  # of whose replies it goes on, too
        for call in own:
            before[len(call.links) - 1] = call.read_reply
        calling = parent.read_reply if "tool_calls" in parent.read_reply else None
        add = partial(
            observation_ids, tokenizer, reply_ids=parent.completion.ids, observation=after, tools=tools, **options
        )
        try:
            return parent.ids + add(before, calling=calling)
        except DataError:
            if calling is None and not any("tool_calls" in call.read_reply for call in own):
                raise
        # What the template makes of the replies is cut off: it may refuse their calls (two at once: Llama's).
        for call in own:
            before[len(call.links) - 1] = {"role": "assistant", "content": ""}
        return parent.ids + add(before)

    def _cut_call(self, links: Sequence[bytes], reply_link: bytes) -> Call | None:
        """The call with these messages and this reply, which only the limit of tokens ended."""
        for call in self.calls:
            if call.links == links and reply_link in call.reply_links and call.completion.finish_reason == "length":
                return call
        return None

    def _free_seeds(self, prompt_ids: list[int], num_calls: int) -> list[int]:
        """Seeds that no other call of this prompt has."""
        used = {call.seed for call in self.calls if call.prompt_ids == prompt_ids}
        free = []
        for time in range(len(used) + num_calls):
            seed = sample_seed(*self.seed_key, *prompt_ids, time)
            if seed not in used:
                free.append(seed)
        return free[:num_calls]

    def _no_room(self, after: str) -> Refused:
        self.was_refused_for_room = True
        # OpenAI's words, by which clients recognize it.
        limit = f"This model's maximum context length is {self.max_tokens} tokens (policy.max_total_sequence_length)"
        return Refused(f"{limit}. However, your messages resulted in {after}.", 400, "context_length_exceeded")

    def forget(self, number: int) -> None:
        """The client never had the replies to this request: if it asks again, it gets the same ones."""
        self.calls = [call for call in self.calls if call.ask != number]

    @property
    def turns(self) -> dict[Call, int]:
        """The calls that are trained, with their numbers in the order of the requests."""
        trained = [call for call in self.calls if call.is_trained]
        return {call: number for number, call in enumerate(trained)}

    def rows(self) -> list[list[Call]]:
        """Each reply in one row: the first call that goes on from another lengthens its row, any other starts one. The
        row with most sampled ids comes first. Prompts and seeds give the order, never the time of a call."""
        rows: dict[Call | None, list[Call]] = {}  # by the last call
        for call in sorted(self.turns, key=lambda call: (len(call.prompt_ids), call.seed)):
            row = rows.pop(call.parent, [])
            rows[call] = [*row, call]
        return sorted(rows.values(), key=num_sampled_ids, reverse=True)


def num_sampled_ids(row: Sequence[Call]) -> int:
    return sum(len(call.completion.ids) for call in row)


def sequence_of(row: Sequence[Call], turns: Mapping[Call, int], is_trained: bool) -> TokenSequence:
    """The tokens of a row: its replies, whose turns have these numbers, and what was between them."""
    sequence = TokenSequence(row[0].prompt_ids)
    num_known = 0  # messages
    for call in row:
        assert call.prompt_ids[: sequence.num_tokens] == sequence.token_ids, "it goes on from the ids before"
        sequence.add_context(call.prompt_ids[sequence.num_tokens :])
        start = sequence.num_output_tokens
        sequence.add_reply(call.completion, turns[call], is_trained)
        asked = {"messages": call.request.messages[num_known:], "reply": call.reply}
        if num_known == 0 and call.request.tools:
            asked["tools"] = [tool["function"]["name"] for tool in call.request.tools]
        sequence.calls.append(asked | {"start": start, "end": sequence.num_output_tokens})
        num_known = len(call.request.messages) + 1  # with the reply
    return sequence
