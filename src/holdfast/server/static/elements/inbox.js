// <holdfast-inbox>: the pending calls of all conversations.
//   properties  client: Client   titles: Map (optional: titles of conversations by id)   query: the filters (filters.js)
//   events      those of the cards inside (decided, refused)   filtered, with detail {query, typed}: the filters have changed
// Unseen calls cannot be approved: on a closed row, the key a opens the card; a batch shows every call in full (batch.js). A
// row that has just moved cannot be selected with the pointer (guard.js). Keys that decide act on the focused row or card.
// Of a long list only the first rows are rendered, and more when its end is scrolled to. Where there is room, the style
// sheet shows the open card beside the list; in the document it always follows its row.
import { Element, html, nothing, shown, named } from "./base.js";
import { several, hasVoted, barred, tally, summary, meanwhile } from "./votes.js";
import { Guard, sampleAll } from "../guard.js";
import { repeat } from "lit/directives/repeat.js";
import { actor, outcome, spelled } from "../text.js";
import { keyOf } from "../client.js";
import { TEXT, FIELD, adrift } from "../writing.js";
import { readFilters, writeFilters, activeFilters, matcher, order, choices, savedFilters, saveFilter, AGES, CHIPS, DUES, FIELDS, KINDS, SORTS } from "../filters.js";
import { notices } from "../notices.js";
import "./approval.js";
import "./question.js";
import "./outcome.js";
import "./markdown.js";
import "./time.js";

const ROWS = 100, MORE = 40; // rows rendered at first, and added at the end of the list
const REFRESH = 10_000; // milliseconds between two looks at ages and deadlines, by which rows are filtered
const KEYS = [["j / k", "down / up"], ["x", "select for a batch"], ["Shift ↓ / ↑", "select a range"], ["A", "select all that the filter shows"], ["Enter", "open or close"], ["a", "open, read on, approve at the end; with a selection: the batch"], ["e", "edit"], ["d", "deny"], ["/", "filter"], ["f", "more filters"], ["Esc", "back"], ["?", "this help"]];
const LABELS = { tool: "Tool", risk: "Risk", agent: "Agent", requester: "Requester" };

class InboxView extends Element {
  static properties = { client: {}, titles: {}, query: { type: String }, panel: { state: true }, limit: { state: true }, at: { state: true }, open: { state: true }, chosen: { state: true }, batch: { state: true }, help: { state: true }, gone: { state: true }, done: { state: true }, failures: { state: true }, said: { state: true } };

  constructor() {
    super();
    Object.assign(this, { query: "", panel: false, limit: ROWS, at: null, open: null, spot: 0, chosen: new Set(), batch: null, help: false, failures: [] });
  }

  connectedCallback() {
    super.connectedCallback();
    this.tick(REFRESH);
    this.watch(document, "keydown", (event) => this.#key(event));
    this.#end = new IntersectionObserver((entries) => entries.some(({ isIntersecting }) => isIntersecting) && (this.limit += MORE));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#guards.forEach((guard) => guard.stop());
    this.#guards.clear();
    this.#end.disconnect();
  }
  #end; // observes the end of the rendered rows

  get filters() {
    return readFilters(this.query);
  }

  #filter(change, typed = false) {
    this.query = writeFilters({ ...this.filters, ...change });
    this.emit("filtered", { query: this.query, typed });
  }

