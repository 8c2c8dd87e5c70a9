// Base classes of the elements. They use light DOM, so that style sheets apply to them. Values are rendered by values.js.
import { LitElement, html, nothing } from "lit";
import { keyOf, nameOf, Problem } from "../client.js";
import "../writing.js";
import { Guard, UNLOADED, atEnd, atBottom } from "../guard.js";
import { duration, atZero, listed, moment, when } from "../text.js";
import { shown, named } from "./values.js";
import { barred } from "./votes.js";

export { html, nothing };
export * from "./values.js";

export class Element extends LitElement {
  createRenderRoot() {
    return this;
  }

  connectedCallback() {
    super.connectedCallback();
    if (this.hasUpdated) this.requestUpdate("client", undefined); // moved within the page: watch again
  }

  /** Dispatch a bubbling event with plain data. */
  emit(name, detail) {
    return this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true, composed: true, cancelable: true }));
  }

  /** Listen to an event while the element is in the page. */
  watch(target, type, changed) {
    target.addEventListener(type, changed);
    this.#watched.push(() => target.removeEventListener(type, changed));
  }
  #watched = [];

  /** Clear connection errors once the server is reachable again. */
  willUpdate(now) {
    if (now.has("client") && this.client) this.watch(this.client, "connection", () => this.client.connection === "online" && this.back());
  }

  back() {
    if (lost(this.problem)) this.problem = null;
  }

  /** Render, or call `act`, at this interval. */
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

/** Render what a person had typed about a call that another person has decided. */
export function keptText(text) {
  // Browsers give pages without encryption no clipboard: then the text is selected.
  const copy = async ({ target }) => {
    getSelection().selectAllChildren(target.closest(".kept-text").querySelector("q"));
    await navigator.clipboard?.writeText(text).then(() => (target.textContent = "Copied"), () => {});
  };
  return html`<div class="kept-text"><p>You had written: <q>${shown(text)}</q></p><button type="button" class="quiet" @click=${copy}>Copy</button></div>`;
}

/** Return whether it is unknown if the request arrived. */
export const unanswered = (problem) => ["unreachable", "timeout"].includes(problem.kind);

/** Return whether a decision was for an earlier version of the call; details.suspension names the current one. */
const outdated = ({ status, details }) => status === 409 && (details.reason === "superseded" || Boolean(details.suspension));

export const lost = (problem) => problem?.status === 0 || problem?.status >= 500;

const TALL = 0.4; // of the height of the scroller: a taller headline is not sticky

const UNREAD = "Nothing was sent: you have not seen all of this card. Read this part, then press again.";
const PAGE = 0.85; // of a box, by which a press scrolls to what was not seen

// More time: [words, seconds].
const SPANS = [["1 hour", 3600], ["1 day", 86_400], ["1 week", 604_800]];

// What of a suspension has changed, by the names of the server.
const CHANGED = { kind: "what it waits for", prompt: "the question", args: "the arguments", preview: "what would happen", preview_error: "why there is no preview", choices: "the choices", fingerprint: "the tool" };

const cards = new Set(); // all cards in the page
const superseded = new Map(); // call -> {name, typed, problem}: the last decision about it that came too late for its suspension
const renewAll = () => cards.forEach((card) => card.guard.renew([]));

/** A card for a pending call: the common part of approvals and questions.
 *
 * Its buttons are guarded (guard.js). While presses are ignored, they have aria-disabled, which keeps the focus.
 */
export class Card extends Element {
  static properties = { client: {}, pending: {}, place: { type: Boolean }, busy: { state: true }, problem: { state: true }, armed: { state: true }, hint: { state: true }, heard: { state: true }, giving: { state: true }, given: { state: true } };

  guard = new Guard(this, {
    buttons: () => [...this.querySelectorAll(".actions button")],
    parts: () => this.parts,
    changed: () => {
      this.armed = this.guard.armed;
      if (this.hint === UNREAD && !this.guard.unseen()) this.hint = "";
      this.requestUpdate();
      return this.updateComplete;
    },
  });

  connectedCallback() {
    super.connectedCallback();
    this.tick(1000);
    this.watch(this, "loaded", () => {
      this.hint = "";
      this.requestUpdate();
    });
    this.guard.start();
    cards.add(this);
    renewAll();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.guard.stop();
    cards.delete(this);
    renewAll();
  }

  updated() {
    const { headline } = this;
    if (!headline) return;
    const scroller = headline.closest(".scroll, .opened, holdfast-inbox");
    headline.classList.toggle("tall", headline.offsetHeight > TALL * (scroller?.clientHeight || innerHeight));
    this.guard.sample();
  }

