// JSON Schema for forms: local references, initial values and validation; the server validates again. Paths have the
// server's notation: amount, address.street, tags[0]. Patterns are checked only by the server, in linear time.
import { isObject, same, json } from "./text.js";

export function resolve(schema, root, depth = 0) {
  if (!isObject(schema) || depth > 20) return {};
  if (typeof schema.$ref === "string" && schema.$ref.startsWith("#")) {
    let target = root;
    for (const part of schema.$ref.slice(1).split("/").filter(Boolean))
      target = target?.[decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~")];
    const { $ref, ...rest } = schema;
    return { ...resolve(target, root, depth + 1), ...rest };
  }
  if (Array.isArray(schema.allOf)) {
    const { allOf, ...rest } = schema;
    return allOf.map((part) => resolve(part, root, depth + 1)).reduce((all, part) => ({
      ...all, ...part,
      ...(all.properties || part.properties ? { properties: { ...all.properties, ...part.properties } } : {}),
      ...(all.required || part.required ? { required: [...new Set([...(all.required ?? []), ...(part.required ?? [])])] } : {}),
    }), rest);
  }
  if (schema.enum?.length === 1) return { ...schema, enum: undefined, const: schema.enum[0] };
  if (Array.isArray(schema.type)) {
    const { type, ...rest } = schema;
    if (type.length === 1) return { ...rest, type: type[0] };
    return { title: schema.title, description: schema.description, default: schema.default, anyOf: type.map((one) => ({ ...rest, title: undefined, description: undefined, default: undefined, type: one })) };
  }
  return schema;
}

export const branches = (schema, root) => (schema.oneOf ?? schema.anyOf)?.map((branch) => resolve(branch, root));

/** Return the index of a value's branch: the first that is valid, else the first of its type, else 0. */
export function branchOf(options, value, root) {
  const fits = options.findIndex((option) => !check(option, value, root).size);
  if (fits >= 0) return fits;
  return Math.max(0, options.findIndex((option) => option.type === typeOf(value)));
}

export const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value === "bigint" ? "number" : typeof value);

// Return the initial value of a field: the schema's default or constant, or an empty value of its type; undefined: none.
// `branch`: the schema is a branch of a choice, where even optional constants are set, since they identify the branch.
export function initial(given, root, branch = false, depth = 0) {
  if (depth > 6) return undefined;
  const schema = resolve(given, root);
  if (schema.default !== undefined) return schema.default;
  if (schema.const !== undefined) return schema.const;
  const options = branches(schema, root);
  if (options) return options.some((option) => option.type === "null") ? null : initial(options[0], root, true, depth + 1);
  if (schema.type === "object") {
    const value = {};
    for (const [name, property] of Object.entries(schema.properties ?? {})) {
      const first = schema.required?.includes(name) || (branch && resolve(property, root).const !== undefined) ? initial(property, root, false, depth + 1) : undefined;
      if (first !== undefined) value[name] = first;
    }
    return value;
  }
  if (schema.type === "array") return Array.from({ length: schema.minItems ?? 0 }, () => initial(schema.items, root, false, depth + 1) ?? null);
  if (schema.type === "boolean") return false;
  return schema.type === "null" ? null : undefined;
}

const FORMATS = {
  email: [/^[^\s@]+@[^\s@.]+(\.[^\s@.]+)+$/, "an e-mail address"],
  date: [/^\d{4}-\d\d-\d\d$/, "a date such as 2026-05-31"],
  time: [/^\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?$/i, "a time such as 14:30:00Z"],
  "date-time": [/^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?$/i, "a date and time such as 2026-05-31T14:30:00Z"],
  uri: [/^[a-z][a-z0-9+.-]*:\S+$/i, "an address such as https://example.org"],
  uuid: [/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i, "a UUID"],
};

/** Return a map of paths to errors. `depth` is the nesting of choices, which may be endless. */
export function check(given, value, root, path = "", errors = new Map(), depth = 0) {
  const schema = resolve(given, root);
  const wrong = (text) => errors.has(path) || errors.set(path, text);
  const options = depth < 6 && branches(schema, root);
  if (options) {
    const tried = options.map((option) => check(option, value, root, path, new Map(), depth + 1));
    if (!tried.some((found) => !found.size)) tried[Math.max(0, options.findIndex((option) => option.type === typeOf(value)))].forEach((text, at) => errors.set(at, text));
    return errors;
  }
  if (value === undefined) return wrong("This is required."), errors;
  if (schema.const !== undefined && !same(schema.const, value)) wrong(`Must be ${json(schema.const, 0)}.`);
  if (schema.enum && !schema.enum.some((choice) => same(choice, value))) wrong("Choose one of the values.");
  const type = typeOf(value);
  const wanted = schema.type === "integer" ? "number" : schema.type;
  if (wanted && wanted !== type) return wrong({ number: "Must be a number.", string: "Must be text.", boolean: "Must be yes or no." }[wanted] ?? `Must be ${wanted}.`), errors;
  if (type === "number") {
    if (schema.type === "integer" && typeof value !== "bigint" && !Number.isInteger(value)) wrong("Must be a whole number.");
    if (value < schema.minimum) wrong(`Must be at least ${schema.minimum}.`);
    if (value > schema.maximum) wrong(`Must be at most ${schema.maximum}.`);
    if (value <= schema.exclusiveMinimum) wrong(`Must be more than ${schema.exclusiveMinimum}.`);
    if (value >= schema.exclusiveMaximum) wrong(`Must be less than ${schema.exclusiveMaximum}.`);
    const times = Number(value) / Number(schema.multipleOf);
    if (schema.multipleOf && typeof value !== "bigint" && Math.abs(times - Math.round(times)) > 1e-9) wrong(`Must be a multiple of ${schema.multipleOf}.`);
  } else if (type === "string") {
    const length = [...value].length;
    if (length < schema.minLength) wrong(value ? `At least ${schema.minLength} characters.` : "This is required.");
    if (length > schema.maxLength) wrong(`At most ${schema.maxLength} characters.`);
    const [format, words] = FORMATS[schema.format] ?? [];
    if (format && !format.test(value)) wrong(`Must be ${words}.`);
  } else if (type === "array") {
    if (value.length < schema.minItems) wrong(`At least ${schema.minItems}.`);
    if (value.length > schema.maxItems) wrong(`At most ${schema.maxItems}.`);
    if (schema.uniqueItems && value.some((item, i) => value.slice(0, i).some((other) => same(item, other)))) wrong("Each only once.");
    value.forEach((item, i) => check(schema.items, item, root, `${path}[${i}]`, errors));
  } else if (type === "object") {
    for (const name of schema.required ?? []) if (!(name in value)) errors.set(join(path, name), "This is required.");
    for (const [name, item] of Object.entries(value)) if (schema.properties?.[name]) check(schema.properties[name], item, root, join(path, name), errors);
  }
  return errors;
}

export const join = (path, name) => (path ? `${path}.${name}` : name);
