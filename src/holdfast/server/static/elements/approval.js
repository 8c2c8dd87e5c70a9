// <holdfast-approval>: one call that waits for an approval.
//   properties  client: Client   pending: Pending   mode: "" | "edit" | "deny" | "result"   place: boolean (show the conversation), or its title
//   events      decided, with detail {pending, decision, seq, missing}    refused, with detail {pending, problem}    extended, with detail {pending, until, seq}
// Approve never gets the focus automatically. For 700 ms after the card has appeared, changed or moved, presses are
// ignored; the title and the whole content must have been seen (guard.js). A decision carries the digest of the preview.
import { Card, html, nothing, shown, value, table, raw, jsonDiff, plainPreview, warnings, lost } from "./base.js";
import { graceCard, graceNotice } from "./grace.js";
import { several, missing, hasVoted, barred, deciders } from "./votes.js";
import { UNLOADED } from "../guard.js";
import { TEXT, adrift } from "../writing.js";
import { keyOf } from "../client.js";
import { same, spelled, json, brief, parse } from "../text.js";
import "./artifact.js";
import "./form.js";

const PREVIEW_AFTER = 300; // milliseconds without typing before edited arguments are previewed

class Approval extends Card {
  static properties = {
    mode: { type: String }, asJson: { state: true },
    edited: { state: true }, plan: { state: true }, planProblem: { state: true }, remember: { state: true }, span: { state: true }, scope: { state: true }, offered: { state: true },
    reason: { state: true },
  };

  constructor() {
    super();
    Object.assign(this, { mode: "", asJson: false });
    this.addEventListener("keydown", (event) => this.#key(event));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    clearTimeout(this.trying);
  }

  // The call is another one than before, so that the card starts over. A new version of the same call shows its changes.
  renew(old) {
    const { pending } = this;
    clearTimeout(this.trying);
    this.before = pending.before ?? (old && keyOf(old) === keyOf(pending) && old.digest !== pending.digest ? old : null);
    Object.assign(this, { edited: null, plan: null, planProblem: null, remember: "", span: "", scope: "conversation", offered: null, reason: "" });
    if (old) this.mode = "";
    this.kept = "";
  }

  get typed() {
    const { mode, reason, edited, remember, span, pending } = this;
    return { mode, reason, edited, remember, span, schema: pending.schema, result: mode === "result" ? this.form?.value : undefined };
  }

  get written() {
    const { mode, reason, edited, pending } = this;
    return mode === "deny" ? reason.trim() : mode === "edit" && edited && !same(edited, pending.args) ? json(edited) : mode === "result" && this.form?.value !== undefined ? brief(this.form.value) : "";
  }

  restore({ mode, schema, result, ...typed }) {
    if (!mode || this.mode || (mode === "edit" && (!same(schema, this.pending.schema) || !this.mayEdit)) || (mode === "result" && !this.pending.recovery)) return;
    const { activeElement } = document;
    this.quiet = activeElement !== document.body && !this.contains(activeElement); // the person is busy elsewhere in the page
    Object.assign(this, { mode, ...typed, kept: "what you wrote is kept" });
    if (mode === "result") this.updateComplete.then(() => (this.form.value = result));
  }

  willUpdate(now) {
    super.willUpdate(now);
    // A resumed edit is previewed again. The copy is needed because a framework may have wrapped the arguments in a proxy.
    if (now.has("mode") && this.editing) this.edited ? this.#edit(this.edited) : (this.edited = parse(json(this.pending.args)));
    if (now.has("mode") && now.get("mode") !== undefined) this.guard.renew([]);
  }

  back() {
    super.back();
    if (lost(this.planProblem)) this.#edit(this.edited);
  }

  updated(now) {
    super.updated(now);
    if (now.has("mode")) {
      const { quiet } = this;
      this.quiet = false;
      if (quiet) return;
      if (this.mode === "deny") this.querySelector("input.reason")?.focus();
      if (this.editing) this.form?.updateComplete.then(() => this.querySelector("holdfast-form input, holdfast-form textarea, holdfast-form select")?.focus());
    }
  }

  get parts() {
    return [...this.heading, this.querySelector(".content")].filter(Boolean);
  }

  // A call that has begun runs again or continues unchanged, or not at all. Several approvers approve the same.
  get mayEdit() {
    return Boolean(this.pending) && !this.pending.recovery && !this.pending.continues && !several(this.pending);
  }

  get editing() {
    return this.mode === "edit" && this.mayEdit;
  }

  // Whether this principal has approved, and others have to. The receipt may arrive before the event.
  get voted() {
    return several(this.pending) && (this.given !== null || hasVoted(this.pending, this.client.principal));
  }

  get refused() {
    return Boolean(barred(this.pending, this.client));
  }

  get form() {
    return this.querySelector("holdfast-form");
  }

  get mayApprove() {
    return !this.pending.starts_at && !this.off && !this.problem?.final && this.settled && !this.voted && !this.refused;
  }

  // Why the call cannot be approved now.
  get #obstacle() {
    const why = this.busy || this.problem?.final ? "" : this.expired ? "this call has expired." : this.voted ? "you have approved it already." : this.refused ? "you may not decide about this call."
      : this.settled ? "" : this.form?.errors.size ? "the arguments are not valid yet." : this.planProblem ? "these arguments could not be checked." : "the edited arguments are still being checked. Press again when the card shows what would happen.";
    return why && `Nothing was sent: ${why}`;
  }

