"""A working directory in which NeMo RL's recipes find what they name: tiny models, rows of their data sets, prompts."""

import json
from pathlib import Path

import tokenizers
from safetensors.torch import load_file, save_file
from tiny import make_tiny

RECIPES = Path(__file__).resolve().parents[3] / "shared" / "data" / "nemo_recipes"
MODELS = {
    "qwen2": [f"Qwen/Qwen2.5-{name}" for name in ("1.5B", "1.5B-Instruct", "Math-1.5B-Instruct", "7B-Instruct")]
    + ["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"],
    "qwen3": ["Qwen/Qwen3-0.6B"],
    "llama": ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"],
}
ADAPTED = "Qwen/Qwen3-8B-Base"  # its recipes have adapters of rank 128
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
FOUR_HEADS = "Qwen2.5-32B"  # its recipes have tensor_parallel_size=4
SHORT = "Qwen/Qwen2.5-Math-7B"  # the DAPO recipes raise its 4,096 positions
REWARD_MODEL = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
GUESS = "Answer: 1\n"  # a token of its own, so that a random model is sometimes right


def make_model(folder: Path, family: str, positions: int, **sizes) -> None:
    """A tiny untied model whose hidden states share a large first component: in any context, GUESS and the end have a
    seventh of the probability each."""
    folder.mkdir(parents=True)
    make_tiny(folder, family=family, tied=False, **sizes)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = positions
    if folder.name == FOUR_HEADS:  # of 16, which vLLM does not have on CPU: the same shapes
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([GUESS])
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 10
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][[tokenizer.token_to_id(GUESS), config["eos_token_id"]], 0] = 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_reward_model(folder: Path) -> None:
    """The same body with a `score` head, as Qwen3ForSequenceClassification has it."""
    make_model(folder, "qwen3", 4096)
    config = json.loads((folder / "config.json").read_text())
    names = {"architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": 0, "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config | names))
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()
    weights["score.weight"][0, 1:] = 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rows_of(name: str, number: int) -> dict:
    """Row `number` in the form of a data set of the hub; the answer is 1 everywhere."""
    problem = f"{number} - {number - 1} = ?"
    if name.startswith("BytedTsinghua-SIA/"):
        prompt = [{"role": "user", "content": f"Solve it. The last line is Answer: $Answer.\n\n{problem}"}]
        truth = {"ground_truth": "1", "style": "rule-lighteval/MATH_v2"}
        return {"data_source": "math_dapo", "prompt": prompt, "ability": "MATH", "reward_model": truth}
    forms = {
        "openai/gsm8k": {"question": problem, "answer": f"Take <<{number}-{number - 1}=1>>1 away.\n#### 1"},
        "nvidia/OpenMathInstruct-2": {"problem": problem, "expected_answer": "1", "problem_source": "math"},
        "agentica-org/DeepScaleR-Preview-Dataset": {"problem": problem, "answer": "1", "solution": "It is 1."},
        "HuggingFaceH4/aime_2024": {"id": number, "problem": problem, "answer": "1", "year": "2024"},
    }
    return forms[name]


SIZES = {
    "BytedTsinghua-SIA/DAPO-Math-17k": 1_700,
    "BytedTsinghua-SIA/AIME-2024": 30,
    "openai/gsm8k": 100,
    "nvidia/OpenMathInstruct-2": 160,
    "agentica-org/DeepScaleR-Preview-Dataset": 160,
    "HuggingFaceH4/aime_2024": 30,
}


def make_folder(folder: Path) -> None:
    """All that the recipes of recipes.txt name, where they look for it: in the working directory."""
    for family, names in MODELS.items():
        make_model(folder / names[0], family, 32_768)
        for name in names[1:]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(folder / names[0])
    make_model(folder / ADAPTED, "qwen3", 32_768, **WIDE)
    make_model(folder / SHORT, "qwen2", 4_096)
    make_model(folder / "Qwen" / FOUR_HEADS, "qwen2", 32_768)
    make_reward_model(folder / REWARD_MODEL)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(rows_of(name, i)) + "\n" for i in range(1, size + 1)))
    (folder / "examples").symlink_to(RECIPES / "examples")
