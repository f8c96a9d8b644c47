"""Files as people have them: Python with a GRPOConfig or a dataclass; verl's yaml, hydra's overrides, scripts."""

import json
from dataclasses import MISSING, fields

import pytest
import yaml

from config import ConfigError
from support.inputs import reader
from support.inputs.keys import SECTIONS
from tools.convert import COMPUTED, convert
from tools.theirs import Unread, assigned, resolved

CALL = "from trl import GRPOConfig, GRPOTrainer\n"
LORA = "from peft import LoraConfig, get_peft_model\n"
LR, STEPS, WARMUP = "policy.optimizer.kwargs.lr", "grpo.max_num_steps", "policy.scheduler.warmup_steps"
PROMPTS, GROUP, BATCH = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size"
MODEL, LENGTH, TOTAL = "policy.model_name", "policy.generation.max_new_tokens", "policy.max_total_sequence_length"
KL, RANK, ALPHA = "loss_fn.reference_policy_kl_penalty", *(f"policy.dtensor_cfg.lora_cfg.{k}" for k in ("dim", "alpha"))
ADAPTERS = "policy.dtensor_cfg.lora_cfg.enabled"

# name -> (text, keys of the config that is written, what the report says)
PYTHON = {
    "a call with literals": (
        CALL + "args = GRPOConfig(output_dir='o', learning_rate=2e-6, max_steps=500, warmup_ratio=0.05)\n"
        "GRPOTrainer(model='Qwen/Qwen2.5-0.5B', args=args, reward_funcs=[accuracy_reward])",
        {LR: 2e-6, STEPS: 500, WARMUP: 25, MODEL: "Qwen/Qwen2.5-0.5B", "logger.log_dir": "o"}
        | {"data.default.env_name": "math"},
        ["0.05 x max_steps=500", f"{TOTAL}=1024", "512 prompt tokens are assumed"],
    ),
    "constants of the module, operators": (
        "import trl\nLR = 5e-6\nSEQ = 2**11\nPROMPT = 256\nN = int('8')\n"
        "c = trl.GRPOConfig(learning_rate=LR * 2, max_prompt_length=PROMPT, max_completion_length=SEQ - PROMPT,\n"
        "    num_generations=N, per_device_train_batch_size=N, gradient_accumulation_steps=4, max_steps=1_000)",
        {LR: 1e-5, LENGTH: 1792, TOTAL: 2048, GROUP: 8, PROMPTS: 4, BATCH: 32, STEPS: 1000},
        ["policy.train_global_batch_size=32, grpo.num_prompts_per_step=4"],
    ),
    "a dict that is unpacked, and items of a dict": (
        CALL + "BASE = dict(learning_rate=3e-6, seed=now())\nC = {'steps': 40, 'out': path()}\n"
        "a = GRPOConfig(**BASE, **{'beta': 0.04}, max_steps=C['steps'], output_dir=C['out'])",
        {LR: 3e-6, KL: 0.04, STEPS: 40, "grpo.seed": 42},
        ["seed='now()'", "output_dir=\"C['out']\"", "to_json_string", "42, TRL's default, is in its place"],
    ),
    "command line, loop and parameter: named, and the default is said": (
        CALL + "a = parser.parse_args()\ndef main(steps=5):\n  for beta in (0.1, 0.2):\n"
        "    GRPOConfig(learning_rate=a.lr, max_steps=steps, beta=beta, num_generations=4)",
        {LR: 1e-6, STEPS: 1_000_000, KL: 0.0, GROUP: 4},
        ["learning_rate='a.lr': 1e-06", "max_steps='steps'", "beta='beta'"],
    ),
    "a name that is bound twice is not a constant": (
        CALL + "lr = 1e-6\nif big: lr = 3e-6\nGRPOConfig(learning_rate=lr, beta=0.1)",
        {LR: 1e-6, KL: 0.1},
        ["learning_rate='lr'"],
    ),
    "attributes that are set later; under an if they are named": (
        CALL + "c = GRPOConfig(max_steps=9)\nc.learning_rate = 4e-6\nif debug:\n  c.beta = 0.1\n"
        "if __name__ == '__main__':\n  c.num_generations = 4",
        {LR: 4e-6, STEPS: 9, KL: 0.0, GROUP: 4},
        ["beta='c.beta'"],
    ),
    "two names at once, a function that returns the config, names that a reward shares": (
        CALL + "lr, beta = 3e-6, 0.02\ndef reward(completions, lr=1, **kw):\n  beta = [lr]\n  beta.append(2)\n"
        "  return beta\nkw = dict(num_generations=4)\ndef build():\n"
        "  c = GRPOConfig(learning_rate=lr, beta=beta, **kw)\n  return c\na = build()\nGRPOTrainer('m', reward, a)",
        {LR: 3e-6, KL: 0.02, GROUP: 4},
        [],
    ),
    "fields that a function or __post_init__ changes": (
        CALL + "class C(GRPOConfig):\n  beta: float = 0.1\n  def __post_init__(self):\n    self.beta = 0.2\n"
        "c = C(max_grad_norm=None)\nsetattr(c, 'seed', 3)\nGRPOTrainer('m', f, c)",
        {KL: 0.0, "policy.max_grad_norm": 1e9, "grpo.seed": 42},
        ["beta='C.beta'", "seed=\"setattr(c, 'seed', 3)\""],
    ),
    "a dict that is changed": (
        CALL + "kw = {'learning_rate': 1e-5}\nkw['beta'] = 0.1\nother = {'max_steps': 3}\nother.update(more)\n"
        "GRPOConfig(**kw, **other, num_generations=4)",
        {LR: 1e-6, GROUP: 4, STEPS: 1_000_000},
        ["**kw", "**other"],
    ),
    "a subclass with fields of its own, and another name": (
        "from trl import GRPOConfig as Base\nfrom dataclasses import dataclass, field\n@dataclass\nclass Mine(Base):\n"
        "  learning_rate: float = field(default=7e-6, metadata={'help': 'x'})\n  tool: str = 'none'\n"
        "Mine(max_steps=100, warmup_steps=0.1, save_steps=0.25)",
        {LR: 7e-6, STEPS: 100, WARMUP: 10, "checkpointing.save_period": 25},
        ["tool: left out"],
    ),
    "a dataclass alone": (
        "from dataclasses import dataclass, field\n@dataclass\nclass Args:\n  model_name: str = 'Qwen/Qwen3-0.6B'\n"
        "  learning_rate: float = 1e-5\n  num_generations: int = 16\n  per_device_train_batch_size: int = 16\n"
        "  lr_scheduler_type: str = 'cosine'\n  logging_steps: int = 1\n  data: str = 'x.jsonl'\n"
        "  report_to: list[str] = field(default_factory=lambda: ['wandb', 'tensorboard'])",
        {
            MODEL: "Qwen/Qwen3-0.6B",
            LR: 1e-5,
            GROUP: 16,
            "policy.scheduler.name": "cosine",
            "logger.wandb_enabled": True,
        },
        ["data: left out", "class Args"],
    ),
    "fields of two dataclasses, and instances": (
        CALL + "from dataclasses import dataclass\n@dataclass\nclass Run:\n  lr: float = 2e-6\n  gens: int = 4\n"
        "class Const:\n  KL = 0.02\nrun = Run(gens=8)\n"
        "GRPOConfig(learning_rate=run.lr, num_generations=run.gens, beta=Const.KL)",
        {LR: 2e-6, GROUP: 8, KL: 0.02},
        [],
    ),
    "LoraConfig given to the trainer": (
        CALL + LORA + "peft = LoraConfig(r=32, lora_alpha=64, target_modules=['q_proj'], task_type='CAUSAL_LM')\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-1.5B', torch_dtype=bf16).to('cuda')\n"
        "GRPOTrainer(model=model, args=GRPOConfig(beta=0.01), peft_config=peft, reward_funcs=score)",
        {ADAPTERS: True, RANK: 32, ALPHA: 64, "policy.dtensor_cfg.lora_cfg.target_modules": ("q_proj",)}
        | {MODEL: "Qwen/Qwen2.5-1.5B"},
        ["reward_funcs=score"],
    ),
    "LoraConfig that nobody gets": (
        CALL + LORA + "peft = LoraConfig(r=32)\nGRPOTrainer('Qwen/Qwen3-0.6B', f, GRPOConfig(beta=0.01))",
        {ADAPTERS: False, MODEL: "Qwen/Qwen3-0.6B"},
        ["the trainer does not get this LoraConfig"],
    ),
    "LoraConfig alone, with PEFT's own defaults": (
        CALL + LORA + "LoraConfig()\nGRPOConfig(beta=0.01)",
        {ADAPTERS: True, RANK: 8, ALPHA: 8},
        [],
    ),
    "ModelConfig": (
        "from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config\n"
        "m = ModelConfig(model_name_or_path='Qwen/Qwen3-1.7B', use_peft=True, lora_r=4)\n"
        "GRPOTrainer(m.model_name_or_path, f, GRPOConfig(beta=0.1), peft_config=get_peft_config(m))",
        {MODEL: "Qwen/Qwen3-1.7B", ADAPTERS: True, RANK: 4, ALPHA: 32},
        [],
    ),
    "Unsloth": (
        "from unsloth import FastLanguageModel\n" + CALL + "n = 1024\n"
        "model, tok = FastLanguageModel.from_pretrained(model_name='Qwen/Qwen3-4B', load_in_4bit=True)\n"
        "model = FastLanguageModel.get_peft_model(model, r=64, lora_alpha=64, use_gradient_checkpointing='unsloth')\n"
        "GRPOTrainer(model=model, args=GRPOConfig(per_device_train_batch_size=1, num_generations=6,\n"
        "  max_completion_length=n - 256, max_prompt_length=256, warmup_ratio=0.1, max_steps=250, optim='adamw_8bit'))",
        {MODEL: "Qwen/Qwen3-4B", RANK: 64, GROUP: 6, BATCH: 6, PROMPTS: 1, LENGTH: 768, WARMUP: 25},
        ["Unsloth makes it num_generations=6", "load_in_4bit=true: the weights are not quantized"],
    ),
    "a share of steps that nobody knows": (
        CALL + "GRPOConfig(warmup_ratio=0.1, num_train_epochs=2)",
        {WARMUP: 0, "grpo.max_num_epochs": 2},
        ["warmup_ratio=0.1: a share of max_steps, which is not set"],
    ),
    "schedules": (
        CALL + "GRPOConfig(lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1})",
        {"policy.scheduler.name": "cosine", "policy.scheduler.min_factor": 0.1},
        [],
    ),
    "a constant rate does not warm up": (
        CALL + "GRPOConfig(lr_scheduler_type='constant', warmup_ratio=0.1, max_steps=100)",
        {WARMUP: 0, STEPS: 100},
        ["has no effect with lr_scheduler_type=constant"],
    ),
}
TREE = "actor_rollout_ref: {{actor: {{{actor}}}, rollout: {{{rollout}}}}}\n"
LIST = "['/d/gsm8k/train.parquet', '/d/math/train.parquet']"
VERL = {
    "values": (
        "data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 1536}\n"
        + TREE.format(actor="ppo_mini_batch_size: 16, optim: {lr: 2e-6}", rollout="n: 8"),
        {PROMPTS: 64, BATCH: 128, GROUP: 8, TOTAL: 2048, LR: 2e-6},
        [],
    ),
    "another key": (
        "data: {train_batch_size: 64}\n"
        + TREE.format(actor="ppo_mini_batch_size: '${data.train_batch_size}'", rollout=""),
        {BATCH: 64},
        ["ppo_mini_batch_size=64"],
    ),
    "a default of verl's": (TREE.format(actor="", rollout="n: '${data.train_batch_size}'"), {GROUP: 1024}, []),
    "a sibling, and one above": (
        "data: {max_prompt_length: 100, max_response_length: '${.max_prompt_length}', shuffle: false}\n"
        "trainer: {total_epochs: 3, save_freq: '${..trainer.total_epochs}'}",
        {TOTAL: 200, "checkpointing.save_period": 3, "data.shuffle": False},
        [],
    ),
    "a text around it": (
        "trainer: {project_name: p, experiment_name: 'a_${trainer.project_name}_b'}",
        {"logger.wandb.name": "a_p_b", "logger.wandb.project": "p"},
        [],
    ),
    "the environment, and a choice": (
        "trainer: {default_local_dir: '${oc.env:HERE}/x', project_name: '${oc.env:NOT_THERE,alone}'}\n"
        "data: {max_response_length: '${oc.select:data.other,300}', seed: '${oc.select:trainer.seed,7}'}",
        {"logger.log_dir": "/here/x", "logger.wandb.project": "alone", LENGTH: 300, "grpo.seed": 7},
        [],
    ),
    "what cannot be resolved": (
        "data: {train_batch_size: '${mine:3}', max_response_length: 64}\ntrainer: {total_epochs: '${my.key}'}",
        {PROMPTS: 1024, LENGTH: 64},
        [
            "train_batch_size='${mine:3}': 1024, verl's default, is in its place",
            "total_epochs='${my.key}'",
            "--resolve",
        ],
    ),
    "a circle": ("data: {seed: '${data.seed}', prompt_key: q}", {"data.default.input_key": "q"}, ["data.seed="]),
    "shares of known steps": (
        "trainer: {total_training_steps: 125}\n"
        + TREE.format(
            actor="optim: {lr_warmup_steps_ratio: 0.1, warmup_style: cosine, min_lr_ratio: null}", rollout=""
        ),
        {WARMUP: 12, STEPS: 125, "policy.scheduler.name": "cosine"},
        ["0.1 x trainer.total_training_steps=125"],
    ),
    "steps win over a share": (
        "trainer: {total_training_steps: 100}\n"
        + TREE.format(actor="optim: {lr_warmup_steps: 5, lr_warmup_steps_ratio: 0.1}", rollout=""),
        {WARMUP: 5},
        ["has no effect with actor_rollout_ref.actor.optim.lr_warmup_steps=5"],
    ),
    "hydra's own keys": (
        "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [ppo_trainer, _self_]\n"
        "data: {return_raw_chat: true, gen_batch_size: 192, train_batch_size: 64}\nalgorithm: {_target_: verl.x}",
        {PROMPTS: 64, "grpo.batch_multiplier": 3.0},
        ["defaults: left out"],
    ),
    "a mapping that is a value, and keys of one's own": (
        "data: {apply_chat_template_kwargs: {enable_thinking: false}}\nmy_agent: {budget: 3}",
        {"policy.tokenizer.chat_template_kwargs": {"enable_thinking": False}},
        ["my_agent.budget=3: unknown"],
    ),
    "lists": (
        f"data: {{train_files: {LIST}}}\ntrainer: {{logger: [console, swanlab, wandb]}}",
        {"logger.wandb_enabled": True},
        ["data.train="],
    ),
}
OVERRIDES = {
    "a number": ("- data.train_batch_size=32\n- actor_rollout_ref.rollout.n=4", {PROMPTS: 32, GROUP: 4}, []),
    "plus signs": ("- +data.seed=3\n- ++trainer.total_epochs=2", {"grpo.seed": 3, "grpo.max_num_epochs": 2}, []),
    "hydra's mapping": (
        "- data.apply_chat_template_kwargs={enable_thinking:false}",
        {"policy.tokenizer.chat_template_kwargs": {"enable_thinking": False}},
        [],
    ),
    "a list of paths": (f'- "data.train_files={LIST}"', {}, ["/d/math/train.parquet"]),
    "a list of words": ("- trainer.logger=[console,wandb]", {"logger.wandb_enabled": True}, []),
    "quotes": ("- 'trainer.experiment_name=\"a b\"'", {"logger.wandb.name": "a b"}, []),
    "null and booleans": ("- data.shuffle=False\n- data.seed=null", {"data.shuffle": False}, []),
    "exponents": ("- actor_rollout_ref.actor.optim.lr=1e-6", {LR: 1e-6}, []),
    "a key within a mapping, keys of older recipes, and of workers": (
        "- +data.apply_chat_template_kwargs.enable_thinking=False\n- reward_model.overlong_buffer.enable=True\n"
        "- reward_model.overlong_buffer.len=64\n- actor_rollout_ref.actor.optim.clip_grad=0.5",
        {"policy.tokenizer.chat_template_kwargs": {"enable_thinking": False}, "policy.max_grad_norm": 0.5}
        | {"grpo.reward_shaping.enabled": True, "grpo.reward_shaping.overlong_buffer_length": 64},
        [],
    ),
    "an interpolation": (
        "- data.train_batch_size=8\n- actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
        {BATCH: 8},
        [],
    ),
    "lora": (
        "- actor_rollout_ref.model.lora_rank=32\n- actor_rollout_ref.model.lora_alpha=64",
        {ADAPTERS: True, RANK: 32, ALPHA: 64},
        [],
    ),
    "a ratio": (
        "- trainer.total_training_steps=200\n- actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05",
        {WARMUP: 10},
        [],
    ),
    "an equals sign in the value": ("- trainer.experiment_name=a=b", {"logger.wandb.name": "a=b"}, []),
    "what hydra computes": ("- trainer.experiment_name=${now:%Y}", {}, ["trainer.experiment_name='${now:%Y}'"]),
}
SCRIPTS = {
    "variables with defaults, arithmetic, arrays": (
        "set -x\nN=${N_GPUS:-4}\nLEN=$((1024 * 2))\nprompt=$(( LEN / 4 ))\n"
        "DATA=(\n data.train_batch_size=${BSZ:-${OTHER:-64}}\n"
        ' data.max_prompt_length="$prompt"\n)\nMORE=(data.max_response_length=${LEN} data.seed=5)\n'
        "python3 -m verl.trainer.main_ppo --config-name=ppo hydra.run.dir=/x \\\n"
        ' "${DATA[@]}" ${MORE[@]} actor_rollout_ref.rollout.n=$(((2 + 2) * N)) trainer.total_epochs=$NOBODY "$@"',
        {PROMPTS: 64, LENGTH: 2048, TOTAL: 2560, GROUP: 16, "grpo.seed": 5, "cluster.gpus_per_node": 8},
        ["trainer.total_epochs='$NOBODY': 30, verl's default"],
    ),
    "branches and commands, of which one is taken": (
        'N=8; export LR=2e-6 && K=1\nif [ -n "$X" ]; then # which, isn\'t known\n  B=16\n'
        "  MORE='trainer.total_epochs=2 data.seed=9'\nelse\n  B=32\nfi\nA=(algorithm.adv_estimator=grpo)\n"
        "if true; then A+=(data.shuffle=False); fi\n"
        "ALL='actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.optim.lr='$LR\n"
        "for s in 1 2; do\n  python -m verl.trainer.main_ppo $ALL $MORE data.train_batch_size=$B \\\n"
        "    data.max_prompt_length=64\ndone\npython -m verl.trainer.main_ppo --config-name 'mine' \\\n"
        "  $ALL data.max_prompt_length=96 trainer.nnodes=$K",
        {GROUP: 4, LR: 2e-6, PROMPTS: 1024, "data.shuffle": True, "grpo.seed": 42, "data.max_input_seq_length": 512},
        [
            "train_batch_size='$(16 or 32)'",
            "data.shuffle: left out, because no command gets $A",
            "data.seed='$(nothing or 9)'",
            "(64 or 96)",
            "--config-name=mine",
        ],
    ),
    "a word that every branch keeps": (
        "A='data.seed=5 data.shuffle=False'\nif x; then\n  A=\"$A data.train_batch_size=8\"\nelse\n"
        '  A="$A trainer.total_epochs=2"\nfi\npython -m verl.trainer.main_ppo $A',
        {"grpo.seed": 5, "data.shuffle": False, PROMPTS: 1024},
        ["train_batch_size='$(nothing or 8)'", "trainer.total_epochs='$(nothing or 2)'"],
    ),
    "what only a shell knows": (
        "data.train_batch_size=$(nproc) data.max_response_length=64",
        {PROMPTS: 1024, LENGTH: 64},
        ["data.train_batch_size="],
    ),
}
SCRIPTS["variables that hold themselves"] = (
    'export NOT_SET_PATH=$NOT_SET_PATH:/usr/lib\nexport MORE=$NOT_SET_PATH:/a\nARGS="$ARGS data.train_batch_size=64"\n'
    "python3 -m verl.trainer.main_ppo $ARGS data.max_prompt_length=64 $NOT_SET_PATH",
    {PROMPTS: 64, "data.max_input_seq_length": 64},
    [],
)
KINDS = {"py": ("trl", PYTHON), "yaml": ("verl", VERL), "overrides.yaml": ("verl", OVERRIDES), "sh": ("verl", SCRIPTS)}
CASES = [(suffix, *case) for suffix, (_, cases) in KINDS.items() for case in cases.items()]


