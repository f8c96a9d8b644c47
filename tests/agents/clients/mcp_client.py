"""A loop over the tools of an MCP server, which each rollout starts for itself."""

import json
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI

SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def f(q: int) -> str:
    "Looks q up."
    return f"{q} is {q % 7} modulo 7"


server.run("stdio")
"""


async def solve(base_url, messages):
    client, messages = AsyncOpenAI(base_url=base_url, api_key="none"), list(messages)
    started = StdioServerParameters(command=sys.executable, args=["-c", SERVER])
    async with stdio_client(started) as (reader, writer), ClientSession(reader, writer) as server:
        await server.initialize()
        tools = []
        for tool in (await server.list_tools()).tools:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            reply = answer.choices[0].message
            messages.append(reply)
            for call in reply.tool_calls or ():
                result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})
            if not reply.tool_calls:
                break
    return 0.5 + len(str(messages[-1])) % 2
