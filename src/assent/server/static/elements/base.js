// What the elements share: light DOM, which style sheets reach, and how values are shown.
import { LitElement, html, nothing } from "lit";
import { keyOf, Problem } from "../client.js";
import "../writing.js";
import { visible, unifiedDiff, lineDiff, isObject, json, brief, same, duration, atZero } from "../text.js";

export { html, nothing };

export const GUARD = 350; // milliseconds

export class Element extends LitElement {
  createRenderRoot() {
    return this;
  }

  connectedCallback() {
    super.connectedCallback();
    if (this.hasUpdated) this.requestUpdate("client", undefined); // moved within the page: watch again
  }

  /** An event for whoever holds the element: it bubbles, and `detail` is plain data. */
  emit(name, detail) {
    return this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true, composed: true, cancelable: true }));
  }

  /** Call `changed` for as long as the element is in the page. */
  watch(target, type, changed) {
    target.addEventListener(type, changed);
    this.#watched.push(() => target.removeEventListener(type, changed));
  }
  #watched = [];

  /** What could not reach the server is no news once it is back. */
  willUpdate(now) {
    if (now.has("client") && this.client) this.watch(this.client, "connection", () => this.client.connection === "online" && this.back());
  }

  back() {
    if (lost(this.problem)) this.problem = null;
  }

  /** Render again, or act, every so many milliseconds. */
  tick(milliseconds, act = () => this.requestUpdate()) {
    const timer = setInterval(act, milliseconds);
    this.#watched.push(() => clearInterval(timer));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#watched.forEach((end) => end());
    this.#watched = [];
  }
}

export const lost = (problem) => problem?.status === 0 || problem?.status >= 500;

const cards = new Set(); // those in the page
// One that comes or goes moves the others, perhaps under a pointer that is about to press, or half-way in a double click.
const moved = () => cards.forEach((card) => card.arm(2 * GUARD));

/** A card about a call that waits: what approvals and questions have in common. */
export class Card extends Element {
  static properties = { client: {}, pending: {}, place: { type: Boolean }, busy: { state: true }, problem: { state: true }, armed: { state: true } };

  connectedCallback() {
    super.connectedCallback();
    this.tick(1000);
    moved();
    cards.add(this);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearTimeout(this.guard);
    cards.delete(this);
    moved();
  }

  /** What can be pressed is new, or elsewhere: a press that was meant for something else must not count. */
  arm(wait = GUARD) {
    if (this.querySelector(".actions button:focus:not(.back)")) this.querySelector(".card").focus({ preventScroll: true }); // what is disabled would lose it
    this.armed = false;
    clearTimeout(this.guard);
    this.guard = setTimeout(() => (this.armed = true), wait);
  }

  // One element may be given call after call: nothing of the last one may stay on the next.
  willUpdate(now) {
    super.willUpdate(now);
    if (now.has("client")) this.arm();
    if (!this.pending) return;
    const { digest, since } = this.pending;
    const key = `${keyOf(this.pending)} ${digest} ${since}`;
    if (key === this.key) return;
    Object.assign(this, { key, busy: false, problem: null });
    this.arm();
    this.renew(now.get("pending"));
  }

  render() {
    return this.client && this.pending ? this.card() : nothing;
  }

  get left() {
    return this.pending.deadline - this.client.now();
  }

  get expired() {
    return this.left <= 0;
  }

  /** Nothing can be pressed. */
  get off() {
    return Boolean(!this.armed || this.busy || this.expired);
  }

  async decide(decision) {
    const { pending, key } = this;
    this.arm();
    this.busy = true;
    this.problem = null;
    try {
      const { seq } = await this.client.resolve(pending, decision);
      this.emit("decided", { pending, decision, seq });
    } catch (error) {
      const problem = error?.details ? error : new Problem({ status: error?.status, detail: `What came of it is not known: ${error?.message ?? error}` });
      if (key === this.key) Object.assign(this, { busy: false, problem });
      problem.final = [404, 410].includes(problem.status) || (problem.status === 409 && problem.details.reason !== "superseded");
      this.emit("refused", { pending, problem });
    }
  }

  about(chip) {
    const { tool, principal, agent, conversation } = this.pending;
    return html`<p class="about">${chip} <span><code>${shown(tool)}</code> for <b>${shown(principal?.id ?? "somebody")}</b>${agent ? html`, asked by <b>${shown(agent)}</b>` : nothing}${
      this.place ? html` in <a href="#/c/${encodeURIComponent(conversation)}">${named(conversation, this.place)}</a>` : nothing}</span></p>`;
  }

