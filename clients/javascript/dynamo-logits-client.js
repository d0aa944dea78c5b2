/**
 * Client of dynamo-logits-worker: logits processors by name, receipts, healing and replays.
 *
 * One module without dependencies, for Node 18 and later, browsers and the rest that has fetch.
 * Types are in dynamo-logits-client.d.ts.
 */

// Section of the catalogue's processors, written by scripts/generate_clients.py; do not edit.
export const VERSION = "0.1.0";
const ARGUMENTS = {
  cfg: [["scale"], ["negative_prompt", "negative_token_ids", "scope"]],
  contrastive: [[], ["alpha", "beta", "amateur_temperature", "scope"]],
  logit_bias: [["bias"], ["scope"]],
  sequence_bias: [["sequences"], ["scope"]],
  repetition_penalty: [["penalty"], ["window", "scope"]],
  frequency_penalty: [["penalty"], ["window", "scope"]],
  presence_penalty: [["penalty"], ["window", "scope"]],
  dry: [[], ["multiplier", "base", "allowed_length", "breakers", "range", "scope"]],
  cite_from_prompt: [[], ["boost", "conditional_boost", "scope"]],
  gen_length: [["boost"], ["power", "complete_sentences", "scope"]],
  exponential_decay_length: [["start", "factor"], ["scope"]],
  allowed_tokens: [["token_ids"], ["allow_end", "scope"]],
  banned_tokens: [["token_ids"], ["scope"]],
  bad_words: [[], ["words", "token_ids", "scope"]],
  phrase_ban: [["phrases"], ["scope"]],
  ban_scripts: [["scripts"], ["scope"]],
  no_repeat_ngram: [["n"], ["over", "scope"]],
  min_tokens: [["n"], ["scope"]],
  multiple_choice: [["choices"], ["boost", "scope"]],
  json_schema: [["schema"], ["compact", "scope"]],
  regex: [["pattern"], ["scope"]],
  choice: [["choices"], ["scope"]],
  grammar: [["lark"], ["scope"]],
  structural_tag: [["format"], ["scope"]],
  tool_calls: [["format", "tools"], ["choice", "tool", "parallel", "answer", "scope"]],
  forced_sequence: [[], ["text", "token_ids", "scope"]],
  forced_prefix: [[], ["text", "token_ids", "heal", "scope"]],
  force_last_phrase: [["text"], ["scope"]],
  trigger_phrase: [["text"], ["trigger", "after_tokens", "times", "scope"]],
  loop_stop: [[], ["max_period", "copies", "scope"]],
  thinking_budget: [["tokens"], ["grace", "message", "start", "end", "scope"]],
  temperature: [["value"], ["scope"]],
  dynamic_temperature: [["low", "high"], ["exponent", "scope"]],
  top_k: [["k"], ["scope"]],
  top_p: [["p"], ["scope"]],
  min_p: [["p"], ["scope"]],
  top_a: [["a"], ["scope"]],
  typical_p: [["p"], ["scope"]],
  top_n_sigma: [["n"], ["scope"]],
  epsilon_cutoff: [["epsilon"], ["scope"]],
  eta_cutoff: [["epsilon"], ["scope"]],
  xtc: [["probability"], ["threshold", "scope"]],
  mirostat: [[], ["tau", "eta", "scope"]],
  watermark: [["key_id"], ["context", "scope"]],
  synthid: [["key_id"], ["context", "depth", "scope"]],
};
// End of the section.

export const ANNOTATION = "logits_processors:";

/** One entry of a selection. */
export function processor(name, args = {}) {
  return { name, args };
}

/** A builder for each processor of the catalogue, which knows the names of its arguments. */
export const processors = Object.freeze(
  Object.fromEntries(Object.entries(ARGUMENTS).map(([name, names]) => [name, builder(name, ...names)])),
);

