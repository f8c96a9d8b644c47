"""How much memory each GPU needs in each phase, by formulas: before a run starts, and without torch.

Each formula names the lines of this program that allocate the bytes, or another source; the tests count the bytes that
these lines allocate. Sizes are bytes on one rank. Each token of a pack counts as a response token.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from base.hf.layers import HAS_FLA, Mamba, ShortConv
from base.hf.lora_layers import factor_shapes
from base.hf.model_config import ModelConfig, NativeConfig
from base.inputs.run_inputs import RunInputs
from base.plan.gpus import GIB
from config import Config, num_recomputed
from kernels import sizes

NUMBER = {"bfloat16": 2, "float32": 4}
# Not yet measured here: CUDA's context and NCCL's buffers 1 to 2 GiB, a sleeping vLLM 0.8 (NVIDIA-NeMo/RL#223).
CONTEXT = 2.5 * GIB
SPARE = 0.05  # of the GPU, which a choice leaves free: the plan is not exact, and torch's segments have gaps
OWN_CONTEXT = GIB / 2  # of CONTEXT, what this process has at its start, before the policy is there
# vLLM's pools "runtime" and "cudagraph", which wake with the weights (vllm/device_allocator/cumem.py): 0.5 to 1 GiB.
RUNTIME = 0.8 * GIB
PACK_SIZES = (8_192, 16_384, 24_576, 32_768)  # tokens
INDICES = 40  # bytes for each expert that a token goes to: five tensors of its number and weight, in 64 bits
Items = dict[str, float]  # what holds memory -> bytes
Shapes = dict[str, tuple[int, ...]]


class Row(NamedTuple):
    """What holds memory at a moment of a phase, and how many bytes. A phase of one moment has "" for it."""

    phase: str
    moment: str
    item: str
    size: float


def count(shapes: Shapes, part: str = "") -> int:
    """The elements of the tensors with `part` in their names."""
    return sum(math.prod(shape) for name, shape in shapes.items() if part in name)


def rounded_up(size: int) -> int:
    """To a power of two, as torch does with a block of pinned memory."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Plan:
    """A run on `num_gpus` ranks that train, in all replicas together. vocab: ids of the tokenizer. gpu_bytes: memory of
    one GPU, or None if unknown; others: what other processes hold of it. reward: the reward model. trains: False for
    eval.py. teacher: of the KL."""

    cfg: Config
    model: ModelConfig
    vocab: int
    num_gpus: int
    gpu_bytes: float | None = None
    reward: ModelConfig | None = None
    trains: bool = True
    teacher: ModelConfig | None = None
    others: float = 0

    @classmethod
    def of_run(cls, cfg: Config, inputs: RunInputs, num_ranks: int, gpu_bytes: float | None) -> "Plan":
        """The plan of a run on `num_ranks` ranks; in a split job, of those that train."""
        num_trainers = max(1, num_ranks - cfg.policy.generation.num_generators)
        reward = inputs.reward_model[1] if inputs.reward_model else None
        teacher = inputs.reference_model[1] if inputs.reference_model else None
        vocab = inputs.tokenizer.vocab_size
        return cls(cfg, inputs.model_config, vocab, num_trainers, gpu_bytes, reward=reward, teacher=teacher)

    @property
    def precision(self) -> int:
        """Bytes of an element in the trainer's matmuls: c below."""
        return NUMBER[self.cfg.policy.precision]

    @property
    def engine_precision(self) -> int:
        return NUMBER[self.cfg.policy.engine_precision]

    @property
    def num_shards(self) -> int:
        """The ranks of a replica."""
        return self.num_gpus // self.cfg.policy.dtensor_cfg.dp_replicate_size

    @cached_property
    def tokens(self) -> int:
        """Of a pack. With null for train_mb_tokens, the largest of `PACK_SIZES` that leaves `SPARE` of the GPU free,
        and of which a rank has two in a minibatch if all samples are as long as they may be."""
        tokens = self.cfg.policy.pack_tokens("cuda")
        if self.chooses_packs and self.gpu_bytes is not None:
            for size in PACK_SIZES:
                if size > tokens and 2 * size <= self.minibatch_tokens and self.with_packs(size).has_room:
                    tokens = size
        return tokens

    @property
    def chooses_packs(self) -> bool:
        return self.trains and self.cfg.policy.sequence_packing.train_mb_tokens is None

    @property
    def minibatch_tokens(self) -> float:
        """The most tokens that a rank may train in an optimizer step."""
        return self.cfg.samples_per_minibatch * self.cfg.policy.max_total_sequence_length / self.num_gpus

    def with_packs(self, tokens: int) -> "Plan":
        """With this number in place of train_mb_tokens."""
        packing = replace(self.cfg.policy.sequence_packing, train_mb_tokens=tokens)
        policy = replace(self.cfg.policy, sequence_packing=packing)
        return replace(self, cfg=replace(self.cfg, policy=policy))

    @property
    def has_room(self) -> bool:
        """Whether training and scoring leave `SPARE` of the GPU free."""
        return max(self.size("train"), self.size("score")) <= (1 - SPARE) * self.gpu_bytes

    @cached_property
    def shapes(self) -> Shapes:
        """As the trainer has them: the experts of a layer, 18,432 matrices in Qwen3-30B-A3B, are two tensors."""
        return dict(self.model.tensor_shapes(as_computed=True))

    @property
    def lora(self) -> bool:
        return self.cfg.policy.dtensor_cfg.lora_cfg.enabled

    @cached_property
    def trained(self) -> Shapes:
        """The tensors that the optimizer updates."""
        if self.lora:
            return factor_shapes(self.model, self.cfg.policy.dtensor_cfg.lora_cfg)
        frozen = self.model.router_endings if self.cfg.policy.freeze_moe_router else ()
        return {name: shape for name, shape in self.shapes.items() if not name.endswith(frozen)}

    @property
    def block(self) -> int:
        """Elements of the weights of the largest block, adapters included."""
        return max(self.sizes_of_blocks)

    @cached_property
    def sizes_of_blocks(self) -> list[int]:
        sizes = [0] * self.model.num_hidden_layers
        for name, shape in (self.shapes | self.trained).items():
            _, is_in_block, rest = name.partition("model.layers.")
            if is_in_block:
                sizes[int(rest.partition(".")[0])] += math.prod(shape)
        return sizes

    @property
    def head(self) -> int:
        """Elements of the embedding; an untied head has as many."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def ends(self) -> int:
        """Elements that are gathered with the embedding: itself, and the embeddings for each layer."""
        return self.head + count(self.shapes, "embed_tokens_per_layer")

    def pinned(self, shapes: Shapes, *widths: int) -> int:
        """Pinned host memory for a rank's rows in these bytes each."""
        sizes = [width * self.rows({name: shape}) for name, shape in shapes.items() for width in widths]
        return sum(map(rounded_up, sizes))

    def unpinned(self, shapes: Shapes, *widths: int) -> int:
        """The same in ordinary memory."""
        return sum(widths) * self.rows(shapes)

    def rows(self, shapes: Shapes) -> int:
        """Elements of the shards of a rank. FSDP2 splits rows; each rank is counted as the one with the most."""
        num_shards = self.num_shards
        return sum(-(-rows // num_shards) * math.prod(rest) for rows, *rest in shapes.values())

    @property
    def matrices(self) -> Shapes:
        """What Muon trains, with one moment."""
        is_muon = self.cfg.policy.optimizer.name == "torch.optim.Muon"
        return {n: s for n, s in self.trained.items() if is_muon and ".layers." in n and len(s) == 2}

    @cached_property
    def shards(self) -> Items:
        """Trained tensors are in float32, frozen ones in the trainer's precision. AdamW has two moments, Muon one for
        each matrix of a block; `state_dtype` is the type of the first (optim.build_optimizer)."""
        trained = self.rows(self.trained)
        items: Items = {"weights": 4 * trained}
        if self.lora:
            items["weights"] += self.precision * self.rows(self.shapes)
        else:  # frozen routers
            items["weights"] = 4 * self.rows(self.shapes)
        if self.trains:
            first = NUMBER[self.cfg.policy.optimizer.kwargs.state_dtype]
            items["moments"] = (first + 4) * trained - 4 * self.rows(self.matrices)
            items["gradients"] = 4 * trained
        return items

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The shards that are in host memory."""
        policy = self.cfg.policy
        if policy.dtensor_cfg.cpu_offload:
            return tuple(self.shards)
        if policy.offload_optimizer_for_logprob and self.trains:
            return ("moments",)
        return ()

    def states(self, gradients: bool = False) -> Items:
        """The shards on the GPU. With offloaded gradients, replicas still keep them there until they are added up."""
        items = {name: size for name, size in self.shards.items() if name not in self.offloaded}
        if not gradients:
            items.pop("gradients", None)
        elif self.num_shards < self.num_gpus and "gradients" in self.shards:
            items["gradients"] = self.shards["gradients"]
        return items

    @property
    def defers_sync(self) -> bool:
        """Whether each rank holds whole gradients until the last pack of a step."""
        return self.cfg.policy.dtensor_cfg.defer_fsdp_grad_sync and self.num_shards > 1

    @property
    def norm_bytes(self) -> int:
        """Bytes of each element that a norm keeps for its backward, without what LoRA's frozen weights do not need."""
        tensors = self.model.family.norm_tensors
        return 4 * (max(1, tensors - 1) if self.lora else tensors)

    @cached_property
    def of_layers(self) -> list["Plan"]:
        """With the sizes of each layer."""
        return [replace(self, model=model) for model in self.model.of_layers]

    @cached_property
    def kept_by_blocks(self) -> list[float]:
        """Bytes that each block keeps for the backward of one token."""
        return [plan._kept_by(parts) for plan, parts in zip(self.of_layers, self.model.layers, strict=True)]

    def _kept_by(self, parts: tuple[str, ...]) -> float:
        """Bytes that a block of these parts keeps for the backward of one token (model.Block): its input and the input
        of the MLP in float32, the outputs of the norms, queries, keys and values, the output of attention, four tensors
        of the MLP. Compiled blocks keep no float32 copies and three of the four (min-cut of torch's partitioner).
        transformers' blocks are not compiled; of experts, each keeps of its tokens also what it gets and what it gives
        (transformers.integrations.moe.grouped_mm_experts_forward)."""
        m = self.model
        c = self.precision
        queries = m.num_attention_heads * m.head_dim
        keys = m.num_key_value_heads * m.head_dim
        has_qk_norm = m.family.qk_norm != "none"
        is_native = isinstance(m, NativeConfig)
        if is_native and self.cfg.policy.compile is not False:  # None: on CUDA it is
            norms = (4 + 3 * c) * m.hidden_size + c * (queries + keys) * has_qk_norm
            return norms + self._attention_keeps + 3 * c * m.intermediate_size
        kept = self.norm_bytes * len(m.family.norms) * m.hidden_size
        if "attention" in parts:
            kept += self._attention_keeps + c * m.hidden_size + self.norm_bytes * (queries + keys) * has_qk_norm
        if "state" in parts:
            kept += self._state_keeps + c * m.hidden_size
        if "mlp" in parts:
            kept += self._mlp_keeps(m.intermediate_size)
            # A block with attention and a single norm has one input for both.
            if len(m.family.norms) > 1 or len(parts) == 1:
                kept += c * m.hidden_size
        if "experts" in parts:
            kept += self._experts_keep
        if self.own_size:
            kept += (self.norm_bytes + c) * m.hidden_size + 4 * c * self.own_size
        return kept

    @property
    def own_size(self) -> int:
        """Dims of a token's embedding for each layer alone, in Gemma 4."""
        unlike = self.model.family.unlike
        return 0 if unlike is None else unlike.embedding_size(self.model.hf)

    @property
    def _prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for the longest response."""
        policy = self.cfg.policy
        return max(0, policy.max_total_sequence_length - policy.generation.max_new_tokens)

    @property
    def _continued(self) -> float:
        """Segments that continue a prompt, for each token of a pack; of sequences as long as they may be."""
        policy = self.cfg.policy
        if self._prompt == 0 or not policy.sequence_packing.share_prefix:
            return 0
        group = self.cfg.grpo.num_generations_per_prompt
        return group / (self._prompt + group * policy.generation.max_new_tokens)

    @property
    def _attention_keeps(self) -> float:
        m = self.model
        queries = m.num_attention_heads * m.head_dim
        keys = m.num_key_value_heads * m.head_dim
        gates = 2 * queries if m.family.has_query_gate else 0
        # A prompt's keys and values are there once for each response that shares it (attention.packed_attention).
        kept = self.precision * (2 * queries + gates + 2 * keys * (1 + self._prompt * self._continued))
        if m.family.qkv == "latent":
            kept += (self.norm_bytes + self.precision) * (m.hf["kv_lora_rank"] + (m.hf.get("q_lora_rank") or 0))
            if m.value_dim < m.head_dim:  # what attention gives is padded (attention._flash_attention)
                kept += self.precision * m.num_attention_heads * m.value_dim
        return kept

    @property
    def _state_keeps(self) -> float:
        """Of a layer with state: what its convolution gets and gives; what the recurrence keeps, and the norm of its
        outputs, in float32; the input of its last matrix. Of the delta rule fla's kernel keeps little
        (fla/ops/gated_delta_rule/chunk.py of 0.6.0); the functions of transformers keep all that they compute."""
        sizes = self.model.state_sizes
        c = self.precision
        convolution = c * (2 * sizes.channels + sizes.inner)
        keys = sizes.heads * sizes.key_dim
        chunks = sizes.heads * sizes.chunk
        state = 4 * sizes.state
        if isinstance(self.model.family.state, ShortConv):
            return convolution + 3 * c * sizes.channels  # both gates, and what they multiply
        if isinstance(self.model.family.state, Mamba):
            if not self.model.family.state.norm.is_on(self.model.hf):
                convolution += 4 * (sizes.channels + sizes.heads - 2 * sizes.inner)  # all inputs, and no norm's
            scan = 4 * (5 * keys + 3 * chunks + 5 * sizes.inner) + 20 * sizes.heads + 2 * state / sizes.chunk
            return convolution + scan + 20 * sizes.inner
        if HAS_FLA:
            rule = c * (2 * keys + sizes.inner + chunks) + 28 * sizes.heads + state * self._continued
        else:
            rule = 4 * (8 * keys + 5 * chunks + 3 * sizes.inner) + 40 * sizes.heads + state / sizes.chunk
        return convolution + rule + 20 * sizes.inner

    @property
    def _state_more(self) -> float:
        """What the forward of a recurrence holds at once beyond what it keeps."""
        sizes = self.model.state_sizes
        if not isinstance(self.model.family.state, Mamba):
            return 0
        return 8 * (sizes.channels + sizes.heads * sizes.key_dim + sizes.inner)

    @property
    def _state_in_forward(self) -> float:
        """Of a layer with state, without gradients."""
        sizes = self.model.state_sizes
        c = self.precision
        keys = sizes.heads * sizes.key_dim
        chunks = sizes.heads * sizes.chunk
        state = sizes.state / sizes.chunk
        if isinstance(self.model.family.state, ShortConv):
            return 6 * c * sizes.channels
        if isinstance(self.model.family.state, Mamba):
            return 8 * sizes.channels + 4 * (4 * keys + 3 * chunks + 5 * sizes.inner + state)
        if HAS_FLA:
            return c * (sizes.channels + 7 * keys + 5 * sizes.inner + chunks + state)
        return c * (sizes.channels + sizes.inner) + 4 * (8 * keys + 5 * sizes.inner + chunks + state)

    def _mlp_keeps(self, inner: int) -> float:
        tensors = 2 if self.model.family.mlp == "plain" else 4
        return self.precision * tensors * inner

    @property
    def _experts_keep(self) -> float:
        m = self.model
        c = self.precision
        tensors = 2 * (len(m.family.experts.matrices) - 1)
        experts = c * m.experts_per_token * (2 * m.hidden_size + tensors * m.expert_size)
        router = 4 * m.num_experts + INDICES * m.experts_per_token
        shared = 0
        if m.shared_expert_size:
            shared = c * m.hidden_size + self._mlp_keeps(m.shared_expert_size)
        if m.family.experts.shared_gate is not None:
            shared += c * m.hidden_size  # what the gate scales
        return experts + router + shared

    def kept(self, num_blocks: int) -> float:
        """Activations of the first blocks: of those that are computed again, only their inputs, in float32. Where these
        are in host memory one is here: the last block's, or the one that the backward needs next."""
        recompute = self.cfg.policy.dtensor_cfg.activation_checkpointing
        again = num_recomputed(recompute, num_blocks)
        num_inputs = min(1, again) if recompute == "offload" else again
        embeddings = (self.norm_bytes + self.precision) * self.own_size * self.model.num_hidden_layers
        inputs = num_inputs * 4 * self.model.hidden_size + embeddings
        return self.tokens * (inputs + sum(self.kept_by_blocks[again:num_blocks]))

    def _inner_of(self, parts: tuple[str, ...]) -> int:
        """Elements of the hidden layer of a block's MLP for a token, of all experts that compute it together."""
        m = self.model
        if "experts" in parts:
            return m.experts_per_token * m.expert_size + m.shared_expert_size
        return m.intermediate_size if "mlp" in parts else 0

    def _last_matrix(self, parts: tuple[str, ...]) -> int:
        """Elements of the last matrix of a block, or of its experts."""
        m = self.model
        if "mlp" in parts:
            return m.hidden_size * m.intermediate_size
        if "experts" in parts and not self.lora:
            return m.num_experts * m.hidden_size * m.expert_size
        if "state" in parts:
            return m.hidden_size * m.state_sizes.inner
        return m.hidden_size * m.num_attention_heads * m.value_dim  # experts are not adapted

    def in_backward_of(self, number: int, keeps: bool) -> Items:
        """What holds memory in the backward of a block, most as that of the MLP begins, with the gradient of its last
        matrix, or with LoRA that of merged_weight; or as the recurrence is computed again, before all else is kept.
        keeps: see `keeps_gathered`."""
        c = self.precision
        parts = self.model.layers[number]
        plan = self.of_layers[number]
        more = 2 * c * plan._inner_of(parts)
        if "state" in parts:
            of_others = self.kept_by_blocks[number] - self._kept_by(("state",))
            more = max(more, self._state_more - of_others)
        inner = self.kept_by_blocks[number] + 4 * self.model.hidden_size + more
        last_matrix = (4 if self.lora else c) * plan._last_matrix(parts)
        units = [*self.sizes_of_blocks, 0 if self.model.tie_word_embeddings else self.head]
        gathered = self.gathered_rest if keeps else c * units[number]
        if self.num_shards > 1 and number > 0 and not keeps:
            gathered += c * units[number - 1]  # comes meanwhile, or after the router, with the gradients of all experts
        items = {"activations": self.kept(number) + inner * self.tokens, "gathered": gathered + last_matrix}
        if not self.lora and not self.defers_sync:
            # FSDP holds what a unit sends to the other ranks until the next unit's gradients are there.
            items["gradient on its way"] = 4 * units[number + 1]
        return items

    def gathered(self, size: int) -> float:
        """A whole unit of FSDP (model.shard), and the buffer of an all-gather, for this unit or the next one; one rank
        needs no buffer."""
        return self.precision * size * (2 if self.num_shards > 1 else 1)

    @property
    def gather(self) -> float:
        """Bytes while embedding or head are gathered, with the blocks gathered then. One rank has no buffer for the
        gather, but with cpu_offload the shard as it came, and else a buffer for the cast."""
        c = self.precision
        tied = self.model.tie_word_embeddings
        if self.num_shards > 1:
            return self.gathered(self.ends) + c * self.block * (2 if tied else 1)
        stored = c if self.lora else 4
        return (c + (stored if "weights" in self.offloaded else c * (stored != c))) * self.ends

    @property
    def buffer(self) -> float:
        """FSDP keeps the buffer of the newest all-gather of a forward until the next one: here the untied head's."""
        newest = self.block if self.model.tie_word_embeddings else self.ends
        return self.gathered(newest) - self.precision * newest

    @cached_property
    def keeps_gathered(self) -> bool:
        """Whether the weights stay gathered for all packs of a phase (model.Decoder): if that leaves `SPARE` free."""
        if self.cfg.policy.dtensor_cfg.cpu_offload or not self.trains:
            return False
        if self.gpu_bytes is None:
            return self.cfg.policy.dtensor_cfg.keeps_single_shard(self.num_gpus)
        needed = _moments([*self.train(keeps=True), *self.score(keeps=True)]).values()
        largest = max(sum(items.values()) for items in needed)
        return largest + CONTEXT + self.others <= (1 - SPARE) * self.gpu_bytes

    @cached_property
    def gathered_rest(self) -> float:
        """All gathered weights but the embedding, or the untied head."""
        return self.precision * (count(self.shapes | self.trained) - self.ends)

    def logits(self, to_train: bool) -> float:
        """A chunk of the head's logits (kernels.chunks.logit_chunks), with top_p sorted a part at a time. PyTorch has
        copies: exp z, dz."""
        policy = self.cfg.policy
        sorts = 0
        if policy.generation.top_p < 1:
            sorts = sizes.SORT_BYTES * sizes.SORT_ELEMENTS["cuda"]
        if policy.kernel_backend != "torch":
            stride = sizes.row_stride(self.model.vocab_size)
            rows = sizes.triton_rows(self.tokens, stride, policy.logprob_chunk_size)
            return 4 * stride * rows + sorts
        rows = min(self.tokens, sizes.torch_rows(self.vocab, "cuda"))
        chunk = 4 * self.vocab * rows
        copies = 2.5 if self.precision == 2 and to_train and not self.lora else 2
        return max(chunk + sorts, chunk * copies)

    def train(self, keeps: bool) -> list[Row]:
        """The moments of forward and backward at which most is held, from the second pack of a step on. keeps: see
        `keeps_gathered`."""
        m = self.model
        c = self.precision
        tied = m.tie_word_embeddings
        several = self.num_shards > 1
        states = self.states(gradients=True)
        if self.defers_sync:
            states["gradients"] = 4 * count(self.trained)
        inputs = c * self.tokens * m.hidden_size  # of the head, or their gradient
        activations = self.kept(m.num_hidden_layers) + (self.norm_bytes + c) * self.tokens * m.hidden_size
        # The head: dX and a float32 dW, and beside them the logits, or both once more as autograd gets them.
        dW = 0 if self.lora else self.head
        logits = 2 * inputs + 4 * dW + max(self.logits(True), c * dW + inputs)
        at_head = {"embedding and head": c * self.ends, "gathered": self.buffer}
        at_head["activations"] = activations
        at_head["logits and gradient of the head"] = logits
        # FSDP's reduction of it on one rank: two float32 copies beside the sum of all packs. Several ranks hold less
        # then than at the head. A tied one's comes when the activations are gone.
        others = 0 if self.lora else self.ends - self.head
        reduced = others if several else dW + others
        reduction = {"activations": 0 if tied else activations, "embedding and head": 2 * 4 * reduced}
        of_blocks = [self.in_backward_of(number, keeps) for number in range(m.num_hidden_layers)]
        block = _largest(of_blocks)
        if tied:
            block["embedding and head"] = c * (self.ends + dW)
        elif keeps:
            block["embedding and head"] = c * self.ends
        if keeps:
            at_head["gathered"] = self.gathered_rest
            reduction["gathered"] = self.gathered_rest + c * self.ends
        rows = _rows("train", "the head", states, at_head)
        if keeps:  # the packs after the first gather nothing, and the first has no gradients yet
            first = at_head.copy()
            first["gathered"] += self.buffer
            rows += _rows("train", "the head of the first pack", self.states(), first)
        rows += _rows("train", "the reduction of its gradient", states, reduction)
        rows += _rows("train", "a block", states, block)
        return rows

    def in_forward_of(self, number: int, keeps: bool) -> Items:
        """What holds memory in the forward of a block without gradients. keeps: see `keeps_gathered`; the first pack
        gathers block after block, later packs find all."""
        m = self.model
        c = self.precision
        parts = m.layers[number]
        size = self.sizes_of_blocks[number]
        gathered = self.gathered(size)
        stays = c * size
        if keeps:
            gathered += c * sum(self.sizes_of_blocks[:number])
            stays = self.gathered_rest
        plan = self.of_layers[number]
        whole = {"gathered": stays, "activations": plan._in_forward_of(parts) * self.tokens}
        if parts[-1] == "experts":  # the gather of their router frees the block's buffer before they compute
            parts = parts[:-1]
        start = {"gathered": max(gathered, stays), "activations": plan._in_forward_of(parts) * self.tokens}
        return _largest([whole, start])

    def _in_forward_of(self, parts: tuple[str, ...]) -> float:
        """Bytes of a token in a block's forward without gradients."""
        m = self.model
        c = self.precision
        queries = m.num_attention_heads * m.head_dim
        keys = m.num_key_value_heads * m.head_dim
        size = 3 * c * self._inner_of(parts)
        if "experts" in parts:
            size += 2 * c * m.experts_per_token * m.hidden_size  # what experts get, and give
        if "state" in parts:
            size = max(size, self._state_in_forward)
        if "attention" in parts:
            size += c * (2 * queries + 2 * keys)
        return (4 + 4 + c) * m.hidden_size + size

    def score(self, keeps: bool) -> list[Row]:
        """Forwards without gradients. A reference takes the place of what is trained, and a copy of that waits
        (reference.py). keeps: see `keeps_gathered`."""
        m = self.model
        c = self.precision
        states = self.states()
        if self.teacher:  # its largest parts are gathered with a buffer
            shapes = dict(self.teacher.tensor_shapes())
            last = self.teacher.num_hidden_layers - 1
            gathered = count(shapes, "embed_tokens") + count(shapes, f"model.layers.{last}.")
            states["teacher"] = c * (self.rows(shapes) + 2 * gathered)
        elif self.cfg.holds_reference and "weights" not in self.offloaded:
            states["copy of the policy"] = 4 * self.rows(self.trained)
        ends = c * self.ends
        gather = {"gathered": self.gather}
        several = self.num_shards > 1
        if several or not m.tie_word_embeddings:
            gather["activations"] = 4 * self.tokens * m.hidden_size
        of_blocks = [self.in_forward_of(number, keeps) for number in range(m.num_hidden_layers)]
        block = _largest(of_blocks)
        if self.lora:
            matrices = [plan._last_matrix(parts) for plan, parts in zip(self.of_layers, m.layers, strict=True)]
            block["gathered"] += c * max(matrices)  # merged_weight
        if m.tie_word_embeddings:
            block["embedding and head"] = ends
        at_head = {"embedding and head": ends, "gathered": self.buffer, "logits": self.logits(False)}
        at_head["activations"] = 2 * c * self.tokens * m.hidden_size
        if keeps:  # the last unit is gathered beside all others; later packs find them all
            if not m.tie_word_embeddings:
                gather["gathered"] = self.gathered_rest + (self.gathered(self.ends) if several else self.gather)
            block["embedding and head"] = ends
            at_head["gathered"] += self.gathered_rest
        rows = _rows("score", "a gather", states, gather)
        rows += _rows("score", "a block", states, block)
        rows += _rows("score", "the head", states, at_head)
        return rows

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token in the cache of all layers with attention; each rank has its share of the heads."""
        tensor = self.cfg.policy.generation.vllm_cfg.tensor_parallel_size
        dims = [model.cached_dims for model in self.model.with_attention]
        return self.engine_precision * sum(math.ceil(heads / tensor) * size for heads, size in dims)

    @property
    def num_engines(self) -> int:
        generation = self.cfg.policy.generation
        return max(1, (generation.num_generators or self.num_gpus) // generation.vllm_cfg.tensor_parallel_size)

    @cached_property
    def engine(self) -> Items:
        """The engine without its KV cache; vLLM pads the vocabulary to a multiple of 64. Not yet measured: five
        matrices of logits in its sampler, and 1 GiB for 8,192 tokens in a layer and CUDA graphs (verl,
        docs/perf/perf_tuning.rst: 0.15 to 1)."""
        m = self.model
        generation = self.cfg.policy.generation
        c = self.engine_precision
        tensor = generation.vllm_cfg.tensor_parallel_size
        vocab = -(-self.vocab // 64) * 64 * m.hidden_size
        blocks = count(self.shapes, ".layers.") + self.ends - self.head
        sequences = self.cfg.grpo.max_num_seqs(self.num_engines)
        weights = c * (blocks + vocab * (1 if m.tie_word_embeddings else 2)) / tensor
        return {"engine's weights": weights, "engine's buffers": 5 * 4 * sequences * self.vocab + GIB}

    @property
    def kv_cache(self) -> float:
        """What the engine leaves of its share of the GPU (vLLM's determine_available_memory); below 0: nothing."""
        share = self.cfg.policy.generation.vllm_cfg.gpu_memory_utilization
        return share * (self.gpu_bytes or 0) - sum(self.engine.values())

    def generate(self) -> list[Row]:
        """The engine is awake, and the trainer may score beside it: the canary, or the reward model's conversations. In
        a split job no trainer is on this GPU."""
        num_generators = self.cfg.policy.generation.num_generators
        items = dict(self.engine)
        items["KV cache"] = max(0, self.kv_cache)
        if not num_generators:
            items.update(self.states())
            if self.trains:
                items["canary's forward"] = self.gather
        if self.reward:  # its root is gathered whole, with the buffer of that
            shapes = dict(replace(self.reward, tie_word_embeddings=True).tensor_shapes())
            numbers = count(shapes) / (num_generators or self.num_gpus) + 2 * count(shapes, "embed_tokens")
            items["reward model"] = NUMBER[self.cfg.env.reward_model.precision] * numbers
        return _rows("generate", "", items)

    @property
    def woken(self) -> float:
        """Of the engine on this GPU, what wakes for a sync; a split job's engine is elsewhere."""
        return 0 if self.cfg.policy.generation.num_generators else self.engine["engine's weights"] + RUNTIME

    def sync(self) -> list[Row]:
        """Of embedding or head: shards in the engine's precision, gathered, and where other tensors come with it
        copied out of that (base.hf.weights.full_tensors). vLLM fills a copy as soon as it has a whole layer. Of a
        vocabulary that it pads it never has, and what is sent of it waits for the end."""
        waits = self.vocab % 64 > 0
        several = self.num_shards > 1
        copies = 2.0
        if several and "weights" not in self.offloaded and not (self.model.tie_word_embeddings and waits):
            copies += 1 / self.num_shards
        if not self.model.tie_word_embeddings and (several or waits):
            copies += 1
        gathered = copies * self.engine_precision * max(self.block, self.ends)
        items = {"engine's weights and graphs": self.woken, "gathered to send": gathered}
        return _rows("sync", "", self.states(), items)

    @property
    def parked(self) -> int:
        """Host memory of the inputs of all blocks (base.system.host_inputs.ParkedInput), of one pack."""
        row_bytes = 4 * self.model.hidden_size
        rows = sizes.host_rows(row_bytes)
        num_whole, rest = divmod(self.tokens, rows)
        size = num_whole * rounded_up(rows * row_bytes)
        if rest:
            size += rounded_up(rest * row_bytes)
        return size * self.model.num_hidden_layers

    def host(self) -> Items:
        """Host memory of a rank: the copy of reference.py, and what is offloaded. All of it is pinned, except
        moments and reference with cpu_offload."""
        whole = self.pinned(self.trained, 4)
        first = NUMBER[self.cfg.policy.optimizer.kwargs.state_dtype]
        pinned = {"weights": whole, "gradients": whole}
        if self.lora:
            pinned["weights"] += self.pinned(self.shapes, self.precision)
        in_memory = self.unpinned if self.cfg.policy.dtensor_cfg.cpu_offload else self.pinned
        pinned["moments"] = in_memory(self.trained, first, 4) - in_memory(self.matrices, 4)
        items = {name: pinned[name] for name in self.offloaded}
        if self.cfg.holds_reference and self.trains:
            precision = 4 if self.cfg.grpo.ref_policy_update_alpha < 1 else self.precision
            shapes = dict(self.teacher.tensor_shapes()) if self.teacher else self.trained
            items["reference"] = in_memory(shapes, precision)
        if self.trains and self.cfg.policy.dtensor_cfg.activation_checkpointing == "offload":
            items["inputs of the blocks"] = self.parked
        return items

    @cached_property
    def table(self) -> list[Row]:
        """What holds memory at every moment of every phase."""
        rows = [*self.generate(), *self.sync()]
        if self.trains:
            keeps = self.keeps_gathered
            rows = [*self.train(keeps), *self.score(keeps), *rows]
        always = {"CUDA and NCCL": CONTEXT}
        if self.others:
            always["other processes"] = self.others
        moments = dict.fromkeys((row.phase, row.moment) for row in rows)
        for phase, moment in moments:
            rows += _rows(phase, moment, always)
        return rows

    @cached_property
    def phases(self) -> dict[str, tuple[str, Items]]:
        """Phase -> its largest moment, and what holds memory then."""
        phases: dict[str, tuple[str, Items]] = {}
        for (phase, moment), items in _moments(self.table).items():
            if phase not in phases or sum(items.values()) > sum(phases[phase][1].values()):
                phases[phase] = moment, items
        return phases

    def size(self, phase: str) -> float:
        return sum(self.phases[phase][1].values())

    def lacking(self, most: float | None = None, *phases: str) -> float:
        """Bytes that these phases, or all, take beyond `most`, or the GPU's; or that the KV cache lacks for the longest
        sequence. <= 0 if it fits, or nobody knows."""
        needed = max(map(self.size, phases or self.phases)) - (most or self.gpu_bytes or math.inf)
        sequence = self.kv_bytes * self.cfg.policy.max_total_sequence_length
        return max(needed, sequence - self.kv_cache if self.gpu_bytes else 0)


def _moments(rows: list[Row]) -> dict[tuple[str, str], Items]:
    """(phase, moment) -> what holds memory then."""
    moments: dict[tuple[str, str], Items] = {}
    for row in rows:
        moments.setdefault((row.phase, row.moment), {})[row.item] = row.size
    return moments


def _largest(moments: list[Items]) -> Items:
    """The moment whose items sum to most bytes."""
    return max(moments, key=lambda items: sum(items.values()))


def _rows(phase: str, moment: str, *parts: Items) -> list[Row]:
    return [Row(phase, moment, item, size) for part in parts for item, size in part.items()]
