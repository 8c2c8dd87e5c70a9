// Rendering of values: text, tables and diffs. The shapes of the workspace tools are in workspace.js.
import { html, nothing } from "lit";
import { workspaceValue, wholeDiff } from "./workspace.js";
import { diffLines } from "./diff.js";
import { visible, unifiedDiff, lineDiff, isObject, json, brief, same } from "../text.js";

export { diffLines };

/** Render text with its invisible characters made visible. */
export const shown = (text) =>
  visible(String(text)).map((piece) =>
    typeof piece === "string" ? piece : html`<span class="unseen" title="invisible character">${piece.code}</span>`);

/** Render a conversation: its title, if known, and its id. */
export const named = (id, title) => (typeof title === "string" ? html`${shown(title)} <small>${shown(id)}</small>` : shown(id));

/** Render how a JSON value has changed. Its lines have no numbers: no person has written them. */
export const jsonDiff = (before, after, options) => diffLines(lineDiff(json(before), json(after)).map(([mark, line]) => [mark, line]), options);

/** Render a JSON value: text as text, objects as tables.
 *
 * source: {client, conversation} of a value that a tool produced: diffs and the shapes of workspace.js are rendered as
 * such. Without it, a model or a person wrote the value.
 */
export function value(it, source, depth = 0) {
  if (it === null || it === undefined) return html`<span class="null">${it === null ? "null" : "nothing"}</span>`;
  if (typeof it === "string") {
    const diff = source && unifiedDiff(it);
    if (diff) return diffLines(diff);
    if (it === "") return html`<span class="null">empty</span>`;
    return it.includes("\n") ? html`<pre class="text">${shown(it)}</pre>` : html`<span class="text">${shown(it)}</span>`;
  }
  if (typeof it !== "object") return html`<span class="scalar">${String(it)}</span>`;
  const known = source && workspaceValue(it, source);
  if (known) return known;
  if (depth > 3) return html`<pre class="text">${shown(json(it))}</pre>`;
  if (Array.isArray(it)) return it.length ? html`<ol class="values">${it.map((item) => html`<li>${value(item, source, depth + 1)}</li>`)}</ol>` : html`<span class="null">none</span>`;
  if (source && typeof it.before === "string" && typeof it.after === "string") {
    const { before, after, ...rest } = it;
    return html`${Object.keys(rest).length ? table(rest, source, depth) : nothing}${diffLines(lineDiff(before, after))}`;
  }
  return table(it, source, depth);
}

/** Render an object as a table. Values that a model wrote are never rendered as diffs. */
export function table(object, source, depth = 0) {
  const all = Object.entries(object);
  return all.length ? rows(all.map(([key, item]) => [key, value(item, source, depth + 1)])) : html`<span class="null">none</span>`;
}

/** Render a table of names and rendered values. */
export const rows = (all) => html`<table class="values"><tbody>${all.map(([name, inside]) =>
  html`<tr><th scope="row">${shown(name)}</th><td>${inside}</td></tr>`)}</tbody></table>`;

/** Render a value as JSON; with a source, also what it refers to. */
export const raw = (it, source) => html`<pre class="raw">${shown(json(it))}</pre>${source ? wholeDiff(it, source) : nothing}`;

/** Return whether there is no preview beyond the arguments. A preview of null counts as one. */
export const plainPreview = ({ tool, args, preview, preview_error }) =>
  preview === undefined || Boolean(preview_error) || (isObject(preview) && preview.tool === tool && same(preview.args, args) && Object.keys(preview).length === 2);

/** Render a value in one line, truncated. */
export const oneLine = (it, limit = 120) => {
  const text = brief(it).replace(/\s+/g, " ");
  return shown(text.length > limit ? `${text.slice(0, limit)}…` : text);
};
