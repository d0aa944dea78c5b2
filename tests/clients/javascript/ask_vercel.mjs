// The Vercel AI SDK with this client's selections and receipts: `node ask_vercel.mjs URL MODEL`.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { logitsProcessors, metadataExtractor, processors as p } from "dynamo-logits-client";

const [baseURL, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "dynamo", baseURL, metadataExtractor });
const chosen = logitsProcessors([p.choice({ choices: ["yes", "no"] })], { receipt: true });
const asked = {
  model: provider(model),
  prompt: "Is water wet?",
  temperature: 0,
  maxRetries: 0,
  providerOptions: { dynamo: chosen },
};

function checkReceipt(metadata) {
  const [receipt] = metadata.dynamoLogits.receipts;
  assert.equal(receipt.processors[0].name, "choice");
  assert(receipt.processors[0].steps_active > 0);
}

const checks = {
  async text() {
    const { text, providerMetadata } = await generateText(asked);
    assert(["yes", "no"].includes(text), text);
    checkReceipt(providerMetadata);
  },
  async stream() {
    const result = streamText(asked);
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert(["yes", "no"].includes(text), text);
    checkReceipt(await result.providerMetadata);
  },
  async errors() {
    const wrong = { ...asked, providerOptions: { dynamo: { no_such_field: 1 } } };
    await assert.rejects(generateText(wrong), /no_such_field/);
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`passed ${name}`);
  } catch (error) {
    console.log(`FAILED ${name}\n${error.stack}`);
    process.exitCode = 1;
  }
}
