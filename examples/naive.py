"""GRPO on one page: one process, one device, nothing clever. The smoke task of configs/smoke.yaml, in some two minutes.

    .venv/bin/python -m examples.naive [SEED]

The loss and the advantages are those of grpo.py; everything else is written once more, in the plainest way. On the same
samples its gradient is that of grpo.py: whatever a file of the core does cleverly, this page says what comes out.

Dims: G samples of a prompt, T tokens, D hidden, N heads, K key/value heads, H head dim, F of the MLP, V vocabulary.
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Generator, Tensor

from advantages import group_advantages
from config import LossConfig
from loss import policy_loss

TASK = Path(__file__).parent / "arithmetic"
PROMPTS, SAMPLES, NEW_TOKENS, STEPS = 16, 16, 8, 120
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 3e-4, 10, 1.0
LOSS = LossConfig(reference_policy_kl_penalty=0.0)
BLOCK = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
BLOCK += ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
Weights = dict[str, Tensor]  # by the names of the Hugging Face checkpoint
Group = tuple[Tensor, Tensor, Tensor]  # token_GT, logp_GT of the sampler, is_sampled_GT: 1 at the tokens of a reply


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x_GNTH: Tensor) -> Tensor:
    """Rotary positions: the pair (h, h + H/2) of position t turns by the angle t * 10000^(-2h/H)."""
    T, H = x_GNTH.shape[-2:]
    angle_TH = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, H, 2) / H)
    cos, sin = angle_TH.cos(), angle_TH.sin()
    first, second = x_GNTH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def decode(w: Weights, config: dict, token_GT: Tensor) -> Tensor:
    """Qwen3's forward: logits_GTV. The core's is model.py, over packed tokens and sharded weights."""
    G, T = token_GT.shape
    N, K, H = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden_GTD = w["model.embed_tokens.weight"][token_GT]
    for i in range(config["num_hidden_layers"]):
        block = {name: w[f"model.layers.{i}.{name}.weight"] for name in BLOCK}
        x_GTD = rms_norm(hidden_GTD, block["input_layernorm"])
        query_GNTH = (x_GTD @ block["self_attn.q_proj"].T).view(G, T, N, H).transpose(1, 2)
        key_GKTH = (x_GTD @ block["self_attn.k_proj"].T).view(G, T, K, H).transpose(1, 2)
        value_GKTH = (x_GTD @ block["self_attn.v_proj"].T).view(G, T, K, H).transpose(1, 2)
        query_GNTH = rotate(rms_norm(query_GNTH, block["self_attn.q_norm"]))
        key_GNTH = rotate(rms_norm(key_GKTH, block["self_attn.k_norm"])).repeat_interleave(N // K, dim=1)
        score_GNTT = query_GNTH @ key_GNTH.transpose(-1, -2) / H**0.5
        is_future_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
        weight_GNTT = score_GNTT.masked_fill(is_future_TT, -torch.inf).softmax(-1)
        attended_GNTH = weight_GNTT @ value_GKTH.repeat_interleave(N // K, dim=1)
        hidden_GTD = hidden_GTD + attended_GNTH.transpose(1, 2).reshape(G, T, N * H) @ block["self_attn.o_proj"].T
        x_GTD = rms_norm(hidden_GTD, block["post_attention_layernorm"])
        gated_GTF = F.silu(x_GTD @ block["mlp.gate_proj"].T) * (x_GTD @ block["mlp.up_proj"].T)
        hidden_GTD = hidden_GTD + gated_GTF @ block["mlp.down_proj"].T
    return rms_norm(hidden_GTD, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


@torch.no_grad()
def sample(w: Weights, config: dict, prompt: list[int], num_samples: int, generator: Generator | None) -> Group:
    """Replies to a prompt at temperature 1; greedy without a generator. The core's are engine.py and rollout.py."""
    token_GT = torch.tensor(prompt).expand(num_samples, -1)
    logp_GT = is_sampled_GT = torch.zeros(token_GT.shape)
    is_open_G = torch.ones(num_samples)  # 0 once a reply has ended: what is drawn behind its end is masked
    for _ in range(NEW_TOKENS):
        logp_GV = decode(w, config, token_GT)[:, -1].log_softmax(-1)
        token_G1 = logp_GV.argmax(-1, keepdim=True)
        if generator is not None:
            token_G1 = torch.multinomial(logp_GV.exp(), 1, generator=generator)
        token_GT = torch.cat((token_GT, token_G1), dim=1)
        logp_GT = torch.cat((logp_GT, logp_GV.gather(1, token_G1)), dim=1)
        is_sampled_GT = torch.cat((is_sampled_GT, is_open_G[:, None]), dim=1)
        is_open_G = is_open_G * (token_G1[:, 0] != config["eos_token_id"])
    return token_GT, logp_GT, is_sampled_GT


