// <holdfast-deputies>: who decides for whom. The principal of the page names deputies here, and ends delegations.
//   properties  client: Client
//   events      named, with detail {delegation}    ended, with detail {delegation}
import { Element, html, nothing, shown } from "./base.js";
import { when } from "../text.js";

const REFRESH = 10_000; // milliseconds
const PERIODS = [["1d", "one day"], ["7d", "one week"], ["14d", "two weeks"], ["30d", "30 days"], ["", "until a date…"]];

class Deputies extends Element {
  static properties = { client: {}, list: { state: true }, to: { state: true }, period: { state: true }, last: { state: true }, busy: { state: true }, problem: { state: true }, said: { state: true } };

  constructor() {
    super();
    Object.assign(this, { to: "", period: "7d", last: "", busy: false });
  }

  connectedCallback() {
    super.connectedCallback();
    this.tick(REFRESH, () => document.visibilityState === "visible" && this.#load());
  }

  willUpdate(now) {
    super.willUpdate(now);
    if (now.has("client") && this.client) this.#load();
  }

  back() {
    super.back();
    this.#load();
  }

  async #load() {
    try {
      [this.list] = await Promise.all([this.client.deputies(), this.client.me()]); // cards say for whom this person decides
    } catch (problem) {
      if (!this.list) this.problem = problem;
    }
  }

  // A date means until the end of that day, in the time zone of the browser.
  get #end() {
    if (this.period) return { duration: this.period };
    const [year, month, day] = this.last.split("-").map(Number);
    return { until: new Date(year, month - 1, day + 1).getTime() / 1000 };
  }

  async #name(event) {
    event.preventDefault();
    if (this.busy) return;
    const to = this.to.trim();
    if (!to || (!this.period && !this.last)) {
      this.problem = { message: to ? "Choose the last day." : "Enter the name of the deputy, as that person signs in." };
      return this.querySelector(to ? "input[type=date]" : "input.to").focus();
    }
    Object.assign(this, { busy: true, problem: null, said: "" });
    try {
      const delegation = await this.client.nameDeputy({ to, ...this.#end });
      Object.assign(this, { to: "", said: `${to} may decide for you until ${when(delegation.until)}.` });
      this.emit("named", { delegation });
      await this.#load();
    } catch (problem) {
      this.problem = problem;
    }
    this.busy = false;
  }

  async #finish(delegation) {
    Object.assign(this, { problem: null, said: "" });
    this.querySelector(".deputies").focus({ preventScroll: true }); // the pressed row disappears: a second press must not hit the next one
    try {
      await this.client.endDelegation(delegation.id);
      this.said = "The delegation has ended.";
      this.emit("ended", { delegation });
    } catch (problem) {
      this.problem = problem;
    }
    await this.#load();
  }

  render() {
    if (!this.client) return nothing;
    const me = this.client.principal, now = this.client.now();
    const list = (this.list ?? []).filter(({ until }) => until > now);
    const mine = list.filter(({ principal }) => principal.id === me);
    const others = list.filter(({ principal }) => principal.id !== me);
    return html`<div class="inbox deputies" tabindex="-1" role="group" aria-label="Deputies">
      <p class="about">A deputy may decide what you may decide, until the period ends or one of you ends it. Each decision shows both names. A deputy cannot pass this on.</p>
      <form class="card" @submit=${this.#name} novalidate><h3>Name a deputy</h3>
        <div class="actions">
          <label class="grow">Name of the deputy<input class="to" maxlength="200" autocomplete="off" spellcheck="false" .value=${this.to} @input=${(event) => (this.to = event.target.value)}></label>
          <label>Period<select class="period" @change=${(event) => (this.period = event.target.value)}>${PERIODS.map(([value, words]) => html`<option value=${value} ?selected=${value === this.period}>${words}</option>`)}</select></label>
          ${this.period ? nothing : html`<label>Last day<input type="date" .value=${this.last} @input=${(event) => (this.last = event.target.value)}></label>`}
          <button class="primary" aria-disabled=${this.busy}>${this.busy ? "Sending…" : "Name this deputy"}</button></div>
        ${this.problem ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
        <p class=${this.said ? "notice good" : "sr"} role="status">${shown(this.said ?? "")}</p></form>
      <section><h3>Your deputies</h3>${mine.length ? this.#rows(mine) : html`<p class="about">${this.list ? "Nobody decides for you." : "Opening…"}</p>`}</section>
      ${others.length ? html`<section><h3>Other people's deputies</h3>${this.#rows(others)}</section>` : nothing}
    </div>`;
  }

  #rows(list) {
    const me = this.client.principal;
    const named = (id) => (id === me ? html`<b>You</b>` : html`<b>${shown(id)}</b>`);
    return html`<ul class="rows">${list.map((each) => html`<li class="bar"><span class="grow">${named(each.deputy)} ${each.deputy === me ? "decide" : "decides"} for <b>${each.principal.id === me ? "you" : shown(each.principal.id)}</b>
      <small class="about">until ${when(each.until)}</small></span>
      ${[each.principal.id, each.deputy].includes(me) ? html`<button type="button" class="danger outline" aria-label="End: ${each.deputy} for ${each.principal.id}" @click=${() => this.#finish(each)}>End</button>` : nothing}</li>`)}</ul>`;
  }
}
customElements.define("holdfast-deputies", Deputies);