  get changes() {
    return this.editing && (this.form?.unread || !same(this.edited, this.pending.args));
  }

  // Whether the shown preview is that of the arguments: not while an edit is invalid or being previewed.
  get settled() {
    return !this.changes || (!this.form?.unread && !this.planProblem && same(this.plan?.args, this.edited));
  }

  #key(event) {
    if (event.defaultPrevented) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.editing) return this.#approve();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const writing = event.target.closest(TEXT);
    if (event.key === "Escape" && this.mode) {
      event.preventDefault();
      event.stopPropagation();
      this.#leave();
    } else if (!writing && !this.mode && /^[aed]$/.test(event.key)) {
      event.preventDefault();
      event.stopPropagation();
      if (event.repeat) return;
      if (event.key === "a") this.#approve();
      else this.#enter(event.key === "d" ? "deny" : "edit");
    }
  }

  #enter(mode) {
    if (this.refused || this.pending.starts_at || (mode === "edit" && !this.mayEdit) || !this.press()) return;
    this.mode = mode;
  }

  #leave() {
    this.mode = "";
    this.querySelector(".card").focus();
  }

  #edit(args) {
    this.edited = args;
    this.planProblem = null;
    this.requestUpdate(); // invalid input changes no value, but must be rendered
    clearTimeout(this.trying);
    if (!same(this.plan?.args, args)) this.trying = setTimeout(() => this.#try(args), PREVIEW_AFTER);
  }

  async #try(args) {
    if (!this.form?.check(false)) return;
    try {
      const { preview, digest } = await this.client.preview(this.pending, args);
      if (!same(this.edited, args)) return;
      this.guard.renew(digest === this.plan?.digest ? [] : [this.querySelector(".content")]);
      this.plan = { args, preview, digest };
      this.planProblem = null;
    } catch (problem) {
      if (same(this.edited, args)) this.planProblem = problem;
    }
  }

  #approve() {
    if (!this.mayApprove) return this.explain(this.#obstacle);
    if (!this.press(this.parts)) return;
    const decision = this.changes
      ? { type: "approve", args: this.edited, digest: this.plan.digest }
      : { type: "approve", digest: this.pending.digest };
    if (this.remember) decision.remember = this.remember;
    if (this.remember && this.#span) decision.duration = this.#span;
    if (this.remember && this.#scopes.includes(this.scope) && this.scope !== "conversation") decision.scope = this.scope;
    this.decide(decision);
  }

  // How long an approval is remembered, "": until it is revoked. That of a high-risk call always ends.
  get #span() {
    return this.span || (this.pending.risk === "high" ? "1h" : "");
  }

  // The scopes that the server lets this person choose from; until it has answered, this conversation only.
  get #scopes() {
    return this.offered?.[this.remember] ?? ["conversation"];
  }

  #choose(remember) {
    this.remember = remember;
    if (!remember || this.offered) return;
    const { pending } = this;
    this.client.scopes(pending).then((offered) => {
      if (this.pending.digest === pending.digest) this.offered = offered;
    }, () => {}); // the approval can still be remembered in this conversation
  }

  #deny(stop) {
    if (this.press()) this.decide({ type: "deny", reason: this.reason.trim(), stop }, stop ? "stop" : "deny");
  }

  card() {
    const { pending, mode } = this;
    if (pending.starts_at) return graceCard(this);
    return html`<article class="card approval risk-${pending.risk}" tabindex="-1" aria-label="Approval: ${spelled(pending.prompt || pending.tool)}">
      <header><h3>${shown(pending.prompt || `Run ${pending.tool}?`)}</h3></header>
      <div class="facts">
        ${this.about(html`<span class="chip risk ${pending.risk}">${pending.risk} risk</span>`)}
        ${warnings(this.changes ? { ...pending, preview_error: null } : pending)}
        ${deciders(pending, this.client)}
        ${graceNotice(pending)}
        ${this.changes ? html`<p class="notice warn">The title above still shows the original values.</p>` : nothing}
        ${this.before ? html`<p class="notice warn" role="status">The effect of this call has changed since it was first shown. Please read it again.${adrift() ? " Your typing is ignored; press Esc to continue." : nothing}</p>` : nothing}
      </div>
      ${this.editing ? html`<holdfast-form label="Arguments of ${pending.tool}" .schema=${pending.schema ?? {}} .value=${this.edited} .problems=${this.planProblem?.details?.problems ?? []}
          @edited=${(event) => { event.stopPropagation(); this.#edit(event.detail.value); }}></holdfast-form>` : nothing}
      ${this.#content()}
      ${this.refusal()}
      ${this.problem?.final ? nothing : mode === "deny" ? this.#denial() : mode === "result" ? this.#result() : this.#actions()}
      ${this.status(this.#gate)}
      <footer>${this.expiry()}
        <button type="button" class="quiet" aria-pressed=${this.asJson} @click=${() => (this.asJson = !this.asJson)}>Raw JSON</button></footer>
    </article>`;
  }

  // What the person has to do before the call can be approved.
  get #gate() {
    const unseen = this.mode !== "deny" && this.mode !== "result" && this.mayApprove && this.guard.unseen();
    if (unseen && unseen.querySelector(UNLOADED)) return "Show the whole diff to approve.";
    return !unseen ? "" : unseen.matches(".content") ? "Scroll to the end to approve." : "Scroll to the top of this card to approve.";
  }

  #content() {
    const { pending, edited, settled, changes: changed } = this;
    const wrong = !settled && this.form?.errors.size;
    const preview = settled ? (changed ? this.plan : pending).preview : undefined;
    const plain = plainPreview({ tool: pending.tool, args: changed ? edited : pending.args, preview, preview_error: changed ? null : pending.preview_error });
    return html`<div class="content" tabindex="0" role="group" aria-label="What would happen"><div>
      ${this.planProblem ? html`<p class="notice bad" role="alert">${lost(this.planProblem) ? "Not checked" : "This would fail"}: ${shown(this.planProblem.message)}</p>` : nothing}
      ${settled || this.planProblem ? nothing : html`<p class="notice">${wrong ? "These arguments are not valid yet." : "Trying the edited arguments…"}</p>`}
      ${plain || preview === undefined ? nothing : html`<section><h4>What would happen</h4><div class="preview">${(this.asJson ? raw : value)(preview, { client: this.client, conversation: pending.conversation })}</div></section>`}
      ${this.before && !changed ? html`<section class="since"><h4>Changes since it was first shown</h4>${jsonDiff(describe(this.before), describe(pending))}</section>` : nothing}
      ${wrong ? nothing : changed ? html`<section><h4>Your changes</h4>${jsonDiff(pending.args, edited, { whole: true })}</section>`
        : html`<section><h4>Arguments</h4>${this.asJson ? raw(pending.args) : table(pending.args)}</section>`}
    </div></div>`;
  }

  #actions() {
    const { pending, off, voted } = this, held = this.held();
    if (this.refused) return nothing;
    return html`<div class="actions">
      <button type="button" class="primary approve" ?disabled=${!this.mayApprove} aria-disabled=${this.held(this.parts)} @click=${this.#approve}>
        ${this.label("approve", voted ? `${this.#voter}; ${this.#needed} needed` : several(pending) && !pending.recovery ? "Approve" : html`${this.changes ? "Approve as edited" : pending.recovery ? "Run it again" : this.remember ? "Approve" : "Approve once"}${this.remember ? " and remember" : nothing}`)}</button>
      ${this.editing ? html`<button type="button" class="back" @click=${this.#leave}>Back</button>`
        : pending.recovery ? html`<button type="button" ?disabled=${off} aria-disabled=${held} @click=${() => this.#enter("result")}>Enter its result</button>` : !this.mayEdit ? nothing : html`<button type="button" class="edit" ?disabled=${off} aria-disabled=${held} @click=${() => this.#enter("edit")}>Edit</button>`}
      <button type="button" class="deny" ?disabled=${off} aria-disabled=${held} @click=${() => this.#enter("deny")}>Deny</button>
      ${several(pending) ? nothing : html`<label class="remember"><span>Remember</span> <select .value=${this.remember} @change=${(event) => this.#choose(event.target.value)}>
        <option value="">no, only this once</option>
        <option value="args">${pending.remember?.length ? `the same ${shown(pending.remember.join(", "))}` : "these arguments"}</option>
        <option value="tool">any ${spelled(pending.tool)}</option></select></label>`}
      ${this.remember ? html`<label class="remember"><span>for</span> <select .value=${this.#span} @change=${(event) => (this.span = event.target.value)}>
        ${pending.risk === "high" ? nothing : html`<option value="">until revoked</option>`}<option value="1h">one hour</option><option value="1d">one day</option></select></label>
        ${this.#where()}
        <p class="covers">${this.#covers}</p>` : nothing}
    </div>`;
  }

  get #voter() {
    const { principal } = this.client;
    const vote = this.pending.votes.find(({ on_behalf_of: other }) => other?.id === principal);
    return vote ? `${spelled(vote.by.id)} approved for you` : "You approved";
  }

  get #needed() {
    const { pending, given } = this;
    return `${hasVoted(pending, this.client.principal) ? missing(pending) : given} more`;
  }

  get #places() {
    return { conversation: "in this conversation", user: `in every conversation of ${spelled(this.pending.principal?.id ?? "")}`, everyone: "in every conversation, for everyone" };
  }

  get #chosen() {
    return this.#scopes.includes(this.scope) ? this.scope : "conversation";
  }

  // The whole choice in words: a list that is closed cuts long texts off.
  get #covers() {
    const { tool, remember } = this.pending;
    const what = this.remember === "tool" ? "any arguments" : remember?.length ? `the same ${remember.join(", ")}` : "these arguments";
    const until = { "": "until it is revoked", "1h": "for one hour", "1d": "for one day" }[this.#span];
    return shown(`From now on ${tool} runs without asking: with ${what}, ${this.#places[this.#chosen]}, ${until}.`);
  }

  #where() {
    const words = this.#places, scopes = this.#scopes, chosen = this.#chosen;
    return scopes.length < 2 ? nothing
      : html`<label class="remember"><span>where</span> <select .value=${chosen} @change=${(event) => (this.scope = event.target.value)}>
        ${scopes.map((scope) => html`<option value=${scope} ?selected=${scope === chosen}>${words[scope]}</option>`)}</select></label>`;
  }

  // The interrupted call took effect, and the person enters its result.
  #result() {
    const send = (event) => {
      event.preventDefault();
      if (this.form.check() && this.press()) this.decide({ type: "submit", value: this.form.value ?? null });
    };
    return html`<form class="denial" @submit=${send} novalidate><holdfast-form label="Result" .schema=${{}}></holdfast-form>
      <div class="actions"><button class="primary" ?disabled=${this.off} aria-disabled=${this.held()}>${this.label("submit", "Submit the result")}</button><button type="button" @click=${() => (this.mode = "")}>Back</button></div></form>`;
  }

  #denial() {
    const { off } = this, held = this.held();
    return html`<form class="actions denial" @submit=${(event) => { event.preventDefault(); this.#deny(false); }}>
      <label class="grow">Reason <span class="optional">the model sees it</span>
        <input class="reason" maxlength="2000" .value=${this.reason} @input=${(event) => (this.reason = event.target.value)}></label>
      <button class="danger" ?disabled=${off} aria-disabled=${held}>${this.label("deny", "Deny")}</button>
      <button type="button" class="danger outline" ?disabled=${off} aria-disabled=${held} @click=${() => this.#deny(true)}>${this.label("stop", "Deny and stop")}</button>
      <button type="button" @click=${() => (this.mode = "")}>Back</button></form>`;
  }
}
// A diff is compared by its lines.
const describe = ({ args, preview }) => ({ arguments: args, "what would happen": preview?.diff?.split ? { ...preview, diff: preview.diff.split("\n") } : preview });

customElements.define("holdfast-approval", Approval);
