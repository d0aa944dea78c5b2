// Elements. Text is only ever added as text, and attributes are never made of what a model wrote.

/** An element with attributes, listeners (onclick and the like) and children, which may be texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

let numIds = 0;

/** An id that no other element has. */
export const uid = () => `id-${++numIds}`;

const ESCAPES = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** A text on one line, with characters that cannot be seen, or turn the direction, as escapes. */
export function printable(text) {
  const hex = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (character) => ESCAPES[character] ?? hex(character));
}
