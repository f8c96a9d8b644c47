"""A teacher behind an endpoint: what a server of vLLM says of the log-probabilities of token ids.

    vllm serve TEACHER --max-logprobs 64      then policy.reference_server_url=http://HOST:8000

Any server with vLLM's OpenAI-compatible `/v1/models`, `/tokenize` and `/v1/completions` with `prompt_logprobs` will do.
Ids are sent, never texts. That they mean the same to the server is shown before, on the texts of all ids.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, NamedTuple

import numpy as np

from base.hf.tokenizer import Tokenizer
from config import ConfigError

KEY = "policy.reference_server_url"
ATTEMPTS = 4  # of a request that no server answers: one that restarts costs no run
PAUSE = 5.0  # seconds between them
TIMEOUT = 600.0  # seconds
AT_ONCE = 32  # requests of a rank
IDS_OF_A_TEXT = 500


class ServerError(Exception):
    """The server cannot be used; the message is a sentence."""


class Scores(NamedTuple):
    """Of each id of a sequence but the first. J: the likeliest ids there, likeliest first."""

    logp_T: np.ndarray
    ids_TJ: np.ndarray
    logp_TJ: np.ndarray


class TeacherServer:
    def __init__(self, url: str, tokenizer: Tokenizer):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer = tokenizer
        self.attempts = 1  # until it has answered
        models = self._ask("/v1/models")["data"]
        self.model = models[0]["id"]
        self.max_model_len = models[0].get("max_model_len")

    def check(self, max_tokens: int, top_k: int | None) -> None:
        """Raises ServerError unless sequences of max_tokens ids of the tokenizer can be scored."""
        tokenizer = self.tokenizer
        needed = max_tokens + 1  # a request generates a token
        if self.max_model_len is not None and self.max_model_len < needed:
            problem = f"its sequences have at most {self.max_model_len} tokens, and policy.max_total_sequence_length"
            raise ServerError(f"{problem}={max_tokens}: start it with --max-model-len {needed}")
        for first in range(0, tokenizer.vocab_size, IDS_OF_A_TEXT):
            ids = range(first, min(first + IDS_OF_A_TEXT, tokenizer.vocab_size))
            text = " ".join(tokenizer.backend.decode([i], skip_special_tokens=False) for i in ids)
            theirs = self._ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
            if theirs["tokens"] != tokenizer.backend.encode(text, add_special_tokens=False).ids:
                problem = f"the tokenizer of its model {self.model!r} gives other ids than the policy's"
                raise ServerError(f"{problem}, for one in the text {text[:40]!r}; serve a model of the same tokenizer")
        self.score([0, 0], top_k)
        self.attempts = ATTEMPTS

    def score_all(self, sequences: Sequence[list[int]], top_k: int | None) -> list[Scores]:
        """`score` of each sequence, in their order."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda ids: self.score(ids, top_k), sequences))

    def score(self, ids: list[int], top_k: int | None) -> Scores:
        """What the teacher gives ids[1:], and its top_k likeliest ids in their places (None: none). In nats, at
        temperature 1. Raises ServerError."""
        num_top = top_k or 0
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": num_top}
        found = self._ask("/v1/completions", body)["choices"][0].get("prompt_logprobs")
        if found is None or len(found) != len(ids):
            raise ServerError("its answers have no prompt_logprobs for each id: use `vllm serve`")
        logp_T = np.empty(len(ids) - 1, np.float32)
        ids_TJ = np.empty((len(ids) - 1, num_top), np.int64)
        logp_TJ = np.empty(ids_TJ.shape, np.float32)
        for place, (token, entries) in enumerate(zip(ids[1:], found[1:], strict=True)):
            logp_T[place] = entries[str(token)]["logprob"]
            likeliest = sorted((entry["rank"], int(name)) for name, entry in entries.items())[:num_top]
            if len(likeliest) < num_top:
                problem = f"it gives {len(likeliest)} likeliest ids, and loss_fn.topk_logits_k={num_top}"
                raise ServerError(f"{problem}: start it with --max-logprobs {num_top}, or lower the key")
            for number, (_, other) in enumerate(likeliest):
                ids_TJ[place, number] = other
                logp_TJ[place, number] = entries[str(other)]["logprob"]
        if ids_TJ.max(initial=0) >= self.tokenizer.vocab_size:
            problem = f"its model gives a place among the likeliest to {ids_TJ.max()}, which is no id of the tokenizer"
            raise ServerError(f"{problem}: lower loss_fn.topk_logits_k")
        return Scores(logp_T, ids_TJ, logp_TJ)

    def _ask(self, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.attempts):
            if attempt > 0:
                time.sleep(PAUSE)
            try:
                request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")
                problem = f"{path} answered {error.code}: {said[:300]}"
                if error.code < 500:
                    break
            except (OSError, ValueError, HTTPException) as error:  # no answer, none in JSON, or no such address
                problem = f"{path} did not answer ({error})"
        raise ServerError(f"{problem}: start `vllm serve TEACHER --max-logprobs K`, or correct the address")


def find_teacher(url: str, tokenizer: Tokenizer, max_tokens: int, top_k: int | None) -> TeacherServer:
    """The server of policy.reference_server_url. ConfigError unless it can be the run's teacher."""
    try:
        server = TeacherServer(url, tokenizer)
        server.check(max_tokens, top_k)
    except ServerError as error:
        raise ConfigError(f"{KEY}={url}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{KEY}={url}: its answers are not those of vLLM ({error!r}): use `vllm serve`") from error
    return server
