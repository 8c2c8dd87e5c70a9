// <holdfast-form>: a form from a JSON Schema.
//   properties  schema: object   value: any JSON   problems: [text] (of the server, "path: error")   label: string
//   methods     check(focus = true) -> whether all is valid; else the errors are shown and the first field is focused
//               reset(): to the initial values    unread -> whether a field has text that is not a value of its type
//   events      edited, with detail {value}
// Values without a field type of their own are edited as JSON. The server validates again; its errors appear at the fields.
import { Element, html, nothing, shown, oneLine } from "./base.js";
import { resolve, branches, branchOf, initial, check, join } from "../schema.js";
import { same, json, brief, number, parse, spelled } from "../text.js";

let forms = 0;

class Form extends Element {
  static properties = { schema: {}, value: {}, problems: {}, label: {}, touched: { state: true } };
  #id = `form${++forms}`;
  #unread = new Map(); // path -> typed text that is not a value of its type
  #branch = new Map(); // path -> the chosen branch
  #long = new Map(); // path -> whether the text was long initially: then Enter inserts a new line

  constructor() {
    super();
    this.touched = new Set();
    this.problems = [];
  }

  willUpdate(changed) {
    if (changed.has("schema") && this.value === undefined) this.value = initial(this.schema, this.schema);
  }

  get errors() {
    const errors = check(this.schema, this.value, this.schema);
    for (const [path, { message }] of this.#unread) errors.set(path, message);
    return errors;
  }

  get unread() {
    return this.#unread.size > 0;
  }

  reset() {
    this.#forget("");
    this.touched = new Set();
    this.value = undefined;
    this.requestUpdate("schema");
  }

  #forget(path) {
    for (const map of [this.#unread, this.#branch, this.#long])
      for (const key of map.keys()) if (!path || (key.startsWith(path) && /^([.[]|$)/.test(key.slice(path.length)))) map.delete(key);
  }

  check(focus = true) {
    const errors = this.errors;
    this.touched = new Set([...this.touched, ...errors.keys()]);
    if (focus && errors.size) this.updateComplete.then(() => this.querySelector('[aria-invalid="true"]')?.focus());
    return !errors.size;
  }

  #change(path, value) {
    this.value = value;
    this.problems = [];
    this.touched = new Set([...this.touched, path]);
    this.emit("edited", { value });
  }

  render() {
    this.found = this.errors;
    this.told = new Map(this.problems.map((text) => [/^[^\s:]*(?=: )/.exec(text)?.[0] ?? "", text.replace(/^[^\s:]*: /, "")]));
    const schema = resolve(this.schema, this.schema);
    return html`<div class="form" role="group" aria-label=${this.label ?? "Form"}>${this.#field(schema, this.value, "", schema.title ?? this.label ?? "Answer", true, (value) => value)}</div>`;
  }

  // `put` returns the whole value with this field's new one. `bare`: nesting in choices or lists, which show its name.
  #field(given, value, path, name, required, put, bare = 0) {
    const schema = resolve(given, this.schema);
    const id = `${this.#id}-${path || "value"}`;
    const error = this.told.get(path) ?? (this.touched.has(path) ? this.found.get(path) : undefined);
    const set = (next) => this.#change(path, put(next));
    const label = schema.title && schema.title !== name ? `${name} (${schema.title})` : name;
    const hint = schema.description;
    const described = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ") || nothing;
    const field = { schema, value, path, id, name: spelled(name), required, set, put, bare, described, invalid: error ? "true" : nothing };
    if (schema.const !== undefined && !schema.oneOf) return nothing; // a constant needs no field
    const options = bare > 6 ? null : branches(schema, this.schema); // nested choices may be endless
    const said = html`${hint ? html`<p class="hint" id="${id}-hint">${shown(hint)}</p>` : nothing}${error ? html`<p class="wrong" id="${id}-error">${shown(error)}</p>` : nothing}`;
    const head = html`${shown(label)}${required || bare ? nothing : html` <span class="optional">optional${schema.default === undefined ? nothing : html`, default: ${word(schema.default)}`}</span>`}`;
    if (options && !options.every((option) => option.const !== undefined)) return html`<fieldset class="field"><legend>${head}</legend>${this.#choice(field, options)}${said}</fieldset>`;
    const consts = options?.map((option) => ({ value: option.const, label: option.title }));
    const choices = schema.enum?.map((each) => ({ value: each })) ?? consts ?? (schema.type === "boolean" && !required ? [{ value: true, label: "yes" }, { value: false, label: "no" }] : null);
    if (choices) return choices.length <= 5
      ? html`<fieldset class="field choices" aria-describedby=${described}><legend>${head}</legend>${this.#radios(field, choices)}${said}</fieldset>`
      : html`<div class="field"><label for=${id}>${head}</label>${this.#select(field, choices)}${said}</div>`;
    switch (schema.type) {
      case "object":
        if (!Object.keys(schema.properties ?? {}).length || (value === undefined && path.split(".").length > 2)) break; // a schema may refer to itself
        return html`<fieldset class="field object ${path && !bare ? "" : "whole"}" aria-label=${spelled(label)}>${path && !bare ? html`<legend>${head}</legend>` : nothing}${this.#object(field)}${said}</fieldset>`;
      case "array":
        return html`<fieldset class="field array"><legend>${head}</legend>${this.#array(field)}${said}</fieldset>`;
      case "boolean":
        return html`<div class="field check"><label><input id=${id} type="checkbox" .checked=${value === true} aria-describedby=${described} aria-invalid=${field.invalid}
          @change=${(event) => set(event.target.checked)}> ${shown(label)}</label>${said}</div>`;
      case "null":
        return html`<div class="field"><span class="null">${shown(label)}: null</span></div>`;
      case "string":
        return html`<div class="field"><label for=${id}>${head}</label>${this.#string(field)}${said}</div>`;
      case "number":
      case "integer":
        return html`<div class="field"><label for=${id}>${head}</label>${this.#number(field)}${said}</div>`;
    }
    return html`<div class="field"><label for=${id}>${head} <span class="optional">JSON</span></label>${this.#json(field)}${said}</div>`;
  }

  // Invalid input stays as typed, with an error, and the value does not change. Valid input stays as typed, too: "9.50"
  // must not become "9.5" under the cursor.
  #input({ path, value, set }, message, read) {
    return ({ target }) => {
      const text = target.value;
      let next = value;
      this.#unread.delete(path);
      try {
        if (target.validity.badInput) throw 0; // an incomplete date or time
        next = read(text);
        this.typed = { path, text, value: next };
      } catch {
        this.#unread.set(path, { text, message });
      }
      set(next);
    };
  }

