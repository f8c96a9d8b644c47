"""The vLLM engine inside the trainer's process: generate, sleep and wake, weight sync.

The only file that imports vllm. Each rank has an engine, or each group of `tensor_parallel_size` consecutive ranks
shares one: all of them call `generate` with the same prompts and get the same samples ("external_launcher"). The engine
starts with dummy weights and never reads any from disk: `sync` is the only path that weights can take.

In examples/naive.py this is `sample(w, config, tokenizer.encode(prompt).ids, num_samples, generator)`: it has the
weights that train, so there is no sync.
"""

import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from base.hf.model_config import ModelConfig, NativeConfig
from base.hf.tokenizer import Tokenizer
from base.system.exits import Interrupted, StopRun
from config import Config
from kernels.matmul import bfloat16_factors
from records import STEPS_BETWEEN_STOPS, Completion, SamplingOptions, Weights, make_tokens

# vLLM reads these while it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in this process
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # several ranks share the cores; vLLM would pin all of them to the same ones
)
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # unusable with processed_logprobs, and slow to import
if not torch.cuda.is_available():
    # vLLM compiles its sampler. On CPU torch.compile needs a C++ compiler, takes 6-24 s, and speeds up nothing.
    import torch._dynamo

    torch._dynamo.config.disable = True

logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # for messages before vLLM reads that variable
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # vLLM uses a deprecated torch name

