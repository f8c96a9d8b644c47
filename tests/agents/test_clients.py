"""Frameworks as they are installed, 8 rollouts each: every id that was drawn is trained once, and is the trainer's.

GRPO_CLIENTS names a folder with an environment for each, whose packages are not the trainer's:

    cd $GRPO_CLIENTS; python -m venv langgraph; langgraph/bin/pip install langgraph langchain-openai
    mkdir node; cd node; npm install openai
"""

import json
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
from agent_case import OPTIONS, TEMPLATE, endpoint_of, gap_of, record_draws, sample, serve, start
from dist_case import settings
from loop import train_once
from two_nodes import free_port

from base.agents.endpoint import Endpoint
from base.agents.parser import Parsed
from base.hf.tokenizer import Tokenizer
from base.inputs.reader import load
from config import AgentConfig
from pack import pack_samples, rows_of, to_device
from records import Completion, make_tokens

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, CLIENTS = ROOT / "examples" / "agents", ROOT / "tests" / "agents" / "clients"
FOLDER = Path(os.environ.get("GRPO_CLIENTS", "/nonexistent"))
NUM_ROLLOUTS = 8
MAX_TOKENS = 16384  # room for the prompts of smolagents, in bytes
ENVIRONMENTS = {  # folder -> its packages
    "node": "npm: openai @anthropic-ai/sdk @openai/agents ai @ai-sdk/{openai,openai-compatible,anthropic} zod "
    "langchain @langchain/{langgraph,core,openai,anthropic}",
    "cli": "npm: @anthropic-ai/claude-code @openai/codex",
    "adk": "google-adk litellm",
    "ag2": "ag2[openai]",
    "agent_framework": "agent-framework-core agent-framework-openai",
    "agents_sdk": "openai-agents",
    "agno": "agno openai",
    "anthropic": "anthropic",
    "autogen": "autogen-agentchat autogen-ext[openai]",
    "crewai": "crewai",
    "dspy": "dspy",
    "guidance": "guidance openai",
    "haystack": "haystack-ai",
    "inspect": "inspect-ai openai",
    "instructor": "instructor",
    "langgraph": "langgraph langchain-openai",
    "litellm": "litellm",
    "llama_index": "llama-index-core llama-index-llms-openai-like",
    "mcp": "mcp openai",
    "mini_swe": "mini-swe-agent",
    "openenv": "openenv openai",
    "outlines": "outlines[openai]",
    "pydantic_ai": "pydantic-ai-slim[openai]",
    "smolagents": "smolagents openai",
    "strands": "strands-agents[openai]",
    "verifiers": "verifiers[openenv]==0.4.0 uv",
    "verifiers0": "verifiers==0.1.10",
}
PROGRAMS = {  # -> the environments that it needs
    "openai_client.py": (),
    "curl.sh": (),
    "openai.mjs": ("node",),
    "anthropic.mjs": ("node",),
    "agents_sdk.mjs": ("node",),
    "ai_sdk.mjs": ("node",),
    "langgraph.mjs": ("node",),
    "openenv_client.yaml": ("openenv",),
    "verifiers_env.yaml": ("verifiers", "openenv"),
    "agents_sdk_responses_client.py": ("agents_sdk",),
    "litellm_bridges_client.py": ("litellm",),
}
for environment in ENVIRONMENTS:
    if (CLIENTS / f"{environment}_client.py").exists():
        PROGRAMS[f"{environment}_client.py"] = (environment,)
ONE_ROW = {  # in each rollout: a conversation that only grows
    "openai_client.py",
    "curl.sh",
    "openai.mjs",
    "anthropic.mjs",
    "openenv_client.yaml",
    "verifiers_env.yaml",
    "langgraph_client.py",
    "inspect_client.py",
    "verifiers0_client.py",
    "strands_client.py",
    "agno_client.py",
    "mcp_client.py",
    "haystack_client.py",
}


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


def client_of(program, tmp_path, request):
    """The agent, and its arguments."""
    for environment in PROGRAMS[program]:
        if not (FOLDER / environment).is_dir():
            pytest.skip(f"GRPO_CLIENTS={FOLDER} has no environment {environment} ({ENVIRONMENTS[environment]})")
    name, _, kind = program.rpartition(".")
    if kind == "yaml":
        return example_of(program, request)
    if kind == "sh":
        command = ("bash", str(CLIENTS / program))
        return AgentConfig(name=name, command=command, num_workers=4), {}
    if kind == "mjs":
        copy = shutil.copy(CLIENTS / program, tmp_path)
        (tmp_path / "node_modules").symlink_to(FOLDER / "node/node_modules")
        return AgentConfig(name=name, command=("node", copy), num_workers=2), {}
    python = None
    if PROGRAMS[program]:
        python = str(FOLDER / PROGRAMS[program][0] / "bin/python")
    function = f"tests.agents.clients.{name}:solve"
    return AgentConfig(name=name, function=function, python=python, num_workers=2), {}


