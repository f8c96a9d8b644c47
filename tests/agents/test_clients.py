"""Frameworks as they are installed, 8 rollouts each: every id that was drawn is trained once, and is the trainer's.

GRPO_CLIENTS names a folder with an environment for each, whose packages are not the trainer's:

    cd $GRPO_CLIENTS; python -m venv langgraph; langgraph/bin/pip install langgraph langchain-openai
    mkdir node; cd node; npm install openai
"""

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from agent_case import endpoint_of, gap_of, record_draws, sample, start
from dist_case import settings
from loop import train_once
from two_nodes import free_port

from config import AgentConfig
from pack import pack_samples, to_device
from support.inputs.reader import load

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PROGRAMS = ROOT / "examples" / "agents", ROOT / "tests" / "agents" / "clients"
FOLDER = Path(os.environ.get("GRPO_CLIENTS", "/nonexistent"))
NUM_ROLLOUTS = 8
MAX_TOKENS = 16384  # room for the prompts of smolagents, in bytes
PACKAGES = {  # of each environment
    "openai": "the trainer's own",
    "node": "npm: openai",
    "langgraph": "langgraph langchain-openai",
    "smolagents": "smolagents openai",
    "inspect": "inspect-ai openai",
    "openenv": "openenv openai",
    "verifiers": "verifiers[openenv]==0.4.0 uv",
    "verifiers0": "verifiers==0.1.10",
    "agents_sdk": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim[openai]",
    "instructor": "instructor",
    "outlines": "outlines[openai]",
    "guidance": "guidance openai",
    "dspy": "dspy",
    "litellm": "litellm",
    "anthropic": "anthropic",
    "agents_sdk_responses": "openai-agents",
    "litellm_bridges": "litellm",
}
PLACES = {"agents_sdk_responses": "agents_sdk", "litellm_bridges": "litellm"}  # whose environment it shares
ONE_ROW = ("openai", "node", "langgraph", "inspect", "openenv", "verifiers", "verifiers0")  # in each rollout


@pytest.fixture(scope="module")
def case(tmp_path_factory, one_rank):
    found = start(tmp_path_factory.mktemp("clients"), *one_rank, max_tokens=MAX_TOKENS)
    found.endpoint = endpoint_of(found)
    yield found
    found.endpoint.shut_down()


@pytest.fixture(scope="module")
def openenv_url():
    """Of the examples' server."""
    port = free_port()
    with subprocess.Popen([FOLDER / "openenv/bin/python", EXAMPLES / "openenv_server.py", str(port)]) as server:
        try:
            transport = httpx.HTTPTransport(retries=10)  # waits longer each time: 256 s at most
            httpx.Client(transport=transport).get(f"http://127.0.0.1:{port}/schema").raise_for_status()
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def client_of(name, tmp_path, request):
    """The agent, and its arguments."""
    needed = {"openai": set(), "verifiers": {"verifiers", "openenv"}}.get(name, {PLACES.get(name, name)})
    if absent := [f"{name} ({PACKAGES[name]})" for name in needed if not (FOLDER / name).is_dir()]:
        pytest.skip(f"GRPO_CLIENTS={FOLDER} has no environment {', '.join(absent)}")
    if name in ("openenv", "verifiers"):
        [config] = EXAMPLES.glob(f"{name}_*.yaml")
        cfg = load(config)
        kwargs = cfg.env.custom[name]
        place = kwargs["environment"]["taskset"] if name == "verifiers" else kwargs
        place["base_url" if name == "verifiers" else "url"] = request.getfixturevalue("openenv_url")
        of_uv = [key for key in os.environ if key.startswith("UV_") or key == "SSL_CERT_FILE"]
        agent = replace(cfg.env.agents[0], pass_env=(*cfg.env.agents[0].pass_env, *of_uv))
        return replace(agent, python=str(FOLDER / name / "bin/python")), kwargs
    if name == "node":
        program = shutil.copy(PROGRAMS / "openai_node.mjs", tmp_path)
        (tmp_path / "node_modules").symlink_to(FOLDER / "node/node_modules")
        return AgentConfig(name=name, command=("node", program), num_workers=4), {}
    python = None if name == "openai" else str(FOLDER / PLACES.get(name, name) / "bin/python")
    function = f"tests.agents.clients.{name}_client:solve"
    return AgentConfig(name=name, function=function, python=python, num_workers=4), {}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_framework_is_trained_token_for_token(case, name, tmp_path, monkeypatch, request):
    client, kwargs = client_of(name, tmp_path, request)
    drawn = record_draws(case.engine, monkeypatch)
    inputs = [(name, f"{n}+7") for n in range(NUM_ROLLOUTS // 4)]
    samples = sample(case, [client], inputs, num_samples=4, **{name: kwargs})
    assert [(s.grade.message, s.grade.outcome in ("ok", "wrong")) for s in samples] == [("", True)] * NUM_ROLLOUTS
    rows = [row for s in samples for row in (s, *s.forks)]
    trained = Counter()
    for row in rows:
        ids = (*row.prompt_ids, *row.output_ids.tolist())
        edges = np.flatnonzero(np.diff(np.r_[False, row.mask, False])) + len(row.prompt_ids)
        trained.update((ids[:begin], ids[begin:end]) for begin, end in edges.reshape(-1, 2))
    assert trained == drawn and sum(drawn.values()) > NUM_ROLLOUTS
    assert (len(rows) == NUM_ROLLOUTS) == (name in ONE_ROW)
    micros = [to_device(pack, torch.device("cpu")) for pack in pack_samples([[row] for row in rows], MAX_TOKENS)]
    gap = max(gap_of(case, micro) for micro in micros)
    assert gap < 2e-5
    cfg = settings(policy={"max_total_sequence_length": MAX_TOKENS})
    metrics, _ = train_once(case.policy, samples, None, cfg, case.ranks, step=3)
    assert metrics["global_valid_toks"] == sum(row.mask.sum() for row in rows)
    print(f"{name}: {sum(drawn.values())} replies, {len(rows)} rows, gap {float(gap):.1e}")
