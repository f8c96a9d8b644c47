"""NeMo RL's own recipes, unchanged: what --check says of each, a verdict for each of its keys, and two steps of one of
each kind on a tiny model. They and the files that they inherit from lie in ../shared; without it this is skipped."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from nemo_folder import RECIPES, make_folder

import envs
from base.check import preflight
from base.graders.environments import make_environment
from base.inputs import reader, run_inputs
from config import ConfigError

LIST = RECIPES / "recipes.txt"
NAMES = LIST.read_text().split() if LIST.exists() else []
REASON = f"{LIST} is not here: NeMo RL's recipes are not part of this project"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NAMES, reason=REASON)]
ROOT = Path(__file__).resolve().parents[2]
ASYNC = yaml.safe_load((ROOT / "tests/helpers/nemo_async.yaml").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemo")
    make_folder(path)
    return path


@pytest.fixture
def here(folder, monkeypatch):
    """The working directory, and graders without processes: whether an answer is one is asked of the real ones."""
    monkeypatch.chdir(folder)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GRPO_DEVICE"):  # of a lone rank before, or of tests/run.sh
        monkeypatch.delenv(name, raising=False)

    def without_workers(name, cfg, num_ranks):
        return envs.Environment() if name == "math" else make_environment(name, cfg, num_ranks)

    monkeypatch.setattr(run_inputs, "make_environment", without_workers)
    monkeypatch.setattr(run_inputs.importlib.metadata, "distributions", lambda name: iter([name]))  # some want W&B
    return folder


def test_all_recipes_are_there():
    assert len(NAMES) == 35


@pytest.mark.parametrize("name", NAMES)
def test_check_and_explain(name, here, capsys):
    """Each recipe passes, and each of its keys has one verdict."""
    cfg = preflight.parse_command_line(["--check", "--explain", name], "")
    summary = preflight.check(cfg)
    assert summary.startswith("model      ") and re.search(r"\nsteps +[1-9]", summary)
    num_gpus = cfg.cluster.gpus_per_node * cfg.cluster.num_nodes
    is_planned = num_gpus > 1 and "noncolocated" not in name
    assert (f"\nmemory     GiB on each of {num_gpus} GPUs, packs of " in summary) == is_planned
    counts, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()  # the check may tell its progress after
    expected = leaves(of_file(Path(name)))
    assert sorted(line.partition("=")[0] for line in lines) == sorted(expected)
    assert len(set(expected)) == len(expected) > 200
    kinds = Counter(re.match(r"[^=]+=.*?: (mapped to|used|does not matter|refused)", line)[1] for line in lines)
    assert counts == f"{len(expected)} keys: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
    assert sum(kinds.values()) == len(expected) and not kinds["refused"]


def of_file(path):
    """What NeMo RL's loader makes of a recipe: mappings are merged, `_override_` drops a section of the defaults."""
    recipe = yaml.safe_load(path.read_text())
    whole = {}
    defaults = recipe.pop("defaults", [])
    for name in [defaults] if isinstance(defaults, str) else defaults:
        whole = merged(whole, of_file(path.parent / name))
    for name, section in recipe.items():
        if isinstance(section, dict) and section.pop("_override_", False):
            whole.pop(name, None)
    return merged(whole, recipe)


def merged(below, above):
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def leaves(value, name=""):
    """Full names of all keys; the data sets of a list are numbered."""
    if isinstance(value, list) and name in ("data.train", "data.validation"):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for key, below in value.items() for leaf in leaves(below, f"{name}.{key}".lstrip("."))]


def test_what_a_recipe_means(here):
    def read(name, *overrides):
        return reader.load(f"examples/configs/{name}.yaml", overrides)

    assert (read("gdpo_math_1B").grpo.use_leave_one_out_baseline, read("grpo_math_1B").grpo.val_top_p) == (False, 1.0)
    smoke = read("grpo_smoke")
    assert (smoke.grpo.val_period, smoke.policy.tokenizer.name) == (0, "Qwen/Qwen3-0.6B")
    dapo = read("recipes/llm/dapo-qwen2.5-7b.v2")
    assert dapo.policy.hf_config_overrides.max_position_embeddings == dapo.policy.max_total_sequence_length == 16_384
    assert (dapo.grpo.use_leave_one_out_baseline, dapo.grpo.batch_multiplier) == (False, 3)
    reward = read("grpo_rm_1B").env.reward_model
    assert reward.tokenizer.name == reward.model_name == "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    puzzle = read("grpo_sliding_puzzle")
    generation = puzzle.policy.generation
    assert (generation.top_p, generation.top_k, puzzle.grpo.val_top_p) == (0.999, 10000, 0.999)
    game = "examples.envs.sliding_puzzle:SlidingPuzzle"
    assert (puzzle.env.custom, puzzle.grpo.max_rollout_turns) == ({game: {"max_moves": 30}}, 50)
    assert [(part.subset, part.env_name, part.prompt_file) for part in puzzle.data.train] == [("5 10", game, None)]
    assert puzzle.policy.tokenizer.chat_template_kwargs == {"add_system_prompt": False}


