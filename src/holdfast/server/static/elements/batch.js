// <holdfast-batch>: a dialog that decides several approvals together. Calls of one tool whose arguments and plan fit are
// the rows of a table; all other calls are shown in full.
//   properties  client: Client   entries: [Pending]   titles: Map (optional)
//   events      batched, with detail {results, entries, denied}: the server has decided about each call    closed
// Nothing can be approved unseen: the dialog must have been scrolled to its end, in both directions (guard.js).
import { Element, html, nothing, shown, named, table, value, plainPreview, warnings } from "./base.js";
import { deciders, summary, meanwhile } from "./votes.js";
import { Guard, UNLOADED } from "../guard.js";
import { tablesOf, planCell, totals } from "../totals.js";
import { people, spelled } from "../text.js";
import { Problem, keyOf } from "../client.js";
import "./time.js";

class Batch extends Element {
  static properties = { client: {}, entries: {}, titles: {}, results: { state: true }, refused: { state: true }, sending: { state: true }, reason: { state: true } };

  constructor() {
    super();
    Object.assign(this, { reason: "", sending: "" });
  }

  #guard = null;

  firstUpdated() {
    const dialog = this.querySelector("dialog");
    this.#guard = new Guard(dialog, { buttons: () => [...dialog.querySelectorAll(".actions button")], parts: () => [dialog.querySelector(".content")], changed: () => (this.requestUpdate(), this.updateComplete) });
    dialog.showModal();
    dialog.focus();
    this.#guard.start();
  }

  updated() {
    this.#guard.sample();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#guard?.stop();
  }

  async #decide(decision) {
    if (this.results || this.sending || this.#guard.unseen() || !this.#guard.steady()) return;
    const decisions = this.entries.map((entry) => ({ ...entry, decision: decision(entry) }));
    const denied = decisions[0].decision.type === "deny";
    this.querySelector("dialog").focus(); // a disabled button would lose the focus
    this.sending = decisions[0].decision.type;
    this.refused = null;
    try {
      const results = await this.client.resolveAll(decisions);
      if (results.every(({ problem }) => problem?.status === 503)) throw new Problem(results[0].problem);
      this.denied = denied;
      this.results = new Map(results.map((result) => [keyOf(result), result]));
      this.emit("batched", { results, entries: this.entries, denied });
    } catch (problem) {
      this.refused = problem;
    }
    this.sending = "";
  }

  render() {
    if (!this.client || !this.entries) return nothing;
    const n = this.entries.length;
    const unseen = !this.#guard || Boolean(this.#guard.unseen());
    const off = Boolean(this.sending || this.results), held = String(unseen || !this.#guard.armed);
    const label = (sends, words) => (this.sending === sends ? "Sending…" : words);
    const { tables, full } = tablesOf(this.entries);
    return html`<dialog class="batch ${tables.length ? "wide" : ""}" tabindex="-1" aria-label="Review ${n} requests" @close=${() => this.emit("closed")} @loaded=${() => this.requestUpdate()}><h2>Review ${n} requests</h2>
      ${this.results ? html`<p class="notice outcome" role="status">${shown(summary([...this.results.values()], this.denied, this.client.principal))}</p>` : nothing}
      <div class="content" tabindex="0" role="group" aria-label="All requests in full"><div>${tables.map((each) => this.#table(each))}${full.map((entry) => this.#full(entry))}</div></div>
      ${this.refused ? html`<p class="notice bad" role="alert">${shown(this.refused.message)}: ${(this.refused.status > 0 && this.refused.status < 500) || this.refused.status === 503 ? "nothing was decided." : "the outcome is unknown. The inbox shows the calls that are still waiting."}</p>` : nothing}
      <div class="actions"><button type="button" class="primary" ?disabled=${off} aria-disabled=${held} @click=${() => this.#decide((entry) => ({ type: "approve", digest: entry.digest }))}>${label("approve", `Approve ${n}`)}</button>
        <label class="grow"><span class="sr">Reason for denying</span><input class="reason" placeholder="Reason for denying" .value=${this.reason} @input=${(event) => (this.reason = event.target.value)}></label>
        <button type="button" class="danger outline" ?disabled=${off} aria-disabled=${held} @click=${() => this.#decide(() => ({ type: "deny", reason: this.reason.trim() }))}>${label("deny", `Deny ${n}`)}</button>
        <button type="button" @click=${() => this.emit("closed")}>Close</button></div>
      <p class="gate" role="status">${this.sending ? html`<span class="sr">Sending…</span>` : unseen && !off ? (this.querySelector(UNLOADED) ? "Show each whole diff to decide." : "Scroll to the end to decide.") : ""}</p></dialog>`;
  }

  #title = ({ conversation }) => this.titles?.get(conversation);

  // Every argument and every part of the plan has a column, and its cells wrap: nothing is cut off.
  #table({ tool, entries, args, plan }) {
    const high = entries.filter(({ risk }) => risk === "high").length;
    const cell = (object, name) => (name in object ? value(object[name]) : html`<span class="null">not set</span>`);
    return html`<section class="bulk"><table><caption>${entries.length} × <code>${shown(tool)}</code>${totals({ entries, args }).map((total) => html`, ${shown(total)}`)}${high ? `, ${high} high risk` : nothing}</caption>
      <thead><tr><th scope="col">Request</th>${args.map((name) => html`<th scope="col">${shown(name)}</th>`)}${plan.map((name) => html`<th scope="col">${shown(name)} <small>would happen</small></th>`)}<th scope="col">Asked by</th></tr></thead>
      <tbody>${entries.map((entry) => html`<tr class="entry"><th scope="row" data-name="Request"><span class="chip risk ${entry.risk}">${entry.risk}</span> ${shown(entry.prompt || entry.tool)}${deciders(entry, this.client)}${this.#result(entry)}</th>
        ${args.map((name) => html`<td data-name=${spelled(name)}>${cell(entry.args, name)}</td>`)}
        ${plan.map((name) => html`<td data-name=${spelled(name)}>${planCell(entry, name) === undefined ? html`<span class="null">nothing</span>` : value(planCell(entry, name))}</td>`)}
        <td class="about" data-name="Asked by">${shown(entry.principal?.id ?? "")} in ${named(entry.conversation, this.#title(entry))}, <holdfast-time .client=${this.client} .at=${entry.since}></holdfast-time></td></tr>`)}</tbody></table></section>`;
  }

  #full(entry) {
    return html`<section class="entry"><h3>${shown(entry.prompt || entry.tool)}</h3><p class="about"><span class="chip risk ${entry.risk}">${entry.risk} risk</span> <code>${shown(entry.tool)}</code> for <b>${shown(entry.principal?.id ?? "")}</b> in ${named(entry.conversation, this.#title(entry))}</p>${warnings(entry)}${deciders(entry, this.client)}
      ${plainPreview(entry) ? nothing : html`<h4>What would happen</h4>${value(entry.preview, { client: this.client, conversation: entry.conversation })}`}<h4>Arguments</h4>${table(entry.args)}
      ${this.#result(entry)}</section>`;
  }

  #result(entry) {
    const result = this.results?.get(keyOf(entry));
    if (!result) return nothing;
    const { problem, missing } = result;
    const late = problem && meanwhile(problem, this.client.principal);
    return html`<p class="notice ${problem ? "bad" : "good"}">${late ? shown(`${late[0].toUpperCase()}${late.slice(1)} meanwhile.`) : problem ? shown(problem.detail ?? problem.title) : missing ? `Accepted; it waits for ${people(missing, "more approver")}.` : "Accepted."}</p>`;
  }
}
customElements.define("holdfast-batch", Batch);