import vllm
from vllm import LLM, EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class VLLMEngine:
    """`records.Engine`, which describes the methods, by an in-process vLLM, awake or (CUDA only) asleep.

    should_stop: whether to abort generation; all ranks of an engine must get the same answer (any_rank_of_engine).
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        tokenizer: Tokenizer,
        cfg: Config,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        generation = cfg.policy.generation
        vllm_cfg = generation.vllm_cfg
        self.cuda = torch.cuda.is_available()
        precision = cfg.policy.engine_precision
        self.dtype = getattr(torch, precision)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.max_total_tokens = cfg.policy.max_total_sequence_length
        self.stop_token_ids = generation.stop_token_ids or tokenizer.eos_token_ids
        self.stop_strings = generation.stop_strings or ()
        self.should_stop = should_stop
        self.rebuilds_cache = cfg.grpo.async_grpo.recompute_kv_cache_after_weight_updates
        self.drains = not cfg.grpo.async_grpo.in_flight_weight_updates  # before a sync, in a split job
        self.must_pack_experts = model.num_experts > 0 and not self.cuda
        self.replayed_layers: list[int] = []  # those whose experts a completion has
        if cfg.policy.router_replay.enabled:
            self.replayed_layers = [layer for layer in range(model.num_hidden_layers) if model.has_experts(layer)]
        self.weight_version = -1
        self.next_id = count()
        self.advances = count(1)
        self.asleep_since = time.monotonic()  # for a wake that no sleep preceded
        self.seconds_asleep = 0.0
        # Unfinished request -> [(weight version, number of its first token), ...]
        self.versions_by_request: dict[str, list[tuple[int, int]]] = {}
        self.unclaimed: dict[str, Completion] = {}  # finished, but not taken yet
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,  # token-in, token-out
            load_format="dummy",
            generation_config="vllm",  # or it would add the folder's sampling defaults to ours
            hf_overrides=self._overrides(model, cfg),
            dtype=precision,
            max_model_len=self.max_total_tokens,
            tensor_parallel_size=vllm_cfg.tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=vllm_cfg.gpu_memory_utilization,
            enforce_eager=vllm_cfg.enforce_eager or not self.cuda,
            logprobs_mode="processed_logprobs",  # after temperature and filter: of the distribution sampled from
            seed=cfg.grpo.seed,  # ranks of a tensor-parallel group must agree (vllm-project/vllm#15895)
            disable_log_stats=True,
            scheduling_policy="priority" if cfg.grpo.async_grpo.enabled else "fcfs",
            **self._hardware(model, cfg),
        )
        self.runner = self.llm.collective_rpc(_runner_of)[0]
        if self.replayed_layers and not self.cuda:
            states = self.llm.llm_engine.output_processor.request_states
            self.llm.collective_rpc(_Capture, args=(states, model))
        self.fused_layers = self.llm.apply_model(lambda model: model.packed_modules_mapping)[0]
        engine_names = self.llm.apply_model(lambda model: [name for name, _ in model.named_parameters()])[0]
        buffer_names = self.llm.apply_model(lambda model: [name for name, _ in model.named_buffers()])[0]
        self.param_names = _checkpoint_names(engine_names, buffer_names, self.fused_layers, model)
        if not self.cuda and self.llm.apply_model(lambda model: hasattr(model, "lm_head"))[0]:
            self.param_names.add("lm_head.weight")  # LFM2's is tied whatever `_overrides` says; it has a packed copy
        self.shapes: dict[str, list[int]] = {}  # of the first sync, the only ones that vLLM checks
        has_head = "lm_head.weight" in self.param_names  # Cohere's always computes with the embedding
        # Untied: on a CPU by `_overrides`, and by vLLM itself where the folder has a head beside the embedding.
        self.send_head_copy = has_head and model.tie_word_embeddings
        if has_head and not self.cuda:  # or vLLM's CPU layers would cast it at every token; reloads keep it in float32
            self.llm.apply_model(lambda model: model.lm_head.float())
        if self.llm.model_config.head_dtype != torch.float32 and dist.get_rank() == 0:
            print(f"WARNING: this vLLM rounds logits to {precision}: vLLM 0.32.0 has a smaller logp gap", flush=True)

    def _overrides(self, model: ModelConfig, cfg: Config) -> dict | Callable:
        """What vLLM reads in place of the folder's config.json."""
        # The engine's vocabulary is the tokenizer's: ids beyond it (padded vocabulary) do not exist there.
        # The head's logits are float32, as in the trainer: rounding them causes a third of a bfloat16 sampler's error.
        fields = {"vocab_size": self.vocab_size, "head_dtype": "float32", **model.fields_for_vllm}
        max_positions = cfg.policy.hf_config_overrides.max_position_embeddings
        if max_positions:
            fields["max_position_embeddings"] = max_positions
        if not self.cuda:
            # vLLM's CPU layers compute from packed copies, and a reload does not refresh the copy of a *tied* head: the
            # logits would stay stale. Untied, the head is a layer like any other; `sync` sends it the embedding.
            fields["tie_word_embeddings"] = False
        if model.whole is None:
            return fields
        fields.setdefault("tie_word_embeddings", model.tie_word_embeddings)
        return partial(_text_config, model, fields)

    def _hardware(self, model: ModelConfig, cfg: Config) -> dict:
        """vLLM's arguments that depend on the device; sets the variables that it reads beside them."""
        if vllm.__version_tuple__ < (0, 29):  # sleep drops tensors of its V2 runner (vllm-project/vllm#53508)
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if self.cuda:
            arguments = self._arguments_on_cuda(model, cfg)
        else:
            arguments = self._arguments_on_cpu(model, cfg)
        if model.family.state is not None:
            arguments["mamba_ssm_cache_dtype"] = "float32"  # as in the trainer; vLLM's may round at every token
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
            # V1 draws from a generator. A request that is put back drops its token in flight, which has moved it on.
            arguments["async_scheduling"] = False
        return arguments

    def _arguments_on_cuda(self, model: ModelConfig, cfg: Config) -> dict:
        vllm_cfg = cfg.policy.generation.vllm_cfg
        num_engines = dist.get_world_size() // vllm_cfg.tensor_parallel_size
        # max_num_seqs: for each, vLLM keeps counts over the vocabulary (0.62 GB at 1,024 x 151,936) and CUDA graphs.
        arguments: dict = {"enable_sleep_mode": True, "max_num_seqs": cfg.grpo.max_num_seqs(num_engines)}
        if hasattr(EngineArgs, "sleep_mode_offload_cudagraph"):  # not in vLLM 0.24: there graphs stay on the GPU
            arguments["sleep_mode_offload_cudagraph"] = True
        if hasattr(EngineArgs, "enable_flashinfer_autotune"):
            # FlashInfer tunes at start, in collectives of all ranks. A node without nvcc would take no part: a hang.
            arguments["enable_flashinfer_autotune"] = False
        if self.dtype != torch.float32 and torch.cuda.get_device_capability()[0] == 10:
            # On Blackwell vLLM prefers FlashInfer, which downloads kernels at start.
            arguments["attention_backend"] = "FLASH_ATTN"
        if model.num_experts:
            arguments["moe_backend"] = vllm_cfg.moe_backend or "triton"
        if self.replayed_layers:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # V1 does not return the experts
            arguments["enable_return_routed_experts"] = True
        return arguments

    def _arguments_on_cpu(self, model: ModelConfig, cfg: Config) -> dict:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cfg.policy.generation.vllm_cfg.kvcache_gib)
        if not isinstance(model, NativeConfig):
            _rotate_in_torch()
        arguments = {
            # A prompt cut into chunks makes vLLM rewind the request's generator, which CPU generators cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, self.max_total_tokens),
            "block_size": 32,  # the samples of a prompt share its full blocks; vLLM's own 128 shares few
        }
        # vLLM caches states only for prompts in chunks; `_Capture` has no experts of tokens that are in the cache.
        if model.family.state is not None or self.replayed_layers:
            arguments["enable_prefix_caching"] = False
        return arguments

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, *, may_stop: bool = True
    ) -> list[Completion]:
        """In bfloat16 and on CUDA a completion also depends on its batch, by rounding."""
        self.preempt()
        return self.wait(self.start(prompts, seeds, options), may_stop=may_stop)

    def start(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], options: SamplingOptions, priority: int = 0
    ) -> list[str]:
        assert self.weight_version >= 0, "start() before a sync(): the weights are dummies, or dropped by sleep()"
        request_ids = [str(next(self.next_id)) for _ in prompts]
        try:
            for request_id, prompt, seed in zip(request_ids, prompts, seeds, strict=True):
                self._add(request_id, prompt, seed, options, priority)
        except Exception:  # vLLM refuses a value: none of them is under way
            self.abort(request_ids)
            raise
        return request_ids

    def _add(self, request_id: str, prompt: list[int], seed: int, options: SamplingOptions, priority: int) -> None:
        params = SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k or 0,  # vLLM's word for no limit
            max_tokens=min(options.max_new_tokens, self.max_total_tokens - len(prompt)),
            stop_token_ids=[*self.stop_token_ids, *options.stop_token_ids],
            ignore_eos=True,  # or vLLM would add the folder's end tokens, also where the config names others
            logprobs=options.top_logprobs,  # besides the sampled token's
            flat_logprobs=True,  # lists, not a dict and an object per token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=seed if options.temperature > 0 else None,
        )
        request: dict = {"prompt_token_ids": prompt}
        if not self.rebuilds_cache:  # blocks of older weights stay in the prefix cache, for older requests only
            request["cache_salt"] = str(self.weight_version)
        self.llm.llm_engine.add_request(request_id, request, params, priority=priority)
        self.versions_by_request[request_id] = [(self.weight_version, 0)]
        strings = (*self.stop_strings, *options.stop_strings)
        if strings:
            states = self.llm.llm_engine.output_processor.request_states
            newest = next(reversed(states.values()))  # its key has a random end
            newest.detokenizer = StopStrings(self.tokenizer, strings)

    def wait(self, request_ids: Sequence[str], *, may_stop: bool = True) -> list[Completion]:
        """The completions of these requests. Other requests continue meanwhile. Raises as `advance` does."""
        requests = {request_id: request_id for request_id in request_ids}
        while not self.unclaimed.keys() >= requests.keys():
            self.advance(requests, may_stop=may_stop)
        return [self.unclaimed.pop(request_id) for request_id in request_ids]

    def advance(self, requests: Mapping[str, object], *, may_stop: bool = True) -> None:
        assert self.weight_version >= 0, "advance() before a sync(): the weights were dropped by sleep()"
        if next(self.advances) % STEPS_BETWEEN_STOPS == 0 and may_stop and self.should_stop():
            self.abort()
            raise Interrupted
        self.step()
        if self.is_idle:
            lost = [str(name) for request_id, name in requests.items() if request_id not in self.unclaimed]
            if lost:
                some = "; ".join(lost[:3])
                raise StopRun(f"the engine has lost {len(lost)} requests: {some}; resume from a checkpoint")

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is None:
            request_ids = [*self.versions_by_request]
        unfinished = [name for name in request_ids if name in self.versions_by_request]
        if unfinished and not self.is_idle:
            self.llm.llm_engine.abort_request(unfinished)
        for name in unfinished:
            del self.versions_by_request[name]
        for name in request_ids:
            self.unclaimed.pop(name, None)  # one that has ended

    def ids_so_far(self) -> dict[str, list[int]]:
        states = self.llm.llm_engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.token_ids for state in states}

    @property
    def is_idle(self) -> bool:
        return not self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> None:
        if self.is_idle:
            return
        with bfloat16_factors(self.dtype == torch.bfloat16 and not self.cuda):  # for the head's matmul
            ended = [output for output in self.llm.llm_engine.step() if output.finished]
        for output in ended:
            spans = self.versions_by_request.pop(output.request_id)
            experts_TLA = self._experts_of(output) if self.replayed_layers else None
            self.unclaimed[output.request_id] = completion_of(output.outputs[0], spans, experts_TLA)

    def _experts_of(self, output) -> np.ndarray:
        """`Completion.experts_TLA`. vLLM has rows of all layers, and on a CPU also of tokens in flight."""
        (reply,) = output.outputs
        num_inputs = len(output.prompt_token_ids) + len(reply.token_ids) - 1
        return reply.routed_experts[:num_inputs, self.replayed_layers]

    def preempt(self) -> None:
        if self.versions_by_request:
            self._forget_cache()

    def _forget_cache(self) -> None:
        """Drops all keys and values. Unfinished requests compute them again, with the newest weights."""
        if not self.llm.reset_prefix_cache(reset_running_requests=bool(self.versions_by_request)):
            raise StopRun("vLLM did not drop its prefix cache, which comes from old weights: resume the run")

    def sync(self, weights: Weights, version: int) -> int:
        """Drops old keys and values unless requests keep them. StopRun when the names are not exactly the engine's:
        vLLM itself would only warn."""
        sent: dict[str, int] = {}
        if self.must_pack_experts:
            self.llm.apply_model(_pack_experts_anew)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._engine_weights(weights, sent)})
        arrived = {part for name in sent for part in _unfused(name, self.fused_layers)}
        if arrived != self.param_names:
            missing = sorted(self.param_names - arrived)
            unknown = sorted(arrived - self.param_names)
            fix = "mend the family's names for vLLM in base/hf/families.py"
            raise StopRun(f"weight sync: not sent: {missing[:5]}; unknown to the engine: {unknown[:5]}: {fix}")
        if self.rebuilds_cache or not self.versions_by_request:
            self._forget_cache()
        self._begin_version(version)
        return sum(sent.values())

    def _begin_version(self, version: int) -> None:
        """Tokens that the scheduler starts from now on are of this version of the weights."""
        self.weight_version = version
        requests = self.llm.llm_engine.engine_core.engine_core.scheduler.requests
        for internal_id, state in self.llm.llm_engine.output_processor.request_states.items():
            # Tokens in flight (AsyncScheduler is a step ahead) are drawn from the old weights.
            first_new = state.detokenizer.num_output_tokens() + requests[internal_id].num_output_placeholders
            if first_new == 0 and not self.rebuilds_cache:
                first_new = 1  # it may keep old keys of its prompt: its first token counts as old
            self.versions_by_request[state.external_req_id].append((version, first_new))

    def _engine_weights(self, weights: Weights, sent: dict[str, int]) -> Weights:
        for name, tensor in weights:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensor = tensor[: self.vocab_size]
            sent[name] = tensor.nbytes
            shape = self.shapes.setdefault(name, list(tensor.shape))
            if shape != list(tensor.shape):
                for _ in weights:  # in a split job the trainers send all weights, and would wait for the reader
                    pass
                raise StopRun(f"weight sync: {name} has shape {list(tensor.shape)}; at first it had {shape}")
            yield name, tensor
            if name == "model.embed_tokens.weight" and self.send_head_copy:
                sent["lm_head.weight"] = tensor.nbytes
                yield "lm_head.weight", tensor

    def sleep(self, *, keep_weights: bool = False) -> None:
        """On a CPU no memory is freed."""
        if not keep_weights:
            self.weight_version = -1
        self.asleep_since = time.monotonic()
        if not self.cuda:
            return
        # vLLM 0.24 does not wait for the decode step that it runs ahead, and would free the memory in use.
        torch.cuda.synchronize()
        # Level 2 drops all that was built with the model. At wake vLLM restores the model's buffers. Of the sampler it
        # loses only the state of penalties, biases and allowed ids, which no request here has.
        options: dict = {"level": 1 if keep_weights else 2}
        if self.versions_by_request:  # by default they would be aborted; their prompts, tokens and seeds stay
            options["mode"] = "keep"
        self.llm.sleep(**options)

    def wake(self, part: str) -> None:
        if self.cuda:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[part])
        if part == "kv_cache":
            self.seconds_asleep += time.monotonic() - self.asleep_since


