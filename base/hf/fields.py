"""Fields of config.json that layers and families share. No torch."""

from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]  # of tensors
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what config.json calls it


class Switch(NamedTuple):
    """A field of config.json that says whether a tensor is there."""

    field: str | None

    def is_on(self, hf: dict) -> bool:
        return self.field is None or bool(hf.get(self.field))


ALWAYS = Switch(None)
ATTENTION_BIAS = Switch("attention_bias")
MLP_BIAS = Switch("mlp_bias")
