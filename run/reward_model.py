"""The reward model: scores whole conversations with a decoder of its own, sharded over all ranks like the policy.

Owns the `score` head of Hugging Face's Qwen2-, Qwen3- and LlamaForSequenceClassification with one label (`score.weight`
[1, D], read at the last token). The weights stay in host memory except while they score. The text is encoded anew, in
the chat template of this model.
Dims: T packed tokens, S conversations of a pack, D hidden.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention import PackLayout
from base.hf.model_config import ModelConfig
from base.hf.tokenizer import Tokenizer
from base.system.exchange import holders_of
from base.system.ranks import any_rank, fsdp_mesh, gather
from config import Config, DataError
from model import Decoder, load_policy
from pack import first_fit
from records import Engine, Sample


class RewardDecoder(Decoder):
    """A decoder with one number per conversation: the hidden state of its last token times `score.weight`."""

    def __init__(self, config: ModelConfig):
        super().__init__(replace(config, tie_word_embeddings=True))  # such checkpoints have no head over the vocabulary
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, token_T: Tensor, position_T: Tensor, layout: PackLayout, pos_S: Tensor) -> Tensor:
        """score_S at positions pos_S of the pack, in float32: bfloat16 would round scores to 3 digits."""

        def score(hidden_SD: Tensor, _: Tensor) -> Tensor:
            return hidden_SD.float() @ self.score.weight[0].float()

        return super().forward(token_T, position_T, layout, pos_S, score)


class RewardModel:
    """The shards of this rank. `max_model_len` limits the tokens of a conversation, `pack_tokens` those of a pack."""

    def __init__(self, folder: Path, config: ModelConfig, tokenizer: Tokenizer, cfg: Config, device: torch.device):
        self.tokenizer = tokenizer
        self.device = device
        self.max_model_len = cfg.env.reward_model.max_model_len
        self.pack_tokens = max(cfg.policy.pack_tokens(device.type), self.max_model_len)
        self.pad_token_id = config.hf.get("pad_token_id")
        self.model = load_policy(
            folder,
            device="cpu",
            mesh=fsdp_mesh(device.type),
            precision=cfg.env.reward_model.precision,
            decoder=RewardDecoder,
            model_config=config,
            frozen=True,
        )

    def grade(self, samples: Sequence[Sample], engine: Engine) -> None:
        """Scores the samples that this rank holds and that kept their messages. A collective; the engine sleeps
        meanwhile, and keeps its weights."""
        rank = dist.get_rank()
        holders = holders_of(sample.sequence for sample in samples)
        kept = [sample for sample, holder in zip(samples, holders, strict=True) if holder == rank and sample.messages]
        if not any_rank(len(kept) > 0):
            return
        engine.sleep(keep_weights=True)
        scores = self.score([sample.messages for sample in kept])
        for sample, score in zip(kept, scores, strict=True):
            grade = sample.grade
            grade.outcome = "ok"
            grade.reward = score
            if score is None:
                grade.outcome = "error"
                grade.reward = 0.0
            grade.turn_rewards = [grade.reward]  # `RewardModelEnv` ends a conversation at its first reply
        engine.wake("weights")
        engine.wake("kv_cache")

    @torch.no_grad()
    def score(self, conversations: Sequence[list[dict]]) -> list[float | None]:
        """The score of each conversation; None for one that is too long, that the template refuses, or without a finite
        score. A collective: each rank passes its own, and all ranks run as many packs as the rank with the most."""
        local_ids = [self.encode(messages) for messages in conversations]
        usable = [i for i, ids in enumerate(local_ids) if 0 < len(ids) <= self.max_model_len]
        num_refused = len(local_ids) - len(usable)
        if num_refused > 0:
            why = f"over env.reward_model.max_model_len={self.max_model_len} tokens or refused by its chat template"
            print(f"reward model: {num_refused} of {len(local_ids)} conversations are {why}", file=sys.stderr)
        lengths = [len(local_ids[i]) for i in usable]
        packs = first_fit(lengths, self.pack_tokens)
        max_packs = max(gather(len(packs)))
        scores: list[float | None] = [None] * len(local_ids)
        self.model.to(self.device)
        for pack in packs:
            numbers = [usable[k] for k in pack]
            score_S = self._score_pack([local_ids[i] for i in numbers])
            for i, score in zip(numbers, score_S.tolist(), strict=True):
                if math.isfinite(score):
                    scores[i] = score
        for _ in range(max_packs - len(packs)):
            self._score_pack([[0]])  # joins the collectives with one token
        self.model.to("cpu")
        return scores

    def encode(self, messages: list[dict]) -> list[int]:
        """Ids of the conversation in the reward model's template; [] if the template refuses the conversation. They end
        with the token at which transformers reads the score: the last that is not `pad_token_id`, even if that is the
        end token."""
        try:
            ids = self.tokenizer.render(messages, add_generation_prompt=False, escape=True)
        except DataError:
            return []
        while len(ids) > 1 and ids[-1] == self.pad_token_id:
            ids.pop()
        return ids

    def _score_pack(self, ids_S: list[list[int]]) -> Tensor:
        tokens = []
        positions = []
        ends = []
        for ids in ids_S:
            tokens += ids
            positions += range(len(ids))
            ends.append(len(tokens) - 1)
        token_T = torch.tensor(tokens, device=self.device)
        position_T = torch.tensor(positions, device=self.device)
        end_S = torch.tensor(ends, device=self.device)
        cu_seqlens = np.array([0, *(end + 1 for end in ends)])
        layout = PackLayout.of(cu_seqlens, None, len(token_T), self.device)
        return self.model(token_T, position_T, layout, end_S)
