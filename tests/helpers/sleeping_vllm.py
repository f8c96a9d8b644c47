"""A stand-in for vLLM on CUDA that computes nothing. Whoever uses it wrongly fails an assertion.

It models which memory is there, what is in it, and what becomes of unfinished requests when the engine sleeps: vLLM's
pause modes "abort", "wait" and "keep". Use of memory that sleeps, of weights that were dropped and not sent again, or
of cached keys of old weights is an assertion here; a GPU would give garbage in silence.
"""

from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import torch

from model import Decoder
from support.inputs.model_config import read_model_config

NUM_TOKENS = 40  # of a reply that is not shorter by its limit


class Request:
    """Prompt, parameters, and the tokens so far."""

    def __init__(self, prompt: list[int], params: fake_vllm.SamplingParams):
        self.prompt, self.params, self.reply = prompt, params, fake_vllm.CompletionOutput([], fake_vllm.FlatLogprobs())
        self.num_output_placeholders = 0
        self.detokenizer = fake_vllm.Detokenizer()

    def add_token(self) -> bool:
        """A token that depends on prompt, seed and place alone; whether it is the last one."""
        place, seed = len(self.reply.token_ids), self.params.seed or 0
        token = (sum(self.prompt) + seed + 31 * place) % 200
        self.reply.token_ids.append(token)
        self.detokenizer.update([token], False)
        self.reply.logprobs.append({token + 1: -9.0, token: -1.0 - token / 200})  # the sampled one is not the first
        if place + 1 >= min(self.params.max_tokens, NUM_TOKENS):
            self.reply.finish_reason = "length" if place + 1 == self.params.max_tokens else "stop"
        return self.reply.finish_reason is not None


class LLM(fake_vllm.LLM):
    """pause_mode: what `sleep` does with unfinished requests; vLLM's default is "abort".

    weights: "dummy", "sent", "in host memory" or "dropped". awake: the parts that have memory. kernels_run: whether
    kernels may still use that memory, because nobody has waited for them.
    """

    pause_mode = "abort"
    head_dtype = torch.float32
    newest: "LLM"

    def __init__(self, *, model: str, **options):
        self.options = options
        LLM.newest = self
        with torch.device("meta"):
            self.model = Decoder(read_model_config(Path(model)))
        self.model_config = SimpleNamespace(head_dtype=self.head_dtype)
        self.awake, self.weights, self.cache_is_stale = {"weights", "kv_cache"}, "dummy", False
        self.kernels_run = True
        self.requests: dict[str, Request] = {}
        self.llm_engine = self  # its methods are here as well

    @property
    def output_processor(self) -> SimpleNamespace:
        return fake_vllm.output_processor(self.requests)

    @property
    def engine_core(self) -> SimpleNamespace:
        return fake_vllm.engine_core(self.requests)

    def add_request(
        self, request_id: str, prompt: dict[str, list[int]], params: fake_vllm.SamplingParams, priority: int = 0
    ) -> None:
        assert request_id not in self.requests
        self.requests[request_id] = Request(prompt["prompt_token_ids"], params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def step(self) -> list[SimpleNamespace]:
        assert self.awake == {"weights", "kv_cache"}, f"only {self.awake} are awake"
        assert self.weights == "sent", f"generates with weights that are {self.weights}"
        assert not self.cache_is_stale, "the prefix cache holds keys of other weights"
        self.kernels_run = True
        running = list(self.requests)[: self.options["max_num_seqs"]]
        ended = [name for name in running if self.requests[name].add_token()]
        return [
            SimpleNamespace(request_id=name, outputs=[self.requests.pop(name).reply], finished=True) for name in ended
        ]

    def collective_rpc(self, method: str, kwargs: dict) -> list[None]:
        assert method == "reload_weights" and "weights" in self.awake and "kv_cache" not in self.awake, self.awake
        tensors = dict(kwargs["weights_iterator"])  # all of them held, as vLLM may
        self.kernels_run = True
        assert not any(tensor.untyped_storage().size() == 0 for tensor in tensors.values()), "freed behind its back"
        self.weights, self.cache_is_stale = "sent", True
        return [None]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Running requests hold blocks of the cache, unless they go back into the queue."""
        done = reset_running_requests or not self.requests
        self.cache_is_stale = self.cache_is_stale and not done
        return done

    def sleep(self, level: int, mode: str | None = None) -> None:
        """With "keep", requests and what they wait for outlast the sleep; a wait is refused in the process itself."""
        mode = mode or self.pause_mode
        assert self.awake == {"weights", "kv_cache"}, f"asleep already, but for {self.awake}"
        assert not self.kernels_run, "takes the memory away under kernels that run"
        if self.requests and mode == "wait":
            raise RuntimeError("mode='wait' waits for ever in the process that would have to step")
        if mode == "abort":
            self.requests.clear()
        self.awake = set()
        self.weights = "in host memory" if level == 1 and self.weights == "sent" else "dropped"

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags), f"awake already: {self.awake}"
        self.awake |= set(tags)
        if "weights" in tags and self.weights == "in host memory":
            self.weights = "sent"
