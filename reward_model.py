"""The reward model: scores whole conversations with a decoder of its own, sharded over all ranks like the policy.

Owns the `score` head of Hugging Face's Qwen2-, Qwen3- and LlamaForSequenceClassification with one label (`score.weight`
[1, D], read at the last token), and where the weights are: in host memory, but for the time in which they score.
Everything else of the network is model.py's. Here decoding and encoding again IS right: the conversation is shown to
another model, in its own chat template. Dims: T packed tokens, S conversations of a pack, D hidden.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jinja2
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from config import RewardModelConfig
from data import first_fit
from hf.files import read_json
from hf.model_config import ModelConfig
from hf.tokenizer import Tokenizer
from model import Decoder, load_policy


class RewardDecoder(Decoder):
    """A decoder that ends in one number per conversation: hidden state of its last token times `score.weight`."""

    def __init__(self, config: ModelConfig):
        super().__init__(replace(config, tie_word_embeddings=True))  # such checkpoints have no head over the vocabulary
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, token_T: Tensor, position_T: Tensor, cu_seqlens: Tensor, row_S: Tensor) -> Tensor:
        """Scores at rows row_S, [S], computed in float32: bfloat16 would round them to 3 digits."""

        def head(hidden_SD: Tensor, *_, temperature: float) -> Tensor:  # which scores have not
            return hidden_SD.float() @ self.score.weight[0].float()

        return super().forward(token_T, position_T, cu_seqlens, row_S, head=head)


class RewardModel:
    """This rank's shards. `max_model_len` tokens of a conversation and `pack_tokens` of a pack bound the memory."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        cfg: RewardModelConfig,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        pack_tokens: int,
    ):
        self.tokenizer, self.device, self.max_model_len = tokenizer, device, cfg.max_model_len
        self.pack_tokens = max(pack_tokens, cfg.max_model_len)
        self.pad_token_id = read_json(folder / "config.json").get("pad_token_id")
        model = load_policy(folder, device="cpu", mesh=mesh, precision=cfg.precision, decoder=RewardDecoder)
        self.model = model.requires_grad_(False).to(getattr(torch, cfg.precision))

    @torch.no_grad()
    def score(self, conversations: Sequence[list[dict]]) -> list[float | None]:
        """Each conversation's score; None where it has more than `max_model_len` tokens, the template refuses it, or
        the score is not finite.

        A collective: all ranks give the same conversations and get the same scores. Each rank scores its share, and
        runs as many packs as the rank with the most.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        mine = [self.encode(messages) for messages in conversations[rank::num_ranks]]
        usable = [i for i, ids in enumerate(mine) if 0 < len(ids) <= self.max_model_len]
        if len(usable) < len(mine):
            why = f"over env.reward_model.max_model_len={self.max_model_len} tokens or refused by its chat template"
            print(f"reward model: {len(mine) - len(usable)} of {len(mine)} conversations are {why}", file=sys.stderr)
        packs = [[usable[k] for k in pack] for pack in first_fit([len(mine[i]) for i in usable], self.pack_tokens)]
        most = torch.tensor(len(packs))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        score_B = torch.full((len(conversations),), torch.nan)
        self.model.to(self.device)
        for pack in packs + [None] * (int(most) - len(packs)):
            score_S = self._score_pack([mine[i] for i in pack] if pack else [[0]])
            if pack:
                score_B[[rank + num_ranks * i for i in pack]] = score_S.cpu()
        self.model.to("cpu")
        known_B = score_B.isfinite()
        score_B = torch.where(known_B, score_B, 0)
        dist.all_reduce(score_B)  # each rank knows its own
        dist.all_reduce(known_B := known_B.int())
        return [score if known else None for score, known in zip(score_B.tolist(), known_B.tolist(), strict=True)]

    def encode(self, messages: list[dict]) -> list[int]:
        """The conversation in the reward model's template, up to its last token, which is where transformers reads the
        score: the last that is not `pad_token_id`, so that a model with the end token for padding ends before it. []
        where the template refuses it."""
        try:
            ids = self.tokenizer.render(messages, add_generation_prompt=False, escape=True)
        except jinja2.TemplateError:
            return []
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_token_id:
            end -= 1
        return ids[:end]

    def _score_pack(self, ids_S: list[list[int]]) -> Tensor:
        end_S = torch.tensor([len(ids) for ids in ids_S]).cumsum(0)
        token_T = torch.tensor([token for ids in ids_S for token in ids])
        position_T = torch.cat([torch.arange(len(ids)) for ids in ids_S])
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), end_S]).numpy()
        tensors = [x.to(self.device, non_blocking=True) for x in (token_T, position_T, end_S - 1)]
        return self.model(tensors[0], tensors[1], cu_seqlens, tensors[2])
