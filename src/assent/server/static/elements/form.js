// <assent-form>: a form from a JSON Schema.
//   properties  schema: object   value: any JSON   problems: [text] (the server's, "path: what is wrong")   label: string
//   methods     check() -> true where nothing was found; else the errors are shown and the first field is focused
//   events      edited, with detail {value}
// Strings with formats, numbers with bounds, booleans, enums as choices, arrays, nested objects, oneOf and anyOf; what
// has no form of its own is written as JSON. The server checks again, and its word is shown beside the field.
import { Element, html, nothing } from "./base.js";
import { live } from "lit/directives/live.js";
import { resolve, branches, branchOf, initial, check, join } from "../schema.js";
import { same, json } from "../text.js";

let forms = 0;

class Form extends Element {
  static properties = { schema: {}, value: {}, problems: {}, label: {}, touched: { state: true } };
  #id = `form${++forms}`;
  #unread = new Map(); // path -> what was typed that is no value of its type
  #branch = new Map(); // path -> the branch that was chosen

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

  check() {
    const errors = this.errors;
    this.touched = new Set([...this.touched, ...errors.keys()]);
    if (errors.size) this.updateComplete.then(() => this.querySelector('[aria-invalid="true"]')?.focus());
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

  // `put` makes the whole value from this field's new one; undefined takes it away.
  #field(given, value, path, name, required, put, bare = false) {
    const schema = resolve(given, this.schema);
    const id = `${this.#id}-${path || "value"}`;
    const error = this.told.get(path) ?? (this.touched.has(path) ? this.found.get(path) : undefined);
    const set = (next) => this.#change(path, put(next));
    const label = schema.title && schema.title !== name ? `${name} (${schema.title})` : name;
    const hint = schema.description;
    const described = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ") || nothing;
    const field = { schema, value, path, id, name, required, set, put, described, invalid: error ? "true" : nothing };
    if (schema.const !== undefined && !schema.oneOf) return nothing; // there is nothing to choose
    const options = branches(schema, this.schema);
    const said = html`${hint ? html`<p class="hint" id="${id}-hint">${hint}</p>` : nothing}${error ? html`<p class="wrong" id="${id}-error">${error}</p>` : nothing}`;
    const head = html`${label}${required || bare ? nothing : html` <span class="optional">optional</span>`}`;
    if (options && !options.every((option) => option.const !== undefined)) return html`<fieldset class="field"><legend>${head}</legend>${this.#choice(field, options)}${said}</fieldset>`;
    const consts = options?.map((option) => ({ value: option.const, label: option.title }));
    const choices = schema.enum?.map((each) => ({ value: each })) ?? consts;
    if (choices) return choices.length <= 5
      ? html`<fieldset class="field choices" aria-describedby=${described}><legend>${head}</legend>${this.#radios(field, choices)}${said}</fieldset>`
      : html`<div class="field"><label for=${id}>${head}</label>${this.#select(field, choices)}${said}</div>`;
    switch (schema.type) {
      case "object":
        if (!Object.keys(schema.properties ?? {}).length) break;
        return html`<fieldset class="field object ${path && !bare ? "" : "whole"}" aria-label=${label}>${path && !bare ? html`<legend>${head}</legend>` : nothing}${this.#object(field)}${said}</fieldset>`;
      case "array":
        return html`<fieldset class="field array"><legend>${head}</legend>${this.#array(field)}${said}</fieldset>`;
      case "boolean":
        return html`<div class="field check"><label><input id=${id} type="checkbox" .checked=${live(value === true)} aria-describedby=${described} aria-invalid=${field.invalid}
          @change=${(event) => set(event.target.checked)}> ${label}</label>${said}</div>`;
      case "null":
        return html`<div class="field"><span class="null">${label}: null</span></div>`;
      case "string":
        return html`<div class="field"><label for=${id}>${head}</label>${this.#string(field)}${said}</div>`;
      case "number":
      case "integer":
        return html`<div class="field"><label for=${id}>${head}</label>${this.#number(field)}${said}</div>`;
    }
    return html`<div class="field"><label for=${id}>${head} <span class="optional">JSON</span></label>${this.#json(field)}${said}</div>`;
  }

