// One answer: its tokens as they come, coloured by what processors did to them, and its receipt.

import { el, printable } from "./dom.js";

/** What is done to a token, the strongest first; also the names of its colours. */
const DEEDS = ["forced", "masked", "biased", "shaped"];

const MEANINGS = {
  forced: "chose the token",
  masked: "forbade other tokens",
  biased: "changed logits",
  shaped: "changed the distribution",
};

/**
 * @param {Map<string, object>} catalogue the processors by name
 * @param {function} showDetails called with a token and its element, or nothing, to show or hide them
 */
export class Answer {
  #text = el("p", { class: "text", lang: "" });
  #legend = el("div", { class: "legend", role: "group", "aria-label": "Processors" });
  #facts = el("p", { class: "facts" });
  #note = el("p", { class: "note", role: "alert", hidden: true });
  #receipt = el("details", { class: "receipt", hidden: true });
  #tokens = [];
  #records = [];
  #began = performance.now();
  #firstAt;
  #lastAt;
  #report;
  #selected;
  #legendFrame;
  #catalogue;
  #showDetails;
  element = el("article", { class: "answer running" }, this.#legend, this.#text, this.#note, this.#facts, this.#receipt);
  content = "";
  finishReason;

  constructor(catalogue, showDetails) {
    [this.#catalogue, this.#showDetails] = [catalogue, showDetails];
    for (const kind of ["focusin", "pointerover"]) this.#text.addEventListener(kind, (event) => this.#point(event));
    for (const kind of ["focusout", "pointerleave"]) this.#text.addEventListener(kind, () => showDetails());
    this.#text.addEventListener("click", (event) => this.#point(event));
    this.#text.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Take a chunk of the stream. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    const report = chunk.nvext?.engine_data?.logits_processors;
    const added = this.#addTokens(choice?.delta?.content ?? "", choice?.logprobs?.content ?? []);
    if (report) this.#addReport(report, added);
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (report?.tokens) this.#attribute(report);
    for (const token of added) this.#colour(token);
  }

  #addTokens(content, logprobs) {
    this.content += content;
    if (content === "" && logprobs.length === 0) return [];
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    const isSplit = logprobs.map((each) => each.token).join("") === content;
    const texts = logprobs.map((each, place) => (isSplit ? each.token : place === 0 ? content : ""));
    const added = (texts.length ? texts : [content]).map((text, place) => this.#addToken(text, logprobs[place]));
    return added;
  }

  #addToken(text, logprob) {
    const place = this.#tokens.length;
    const element = el("span", { class: "token", "data-place": place, tabindex: place === 0 ? "0" : "-1" }, text);
    const token = { place, text, logprob, element, marks: [] };
    this.#tokens.push(token);
    this.#text.append(element);
    return token;
  }

  /** What the processors' counts say of the tokens that came with them, until the attribution comes. */
  #addReport(report, added) {
    for (const [place, record] of report.processors.entries()) {
      const before = this.#records[place] ?? { steps_active: 0, tokens_forced: 0, tokens_masked: 0 };
      if (record.steps_active - before.steps_active !== added.length) continue; // which of them is not known yet
      const did =
        record.tokens_forced > before.tokens_forced ? "forced"
        : record.tokens_masked > before.tokens_masked ? "masked"
        : this.#catalogue.get(record.name)?.kind === "shaping" ? "shaped"
        : "biased";
      for (const token of added) token.marks.push({ processor: record.name, did });
    }
    this.#records = report.processors;
    this.#report = report;
    this.#legendFrame ??= requestAnimationFrame(() => this.#showLegend());
  }

