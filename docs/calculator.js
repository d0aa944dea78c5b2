// The page "Fleet calculator": the formulas of benchmarks/fleet_plan.py, with the figures that the site's build puts on the page.
"use strict";

/** Seconds of a full worker's step, with its share of prompts. */
function stepOf(load, worker) {
  return worker.step_s + (worker.slots * (load.prompt / load.answer)) / worker.prompt_rate;
}

/** How many of each part serve a load; names and values as `plan` in fleet_plan.py. */
function plan(figures, load, worker) {
  const parts = figures.parts;
  const cores = (name) =>
    (load.rate * (parts[name].request_us + load.answer * parts[name].token_us)) / 1e6 / figures.use;
  const step = stepOf(load, worker);
  const open = load.rate * (load.answer + 1) * step;
  return {
    "workers": Math.ceil(open / (worker.slots * figures.use)),
    "front doors": Math.ceil(cores("front door")),
    "frontends": Math.ceil(cores("Dynamo's frontend") / figures.frontend_cores),
    "MiB of open streams in the frontends": Math.ceil((open * parts["Dynamo's frontend"].stream_kib) / 1024),
    "cores of an etcd boundary store": Math.ceil(cores("etcd store")),
    "cores of a NATS boundary store": Math.ceil(cores("nats store")),
    "cores of NATS servers in place of frontends": Math.ceil(cores("NATS")),
  };
}

const INPUTS = [
  ["per_minute", "requests a minute", 10000, 1],
  ["prompt", "tokens of a prompt, on the mean", 512, 1],
  ["answer", "tokens of an answer, on the mean", 128, 1],
  ["step_ms", "milliseconds of a worker's step", 20, 0.001],
  ["slots", "rows of a worker's batch", 64, 1],
  ["prompt_rate", "prompt tokens a second that a worker computes", 10000, 1],
];

/** Shows the inputs and the numbers in an element. */
function show(root, figures) {
  const given = {};
  const form = root.appendChild(document.createElement("table"));
  const found = root.appendChild(document.createElement("table"));
  const row = (table, name, cell) => {
    const line = table.insertRow();
    line.insertCell().textContent = name;
    line.insertCell().append(cell);
  };
  const update = () => {
    const value = Object.fromEntries(Object.entries(given).map(([name, input]) => [name, Number(input.value)]));
    found.replaceChildren();
    if (!Object.values(given).every((input) => input.checkValidity() && Number(input.value) > 0)) {
      row(found, "every field needs a number above 0", "");
      return;
    }
    const load = { rate: value.per_minute / 60, prompt: value.prompt, answer: value.answer };
    const worker = { step_s: value.step_ms / 1000, slots: value.slots, prompt_rate: value.prompt_rate };
    for (const [name, number] of Object.entries(plan(figures, load, worker))) {
      row(found, name, number.toLocaleString("en"));
    }
  };
  for (const [name, label, value, least] of INPUTS) {
    const input = document.createElement("input");
    Object.assign(input, { type: "number", min: least, step: "any", value, required: true });
    input.setAttribute("aria-label", label);
    input.addEventListener("input", update);
    given[name] = input;
    row(form, label, input);
  }
  update();
}

if (typeof module === "undefined") {
  const root = document.getElementById("calculator");
  if (root !== null) {
    show(root, JSON.parse(document.getElementById("calculator-figures").textContent));
  }
} else {
  module.exports = { plan };
}