  /** The element with the title: in the inbox it is the row, unless the card is shown beside the list. */
  get headline() {
    const header = this.querySelector("header");
    return header?.offsetHeight > 1 ? header : this.closest(".row.open")?.querySelector(".bar") ?? header;
  }

  /** The parts that must be seen before any decision. */
  get heading() {
    return [this.headline, this.querySelector(".facts")].filter(Boolean);
  }

  /** The parts that must be seen before an approval. */
  get parts() {
    return this.heading;
  }

  /** Return whether a press counts. If not, explain why, and scroll to the unseen part. */
  press(parts = this.heading) {
    this.hint = "";
    if (this.off) return false;
    const unseen = this.guard.unseen(parts);
    const load = unseen?.querySelector(UNLOADED);
    if (load) {
      this.hint = "Nothing was sent: this card shows only a part of the change. Load the rest first.";
      load.querySelector(".more").scrollIntoView({ block: "nearest" });
      load.querySelector("button, a")?.focus({ preventScroll: true });
    } else if (unseen) this.#reveal(unseen);
    else if (this.guard.steady()) return true;
    else this.hint = "Nothing was sent: this card has just appeared, changed or moved. Please check it and press again.";
    return false;
  }

  /** Say why a press had no effect; return false. */
  explain(why) {
    this.hint = why;
    return false;
  }