  #text({ path, value }, otherwise) {
    return this.#unread.get(path)?.text ?? (this.typed?.path === path && same(this.typed.value, value) ? this.typed.text : otherwise);
  }

  #string(field) {
    const { schema, path, id, required, described, invalid } = field;
    const value = field.value ?? "";
    const picker = PICKERS[schema.format], picked = picker && toPicker(schema.format, field.value);
    if (picked) {
      const input = this.#input(field, "This is not complete.", (text) => (text ? fromPicker(schema.format, text, picked.zone) : undefined));
      return html`<input id=${id} type=${picker} .value=${picked.local} max=${picker === "time" ? nothing : "9999-12-31T23:59:59".slice(0, picker === "date" ? 10 : 19)} aria-describedby="${id}-zone ${described === nothing ? "" : described}" aria-invalid=${invalid} @input=${input}>
        <p class="hint" id="${id}-zone">${zoneWords(schema.format, field.value, picked.zone)}</p>`;
    }
    const type = { email: "email", uri: "url" }[schema.format] ?? "text";
    const input = this.#input(field, "This is not complete.", (text) => (text === "" && (!required || schema.minLength || schema.format) ? undefined : text));
    const hint = schema.examples?.[0] ?? nothing;
    if (type !== "text") return html`<input id=${id} type=${type} .value=${value} aria-describedby=${described} aria-invalid=${invalid} placeholder=${hint} @input=${input}>`;
    const lines = value.split("\n").length;
    if (!this.#long.has(path)) this.#long.set(path, lines > 1 || schema.maxLength > 200 || value.length > 80);
    const long = this.#long.get(path);
    return html`<textarea id=${id} class=${long ? nothing : "line"} rows=${Math.min(10, Math.max(lines, long ? 4 : 1))} .value=${value} aria-describedby=${described} aria-invalid=${invalid} placeholder=${hint}
      @input=${input} @keydown=${long ? nothing : sends}></textarea>`;
  }

  #number(field) {
    const { schema, value, id, described, invalid } = field;
    const bounds = [schema.minimum !== undefined && `from ${schema.minimum}`, schema.maximum !== undefined && `to ${schema.maximum}`].filter(Boolean).join(" ");
    const whole = schema.type === "integer";
    const input = this.#input(field, "Must be a number. Write it as 1000 or 0.5.", (given) => {
      const text = given.trim();
      if ((whole ? /[.,]\d{3}$/ : /,\d{3}$/).test(text)) throw 0; // ambiguous: a thousands or a decimal separator
      return text ? number(text.replace(",", ".")) : undefined;
    });
    return html`<input id=${id} inputmode=${whole ? "numeric" : "decimal"} .value=${String(this.#text(field, value ?? ""))} aria-describedby=${described} aria-invalid=${invalid}
      placeholder=${bounds || nothing} @input=${input}>`;
  }

  #json(field) {
    const { value, id, described, invalid } = field;
    const input = this.#input(field, "This is not JSON yet.", (text) => (text.trim() ? parse(text) : undefined));
    return html`<textarea id=${id} class="mono" rows="4" spellcheck="false" .value=${this.#text(field, value === undefined ? "" : json(value))} aria-describedby=${described} aria-invalid=${invalid} @input=${input}></textarea>`;
  }

  #radios({ value, id, set, required, invalid }, choices) {
    return html`<div class="options">${choices.map((choice, i) => html`<label><input type="radio" name=${id} aria-invalid=${invalid}
      .checked=${value !== undefined && same(choice.value, value)} @change=${() => set(choice.value)}> <span>${shown(choice.label ?? brief(choice.value))}</span></label>`)}
      ${required ? nothing : html`<label><input type="radio" name=${id} .checked=${value === undefined} @change=${() => set(undefined)}> <span class="optional">not set</span></label>`}</div>`;
  }

  #select({ value, id, set, required, described, invalid }, choices) {
    const at = choices.findIndex((choice) => value !== undefined && same(choice.value, value));
    return html`<select id=${id} aria-describedby=${described} aria-invalid=${invalid} @change=${(event) => set(choices[event.target.value]?.value)}>
      <option value="" ?selected=${at < 0}>${required ? "Choose…" : "not set"}</option>
      ${choices.map((choice, i) => html`<option value=${i} ?selected=${i === at}>${spelled(choice.label ?? brief(choice.value))}</option>`)}</select>`;
  }

  #object({ schema, value, path, put }) {
    const required = new Set(schema.required ?? []);
    return Object.entries(schema.properties).map(([name, property]) =>
      this.#field(property, value?.[name], join(path, name), name, required.has(name), (next) => {
        const { [name]: old, ...rest } = value ?? {};
        // Keep the order of keys, so that a diff shows only the changed values.
        const all = next === undefined ? rest : { ...rest, [name]: next };
        const order = value && name in value ? Object.keys(value) : Object.keys(schema.properties);
        return put(Object.fromEntries([...order.filter((key) => key in all), ...Object.keys(all).filter((key) => !order.includes(key))].map((key) => [key, all[key]])));
      }));
  }

  #array({ schema, value, path, name, set, put }) {
    const items = value ?? [];
    const item = resolve(schema.items, this.schema);
    if (schema.uniqueItems && item.enum)
      return html`<div class="options">${item.enum.map((choice) => html`<label><input type="checkbox" .checked=${items.some((each) => same(each, choice))}
        @change=${(event) => set(event.target.checked ? [...items, choice] : items.filter((each) => !same(each, choice)))}> <span>${shown(brief(choice))}</span></label>`)}</div>`;
    return html`${items.map((each, i) => html`<div class="item">${this.#field(item, each, `${path}[${i}]`, `${name} ${i + 1}`, true, (next) => put(items.map((old, j) => (j === i ? next ?? null : old))), 1)}
        <button type="button" class="quiet" aria-label="Remove ${name} ${i + 1}" @click=${() => { this.#forget(path); set(items.filter((_, j) => j !== i)); }}>Remove</button></div>`)}
      <button type="button" class="quiet" ?disabled=${items.length >= schema.maxItems} @click=${() => set([...items, initial(item, this.schema) ?? (item.type === "string" ? "" : null)])}>Add ${name}</button>`;
  }

  #choice({ value, path, id, required, set, put, bare }, options) {
    const chosen = value === undefined ? (this.#branch.get(path) ?? -1) : (this.#branch.get(path) ?? branchOf(options, value, this.schema));
    const at = options[chosen] ? chosen : required ? 0 : -1;
    const name = `${id}/${bare}`; // nested choices need their own radio groups
    const pick = (i) => {
      this.#forget(path);
      this.#branch.set(path, i);
      const begun = i < 0 ? undefined : initial(options[i], this.schema, true);
      set(begun === undefined && options[i]?.type === "string" ? "" : begun);
    };
    return html`<div class="options">${options.map((option, i) => html`<label><input type="radio" name=${name} .checked=${i === at} @change=${() => pick(i)}> <span>${shown(called(option))}</span></label>`)}
      ${required ? nothing : html`<label><input type="radio" name=${name} .checked=${at < 0} @change=${() => pick(-1)}> <span class="optional">not set</span></label>`}</div>
      ${at >= 0 && options[at].type !== "null" && options[at].const === undefined ? this.#field({ ...options[at], title: undefined }, value, path, called(options[at]), true, put, bare + 1) : nothing}`;
  }
}

const TYPES = { null: "none", string: "text", boolean: "yes or no", integer: "whole number", object: "details", array: "list", date: "date", time: "time", "date-time": "date and time" };

/** Return the label of a branch. */
function called({ title, const: only, enum: several, type, format, anyOf, oneOf }) {
  if (title !== undefined) return title;
  if (only !== undefined) return brief(only);
  if (several) return several.map(brief).join(" or ");
  return TYPES[format] ?? TYPES[type] ?? type ?? (anyOf || oneOf ? "a choice" : "JSON");
}

// As in the composer: Enter submits, Shift+Enter inserts a new line.
function sends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.isComposing) return;
  event.preventDefault();
  event.target.form?.requestSubmit();
}

