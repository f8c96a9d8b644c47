// OpenAI's Agents SDK for JavaScript by its default, the responses wire: a tool, a stream and a structured output.
import { text } from "node:stream/consumers";
import { Agent, AgentsError, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
const row = JSON.parse(await text(process.stdin));
const f = tool({
  name: "f",
  description: "Looks q up.",
  parameters: z.object({ q: z.number() }),
  execute: async ({ q }) => `${q} is ${q % 7} modulo 7`,
});
const adder = new Agent({ name: "adder", instructions: "Add.", model: "policy", tools: [f] });
const outputType = z.object({ total: z.number() });
const typed = new Agent({ name: "typed", instructions: "Add.", model: "policy", outputType });
let length = 0;
for (const [agent, stream] of [[adder, false], [adder, true], [typed, false]]) {
  try {
    const result = await run(agent, row.input, { maxTurns: 3, stream });
    if (stream) await result.completed;
    length += String(result.finalOutput).length;
  } catch (error) {
    if (!(error instanceof AgentsError)) throw error; // too many turns; a text that is no such object
  }
}
console.log(0.5 + (length % 2));
