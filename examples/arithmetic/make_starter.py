"""Makes starter/: a 0.5 M-parameter Qwen3 that adds two-digit numbers, but mostly forgets to carry.

    OMP_NUM_THREADS=1 .venv/bin/python -m examples.arithmetic.make_starter [FOLDER]      (from the repository's root)

Supervised training on the problems of train.jsonl. The answers it is taught are right where nothing is
carried; where something is, 60% of them, drawn afresh each time, forget it (37+48=75). So greedy decoding is
wrong on such problems and 40% of samples are right: what is left for reinforcement learning is to carry.
A fixed number of steps, one thread, fixed seeds: the same folder every time on one kind of machine (the
rounding of another CPU gives other bits of the same quality).
"""

import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from attention import PackLayout
from base.hf import tokenizer as hf_tokenizer
from base.hf.folder import from_hf
from base.hf.weights import save_hf
from examples.arithmetic.make_problems import draw_problems, needs_carry, sum_without_carry
from model import Decoder

FORGET_SHARE = 0.6
NUM_STEPS, BATCH_SIZE, WARMUP_STEPS, SEED = 1500, 64, 100, 0
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-3, (0.9, 0.98), 0.1, 1.0
MAX_ANSWER_TOKENS = 4  # three digits and <|end|>

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")  # ids 256...
PAD_ID, END_ID = 256, 257
# A turn is its role's token, the text, <|end|>.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "model_max_length": 1024,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
GENERATION_CONFIG = {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": True}
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,  # wide rather than deep: on a CPU a step costs by the number of operations
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # near 1/sqrt(hidden_size); the usual 0.02 learns the sums several times slower
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "use_cache": True,
}


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fresh weights, a function of `seed`: matrices normal(0, initializer_range), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        elif name.endswith(".bias"):
            param.zero_()
        else:
            param.copy_(torch.randn(param.shape, generator=generator) * model.config.initializer_range)


