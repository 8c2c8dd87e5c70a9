// <holdfast-inbox>: the pending calls of all conversations.
//   properties  client: Client   titles: Map (optional: titles of conversations by id)
//   events      those of the cards inside (decided, refused)
// Unseen calls cannot be approved: on a closed row, the key a opens the card; a batch shows every call in full. A row that
// has just moved cannot be selected with the pointer (guard.js). Keys that decide act on the focused row or card.
import { Element, html, nothing, shown, named, table, value, plainPreview, warnings } from "./base.js";
import { several, hasVoted, barred, tally, deciders, summary } from "./votes.js";
import { Guard, sampleAll, UNLOADED } from "../guard.js";
import { repeat } from "lit/directives/repeat.js";
import { actor, duration, outcome, brief, people, spelled } from "../text.js";
import { Problem, keyOf } from "../client.js";
import { TEXT, FIELD, adrift } from "../writing.js";
import "./approval.js";
import "./question.js";
import "./markdown.js";

const KEYS = [["j / k", "down / up"], ["x", "select for a batch"], ["Enter", "open or close"], ["a", "open, read on, approve at the end; with a selection: the batch"], ["e", "edit"], ["d", "deny"], ["/", "filter"], ["Esc", "back"], ["?", "this help"]];

class InboxView extends Element {
  static properties = { client: {}, titles: {}, filter: { state: true }, kind: { state: true }, at: { state: true }, open: { state: true }, chosen: { state: true }, batch: { state: true }, help: { state: true }, gone: { state: true }, refused: { state: true }, sending: { state: true }, results: { state: true }, done: { state: true }, reason: { state: true }, said: { state: true } };

  constructor() {
    super();
    Object.assign(this, { filter: "", kind: "", at: null, open: null, spot: 0, chosen: new Set(), batch: null, help: false, reason: "" });
  }

  connectedCallback() {
    super.connectedCallback();
    this.tick(1000);
    this.watch(document, "keydown", (event) => this.#key(event));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#guards.forEach((guard) => guard.stop());
    this.#guards.clear();
  }

  willUpdate(changed) {
    if (changed.has("client") && this.client) this.watch(this.client.inbox, "change", () => this.#changed());
    const focused = this.contains(document.activeElement) && document.activeElement;
    this.had = focused && (focused.closest(".card") ? ".row.at .card" : ".row.at .head");
  }

  #changed() {
    const { inbox } = this.client;
    const { shownOpen } = this;
    const entry = shownOpen && inbox.get(shownOpen);
    if (entry) {
      // It is pending again, with another preview.
      if (entry.digest !== shownOpen.digest) entry.before ??= shownOpen;
      Object.assign(this, { shownOpen: entry, gone: "" });
    } else if (shownOpen && !this.gone) this.#whoWon(shownOpen);
    this.chosen = new Set(inbox.pending.map(keyOf).filter((key) => this.chosen.has(key)));
    this.requestUpdate();
  }

  // The open call was decided elsewhere: show by whom.
  async #whoWon(entry) {
    Object.assign(this, { gone: "It is no longer waiting.", mine: false });
    try {
      const { seq } = await this.client.snapshot(entry.conversation);
      const events = await this.client.log(entry.conversation, { before: seq + 1, limit: 100, last: true });
      const found = events.findLast((event) => event.type === "CallResolved" && event.call_id === entry.call);
      const text = found ? outcome(found.decision, actor(found)) : "cancelled";
      if (this.gone && this.shownOpen === entry) Object.assign(this, { gone: `${text[0].toUpperCase()}${text.slice(1)}.`, mine: found?.by.id === this.client.principal });
    } catch {
      // the notice is shown already
    }
  }

