"""The layers that only transformers computes here: mixtures of experts, layers that carry a state, layers of Gemma 4.
Their names, shapes and sizes. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from base.hf.fields import ALWAYS, NUM_EXPERTS, Shapes, Switch

HAS_FLA = find_spec("fla") is not None  # the package fla-core, with a kernel of the gated delta rule for CUDA
DELTA_CHUNK = 64  # rows that transformers' own gated delta rule computes at once
VECTORS = ("A_log", "D", "dt_bias")  # of a recurrence, a number for each head
MAMBA_BIAS = Switch("mamba_proj_bias")
MAMBA_CONV_BIAS = Switch("mamba_conv_bias")


class Names(NamedTuple):
    """What a tensor of a layer is called in a checkpoint, in transformers' model, and in vLLM's."""

    stored: str
    computed: str
    engine: str


GATE = Names("mlp.gate.weight", "mlp.gate.weight", "mlp.gate.weight")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How a family names its experts. In transformers' model those of a layer are two tensors, `computed`.gate_up_proj
    [E, 2F, D] and `computed`.down_proj [E, D, F]. A checkpoint has three matrices of each, [F, D] twice and [D, F],
    under `stored`.NUMBER; or, if `together` names them, the two tensors. Without `gate` there are two, and
    `computed`.up_proj [E, F, D].

    inner: the field of config.json with F. shared: the MLP that every token passes, and the field with its size;
    shared_counts: in multiples of F. dense_first: the field with the number of layers at the start without experts.
    correction_bias: of the router, a buffer. may_be_none: the field with their
    number may be 0. Names are within a layer.
    """

    stored: str = "mlp.experts"
    computed: str = "mlp.experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    together: tuple[str, str] | None = None
    router: Names = GATE
    inner: str = "moe_intermediate_size"
    shared: str | None = None
    shared_size: str | None = None
    shared_counts: bool = False
    shared_gate: str | None = None
    dense_first: str | None = None
    correction_bias: str | None = None
    may_be_none: bool = False

    @property
    def computed_pair(self) -> tuple[str, str]:
        """The two tensors of a layer, in transformers' model."""
        first = "up_proj" if self.gate is None else "gate_up_proj"
        return f"{self.computed}.{first}", f"{self.computed}.down_proj"

    @property
    def matrices(self) -> list[str]:
        """Of an expert in a checkpoint, the last of which is [D, F], the others [F, D]."""
        return [name for name in (self.gate, self.up, self.down) if name is not None]

    def names(self, number: int) -> list[str]:
        """The checkpoint's names of the matrices of expert `number`, within its layer."""
        return [f"{self.stored}.{number}.{matrix}.weight" for matrix in self.matrices]

    def number_field(self, hf: dict) -> str:
        """The field of config.json with the number of experts: the one that is there, or the usual."""
        return next((field for field in NUM_EXPERTS if field in hf), NUM_EXPERTS[0])

    def sizes(self, hf: dict) -> list[str]:
        """The fields of config.json with its sizes."""
        fields = [self.number_field(hf), "num_experts_per_tok", self.inner]
        if self.shared_size is not None:
            fields.append(self.shared_size)
        return fields

    def has(self, stored: str) -> bool:
        """Whether the checkpoint's tensor of this name, within its layer, is of experts."""
        return stored.startswith(f"{self.stored}.") or (self.together is not None and stored in self.together)

    @property
    def renamed(self) -> Iterator[Names]:
        """The tensors that have one name each, but maybe not the same one everywhere."""
        yield self.router
        if self.together is not None:
            for stored, computed in zip(self.together, self.computed_pair, strict=True):
                yield Names(stored, computed, computed)