function builder(name, needed, others) {
  return (args = {}) => {
    const given = Object.keys(args).filter((key) => args[key] !== undefined);
    const unknown = given.find((key) => !needed.includes(key) && !others.includes(key));
    if (unknown !== undefined) {
      throw new TypeError(`${name}: unknown argument ${unknown}; known are ${[...needed, ...others].join(", ")}`);
    }
    const missing = needed.find((key) => !given.includes(key));
    if (missing !== undefined) throw new TypeError(`${name}: the argument ${missing} is missing`);
    return processor(name, Object.fromEntries(given.map((key) => [key, args[key]])));
  };
}

/** OpenAI's `logit_bias` as a processor. */
export function fromOpenAILogitBias(bias) {
  for (const [id, value] of Object.entries(bias)) {
    if (!/^\d+$/.test(id)) throw new TypeError(`logit_bias: expected token ids as keys, got ${JSON.stringify(id)}`);
    if (typeof value !== "number" || !(value >= -100 && value <= 100)) {
      throw new TypeError(`logit_bias[${id}]: expected a number between -100 and 100, got ${JSON.stringify(value)}`);
    }
  }
  const entries = Object.entries(bias).map(([id, value]) => [id.replace(/^0+(?=\d)/, ""), value]);
  const twice = entries.map(([id]) => id).find((id, index, ids) => ids.indexOf(id) !== index);
  if (twice !== undefined) throw new TypeError(`logit_bias: the token id ${twice} occurs twice`);
  return processor("logit_bias", { bias: Object.fromEntries(entries) });
}

/** OpenAI's `tools` and `tool_choice` as the processor `tool_calls`. */
export function fromOpenAITools(tools, { format, toolChoice = "auto", parallelToolCalls = true, ...args }) {
  const functionOf = (tool) => {
    if (tool?.type === "function" && typeof tool.function?.name === "string") return tool.function;
    throw new TypeError(`expected a function with a name, got ${JSON.stringify(tool)}`);
  };
  const none = { type: "object", properties: {}, additionalProperties: false };
  const wanted = { format, parallel: parallelToolCalls, ...args };
  wanted.tools = tools.map(functionOf).map(({ name, parameters }) => ({ name, parameters: parameters ?? none }));
  if (typeof toolChoice !== "string") {
    Object.assign(wanted, { choice: "required", tool: functionOf(toolChoice).name });
  } else if (["none", "auto", "required"].includes(toolChoice)) {
    wanted.choice = toolChoice;
  } else {
    throw new TypeError(`tool_choice: expected none, auto, required or a function, got ${JSON.stringify(toolChoice)}`);
  }
  return processor("tool_calls", wanted);
}

// White space as in Python, whose client takes the same words off.
const SPACE = "(?:(?!\\ufeff)[\\s\\x1c-\\x1f\\x85])";
const TAIL = new RegExp(`(?:${SPACE}{1,64}|${SPACE}?(?:(?!${SPACE})[^]){1,64})$`, "u");

/** Token healing at the end of a prompt: the prompt to send instead, and a processor. */
export function healed(prompt) {
  const tail = TAIL.exec(prompt);
  if (tail === null || tail.index === 0) throw new TypeError("expected a prompt of more than one word");
  return [prompt.slice(0, tail.index), processor("forced_prefix", { text: tail[0], heal: true })];
}

const SELECTION = ["receipt", "deadline", "order", "speculation", "prediction"];

/** Refuse a name that means nothing, which would be ignored. */
function checkNames(what, given, names) {
  const unknown = Object.keys(given).find((name) => !names.includes(name));
  if (unknown !== undefined) throw new TypeError(`${what}: unknown option ${unknown}; known are ${names.join(", ")}`);
}

/** A replacer of JSON.stringify, which would write such a number as null. */
function finite(key, value) {
  if (typeof value === "number" && !Number.isFinite(value)) throw new TypeError(`${key}: ${value} is not JSON`);
  return value;
}

