"""CrewAI: a crew of one agent with a tool."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("f")
def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    llm = LLM(model="openai/policy", base_url=base_url, api_key="none")
    adder = Agent(role="adder", goal="add", backstory="none", llm=llm, tools=[f], max_iter=3, max_retry_limit=0)
    task = Task(description=messages[-1]["content"], expected_output="the sum", agent=adder)
    result = Crew(agents=[adder], tasks=[task], verbose=False).kickoff()
    return 0.5 + len(str(result)) % 2