  /** The attribution at the end of an answer: what was done to each token. */
  #attribute({ tokens, prompt_length: first, processed_logprobs: processed = [] }) {
    for (const token of this.#tokens) token.marks = [];
    for (const { position, token_id: id, processor, did } of tokens) {
      const token = this.#tokens[position - first] ?? this.#addEnd(position - first);
      if (token) Object.assign(token, { id, position }).marks.push({ processor, did });
    }
    for (const { position, logprob } of processed) {
      if (this.#tokens[position - first]) this.#tokens[position - first].processed = logprob;
    }
    for (const token of this.#tokens) this.#colour(token);
    this.#showLegend();
  }

  /** The end token, which has no text: it is shown if a processor did something to it. */
  #addEnd(place) {
    if (place !== this.#tokens.length || this.finishReason !== "stop") return undefined;
    const end = this.#addToken("end");
    end.element.classList.add("end");
    return end;
  }

  #colour(token) {
    const found = DEEDS.find((deed) => token.marks.some(({ did }) => did === deed));
    token.element.dataset.did = found ?? "";
    const isOther = this.#selected && !token.marks.some(({ processor }) => processor === this.#selected);
    token.element.classList.toggle("dim", Boolean(isOther));
  }

  #showLegend() {
    this.#legendFrame = undefined;
    const names = [...new Set(this.#records.map(({ name }) => name))];
    const entries = names.map((name) => {
      const marks = this.#tokens.flatMap((token) => token.marks.filter(({ processor }) => processor === name));
      const deeds = DEEDS.filter((deed) => marks.some(({ did }) => did === deed));
      const counts = deeds.map((deed) => `${deed} ${marks.filter(({ did }) => did === deed).length}`);
      const steps = this.#records.filter((record) => record.name === name).reduce((sum, one) => sum + one.steps_active, 0);
      const said = counts.join(", ") || (steps ? `active ${steps}` : "did nothing");
      return el(
        "button",
        {
          type: "button",
          "data-did": deeds[0] ?? "",
          "aria-pressed": String(this.#selected === name),
          title: deeds.map((deed) => `${deed}: ${MEANINGS[deed]}`).join("; ") || undefined,
          onclick: () => this.#select(name),
        },
        el("span", { class: "swatch", "aria-hidden": "true" }),
        `${name} `,
        el("span", { class: "count" }, said),
      );
    });
    const focused = [...this.#legend.children].indexOf(document.activeElement);
    this.#legend.replaceChildren(...entries);
    entries[focused]?.focus();
  }

  /** Dim what a processor did nothing to; once more to show all. */
  #select(name) {
    this.#selected = this.#selected === name ? undefined : name;
    for (const token of this.#tokens) this.#colour(token);
    this.#showLegend();
  }

  #point(event) {
    const element = event.target.closest(".token");
    const token = element && this.#tokens[Number(element.dataset.place)];
    if (token) this.#showDetails(token, element);
  }

  /** Arrow keys go from token to token. */
  #move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const place = Number(event.target.dataset?.place);
    if (event.key === "Escape") this.#showDetails();
    if (by === undefined || Number.isNaN(place)) return;
    event.preventDefault();
    const next = this.#tokens[Math.min(Math.max(place + by, 0), this.#tokens.length - 1)].element;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /** The stream has ended; `note` says why if it did not end by itself. */
  end(note, isError = false) {
    this.element.classList.remove("running");
    if (note) {
      this.#note.textContent = note;
      this.#note.hidden = false;
      this.#note.classList.toggle("error", isError);
    }
    const count = this.#tokens.filter(({ element }) => !element.classList.contains("end")).length;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const facts = [
      this.finishReason && `finish reason ${this.finishReason}`,
      `${count} ${count === 1 ? "token" : "tokens"}`,
      this.#firstAt && `first after ${Math.round(this.#firstAt - this.#began)} ms`,
      count > 1 && seconds > 0 && `${((count - 1) / seconds).toFixed(1)} per second`,
      this.#report && `seed ${this.#report.seed}`,
      this.#report && `${this.#report.numerics} numerics`,
    ];
    this.#facts.textContent = facts.filter(Boolean).join(" · ");
    if (!this.#report) return;
    const shown = el("pre", { tabindex: "0" }, JSON.stringify(this.#report, null, 2));
    this.#receipt.append(el("summary", {}, "Receipt"), shown);
    this.#receipt.hidden = false;
  }
}

/** The content of the card that describes a token. */
export function detailsOf({ text, logprob, processed, marks, id, position, place }) {
  const rows = marks.map(({ processor, did }) =>
    el("li", {}, el("span", { class: "swatch", "data-did": did }), `${processor} ${MEANINGS[did] ?? did}`),
  );
  const alternatives = (logprob?.top_logprobs ?? []).map((one) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${100 * Math.exp(one.logprob)}%`;
    const isTaken = one.token === logprob.token;
    return el(
      "tr",
      { class: isTaken ? "taken" : undefined },
      el("td", {}, el("code", {}, shown(one.token))),
      el("td", { class: "number" }, percent(one.logprob)),
      el("td", {}, bar),
    );
  });
  return [
    el("p", { class: "title" }, el("code", {}, shown(text))),
    el("p", { class: "hint" }, [`token ${place + 1}`, position && `position ${position}`, id && `id ${id}`].filter(Boolean).join(" · ")),
    logprob ? el("p", {}, `${percent(logprob.logprob)} in the model, before any control`) : null,
    processed === undefined ? null : el("p", {}, `${percent(processed)} in what it was sampled from, after all of them`),
    rows.length ? el("ul", {}, ...rows) : el("p", {}, "No processor acted here."),
    alternatives.length ? el("p", { class: "hint" }, "Most likely tokens of the model, before any control") : null,
    alternatives.length ? el("table", {}, el("tbody", {}, ...alternatives)) : null,
  ].filter(Boolean);
}

const shown = (text) => `“${printable(text)}”`;

const percent = (logprob) => {
  const probability = 100 * Math.exp(logprob);
  return probability >= 0.1 ? `${probability.toFixed(1)} %` : probability >= 0.001 ? `${probability.toFixed(3)} %` : "< 0.001 %";
};