/** The selection as ASCII JSON: the value of the annotation or of the header. */
export function selection(chosen, options = {}) {
  checkNames("selection", options, SELECTION);
  if (!Array.isArray(chosen)) throw new TypeError(`expected a list of processors, got ${JSON.stringify(chosen)}`);
  const { receipt = false, deadline, order = [], speculation = true, prediction = "" } = options;
  const data = { version: 1, processors: [...chosen], receipt };
  if (deadline !== undefined) data.deadline = deadline;
  if (order.length > 0) data.order = [...order];
  if (!speculation) data.speculation = false;
  if (prediction) data.prediction = prediction;
  const ascii = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(data, finite).replace(/[\x7f-\uffff]/g, ascii);
}

/** Fields of a request that select processors: spread them into its body. */
export function logitsProcessors(chosen = [], { nvext = {}, ...options } = {}) {
  const fields = { ...nvext, annotations: [...(nvext.annotations ?? []), ANNOTATION + selection(chosen, options)] };
  if (options.receipt) fields.extra_fields = [...new Set([...(nvext.extra_fields ?? []), "engine_data"])];
  return { nvext: fields };
}

/** Receipts by choice, of a whole answer or of one chunk of a stream. */
export function receiptsOf(answer) {
  const nvext = answer?.nvext ?? answer?.data?.nvext;
  if (nvext === null || typeof nvext !== "object") return [];
  const found = (nvext.choices ?? [nvext]).map((each) => each?.engine_data?.logits_processors ?? null);
  found.forEach((receipt, choice) => receipt === null || checkReceipt(receipt, `choices[${choice}]`));
  return found.some((receipt) => receipt !== null) ? found : [];
}

/** The receipt of one choice; null if the answer has none. */
export function receiptOf(answer, choice = 0) {
  return receiptsOf(answer)[choice] ?? null;
}

const RECEIPT = {
  ...{ version: "number", engine: "object", model: "object", mode: "string", numerics: "string", seed: "number" },
  ...{ prompt_length: "number", replayed_tokens: "number", processors: "object", prompt_digest: "string" },
  ...{ generated_tokens: "number", answer_digest: "string" },
};

function checkReceipt(receipt, path) {
  for (const [name, kind] of Object.entries(RECEIPT)) {
    if (typeof receipt[name] !== kind || receipt[name] === null) {
      throw new TypeError(`${path}.${name}: expected ${kind}, got ${JSON.stringify(receipt[name])}`);
    }
  }
}

/** Fields of a body that its prompt is made of. */
const TEMPLATE = ["chat_template_args", "chat_template_kwargs", "thinking", "reasoning_effort"];
const END = ["add_generation_prompt", "continue_final_message"];
const PROMPT = ["messages", "tools", ...TEMPLATE, ...END, "prompt"];

/** The two files of a replay: a receipt, and the prompt that it is of. */
export function replayRequest(answer, prompt, choice = 0) {
  const receipt = receiptOf(answer, choice);
  if (receipt === null) throw new TypeError("the answer has no receipt: ask for one with receipt: true");
  if (typeof receipt.request !== "string") {
    throw new TypeError("the receipt has no request: it comes with the chunk that has the finish reason");
  }
  if (!Number.isSafeInteger(receipt.seed)) throw new TypeError("the receipt's seed was rounded: JavaScript's numbers have 53 bits");
  if (typeof prompt === "string") return { receipt, prompt: { prompt } };
  if (Array.isArray(prompt)) return { receipt, prompt };
  const names = PROMPT.filter((name) => prompt[name] != null);
  if (!names.includes("messages") && !names.includes("prompt")) {
    throw new TypeError("the body has neither messages nor a prompt: give the prompt's token ids");
  }
  return { receipt, prompt: Object.fromEntries(names.map((name) => [name, prompt[name]])) };
}

/** A request that has no whole answer. */
export class ClientError extends Error {}

/** The server could not be reached, or the connection broke. */
export class Unreachable extends ClientError {}

/** Nothing arrived from the server within the client's timeout. */
export class TimedOut extends Unreachable {}

/** An answer with an error's status; `param` is the path of the field that is wrong. */
export class Refused extends ClientError {
  constructor(status, body) {
    const error = errorOf(body);
    super(`${status}: ${error.message}`);
    Object.assign(this, { status, param: error.param ?? null, type: error.type ?? null, code: error.code ?? null });
    this.detail = error.message;
  }
}

