"""NeMo RL's asynchronous configurations of dense models: --check takes each, over the recipe that it is for."""

from pathlib import Path

import pytest
import yaml
from nemo_folder import RECIPES, make_folder

import envs
from check import preflight
from config import ConfigError
from graders.environments import make_environment

CASES = yaml.safe_load((Path(__file__).resolve().parents[1] / "helpers/nemo_async.yaml").read_text())
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not RECIPES.exists(), reason=f"{RECIPES} is not here")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemo")
    make_folder(path)
    return path


@pytest.fixture
def check(folder, monkeypatch):
    """(config, its summary) of a case with more settings."""
    monkeypatch.chdir(folder)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environments = {"math": envs.Environment()}  # without processes

    def without_workers(name, cfg, num_ranks):
        return environments.get(name) or make_environment(name, cfg, num_ranks)

    monkeypatch.setattr(preflight, "make_environment", without_workers)

    def run(name, *more):
        words = [f"examples/configs/{CASES[name]['over']}.yaml", *CASES[name]["set"].split(), *more]
        cfg = preflight.parse_command_line(["--check", *words], "")
        return cfg, preflight.check(cfg)

    return run


@pytest.mark.parametrize("name", CASES)
def test_check_takes_it(name, check):
    cfg, summary = check(name)
    assert summary.startswith("model      ")
    section, generation = cfg.grpo.async_grpo, cfg.policy.generation
    words = dict(word.split("=") for word in CASES[name]["set"].split())
    assert section.enabled and section.max_age == 1 and not generation.colocated.enabled
    key = "grpo.async_grpo.in_flight_weight_updates"
    assert section.in_flight_weight_updates == (words.get(key, "false") == "true")
    resources = "policy.generation.colocated.resources"
    assert generation.num_generators == int(words[f"{resources}.gpus_per_node"]) * int(words[f"{resources}.num_nodes"])


def test_what_is_refused_has_its_key(check):
    """The performance recipes as a whole: their trainer is Megatron. Two settings that the correction forbids."""
    name = "grpo-llama3.1-8b-instruct-2n8g-async-1off.yaml"
    megatron = ("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false")
    for key, *settings in (
        ("policy.megatron_cfg.enabled", *megatron),
        ("policy.generation.vllm_cfg.precision: expected", "policy.generation.vllm_cfg.precision=fp8"),
        ("loss_fn.use_importance_sampling_correction", "loss_fn.use_importance_sampling_correction=false"),
        ("grpo.async_grpo.max_generation_failures", "grpo.async_grpo.max_generation_failures=3"),
    ):
        with pytest.raises(ConfigError, match=key):
            check(name, *settings)
