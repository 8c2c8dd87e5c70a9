// <holdfast-timeline>: where the time and the cost of a conversation's turns went, the newest turn first.
//   properties  client: Client   conversation: string (its id)
// <holdfast-turn>: one turn: its time by category, a bar for each span of work or waiting, and its events. A bar or an
// event shows the JSON of the events that it is made of.
//   properties  client: Client   conversation: string   turn: {turn, spent, spans, events, ...}, as the server sends it
import { Element, html, nothing, shown, raw } from "./base.js";
import { svg } from "lit";
import { repeat } from "lit/directives/repeat.js";

const REFRESH = 3000, SHARE = 10; // milliseconds between two reads; a read that takes longer is repeated after SHARE times as long
const WIDTH = 1000, LANE = 24, BAR = 18, COST = 28; // positions are from 0 to WIDTH; heights are in pixels
const LABELLED = 20; // of WIDTH: a narrower bar has no room for its label
const WAITS = ["approval", "question", "client", "manual"];
const BAD = /^(failed|interrupted|cancelled|rejected|expired|denied|no client)/;
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

/** Return milliseconds as "85 ms", "2.1 s" or "3 h 5 min". */
export function lasted(ms) {
  if (ms < 1000) return `${ms} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const s = Math.round(ms / 1000);
  const at = units.findIndex(([, size]) => s >= size);
  const more = at < 3 ? Math.floor((s % units[at][1]) / units[at + 1][1]) : 0;
  return `${Math.floor(s / units[at][1])} ${units[at][0]}${more ? ` ${more} ${units[at + 1][0]}` : ""}`;
}

const figures = ({ input_tokens, output_tokens, cost } = {}) =>
  [input_tokens ? `${input_tokens.toLocaleString()} tokens in` : "", output_tokens ? `${output_tokens.toLocaleString()} out` : "", cost ? `$${cost.toFixed(4)}` : ""].filter(Boolean).join(", ");

const split = (spent) => html`<dl class="spent">${["model", "tools", "people", "other"].map((name) => html`<div><dt class="of-${name}">${name}</dt><dd>${lasted(spent[name])}</dd></div>`)}</dl>`;

class Timeline extends Element {
  static properties = { client: {}, conversation: {}, turns: { state: true }, earlier: { state: true }, title: { state: true }, problem: { state: true } };

  connectedCallback() {
    super.connectedCallback();
    this.tick(REFRESH, () => document.visibilityState === "visible" && Date.now() >= (this.due ?? 0) && this.#load());
  }

  willUpdate(now) {
    super.willUpdate(now);
    if (!this.client || !(now.has("client") || now.has("conversation"))) return;
    Object.assign(this, { turns: null, earlier: null, problem: null });
    this.#load();
  }

  back() {
    super.back();
    this.#load();
  }

  // Read the newest turns; a turn that is over does not change, so its element keeps what it has rendered.
  async #load() {
    const { conversation } = this;
    const began = Date.now();
    this.due = Infinity;
    try {
      const page = await this.client.timeline(conversation);
      if (conversation !== this.conversation) return;
      const known = new Map((this.turns ?? []).filter(({ open }) => !open).map((turn) => [turn.turn, turn]));
      const fresh = page.turns.map((turn) => known.get(turn.turn) ?? turn);
      const oldest = fresh.at(-1)?.turn ?? 0;
      const before = (this.turns ?? []).filter(({ turn }) => turn < oldest);
      if (!before.length) this.earlier = page.earlier ?? null;
      Object.assign(this, { turns: [...fresh, ...before], problem: null });
      this.emit("titled", { conversation, title: page.title });
    } catch (problem) {
      if (!this.turns) this.problem = problem;
    } finally {
      this.due = Date.now() + SHARE * (Date.now() - began) - REFRESH;
    }
  }

  async #more() {
    const { conversation } = this;
    try {
      const page = await this.client.timeline(conversation, { before: this.earlier });
      if (conversation !== this.conversation) return;
      Object.assign(this, { turns: [...this.turns, ...page.turns], earlier: page.earlier ?? null, problem: null });
    } catch (problem) {
      this.problem = problem;
    }
  }

  render() {
    const { client, conversation, turns } = this;
    if (this.problem?.status === 404) return html`<div class="empty"><h2>Not found</h2><p>${shown(this.problem.message)}</p></div>`;
    if (!client) return nothing;
    return html`<div class="timeline">
      ${this.problem?.status ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
      <p class="links"><a href=${client.timelineAddress(conversation)} download>Save it as a file</a></p>
      ${turns && !turns.length ? html`<p class="notice">No turn has begun.</p>` : nothing}
      ${repeat(turns ?? [], ({ turn }) => turn, (turn) => html`<holdfast-turn .client=${client} .conversation=${conversation} .turn=${turn}></holdfast-turn>`)}
      ${this.earlier ? html`<button type="button" class="quiet earlier" @click=${this.#more}>Earlier turns</button>` : nothing}</div>`;
  }
}

class Turn extends Element {
  static properties = { client: {}, conversation: {}, turn: {}, listed: { state: true }, at: { state: true }, chosen: { state: true }, problem: { state: true } };

  constructor() {
    super();
    this.at = 0; // the bar that the Tab key reaches; arrow keys reach the others
  }

  async #choose(key, about, seqs) {
    if (this.chosen?.key === key) return this.#close();
    const chosen = (this.chosen = { key, about, events: null });
    this.problem = null;
    try {
      const events = (await Promise.all(seqs.map((seq) => this.client.log(this.conversation, { after: seq - 1, limit: 1 })))).flat();
      if (this.chosen !== chosen) return; // another one was chosen meanwhile
      this.chosen = { ...chosen, events };
      await this.updateComplete;
      const shown = this.querySelector(".chosen");
      shown?.focus({ preventScroll: true });
      shown?.scrollIntoView({ block: "nearest" });
    } catch (problem) {
      this.problem = problem;
    }
  }

  async #close() {
    const { key } = this.chosen;
    this.chosen = null;
    await this.updateComplete;
    this.querySelector(`[data-key="${key}"]`)?.focus();
  }

  #bar(span, n) {
    const seqs = span.last && span.last !== span.first ? [span.first, span.last] : [span.first];
    return this.#choose(`s${n}`, this.#describe(span), seqs);
  }

  #pressed(event, span, n) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#bar(span, n);
    } else if (event.key in STEPS) {
      event.preventDefault();
      this.at = Math.min(this.turn.spans.length - 1, Math.max(0, n + STEPS[event.key]));
      this.updateComplete.then(() => this.querySelector(`[data-key="s${this.at}"]`).focus());
    }
  }

  #describe({ kind, label = "", attempt, start, end, outcome = "", by = [], requests = [], usage }) {
    const failed = requests.filter(({ error }) => error).map(({ error }) => error.kind);
    return [
      `${kind} ${label}${attempt > 1 ? `, run ${attempt}` : ""}`.trim(),
      `${lasted(end - start)} from ${lasted(start - this.turn.start)} on`,
      `${outcome || "goes on"}${by.length ? ` by ${by.join(", ")}` : ""}`,
      failed.length ? `failed requests: ${failed.join(", ")}` : "",
      figures(usage),
    ].filter(Boolean).join(" · ");
  }

  render() {
    const { turn } = this;
    if (!turn) return nothing;
    const { number, spans = [], events = [], lanes = 1 } = { number: turn.turn, ...turn };
    const places = new Map(events.map(({ seq, place }) => [seq, place]));
    const line = costLine(turn);
    return html`<section class="panel period" aria-label="Turn ${number}">
      <h3>Turn ${number}: ${shown(turn.open ? "open" : turn.reason)}, ${lasted(turn.end - turn.start)}</h3>
      <p class="about">${[turn.agent, new Date(turn.start).toLocaleString(), turn.queued >= 1000 ? `queued for ${lasted(turn.queued)}` : "", figures(turn.usage)].filter(Boolean).map((fact, n) => html`${n ? " · " : nothing}${shown(fact)}`)}</p>
      ${turn.text ? html`<p class="words"><b>${shown(turn.by)}</b> ${shown(turn.text)}</p>` : nothing}
      ${split(turn.spent)}
      <svg class="lanes" height=${lanes * LANE + (line ? COST : 0) + 6} role="group" aria-label="Bars of turn ${number}; arrow keys move between them">
        ${spans.map((span, n) => this.#draw(span, n, places))}
        ${line ? svg`<svg y=${lanes * LANE + 4} width="100%" height=${COST} viewBox="0 0 ${WIDTH} ${COST}" preserveAspectRatio="none" aria-hidden="true"><polyline points=${line}></polyline></svg>` : nothing}</svg>
      ${this.problem ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
      ${this.chosen?.events ? html`<div class="chosen" role="group" aria-label="Chosen" tabindex="0" @keydown=${({ key }) => key === "Escape" && this.#close()}>
        <p><span>${shown(this.chosen.about)}</span><button type="button" class="quiet" @click=${this.#close}>Close</button></p>
        ${this.chosen.events.map((event) => raw(event))}</div>` : nothing}
      <details @toggle=${({ target }) => (this.listed = target.open)}><summary>${events.length} events</summary>${this.listed ? this.#list() : nothing}</details></section>`;
  }

  #draw(span, n, places) {
    const x = places.get(span.first), width = (span.last ? places.get(span.last) : WIDTH) - x;
    const [left, wide, top] = [`${x / 10}%`, `${width / 10}%`, span.lane * LANE + 4];
    const kind = WAITS.includes(span.kind) ? "people" : span.kind, key = `s${n}`, about = this.#describe(span);
    return svg`<g class="${kind} ${BAD.test(span.outcome) ? "bad" : ""}" data-key=${key} role="button" aria-label=${about} aria-expanded=${this.chosen?.key === key} tabindex=${n === this.at ? 0 : -1}
      @click=${() => ((this.at = n), this.#bar(span, n))} @keydown=${(event) => this.#pressed(event, span, n)}><title>${about}</title>
      <rect x=${left} y=${top} width=${wide} height=${BAR} rx="3"></rect>
      ${width < LABELLED ? nothing : svg`<svg x=${left} y=${top} width=${wide} height=${BAR}><text x="4" y="13">${span.label || span.kind}</text></svg>`}</g>`;
  }

  #list() {
    const { events, start } = this.turn;
    let sum = {};
    return html`<ol class="events">${events.map((event) => {
      if (event.usage) sum = Object.fromEntries(["input_tokens", "output_tokens", "cost"].map((name) => [name, (sum[name] ?? 0) + (event.usage[name] ?? 0)]));
      const key = `e${event.seq}`;
      return html`<li><button type="button" class="quiet" data-key=${key} aria-expanded=${this.chosen?.key === key} @click=${() => this.#choose(key, `event ${event.seq}`, [event.seq])}>${event.type}</button>
        <small>+${lasted(event.at - start)} · ${shown(event.by)}${event.tool ? html` · ${shown(event.tool)}` : nothing}${event.duration ? ` · then ${event.category} ${lasted(event.duration)}` : nothing}${event.usage ? ` · ${figures(sum)} so far` : nothing}</small></li>`;
    })}</ol>`;
  }
}

// The points of the cost so far, or of the tokens if no cost is known; empty if neither is.
function costLine({ events = [], usage = {} }) {
  const figure = (each) => (usage.cost ? each.cost ?? 0 : (each.input_tokens ?? 0) + (each.output_tokens ?? 0));
  const steps = events.filter((event) => event.usage).map((event) => [event.place, figure(event.usage)]);
  const total = steps.reduce((sum, [, one]) => sum + one, 0);
  if (!total) return "";
  let sum = 0, y = COST - 2;
  const points = [`0,${y}`];
  for (const [x, one] of steps) {
    points.push(`${x},${y}`);
    y = COST - 2 - ((COST - 4) * (sum += one)) / total;
    points.push(`${x},${y}`);
  }
  return [...points, `${WIDTH},${y}`].join(" ");
}

customElements.define("holdfast-timeline", Timeline);
customElements.define("holdfast-turn", Turn);