/** A streamed answer that ended with an error, or before its end. */
export class AnswerFailed extends ClientError {
  constructor(message, param = null) {
    super(message);
    this.param = param;
  }
}

for (const kind of [ClientError, Unreachable, TimedOut, Refused, AnswerFailed]) kind.prototype.name = kind.name;

function errorOf(body) {
  const data = parsed(body);
  const error = data?.error ?? data;
  if (typeof error?.message === "string") return error;
  if (typeof error === "string") return { message: error };
  // not JSON: another server's page, which is shown as it is
  return { message: body.slice(0, 1000) || "an answer without a body" };
}

/** JSON data, undefined for what is none. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** The JSON data of an event. */
function eventData(text) {
  const data = parsed(text);
  if (data !== undefined) return data;
  throw new AnswerFailed(`expected JSON, got ${text.slice(0, 200)}`);
}

/** A parser of server-sent events, from pieces of their text. */
export class EventReader {
  #rest = ""; // of the line that has not ended
  #half = false; // what has arrived ends with a carriage return: a line feed behind it ends no other line
  #event = { name: "", data: [], comment: [] };

  /** The events that end in this piece. */
  feed(piece) {
    if (piece === "") return [];
    const text = this.#half && piece.startsWith("\n") ? piece.slice(1) : piece;
    this.#half = piece.endsWith("\r");
    const lines = text.split(/\r\n|\n|\r/);
    lines[0] = this.#rest + lines[0];
    this.#rest = lines.pop();
    return lines.map((line) => this.#take(line)).filter((event) => event !== null);
  }

  #take(line) {
    if (line !== "") {
      const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
      if (field === "event") this.#event.name = value;
      else if (field === "data") this.#event.data.push(value);
      else if (field === "") this.#event.comment.push(value);
      return null;
    }
    const { name, data, comment } = this.#event;
    this.#event = { name: "", data: [], comment: [] };
    return name !== "" || data.length > 0 ? { name, data: data.join("\n"), comment: comment.join("\n") } : null;
  }
}

/** Chunks of a streamed answer, and what they come to: texts, receipts, usage, the prompt's token ids. */
export class StreamReader {
  texts = {};
  receipts = {};
  promptTokenIds = null;
  usage = null;
  isDone = false;
  #events = new EventReader();

  /** The chunks that end in this piece of text. */
  feed(piece) {
    return [...this.chunks(piece)];
  }

  /** As `feed`, one after the other: those before an error come before it is thrown. */
  *chunks(piece) {
    for (const event of this.#events.feed(piece)) {
      const chunk = this.#take(event);
      if (chunk !== null) yield chunk;
    }
  }

  /** Note the end of the body. */
  end() {
    if (!this.isDone) throw new AnswerFailed("the stream ended before the answer did");
  }

  #take(event) {
    if (event.name === "error") throw new AnswerFailed(event.comment || event.data);
    if (event.name === "token_ids") {
      const found = eventData(event.data || event.comment);
      this.promptTokenIds = typeof found === "string" ? eventData(found) : found;
    }
    if (event.name !== "" || event.data === "") return null;
    if (event.data === "[DONE]") {
      this.isDone = true;
      return null;
    }
    const data = eventData(event.data);
    if (data?.error != null) {
      const error = errorOf(event.data);
      throw new AnswerFailed(error.message, error.param ?? null);
    }
    if (!Array.isArray(data?.choices)) {
      throw new AnswerFailed(`expected a chunk with choices, got ${event.data.slice(0, 200)}`);
    }
    return this.#count(new Chunk(data));
  }

  #count(chunk) {
    this.usage = chunk.data.usage ?? this.usage;
    if (chunk.data.choices.length > 0) this.texts[chunk.choice] = (this.texts[chunk.choice] ?? "") + chunk.text;
    const receipt = chunk.receipt;
    if (receipt !== null) this.receipts[chunk.choice] = receipt;
    return chunk;
  }
}

