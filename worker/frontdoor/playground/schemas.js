// JSON Schemas: what they stand for, and what of them a person reads. No document is needed here.

/** A schema without its $ref and without null among its alternatives. */
export function resolved(schema, root) {
  if (typeof schema !== "object" || schema === null) return { found: {}, nullable: false };
  let found = schema;
  if (found.$ref !== undefined) {
    const { $ref, ...own } = found;
    const target = $ref.split("/").slice(1).reduce((inside, key) => inside?.[key], root);
    found = { ...resolved(target, root).found, ...own };
  }
  const { anyOf, oneOf, ...own } = found;
  const variants = anyOf ?? oneOf;
  if (variants === undefined) return { found, nullable: false };
  const left = variants.filter((variant) => variant.type !== "null");
  const nullable = left.length < variants.length;
  if (left.length === 1) return { found: { ...resolved(left[0], root).found, ...own }, nullable };
  return { found: { ...own, anyOf: left }, nullable };
}

/** Which of the fields in forms.js a schema gets. */
export function kindOf(schema, root, depth = 0) {
  if ("const" in schema) return "constant";
  if (Array.isArray(schema.enum)) return "choice";
  if (schema.anyOf) {
    const isForm = (variant) => kindOf(resolved(variant, root).found, root, depth + 1) !== "json";
    return depth < 8 && schema.anyOf.every((variant) => isForm(variant)) ? "variants" : "json";
  }
  if (schema.type === "boolean") return "toggle";
  if (isNumber(schema)) return "number";
  if (schema.type === "string") return "text";
  if (schema.type === "array") {
    if (schema.items === undefined) return "json";
    return isNumber(resolved(schema.items, root).found) ? "numbers" : "list";
  }
  if (schema.type === "object" && schema.properties) return "group";
  return schema.type === "object" && entrySchema(schema) ? "map" : "json";
}

export const isNumber = (schema) => schema.type === "number" || schema.type === "integer";

/** Of an object with keys of any name: pattern of the keys, if there is one, and schema of the values. */
export function entrySchema(schema) {
  const patterns = Object.entries(schema.patternProperties ?? {});
  if (patterns.length === 1) return { pattern: patterns[0][0], values: patterns[0][1] };
  const others = schema.additionalProperties;
  return typeof others === "object" && Object.keys(others).length > 0 ? { values: others } : undefined;
}

/** What tells the variants of an object apart: the value of its first constant property. */
export const constantOf = (variant) => Object.values(variant.properties ?? {}).find((each) => "const" in each)?.const;

/** The property of a value that tells its variants apart. */
export function constantIn(value, variant) {
  const name = Object.entries(variant.properties ?? {}).find(([, each]) => "const" in each)?.[0];
  return name && value[name];
}

/** A value in an error or a hint. */
export const show = (value) => JSON.stringify(value);

/** Range and default of a field, in short; those of switches and choices show in their controls. */
export function hintOf({ schema, required }) {
  if (schema.type === "boolean" || schema.enum) return "";
  const parts = [];
  if (isNumber(schema)) parts.push([schema.type === "integer" ? "integer" : "", boundsOf(schema)].join(" ").trim());
  if (schema.default !== undefined && schema.default !== null) parts.push(`default ${show(schema.default)}`);
  return parts.filter(Boolean).join(", ") || (required ? "" : "optional");
}

function boundsOf({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  if (minimum !== undefined && maximum >= 2 ** 31 - 1) return `≥ ${minimum}`;
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}`;
  const bounds = [["≥", minimum], [">", exclusiveMinimum], ["≤", maximum], ["<", exclusiveMaximum]];
  return bounds.filter(([, bound]) => bound !== undefined).map(([sign, bound]) => `${sign} ${bound}`).join(" and ");
}

/** What is wrong with a number, by its schema and the text that it was written as. */
export function numberProblem(text, value, schema) {
  if (text.trim() === "" || !Number.isFinite(value)) return `must be a number, got ${show(text)}`;
  if (schema.type === "integer" && !Number.isInteger(value)) return `must be an integer, got ${text}`;
  if (Math.abs(value) > Number.MAX_SAFE_INTEGER) return "is too large for a browser to send exactly";
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = schema;
  if (value < minimum) return `must be at least ${minimum}, got ${text}`;
  if (value > maximum) return `must be at most ${maximum}, got ${text}`;
  if (value <= exclusiveMinimum) return `must be above ${exclusiveMinimum}, got ${text}`;
  if (value >= exclusiveMaximum) return `must be below ${exclusiveMaximum}, got ${text}`;
  return undefined;
}

/** The value of JSON text. Throws for no JSON, and for an integer that would be sent as another one. */
export function jsonOf(text) {
  return JSON.parse(text, (key, value) => {
    if (typeof value !== "number" || Math.abs(value) <= Number.MAX_SAFE_INTEGER) return value;
    throw new RangeError(`${value} is too large for a browser to send exactly`);
  });
}

/** What is wrong with a number of characters, numbers or entries. */
export function lengthProblem(length, least, most, unit) {
  if (length < least) return `must have at least ${least} ${unit}, got ${length}`;
  if (length > most) return `must have at most ${most} ${unit}, got ${length}`;
  return undefined;
}

