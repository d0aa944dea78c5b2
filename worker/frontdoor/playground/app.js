// The page: conversation, settings, and the request to copy.

import { Answer, detailsOf } from "./answer.js";
import { el } from "./dom.js";
import { makeField } from "./forms.js";
import { ProcessorPanel } from "./processors.js";
import { asCurl, asPython, bodyOf, EventReader, plain, problemOf } from "./requests.js";
import { SAMPLING } from "./sampling.js";

const named = (id) => document.getElementById(id);
const [log, message, system, problem, details, settings] =
  ["log", "message", "system", "problem", "details", "settings"].map(named);

const EXAMPLES = [
  {
    title: "A person as JSON",
    prompt: "Invent a person.",
    processors: [
      {
        name: "json_schema",
        args: {
          schema: {
            type: "object",
            properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 120 } },
            required: ["name", "age"],
            additionalProperties: false,
          },
        },
      },
    ],
  },
  {
    title: "Yes or no",
    prompt: "Is the Earth round?",
    processors: [{ name: "choice", args: { choices: ["Yes.", "No."] } }],
  },
  {
    title: "Without some words",
    prompt: "What is the sea like? Answer in two sentences.",
    processors: [{ name: "phrase_ban", args: { phrases: ["vast", "sea", "ocean"] } }],
  },
  {
    title: "With a beginning and an end",
    prompt: "Why do cats purr?",
    processors: [
      { name: "forced_prefix", args: { text: "Ahoy! " } },
      { name: "force_last_phrase", args: { text: " And that is all I know." } },
    ],
  },
];

const processors = new ProcessorPanel(named("add-processor"), named("processors"));
const sampling = makeField(SAMPLING, "", { value: { max_tokens: 256 } });
named("sampling").append(sampling.element);

let catalogue = new Map();
let turns = []; // {role, content, element}
let running; // AbortController of the answer that is being generated
let lastBody;

// What the front door has.

function headers() {
  const key = named("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function fetchJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) {
    if (response.status === 401) named("key-label").hidden = false;
    throw new Error(problemOf(await response.text()).message);
  }
  return response.json();
}

async function load() {
  try {
    const [models, offered] = await Promise.all([fetchJson("v1/models"), fetchJson("v1/logits_processors")]);
    catalogue = new Map(offered.processors.map((one) => [one.name, one]));
    processors.offer(catalogue);
    named("model").replaceChildren(...models.data.map(({ id }) => el("option", { value: id }, id)));
    const usable = EXAMPLES.filter((example) => example.processors.every(({ name }) => catalogue.has(name)));
    named("examples").replaceChildren(...usable.map((one) => el("button", { type: "button", onclick: () => use(one) }, one.title)));
    showProblem(models.data.length ? "" : "No model is served yet; reload the page when one is.");
  } catch (error) {
    showProblem(error.message);
  }
}

function use({ prompt, processors: chosen }) {
  processors.clear();
  for (const { name, args } of chosen) processors.add(name, args);
  message.value = prompt;
  message.focus();
}

// The request.

/** The request that the settings make of these messages, or nothing, with the errors shown. */
function request(messages) {
  const problems = [];
  const chosen = processors.read(problems);
  const fields = sampling.read(problems, "");
  if (problems.length) {
    showProblem(`${problems[0].path}: ${problems[0].message}`, problems[0].control);
    return undefined;
  }
  const first = system.value ? [{ role: "system", content: system.value }] : [];
  return bodyOf(named("model").value, [...first, ...messages], fields, chosen);
}

const said = () => turns.filter(({ content }) => content !== "").map(({ role, content }) => ({ role, content }));

function showProblem(text, control) {
  problem.textContent = text;
  problem.hidden = !text;
  if (!control) return;
  if (settings.contains(control)) showSettings(true);
  control.focus();
  control.scrollIntoView({ block: "center" });
}

/** An error of the server's, at the field that it names. */
function showRefusal({ message: text, segments: [first, ...rest] }) {
  const isSampling = first in SAMPLING.properties;
  const control = first === "processors" ? processors.mark(rest, text) : isSampling && sampling.mark([first, ...rest], text);
  showProblem(text, control || undefined);
}

// The conversation.

function addTurn(role, content, element) {
  turns.push({ role, content, element });
  log.append(element);
  element.scrollIntoView({ block: "end" });
  return turns.at(-1);
}

async function send() {
  const text = message.value;
  if (running || text.trim() === "") return;
  const body = request([...said(), { role: "user", content: text }]);
  if (!body) return;
  message.value = "";
  const turn = addTurn("user", text, el("article", { class: "question" }, text));
  if (await ask(body)) return;
  drop(turn);
  message.value = text;
  showState();
}

async function again() {
  const last = turns.at(-1);
  if (running || last?.role !== "assistant") return;
  const body = request(said().slice(0, last.content === "" ? undefined : -1));
  if (!body) return;
  drop(last);
  if (!(await ask(body))) {
    turns.push(last);
    log.append(last.element);
    showState();
  }
}

function drop(turn) {
  turns = turns.filter((one) => one !== turn);
  turn.element.remove();
}

