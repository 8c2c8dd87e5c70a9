// <holdfast-tool>: one tool call and its state.
//   properties  call: as in fold.js (id, tool, args, phase, ...)   client: Client   conversation: string (its id)
//               draft: string (arguments while the model writes them)   names: [text] (arguments to show in its line; all if not given)
// <holdfast-calls>: several calls of one tool in one line, which opens.
//   properties  calls: [call]   waiting: number (further calls of it that have cards)   client, conversation: as above
import { Element, html, nothing, shown, value, table, raw, oneLine, jsonDiff, keptText } from "./base.js";
import { artifact } from "./workspace.js";
import { repeat } from "lit/directives/repeat.js";
import { bytes, duration, outcome, same } from "../text.js";
import { adrift } from "../writing.js";
import "./artifact.js";

const LATEST = 8; // lines of a running command's output

class Tool extends Element {
  static properties = { call: { hasChanged: () => true }, client: {}, conversation: {}, draft: {}, names: {}, open: { state: true }, asJson: { state: true } };

  connectedCallback() {
    super.connectedCallback();
    this.tick(500);
  }

  shouldUpdate(changed) {
    return changed.size > 0 || this.call?.phase === "running" || this.call?.lost;
  }

  get status() {
    const { call } = this;
    if (this.draft !== undefined) return ["writing", "arguments…"];
    if (call.phase === "running") return ["running", `running ${duration(Math.max(0, this.client.now() - call.started))}${call.attempt - (call.continued ?? 0) > 1 ? `, attempt ${call.attempt}` : ""}`];
    if (call.phase === "waiting") return ["waiting", { approval: "waits for approval", elicitation: "waits for an answer", client_exec: "waits for a page", manual: "waits to be done manually" }[call.pending?.kind] ?? "waiting"];
    if (call.phase !== "done") return ["ready", "about to run"];
    if (call.ok) return ["ok", call.started && call.ended ? duration(call.ended - call.started) : "done"];
    const kind = call.error?.kind ?? "failed";
    return [["cancelled", "interrupted", "denied"].includes(kind) ? kind : "error", kind];
  }

  render() {
    const { call } = this;
    if (!call) return nothing;
    const [state, words] = this.status;
    const decisions = call.decisions ?? [];
    const who = decisions.map((each) => outcome(each, each.by));
    if (call.grant) who.push("allowed by a remembered approval");
    const source = { client: this.client, conversation: this.conversation };
    const show = (it) => (this.asJson ? raw : value)(it, source);
    const { details } = call.error ?? {};
    return html`<details class="tool ${state}" ?open=${this.open} @toggle=${(event) => (this.open = event.target.open)}>
      <summary><span class="dot" aria-hidden="true"></span><b>${shown(call.tool || "tool")}</b>
        <span class="line">${this.draft !== undefined ? oneLine(this.draft.slice(-160)) : this.#line()}</span>
        ${call.executor === "provider" ? html`<span class="chip">provider</span>` : call.executor === "client" ? html`<span class="chip">browser</span>` : nothing}
        <span class="state">${words}</span></summary>
      ${this.open ? html`<div class="inside">
        ${who.map((each) => html`<p class="about">${shown(each)}</p>`)}
        ${section("Arguments", this.asJson ? raw(call.args) : table(call.args ?? {}))}
        ${call.original ? section("Edited before it ran", jsonDiff(call.original, call.args)) : nothing}
        ${call.phase !== "done" ? nothing : call.ok ? section("Result", show(call.value)) : section("Error", html`<p class="text">${shown(call.error?.message ?? "")}</p>${details && Object.keys(details).length ? show(details) : nothing}`)}
        ${call.artifact ? artifact({ sha256: call.artifact, size: call.size }, source, { what: "result" }) : nothing}
        ${call.images?.length ? section("Images", call.images.map((each) => image(each, source))) : nothing}
        ${call.data !== undefined && call.data !== null ? section("Data", show(call.data)) : nothing}
        <button type="button" class="quiet" aria-pressed=${Boolean(this.asJson)} @click=${() => (this.asJson = !this.asJson)}>Raw JSON</button></div>` : nothing}
      </details>
      ${who.length && !this.open ? html`<p class="who">${call.lost ? "Meanwhile: " : nothing}${who.map((each) => html`<span>${shown(each)}</span>`)}</p>` : nothing}
      ${call.kept ? keptText(call.kept) : nothing}
      ${call.lost && adrift() ? html`<p class="why">This card was decided. Your typing is ignored; press Esc to continue.</p>` : nothing}
      ${call.phase !== "done" && call.progress !== undefined && call.progress !== null ? this.#progress(call.progress) : nothing}
      ${call.error?.kind === "detached" ? nothing : (state === "error" || decisions.at(-1)?.type === "failed") && !this.open ? html`<p class="why ${state}">${oneLine(call.error?.message ?? "", 300)}</p>` : nothing}`;
  }

