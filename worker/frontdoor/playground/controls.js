// Fields of one control: numbers, texts, switches, choices, and JSON for what has no form of its own.

import { el, uid } from "./dom.js";
import { hintOf, jsonOf, lengthProblem, numberProblem, resolved, show } from "./schemas.js";

/** Label, control, description and error of one field; the latter two belong to the control. */
export function framed(one, control, focusable = control) {
  const { schema, name, bare } = one;
  const [hint, help, error] = [uid(), uid(), uid()];
  const range = bare ? "" : hintOf(one);
  const description = bare ? undefined : schema.description;
  focusable.id ||= uid();
  const describing = [range && hint, description && help, error].filter(Boolean);
  focusable.setAttribute("aria-describedby", describing.join(" "));
  const isGroup = focusable.getAttribute("role") === "group";
  if (bare || isGroup) focusable.setAttribute("aria-label", name);
  const shown = el("p", { class: "error", id: error, hidden: true });
  const label = isGroup ? el("span", {}, name) : el("label", { for: focusable.id }, name);
  const element = el(
    "div",
    { class: "field" },
    bare ? null : el("div", { class: "label" }, label, range ? el("span", { class: "hint", id: hint }, range) : null),
    control,
    description ? el("p", { class: "help", id: help }, description) : null,
    shown,
  );
  const clear = () => {
    shown.hidden = true;
    focusable.removeAttribute("aria-invalid");
  };
  const mark = (message) => {
    shown.textContent = message;
    shown.hidden = false;
    focusable.setAttribute("aria-invalid", "true");
    return focusable;
  };
  element.addEventListener("input", clear);
  return { element, clear, mark };
}

/** A field with one control; parse(problem, path) is its value, or what problem(message) returns. */
function leaf(one, control, parse) {
  const { element, clear, mark } = framed(one, control);
  return {
    element,
    read(problems, path) {
      clear();
      return parse((message, at = path) => {
        problems.push({ path: at, message, control: mark(message) });
        return undefined;
      }, path);
    },
    mark: (segments, message) => mark(message),
  };
}

const REQUIRED = "is required";

export function numberField(one) {
  const input = el("input", { inputmode: "decimal", autocomplete: "off", value: one.value });
  return leaf(one, input, (problem) => {
    const text = input.value.trim();
    if (text === "") return one.required ? problem(REQUIRED) : undefined;
    const wrong = numberProblem(text, Number(text), one.schema);
    return wrong ? problem(wrong) : Number(text);
  });
}

/** A list of numbers, in one control. */
export function numbersField(one) {
  const input = el("input", { autocomplete: "off", placeholder: "1, 2, 3", value: one.value?.join(", ") });
  const items = resolved(one.schema.items, one.root).found;
  return leaf(one, input, (problem, path) => {
    const texts = input.value.split(/[\s,]+/).filter(Boolean);
    if (texts.length === 0) return one.required ? problem(REQUIRED) : undefined;
    for (const [place, text] of texts.entries()) {
      const wrong = numberProblem(text, Number(text), items);
      if (wrong) return problem(wrong, `${path}[${place}]`);
    }
    const wrong = lengthProblem(texts.length, one.schema.minItems, one.schema.maxItems, "numbers");
    return wrong ? problem(wrong) : texts.map(Number);
  });
}

export function textField(one) {
  const { schema } = one;
  const isShort = schema.maxLength <= 128;
  const input = el(isShort ? "input" : "textarea", { rows: 1, spellcheck: "false", autocomplete: "off" });
  input.value = one.value ?? "";
  return leaf(one, input, (problem) => {
    const text = input.value;
    if (text === "" && !one.required) return undefined;
    if (text === "" && schema.minLength > 0) return problem(REQUIRED);
    const wrong = lengthProblem([...text].length, schema.minLength, schema.maxLength, "characters");
    if (wrong) return problem(wrong);
    if (schema.pattern && !matches(schema.pattern, text)) return problem(`must match ${schema.pattern}`);
    return text;
  });
}

function matches(pattern, text) {
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return true; // not in JavaScript's syntax; the server decides
  }
}

export function toggleField(one) {
  const input = el("input", { type: "checkbox" });
  input.checked = one.value ?? one.schema.default ?? false;
  const field = leaf(one, input, () => (one.required || input.checked !== one.schema.default ? input.checked : undefined));
  field.element.classList.add("toggle");
  return field;
}

export function choiceField(one) {
  const { schema } = one;
  const isOptional = !one.required || schema.default !== undefined;
  const none = schema.default === undefined ? "(none)" : `${schema.default} (default)`;
  const choices = schema.enum.map((value, place) => [value, place]).filter(([value]) => value !== schema.default);
  const select = el(
    "select",
    {},
    isOptional ? el("option", { value: "" }, none) : null,
    ...choices.map(([value, place]) => el("option", { value: place, selected: value === one.value }, String(value))),
  );
  return leaf(one, select, () => (select.value === "" ? undefined : schema.enum[Number(select.value)]));
}

export function jsonField(one) {
  const value = one.value === undefined ? "" : JSON.stringify(one.value, null, 2);
  const input = el("textarea", { rows: 3, spellcheck: "false", class: "code", placeholder: "JSON" });
  input.value = value;
  return leaf(one, input, (problem) => {
    if (input.value.trim() === "") return one.required ? problem(REQUIRED) : undefined;
    try {
      return jsonOf(input.value);
    } catch (error) {
      return problem(error instanceof RangeError ? error.message : `must be JSON: ${error.message}`);
    }
  });
}

