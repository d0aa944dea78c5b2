// The JavaScript client in Node: `node ask_module.mjs URL MODEL`; a line for each check.

import assert from "node:assert/strict";

import {
  Client,
  Refused,
  TimedOut,
  Unreachable,
  healed,
  logitsProcessors,
  processors as p,
  replayRequest,
} from "dynamo-logits-client";

const [baseURL, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 24 };
const client = new Client({ baseURL });

async function gathered(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.text;
  return text;
}

const checks = {
  async chat_and_its_receipt() {
    const chosen = [p.choice({ choices: ["yes", "no"] }), p.min_tokens({ n: 1 })];
    const answer = await client.chat({ ...greedy, ...logitsProcessors(chosen, { receipt: "debug" }) });
    assert(["yes", "no"].includes(answer.text), answer.text);
    assert.equal(answer.receipt.model.name, model);
    assert.equal(answer.receipt.processors[0].name, "choice");
    assert.equal(answer.receipt.tokens[0].processor, "choice");
  },
  async stream() {
    const whole = (await client.chat(greedy)).text;
    const fields = logitsProcessors([], { receipt: true, nvext: { annotations: ["token_ids"] } });
    const stream = client.streamChat({ ...greedy, stream_options: { include_usage: true }, ...fields });
    assert.equal(await gathered(stream), whole);
    const { texts, receipts, promptTokenIds, usage } = stream.read;
    assert.equal(texts[0], whole);
    assert.equal(receipts[0].prompt_length, promptTokenIds.length);
    assert.equal(usage.prompt_tokens, promptTokenIds.length);
  },
  async choices() {
    const fields = { ...greedy, n: 3, seed: 7, temperature: 1.5, ...logitsProcessors([], { receipt: true }) };
    const answer = await client.chat(fields);
    assert.equal(new Set(answer.texts).size, 3);
    const stream = client.streamChat(fields);
    await gathered(stream);
    assert.deepEqual(Object.values(stream.read.texts), answer.texts);
    assert.deepEqual(Object.values(stream.read.receipts).map((each) => each.answer_digest), answer.receipts.map((each) => each.answer_digest));
  },
  async completion_with_token_healing() {
    const [prompt, entry] = healed("The capital of France is Par");
    const fields = { model, prompt, temperature: 0, max_tokens: 4, ...logitsProcessors([entry]) };
    const answer = await client.complete(fields);
    assert(answer.text.startsWith(" Par"), answer.text);
    assert.equal(await gathered(client.streamCompletion(fields)), answer.text);
  },
  async catalogue_and_models() {
    assert.deepEqual(await client.models(), [model]);
    assert.deepEqual((await client.catalogue()).map((each) => each.name), Object.keys(p));
  },
  async errors() {
    const refused = (param) => (error) => error instanceof Refused && error.status === 400 && error.param === param;
    await assert.rejects(client.chat({ ...greedy, n: 129 }), refused("n"));
    await assert.rejects(gathered(client.streamChat({ ...greedy, no_such_field: 1 })), refused("no_such_field"));
    await assert.rejects(new Client({ baseURL: "http://127.0.0.1:9/v1" }).models(), Unreachable);
    const impatient = new Client({ baseURL, timeoutMs: 1 });
    await assert.rejects(impatient.chat({ ...greedy, max_tokens: 400, ignore_eos: true }), TimedOut);
    const signal = AbortSignal.timeout(50);
    await assert.rejects(client.chat({ ...greedy, max_tokens: 400, ignore_eos: true }, { signal }), { name: "TimeoutError" });
  },
  async a_stream_that_is_left() {
    for (let time = 0; time < 4; time++) {
      for await (const _ of client.streamChat({ ...greedy, max_tokens: 400, ignore_eos: true })) break;
    }
    assert.equal((await client.chat(greedy)).data.choices.length, 1);
  },
  async replay_files() {
    const answer = await client.chat({ ...greedy, temperature: 0.9, ...logitsProcessors([p.top_k({ k: 40 })], { receipt: true }) });
    const replay = replayRequest(answer, greedy);
    assert.deepEqual(Object.keys(replay.prompt), ["messages"]);
    assert.equal(JSON.parse(replay.receipt.request).processors[0].name, "top_k");
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