  #string({ schema, value, id, set, required, described, invalid }) {
    const type = { date: "date", email: "email", uri: "url" }[schema.format] ?? "text";
    const input = (event) => set(event.target.value === "" && (!required || schema.minLength || schema.format) ? undefined : event.target.value);
    if (type === "text" && (schema.maxLength > 200 || (value ?? "").length > 80 || /\n/.test(value ?? "")))
      return html`<textarea id=${id} rows="4" .value=${live(value ?? "")} aria-describedby=${described} aria-invalid=${invalid} ?aria-required=${required} @input=${input}></textarea>`;
    return html`<input id=${id} type=${type} .value=${live(value ?? "")} aria-describedby=${described} aria-invalid=${invalid} placeholder=${schema.examples?.[0] ?? nothing} @input=${input}>`;
  }

  #number({ schema, value, path, id, set, required, described, invalid }) {
    const unread = this.#unread.get(path);
    const bounds = [schema.minimum !== undefined && `from ${schema.minimum}`, schema.maximum !== undefined && `to ${schema.maximum}`].filter(Boolean).join(" ");
    const input = (event) => {
      const text = event.target.value.trim().replace(",", ".");
      this.#unread.delete(path);
      if (text === "") return set(undefined);
      const number = Number(text);
      if (!Number.isFinite(number)) {
        this.#unread.set(path, { text: event.target.value, message: "Must be a number." });
        return set(value);
      }
      // Kept as it was typed: "9.50" must not become "9.5" under the cursor.
      this.typed = { path, text: event.target.value };
      return set(number);
    };
    const text = unread?.text ?? (this.typed?.path === path && Number(this.typed.text.trim().replace(",", ".")) === value ? this.typed.text : (value ?? ""));
    return html`<input id=${id} inputmode=${schema.type === "integer" ? "numeric" : "decimal"} .value=${live(String(text))} aria-describedby=${described} aria-invalid=${invalid}
      placeholder=${bounds || nothing} @input=${input}>`;
  }

  #json({ value, path, id, set, described, invalid }) {
    const unread = this.#unread.get(path);
    const input = (event) => {
      this.#unread.delete(path);
      if (!event.target.value.trim()) return set(undefined);
      try {
        const next = JSON.parse(event.target.value);
        this.typed = { path, text: event.target.value, value: next };
        return set(next);
      } catch {
        this.#unread.set(path, { text: event.target.value, message: "This is not JSON yet." });
        return set(value);
      }
    };
    const text = unread?.text ?? (this.typed?.path === path && same(this.typed.value, value) ? this.typed.text : value === undefined ? "" : json(value));
    return html`<textarea id=${id} class="mono" rows="4" spellcheck="false" .value=${live(text)} aria-describedby=${described} aria-invalid=${invalid} @input=${input}></textarea>`;
  }

  #radios({ value, id, set, required, invalid }, choices) {
    return html`<div class="options">${choices.map((choice, i) => html`<label><input type="radio" name=${id} aria-invalid=${invalid}
      .checked=${live(value !== undefined && same(choice.value, value))} @change=${() => set(choice.value)}> <span>${choice.label ?? text(choice.value)}</span></label>`)}
      ${required ? nothing : html`<label><input type="radio" name=${id} .checked=${live(value === undefined)} @change=${() => set(undefined)}> <span class="optional">leave out</span></label>`}</div>`;
  }

  #select({ value, id, set, required, described, invalid }, choices) {
    const at = choices.findIndex((choice) => value !== undefined && same(choice.value, value));
    return html`<select id=${id} aria-describedby=${described} aria-invalid=${invalid} @change=${(event) => set(choices[event.target.value]?.value)}>
      <option value="" ?selected=${at < 0}>${required ? "Choose…" : "leave out"}</option>
      ${choices.map((choice, i) => html`<option value=${i} ?selected=${i === at}>${choice.label ?? text(choice.value)}</option>`)}</select>`;
  }

  #object({ schema, value, path, put }) {
    const required = new Set(schema.required ?? []);
    return Object.entries(schema.properties).map(([name, property]) =>
      this.#field(property, value?.[name], join(path, name), name, required.has(name), (next) => {
        const { [name]: old, ...rest } = value ?? {};
        // In the schema's order, so that a difference shows what has changed and nothing else.
        const all = next === undefined ? rest : { ...rest, [name]: next };
        const order = value && name in value ? Object.keys(value) : Object.keys(schema.properties);
        return put(Object.fromEntries([...order.filter((key) => key in all), ...Object.keys(all).filter((key) => !order.includes(key))].map((key) => [key, all[key]])));
      }));
  }

  #array({ schema, value, path, name, set, put }) {
    const items = value ?? [];
    const item = resolve(schema.items, this.schema);
    if (schema.uniqueItems && item.enum)
      return html`<div class="options">${item.enum.map((choice) => html`<label><input type="checkbox" .checked=${live(items.some((each) => same(each, choice)))}
        @change=${(event) => set(event.target.checked ? [...items, choice] : items.filter((each) => !same(each, choice)))}> <span>${text(choice)}</span></label>`)}</div>`;
    return html`${items.map((each, i) => html`<div class="item">${this.#field(item, each, `${path}[${i}]`, `${name} ${i + 1}`, true, (next) => put(items.map((old, j) => (j === i ? next ?? null : old))), true)}
        <button type="button" class="quiet" aria-label="Remove ${name} ${i + 1}" @click=${() => set(items.filter((_, j) => j !== i))}>Remove</button></div>`)}
      <button type="button" class="quiet" ?disabled=${items.length >= schema.maxItems} @click=${() => set([...items, initial(item, this.schema) ?? (item.type === "string" ? "" : null)])}>Add ${name}</button>`;
  }

  #choice({ value, path, id, name, required, set, put }, options) {
    const chosen = value === undefined ? (this.#branch.get(path) ?? -1) : (this.#branch.get(path) ?? branchOf(options, value, this.schema));
    const at = options[chosen] ? chosen : required ? 0 : -1;
    const label = (option) => option.title ?? (option.const !== undefined ? text(option.const) : { null: "none", string: "text", boolean: "yes or no", integer: "whole number", object: "details", array: "list" }[option.type] ?? option.type ?? "JSON");
    const pick = (i) => {
      this.#branch.set(path, i);
      this.#unread.clear();
      set(i < 0 ? undefined : initial(options[i], this.schema) ?? (options[i].type === "string" ? "" : undefined));
    };
    return html`<div class="options">${options.map((option, i) => html`<label><input type="radio" name=${id} .checked=${live(i === at)} @change=${() => pick(i)}> <span>${label(option)}</span></label>`)}
      ${required ? nothing : html`<label><input type="radio" name=${id} .checked=${live(at < 0)} @change=${() => pick(-1)}> <span class="optional">leave out</span></label>`}</div>
      ${at >= 0 && options[at].type !== "null" && options[at].const === undefined ? this.#field({ ...options[at], title: undefined }, value, path, label(options[at]), true, put, true) : nothing}`;
  }
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

customElements.define("assent-form", Form);
