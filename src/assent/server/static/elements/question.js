// <assent-question>: a question to a person, a call to be done by hand, or a call that waits for a browser.
//   properties  client: Client   pending: Pending (kind elicitation, manual or client_exec)   place: boolean
//   events      decided, with detail {pending, decision, seq}    refused, with detail {pending, problem}
import { Element, html, nothing, shown, table } from "./base.js";
import { duration, atZero, same } from "../text.js";
import "./form.js";

class Question extends Element {
  static properties = { client: {}, pending: {}, place: { type: Boolean }, answer: { state: true }, busy: { state: true }, problem: { state: true }, declining: { state: true } };

  connectedCallback() {
    super.connectedCallback();
    this.tick(1000);
    if (this.pending?.kind === "client_exec") this.watch(this.client.inbox, "change", () => this.requestUpdate());
  }

  async #decide(decision) {
    const { pending } = this;
    this.busy = true;
    this.problem = null;
    try {
      const { seq } = await this.client.resolve(pending, decision);
      this.emit("decided", { pending, decision, seq });
    } catch (problem) {
      this.busy = false;
      this.problem = problem;
      this.emit("refused", { pending, problem });
    }
  }

  #send(event) {
    event.preventDefault();
    const form = this.querySelector("assent-form");
    if (form && !form.check()) return;
    const answer = form ? form.value : this.answer;
    if (answer === undefined) return (this.problem = { message: "Please choose an answer.", details: {} });
    this.#decide({ type: this.pending.kind === "manual" ? "submit" : "answer", value: answer });
  }

  #decline(event) {
    event.preventDefault();
    const reason = this.querySelector("input.reason").value.trim();
    this.#decide(this.pending.kind === "manual" ? { type: "failed", kind: "handler_failed", message: reason || "it could not be done" } : { type: "deny", reason });
  }

  render() {
    const { pending } = this;
    if (!pending) return nothing;
    const left = pending.deadline - this.client.now();
    const problems = this.problem?.details?.problems ?? [];
    return html`<article class="card question ${pending.kind}" tabindex="-1" aria-label="Question: ${pending.prompt || pending.tool}">
      <header><h3>${shown(pending.prompt || (pending.kind === "client_exec" ? `${pending.tool} runs in a browser` : `${pending.tool}: please answer`))}</h3>
        <p class="about"><span class="chip">${{ elicitation: "question", manual: "by hand", client_exec: "browser" }[pending.kind]}</span>
          <span><code>${shown(pending.tool)}</code> for <b>${shown(pending.principal?.id ?? "somebody")}</b>${this.place ? html` in <a href="#/c/${encodeURIComponent(pending.conversation)}">${pending.conversation}</a>` : nothing}</span></p></header>
      ${Object.keys(pending.args ?? {}).length ? html`<details class="given" ?open=${pending.kind === "manual"}><summary>What it is about</summary>${table(pending.args)}</details>` : nothing}
      ${pending.kind === "client_exec" ? this.#browser() : this.declining ? this.#refusing() : html`<form @submit=${this.#send} novalidate>
        ${pending.choices ? this.#choices() : html`<assent-form label=${pending.kind === "manual" ? "Result" : "Answer"} .schema=${pending.schema ?? {}} .problems=${problems} @edited=${(event) => { event.stopPropagation(); this.problem = null; }}></assent-form>`}
        ${this.problem ? html`<p class="notice bad stale" role="alert">${shown(this.problem.message)}</p>` : nothing}
        <div class="actions"><button class="primary" ?disabled=${this.busy || left <= 0}>${pending.kind === "manual" ? "Submit the result" : "Send the answer"}</button>
          <button type="button" ?disabled=${this.busy || left <= 0} @click=${() => (this.declining = true)}>${pending.kind === "manual" ? "It failed" : "Decline"}</button></div></form>`}
      <footer>${left <= 0 ? html`<span class="expired">Expired: ${atZero(pending.on_expiry)}.</span>` : html`<span class="expiry ${left < 60 ? "soon" : ""}">Expires in <time>${duration(Math.ceil(left))}</time>; then ${shown(atZero(pending.on_expiry))}.</span>`}</footer>
    </article>`;
  }

  #choices() {
    const name = `choice-${this.pending.call}`;
    return html`<fieldset class="field choices"><legend>Your answer</legend><div class="options">${this.pending.choices.map((choice) => html`<label><input type="radio" name=${name}
      .checked=${same(choice, this.answer)} @change=${() => { this.answer = choice; this.problem = null; }}> <span>${shown(typeof choice === "string" ? choice : JSON.stringify(choice))}</span></label>`)}</div></fieldset>`;
  }

  #refusing() {
    return html`<form class="actions denial" @submit=${this.#decline}><label class="grow">Reason <span class="optional">the model sees it</span><input class="reason" maxlength="2000"></label>
      <button class="danger" ?disabled=${this.busy}>${this.pending.kind === "manual" ? "Report the failure" : "Decline"}</button>
      <button type="button" @click=${() => (this.declining = false)}>Back</button>
      ${this.problem ? html`<p class="notice bad stale" role="alert">${shown(this.problem.message)}</p>` : nothing}</form>`;
  }

  #browser() {
    const call = this.client.clientCall(this.pending);
    if (!call) return html`<p class="notice">It waits for a page that can run <code>${shown(this.pending.tool)}</code>.</p>`;
    if (call.label && call.state !== "running") return html`<div class="actions"><button type="button" class="primary" @click=${call.run}>${call.label}</button>
      ${call.state === "elsewhere" ? html`<span class="notice">Another page is running it.</span>` : call.message ? html`<span class="notice bad">${shown(call.message)}</span>` : nothing}</div>`;
    return html`<p class="notice" role="status">${{ running: "Running in this page…", elsewhere: "Another page is running it.", asking: "Starting…" }[call.state] ?? shown(call.message)}</p>`;
  }
}
customElements.define("assent-question", Question);