def value_of(cfg, key):
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def keys_of(tree, prefix):
    """The full keys of a config, but no section."""
    for key, value in tree.items():
        is_section = isinstance(value, dict) and f"{prefix}{key}" in SECTIONS
        yield from keys_of(value, f"{prefix}{key}.") if is_section else [f"{prefix}{key}"]


@pytest.mark.parametrize(("suffix", "name", "case"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_what_is_read(suffix, name, case, tmp_path, monkeypatch):
    text, expected, said = case
    monkeypatch.setenv("HERE", "/here")
    (tmp_path / f"theirs.{suffix}").write_text(text)
    report = convert(KINDS[suffix][0], str(tmp_path / f"theirs.{suffix}"), [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert {key: value_of(cfg, key) for key in expected} == expected, report
    assert all(words in report for words in said), report
    tree = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert [key for key in keys_of(tree, "") if f"{key}=" not in report] == [], "set, and not said"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x = 1", ["no GRPOConfig", "to_json_string"]),
        ("a.py", "def f(:", ["line 1", "not Python"]),
        ("a.py", CALL + "GRPOConfig(beta=1)\nGRPOConfig(beta=2)", ["lines 2, 3", "to_json_string"]),
        ("a.py", CALL + "GRPOConfig(learning_rat=1)", ["learning_rat", "Did you mean 'learning_rate'"]),
        ("a.py", CALL + "GRPOConfig(num_generations=16)", ["num_generations=16", "num_processes=8"]),
        ("a.ipynb", '{"cells": []}', ["Python file", "to_json_string"]),
        ("a.json", "[1]", ["to_json_string"]),
        ("a.yaml", "seed: 1\ntraining: {learning_rate: 1.0e-5}", ["not in sections", "to_json_string"]),
        ("verl.py", "import verl", ["hydra's", "config.yaml"]),
        ("verl.yaml", "hydra: {run: {dir: x}}", ["no key of verl's", ".hydra/config.yaml"]),
        ("verl.yaml", "learning_rate: 1", ["no key of verl's", "overrides.yaml"]),
        ("verl.yaml", "- data", ["expected key=value"]),
        (
            "verl.sh",
            "A='$A$A$A'\n" * 2
            + "B=$A$A$A$A$A$A$A$A\n" * 3
            + "".join(f"A{i + 1}=$A{i}$A{i}\n" for i in range(40))
            + "A0=long;"
            + "".join(f"A{i + 1}=$A{i}$A{i}\n" for i in range(40)),
            ["more than 1,000,000 characters"],
        ),
    ],
)
def test_what_is_refused_says_the_way_out(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        convert("verl" if name.startswith("verl") else "trl", str(tmp_path / name), [], str(tmp_path / "out.yaml"))
    assert all(word in str(error.value) for word in words), error.value


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "a.py").write_text(f"{CALL}open({str(mark)!r}, 'w')\nGRPOConfig(seed=open({str(mark)!r}, 'w'), beta=1)")
    convert("trl", str(tmp_path / "a.py"), [], str(tmp_path / "out.yaml"))
    assert not mark.exists()


@pytest.mark.slow
def test_a_dump_of_the_arguments_is_read(tmp_path):
    """The way out that the refusals name: a file with every key. The number of processes follows from two of them."""
    from transformers import TrainingArguments

    own = {"num_generations": 8, "per_device_train_batch_size": 4, "generation_batch_size": 64, "max_steps": 50}
    own |= {"steps_per_generation": 2, "warmup_steps": 0.1, "accelerator_config": {"even_batches": True}}
    values = {each.name: each.default for each in fields(TrainingArguments) if each.default is not MISSING} | own
    (tmp_path / "grpo.json").write_text(json.dumps(values))
    convert("trl", str(tmp_path / "grpo.json"), [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert (cfg.grpo.num_prompts_per_step, cfg.policy.scheduler.warmup_steps) == (8, 3), "two optimizer steps of one"


def test_an_override_settles_what_must_be_computed(tmp_path):
    (tmp_path / "a.py").write_text(CALL + "GRPOConfig(learning_rate=args.lr)")
    report = convert("trl", str(tmp_path / "a.py"), ["learning_rate=3e-6"], str(tmp_path / "ours.yaml"))
    assert COMPUTED not in report and reader.read(tmp_path / "ours.yaml").cfg.policy.optimizer.kwargs.lr == 3e-6


def test_interpolations_one_by_one():
    values = {"a.b": 3, "a.c": "${.b}", "a.d.e": "${..b}", "f": "${a.c}${a.b}", "g": ["${a.b}", 1], "h": "${nobody}"}
    found = resolved(values | {"i": "${j}"}, {"j": 9, "k": 1})
    assert found == {"a.b": 3, "a.c": 3, "a.d.e": 3, "f": 33, "g": [3, 1], "h": "${nobody}", "i": 9}
    assert isinstance(found["h"], Unread)
    assert assigned(["a=[1,x]", "+b={c:1}", "d="]) == {"a": [1, "x"], "b": {"c": 1}, "d": None}


def trainer(reward, more=""):
    return f"GRPOTrainer('Qwen/Qwen3-0.6B', {reward}, GRPOConfig(beta=0.1){more})"


# what grades, by whom -> (text, env_name that is written)
GRADERS = {
    "a function of the script": ("py", f"{CALL}def f(completions): pass\n{trainer('f')}", "your_module:f"),
    "one with the name of TRL's": (
        "py",
        f"{CALL}def accuracy_reward(completions): pass\n{trainer('[accuracy_reward]')}",
        "your_module:accuracy_reward",
    ),
    "TRL's": ("py", f"{CALL}from trl.rewards import accuracy_reward as a\n{trainer('a')}", "math"),
    "an imported function": ("py", f"{CALL}from my.rewards import f as g\n{trainer('[g]')}", "my.rewards:f"),
    "an attribute": ("py", f"{CALL}import my.rewards as r\n{trainer('r.f')}", "my.rewards:f"),
    "several": ("py", f"{CALL}from my import f, g\n{trainer('[f, g]')}", "your_module:your_function"),
    "what is computed": ("py", f"{CALL}{trainer('get_rewards(args)')}", "your_module:your_function"),
    "a model in a script": ("py", CALL + trainer("'org/rm'"), "reward_model"),
    "no trainer": ("py", f"{CALL}GRPOConfig(beta=0.1)", "your_module:your_function"),
    "a dotted path": ("json", '{"reward_funcs": ["my.rewards.f"]}', "my.rewards:f"),
    "a model": ("json", '{"reward_model_name_or_path": "rm"}', "reward_model"),
    "model and function": (
        "json",
        '{"reward_funcs": "a.b", "reward_model_name_or_path": "rm"}',
        "your_module:your_function",
    ),
    "verl's own": ("sh", "data.seed=1", "math"),
    "verl's function": ("sh", "custom_reward_function.path=recipe/r.py", "recipe.r:compute_score"),
    "its name, in newer files": ("yaml", "reward: {custom_reward_function: {path: /abs/r.py, name: f}}", "r:f"),
    "a path that only the shell knows": ("sh", "custom_reward_function.path=$F/r.py", "$F.r:compute_score"),
    "verl's reward model": ("sh", "reward_model.enable=True reward_model.model.path=org/rm", "reward_model"),
}


@pytest.mark.parametrize(("suffix", "text", "expected"), GRADERS.values(), ids=GRADERS)
def test_what_grades_is_theirs_or_the_check_refuses_it(suffix, text, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("F", raising=False)
    (tmp_path / f"theirs.{suffix}").write_text(text)
    system = "verl" if suffix in ("sh", "yaml") else "trl"
    report = convert(system, str(tmp_path / f"theirs.{suffix}"), [], str(tmp_path / "ours.yaml"))
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert cfg.data.default.env_name == expected and expected in report
    assert (cfg.env.reward_model.model_name is not None) == (expected == "reward_model")


CHANGED = {  # what a script does with a value or with its config -> what the report says, and the value that is written
    "a function sets it": (
        "c = GRPOConfig(max_steps=5)\ndef f(x): x.max_steps = 9\nf(c)",
        "line 4: f(c): what this",
        5,
    ),
    "another name": ("c = GRPOConfig(max_steps=5)\nb = c\nb.max_steps = 9", "max_steps=9", 9),
    "another name, in a branch": (
        "c = GRPOConfig(max_steps=5)\nb = c\nif x: b.max_steps = 9",
        "max_steps='b.max_steps'",
        None,
    ),
    "a dict of two names": (
        "x = {'a': 5}\ny = x\ny['a'] = 7\nc = GRPOConfig(max_steps=x['a'])",
        "max_steps=\"x['a']\"",
        None,
    ),
    "a dict that is passed on": ("x = {'a': 5}\nf(x)\nc = GRPOConfig(max_steps=x['a'])", "max_steps=\"x['a']\"", None),
    "a list that grows": ("x = [5]\nx.insert(0, 7)\nc = GRPOConfig(max_steps=x[0])", "max_steps='x[0]'", None),
    "a list that turns": ("x = [5, 6]\nx.reverse()\nc = GRPOConfig(max_steps=x[0])", "max_steps='x[0]'", None),
    "setattr": (
        "c = GRPOConfig(max_steps=5)\nsetattr(c, 'max_steps', 9)",
        "max_steps=\"setattr(c, 'max_steps', 9)\"",
        None,
    ),
    "setattr of object": (
        "c = GRPOConfig(max_steps=5)\nobject.__setattr__(c, 'max_steps', 9)",
        "line 3: object.__seta",
        5,
    ),
    "vars": ("c = GRPOConfig(max_steps=5)\nvars(c)['max_steps'] = 9", "line 3: vars(c)['max_steps'] = 9: what this", 5),
    "its __dict__": ("c = GRPOConfig(max_steps=5)\nc.__dict__['max_steps'] = 9", "__dict__=", 5),
    "a method": ("c = GRPOConfig(max_steps=5)\nc.set_training(9)", "line 3: c.set_training(9): what this", 5),
    "an item of a field": (
        "c = GRPOConfig(max_steps=5, lr_scheduler_kwargs={'min_lr_rate': 0.1})\n"
        "c.lr_scheduler_kwargs['min_lr_rate'] = 0",
        "lr_scheduler_kwargs=",
        5,
    ),
    "a field of a class": ("class K: N = 5\nK.N = 9\nc = GRPOConfig(max_steps=K.N)", "max_steps='K.N'", None),
    "a global": ("N = 5\ndef f():\n  global N\n  N = 9\nf()\nc = GRPOConfig(max_steps=N)", "max_steps='N'", None),
    "in place": ("N = 5\nN *= 2\nc = GRPOConfig(max_steps=N)", "max_steps='N'", None),
    "its trainer": ("c = GRPOConfig(max_steps=5)\nt = GRPOTrainer('m', f, c)\nt.save_model(c.output_dir)", "", 5),
}


@pytest.mark.parametrize(("text", "said", "steps"), CHANGED.values(), ids=CHANGED)
def test_what_a_script_changes_later_is_known_or_named(text, said, steps, tmp_path):
    (tmp_path / "a.py").write_text(CALL + text)
    report = convert("trl", str(tmp_path / "a.py"), [], str(tmp_path / "ours.yaml"))
    assert said in report
    assert ("what this changes" in report) == (said.startswith("line")), report
    assert reader.read(tmp_path / "ours.yaml").cfg.grpo.max_num_steps == (steps or 1_000_000)


DATA_SETS = {  # a script's data set -> keys of data.train
    "by its name": ("d = load_dataset('openai/gsm8k', 'main', split='train')", ("openai/gsm8k", "main", "train")),
    "the split as an item": ("d = load_dataset('trl-lib/tldr')['train']", ("trl-lib/tldr", None, "train")),
    "mapped": ("d = load_dataset('a/b', split='test').map(f).shuffle(seed=1)", ("a/b", None, "test")),
    "of two, the trainer's": (
        "v = load_dataset('a/v', split='test')\nd = load_dataset('a/t', split='train')",
        ("a/t", None, "train"),
    ),
    "a file": (
        "d = load_dataset('json', data_files='my/train.jsonl', split='train')",
        ("my/train.jsonl", None, "train"),
    ),
    "a file of each split": (
        "s = load_dataset('json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})\nd = s['train']",
        ("a.jsonl", None, "train"),
    ),
    "in a function": ("def get(): return load_dataset('a/b', split='train')\nd = get()", ("a/b", None, "train")),
    "a name that is bound": ("NAME = 'a/b'\nd = load_dataset(NAME, split='train')", ("a/b", None, "train")),
}


@pytest.mark.parametrize(("text", "expected"), DATA_SETS.values(), ids=DATA_SETS)
def test_the_data_set_of_a_script(text, expected, tmp_path):
    text = (
        f"{CALL}from datasets import load_dataset\n{text}\nGRPOTrainer('m', f, GRPOConfig(beta=0.1), train_dataset=d)"
    )
    (tmp_path / "a.py").write_text(text)
    convert("trl", str(tmp_path / "a.py"), [], str(tmp_path / "ours.yaml"))
    (train,) = reader.read(tmp_path / "ours.yaml").cfg.data.train
    assert (train.data_path, train.subset, train.split) == expected


ACTOR = "actor_rollout_ref.actor"
OF_THE_LOSS = [("policy_loss.loss_mode", "clip_cov", "vanilla"), ("policy_loss.loss_mode", "kl_cov", "vanilla")]


@pytest.mark.parametrize(
    ("suffix", "text", "key", "off"),
    [
        ("py", CALL + trainer("f", ", tools=[g]"), "tools", "null"),
        ("py", CALL + trainer("f", ", rollout_func=g"), "rollout_func", "null"),
        ("py", CALL + "class S:\n  seed: int = 1\na, s = parse(S)\nGRPOTrainer('m', f, a)", "args", "null"),
        ("py", CALL + "b = GRPOConfig(beta=0.1)\nGRPOTrainer('m', f, replace(b, beta=0.2))", "args", "null"),
        ("py", CALL + trainer("f", ", environment_factory=E"), "environment_factory", "null"),
        ("py", CALL + trainer("f", ", optimizers=(o, s)"), "optimizers", "null"),
        ("py", f"{CALL}class Mine(GRPOTrainer): pass\nMine(args=GRPOConfig(beta=0.1))", "trainer", "GRPOTrainer"),
        ("py", "from trl import GRPOConfig\nfrom mine import GRPOTrainer\n" + trainer("f"), "trainer", "GRPOTrainer"),
        ("sh", "data.custom_cls.path=a.py", "data.custom_cls.path", "null"),
        ("sh", "data.custom_cls.path=$HERE/a.py", "data.custom_cls.path", "null"),
        ("sh", "data.sampler.class_path=a.py", "data.sampler.class_path", "null"),
        (
            "sh",
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.enable",
            "false",
        ),
        ("sh", "reward.reward_manager.module.path=m.py", "reward_manager.module.path", "null"),
        ("sh", "custom_reward_function.reward_kwargs.k=2", "custom_reward_function.reward_kwargs.k", "null"),
        ("sh", "algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward", "false"),
        ("sh", "algorithm.gamma=0.99", "algorithm.gamma", "1.0"),
        ("sh", "algorithm.adv_estimator=gae", "algorithm.adv_estimator", "grpo"),
        *(("sh", f"{ACTOR}.{key}={value}", f"{ACTOR}.{key}", off) for key, value, off in OF_THE_LOSS),
        ("sh", "algorithm.rollout_correction.rollout_rs=a", "algorithm.rollout_correction.rollout_rs", "null"),
        ("sh", "actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank", "0"),
    ],
)
def test_what_decides_the_training_is_not_lost(suffix, text, key, off, tmp_path):
    """The command fails, until it is said that the conversion goes without."""
    (tmp_path / f"theirs.{suffix}").write_text(text)
    given = "trl" if suffix == "py" else "verl", str(tmp_path / f"theirs.{suffix}")
    with pytest.raises(ConfigError) as error:
        convert(*given, [], str(tmp_path / "ours.yaml"))
    assert f"{key}=" in str(error.value) and f"{key}={off}" in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
    convert(*given, [f"{key}={off}"], str(tmp_path / "ours.yaml"))


def test_what_is_lost_stands_in_the_file(tmp_path):
    (tmp_path / "a.py").write_text(f"{CALL}d = load('x').map(g)\n{trainer('f', ', train_dataset=d')}; GRPOConfig")
    convert("trl", str(tmp_path / "a.py"), ["min_p=0.1", "seed=${X}"], str(tmp_path / "ours.yaml"))
    comments = [line for line in (tmp_path / "ours.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("min_p=0.1" in line for line in comments) and any("seed=" in line for line in comments)
    assert reader.read(tmp_path / "ours.yaml").cfg.data.default.processor == "your_module:your_function"
