// anthropic for Node: a tool, then a stream. It finds the URL in ANTHROPIC_BASE_URL.
import { text } from "node:stream/consumers";
import Anthropic from "@anthropic-ai/sdk";

const row = JSON.parse(await text(process.stdin));
const client = new Anthropic({ maxRetries: 0 });
const ask = { model: "policy", max_tokens: 16, system: "Be brief." };
const tools = [{ name: "f", input_schema: { type: "object", properties: { q: { type: "integer" } } } }];
const messages = [{ role: "user", content: row.input }];
for (let turn = 0; turn < 2; turn++) {
  const { content } = await client.messages.create({ ...ask, messages, tools });
  messages.push({ role: "assistant", content });
  const next = [];
  for (const block of content)
    if (block.type === "tool_use")
      next.push({ type: "tool_result", tool_use_id: block.id, content: JSON.stringify(block.input) });
  messages.push({ role: "user", content: [...next, { type: "text", text: "Go on." }] });
}
const stream = client.messages.stream({ ...ask, messages, tools });
const { content } = await stream.finalMessage();
console.log(0.5 + (JSON.stringify(content).length % 2));