  willUpdate(changed) {
    if (changed.has("client") && this.client) this.watch(this.client.inbox, "change", () => this.#changed());
    const focused = this.contains(document.activeElement) && document.activeElement;
    if (changed.has("query")) this.limit = ROWS;
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
    const { filters } = this, compare = order(filters.sort);
    const rows = (this.client?.inbox.pending ?? []).filter(matcher(filters, this.client?.now(), this.#title));
    if (filters.sort) rows.sort(compare);
    if (this.shownOpen && keyOf(this.shownOpen) === this.open && !rows.some((entry) => keyOf(entry) === this.open)) {
      // The open row keeps its position.
      const later = rows.findIndex((entry) => compare(entry, this.shownOpen) > 0);
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
      else if (this.panel && this.querySelector(".filterset").contains(target)) this.#panel(false);
      else if (this.open) this.#show(null);
      return;
    }
    if (this.batch || (this.help && key !== "?")) return;
    const rows = this.rows;
    const at = rows.findIndex((entry) => keyOf(entry) === this.at);
    const on = target.closest(".row") && this.contains(target) && rows[at] && this.client.inbox.get(rows[at]);
    // A card handles its own keys.
    const bar = target.closest(".bar") && on;
    const move = (to) => (event.shiftKey && on ? this.#extend(rows, at, to) : this.#move(rows, to));
    const down = () => move(at < 0 ? this.spot : at + 1), up = () => move((at < 0 ? this.spot : at) - 1);
    const act = {
      j: down, k: up, ArrowDown: down, ArrowUp: up, A: () => this.#chooseAll(rows), f: () => this.#panel(true),
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
    this.limit = Math.max(this.limit, rows.indexOf(entry) + MORE);
    await this.updateComplete;
    const row = this.querySelector(".row.at");
    row?.querySelector(".head").focus();
    row?.scrollIntoView({ block: "nearest" });
  }

  // The row may have moved under the pointer during the press.
  #pressed(event) {
    if (!this.#guards.get(event.target.closest(".bar"))?.steady()) event.preventDefault();
    this.ranging = event.shiftKey;
  }

  // With the shift key, a press on a checkbox selects from the last one to this one.
  #choose(entry) {
    if (!this.#selectable(entry) || !this.client.inbox.get(entry)) return;
    const key = keyOf(entry), { rows } = this;
    const from = this.ranging ? rows.findIndex((each) => keyOf(each) === this.anchor) : -1;
    this.ranging = false;
    if (from >= 0) return this.#chooseRange(rows, from, rows.findIndex((each) => keyOf(each) === key), this.chosen);
    const chosen = new Set(this.chosen);
    if (!chosen.delete(key)) chosen.add(key);
    Object.assign(this, { chosen, anchor: key, range: null });
  }

  #chooseRange(rows, from, to, chosen) {
    const range = rows.slice(Math.min(from, to), Math.max(from, to) + 1).filter((entry) => this.#selectable(entry) && this.client.inbox.get(entry));
    this.chosen = new Set([...chosen, ...range.map(keyOf)]);
  }

  // Shift and an arrow: the range grows and shrinks from the row where it began; what was selected before stays.
  async #extend(rows, at, to) {
    const entry = rows[to];
    if (!entry) return;
    if (this.range?.end !== this.at) this.range = { start: this.at, before: this.chosen };
    this.range.end = keyOf(entry);
    const from = rows.findIndex((each) => keyOf(each) === this.range.start);
    this.#chooseRange(rows, from < 0 ? at : from, to, this.range.before);
    await this.#move(rows, to);
  }

  #chooseAll(rows) {
    this.#chooseRange(rows, 0, rows.length, this.chosen);
  }

  async #panel(open) {
    this.panel = open;
    await this.updateComplete;
    this.querySelector(open ? ".filterset select" : ".more-filters").focus();
  }

  #selectable = (entry) => entry.kind === "approval" && !entry.starts_at && !barred(entry, this.client);

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
    sampleAll();
  }

  async #batch() {
    if (!await import("./batch.js").catch(() => null)) return; // the page says that the server cannot be reached
    // Includes selected rows that the filter hides.
    const batch = this.client.inbox.pending.filter((entry) => this.chosen.has(keyOf(entry)));
    if (batch.length) Object.assign(this, { batch, done: null, failures: [] });
  }