  // Load the last messages as context. The request also warms the server's cache for the decision.
  async #look({ conversation }) {
    const { open } = this;
    const { messages } = await this.client.snapshot(conversation).catch(() => ({ messages: [] }));
    if (open === this.open) this.said = messages.filter(({ role, text }) => role !== "tool" && text).slice(-2);
  }

  get rows() {
    const needle = this.filter.trim().toLowerCase();
    const rows = (this.client?.inbox.pending ?? []).filter((entry) =>
      (!this.kind || entry.kind === this.kind) &&
      (!needle || [entry.tool, entry.prompt, entry.conversation, this.#title(entry), entry.agent, entry.principal?.id, brief(entry.args)].join(" ").toLowerCase().includes(needle)));
    if (this.shownOpen && keyOf(this.shownOpen) === this.open && !rows.some((entry) => keyOf(entry) === this.open)) {
      // The open row keeps its position.
      const later = rows.findIndex((entry) => entry.deadline > this.shownOpen.deadline);
      rows.splice(later < 0 ? rows.length : later, 0, this.shownOpen);
    }
    return rows;
  }

  #title = ({ conversation }) => this.titles?.get(conversation);

  #key(event) {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || adrift()) return;
    // Typing that continues after a Tab must not trigger anything: next to a text field only the help key works, which returns
    // the focus. In forms without text, such as choices, letters are shortcuts; arrows and Enter belong to the form.
    const writes = target.closest?.(key === "?" ? TEXT : key.length > 1 ? FIELD : `${TEXT}, form:has(${TEXT}), holdfast-approval holdfast-form`);
    if (writes && (key !== "Escape" || !this.contains(target))) return;
    if (key === "Escape") {
      if (this.help) this.#help();
      else if (this.batch) this.batch = null;
      else if (writes) {
        // Otherwise the browser would clear the filter without an input event.
        event.preventDefault();
        (target.closest(".card") ?? this.firstElementChild).focus();
      }
      else if (this.open) this.#show(null);
      return;
    }
    if (this.batch || (this.help && key !== "?")) return;
    const rows = this.rows;
    const at = rows.findIndex((entry) => keyOf(entry) === this.at);
    const on = target.closest(".row") && this.contains(target) && rows[at] && this.client.inbox.get(rows[at]);
    // A card handles its own keys.
    const bar = target.closest(".bar") && on;
    const down = () => this.#move(rows, at < 0 ? this.spot : at + 1), up = () => this.#move(rows, (at < 0 ? this.spot : at) - 1);
    const act = {
      j: down, k: up, ArrowDown: down, ArrowUp: up,
      x: () => on && this.#choose(on), "?": this.#help, "/": () => this.querySelector(".filter").focus(),
      Enter: () => on && !target.closest("button, a, summary") && this.#show(keyOf(on) === this.open ? null : on),
      a: () => bar && (this.chosen.size ? this.#batch() : this.#show(on)), e: () => bar && this.#show(on, "edit"), d: () => bar && this.#show(on, "deny"),
    }[key];
    if (!act || (key.startsWith("Arrow") && target.closest(".content"))) return;
    if (key !== "Enter") event.preventDefault();
    act();
  }

  // close() returns the focus, which removing the dialog does not.
  #help = () => {
    this.querySelector(".help")?.close();
    this.help = !this.help;
  };

  async #move(rows, to) {
    const entry = rows[Math.max(0, Math.min(rows.length - 1, to))];
    if (!entry) return;
    this.at = keyOf(entry);
    await this.updateComplete;
    const row = this.querySelector(".row.at");
    row?.querySelector(".head").focus();
    row?.scrollIntoView({ block: "nearest" });
  }

  // The row may have moved under the pointer during the press.
  #pressed(event) {
    if (!this.#guards.get(event.target.closest(".bar"))?.steady()) event.preventDefault();
  }

  #choose(entry) {
    if (!this.#selectable(entry) || !this.client.inbox.get(entry)) return;
    const chosen = new Set(this.chosen);
    if (!chosen.delete(keyOf(entry))) chosen.add(keyOf(entry));
    this.chosen = chosen;
  }

  #selectable = (entry) => entry.kind === "approval" && !barred(entry, this.client);

  async #show(entry, mode = "") {
    if (entry) this.at = keyOf(entry);
    this.done = null;
    Object.assign(this, { open: entry && keyOf(entry), shownOpen: entry, gone: "", said: [] });
    this.#changed();
    if (entry) this.#look(entry);
    await this.updateComplete;
    const { card } = this;
    if (card) card.mode = "";
    await card?.updateComplete;
    if (card && mode && entry.kind === "approval" && !card.refused && (mode !== "edit" || card.mayEdit)) card.mode = mode;
    else this.#focus(card ? ".row.at .card" : ".row.at .head");
    const row = this.querySelector(".row.at");
    row?.scrollIntoView({ block: row.offsetHeight > this.clientHeight ? "start" : "nearest" }); // show the beginning of a tall row
  }

  get card() {
    return this.querySelector(".row.open holdfast-approval, .row.open holdfast-question");
  }

  #focus(place) {
    (this.querySelector(".row.at .stale") ?? this.querySelector(place) ?? this.querySelector(".row.at .head") ?? this.firstElementChild)?.focus({ preventScroll: true });
  }

  // The focused element may have disappeared: the focus moves to the current row, never to another one.
  async #refocus(place) {
    await this.card?.updateComplete;
    if (document.activeElement !== document.body) return;
    this.#focus(place);
    this.requestUpdate();
  }

  #guards = new Map(); // row or batch dialog -> its guard

  #guard(element, options) {
    if (!this.#guards.has(element)) {
      const guard = new Guard(element, options);
      this.#guards.set(element, guard);
      guard.start();
    }
    return this.#guards.get(element);
  }

  #guardAll() {
    for (const [element, guard] of this.#guards) if (!element.isConnected) guard.stop(), this.#guards.delete(element);
    for (const bar of this.querySelectorAll(".bar")) {
      const box = bar.querySelector("input");
      if (box) this.#guard(bar, { changed: () => box.setAttribute("aria-disabled", !this.#guards.get(bar)?.armed) });
    }
    this.#dialog?.sample();
    sampleAll();
  }

  get #dialog() {
    const dialog = this.querySelector("dialog.batch");
    return dialog && this.#guard(dialog, { buttons: () => [...dialog.querySelectorAll(".actions button")], parts: () => [dialog.querySelector(".content")], changed: () => (this.requestUpdate(), this.updateComplete) });
  }

  #batch() {
    // Includes selected rows that the filter hides.
    this.reason = "";
    this.batch = this.client.inbox.pending.filter((entry) => this.chosen.has(keyOf(entry)));
    this.results = this.refused = this.done = null;
    this.updateComplete.then(() => this.querySelector("dialog.batch")?.focus());
  }

  updated() {
    for (const dialog of this.querySelectorAll("dialog")) if (!dialog.open) dialog.showModal();
    this.#guardAll();
    const at = this.rows.findIndex((entry) => keyOf(entry) === this.at);
    if (at >= 0) this.spot = at;
    if (this.had) this.#refocus(this.had);
  }

  async #decide(decision) {
    if (this.results || this.sending || this.#dialog.unseen() || !this.#dialog.steady()) return;
    const decisions = this.batch.map((entry) => ({ ...entry, decision: decision(entry) }));
    this.querySelector("dialog.batch").focus(); // a disabled button would lose the focus
    this.sending = decisions[0].decision.type;
    this.refused = null;
    try {
      const results = await this.client.resolveAll(decisions);
      if (results.every(({ problem }) => problem?.status === 503)) throw new Problem(results[0].problem);
      this.results = new Map(results.map((result) => [keyOf(result), result]));
      if (this.results.size && [...this.results.values()].every((result) => !result.problem)) Object.assign(this, { batch: null, chosen: new Set(), done: summary(results, decisions[0].decision.type === "deny") });
    } catch (problem) {
      this.refused = problem;
    }
    this.sending = "";
  }

  render() {
    if (!this.client) return nothing;
    const rows = this.rows;
    return html`<div class="inbox" tabindex="-1">
      <div class="tools"><label class="grow"><span class="sr">Filter</span><input class="filter" type="search" placeholder="Filter" .value=${this.filter} @input=${(event) => (this.filter = event.target.value)}></label>
        <label><span class="sr">Kind</span><select @change=${(event) => (this.kind = event.target.value)}><option value="">Everything</option><option value="approval">Approvals</option><option value="elicitation">Questions</option><option value="manual">Manual tasks</option><option value="client_exec">Browser</option></select></label>
        ${this.chosen.size ? html`<button type="button" class="primary" @click=${this.#batch}>Review ${this.chosen.size} selected</button>` : nothing}
        <button type="button" class="quiet help-button" aria-label="Keyboard help" @click=${this.#help}>?</button></div>
      <p role="status" class=${this.done ? "notice good" : "sr"}>${this.done}</p>
      ${rows.length ? html`<ul class="rows">${repeat(rows, keyOf, (entry) => this.#row(entry))}</ul>`
        : this.client.inbox.pending.length ? html`<div class="empty"><h2>No matches</h2><p>${this.client.inbox.pending.length} waiting; clear the filter.</p></div>`
        : html`<div class="empty"><h2>${this.client.inbox.ready ? "Nothing is waiting" : "Opening…"}</h2><p>Calls that need a person appear here.</p></div>`}
      ${this.batch ? this.#batchDialog() : nothing}
      ${this.help ? html`<dialog class="help" aria-label="Keyboard" @close=${() => (this.help = false)}><h2>Keyboard</h2><dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl><button type="button" @click=${this.#help}>Close</button></dialog>` : nothing}
    </div>`;
  }

  #row(entry) {
    const key = keyOf(entry);
    const open = key === this.open;
    const left = entry.deadline - this.client.now();
    return html`<li class="row ${key === this.at ? "at" : ""} ${open ? "open" : ""}" @focusin=${() => (this.at = key)}>
      <div class="bar">${this.#selectable(entry) ? html`<input type="checkbox" aria-disabled="true" aria-label="Select ${spelled(entry.tool)}" .checked=${this.chosen.has(key)} ?disabled=${open && this.gone} @click=${this.#pressed} @change=${() => this.#choose(entry)}>` : html`<span class="nobox"></span>`}
        <button type="button" class="head" aria-expanded=${open} @click=${() => this.#show(open ? null : entry)}>
          <span class="what">${shown(entry.prompt || entry.tool)}</span>
          <span class="where">${{ approval: html`<span class="chip risk ${entry.risk}">${entry.risk}</span>${several(entry) ? html` <span class="chip ${hasVoted(entry, this.client.principal) ? "good" : ""}">${tally(entry)}${hasVoted(entry, this.client.principal) ? ", also by you" : nothing}</span>` : nothing}${barred(entry, this.client) ? html` <span class="chip">another person decides</span>` : nothing}`, elicitation: html`<span class="chip">question</span>`, manual: html`<span class="chip">manual</span>`, client_exec: html`<span class="chip">browser</span>` }[entry.kind]}
            ${shown(entry.tool)} · ${shown(entry.principal?.id ?? "")} · ${named(entry.conversation, this.#title(entry))}</span>
          <time class=${left < 60 ? "soon" : ""}>${left > 0 ? duration(Math.ceil(left)) : "expired"}</time></button></div>
      ${open ? this.gone ? html`<p class="notice stale ${this.mine ? "good" : ""}" role="status" tabindex="-1">${shown(this.gone)}${adrift() ? " Your typing is ignored; press Esc to continue." : nothing}</p>`
        : entry.kind === "approval" ? html`<holdfast-approval .place=${this.#title(entry) || true} .client=${this.client} .pending=${entry}></holdfast-approval>` : html`<holdfast-question .place=${this.#title(entry) || true} .client=${this.client} .pending=${entry}></holdfast-question>` : nothing}
      ${open && !this.gone && this.said?.length ? html`<section class="said" aria-label="Last messages">${this.said.map(({ by, text }) => by ? html`<p><b>${shown(by)}</b> ${shown(text.length > 300 ? "…" + text.slice(-300) : text)}</p>` : html`<holdfast-markdown .text=${text}></holdfast-markdown>`)}</section>` : nothing}</li>`;
  }

  #batchDialog() {
    const n = this.batch.length;
    const unseen = !this.#dialog || Boolean(this.#dialog.unseen());
    const off = Boolean(this.sending || this.results), held = String(unseen || !this.#dialog.armed);
    const label = (sends, words) => (this.sending === sends ? "Sending…" : words);
    return html`<dialog class="batch" tabindex="-1" aria-label="Review ${n} requests" @close=${() => (this.batch = null)} @loaded=${() => this.requestUpdate()}><h2>Review ${n} requests</h2>
      <div class="content" tabindex="0" role="group" aria-label="All requests in full"><div>${this.batch.map((entry) => {
        const result = this.results?.get(keyOf(entry));
        return html`<section class="entry"><h3>${shown(entry.prompt || entry.tool)}</h3><p class="about"><span class="chip risk ${entry.risk}">${entry.risk} risk</span> <code>${shown(entry.tool)}</code> for <b>${shown(entry.principal?.id ?? "")}</b> in ${named(entry.conversation, this.#title(entry))}</p>${warnings(entry)}${deciders(entry, this.client)}
          ${plainPreview(entry) ? nothing : html`<h4>What would happen</h4>${value(entry.preview, { client: this.client, conversation: entry.conversation })}`}<h4>Arguments</h4>${table(entry.args)}
          ${result ? html`<p class="notice ${result.problem ? "bad" : "good"}">${result.problem ? shown(result.problem.detail ?? result.problem.title) : result.missing ? `Accepted; it waits for ${people(result.missing, "more approver")}.` : "Accepted."}</p>` : nothing}</section>`;
      })}</div></div>
      ${this.refused ? html`<p class="notice bad" role="alert">${shown(this.refused.message)}: ${(this.refused.status > 0 && this.refused.status < 500) || this.refused.status === 503 ? "nothing was decided." : "the outcome is unknown. The inbox shows the calls that are still waiting."}</p>` : nothing}
      <div class="actions"><button type="button" class="primary" ?disabled=${off} aria-disabled=${held} @click=${() => this.#decide((entry) => ({ type: "approve", digest: entry.digest }))}>${label("approve", `Approve ${n}`)}</button>
        <label class="grow"><span class="sr">Reason for denying</span><input class="reason" placeholder="Reason for denying" .value=${this.reason} @input=${(event) => (this.reason = event.target.value)}></label>
        <button type="button" class="danger outline" ?disabled=${off} aria-disabled=${held} @click=${() => this.#decide(() => ({ type: "deny", reason: this.reason.trim() }))}>${label("deny", `Deny ${n}`)}</button>
        <button type="button" @click=${() => (this.batch = null)}>Close</button></div>
      <p class="gate" role="status">${this.sending ? html`<span class="sr">Sending…</span>` : unseen && !off ? (this.querySelector(`dialog.batch ${UNLOADED}`) ? "Show each whole diff to decide." : "Scroll to the end to decide.") : ""}</p></dialog>`;
  }
}
customElements.define("holdfast-inbox", InboxView);
