"""A stand-in for the package `vllm`, as far as engine.py uses it: samples on one CPU core in place of an engine.

`install()` puts it where `import vllm` finds it. The arithmetic is that of transformers' model of the same config.json,
in float64, so that what is sampled depends on (weights, prompt, seed, options) alone and not on the batch; the weights
are random until `reload_weights` sends others, as with load_format="dummy". It refuses what vLLM refuses, and what
vLLM would let pass in silence: a sync of sleeping weights, an awake KV cache before the weights, use while asleep or of
weights that were dropped, sleep under kernels that run, an abort of what is unfinished.

Like vLLM it has a prefix cache: logits of ids once seen, right until weights change, wrong if nobody resets it then.
"""

import enum
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

# What vLLM holds fused, and the names that checkpoints have for the parts.
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MAX_FORWARD_TOKENS = 16_384


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    logprobs: int
    flat_logprobs: bool
    detokenize: bool
    output_kind: RequestOutputKind
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0  # no limit
    seed: int | None = None

    def __post_init__(self):
        assert self.temperature >= 0 and self.max_tokens >= 1 and 0 < self.top_p <= 1 and self.top_k >= 0, self
        assert self.logprobs >= 0 and self.flat_logprobs and not self.detokenize, self
        assert self.output_kind is RequestOutputKind.FINAL_ONLY, self
        assert self.temperature == 0 or self.seed is not None, "draws from torch's generator, which others use"
        assert len(self.stop_token_ids) > 0, "nothing would end a reply"
        assert self.ignore_eos, "vLLM adds the folder's end tokens"


@dataclass
class FlatLogprobs:
    """One list for the entries of all positions, as vllm.logprobs.FlatLogprobs."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append(self, entries: Mapping[int, float] | Sequence[tuple[int, float]]) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, logp in entries.items() if isinstance(entries, Mapping) else entries:
            self.token_ids.append(token_id)
            self.logprobs.append(logp)
        self.end_indices.append(len(self.token_ids))


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: FlatLogprobs
    finish_reason: str | None = None


class IncrementalDetokenizer:
    """As vLLM's without a tokenizer: `update` takes new ids and may name a stop string, which ends the request."""

    def __init__(self):
        self.token_ids: list[int] = []

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        self.token_ids += new_token_ids

    def num_output_tokens(self) -> int:
        return len(self.token_ids)


class Request:
    """One prompt on its way: what it has, and its own generator."""

    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams):
        self.external_req_id = request_id
        self.ids, self.params, self.reply = list(prompt), params, CompletionOutput([], FlatLogprobs())
        self.generator = torch.Generator().manual_seed(params.seed or 0)
        self.priority = 0
        self.num_output_placeholders = 0  # tokens that vLLM's scheduler has in flight
        self.detokenizer = IncrementalDetokenizer()

    def add_token(self, logits_V: torch.Tensor) -> bool:
        """Samples a token and keeps its log-probability after temperature and filters; whether it is the last one."""
        params = self.params
        logp_V = (logits_V / (params.temperature or 1.0)).log_softmax(-1)
        if params.temperature and (params.top_k or params.top_p < 1):
            ordered, order = logp_V.sort(descending=True)
            ordered = ordered[: params.top_k or None].log_softmax(-1)  # top_k first: top_p is of what it leaves
            ordered = ordered[ordered.exp().cumsum(0) - ordered.exp() < params.top_p]
            logp_V = torch.full_like(logp_V, -torch.inf).index_put((order[: len(ordered)],), ordered).log_softmax(-1)
        if params.temperature:
            below_V = logp_V.exp().cumsum(0)
            point = below_V[-1] * torch.rand((), generator=self.generator, dtype=torch.float64)
            token = int(torch.searchsorted(below_V, point, right=True))  # never an id without probability
        else:
            token = int(logp_V.argmax())
        self.ids.append(token)
        self.reply.token_ids.append(token)
        listed = [token, *logp_V.topk(params.logprobs).indices.tolist()]  # the sampled one twice, if it is among them
        self.reply.logprobs.append([(token_id, float(logp_V[token_id])) for token_id in listed])
        if self.detokenizer.update([token], token in params.stop_token_ids) or token in params.stop_token_ids:
            self.reply.finish_reason = "stop"
        elif len(self.reply.token_ids) == params.max_tokens:
            self.reply.finish_reason = "length"
        return self.reply.finish_reason is not None