  // Calls that still wait, because their decision failed, stay selected.
  #decided({ detail: { results, entries, denied } }) {
    const me = this.client.principal;
    const failed = results.filter(({ problem }) => problem && !meanwhile(problem, me));
    const entryOf = new Map(entries.map((entry) => [keyOf(entry), entry]));
    this.done = summary(results, denied, me);
    this.failures = failed.map((result) => ({ entry: entryOf.get(keyOf(result)), why: result.problem.detail ?? result.problem.title }));
    this.chosen = new Set(failed.map(keyOf));
    if (!failed.length) this.batch = null;
  }

  updated() {
    for (const dialog of this.querySelectorAll("dialog.help")) if (!dialog.open) dialog.showModal();
    this.#end.disconnect();
    const end = this.querySelector(".rows > .more");
    if (end) this.#end.observe(end);
    this.#guardAll();
    const at = this.rows.findIndex((entry) => keyOf(entry) === this.at);
    if (at >= 0) this.spot = at;
    if (this.had) this.#refocus(this.had);
  }

  render() {
    if (!this.client) return nothing;
    const { rows, filters, chosen } = this, all = this.client.inbox.pending;
    const active = activeFilters(filters), hidden = active.filter((name) => !["q", "kind"].includes(name)).length;
    const open = this.open ? rows.findIndex((entry) => keyOf(entry) === this.open) : -1;
    const complete = chosen.size > 0 && rows.every((entry) => chosen.has(keyOf(entry)) || !this.#selectable(entry));
    const rendered = rows.slice(0, Math.max(this.limit, open + 1));
    return html`<div class="inbox" tabindex="-1">
      <div class="desk"><div class="tools"><label class="grow"><span class="sr">Filter</span><input class="filter" type="search" placeholder="Filter: every word must occur" .value=${filters.q} @input=${(event) => this.#filter({ q: event.target.value }, true)}></label>
        <label><span class="sr">Kind</span><select @change=${(event) => this.#filter({ kind: event.target.value })}>${options({ "": "Everything", ...KINDS }, filters.kind)}</select></label>
        ${chosen.size ? html`<button type="button" class="primary" @click=${this.#batch}>Review ${chosen.size} selected</button>` : nothing}
        <button type="button" class="quiet help-button" aria-label="Keyboard help" @click=${this.#help}>?</button></div>
      <p class="count"><button type="button" class="quiet more-filters" aria-expanded=${this.panel} @click=${() => this.#panel(!this.panel)}>Filters${hidden ? html` <span class="badge">${hidden}<span class="sr"> active</span></span>` : nothing}</button><span aria-live="polite">${active.length ? `${rows.length} of ${all.length} waiting` : nothing}</span>
        ${active.length ? html`<button type="button" class="quiet" @click=${() => this.#filter(readFilters(""))}>Clear</button>` : nothing}
        ${rows.length || chosen.size ? html`<button type="button" class="quiet" @click=${() => (complete ? (this.chosen = new Set()) : this.#chooseAll(this.rows))}>${complete ? "Select none" : "Select all"}</button>` : nothing}</p>
      ${this.panel ? this.#filterPanel(filters, all) : nothing}
      <p role="status" class=${this.done ? `notice ${this.failures.length ? "bad" : "good"}` : "sr"}>${shown(this.done ?? "")}</p>
      ${this.failures.length ? html`<ul class="failures">${this.failures.map(({ entry, why }) => html`<li><b>${shown(entry.prompt || entry.tool)}</b> ${shown(why)}</li>`)}</ul>` : nothing}</div>
      ${rows.length ? html`<ul class="rows">${repeat(rendered, keyOf, (entry) => this.#row(entry))}${rendered.length < rows.length ? html`<li class="more"><button type="button" @click=${() => (this.limit += MORE)}>${rows.length - rendered.length} more</button></li>` : nothing}</ul>`
        : all.length ? html`<div class="empty"><h2>No matches</h2><p>${all.length} waiting; clear the filter.</p></div>`
        : html`<div class="empty"><h2>${this.client.inbox.ready ? "Nothing is waiting" : "Opening…"}</h2><p>Calls that need a person appear here.</p></div>`}
      ${rows.length && open < 0 ? html`<p class="beside">Open a request to see it here.</p>` : nothing}
      ${this.batch ? html`<holdfast-batch .client=${this.client} .titles=${this.titles} .entries=${this.batch} @batched=${this.#decided} @closed=${() => (this.batch = null)}></holdfast-batch>` : nothing}
      ${this.help ? html`<dialog class="help" aria-label="Keyboard" @close=${() => (this.help = false)}><h2>Keyboard</h2><dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl><button type="button" @click=${this.#help}>Close</button></dialog>` : nothing}
    </div>`;
  }

  #filterPanel(filters, all) {
    const select = (name, label, words) => html`<label>${label}<select aria-label=${label} @change=${(event) => this.#filter({ [name]: event.target.value })}>${options(words, filters[name])}</select></label>`;
    const named = (words) => Object.fromEntries([["", "any"], ...Object.entries(words).map(([name, [text]]) => [name, text])]);
    const current = writeFilters(filters);
    const save = (event) => {
      event.preventDefault();
      const field = event.target.querySelector("input");
      if (!field.value.trim()) return field.focus();
      saveFilter(field.value.trim(), current);
      field.value = "";
      this.requestUpdate();
    };
    const change = (name, query, old) => (saveFilter(name, query, old), this.requestUpdate());
    return html`<section class="filterset" aria-label="Filters"><div class="selects">
      ${Object.entries(LABELS).map(([name, label]) => select(name, label, { "": "any", ...Object.fromEntries(choices(name, all, filters[name]).map((text) => [text, spelled(text)])) }))}
      ${select("age", "Waiting", named(AGES))}${select("due", "Expires", named(DUES))}${select("sort", "Order", SORTS)}</div>
      ${savedFilters().map(([name, query]) => html`<div class="saved"><button type="button" aria-pressed=${query === current} @click=${() => this.#filter(readFilters(query))}>${shown(name)}</button>
        <input aria-label="New name of ${spelled(name)}" .value=${name} @change=${({ target }) => change(target.value.trim() || name, query, name)}>
        <button type="button" class="quiet" aria-label="Delete the filter ${spelled(name)}" @click=${() => change("", "", name)}>Delete</button></div>`)}
      <form class="saved" @submit=${save}><input aria-label="Name of this filter" placeholder="Save this filter as" maxlength="60"><button>Save</button></form>
      ${notices.blocked ? html`<p class="about">The browser blocks notifications of this site.</p>`
        : notices.offered ? html`<p><button type="button" aria-pressed=${notices.on} @click=${() => notices.switch().then(() => this.requestUpdate())}>Notify me of new requests</button></p>` : nothing}</section>`;
  }

  #row(entry) {
    const key = keyOf(entry), { principal } = this.client;
    const open = key === this.open, title = this.#title(entry), voted = hasVoted(entry, principal);
    return html`<li class="row ${key === this.at ? "at" : ""} ${open ? "open" : ""}" @focusin=${() => (this.at = key)}>
      <div class="bar">${this.#selectable(entry) ? html`<input type="checkbox" aria-disabled="true" aria-label="Select ${spelled(`${entry.prompt || entry.tool}, ${title || entry.conversation}`)}" .checked=${this.chosen.has(key)} ?disabled=${open && this.gone} @click=${this.#pressed} @change=${() => this.#choose(entry)}>` : html`<span class="nobox"></span>`}
        <button type="button" class="head" aria-expanded=${open} @click=${() => this.#show(open ? null : entry)}>
          <span class="what">${shown(entry.prompt || entry.tool)}</span>
          <span class="where">${entry.kind === "approval" ? html`<span class="chip risk ${entry.risk}">${entry.risk}</span>${several(entry) ? html` <span class="chip ${voted ? "good" : ""}">${tally(entry)}${voted ? ", also by you" : nothing}</span>` : nothing}${barred(entry, this.client) ? html` <span class="chip">another person decides</span>` : nothing}` : html`<span class="chip">${CHIPS[entry.kind]}</span>`}
            ${shown(entry.tool)} · ${shown(entry.principal?.id ?? "")} · <holdfast-time .client=${this.client} .at=${entry.since}></holdfast-time> · ${named(entry.conversation, title)}</span>
          ${entry.starts_at ? html`<span class="left">approved, <holdfast-time .mode=${"start"} .client=${this.client} .at=${entry.starts_at}></holdfast-time></span>` : html`<holdfast-time class="left" .mode=${"left"} .client=${this.client} .at=${entry.deadline}></holdfast-time>`}</button></div>
      ${open ? html`<div class="opened">${this.gone ? html`<p class="notice stale ${this.mine ? "good" : ""}" role="status" tabindex="-1">${shown(this.gone)}${adrift() ? " Your typing is ignored; press Esc to continue." : nothing}</p><holdfast-outcome .client=${this.client} .pending=${entry}></holdfast-outcome>`
        : entry.kind === "approval" ? html`<holdfast-approval .place=${title || true} .client=${this.client} .pending=${entry}></holdfast-approval>` : html`<holdfast-question .place=${title || true} .client=${this.client} .pending=${entry}></holdfast-question>`}
      ${!this.gone && this.said?.length ? html`<section class="said" aria-label="Last messages">${this.said.map(({ by, text }) => by ? html`<p><b>${shown(by)}</b> ${shown(text.length > 300 ? "…" + text.slice(-300) : text)}</p>` : html`<holdfast-markdown .text=${text}></holdfast-markdown>`)}</section>` : nothing}</div>` : nothing}</li>`;
  }
}

const options = (words, chosen) => Object.entries(words).map(([value, text]) => html`<option value=${value} ?selected=${value === chosen} .selected=${value === chosen}>${text}</option>`);

customElements.define("holdfast-inbox", InboxView);
