// LangChain's agent, which is a graph of LangGraph.js, with a tool, over OpenAI's and Anthropic's classes.
import { text } from "node:stream/consumers";
import { ChatAnthropic } from "@langchain/anthropic";
import { GraphRecursionError } from "@langchain/langgraph";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const row = JSON.parse(await text(process.stdin));
const f = tool(({ q }) => `${q} is ${q % 7} modulo 7`, {
  name: "f",
  description: "Looks q up.",
  schema: z.object({ q: z.number() }),
});
const baseURL = process.env.OPENAI_BASE_URL;
const models = [
  new ChatOpenAI({ model: "policy", maxRetries: 0, configuration: { baseURL } }),
  new ChatOpenAI({ model: "policy", maxRetries: 0, useResponsesApi: true, configuration: { baseURL } }),
  new ChatAnthropic({ model: "policy", maxRetries: 0, anthropicApiUrl: process.env.ANTHROPIC_BASE_URL }),
];
let length = 0;
for (const model of models) {
  try {
    const agent = createAgent({ model, tools: [f] });
    const state = await agent.invoke({ messages: [["user", row.input]] }, { recursionLimit: 7 });
    length += String(state.messages.at(-1).content).length;
  } catch (error) {
    if (!(error instanceof GraphRecursionError)) throw error; // it would call the tool for ever
  }
}
console.log(0.5 + (length % 2));
