// Vercel's AI SDK, by chat completions (@ai-sdk/openai-compatible) and by the Responses API (@ai-sdk/openai).
// `node ask_ai_sdk.mjs URL MODEL` prints a line for each check, as checks.py does.
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const chat = createOpenAICompatible({ name: "worker", baseURL: url, supportsStructuredOutputs: true })(model);
const responses = createOpenAI({ baseURL: url, apiKey: "none" }).responses(model);
const settings = { maxOutputTokens: 60, maxRetries: 0, temperature: 0 };
const OSLO = "What is the weather in Oslo?";
const FRANCE = "What is the capital of France?";
const person = z.object({ name: z.enum(["Ada", "Bob"]), age: z.number().int() });

const weather = () =>
  tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.enum(["Oslo", "Paris"]) }),
    execute: async ({ city }) => `It is raining in ${city}.`,
  });

// Further fields of the request by which the model calls the tool for these cities.
const writing = (...cities) => {
  const call = (city) => `<tool_call>{"name": "getWeather", "arguments": {"city":"${city}"}}</tool_call>`;
  const text = cities.map(call).join("\n");
  return { worker: { logits_processors: [{ name: "forced_prefix", args: { text } }] } };
};

const cities = (calls) => calls.map((call) => call.input.city);

const checks = {
  async plain() {
    const { text, usage } = await generateText({ model: chat, prompt: FRANCE, ...settings });
    assert.equal(text, "The capital of France is Paris.");
    assert.ok(usage.outputTokens > 0);
  },
  async plain_stream() {
    let text = "";
    for await (const part of streamText({ model: chat, prompt: FRANCE, ...settings }).textStream) text += part;
    assert.equal(text, "The capital of France is Paris.");
  },
  async structured() {
    const prompt = "Ada is 36 years old. Give her name and age as JSON.";
    const { output } = await generateText({ model: chat, prompt, output: Output.object({ schema: person }), ...settings });
    assert.deepEqual(output, { name: "Ada", age: 36 });
  },
  async tools() {
    const asked = { model: chat, prompt: OSLO, tools: { getWeather: weather() }, ...settings };
    await generateText(asked);
    const { toolCalls } = await generateText({ ...asked, providerOptions: writing("Oslo") });
    assert.equal(cities(toolCalls)[0], "Oslo");
  },
  async tools_streamed() {
    const found = [];
    const asked = { model: chat, prompt: OSLO, tools: { getWeather: weather() }, ...settings };
    for await (const part of streamText({ ...asked, providerOptions: writing("Oslo") }).fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      if (part.type === "tool-call") found.push(part);
    }
    assert.equal(cities(found)[0], "Oslo");
  },
  async parallel() {
    const asked = { model: chat, prompt: OSLO, tools: { getWeather: weather() }, ...settings };
    const { toolCalls } = await generateText({ ...asked, providerOptions: writing("Oslo", "Paris") });
    assert.deepEqual(cities(toolCalls).slice(0, 2), ["Oslo", "Paris"]);
  },
  async required() {
    for (const toolChoice of ["required", { type: "tool", toolName: "getWeather" }]) {
      const asked = { model: chat, prompt: OSLO, tools: { getWeather: weather() }, toolChoice, ...settings };
      const { toolCalls } = await generateText({ ...asked, providerOptions: { worker: { parallel_tool_calls: false } } });
      assert.equal(toolCalls.length, 1);
    }
  },
  async round_trip() {
    const { steps } = await generateText({
      model: chat,
      prompt: OSLO,
      tools: { getWeather: weather() },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) =>
        stepNumber === 0 ? { providerOptions: writing("Oslo") } : { toolChoice: "none" },
      ...settings,
    });
    assert.equal(steps.length, 2);
    assert.equal(steps[0].toolResults[0].output, "It is raining in Oslo.");
    assert.ok(steps[1].text);
  },
  async responses() {
    const { text } = await generateText({ model: responses, prompt: FRANCE, ...settings });
    assert.match(text, /Paris/);
    let streamed = "";
    for await (const part of streamText({ model: responses, prompt: FRANCE, ...settings }).textStream) streamed += part;
    assert.equal(streamed, text);
  },
  async responses_tools() {
    const { steps } = await generateText({
      model: responses,
      prompt: OSLO,
      tools: { getWeather: weather() },
      stopWhen: stepCountIs(2),
      providerOptions: { openai: { parallelToolCalls: false } },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      ...settings,
    });
    assert.equal(steps[0].toolCalls.length, 1);
    assert.ok(steps[1].text);
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