// Pickers of the browser have no time zone: a date-time is shown in the visitor's zone and sent with its offset. A value
// without an offset stays without one.
const PICKERS = { date: "date", time: "time", "date-time": "datetime-local" };
const STAMP = /^(?:(\d{4}-\d\d-\d\d)[T ])?(\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,3})\d*)?)?(Z|[+-]\d\d:\d\d)?$/i;
const pad = (n, length = 2) => String(n).padStart(length, "0");

/** Return the UTC offset of the visitor's zone at a time: "+02:00". */
function offsetAt(date) {
  const minutes = -date.getTimezoneOffset(), size = Math.abs(minutes);
  return `${minutes < 0 ? "-" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}`;
}

/** Return {local, zone}: what the picker shows, and the offset to keep (undefined: the visitor's); null if it cannot show the value. */
function toPicker(format, text) {
  if (text === undefined || text === "") return { local: "" };
  if (format === "date") return /^\d{4}-\d\d-\d\d$/.test(text) ? { local: text } : null;
  const [, day, hours, seconds = "00", fraction = "", zone = ""] = STAMP.exec(text) ?? [];
  if (!hours || Boolean(day) !== (format === "date-time")) return null;
  const clock = (minutes) => minutes + (Number(fraction) ? `:${seconds}.${fraction}` : seconds === "00" ? "" : `:${seconds}`);
  if (!day) return { local: clock(hours), zone };
  if (!zone) return { local: `${day}T${clock(hours)}`, zone };
  const at = new Date(text.replace(" ", "T"));
  if (Number.isNaN(at.getTime()) || at.getFullYear() < 1 || at.getFullYear() > 9999) return null;
  return { local: clock(minuteOf(at)) };
}