  // Move to what was not seen: a part that scrolls is read page by page.
  #reveal(part) {
    const edge = this.guard.missing(part);
    part.scrollIntoView({ block: edge });
    if (edge === "end" && !atEnd(part)) {
      part.scrollTop += part.clientHeight * PAGE;
      if (atBottom(part)) part.scrollLeft = part.scrollWidth;
    }
    if (part.tabIndex >= 0) part.focus({ preventScroll: true });
    this.hint = UNREAD;
  }

  /** Return the value of aria-disabled: whether presses are ignored now. */
  held(parts = this.heading) {
    return String(!this.armed || Boolean(this.guard.unseen(parts)));
  }

  // An element may be reused for another call: no state of the last call may remain.
  willUpdate(now) {
    super.willUpdate(now);
    if (now.has("client")) this.guard.renew();
    if (!this.pending) return;
    const { digest, since, seq, starts_at: approved = "" } = this.pending;
    const key = `${keyOf(this.pending)} ${seq} ${digest} ${since} ${approved ?? ""}`;
    if (key === this.key) return;
    Object.assign(this, { key, busy: "", problem: null, hint: "", heard: "", giving: false, given: null });
    this.guard.renew();
    this.renew(now.get("pending"));
    this.recall();
  }

  // A decision was for an earlier suspension of this call: say what changed, and give back what was typed. The card may
  // be another element than the one that sent the decision, and may show the call before the answer arrives or after.
  recall() {
    const sent = this.pending && superseded.get(keyOf(this.pending));
    if (!sent || sent.name === nameOf(this.pending) || this.busy) return;
    superseded.delete(keyOf(this.pending));
    this.problem = sent.problem;
    if (sent.typed.kind === this.pending.kind) this.restore(sent.typed);
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

  /** Whether the call has expired, or a decision is being sent. */
  get off() {
    return Boolean(this.busy || this.expired);
  }

  /** What the person has written and would lose with the card; "" if nothing. */
  get written() {
    return "";
  }

  /** Return the label of a button; `sends` is the decision that it sends. */
  label(sends, words) {
    return this.busy === sends ? "Sending…" : words;
  }

  /** Send a decision; `sends` names the button that was pressed. */
  async decide(decision, sends = decision.type) {
    const { pending, key, typed } = this;
    superseded.delete(keyOf(pending));
    if (this.querySelector(".actions button:focus")) this.querySelector(".card").focus({ preventScroll: true }); // a disabled button would lose the focus
    this.guard.renew([]);
    this.busy = sends;
    this.problem = null;
    try {
      const { seq, missing = 0 } = await this.client.resolve(pending, decision);
      // The call still waits after a vote that was not the last one, and after more time.
      if (key === this.key && missing) Object.assign(this, { busy: "", given: missing });
      else if (key === this.key && decision.type === "extend") Object.assign(this, { busy: "", giving: false, heard: "It has more time." });
      if (decision.type === "extend") this.emit("extended", { pending, until: decision.until, seq });
      else if (decision.type === "take_back") this.emit("taken-back", { pending, seq });
      else this.emit("decided", { pending, decision, seq, missing });
    } catch (error) {
      const problem = error?.details ? error : new Problem({ status: error?.status, detail: `The outcome is unknown: ${error?.message ?? error}` });
      if (key === this.key) Object.assign(this, { busy: "", problem });
      problem.final = [404, 410].includes(problem.status) || (problem.status === 409 && !outdated(problem));
      if (outdated(problem)) {
        superseded.set(keyOf(pending), { name: nameOf(pending), typed: { ...typed, kind: pending.kind }, problem });
        cards.forEach((card) => card.recall());
      }
      this.emit("refused", { pending, problem });
    }
  }

  about(chip) {
    const { tool, principal, agent, conversation } = this.pending;
    return html`<p class="about">${chip} <span><code>${shown(tool)}</code> for <b>${shown(principal?.id ?? "unknown")}</b>${agent ? html`, asked by <b>${shown(agent)}</b>` : nothing}${
      this.place ? html` in <a href="#/c/${encodeURIComponent(conversation)}">${named(conversation, this.place)}</a>` : nothing}</span></p>`;
  }

  refusal() {
    if (!this.problem) return nothing;
    const { winner, changed } = this.problem.details;
    return html`<p class="notice bad stale" role="alert">${unanswered(this.problem) ? html`Not confirmed: ${shown(this.problem.message)}. Your decision may not have arrived. You can press again; it is decided only once.`
      : winner ? html`Too late: ${shown(this.problem.message)}.${this.written ? keptText(this.written) : nothing}`
      : outdated(this.problem) ? html`The call has changed since it was shown${changed?.length ? `: ${listed(changed.map((name) => CHANGED[name] ?? name))}` : nothing}. Nothing was decided. The card now shows the current version${this.kept ? `; ${this.kept}` : nothing}.` : shown(this.problem.message)}</p>`;
  }

  /** The status below the buttons, where its changes do not move them. */
  status(words = "") {
    return html`<p class="gate" role="status">${this.busy ? html`<span class="sr">Sending…</span>` : this.hint || words || html`<span class="sr">${this.heard}</span>`}</p>`;
  }

  expiry() {
    const { deadline, next_reminder: next, on_expiry } = this.pending;
    const then = shown(atZero(on_expiry));
    const reminder = next ? `. Next reminder: ${moment(next, this.client.now())}` : "";
    return this.expired ? html`<span class="soon">Expired: ${then}.</span>`
      : html`<span class="expiry ${this.left < 60 ? "soon" : ""}" title="${when(deadline)}${reminder}">Expires in <time>${duration(Math.ceil(this.left))}</time>. After that ${then}.</span>${this.#moreTime()}`;
  }

  // The later deadlines that the tool allows: [words, time].
  get #times() {
    const { kind, deadline, extend_until: limit } = this.pending;
    if (kind === "client_exec" || !limit || limit - deadline < 1 || this.problem?.final || !this.client.allows("extend") || barred(this.pending, this.client)) return [];
    const times = SPANS.map(([words, seconds]) => [words, deadline + seconds]).filter(([, time]) => time <= limit);
    return times.length < SPANS.length ? [...times, [`until ${moment(limit, this.client.now())}`, limit]] : times;
  }

  #moreTime() {
    const times = this.#times;
    if (!times.length) return nothing;
    const focus = () => this.querySelector(".more-time > button").focus({ preventScroll: true });
    const toggle = async () => {
      this.giving = !this.giving;
      await this.updateComplete;
      this.querySelector(".more-time").scrollIntoView({ block: "nearest" });
    };
    const give = (until) => {
      if (!this.press([])) return;
      focus();
      this.decide({ type: "extend", until });
    };
    const leave = (event) => {
      if (event.key !== "Escape" || !this.giving) return;
      event.preventDefault();
      event.stopPropagation();
      this.giving = false;
      focus();
    };
    return html`<span class="more-time" @keydown=${leave}><button type="button" class="quiet" aria-expanded=${Boolean(this.giving)} @click=${toggle}>${this.label("extend", "More time")}</button>${
      this.giving ? html`<span role="group" aria-label="More time">${times.map(([words, until]) => html`<button type="button" ?disabled=${this.off} @click=${() => give(until)}>${words}</button>`)}</span>` : nothing}</span>`;
  }
}

/** Warnings to read before an approval, in a card or in a batch. */
export const warnings = ({ executor, recovery, reason, preview_error, continues }) => html`
  ${executor === "client" ? html`<p class="about">It will run in a browser page.</p>` : nothing}
  ${recovery ? html`<p class="notice warn">It was interrupted while running and may have taken effect. Approving runs it again.</p>`
    : reason ? html`<p class="notice">Reason: ${shown(reason)}</p>` : nothing}
  ${continues ? html`<p class="notice">It has begun, asked, and would now continue with the answers.</p>` : nothing}
  ${preview_error ? html`<p class="notice bad">No preview: ${shown(preview_error)}</p>` : nothing}`;
