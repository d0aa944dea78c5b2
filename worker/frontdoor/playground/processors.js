// The processors that a person picked: a card with a form for each.

import { el } from "./dom.js";
import { makeField } from "./forms.js";

export class ProcessorPanel {
  #holder;
  #picker;
  #catalogue = new Map();
  #cards = [];
  #sent = [];

  /**
   * @param {HTMLSelectElement} picker what processors are added by
   * @param {HTMLElement} holder       where their cards go
   */
  constructor(picker, holder) {
    [this.#picker, this.#holder] = [picker, holder];
    picker.addEventListener("change", () => {
      const card = this.add(picker.value);
      picker.value = "";
      (card.element.querySelector(".form input, .form textarea, .form select") ?? card.summary).focus();
    });
  }

  /** Offer these processors, a Map by name, under the names of their stages. */
  offer(catalogue) {
    this.#catalogue = catalogue;
    const stages = new Map();
    for (const one of catalogue.values()) stages.set(one.stage, [...(stages.get(one.stage) ?? []), one]);
    const groups = [...stages].map(([stage, found]) =>
      el("optgroup", { label: stage }, ...found.map(({ name, summary }) => el("option", { value: name, title: summary }, name))),
    );
    this.#picker.replaceChildren(el("option", { value: "" }, "Add a processor …"), ...groups);
  }

  /** Add a processor, with arguments to begin with. */
  add(name, args) {
    const { args: schema, summary, stage } = this.#catalogue.get(name);
    const form = makeField(schema, "", { value: args });
    const on = el("input", { type: "checkbox", checked: true, "aria-label": `Use ${name}` });
    const remove = el("button", { type: "button", class: "icon", "aria-label": `Remove ${name}` }, "×");
    const head = el("summary", {}, on, el("code", {}, name), el("span", { class: "stage" }, stage), remove);
    const element = el(
      "details",
      { class: "card", open: true },
      head,
      el("p", { class: "help" }, summary),
      el("div", { class: "form" }, form.element),
    );
    const card = { name, form, element, summary: head, on };
    on.addEventListener("change", () => element.classList.toggle("off", !on.checked));
    remove.addEventListener("click", () => {
      this.#cards.splice(this.#cards.indexOf(card), 1);
      element.remove();
      this.#picker.focus();
    });
    this.#cards.push(card);
    this.#holder.append(element);
    return card;
  }

  clear() {
    this.#cards = [];
    this.#holder.replaceChildren();
  }

  /** {name, args} of those that are on; problems are added to `problems`. */
  read(problems) {
    this.#sent = this.#cards.filter(({ on }) => on.checked);
    return this.#sent.map(({ name, form, element }, place) => {
      const before = problems.length;
      const args = form.read(problems, `logits_processors[${place}].args`);
      if (problems.length > before) element.open = true;
      return { name, args };
    });
  }

  /** Show the server's error at the field of what `read` returned last; its control, if there is one. */
  mark([place, ...segments], message) {
    const card = this.#sent[Number(place)];
    if (!card) return undefined;
    card.element.open = true;
    return card.form.mark(segments[0] === "args" ? segments.slice(1) : segments, message);
  }
}
