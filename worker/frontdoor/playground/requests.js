// The request: its body, the same as commands to copy, and what comes back. No document is needed here.

const STREAMED = ["stream", "stream_options", "logprobs", "top_logprobs"];

/** Alternatives that an answer brings of each token. */
export const NUM_ALTERNATIVES = 5;

/**
 * The body of a chat request.
 *
 * @param {string} model
 * @param {object[]} messages
 * @param {object} sampling      further fields
 * @param {object[]} processors  {name, args} of each
 */
export function bodyOf(model, messages, sampling, processors) {
  return {
    model,
    messages,
    ...sampling,
    logits_processors: { processors, receipt: "debug" },
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: NUM_ALTERNATIVES,
  };
}

/** The request without what only the page needs of it: the stream and the log probabilities. */
export function plain(body) {
  const kept = Object.entries(body).filter(([name]) => !STREAMED.includes(name));
  const fields = Object.fromEntries(kept);
  if (body.logits_processors.processors.length === 0) delete fields.logits_processors;
  return fields;
}

const KEY_VARIABLE = "API_KEY";

/** The request as a command for a shell. */
export function asCurl(body, baseUrl, needsKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quoted(`${baseUrl}/chat/completions`)}`, "-H 'Content-Type: application/json'"];
  if (needsKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${quoted(JSON.stringify(plain(body), null, 2))}`);
  return lines.join(" \\\n  ");
}

const OPENAI_FIELDS = [
  ...["model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop"],
  ...["presence_penalty", "frequency_penalty"],
];

/** The request as a program with the openai package; extra_body carries what it has no argument for. */
export function asPython(body, baseUrl, needsKey) {
  const fields = Object.entries(plain(body));
  const own = fields.filter(([name]) => OPENAI_FIELDS.includes(name));
  const extra = fields.filter(([name]) => !OPENAI_FIELDS.includes(name));
  if (extra.length) own.push(["extra_body", Object.fromEntries(extra)]);
  const key = needsKey ? `os.environ["${KEY_VARIABLE}"]` : '"unused"';
  const hasReceipt = "logits_processors" in Object.fromEntries(extra);
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonOf(baseUrl)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...own.map(([name, value]) => `    ${name}=${pythonOf(value, 4, name.length + 1)},`),
    ")",
    "print(answer.choices[0].message.content)",
    ...(hasReceipt ? ['print(answer.nvext["engine_data"]["logits_processors"])'] : []),
    "",
  ].join("\n");
}

const WIDTH = 88;

/** A JSON value as a Python expression, broken into lines where it is longer than one. */
export function pythonOf(value, indent = 0, prefix = 0) {
  const line = onOneLine(value);
  if (indent + prefix + line.length < WIDTH || typeof value !== "object" || value === null) return line;
  const inside = indent + 4;
  const parts = Array.isArray(value)
    ? value.map((each) => pythonOf(each, inside))
    : Object.entries(value).map(([key, each]) => `${asText(key)}: ${pythonOf(each, inside, key.length + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const lines = parts.map((part) => `${" ".repeat(inside)}${part},\n`);
  return `${open}\n${lines.join("")}${" ".repeat(indent)}${close}`;
}

function onOneLine(value) {
  if (Array.isArray(value)) return `[${value.map(onOneLine).join(", ")}]`;
  if (value === null) return "None";
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([key, each]) => `${asText(key)}: ${onOneLine(each)}`);
    return `{${entries.join(", ")}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return typeof value === "string" ? asText(value) : String(value);
}

/** A text in the syntax that JSON and Python share. */
const asText = (text) => JSON.stringify(text).replace(/[\p{Cc}\u2028\u2029]/gu, escaped);

const escaped = (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;

/** Reads server-sent events from the pieces of a stream. */
export class EventReader {
  #rest = "";

  /** The events that end in this piece, as {event, data, comment} with texts. */
  feed(text) {
    this.#rest += text;
    const blocks = this.#rest.split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.map(eventOf);
  }
}

function eventOf(block) {
  const found = { event: "", data: [], comment: [] };
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (name === "event") found.event = value;
    if (name === "data") found.data.push(value);
    if (name === "") found.comment.push(value);
  }
  return { event: found.event, data: found.data.join("\n"), comment: found.comment.join("\n") };
}

/**
 * What an error says: {message, segments}. The segments lead to the field of the processors' forms, or
 * to the request's field, that is to blame; there are none if the error names no field.
 *
 * @param {string} text an answer's body in the shape of OpenAI's errors, or of Dynamo's
 */
export function problemOf(text) {
  let message = text;
  let param;
  try {
    const data = JSON.parse(text);
    const error = data.error ?? data;
    message = String(error.message ?? text);
    param = error.param;
  } catch {
    // not JSON: a proxy's page, or nothing
  }
  const path = param ?? PATH.exec(message)?.[1] ?? "";
  return { message, segments: segmentsOf(path) };
}

const PATH = /(?:^|\s)([A-Za-z_]+(?:\.\w+|\[\d+\])*): /;

/** `logits_processors.processors[0].args.k` as ["processors", "0", "args", "k"]; `seed` as ["seed"]. */
export function segmentsOf(path) {
  const segments = path.match(/[^.[\]]+/g) ?? [];
  if (segments[0] === "logits_processors") segments.shift();
  if (["sampling_options", "stop_conditions"].includes(segments[0])) segments.shift();
  return /^\d+$/.test(segments[0]) ? ["processors", ...segments] : segments;
}
