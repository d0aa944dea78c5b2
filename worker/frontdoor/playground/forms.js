// Forms from JSON Schemas: nested objects, arrays, maps, enums, alternatives, bounds. What has no form
// of its own (a free object) is a text field for JSON.
//
// A field is {element, read, mark}. read(problems, path) is the value, or undefined where it is left
// out, and adds {path, message, control} for what is wrong; mark(segments, message) shows an error at
// the field that a path leads to, and returns its control.

import * as controls from "./controls.js";
import { el } from "./dom.js";
import { constantIn, constantOf, entrySchema, kindOf, lengthProblem, resolved, show } from "./schemas.js";

/**
 * The field of a schema.
 *
 * @param {object} schema a JSON Schema, in which $ref leads into `root`
 * @param {string} name   shown as its label; hidden from sight with `bare`
 * @param {object} options root, required, bare, and value to begin with
 */
export function makeField(schema, name, { root = schema, required = true, bare = false, value } = {}) {
  const { found, nullable } = resolved(schema, root);
  const one = { schema: found, name, root, bare, value, required: required && !nullable };
  const kind = kindOf(found, root);
  return MAKERS[kind === "group" && !one.required ? "variants" : kind](one);
}

function constantField(one) {
  const element = el("div", { class: "field constant" }, el("span", {}, one.name), el("code", {}, show(one.schema.const)));
  return { element, read: () => one.schema.const, mark: () => element };
}

function groupField(one) {
  const required = new Set(one.schema.required ?? []);
  const parts = Object.entries(one.schema.properties).map(([name, schema]) => {
    const options = { root: one.root, required: required.has(name), value: one.value?.[name] };
    return [name, makeField(schema, name, options)];
  });
  const { element, clear, mark } = boxed(one, ...parts.map(([, part]) => part.element));
  return {
    element,
    read(problems, path) {
      clear();
      const value = {};
      for (const [name, part] of parts) {
        const read = part.read(problems, path ? `${path}.${name}` : name);
        if (read !== undefined) value[name] = read;
      }
      return value;
    },
    mark([first, ...rest], message) {
      const part = parts.find(([name]) => name === first);
      return part ? part[1].mark(rest, message) : mark(message);
    },
  };
}

/** A field set around the fields of one: its label, description and error. */
function boxed(one, ...children) {
  const box = el("div", { class: "box" }, ...children);
  if (one.name === "") {
    const error = el("p", { class: "error", hidden: true, tabindex: "-1" });
    const mark = (message) => {
      [error.textContent, error.hidden] = [message, false];
      return error;
    };
    return { element: el("div", {}, box, error), clear: () => { error.hidden = true; }, mark };
  }
  const set = el("div", { role: "group", tabindex: "-1" }, box);
  return controls.framed(one, set, set);
}

/**
 * Rows that a person adds and removes.
 *
 * @param {object} kind {least, most} number of rows; {initial} values; fields(value), those of one row;
 *   read(rows, problems, path), the value of all; find(rows, segment), the field that a path leads to
 */
function rowsField(one, { least, most, initial, fields, read, find }) {
  const rows = [];
  const holder = el("div", { class: "rows" });
  const add = (value) => {
    const row = fields(value);
    const content = el("div", { class: "entry" }, ...row.map((field) => field.element));
    const element = entryRow(one.name, content, () => rows.splice(rows.indexOf(row), 1));
    rows.push(row);
    holder.append(element);
    return element;
  };
  const { element, clear, mark } = boxed(one, holder, adder(one.name, add));
  for (const value of initial ?? (one.required && least > 0 ? [undefined] : [])) add(value);
  return {
    element,
    read(problems, path) {
      clear();
      if (rows.length === 0 && !one.required) return undefined;
      const wrong = lengthProblem(rows.length, least, most, "entries");
      if (wrong) problems.push({ path, message: wrong, control: mark(wrong) });
      return read(rows, problems, path);
    },
    mark([first, ...rest], message) {
      const field = first === undefined ? undefined : find(rows, first);
      return field ? field.mark(rest, message) : mark(message);
    },
  };
}

function listField(one) {
  return rowsField(one, {
    least: one.schema.minItems,
    most: one.schema.maxItems,
    initial: one.value,
    fields: (value) => [makeField(one.schema.items, `${one.name} entry`, { root: one.root, bare: true, value })],
    read: (rows, problems, path) => rows.map(([field], place) => field.read(problems, `${path}[${place}]`)),
    find: (rows, segment) => rows[Number(segment)]?.[0],
  });
}

function mapField(one) {
  const { pattern, values } = entrySchema(one.schema);
  const keys = { type: "string", minLength: 1, maxLength: 128, pattern };
  return rowsField(one, {
    least: one.schema.minProperties,
    most: one.schema.maxProperties,
    initial: one.value && Object.entries(one.value),
    fields: ([key, value] = []) => [
      makeField(keys, `key of ${one.name}`, { bare: true, value: key }),
      makeField(values, `value of ${one.name}`, { root: one.root, bare: true, value }),
    ],
    read: (rows, problems, path) => {
      const found = new Map();
      for (const [of, to] of rows) {
        const key = of.read(problems, path);
        const twice = found.has(key) && "occurs twice";
        if (twice) problems.push({ path: `${path}.${key}`, message: twice, control: of.mark([], twice) });
        found.set(key, to.read(problems, `${path}.${key}`));
      }
      return Object.fromEntries(found);
    },
    find: (rows, segment) => rows.find(([of]) => of.read([], "") === segment)?.[1],
  });
}

function entryRow(name, content, removed) {
  const remove = el("button", { type: "button", class: "icon", "aria-label": `Remove entry of ${name}` }, "×");
  const element = el("div", { class: "row" }, content, remove);
  remove.addEventListener("click", () => {
    removed();
    const next = element.nextElementSibling ?? element.previousElementSibling;
    element.remove();
    next?.querySelector("input, textarea, select")?.focus();
  });
  return element;
}

function adder(name, add) {
  const added = () => add(undefined).querySelector("input, textarea, select")?.focus();
  return el("button", { type: "button", class: "add", onclick: added }, `+ ${name} entry`);
}

function variantsField(one) {
  const variants = (one.schema.anyOf ?? [one.schema]).map((variant) => resolved(variant, one.root).found);
  const titles = variants.map((variant) => constantOf(variant) ?? variant.title ?? variant.type);
  const kind = one.value && variants.findIndex((variant) => constantOf(variant) === constantIn(one.value, variant));
  const select = el(
    "select",
    {},
    one.required ? null : el("option", { value: "" }, "(none)"),
    ...titles.map((title, place) => el("option", { value: place, selected: place === kind }, title)),
  );
  const holder = el("div");
  let inner;
  const rebuild = () => {
    const variant = variants[Number(select.value)];
    inner = select.value === "" ? undefined : makeField(variant, "", { root: one.root, value: one.value });
    holder.replaceChildren(...(inner ? [inner.element] : []));
  };
  select.addEventListener("change", rebuild);
  rebuild();
  const { element, mark } = controls.framed(one, el("div", { class: "box" }, select, holder), select);
  return {
    element,
    read: (problems, path) => inner?.read(problems, path),
    mark: (segments, message) => (inner && segments.length ? inner.mark(segments, message) : mark(message)),
  };
}

const MAKERS = {
  constant: constantField,
  choice: controls.choiceField,
  variants: variantsField,
  toggle: controls.toggleField,
  number: controls.numberField,
  numbers: controls.numbersField,
  text: controls.textField,
  list: listField,
  group: groupField,
  map: mapField,
  json: controls.jsonField,
};
