// The AI SDK: its default OpenAI provider (responses), the compatible one (chat completions) and Anthropic's; a tool, a
// stream and an object.
import { text } from "node:stream/consumers";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, NoObjectGeneratedError, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const row = JSON.parse(await text(process.stdin));
const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = "none";
const models = [
  createOpenAI({ baseURL, apiKey })("policy"),
  createOpenAICompatible({ name: "run", baseURL, apiKey })("policy"),
  createAnthropic({ baseURL, apiKey })("policy"),
];
const f = tool({
  description: "Looks q up.",
  inputSchema: z.object({ q: z.number() }),
  execute: async ({ q }) => `${q} is ${q % 7} modulo 7`,
});
let length = 0;
for (const model of models) {
  const ask = { model, prompt: row.input, tools: { f }, stopWhen: stepCountIs(3), maxRetries: 0 };
  length += (await generateText(ask)).text.length;
  for await (const piece of streamText({ ...ask, onError: ({ error }) => { throw error; } }).textStream)
    length += piece.length;
  try {
    const schema = z.object({ total: z.number() });
    length += (await generateObject({ model, prompt: row.input, schema, maxRetries: 0 })).object.total;
  } catch (error) {
    if (!NoObjectGeneratedError.isInstance(error)) throw error; // the policy's text is no such object
  }
}
console.log(0.5 + (length % 2));
