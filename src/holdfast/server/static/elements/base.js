// Base classes of the elements. They use light DOM, so that style sheets apply to them. Values are rendered by values.js.
import { LitElement, html, nothing } from "lit";
import { keyOf, Problem } from "../client.js";
import "../writing.js";
import { Guard, UNLOADED } from "../guard.js";
import { duration, atZero } from "../text.js";
import { shown, named } from "./values.js";

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

/** Return whether it is unknown if the request arrived. */
export const unanswered = (problem) => ["unreachable", "timeout"].includes(problem.kind);

export const lost = (problem) => problem?.status === 0 || problem?.status >= 500;

const TALL = 0.4; // of the height of the scroller: a taller headline is not sticky

const cards = new Set(); // all cards in the page
const renewAll = () => cards.forEach((card) => card.guard.renew([]));

/** A card for a pending call: the common part of approvals and questions.
 *
 * Its buttons are guarded (guard.js). While presses are ignored, they have aria-disabled, which keeps the focus.
 */
export class Card extends Element {
  static properties = { client: {}, pending: {}, place: { type: Boolean }, busy: { state: true }, problem: { state: true }, armed: { state: true }, hint: { state: true } };

  guard = new Guard(this, {
    buttons: () => [...this.querySelectorAll(".actions button")],
    parts: () => this.parts,
    changed: () => {
      this.armed = this.guard.armed;
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
    const scroller = headline.closest(".scroll, holdfast-inbox");
    headline.classList.toggle("tall", headline.offsetHeight > TALL * (scroller?.clientHeight || innerHeight));
    this.guard.sample();
  }

  /** The element with the title: in the inbox it is the row. */
  get headline() {
    return this.closest(".row.open")?.querySelector(".bar") ?? this.querySelector("header");
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

  #reveal(part) {
    part.scrollIntoView({ block: this.guard.missing(part) });
    if (part.tabIndex >= 0) part.focus({ preventScroll: true });
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
    const { digest, since } = this.pending;
    const key = `${keyOf(this.pending)} ${digest} ${since}`;
    if (key === this.key) return;
    Object.assign(this, { key, busy: "", problem: null, hint: "" });
    this.guard.renew();
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

  /** Whether the call has expired, or a decision is being sent. */
  get off() {
    return Boolean(this.busy || this.expired);
  }

  /** Return the label of a button; `sends` is the decision that it sends. */
  label(sends, words) {
    return this.busy === sends ? "Sending…" : words;
  }

  /** Send a decision; `sends` names the button that was pressed. */
  async decide(decision, sends = decision.type) {
    const { pending, key } = this;
    if (this.querySelector(".actions button:focus")) this.querySelector(".card").focus({ preventScroll: true }); // a disabled button would lose the focus
    this.guard.renew([]);
    this.busy = sends;
    this.problem = null;
    try {
      const { seq } = await this.client.resolve(pending, decision);
      this.emit("decided", { pending, decision, seq });
    } catch (error) {
      const problem = error?.details ? error : new Problem({ status: error?.status, detail: `The outcome is unknown: ${error?.message ?? error}` });
      if (key === this.key) Object.assign(this, { busy: "", problem });
      problem.final = [404, 410].includes(problem.status) || (problem.status === 409 && problem.details.reason !== "superseded");
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
    const { reason, winner } = this.problem.details;
    return html`<p class="notice bad stale" role="alert">${unanswered(this.problem) ? html`Not confirmed: ${shown(this.problem.message)}. Your decision may not have arrived. You can press again; it is decided only once.`
      : winner ? html`Too late: ${shown(this.problem.message)}.`
      : reason === "superseded" ? "The call has changed since it was shown. Nothing was decided; the card now shows the current version." : shown(this.problem.message)}</p>`;
  }

  /** The status below the buttons, where its changes do not move them. */
  status(words = "") {
    return html`<p class="gate" role="status">${this.busy ? html`<span class="sr">Sending…</span>` : this.hint || words}</p>`;
  }

  expiry() {
    const then = shown(atZero(this.pending.on_expiry));
    return this.expired ? html`<span class="soon">Expired: ${then}.</span>`
      : html`<span class="expiry ${this.left < 60 ? "soon" : ""}">Expires in <time>${duration(Math.ceil(this.left))}</time>. After that ${then}.</span>`;
  }
}

/** Warnings to read before an approval, in a card or in a batch. */
export const warnings = ({ executor, recovery, reason, preview_error }) => html`
  ${executor === "client" ? html`<p class="about">It will run in a browser page.</p>` : nothing}
  ${recovery ? html`<p class="notice warn">It was interrupted while running and may have taken effect. Approving runs it again.</p>`
    : reason ? html`<p class="notice">Reason: ${shown(reason)}</p>` : nothing}
  ${preview_error ? html`<p class="notice bad">No preview: ${shown(preview_error)}</p>` : nothing}`;