def loss_of_group(w: Weights, config: dict, group: Group, adv_G: Tensor, num_tokens: Tensor, num_seqs: int) -> Tensor:
    """The group's part of the step's loss. num_tokens, num_seqs: of the whole step, so that groups add up. The core's
    are pack.py (no padding, a prompt computed once) and head.py (no logits of the whole vocabulary are kept)."""
    token_GT, sampler_logp_GT, is_sampled_GT = group
    G, T = token_GT.shape
    logp_GTV = decode(w, config, token_GT)[:, :-1].log_softmax(-1)  # the token at t predicts the one at t + 1
    logp_GT = logp_GTV.gather(-1, token_GT[:, 1:, None])[..., 0]
    loss, _ = policy_loss(
        logp_GT.flatten(),
        old_logp_R=None,  # the weights that sampled are the weights that train: the ratio is 1
        sampler_logp_R=sampler_logp_GT[:, 1:].flatten(),
        adv_R=adv_G[:, None].expand(G, T - 1).flatten(),
        mask_R=is_sampled_GT[:, 1:].flatten(),
        seq_R=torch.arange(G)[:, None].expand(G, T - 1).flatten(),
        num_valid_tokens=num_tokens,
        num_valid_seqs=num_seqs,
        cfg=LOSS,
    )
    return loss


def train(seed: int) -> None:
    config = json.loads((TASK / "starter/config.json").read_text())
    tokenizer = Tokenizer.from_file(str(TASK / "starter/tokenizer.json"))
    w = {name: x.float().requires_grad_() for name, x in load_file(TASK / "starter/model.safetensors").items()}
    rows, held_out = ([json.loads(line) for line in (TASK / f"{name}.jsonl").open()] for name in ("train", "heldout"))
    optimizer = torch.optim.AdamW(w.values(), weight_decay=0.01)
    generator = Generator().manual_seed(seed)
    draw = random.Random(seed)

    def attempt(row: dict, num_samples: int, generator: Generator | None) -> tuple[Group, Tensor]:
        """Replies to a problem, and reward_G: 1 if a reply is the answer alone. The core's are envs.py and judges/."""
        prompt = f"<|user|>{row['messages'][0]['content']}<|end|><|assistant|>"
        group = sample(w, config, tokenizer.encode(prompt).ids, num_samples, generator)
        replies = [token_T[is_sampled_T == 1].tolist() for token_T, _, is_sampled_T in zip(*group, strict=True)]
        texts = tokenizer.decode_batch(replies, skip_special_tokens=False)
        return group, torch.tensor([float(text == row["answer"] + "<|end|>") for text in texts])

    def greedy_accuracy() -> float:
        return sum(attempt(row, 1, None)[1].item() for row in held_out) / len(held_out)

    print(f"greedy accuracy before: {greedy_accuracy():.3f}")
    for step in range(1, STEPS + 1):
        attempts = [attempt(row, SAMPLES, generator) for row in draw.sample(rows, PROMPTS)]
        reward_B = torch.cat([reward_G for _, reward_G in attempts])
        group_B = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        adv_B = group_advantages(reward_B, group_B, leave_one_out=True, normalize=True)
        num_tokens = sum(is_sampled_GT.sum() for (_, _, is_sampled_GT), _ in attempts)
        for (group, _), adv_G in zip(attempts, adv_B.split(SAMPLES), strict=True):
            loss_of_group(w, config, group, adv_G, num_tokens, len(adv_B)).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), MAX_GRAD_NORM)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, step / WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3}  reward {reward_B.mean():.3f}", flush=True)
    print(f"greedy accuracy after: {greedy_accuracy():.3f}")


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 42)
