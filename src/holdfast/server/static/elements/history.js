// <holdfast-history>: what was decided, expired or refused in the conversations that the principal of the page may see.
//   properties  client: Client   titles: Map (titles of conversations by id)
// It reads PAGE decisions at a time, the latest first. All of it comes from the logs; on request the server verifies the
// hash chains of the logs and compares them with the index, for the rows that are shown.
import { Element, html, nothing, shown, named, value, table, jsonDiff, oneLine } from "./base.js";
import { repeat } from "lit/directives/repeat.js";
import { actor, listed, moment, spelled, when } from "../text.js";

const PAGE = 50; // decisions
const AGAIN = 2000; // milliseconds until the first page is read again while the index is being built
const BURST = 1000; // milliseconds after a change of the inbox

const WORDS = { approve: "approved", edit: "approved as edited", deny: "denied", answer: "answered", client_result: "run in a browser", submit: "done manually", failed: "reported as failed", expired: "expired", detached: "no page could run it", vote: "voted for", take_back: "approval taken back", extend: "given more time", refused: "refused", cancel: "turn cancelled", revoke: "remembered approval revoked", import: "log imported" };
const TONES = { deny: "bad", refused: "bad", failed: "bad", expired: "warn", detached: "warn", cancel: "warn", take_back: "warn", approve: "good", edit: "good" };
const KINDS = [["", "Every decision"], ["approve,edit,vote", "Approvals"], ["deny", "Denials"], ["answer,submit,client_result,failed", "Answers and results"], ["expired,detached", "Expired"], ["refused", "Refused attempts"], ["extend", "More time"], ["take_back", "Approvals taken back"], ["cancel,revoke,import", "Cancelled, revoked, imported"]];
const EMPTY = { text: "", kinds: "", mine: false, who: "", tool: "", conversation: "", from: "", to: "" };

// A day begins and ends in the time zone of the browser.
const day = (text, days = 0) => {
  const [year, month, date] = text.split("-").map(Number);
  return new Date(year, month - 1, date + days).getTime() / 1000;
};

class History extends Element {
  static properties = { client: {}, titles: {}, list: { state: true }, wanted: { state: true }, next: { state: true }, complete: { state: true }, busy: { state: true }, checked: { state: true }, problem: { state: true }, opened: { state: true } };

  constructor() {
    super();
    Object.assign(this, { wanted: EMPTY, complete: true, opened: new Set() });
  }

  willUpdate(now) {
    super.willUpdate(now);
    if (!now.has("client") || !this.client) return;
    this.#load();
    this.watch(this.client.inbox, "change", () => {
      clearTimeout(this.due);
      this.due = setTimeout(() => this.list && this.list.length <= PAGE && !this.opened.size && !this.checked && !this.busy && this.#load(undefined, "again"), BURST);
    });
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearTimeout(this.due);
  }

  back() {
    super.back();
    if (!this.list) this.#load();
  }

  get #query() {
    const { text, kinds, mine, who, tool, conversation, from, to } = this.wanted;
    const filters = { text, kinds, who: mine ? this.client.principal : who, tool, conversation, since: from && day(from), until: to && day(to, 1) };
    return Object.fromEntries(Object.entries(filters).map(([name, it]) => [name, typeof it === "string" ? it.trim() : it]).filter(([, it]) => it));
  }

