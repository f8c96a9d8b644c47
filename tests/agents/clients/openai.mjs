// openai for Node: a tool, then a stream. It finds the URL in OPENAI_BASE_URL.
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const row = JSON.parse(await text(process.stdin));
const client = new OpenAI();
const tools = [{ type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } }];
const messages = [{ role: "user", content: row.input }];
for (let turn = 0; turn < 2; turn++) {
  const reply = (await client.chat.completions.create({ model: "gpt-4o", messages, tools })).choices[0].message;
  messages.push(reply);
  for (const call of reply.tool_calls ?? [])
    messages.push({ role: "tool", tool_call_id: call.id, content: call.function.arguments });
  messages.push({ role: "user", content: "Go on." });
}
let length = 0;
for await (const chunk of await client.chat.completions.create({ model: "gpt-4o", messages, tools, stream: true }))
  length += chunk.choices[0]?.delta?.content?.length ?? 0;
console.log(length % 2);
