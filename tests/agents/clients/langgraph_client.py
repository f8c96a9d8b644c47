"""LangGraph's agent with a tool, over langchain-openai."""

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


def f(q: int) -> str:
    """Looks q up."""
    return f"{q} is {q % 7} modulo 7"


def solve(base_url, messages):
    agent = create_react_agent(ChatOpenAI(model="gpt-4o", base_url=base_url, api_key="none"), [f])
    try:
        state = agent.invoke({"messages": messages}, {"recursion_limit": 7})
    except GraphRecursionError:  # it would call the tool for ever
        return 0
    return 0.5 + len(state["messages"][-1].content) % 2