class StateSizes(NamedTuple):
    """Of a layer with state. channels, width: of the convolution. inner: inputs of the last matrix. heads: of the
    recurrence, 0 if there is none; the state of each is [key_dim, value_dim], and transformers' own code computes
    `chunk` rows at once."""

    channels: int
    width: int
    inner: int
    heads: int
    key_dim: int
    value_dim: int
    chunk: int

    @property
    def state(self) -> int:
        """Numbers of the state of a recurrence."""
        return self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Layers of Mamba 2: their module, and the fields of config.json with their sizes. `groups` of heads have a vector
    B and a vector C of `state` numbers each; width: of the convolution."""

    module: str = "mamba"
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    chunk: str = "mamba_chunk_size"
    norm: Switch = ALWAYS
    conv_bias: Switch = MAMBA_CONV_BIAS
    in_bias: Switch = MAMBA_BIAS
    out_bias: Switch = MAMBA_BIAS
    layer_type = "linear_attention"
    flops_of_state = 4  # for each of its numbers and a row: B x is added, and C reads
    note = "on a GPU the trainer computes Mamba 2 by operators of PyTorch, not by a kernel, which is slow"

    @property
    def fields(self) -> tuple[str, ...]:
        """Those that config.json must have."""
        return self.heads, self.head_dim, self.groups, self.state, self.width, self.chunk

    def sizes(self, hf: dict) -> StateSizes:
        heads = hf[self.heads]
        inner = heads * hf[self.head_dim]
        return StateSizes(
            channels=inner + 2 * hf[self.groups] * hf[self.state],
            width=hf[self.width],
            inner=inner,
            heads=heads,
            key_dim=hf[self.state],
            value_dim=hf[self.head_dim],
            chunk=hf[self.chunk],
        )

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        channels, width, inner, heads, *_ = self.sizes(hf)
        shapes: Shapes = dict.fromkeys(VECTORS, (heads,))
        shapes["conv1d.weight"] = (channels, 1, width)
        if self.conv_bias.is_on(hf):
            shapes["conv1d.bias"] = (channels,)
        shapes["in_proj.weight"] = (inner + channels + heads, hidden)
        if self.in_bias.is_on(hf):
            shapes["in_proj.bias"] = (inner + channels + heads,)
        if self.norm.is_on(hf):
            shapes["norm.weight"] = (inner,)
        shapes["out_proj.weight"] = (hidden, inner)
        if self.out_bias.is_on(hf):
            shapes["out_proj.bias"] = (hidden,)
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Layers of the gated delta rule. is_fused: two matrices for their inputs, or four."""

    is_fused: bool = False
    module = "linear_attn"
    groups = "linear_num_key_heads"
    heads = "linear_num_value_heads"
    layer_type = "linear_attention"
    fields = (groups, heads, "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")

    flops_of_state = 6  # the key reads it, the value's correction is added, and the query reads

    @property
    def note(self) -> str:
        """For a run that trains such layers."""
        if HAS_FLA:
            return ""
        fix = "pip install --no-deps fla-core==0.6.0"
        return f"without fla's kernel a GPU computes the gated delta nets by operators of PyTorch, slowly: {fix}"

    def sizes(self, hf: dict) -> StateSizes:
        key_heads, heads, key_dim, value_dim, width = (hf[name] for name in self.fields)
        values = heads * value_dim
        return StateSizes(
            channels=2 * key_heads * key_dim + values,
            width=width,
            inner=values,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            chunk=DELTA_CHUNK,
        )

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        channels, width, values, heads, _, value_dim, _ = self.sizes(hf)
        shapes: Shapes = {"A_log": (heads,), "dt_bias": (heads,)}
        shapes["conv1d.weight"] = (channels, 1, width)
        if self.is_fused:
            shapes["in_proj_qkvz.weight"] = (channels + values, hidden)
            shapes["in_proj_ba.weight"] = (2 * heads, hidden)
        else:
            shapes["in_proj_qkv.weight"] = (channels, hidden)
            shapes["in_proj_z.weight"] = (values, hidden)
            shapes["in_proj_b.weight"] = (heads, hidden)
            shapes["in_proj_a.weight"] = (heads, hidden)
        shapes["norm.weight"] = (value_dim,)
        shapes["out_proj.weight"] = (hidden, values)
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Layers that are a convolution between two gates."""

    module = "conv"
    heads = None
    layer_type = "conv"
    fields = ("conv_L_cache",)
    bias = Switch("conv_bias")
    flops_of_state = 0
    note = ""

    def sizes(self, hf: dict) -> StateSizes:
        hidden = hf["hidden_size"]
        return StateSizes(hidden, hf["conv_L_cache"], hidden, heads=0, key_dim=0, value_dim=0, chunk=1)

    def shapes(self, hf: dict) -> Shapes:
        """Within a layer."""
        hidden = hf["hidden_size"]
        shapes: Shapes = {"conv.weight": (hidden, 1, hf["conv_L_cache"])}
        shapes["in_proj.weight"] = (3 * hidden, hidden)
        shapes["out_proj.weight"] = (hidden, hidden)
        if self.bias.is_on(hf):
            shapes |= {"conv.bias": (hidden,), "in_proj.bias": (3 * hidden,), "out_proj.bias": (hidden,)}
        return {f"{self.module}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True)
class Gemma4Layers:
    """What differs from layer to layer. Layers of full attention have heads of their own size; with attention_k_eq_v
    their keys are their values, too. The last num_kv_shared_layers take keys and values from an earlier layer. If
    hidden_size_per_layer_input is not 0, a token has an embedding for each layer."""

    note = (
        "on a GPU, heads of more than 256 dims go through torch's SDPA in float32, which is slow; their memory is "
        "not counted, and nobody has measured it"
    )

    def with_heads(self, hf: dict) -> dict:
        """config.json in its published form. transformers 5 writes the sizes of heads for each layer that differs."""
        written = hf.get("per_layer_config")
        if written is None:
            return hf
        first = next(iter(written.values()), None)
        heads = first if isinstance(first, dict) else {}
        size = heads.get("head_dim", hf.get("head_dim", 256))
        return hf | {"global_head_dim": size, "num_global_key_value_heads": heads.get("num_key_value_heads")}

    def sizes(self, hf: dict, types: list[str]) -> Iterator[dict[str, int]]:
        """Of each layer, what differs, under the names of `ModelConfig`. 0 key heads: they are of an earlier layer."""
        for number, kind in enumerate(types):
            sizes = {}
            if kind == "full_attention":
                sizes["head_dim"] = hf.get("global_head_dim", 512)
                if hf.get("attention_k_eq_v"):
                    sizes["has_values"] = False
                    sizes["num_key_value_heads"] = hf.get("num_global_key_value_heads") or hf["num_key_value_heads"]
            if number >= len(types) - hf["num_kv_shared_layers"]:
                sizes["num_key_value_heads"] = 0
                if hf.get("use_double_wide_mlp"):
                    sizes["intermediate_size"] = 2 * hf["intermediate_size"]
            yield sizes

    def embedding_size(self, hf: dict) -> int:
        """Dims of a token's embedding for a layer; 0: there is none."""
        return hf["hidden_size_per_layer_input"]

    def layer_shapes(self, hf: dict) -> Shapes:
        """Beside attention, MLP and their norms."""
        hidden = hf["hidden_size"]
        size = self.embedding_size(hf)
        shapes: Shapes = {"layer_scalar": (1,)}
        if size:
            shapes["per_layer_input_gate.weight"] = (size, hidden)
            shapes["per_layer_projection.weight"] = (hidden, size)
            shapes["post_per_layer_input_norm.weight"] = (hidden,)
        return shapes

    def body_shapes(self, hf: dict) -> Shapes:
        """Before the layers, beside the embedding."""
        size = self.embedding_size(hf)
        if not size:
            return {}
        of_layers = size * hf["num_hidden_layers"]
        return {
            "embed_tokens_per_layer.weight": (hf["vocab_size_per_layer_input"], of_layers),
            "per_layer_model_projection.weight": (of_layers, hf["hidden_size"]),
            "per_layer_projection_norm.weight": (size,),
        }