class LLMEngine:
    """The queue of requests; each `step` adds a token to all of them."""

    def __init__(self, llm: "LLM"):
        self.llm = llm
        self.requests: dict[str, Request] = {}

    @property
    def output_processor(self) -> SimpleNamespace:
        return output_processor(self.requests)

    @property
    def engine_core(self) -> SimpleNamespace:
        return engine_core(self.requests)

    def add_request(
        self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams, priority: int = 0
    ) -> None:
        ids = prompt["prompt_token_ids"]
        assert request_id not in self.requests and 0 < len(ids) <= self.llm.max_model_len - params.max_tokens, ids
        assert all(type(token) is int and 0 <= token < self.llm.vocab_size for token in ids), ids
        assert max(params.stop_token_ids) < self.llm.vocab_size, params
        self.requests[request_id] = Request(request_id, ids, params)
        self.requests[request_id].priority = priority

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def step(self) -> list[SimpleNamespace]:
        assert not self.llm.asleep, f"generates while {self.llm.asleep} sleep"
        assert self.llm.weights != "dropped", "generates with weights that are not there"
        self.llm.kernels_run = True
        running = sorted(self.requests.items(), key=lambda item: item[1].priority)[: self.llm.max_num_seqs]
        logits = self.llm.logits_after([tuple(request.ids) for _, request in running])
        ended = [name for name, request in running if request.add_token(logits[tuple(request.ids)])]
        return [
            SimpleNamespace(request_id=name, outputs=[self.requests.pop(name).reply], finished=True) for name in ended
        ]


def output_processor(requests: dict[str, Request]) -> SimpleNamespace:
    """As far as it knows the tokens of each request: vLLM's key is the id with a random end."""
    return SimpleNamespace(request_states={f"{name}-8f3a": request for name, request in requests.items()})


def engine_core(requests: dict[str, Request]) -> SimpleNamespace:
    """As far as its scheduler knows the requests, by the same keys."""
    scheduler = SimpleNamespace(requests={f"{name}-8f3a": request for name, request in requests.items()})
    return SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))


class FusedNames:
    """The engine's module as `apply_model` shows it: q_proj, k_proj and v_proj are one parameter there."""

    packed_modules_mapping = FUSED

    def __init__(self, model: torch.nn.Module):
        self.model = model

    @property
    def lm_head(self):
        """The engine widens it to float32; here all is float64."""
        return SimpleNamespace(float=lambda: None)

    def named_buffers(self):
        return ()

    def named_parameters(self):
        for name, param in self.model.named_parameters():
            if any(part in name for parts in FUSED.values() for part in parts[1:]):
                continue  # it is in the one of the first part
            for whole, parts in FUSED.items():
                name = name.replace(parts[0], whole)
            yield name, param


class EngineArgs:
    """Of vLLM 0.32: 0.24 has no such attributes."""

    sleep_mode_offload_cudagraph = False
    enable_flashinfer_autotune = None


