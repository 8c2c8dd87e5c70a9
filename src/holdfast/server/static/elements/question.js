// <holdfast-question>: a question to a person, a manual task, or a call that waits for a browser.
//   properties  client: Client   pending: Pending (kind elicitation, manual or client_exec)   place: as in holdfast-approval
//   events      decided, with detail {pending, decision, seq, missing}    refused, with detail {pending, problem}    extended, with detail {pending, until, seq}
import { Card, html, nothing, shown, table } from "./base.js";
import { deciders } from "./votes.js";
import { initial } from "../schema.js";
import { same, brief, spelled } from "../text.js";
import "./form.js";

class Question extends Card {
  static properties = { answer: { state: true }, declining: { state: true } };

  renew() {
    Object.assign(this, { answer: undefined, declining: false, kept: "" });
    this.querySelector("holdfast-form")?.reset();
  }

  get typed() {
    const { answer, declining, pending } = this;
    return { answer, declining, value: this.querySelector("holdfast-form")?.value, reason: this.querySelector("input.reason")?.value, schema: pending.schema, choices: pending.choices };
  }

  get written() {
    const form = this.querySelector("holdfast-form"), reason = this.querySelector("input.reason")?.value.trim();
    const value = form?.value ?? this.answer;
    return reason || (value === undefined || same(value, initial(this.pending.schema ?? {}, this.pending.schema)) ? "" : brief(value));
  }

  // An answer to another question is shown, but is not entered: it may mean something else there.
  restore({ answer, declining, value, reason, schema, choices }) {
    const { pending } = this;
    if (!same(schema, pending.schema) || !same(choices, pending.choices)) return (this.kept = `you wrote: ${brief(reason ?? answer ?? value ?? "")}`);
    Object.assign(this, { answer, declining, kept: "what you wrote is kept" });
    this.updateComplete.then(() => {
      const form = this.querySelector("holdfast-form"), why = this.querySelector("input.reason");
      if (form) form.value = value;
      if (why) why.value = reason;
    });
  }

  willUpdate(changed) {
    super.willUpdate(changed);
    if (changed.has("client") && this.client) this.watch(this.client.inbox, "change", () => this.requestUpdate());
  }

  #send(event) {
    event.preventDefault();
    const form = this.querySelector("holdfast-form");
    if (!this.press() || (form && !form.check())) return;
    const answer = form ? form.value : this.answer;
    if (answer === undefined) return (this.problem = { message: "Please choose an answer.", details: {} });
    this.decide({ type: this.pending.kind === "manual" ? "submit" : "answer", value: answer });
  }

  #refuse() {
    this.declining = true;
    this.guard.renew([]);
  }

  #decline(event) {
    event.preventDefault();
    if (!this.press()) return;
    const reason = this.querySelector("input.reason").value.trim();
    this.decide(this.pending.kind === "manual" ? { type: "failed", kind: "handler_failed", message: reason || "it could not be done" } : { type: "deny", reason });
  }

  card() {
    const { pending, off } = this, held = this.held();
    const byHand = pending.kind === "manual";
    return html`<article class="card question ${pending.kind}" tabindex="-1" aria-label="Question: ${spelled(pending.prompt || pending.tool)}">
      <header><h3>${shown(pending.prompt || (pending.kind === "client_exec" ? `${pending.tool} runs in a browser` : `${pending.tool}: please answer`))}</h3></header>
      <div class="facts">${this.about(html`<span class="chip">${{ elicitation: "question", manual: "manual", client_exec: "browser" }[pending.kind]}</span>`)}${deciders(pending, this.client)}</div>
      ${Object.keys(pending.args ?? {}).length ? html`<details class="given" ?open=${byHand}><summary>Details</summary>${table(pending.args)}</details>` : nothing}
      ${pending.kind === "client_exec" ? this.#browser() : this.problem?.final ? this.refusal() : this.declining ? this.#refusing() : html`<form @submit=${this.#send} novalidate>
        ${pending.choices ? this.#choices() : html`<holdfast-form label=${byHand ? "Result" : "Answer"} .schema=${pending.schema ?? {}} .problems=${this.problem?.details.problems ?? []} @edited=${(event) => { event.stopPropagation(); this.problem = null; }}></holdfast-form>`}
        ${this.refusal()}
        <div class="actions"><button class="primary" ?disabled=${off} aria-disabled=${held}>${this.label(byHand ? "submit" : "answer", byHand ? "Submit the result" : "Send the answer")}</button>
          <button type="button" ?disabled=${off} aria-disabled=${held} @click=${() => this.press() && this.#refuse()}>${byHand ? "It failed" : "Decline"}</button></div></form>`}
      ${this.status()}
      <footer>${this.expiry()}</footer>
    </article>`;
  }

  #choices() {
    const name = `choice-${this.pending.call}`;
    return html`<fieldset class="field choices"><legend>Your answer</legend><div class="options">${this.pending.choices.map((choice) => html`<label><input type="radio" name=${name}
      .checked=${same(choice, this.answer)} @change=${() => { this.answer = choice; this.problem = null; }}> <span>${shown(brief(choice))}</span></label>`)}</div></fieldset>`;
  }

  #refusing() {
    return html`<form class="actions denial" @submit=${this.#decline}><label class="grow">Reason <span class="optional">the model sees it</span><input class="reason" maxlength="2000"></label>
      <button class="danger" ?disabled=${this.off} aria-disabled=${this.held()}>${this.label(this.pending.kind === "manual" ? "failed" : "deny", this.pending.kind === "manual" ? "Report the failure" : "Decline")}</button>
      <button type="button" @click=${() => (this.declining = false)}>Back</button>
      ${this.refusal()}</form>`;
  }

  #browser() {
    const call = this.client.clientCall(this.pending);
    if (!call) return html`<p class="notice">Waiting for an open page that can run <code>${shown(this.pending.tool)}</code>.</p>`;
    if (call.label && call.state !== "running") return html`<div class="actions"><button type="button" class="primary" @click=${() => { this.querySelector(".card").focus(); call.run(); }}>${call.label}</button>
      ${call.state === "elsewhere" ? html`<span class="notice">Another page is running it.</span>` : call.message ? html`<span class="notice bad">${shown(call.message)}</span>` : nothing}</div>`;
    return html`<p class="notice" role="status">${{ running: "Running in this page…", elsewhere: "Another page is running it.", asking: "Starting…" }[call.state] ?? shown(call.message)}</p>`;
  }
}
customElements.define("holdfast-question", Question);
