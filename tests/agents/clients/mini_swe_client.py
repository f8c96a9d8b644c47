"""mini-swe-agent over LiteLLM: commands in a shell, as calls of a tool."""

import tempfile

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

TEXTS = {"system_template": "Add.", "instance_template": "{{task}}"}


def solve(base_url, messages):
    access = {"api_base": base_url, "api_key": "none"}
    model = LitellmModel(model_name="openai/policy", model_kwargs=access, cost_tracking="ignore_errors")
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), step_limit=3, cost_limit=0, **TEXTS)
        result = agent.run(messages[-1]["content"])
    return 0.5 + len(str(result)) % 2