class LLM:
    """The arguments are those that engine.py gives; another one is a TypeError, as vLLM's is.

    weights: "dummy", "sent", "in host memory" or "dropped". kernels_run: whether kernels may still use memory that a
    sleep takes away, because nobody has waited for them (torch.cuda.synchronize) since.
    """

    def __init__(
        self,
        *,
        model: str,
        skip_tokenizer_init: bool,
        load_format: str,
        generation_config: str,
        hf_overrides: dict,
        dtype: str,
        max_model_len: int,
        tensor_parallel_size: int,
        distributed_executor_backend: str,
        gpu_memory_utilization: float,
        logprobs_mode: str,
        seed: int,
        disable_log_stats: bool,
        enforce_eager: bool,
        enable_sleep_mode: bool = False,
        sleep_mode_offload_cudagraph: bool = False,
        max_num_seqs: int = 256,
        enable_chunked_prefill: bool = True,
        block_size: int = 16,
        max_num_batched_tokens: int = 8192,
        scheduling_policy: str = "fcfs",
        enable_flashinfer_autotune: bool | None = None,
        attention_backend: str | None = None,
        async_scheduling: bool | None = None,
    ):
        from transformers import AutoConfig, AutoModelForCausalLM

        assert skip_tokenizer_init and load_format == "dummy" and generation_config == "vllm" and disable_log_stats
        assert distributed_executor_backend == "external_launcher" and logprobs_mode == "processed_logprobs"
        assert dtype in ("float32", "bfloat16") and tensor_parallel_size == 1 and 0 < gpu_memory_utilization <= 1
        assert enable_sleep_mode == torch.cuda.is_available(), "vLLM refuses sleep mode on CPU; on CUDA it is needed"
        assert enable_sleep_mode or (enforce_eager and not enable_chunked_prefill), "on CPU"
        assert max_num_batched_tokens >= max_model_len and max_num_seqs >= 1
        assert sleep_mode_offload_cudagraph <= enable_sleep_mode
        draws_from_generators = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
        assert async_scheduling is (False if draws_from_generators else None), "a sample would not depend on its seed"
        self.max_num_seqs = max_num_seqs
        torch.manual_seed(seed)  # vLLM, too, seeds the global generators
        config = AutoConfig.from_pretrained(model, **hf_overrides)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
        self.vocab_size, self.max_model_len, self.can_sleep = config.vocab_size, max_model_len, enable_sleep_mode
        self.model_config = SimpleNamespace(head_dtype=getattr(torch, hf_overrides["head_dtype"]))
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}  # the prefix cache
        self.asleep: set[str] = set()
        self.weights, self.kernels_run = "dummy", False
        self.llm_engine = LLMEngine(self)

    def apply_model(self, function) -> list:
        return [function(FusedNames(self.model))]

    def logits_after(self, prefixes: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        """Of the token behind each prefix."""
        by_length = defaultdict(list)
        for ids in dict.fromkeys(prefixes):
            if ids not in self.logits:
                by_length[len(ids)].append(ids)
        for length, group in by_length.items():
            size = max(1, MAX_FORWARD_TOKENS // length)
            for start in range(0, len(group), size):
                part = group[start : start + size]
                with torch.no_grad():
                    logits_BV = self.model(torch.tensor(part), use_cache=False, logits_to_keep=1).logits[:, -1]
                self.logits |= zip(part, logits_BV, strict=True)
        return {ids: self.logits[ids] for ids in prefixes}

    def collective_rpc(self, method, kwargs: dict | None = None) -> list:
        """What a function of the worker returns; or reload_weights, in place, where a name that it has not is passed
        over, as vLLM does."""
        if callable(method):
            return [method(SimpleNamespace(model_runner=self))]
        assert method == "reload_weights" and list(kwargs) == ["weights_iterator"], (method, kwargs)
        assert "weights" not in self.asleep, "weights are sent to where none are"
        assert "kv_cache" in self.asleep or not self.can_sleep, "the KV cache holds the memory that they need meanwhile"
        params = dict(self.model.named_parameters())
        self.weights, self.kernels_run = "sent", True
        tensors = list(kwargs["weights_iterator"])  # all of them held, as vLLM may
        for name, tensor in tensors:
            assert tensor.untyped_storage().size(), f"{name} was freed behind its back"
            if name in params:
                assert params[name].shape == tensor.shape, (name, params[name].shape, tensor.shape)
                params[name].copy_(tensor)
        return [None]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests or not self.llm_engine.requests, "requests are under way"
        self.logits.clear()
        return True

    def sleep(self, level: int, mode: str = "abort") -> None:
        """Weights to host memory, or lost with level 2; the KV cache and what it holds away."""
        assert self.can_sleep and level in (1, 2) and not self.asleep, self.asleep
        assert mode == "keep" or not self.llm_engine.requests, "they would be aborted, or waited for without an end"
        assert not self.kernels_run, "takes the memory away under kernels that run"
        self.weights = "in host memory" if level == 1 and self.weights == "sent" else "dropped"
        self.asleep = {"weights", "kv_cache"}
        self.logits.clear()
        if level == 2:
            for param in self.model.parameters():
                param.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        assert tags == (["weights"] if "weights" in self.asleep else ["kv_cache"]), (tags, self.asleep)
        assert set(tags) <= self.asleep, (tags, self.asleep)
        self.asleep -= set(tags)
        if "weights" in tags and self.weights == "in host memory":
            self.weights = "sent"


def install() -> None:
    """Before engine.py is imported: `vllm` is this file from then on, in this process."""
    assert "vllm" not in sys.modules, "the real one is here already"
    whole, part = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    of_text = ModuleType("vllm.v1.engine.detokenizer")
    of_text.IncrementalDetokenizer = IncrementalDetokenizer
    rotary = ModuleType("vllm.model_executor.layers.rotary_embedding.base")
    rotary.RotaryEmbedding = SimpleNamespace(forward_native=None)  # which engine.py sets; nothing here calls it
    whole.LLM, whole.EngineArgs, whole.__version_tuple__ = LLM, EngineArgs, (0, 32, 0)
    whole.SamplingParams, whole.sampling_params = SamplingParams, part
    part.SamplingParams, part.RequestOutputKind = SamplingParams, RequestOutputKind
    for module in (whole, part, of_text, rotary):
        module.__spec__ = ModuleSpec(module.__name__, loader=None)
        sys.modules[module.__name__] = module