def _text_config(model: ModelConfig, fields: dict, config):
    """The text model's part of transformers' config of a folder with a vision part, with these fields. vLLM then builds
    the text model alone, and needs no processor."""
    text = config.get_text_config()
    text.architectures = [model.family.architecture]
    for name, value in fields.items():
        setattr(text, name, value)
    return text


class StopStrings(IncrementalDetokenizer):
    """The ids of a request, which the one that completes one of the strings ends. vLLM's own search needs transformers'
    tokenizer, and all text decoded."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]):
        super().__init__()
        self.tokenizer = tokenizer
        self.strings = strings

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Adds the ids, up to the one that completes a string: returns the string."""
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            found = self.tokenizer.stop_string(self.token_ids, self.strings)
            if found is not None:
                return found
        return None


def reply_parsers() -> tuple[Callable, Callable, type]:
    """vLLM's tool parsers and reasoning parsers, by name, and the request that they read."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.get_tool_parser, ReasoningParserManager.get_reasoning_parser, ChatCompletionRequest


def completion_of(output, spans: list[tuple[int, int]], experts_TLA: np.ndarray | None = None) -> Completion:
    """vLLM's output as the house's. spans: (weight version, number of the first token that it drew), in their order."""
    ids = list(output.token_ids)
    flat = output.logprobs
    logps = []
    for token_id, start, end in zip(ids, flat.start_indices, flat.end_indices, strict=True):
        # By id: the sampled token is not always the first of its position (NVIDIA-NeMo/RL#3297).
        place = flat.token_ids.index(token_id, start, end)
        logps.append(flat.logprobs[place])
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    versions, starts = zip(*spans, strict=True)
    versions = np.repeat(versions, np.diff([*starts, len(ids)]))
    tokens = make_tokens(ids, logp=logps, version=versions, mask=True)
    return Completion(tokens, output.finish_reason, _likeliest(flat), experts_TLA)


def _likeliest(flat) -> list[dict[int, float]]:
    """Of each position the likeliest ids, as many as were asked for; [] if none were."""
    positions = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        num_asked = end - start - 1
        if num_asked == 0:
            return []
        logp_of = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        ordered = sorted(logp_of, key=logp_of.get, reverse=True)
        positions.append({token_id: logp_of[token_id] for token_id in ordered[:num_asked]})
    return positions


def _checkpoint_names(
    names: Iterable[str], buffers: Iterable[str], fused_layers: Mapping[str, Sequence[str]], model: ModelConfig
) -> set[str]:
    """The names in checkpoints of the engine's parameters, and of its buffers that checkpoints have. The engine has a
    layer's experts in a few tensors, a checkpoint may have three matrices of each expert."""
    known = {name for name, _ in model.tensor_shapes()}
    experts = model.family.experts
    stored_of = {}
    if experts:
        stored_of = {names.engine: names.stored for names in experts.renamed}
    found = known.intersection(buffers)
    blocks_with_experts = set()
    for name in names:
        block, part = _within_block(name)
        if ".mla_attn." in part:  # what vLLM makes of kv_b_proj whenever that is loaded
            continue
        if ".experts." in part:
            blocks_with_experts.add(block)
        else:
            for engine_part, own_part in model.family.engine_parts:
                part = part.replace(engine_part, own_part)
            parts = _unfused(f"{block}{stored_of.get(part, part)}", fused_layers)
            if model.family.unlike is not None:  # where keys are the values, there is no v_proj
                parts = known.intersection(parts) or parts
            found.update(parts)
    for name in known:
        block, part = _within_block(name)
        if block in blocks_with_experts and experts.has(part):
            found.add(name)
    return found