def example_of(program, request):
    """An agent of the examples, at a server that this test has started."""
    cfg = load(EXAMPLES / program)
    agent = cfg.env.agents[0]
    kwargs = cfg.env.custom[agent.name]
    if agent.name == "verifiers":
        kwargs["environment"]["taskset"]["base_url"] = request.getfixturevalue("openenv_url")
    else:
        kwargs["url"] = request.getfixturevalue("openenv_url")
    of_uv = [key for key in os.environ if key.startswith("UV_") or key == "SSL_CERT_FILE"]
    python = str(FOLDER / agent.name / "bin/python")
    return replace(agent, pass_env=(*agent.pass_env, *of_uv), python=python), kwargs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_framework_is_trained_token_for_token(case, program, tmp_path, monkeypatch, request):
    client, kwargs = client_of(program, tmp_path, request)
    drawn = record_draws(case.engine, monkeypatch)
    inputs = [(client.name, f"{n}+7") for n in range(NUM_ROLLOUTS // 4)]
    samples = sample(case, [client], inputs, num_samples=4, **{client.name: kwargs})
    assert [(s.grade.message, s.grade.outcome in ("ok", "wrong")) for s in samples] == [("", True)] * NUM_ROLLOUTS
    members = rows_of(samples)
    rows = [member.sequence for member in members]
    trained = Counter()
    for row in rows:
        ids = tuple(row.token_ids)
        edges = np.flatnonzero(np.diff(np.r_[False, row.tokens["mask"], False])) + len(row.prompt_ids)
        trained.update((ids[:begin], ids[begin:end]) for begin, end in edges.reshape(-1, 2))
    assert trained == drawn and sum(drawn.values()) > NUM_ROLLOUTS
    assert len(rows) == NUM_ROLLOUTS or program not in ONE_ROW
    micros = [
        to_device(pack, torch.device("cpu")) for pack in pack_samples([[member] for member in members], MAX_TOKENS)
    ]
    gap = max(gap_of(case, micro) for micro in micros)
    assert gap < 2e-5
    cfg = settings(policy={"max_total_sequence_length": MAX_TOKENS})
    metrics, _ = train_once(case.policy, samples, None, cfg, case.ranks, step=3)
    assert metrics["global_valid_toks"] == sum(row.tokens["mask"].sum() for row in rows)
    print(f"{program}: {sum(drawn.values())} replies, {len(rows)} rows, gap {float(gap):.1e}")


WRITE = "echo hi > hello.txt"
CODING = {  # program -> the tool with which it runs a command, its arguments, the calls of each row
    "claude_code.sh": ("Bash", {"command": WRITE, "description": "Writes."}, [2, 1]),  # and a title
    "codex.sh": ("exec_command", {"cmd": WRITE}, [2]),
}


class Script:
    """An engine that answers the first prompt with this tool by a call of it, and all others with a word."""

    weight_version, max_total_tokens = 3, 1 << 20  # their tools alone have 100,000 bytes

    def __init__(self, tokenizer, tool, arguments):
        self.tokenizer, self.tool, self.arguments = tokenizer, tool, arguments
        self.stop_token_ids = tokenizer.eos_token_ids
        self.is_idle, self.num_calls, self.unclaimed = True, 0, {}

    def start(self, prompts, seeds, options, priority):
        [prompt], [seed] = prompts, seeds
        text = "done"
        if f'"name": "{self.tool}"' in self.tokenizer.decode(prompt, special=True):
            self.num_calls += 1
            if self.num_calls == 1:
                text = json.dumps({"name": self.tool, "arguments": json.dumps(self.arguments)})
        ids = [*self.tokenizer.backend.encode(text).ids, self.stop_token_ids[0]]
        self.unclaimed[str(seed)] = Completion(make_tokens(ids, version=3, mask=True), "stop")
        return [str(seed)]

    def ids_so_far(self):
        return {}

    def step(self):
        return []


def parse(text, tools, *_):
    if tools and text.startswith("{"):
        return Parsed(None, None, [json.loads(text)])
    return Parsed(None, text, [])


parse.needs_special_tokens = parse.reads_calls = False
parse.content_of_beginning = lambda text, tools, *_: ""


@pytest.mark.parametrize("program", CODING)
def test_a_coding_agent_carries_out_a_sampled_call(program, tiny, one_rank, tmp_path):
    if not (FOLDER / "cli").is_dir():
        pytest.skip(f"GRPO_CLIENTS={FOLDER} has no environment cli ({ENVIRONMENTS['cli']})")
    tool, arguments, sizes = CODING[program]
    tokenizer = Tokenizer(tiny[0], TEMPLATE)
    endpoint = Endpoint(Script(tokenizer, tool, arguments), tokenizer, one_rank[0], parse)
    key, url = endpoint.open((1,), OPTIONS, -1, 20)
    path = f"{FOLDER / 'cli/node_modules/.bin'}:{os.environ['PATH']}"
    urls = {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    env = {"PATH": path, "TMPDIR": str(tmp_path), "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", **urls}

    def start():
        return subprocess.run(["bash", CLIENTS / program], env=env, capture_output=True, text=True)

    [ended] = serve(endpoint, [start], seconds=300.0)
    rows = endpoint.close(key).rows()
    endpoint.shut_down()
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert sorted(map(len, rows), reverse=True) == sizes and endpoint.server.faults == []