/** One piece of a streamed answer. */
export class Chunk {
  constructor(data) {
    this.data = data;
  }
  get text() {
    const [first] = this.data.choices;
    return (first === undefined ? "" : "delta" in first ? first.delta.content : first.text) ?? "";
  }
  get choice() {
    return this.data.choices[0]?.index ?? 0;
  }
  get receipt() {
    return receiptOf(this.data);
  }
}

/** A whole answer. */
export class Answer {
  constructor(data) {
    this.data = data;
  }
  get texts() {
    const choices = [...this.data.choices].sort((one, other) => one.index - other.index);
    return choices.map((each) => ("message" in each ? each.message.content : each.text) ?? "");
  }
  get text() {
    return this.texts[0];
  }
  get receipts() {
    return receiptsOf(this.data);
  }
  get receipt() {
    return receiptOf(this.data);
  }
}

const DEFAULTS = { baseURL: "http://127.0.0.1:8000/v1", apiKey: null, timeoutMs: 600_000, headers: {}, fetch: undefined };
const LONGEST_TIMEOUT_MS = 2 ** 31 - 1; // a timer takes a longer one for none at all
const NODES_TIMEOUTS = ["UND_ERR_HEADERS_TIMEOUT", "UND_ERR_BODY_TIMEOUT"]; // of its fetch, after 300 seconds

/** A client of a worker's front door. */
export class Client {
  #options;