def _within_block(name: str) -> tuple[str, str]:
    """("model.layers.7.", "mlp.gate.weight") of this name; "" in place of the first if it is outside the blocks."""
    match = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)", name)
    return match[1] or "", match[2]


def _rotate_in_torch() -> None:
    """vLLM's operator for CPUs misreads tensors [T, N, H] and slices, which some models rotate (DeepSeek V3)."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # not on CUDA

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """vLLM's CPU layers compute experts from packed copies, and make these only while a layer has no kernel."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


class _Capture:
    """Does on a CPU what vLLM does on CUDA with enable_return_routed_experts. It notes the experts of each token once,
    in the output processor's state of the request, which returns them when the request ends.

    states: of the output processor. Its capture functions are called in the order of the layers, with the tokens of a
    step in the order of its batch."""

    def __init__(self, worker, states: Mapping, model: ModelConfig):
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner = worker.model_runner
        self.states = states
        self.shape = (model.num_hidden_layers, model.experts_per_token)
        self.dtype = np.uint8 if model.num_experts <= 256 else np.uint16
        self.layers = [module for module in self.runner.model.modules() if isinstance(module, MoERunner)]
        self.step: dict[int, np.ndarray] = {}  # layer -> [tokens of the step, experts of each]
        for module in self.layers:
            module.router.set_capture_fn(partial(self.note, module.layer_id))

    def note(self, layer: int, expert_TA: torch.Tensor) -> None:
        self.step[layer] = expert_TA.numpy().copy()
        if len(self.step) < len(self.layers):
            return
        step_TLA = np.zeros((len(expert_TA), *self.shape), self.dtype)
        for number, chosen_TA in self.step.items():
            step_TLA[:, number] = chosen_TA
        self.step = {}
        batch = self.runner.input_batch
        bounds = self.runner.query_start_loc.np
        for number, request_id in enumerate(batch.req_ids):
            if request_id not in self.states:  # it has ended, and this token was in flight
                continue
            rows_TLA = step_TLA[bounds[number] : bounds[number + 1]]
            noted = self.states[request_id].routed_experts_chunks
            num_again = sum(map(len, noted)) - int(batch.num_computed_tokens_cpu[number])  # after a preemption
            if num_again < len(rows_TLA):
                noted.append(rows_TLA[num_again:])


def _unfused(name: str, fused_layers: Mapping[str, Sequence[str]]) -> list[str]:
    """The names of the matrices in this parameter: q_proj, k_proj and v_proj of the engine's qkv_proj, whether or not
    the checkpoint has them fused."""
    for layer in name.split("."):
        if layer in fused_layers:
            return [name.replace(layer, part) for part in fused_layers[layer]]
    return [name]


def _runner_of(worker) -> str:
    """The module of the worker's model runner: vllm.v1.worker.gpu_model_runner of V1, vllm.v1.worker.gpu.model_runner
    of V2."""
    return type(worker.model_runner).__module__