def write_configs(folder: Path) -> None:
    """Everything of the HF folder but the weights. The tokenizer is one token a byte, so any text encodes."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    assert tokenizer.token_to_id("<|pad|>") == PAD_ID and tokenizer.token_to_id("<|end|>") == END_ID
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("config", "generation_config", "tokenizer_config")
    for name, content in zip(names, (MODEL_CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG), strict=True):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8", newline="\n")


def prompt_ids(tokenizer: hf_tokenizer.Tokenizer, a: int, b: int) -> list[int]:
    return tokenizer.render([{"role": "user", "content": f"{a}+{b}="}])


def answer_ids(tokenizer: hf_tokenizer.Tokenizer, answer: int) -> list[int]:
    return tokenizer.backend.encode(str(answer)).ids


def equal_length_pack(ids_ST: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, PackLayout]:
    """token_T, position_T, layout of S sequences of one length."""
    S, length = ids_ST.shape
    layout = PackLayout.of(torch.arange(S + 1) * length, None, S * length, torch.device("cpu"))
    return ids_ST.flatten(), torch.arange(length).repeat(S), layout


@torch.no_grad()
def complete(model: Decoder, prompts: list[list[int]], generator: torch.Generator | None):
    """The completion of each prompt without its <|end|>, None if that never came; greedy without a generator.

    The prompts must be equally long; there is no cache: each token costs a forward of all before it.
    """
    ids_ST = torch.tensor(prompts)
    for _ in range(MAX_ANSWER_TOKENS):
        S, length = ids_ST.shape
        logits_SV = model(*equal_length_pack(ids_ST)).view(S, length, -1)[:, -1]
        if generator is None:
            next_S1 = logits_SV.argmax(-1, keepdim=True)
        else:
            next_S1 = torch.multinomial(logits_SV.softmax(-1), 1, generator=generator)
        ids_ST = torch.cat((ids_ST, next_S1), dim=1)
    outputs = ids_ST[:, len(prompts[0]) :].tolist()
    return [ids[: ids.index(END_ID)] if END_ID in ids else None for ids in outputs]


def evaluate(model: Decoder, tokenizer: hf_tokenizer.Tokenizer, pairs: list[tuple[int, int]], num_samples: int):
    """{"accuracy": share of right answers, "clean": share of answers that are right or lack just the carry},
    to the token; `num_samples` per problem at temperature 1, or 0: greedy decoding."""
    generator = torch.Generator().manual_seed(SEED) if num_samples else None
    pairs = pairs * max(num_samples, 1)
    answers = complete(model, [prompt_ids(tokenizer, a, b) for a, b in pairs], generator)
    num_right = num_slips = 0
    for ids, (a, b) in zip(answers, pairs, strict=True):
        num_right += ids == answer_ids(tokenizer, a + b)
        num_slips += needs_carry(a, b) and ids == answer_ids(tokenizer, sum_without_carry(a, b))
    return {"accuracy": num_right / len(pairs), "clean": (num_right + num_slips) / len(pairs)}


def draw_batch(rng: random.Random, tokenizer: hf_tokenizer.Tokenizer, pairs: list[tuple[int, int]]) -> dict:
    """A pack of questions with taught answers."""
    sequences = []
    for a, b in rng.choices(pairs, k=BATCH_SIZE):
        forgets = needs_carry(a, b) and rng.random() < FORGET_SHARE
        answer = answer_ids(tokenizer, sum_without_carry(a, b) if forgets else a + b)
        sequences.append((prompt_ids(tokenizer, a, b), [*answer, END_ID]))
    return pack_of(sequences)


def pack_of(sequences: list[tuple[list[int], list[int]]]) -> dict:
    """(prompt, reply) pairs as a pack: `Decoder.forward`'s arguments, and target_R, the tokens to predict at pos_R."""
    sequences.sort(key=lambda pair: len(pair[1]))  # neighbours of equal length are one call of attention
    tokens, positions, cu_seqlens, rows, targets = [], [], [0], [], []
    for prompt, answer in sequences:
        rows += [cu_seqlens[-1] + len(prompt) - 1 + i for i in range(len(answer))]
        targets += answer
        tokens += (prompt + answer)[:-1]
        positions += range(len(prompt) + len(answer) - 1)
        cu_seqlens.append(len(tokens))
    pack = dict(token_T=tokens, position_T=positions, pos_R=rows, target_R=targets)
    layout = PackLayout.of(cu_seqlens, None, len(tokens), torch.device("cpu"))
    return {"layout": layout} | {name: torch.tensor(values) for name, values in pack.items()}


def train(tokenizer: hf_tokenizer.Tokenizer, pairs: list[tuple[int, int]]) -> Decoder:
    """AdamW with a cosine schedule on the negative log-likelihood of the taught answers. Weights float32."""
    model = Decoder(from_hf(MODEL_CONFIG))
    init_weights(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    rng = random.Random(SEED)
    for step in range(NUM_STEPS):
        cosine = 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, cosine)
        loss = teach(model, optimizer, draw_batch(rng, tokenizer, pairs))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{NUM_STEPS}  loss {loss:.4f}", flush=True)
    return model


def teach(model: Decoder, optimizer: torch.optim.Optimizer, batch: dict) -> float:
    """A step of the optimizer on the mean negative log-likelihood of a pack's replies, which it returns."""
    logits_RV = model(batch["token_T"], batch["position_T"], batch["layout"], batch["pos_R"])
    loss = F.cross_entropy(logits_RV, batch["target_R"])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    train_pairs, heldout_pairs = draw_problems()
    write_configs(folder)
    tokenizer = hf_tokenizer.Tokenizer(folder)
    model = train(tokenizer, train_pairs)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())  # what is measured below is what is stored
    save_hf(model, folder, folder, dtype=torch.bfloat16)
    num_params = sum(param.numel() for param in model.parameters())
    print(f"{folder}: {num_params:,} parameters, {time.perf_counter() - start:.0f} s")
    for name, num_samples in (("greedy", 0), ("sampled, 4 each", 4)):
        figures = evaluate(model, tokenizer, heldout_pairs, num_samples)
        print(f"held-out, {name}: accuracy {figures['accuracy']:.3f}, clean {figures['clean']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "starter")