def checked(name, *more):
    """(config, its summary) of an asynchronous configuration, over the recipe that it is for, with more settings."""
    words = [f"examples/configs/{ASYNC[name]['over']}.yaml", *ASYNC[name]["set"].split(), *more]
    cfg = preflight.parse_command_line(["--check", *words], "")
    return cfg, preflight.check(cfg)


@pytest.mark.parametrize("name", ASYNC)
def test_an_asynchronous_configuration(name, here):
    cfg, summary = checked(name)
    assert summary.startswith("model      ")
    section, generation = cfg.grpo.async_grpo, cfg.policy.generation
    words = dict(word.split("=") for word in ASYNC[name]["set"].split())
    assert section.enabled and section.max_age == 1 and not generation.colocated.enabled
    key = "grpo.async_grpo.in_flight_weight_updates"
    assert section.in_flight_weight_updates == (words.get(key, "false") == "true")
    resources = "policy.generation.colocated.resources"
    assert generation.num_generators == int(words[f"{resources}.gpus_per_node"]) * int(words[f"{resources}.num_nodes"])


@pytest.mark.parametrize(
    ("key", "settings"),
    [  # the performance recipes as a whole: their trainer is Megatron; and settings that the correction forbids
        ("policy.megatron_cfg.enabled", "policy.megatron_cfg.enabled=true policy.dtensor_cfg.enabled=false"),
        ("policy.generation.vllm_cfg.precision: expected", "policy.generation.vllm_cfg.precision=fp8"),
        ("loss_fn.use_importance_sampling_correction", "loss_fn.use_importance_sampling_correction=false"),
        ("grpo.async_grpo.max_generation_failures", "grpo.async_grpo.max_generation_failures=3"),
    ],
)
def test_what_an_asynchronous_configuration_may_not_have(key, settings, here):
    with pytest.raises(ConfigError, match=key):
        checked("grpo-llama3.1-8b-instruct-2n8g-async-1off.yaml", *settings.split())


# ------------------------------------------------------------------------------------------------------- two steps

SMALL = ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=16"]
SMALL += ["grpo.max_num_steps=2", "policy.max_total_sequence_length=1024", "policy.generation.max_new_tokens=24"]
SMALL += ["policy.generation.vllm_cfg.tensor_parallel_size=1", "grpo.max_val_samples=4", "grpo.val_period=2"]
SMALL += ["env.math.num_workers=1", "checkpointing.checkpoint_dir=null"]
GENERATE = "policy.generation.colocated.resources."
RUNS = {  # recipe -> more overrides, of sizes
    "grpo_math_1B": [],
    "recipes/llm/dapo-qwen2.5-7b.v2": ["grpo.reward_shaping.overlong_buffer_length=8"],
    "recipes/llm/grpo-gspo-deepscaler-1.5b-8K": [],
    "gdpo_math_1B": [],
    "grpo_rm_1B": [],
    "grpo_sliding_puzzle": ["grpo.max_rollout_turns=3"],
    "recipes/llm/grpo-llama3.2-1b-instruct-1n8g-fsdp2tp2-temp0.8-topp0.9-topk50": [
        "policy.max_total_sequence_length=512"
    ],
    "grpo_multiple_datasets": [],
    "recipes/llm/grpo-llama3.2-1b-instruct-1n8g-fsdp2tp1.v3": ["policy.max_total_sequence_length=512"],
    "recipes/llm/grpo-qwen3-8B-base-1n8g-fsdp2-lora": [],
    "recipes/llm/grpo-qwen3-8B-base-1n8g-fsdp2-lora-tq_mooncake": [],
    "recipes/llm/grpo-llama3.1-8b-instruct-2n4g-fsdp2tp1-noncolocated": [f"{GENERATE}gpus_per_node=1"],
    "grpo_smoke": ["policy.tokenizer.name=Qwen/Qwen2.5-1.5B", "grpo.val_period=-1"],
}
RUNS["recipes/llm/dapo-qwen2.5-7b.v2"].append("grpo.reward_shaping.max_response_length=24")
METRICS = "loss probs_ratio probs_ratio_clamped token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error "
METRICS += "reward grad_norm lr global_valid_seqs global_valid_toks mean_prompt_length total_num_tokens advantages/mean"


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_two_steps(name, folder, tmp_path):
    """As a user starts it, from the directory of the recipes."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"OMP_NUM_THREADS": "1"}
    num_ranks = 2 if GENERATE in "".join(RUNS[name]) else 1
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    words = [ROOT / "grpo.py", f"examples/configs/{name}.yaml", *SMALL, *RUNS[name], f"logger.log_dir={tmp_path}"]
    words.append("logger.wandb_enabled=false")
    run = subprocess.run([*launch, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    assert "without effect here: " in run.stderr
    lines = (tmp_path / "exp_001" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    missing = {f"train/{metric}" for metric in METRICS.split()} - steps[1].keys()
    assert not missing, missing
    assert all(abs(line["train/loss"]) < 1e3 and line["train/token_mult_prob_error"] < 1.1 for line in steps)