  // Read the first page, or the next one; again: by itself, which holds up nothing. An answer to an earlier question is ignored.
  async #load(cursor, busy = cursor ? "more" : "first") {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    clearTimeout(this.due);
    Object.assign(this, { busy, problem: null });
    if (!cursor) this.checked = null;
    try {
      await this.client.me();
      const before = cursor ? this.list : [];
      const page = await this.client.decisions({ ...this.#query, cursor, limit: PAGE, verify: this.checked ? true : undefined });
      if (turn !== this.turn) return;
      Object.assign(this, { list: [...before, ...page.decisions], next: page.next, complete: page.complete });
      if (this.checked) this.checked = [...this.checked, ...page.problems.filter((each) => !this.checked.includes(each))];
      if (!page.complete && !cursor) this.due = setTimeout(() => this.isConnected && this.#load(), AGAIN);
      if (cursor) this.updateComplete.then(() => this.querySelectorAll("summary.decided")[before.length]?.focus());
    } catch (problem) {
      if (turn === this.turn) this.problem = problem;
    }
    if (turn === this.turn) this.busy = "";
  }

  // Read the rows that are shown again, verified.
  async #verify() {
    if (this.busy) return;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    Object.assign(this, { busy: "verify", problem: null });
    const most = this.list.length, list = [], problems = new Set();
    try {
      let cursor;
      do {
        const page = await this.client.decisions({ ...this.#query, cursor, limit: Math.min(PAGE, Math.max(1, most - list.length)), verify: true });
        if (turn !== this.turn) return;
        list.push(...page.decisions);
        page.problems.forEach((each) => problems.add(each));
        cursor = page.next;
      } while (cursor && list.length < most);
      Object.assign(this, { list, next: this.next && cursor, checked: [...problems] });
    } catch (problem) {
      if (turn === this.turn) this.problem = problem;
    }
    if (turn === this.turn) this.busy = "";
  }

  #apply(event) {
    event.preventDefault();
    const given = new FormData(event.currentTarget);
    const wanted = Object.fromEntries(Object.keys(EMPTY).map((name) => [name, name === "mine" ? given.has(name) : given.get(name) ?? this.wanted[name]]));
    if (Object.keys(EMPTY).every((name) => wanted[name] === this.wanted[name]) && event.type === "change") return;
    Object.assign(this, { wanted, opened: new Set() });
    this.#load();
  }

  render() {
    if (!this.client) return nothing;
    const { wanted, list, busy } = this;
    const more = ["who", "tool", "conversation", "from", "to"].some((name) => wanted[name]);
    const field = (name, label, type = "text") => html`<label>${label}<input name=${name} type=${type} maxlength="200" autocomplete="off" spellcheck="false" ?disabled=${name === "who" && wanted.mine} .value=${wanted[name]}></label>`;
    return html`<div class="inbox history" tabindex="-1" role="group" aria-label="History">
      <form @change=${this.#apply} @submit=${this.#apply}>
        <div class="tools"><label class="grow"><span class="sr">Words</span><input class="filter" name="text" type="search" maxlength="200" placeholder="Words in plans, arguments, reasons…" .value=${wanted.text}></label>
          <label><span class="sr">Kind</span><select name="kinds">${KINDS.map(([kinds, words]) => html`<option value=${kinds} ?selected=${kinds === wanted.kinds}>${words}</option>`)}</select></label>
          <label class="remember"><input type="checkbox" name="mine" .checked=${wanted.mine}> Only mine</label></div>
        <details class="given" ?open=${more}><summary>More filters</summary><div class="filters">${field("who", "Who")}${field("tool", "Tool")}${field("conversation", "Conversation")}${field("from", "From", "date")}${field("to", "To", "date")}<button>Show</button></div></details></form>
      <p class="bar-line">${list?.length ? html`<button type="button" aria-disabled=${Boolean(busy)} @click=${this.#verify}>${busy === "verify" ? "Checking…" : "Check against the logs"}</button>` : nothing}
        <span class="about">Save as <a href=${this.client.exportAddress({ ...this.#query, format: "csv" })} download>CSV</a> or <a href=${this.client.exportAddress({ ...this.#query, format: "jsonl" })} download>JSON lines</a></span></p>
      ${this.problem ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
      ${this.#verdict()}
      ${this.complete ? nothing : html`<p class="notice" role="status">The index of decisions is still being built. What is missing appears here by itself.</p>`}
      ${list?.length ? html`<ul class="rows">${repeat(list, (each) => `${each.conversation}/${each.seq}`, (each) => this.#row(each))}</ul>`
        : this.next || this.problem ? nothing : html`<div class="empty"><h2>${list ? (Object.keys(this.#query).length ? "No matches" : "Nothing was decided yet") : "Opening…"}</h2><p>Decisions, expired calls and refused attempts appear here.</p></div>`}
      ${this.next ? html`<p class="earlier"><button type="button" aria-disabled=${Boolean(busy) && busy !== "again"} @click=${() => (this.busy && this.busy !== "again") || this.#load(this.next)}>${busy === "more" ? "Reading…" : "Earlier decisions"}</button></p>` : nothing}
    </div>`;
  }

  #verdict() {
    const bad = this.checked?.length;
    const fine = this.checked && `Checked: these ${this.list.length} decisions are as in their logs, and the hash chains of the logs are intact.`;
    return html`<div class=${this.checked ? `notice ${bad ? "stale" : "good"}` : "sr"} role="status">${bad ? html`These logs or rows were changed:<ul>${this.checked.map((each) => html`<li>${shown(each)}</li>`)}</ul>` : fine || ""}</div>`;
  }

  #row(each) {
    const key = `${each.conversation}/${each.seq}`;
    const toggle = ({ target }) => {
      if (target.open === this.opened.has(key)) return;
      this.opened = new Set(this.opened);
      target.open ? this.opened.add(key) : this.opened.delete(key);
    };
    return html`<li><details class="decision" ?open=${this.opened.has(key)} @toggle=${toggle}><summary class="decided">
      <span class="what"><b>${shown(each.tool || this.titles?.get(each.conversation) || each.title || each.conversation)}</b> ${each.prompt ? oneLine(each.prompt, 160) : each.args ? oneLine(each.args) : nothing}</span>
      <time title=${when(each.at)}>${moment(each.at, this.client.now())}</time>
      <span class="where"><span class="chip ${TONES[each.kind] ?? ""}">${WORDS[each.kind] ?? each.kind}</span> ${each.by.id === "system" ? nothing : html`by <b>${shown(actor(each))}</b>`}${each.imported ? html` <span class="chip warn">imported</span>` : nothing}${
        each.problem ? html` <span class="chip bad">does not fit the log</span>` : each.verified ? html` <span class="chip good">✓ checked</span>` : nothing}${each.reason ? html` · ${oneLine(each.reason, 160)}` : nothing}</span></summary>
      ${this.opened.has(key) ? this.#details(each) : nothing}</details></li>`;
  }

  #details(each) {
    const source = { client: this.client, conversation: each.conversation };
    const section = (title, inside) => html`<section><h3>${title}</h3>${inside}</section>`;
    const place = `#/c/${encodeURIComponent(each.conversation)}`;
    return html`<div class="inside">
      ${each.problem ? html`<p class="notice stale">${shown(each.problem)}</p>` : nothing}
      <p class="about">${WORDS[each.kind] ?? each.kind}${each.by.id === "system" ? nothing : html` by <b>${shown(each.by.id)}</b>${each.by.roles?.length ? ` (${spelled(listed(each.by.roles))})` : ""}${each.on_behalf_of ? html` as the deputy of <b>${shown(each.on_behalf_of.id)}</b>` : nothing}`},
        <time>${when(each.at)}</time>${each.asked ? html`; asked <time>${when(each.asked)}</time>` : nothing}. In <a href=${place}>${named(each.conversation, this.titles?.get(each.conversation) || each.title || null)}</a>, event ${each.seq}.</p>
      ${each.imported ? html`<p class="notice warn">This came with an imported log: only the importer vouches for it.</p>` : nothing}
      ${each.attempted ? html`<p class="about">The attempt: ${shown(each.attempted)}. The call kept waiting.</p>` : nothing}
      ${each.reason ? section("Reason", value(each.reason)) : nothing}
      ${each.votes.length ? html`<ul class="voters">${each.votes.map((vote) => html`<li><b>${shown(actor(vote))}</b> approved, <time>${when(vote.at)}</time></li>`)}</ul>` : nothing}
      ${each.remember ? html`<p class="about">Remembered for ${each.remember === "args" ? "these arguments" : "any arguments"}, ${{ conversation: "in this conversation", user: "in every conversation of that principal", everyone: "everywhere" }[each.scope] ?? ""}.</p>` : nothing}
      ${each.until ? html`<p class="about">New deadline: ${when(each.until)}</p>` : nothing}
      ${each.preview_error ? section("The preview failed", value(each.preview_error)) : each.preview !== null && each.preview !== undefined ? section("The plan that was shown", value(each.preview, source)) : nothing}
      ${each.edited ? section("Edited", jsonDiff(each.args, each.edited)) : nothing}
      ${each.args ? section("Arguments", table(each.args)) : nothing}
      ${each.value !== null && each.value !== undefined ? section("Answer", value(each.value)) : nothing}</div>`;
  }
}
customElements.define("holdfast-history", History);