  constructor(options = {}) {
    checkNames("Client", options, Object.keys(DEFAULTS));
    const given = Object.entries(options).filter(([, value]) => value !== undefined);
    this.#options = { ...DEFAULTS, ...Object.fromEntries(given) };
    const { apiKey, timeoutMs } = this.#options;
    if (apiKey !== null && !/^[\x20-\x7e]*$/.test(apiKey)) throw new TypeError("apiKey: expected printable ASCII");
    if (typeof timeoutMs !== "number" || !(timeoutMs >= 1 && timeoutMs <= LONGEST_TIMEOUT_MS)) {
      throw new TypeError(`timeoutMs: expected 1 to ${LONGEST_TIMEOUT_MS} milliseconds, got ${String(timeoutMs)}`);
    }
    if (!/^https?:\/\/[^/?#]+[^?#]*$/.test(this.#options.baseURL)) {
      throw new TypeError(`baseURL: expected http://host:port/v1, got ${JSON.stringify(this.#options.baseURL)}`);
    }
  }

  /** Answer a chat. */
  async chat(fields, options) {
    return new Answer(await this.#whole("/chat/completions", fields, options));
  }

  /** Continue a text. */
  async complete(fields, options) {
    return new Answer(await this.#whole("/completions", fields, options));
  }

  /** Answer a chat in chunks. */
  streamChat(fields, options) {
    return this.#stream("/chat/completions", fields, options);
  }

  /** Continue a text in chunks. */
  streamCompletion(fields, options) {
    return this.#stream("/completions", fields, options);
  }

  /** Names of the models that are served. */
  async models(options) {
    return (await this.#whole("/models", null, options)).data.map((each) => each.id);
  }

  /** The processors that requests may name, with a JSON Schema of their arguments. */
  async catalogue(options) {
    return (await this.#whole("/logits_processors", null, options)).processors;
  }

  async #whole(path, fields, options) {
    const call = this.#call(path, fields, false, options);
    const body = await call.during((response) => call.text(response)).finally(() => call.cancel());
    const data = parsed(body);
    if (typeof data === "object" && data !== null && !Array.isArray(data)) return data;
    throw new ClientError(`expected a JSON object, got ${JSON.stringify(body.slice(0, 200))}`);
  }

  #stream(path, fields, options) {
    const call = this.#call(path, fields, true, options);
    const read = new StreamReader();
    const iterate = async function* () {
      const decoder = new TextDecoder();
      try {
        const body = await call.during(async (response) => response.body.getReader());
        while (!read.isDone) {
          const { done, value } = await call.watched(body.read());
          if (done) break;
          yield* read.chunks(decoder.decode(value, { stream: true }));
        }
        read.end();
      } finally {
        call.cancel();
      }
    };
    return { read, [Symbol.asyncIterator]: iterate };
  }

  #call(path, fields, stream, options = {}) {
    checkNames("options", options, ["signal"]);
    const { signal } = options;
    const { baseURL, apiKey, timeoutMs, headers, fetch: fetched = globalThis.fetch } = this.#options;
    if (typeof fields !== "object") throw new TypeError(`expected the fields of a request, got ${String(fields)}`);
    if (fields !== null && "stream" in fields) throw new TypeError("stream: call the method that streams instead");
    const url = baseURL.replace(/\/+$/, "") + path;
    const body = fields === null ? undefined : JSON.stringify(stream ? { ...fields, stream: true } : fields, finite);
    const sent = { accept: "application/json, text/event-stream", ...headers };
    if (apiKey !== null) sent.authorization = `Bearer ${apiKey}`;
    if (body !== undefined) sent["content-type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    return new Call(fetched, url, { method, headers: sent, body }, timeoutMs, signal);
  }
}

/** One HTTP request, which ends if nothing arrives for some time, or when the caller says so. */
class Call {
  #abort = new AbortController();
  #cancelled;

  constructor(fetched, url, init, timeoutMs, signal) {
    Object.assign(this, { fetched, url, init, timeoutMs, signal });
    this.#cancelled = () => this.cancel(signal.reason);
    if (signal?.aborted) this.cancel(signal.reason);
    signal?.addEventListener("abort", this.#cancelled);
  }

  cancel(reason) {
    this.signal?.removeEventListener("abort", this.#cancelled);
    this.#abort.abort(reason);
  }

  /** What `read` makes of the response, whose status is no error's. */
  async during(read) {
    const { fetched, url, init } = this;
    const response = await this.watched(fetched(url, { ...init, signal: this.#abort.signal }));
    if (response.status !== 200) throw new Refused(response.status, await this.text(response));
    return read(response);
  }

  /** The body as text; each piece of it may take the whole timeout. */
  async text(response) {
    if (!response.body?.getReader) return this.watched(response.text()); // of another fetch than the platform's
    const [body, decoder] = [response.body.getReader(), new TextDecoder()];
    let text = "";
    for (;;) {
      const { done, value } = await this.watched(body.read());
      if (done) return text + decoder.decode();
      text += decoder.decode(value, { stream: true });
    }
  }

  /** The promise's value; the request is cancelled if there is none within the timeout. */
  async watched(promise) {
    const late = new TimedOut(`${this.url}: nothing arrived in time`);
    const timer = setTimeout(() => this.#abort.abort(late), this.timeoutMs);
    try {
      return await promise;
    } catch (error) {
      if (this.#abort.signal.aborted) throw this.#abort.signal.reason;
      if (NODES_TIMEOUTS.includes(error.cause?.code)) throw late;
      // Where a name has several addresses, Node's cause is an AggregateError, which has no message.
      const problem = error.cause?.message || error.cause?.code || error.message;
      throw new Unreachable(`${this.url}: ${problem}`, { cause: error });
    } finally {
      clearTimeout(timer);
    }
  }
}

/** Receipts as the Vercel AI SDK's provider metadata: `createOpenAICompatible({ metadataExtractor, ... })`. */
export const metadataExtractor = {
  extractMetadata: async ({ parsedBody }) => metadataOf(receiptsOf(parsedBody)),
  createStreamExtractor: () => {
    const receipts = [];
    return {
      processChunk: (chunk) => {
        const receipt = receiptOf(chunk);
        if (receipt !== null) receipts[chunk.choices[0]?.index ?? 0] = receipt;
      },
      buildMetadata: () => metadataOf(receipts),
    };
  },
};

function metadataOf(receipts) {
  return receipts.length > 0 ? { dynamoLogits: { receipts } } : undefined;
}
