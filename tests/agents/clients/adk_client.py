"""Google's ADK over LiteLLM: an agent with a tool and a sub-agent."""

from google.adk.agents import Agent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


async def solve(base_url, messages):
    model = LiteLlm(model="openai/policy", api_base=base_url, api_key="none")
    other = Agent(name="other", model=model, description="says more", instruction="Say more.")
    adder = Agent(name="adder", model=model, instruction="Add.", tools=[f], sub_agents=[other])
    runner = InMemoryRunner(adder, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="user")
    asked = Content(role="user", parts=[Part(text=messages[-1]["content"])])
    limits = RunConfig(max_llm_calls=3)
    length = 0
    try:
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=asked, run_config=limits
        ):
            length += len(str(event.content))
    except LlmCallsLimitExceededError:
        return 0
    return 0.5 + length % 2