/** Ask, and show the answer as it comes; whether there is one. */
async function ask(body) {
  showProblem("");
  lastBody = body;
  running = new AbortController();
  const answer = new Answer(catalogue, showDetails);
  const turn = addTurn("assistant", "", answer.element);
  showState();
  const outcome = await follow(body, answer);
  turn.content = answer.content;
  running = undefined;
  showState();
  if (outcome.problem && answer.content === "") {
    drop(turn);
    showRefusal(outcome.problem);
    return false;
  }
  const { problem: error, stopped } = outcome;
  answer.end(error ? error.message : stopped && "Stopped.", Boolean(error));
  keepInView();
  return true;
}

function post(body) {
  return fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
}

/**
 * What the worker said of a request whose stream brought an error before the first token: Dynamo's
 * frontend (1.4.2) keeps that to itself, except where the answer is no stream.
 */
async function reasonOf(error, body) {
  const response = await post({ ...plain(body), max_tokens: 1 });
  return response.ok ? error : problemOf(await response.text());
}

async function follow(body, answer) {
  try {
    const response = await post(body);
    if (!response.ok) return { problem: problemOf(await response.text()) };
    const error = await readStream(response.body, answer);
    return { problem: error && answer.content === "" ? await reasonOf(error, body) : error };
  } catch (error) {
    if (error.name === "AbortError") return { stopped: true };
    return { problem: { message: `No answer: ${error.message}`, segments: [] } };
  }
}

/** The error that the stream brought, if it did. */
async function readStream(stream, answer) {
  const [reader, decoder, events] = [stream.getReader(), new TextDecoder(), new EventReader()];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return answer.finishReason ? undefined : { message: "The answer was cut off.", segments: [] };
    for (const { event, data, comment } of events.feed(decoder.decode(value, { stream: true }))) {
      if (event === "error") return problemOf(data || comment);
      if (data && data !== "[DONE]") {
        const chunk = JSON.parse(data);
        if (chunk.error) return problemOf(data);
        answer.add(chunk);
      }
    }
    keepInView();
  }
}

/** Scroll with the answer, unless the person has scrolled away from its end. */
function keepInView() {
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function showState() {
  named("send").hidden = Boolean(running);
  named("stop").hidden = !running;
  named("again").hidden = Boolean(running) || turns.at(-1)?.role !== "assistant";
  named("welcome").hidden = turns.length > 0;
  log.setAttribute("aria-busy", String(Boolean(running)));
}

function newChat() {
  running?.abort();
  for (const { element } of turns) element.remove();
  turns = [];
  showProblem("");
  showState();
  message.focus();
}

// What was done to a token.

function showDetails(token, element) {
  details.hidden = !token;
  if (!token) return;
  details.replaceChildren(...detailsOf(token));
  element.setAttribute("aria-describedby", "details");
  const [of, card] = [element.getBoundingClientRect(), details.getBoundingClientRect()];
  const isBelow = of.bottom + card.height + 12 < innerHeight;
  details.style.top = `${isBelow ? of.bottom + 6 : Math.max(of.top - card.height - 6, 6)}px`;
  details.style.left = `${Math.max(6, Math.min(of.left, innerWidth - card.width - 6))}px`;
}

// The request to copy.

let format = "curl";

/** The messages of the request that would be sent now, or of the last one. */
function messagesToCopy() {
  if (message.value.trim()) return [...said(), { role: "user", content: message.value }];
  return (lastBody?.messages ?? []).filter(({ role }) => role !== "system");
}

function showExport() {
  const messages = messagesToCopy();
  if (messages.length === 0) {
    showProblem("Write a message first.", message);
    return;
  }
  const body = request(messages);
  if (!body) return;
  const base = new URL("v1", location.href).href;
  const write = format === "curl" ? asCurl : asPython;
  named("code").textContent = write(body, base, named("key").value !== "");
  for (const id of ["curl", "python"]) named(`as-${id}`).setAttribute("aria-selected", String(id === format));
  named("copy-code").textContent = "Copy";
  if (!named("export").open) named("export").showModal();
}

async function copyCode() {
  try {
    await navigator.clipboard.writeText(named("code").textContent);
    named("copy-code").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(named("code")); // no clipboard without TLS, but on loopback
    named("copy-code").textContent = "Selected: press Ctrl+C";
  }
}

// Buttons and keys.

function showSettings(isShown) {
  settings.classList.toggle("open", isShown);
}

named("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || named("export").open) return;
  running?.abort();
  showSettings(false);
});
addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".token")) showDetails();
});
log.addEventListener("scroll", () => showDetails());

const clicks = {
  stop: () => running?.abort(),
  again,
  new: newChat,
  copy: showExport,
  "copy-code": copyCode,
  "close-export": () => named("export").close(),
  "open-settings": () => showSettings(true),
  "close-settings": () => showSettings(false),
  "as-curl": () => showAs("curl"),
  "as-python": () => showAs("python"),
};
for (const [id, action] of Object.entries(clicks)) named(id).addEventListener("click", () => action());

function showAs(chosen) {
  format = chosen;
  showExport();
}

named("key").addEventListener("change", load);
load();