  refusal() {
    if (!this.problem) return nothing;
    const { reason, winner } = this.problem.details;
    return html`<p class="notice bad stale" role="alert">${winner ? html`Too late: ${shown(this.problem.message)}.`
      : reason === "superseded" ? "It has changed since it was shown. Nothing was decided; the card shows what it is now." : shown(this.problem.message)}</p>`;
  }

  expiry() {
    const then = shown(atZero(this.pending.on_expiry));
    return this.expired ? html`<span class="soon">Expired: ${then}.</span>`
      : html`<span class="expiry ${this.left < 60 ? "soon" : ""}">Expires in <time>${duration(Math.ceil(this.left))}</time>; then ${then}.</span>`;
  }
}

/** What to know before an approval, in a card or in a batch. */
export const warnings = ({ executor, recovery, reason, preview_error }) => html`
  ${executor === "client" ? html`<p class="about">It will run in a browser page.</p>` : nothing}
  ${recovery ? html`<p class="notice warn">It was interrupted while it ran: whether it took effect is not known. Approving runs it again.</p>`
    : reason ? html`<p class="notice">Why it waits: ${shown(reason)}</p>` : nothing}
  ${preview_error ? html`<p class="notice bad">What it would do could not be found out: ${shown(preview_error)}</p>` : nothing}`;

/** Text with what would not be seen made visible. */
export const shown = (text) =>
  visible(String(text)).map((piece) =>
    typeof piece === "string" ? piece : html`<span class="unseen" title="invisible character">${piece.code}</span>`);

/** A conversation: its id, after what it is called where that is known. */
export const named = (id, title) => (typeof title === "string" ? html`${shown(title)} <small>${shown(id)}</small>` : shown(id));

export const diffLines = (lines) => html`<div class="diff" role="group" aria-label="Differences">${lines.map(([mark, line]) =>
  html`<div class=${{ "+": "added", "-": "removed", "@": "about" }[mark] ?? "kept"}><span class="mark" aria-hidden="true">${mark === "@" ? "" : mark}</span>${
    mark === "+" || mark === "-" ? html`<span class="sr">${mark === "+" ? "added: " : "removed: "}</span>` : nothing}<code>${shown(line)}</code></div>`)}</div>`;

export const jsonDiff = (before, after) => diffLines(lineDiff(json(before), json(after)));

/** Whether a box was scrolled to its end, where also nothing is left beside it. */
export const atEnd = (box) => box.clientHeight > 0 && box.scrollTop + box.clientHeight >= box.scrollHeight - 6 && Math.abs(box.scrollLeft) + box.clientWidth >= box.scrollWidth - 6;

/** A JSON value for people: text as text, objects as tables; `diffs`: differences as such, where it is a tool's own word. */
export function value(it, diffs = true, depth = 0) {
  if (it === null || it === undefined) return html`<span class="null">${it === null ? "null" : "nothing"}</span>`;
  if (typeof it === "string") {
    const diff = diffs && unifiedDiff(it);
    if (diff) return diffLines(diff);
    if (it === "") return html`<span class="null">empty</span>`;
    return it.includes("\n") ? html`<pre class="text">${shown(it)}</pre>` : html`<span class="text">${shown(it)}</span>`;
  }
  if (typeof it !== "object") return html`<span class="scalar">${String(it)}</span>`;
  if (depth > 3) return html`<pre class="text">${shown(json(it))}</pre>`;
  if (Array.isArray(it)) return it.length ? html`<ol class="values">${it.map((item) => html`<li>${value(item, diffs, depth + 1)}</li>`)}</ol>` : html`<span class="null">none</span>`;
  if (diffs && typeof it.before === "string" && typeof it.after === "string") {
    const { before, after, ...rest } = it;
    return html`${Object.keys(rest).length ? table(rest, diffs, depth) : nothing}${diffLines(lineDiff(before, after))}`;
  }
  return table(it, diffs, depth);
}

/** What a model wrote may look like anything: it is shown as it is. */
export function table(object, diffs = false, depth = 0) {
  const rows = Object.entries(object);
  if (!rows.length) return html`<span class="null">none</span>`;
  return html`<table class="values"><tbody>${rows.map(([key, item]) =>
    html`<tr><th scope="row">${shown(key)}</th><td>${value(item, diffs, depth + 1)}</td></tr>`)}</tbody></table>`;
}

export const raw = (it) => html`<pre class="raw">${shown(json(it))}</pre>`;

/** A dry run that says no more than the arguments do. */
export const plainPreview = ({ tool, args, preview }) =>
  preview === null || preview === undefined || (isObject(preview) && preview.tool === tool && same(preview.args, args) && Object.keys(preview).length === 2);

/** One line about a value, cut. */
export const oneLine = (it, limit = 120) => {
  const text = brief(it).replace(/\s+/g, " ");
  return shown(text.length > limit ? `${text.slice(0, limit)}…` : text);
};