const minuteOf = (at) => `${pad(at.getFullYear(), 4)}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}T${pad(at.getHours())}:${pad(at.getMinutes())}`;

/** Return the value of a picker as RFC 3339 has it. */
function fromPicker(format, local, zone) {
  if (format === "date") return local;
  const cut = format === "time" ? 5 : 16, seconds = local.slice(cut) || ":00";
  if (format === "time" || zone === "") return local.slice(0, cut) + seconds + (zone ?? offsetAt(new Date()));
  const at = new Date(local); // a time that the clock skips becomes the one that it shows then
  return minuteOf(at) + seconds + offsetAt(at);
}

function zoneWords(format, value, zone) {
  if (format === "date") return nothing;
  if (zone === "") return "Without a time zone.";
  const offset = zone ?? offsetAt(value && format === "date-time" ? new Date(value.replace(" ", "T")) : new Date());
  const utc = /^(z|[+-]00:00)$/i.test(offset) ? "UTC" : `UTC${offset}`;
  return zone && offset !== offsetAt(new Date()) ? `Time zone: ${utc}` : `Your time zone: ${[...new Set([Intl.DateTimeFormat().resolvedOptions().timeZone, utc])].join(", ")}`;
}

const word = (it) => (it === null ? "none" : typeof it === "boolean" ? (it ? "yes" : "no") : it.length === 0 ? "empty" : oneLine(it, 60));

customElements.define("holdfast-form", Form);