  #line() {
    const { call, names } = this;
    const args = Object.entries(call.args ?? {}).filter(([key]) => !names?.length || names.includes(key));
    return args.slice(0, 3).map(([key, item], i) => html`${i ? ", " : nothing}${shown(key)}: ${oneLine(item, 40)}`);
  }

  #progress(payload) {
    if (typeof payload?.output === "string") return html`<pre class="code output latest" role="group" aria-label="Output so far">${shown(payload.output.replace(/\n$/, "").split("\n").slice(-LATEST).join("\n"))}</pre>`;
    const share = typeof payload?.done === "number" && payload.total > 0 ? payload.done / payload.total : typeof payload?.progress === "number" ? payload.progress : null;
    return html`<p class="progress" role="status">${share === null ? nothing : html`<progress max="1" .value=${Math.min(1, share)} aria-label="Progress"></progress>`}${oneLine(payload?.message ?? payload, 200)}</p>`;
  }
}

// The types that the server sends as images; anything else would be saved as a file.
const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

function image({ sha256, size, media_type, name }, { client, conversation }) {
  const address = client.artifactAddress(conversation, sha256);
  return html`<figure class="image">
    ${IMAGES.includes(media_type) ? html`<img src=${address} alt=${name || "image of the result"} loading="lazy" decoding="async">` : nothing}
    <figcaption><a href=${address} download=${name || sha256}>${shown(name || sha256.slice(0, 12))}</a> ${bytes(size)}</figcaption></figure>`;
}

const section = (title, inside) => html`<section tabindex="0" role="group" aria-label=${title}><h3 class="label">${title}</h3>${inside}</section>`;

customElements.define("holdfast-tool", Tool);

const PHASES = { done: "done", running: "running", ready: "about to run", waiting: "waiting" };

/** Return the names of the arguments that are not the same in all calls. */
function differing(calls) {
  const names = new Set(calls.flatMap(({ args }) => Object.keys(args ?? {})));
  return [...names].filter((name) => calls.some(({ args }) => !same(args?.[name], calls[0].args?.[name])));
}

class Calls extends Element {
  static properties = { calls: { hasChanged: () => true }, waiting: {}, client: {}, conversation: {}, open: { state: true } };

  // "36 done, 2 failed, 2 waiting"
  #counts() {
    const counts = new Map();
    const add = (what, n = 1) => n && counts.set(what, (counts.get(what) ?? 0) + n);
    for (const { phase, ok, error } of this.calls) add(phase === "done" && !ok ? (["denied", "cancelled", "interrupted"].includes(error?.kind) ? error.kind : "failed") : PHASES[phase] ?? phase);
    add("waiting", this.waiting);
    return [...counts].map(([what, n]) => `${n} ${what}`).join(", ");
  }

  render() {
    const { calls, waiting } = this;
    const names = differing(calls), [first] = calls;
    const common = Object.entries(first.args ?? {}).filter(([name]) => !names.includes(name));
    const failed = calls.some(({ phase, ok, error }) => phase === "done" && !ok && error?.kind !== "cancelled");
    const state = failed ? "error" : waiting ? "waiting" : calls.every(({ phase }) => phase === "done") ? "ok" : "running";
    return html`<details class="tool group ${state}" ?open=${this.open} @toggle=${(event) => event.target === event.currentTarget && (this.open = event.target.open)}>
      <summary><span class="dot" aria-hidden="true"></span><b>${shown(first.tool)}</b> <span class="times">× ${calls.length + waiting}</span>
        <span class="line">${common.slice(0, 3).map(([name, item], i) => html`${i ? ", " : nothing}${shown(name)}: ${oneLine(item, 40)}`)}</span>
        <span class="state">${this.#counts()}</span></summary>
      ${this.open ? html`<div class="inside">${repeat(calls, ({ id }) => id, (call) => html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${call} .names=${names}></holdfast-tool>`)}</div>` : nothing}</details>`;
  }
}
customElements.define("holdfast-calls", Calls);
