// Is compiled, and never run: the types take what is right, and refuse what is wrong.

import { Client, fromOpenAITools, healed, logitsProcessors, metadataExtractor, processors as p } from "dynamo-logits-client";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

createOpenAICompatible({ name: "dynamo", baseURL: "http://127.0.0.1:8000/v1", metadataExtractor });

export async function used(): Promise<string> {
  const client = new Client({ timeoutMs: 1000 });
  const [prompt, entry] = healed("I am inter");
  await client.complete({ model: "m", prompt, ...logitsProcessors([entry, p.dry()]) });
  const chosen = [p.json_schema({ schema: { type: "object" } }), p.min_tokens({ n: 8, scope: "answer" })];
  const answer = await client.chat({ model: "m", messages: [], ...logitsProcessors(chosen, { receipt: true }) });
  for await (const chunk of client.streamChat({ model: "m", messages: [] })) chunk.receipt?.seed.toFixed();
  fromOpenAITools([{ type: "function", function: { name: "f" } }], { format: "hermes" });
  // @ts-expect-error: n is a number
  p.min_tokens({ n: "8" });
  // @ts-expect-error: n is missing
  p.min_tokens({});
  // @ts-expect-error: there is no such argument
  p.min_tokens({ n: 8, m: 1 });
  // @ts-expect-error: there is no such scope
  p.min_tokens({ n: 8, scope: "prompt" });
  // @ts-expect-error: there is no such processor
  p.chioce({ choices: ["a"] });
  // @ts-expect-error: a method streams
  client.chat({ model: "m", messages: [], stream: true });
  return `${answer.text} ${answer.receipt?.processors[0]?.name}`;
}
