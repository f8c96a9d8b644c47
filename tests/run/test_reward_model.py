"""reward_model.py against transformers' sequence classifiers, on one rank and on two."""

import json
import shutil

import pytest
import torch
from ranks import ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import envs
from base.graders.reward_function import RewardFunction
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors
from base.inputs.run_inputs import read_reward_model
from base.system.exits import StopRun
from base.system.ranks import start_process_group
from config import Config, ConfigError, EnvConfig, PolicyConfig, RewardModelConfig, SequencePackingConfig
from model import load_policy
from records import Problem
from run.reward_model import RewardModel

pytestmark = pytest.mark.slow  # transformers' classifiers

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_LEN = 60
TEXTS = ["2+2=", "4", "", "one two three", "vier", "7 * 8?", "it is 56, as 7 * 8 = 56", "x"]
CONVERSATIONS = [
    [{"role": "user", "content": TEXTS[i % 8]}, {"role": "assistant", "content": TEXTS[(3 * i + 1) % 8]}]
    for i in range(11)
]
CONVERSATIONS[4] = [*CONVERSATIONS[4], *CONVERSATIONS[2]]  # several turns
CONVERSATIONS[7] = [{"role": "user", "content": "long " * MAX_LEN}, CONVERSATIONS[7][1]]


def make_reward_folder(folder, family, *, tied=True, pad="<|user|>"):
    """A tiny classifier with one label, no weight at its initial value; returns transformers' scores by its own
    tokenizer and template, in float32, in bfloat16, and in float32 with the
    weights of bfloat16; None for the conversation that is too long."""
    from tiny import make_tiny  # not at the top: spawned ranks do without transformers' seconds
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    make_tiny(folder, family=family, tied=tied)
    (folder / "model.safetensors").unlink()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token=pad, eos_token="<|end|>"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    config = AutoConfig.from_pretrained(folder, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    assert "score.weight" in load_file(folder / "model.safetensors")
    texts = tokenizer.apply_chat_template(CONVERSATIONS, chat_template=TEMPLATE, tokenize=False)
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    lengths = batch["attention_mask"].sum(1).tolist()
    scores = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        with torch.no_grad():
            score_B = model.to(dtype)(batch["input_ids"], batch["attention_mask"]).logits[:, 0].tolist()
        scores.append([s if length <= MAX_LEN else None for s, length in zip(score_B, lengths, strict=True)])
        assert scores[-1].count(None) == 1
    return scores


def load(folder, precision="float32"):
    tokenizer = Tokenizer(folder)
    env = EnvConfig(reward_model=RewardModelConfig(precision=precision, max_model_len=MAX_LEN))
    cfg = Config(env=env, policy=PolicyConfig(sequence_packing=SequencePackingConfig(train_mb_tokens=70)))
    return RewardModel(folder, read_model_config(folder), tokenizer, cfg, torch.device("cpu"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """(folder, expected scores) of a model whose config.json asks for a head over the vocabulary."""
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, make_reward_folder(folder, "qwen3", tied=False)[0]


def gaps(scores, expected):
    assert [score is None for score in scores] == [score is None for score in expected]
    return torch.tensor([abs(a - b) for a, b in zip(scores, expected, strict=True) if b is not None])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        ("qwen3", {"tied": False}),  # there is no lm_head all the same
        ("llama", {"pad": "<|end|>"}),  # transformers then reads the score before the end token
    ],
)
def test_scores_equal_transformers(family, options, one_rank, tmp_path):
    expected, rounded, of_rounded_weights = make_reward_folder(tmp_path, family, **options)
    assert gaps(expected, [score and 0.0 for score in expected]).std() > 0.3  # scores that would hide an error are none
    reward_model = load(tmp_path)
    gap = gaps(reward_model.score(CONVERSATIONS), expected).max().item()
    print(f"{family}: largest gap {gap:.1e}")
    assert gap <= 1e-5
    moves, move, reward_model.device = [], reward_model.model.to, torch.device("cpu", 0)  # not as a GPU, but by name
    reward_model.model.to = lambda where: moves.append(str(where)) or move(where)
    one_by_one = [score for messages in CONVERSATIONS for score in reward_model.score([messages])]
    assert gaps(one_by_one, expected).max() <= 1e-5
    assert moves == ["cpu:0", "cpu"] * len(CONVERSATIONS)  # on the device while it scores, no longer
    half = load(tmp_path, precision="bfloat16")
    assert {param.dtype for param in half.model.parameters()} == {torch.bfloat16}
    # as close to float32 with these weights as transformers is in the same precision
    assert gaps(half.score(CONVERSATIONS), of_rounded_weights).norm() <= 1.2 * gaps(rounded, of_rounded_weights).norm()


def test_what_the_template_refuses_has_no_score(qwen3, one_rank, tmp_path, capsys):
    folder = shutil.copytree(qwen3[0], tmp_path / "model")
    refuses_x = "{% if messages[1]['content'] == 'x' %}{{ raise_exception('no x') }}{% endif %}" + TEMPLATE
    edit_json(folder / "tokenizer_config.json", chat_template=refuses_x)
    usual = CONVERSATIONS[0]
    scores = load(folder).score([usual, [usual[0], usual[1] | {"content": "x"}], usual])
    assert scores[1] is None and gaps([scores[0], scores[2]], [qwen3[1][0]] * 2).max() <= 1e-5
    assert "1 of 3 conversations are over env.reward_model.max_model_len=60" in capsys.readouterr().err


def test_each_environment_of_a_batch_rewards_its_own(engine, one_rank, tiny, qwen3, monkeypatch):
    """Three environments side by side, one of them the model, by which only its conversations are scored."""
    from records import SamplingOptions  # not at the top: spawned ranks do without vLLM
    from rollout import Sampler

    ranks, device, mesh = one_rank
    engine.sync(full_tensors(load_policy(tiny[0], device=device, mesh=mesh), engine.dtype), 0)
    reward_model, tokenizer, seen = load(qwen3[0]), Tokenizer(tiny[0]), []

    score = reward_model.score
    monkeypatch.setattr(reward_model, "score", lambda texts: seen.extend(texts) or score(texts))

    def length(completions, bonus):
        return [len(text) + more for text, more in zip(completions, bonus, strict=True)]

    environments = {"exact": envs.Exact(), "reward_model": envs.RewardModelEnv(), "f": RewardFunction(length, "f")}
    rows = []
    for i, env_name in enumerate(["exact", "reward_model", "f", "reward_model", "f", "exact", "reward_model"]):
        messages = [{"role": "user", "content": f"{i}?" * (40 if i == 3 else 1)}]  # number 3 is too long for the model
        rows.append(Problem(i, messages, "1", env_name, tokenizer.render(messages), {"bonus": 100 * i}))
    sampler = Sampler(engine, tokenizer, environments, ranks, reward_model=reward_model)
    options = SamplingOptions(temperature=1.0, max_new_tokens=8)
    samples = sampler.sample(list(enumerate(rows)), 3, options, (0,))
    assert [(s.prompt, s.env_name) for s in samples] == [
        (i, row.env_name) for i, row in enumerate(rows) for _ in range(3)
    ]
    scored = []
    for s in samples:
        reply = tokenizer.decode(s.sequence.output_ids)
        if s.env_name == "reward_model":
            scored.append([*rows[s.prompt].messages, {"role": "assistant", "content": reply}])
            (alone,) = score(scored[-1:])
            assert (alone is None) == (s.prompt == 3) and (s.grade.outcome == "error") == (alone is None)
            assert abs(s.grade.reward - (alone or 0.0)) <= 1e-5
        else:
            assert s.grade.reward == (len(reply) + 100 * s.prompt if s.env_name == "f" else 0.0) and s.messages == []
    assert seen == scored and len({s.grade.reward for s in samples if s.prompt == 6}) == 3
    with pytest.raises(StopRun, match=r"3 of 21 .*'reward_model': 3.*env.max_error_fraction=0.1"):
        strict = Sampler(engine, tokenizer, environments, ranks, max_error_fraction=0.1, reward_model=reward_model)
        strict.sample(list(enumerate(rows)), 3, options, (0,))


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def two_labels(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": tensors["score.weight"].repeat(2, 1)}, folder / "model.safetensors")


def no_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (None, {"model_name": None}, r"env.reward_model.model_name is not set"),
        (None, {"max_model_len": 257}, r"max_model_len=257 .* max_position_embeddings=256 .*: use 256 or less"),
        (no_head, {}, r"env.reward_model.model_name: .* score.weight is missing, .*: give a Qwen2-"),
        (two_labels, {}, r"score.weight is \[2, 64\], but config.json says \[1, 64\]: give a Qwen2-.* with one label"),
    ],
)
def test_what_is_no_reward_model_is_said_at_check(edit, options, message, qwen3, tmp_path):
    folder = shutil.copytree(qwen3[0], tmp_path / "model")
    cfg = RewardModelConfig(**{"model_name": str(folder), "max_model_len": 256} | options)
    if edit:
        assert read_reward_model(cfg)[0] == folder
        edit(folder)
    with pytest.raises(ConfigError, match=message):
        read_reward_model(cfg)


def test_two_ranks(qwen3):
    score_on_two_ranks(*qwen3)


@ranks(2)
def score_on_two_ranks(folder, expected):
    rank = start_process_group(tp_size=1)[0].rank
    reward_model = load(folder)
    stored = load_file(folder / "model.safetensors")
    rows = {name: len(param.to_local()) for name, param in reward_model.model.named_parameters()}
    assert rows["score.weight"] == [1, 0][rank]
    assert sum(rows.values()) < 0.6 * sum(map(len, stored.values()))
    for count in (len(CONVERSATIONS), 1, 8, 0):  # 1: a rank without any; 8: the too long one is in a share alone
        share = slice(rank, count, 2)
        scores = reward_model.score(CONVERSATIONS[share])
        assert len(scores) == len(CONVERSATIONS[share])
        assert not scores or gaps(scores, expected[share]).max() <= 1e-5
        assert all(isinstance(param, DTensor) for param in reward_model.model.parameters())  # nothing stays gathered
