// <assent-chat>: one conversation.
//   properties  client: Client   conversation: string (its id)
//   events      titled, with detail {conversation, title}, when its first message is known; those of the cards inside
// The draft of a message is kept in this browser. Enter sends, Shift+Enter is a new line.
// It opens at the first card that waits, or else at the end. Whoever is at the end follows it, except while a card waits:
// then nothing scrolls by itself, and the place stays as it is after a decision.
import { Element, html, nothing, shown } from "./base.js";
import { repeat } from "lit/directives/repeat.js";
import { spelled } from "../text.js";
import "./markdown.js";
import "./tool.js";
import "./approval.js";
import "./question.js";
import "./grants.js";

const STATES = { idle: "", preparing: "Thinking…", streaming: "Writing…", executing_tools: "Running tools…", awaiting_input: "Waiting for somebody" };
const CARDS = "assent-approval, assent-question";
const NEAR = 80; // pixels from the end that still count as being there
const ABOVE = 12; // pixels between the top of the view and the card that it opens at
const HOLD = 400; // milliseconds for which earlier messages settle

class Chat extends Element {
  static properties = { client: {}, conversation: {}, draft: { state: true }, problem: { state: true }, away: { state: true }, spoken: { state: true } };

  sending = new Set();

  connectedCallback() {
    super.connectedCallback();
    for (const type of ["pointerup", "pointercancel"]) this.watch(window, type, () => (this.pressed = false));
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this.#close();
  }

  willUpdate(changed) {
    super.willUpdate(changed);
    if (changed.has("conversation") || changed.has("client")) this.#open();
    // Whose card somebody else has settled is told so.
    for (const card of this.querySelectorAll(CARDS)) {
      const { mode, busy, pending } = card;
      const call = this.live?.view.calls.get(pending.call);
      if ((mode || card.querySelector("form :focus")) && !busy && call && !call.pending) call.lost = true;
      if (card.contains(document.activeElement)) this.had = pending.call;
    }
    if (this.box && this.querySelector(CARDS)) this.#keepHeight();
  }

  #close() {
    this.detach?.();
    this.live?.close();
    this.sizes?.disconnect();
    this.box = null;
    this.live = this.detach = null;
  }

  #open() {
    this.#close();
    if (!this.client || !this.conversation) return;
    this.live = this.client.conversation(this.conversation);
    this.detach = this.client.attach(this.conversation);
    this.#toEnd();
    this.opening = true;
    this.cards = new Set(); // the calls whose cards have been here
    this.problem = null;
    this.draft = localStorage.getItem(this.#key) ?? "";
    this.live.addEventListener("change", () => {
      if (this.live.view.title && this.heading !== this.live.view.title && !this.live.earlier) this.emit("titled", { conversation: this.conversation, title: (this.heading = this.live.view.title) });
      this.requestUpdate();
    });
    this.live.addEventListener("suspended", ({ detail }) => (this.spoken = spoken(this.spoken, `${detail.kind === "approval" ? "Approval needed" : "Waiting for you"}: ${detail.prompt || detail.tool}`)));
  }

  get #key() {
    return `assent.draft.${this.conversation}`;
  }

  #write(text) {
    this.draft = text;
    keep(this.#key, text);
  }

  async #send(when_busy) {
    const { conversation, draft } = this;
    const key = this.#key;
    if (!draft.trim() || this.sending.has(key)) return;
    this.sending.add(key);
    this.requestUpdate();
    this.problem = null;
    this.#toEnd();
    try {
      await this.client.send(conversation, draft.trim(), this.live.idle ? { when_busy: "queue" } : { when_busy });
      // What was written meanwhile, here, in another conversation or in another tab, stays.
      const rest = (written) => (written.startsWith(draft) ? written.slice(draft.length).trimStart() : written);
      if (key === this.#key) this.draft = rest(this.draft);
      keep(key, rest(localStorage.getItem(key) ?? ""));
    } catch (problem) {
      if (key === this.#key) this.problem = problem; // the draft stays
    }
    this.sending.delete(key);
    this.requestUpdate();
    if (key === this.#key && !this.box?.contains(document.activeElement)) this.#focus();
  }

  #focus = () => this.querySelector(".composer textarea")?.focus();

  async #stop() {
    try {
      await this.client.cancel(this.conversation);
    } catch (problem) {
      this.problem = problem;
    }
  }

  #scrolled(event) {
    const box = event.currentTarget;
    this.#release();
    if (this.kept) this.#keepHeight();
    // What grows below us scrolls nothing: only who goes up leaves the end.
    if (near(box)) this.atEnd = !this.anchor;
    else if (box.scrollTop < this.stayedAt - 4) this.atEnd = false;
    this.away = !this.atEnd && !near(box);
    if (this.away && !this.anchor && box.scrollTop < 200 && this.live?.earlier) this.#earlier();
  }

  async #earlier() {
    const { box } = this;
    if (this.live.reading) return;
    this.atEnd = false;
    await this.live.readEarlier().catch((problem) => (this.problem = problem));
    // What was in sight stays in sight while the messages above it take their room.
    this.held = box.scrollHeight - box.scrollTop;
    setTimeout(() => (this.held = null), HOLD);
    this.requestUpdate();
  }

  #jump() {
    const cards = [...this.querySelectorAll("assent-approval .card, assent-question .card")];
    const at = cards.indexOf(document.activeElement?.closest(".card"));
    const card = cards[(at + 1) % cards.length];
    card?.scrollIntoView({ block: "start" });
    card?.focus({ preventScroll: true });
  }

  // Where a card goes that has the focus, what is there instead of it has it: never another card.
  #refocus(id) {
    this.had = null;
    const instead = [...this.querySelectorAll(`${CARDS}, assent-tool`)].find(({ call, pending }) => (pending?.call ?? call?.id) === id);
    instead?.updateComplete.then(() => document.activeElement === document.body && instead.querySelector("summary, .card")?.focus({ preventScroll: true }));
  }

  updated() {
    if (this.had) this.#refocus(this.had);
    const box = this.querySelector(".scroll");
    if (box && box !== this.box) {
      // Cards render after us, and grow: whoever was at the end stays there.
      this.box = box;
      this.sizes = new ResizeObserver(() => this.#stay());
      this.sizes.observe(box);
      this.sizes.observe(box.firstElementChild);
    }
    this.#arrivals();
    this.#stay();
    const area = this.querySelector(".composer textarea");
    if (area && area.value !== this.sized) {
      this.sized = area.value;
      area.style.height = "auto";
      area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
    }
  }

  get #waiting() {
    return [...this.querySelectorAll(CARDS)].filter(({ pending }) => pending?.kind !== "client_exec");
  }

  // A card that comes is shown from its top, unless the user is elsewhere or another card waits already.
  #arrivals() {
    if (!this.live?.ready) return;
    const waiting = this.#waiting;
    const fresh = waiting.filter(({ pending }) => !this.cards.has(pending.call));
    if (fresh.length && (this.opening || (this.atEnd && fresh.length === waiting.length))) Object.assign(this, { anchor: fresh[0].pending.call, stayedAt: undefined, atEnd: false });
    if (fresh.length) this.following = false;
    fresh.forEach(({ pending }) => this.cards.add(pending.call));
    this.opening = false;
    // The last card is gone, and its place was the end.
    if (!waiting.length && this.box && near(this.box)) this.atEnd = true;
  }

  // The user has scrolled, or the card is gone. What became shorter may also have scrolled it, to its new end.
  #release() {
    if (!this.box || !this.anchor) return;
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const clamped = scrollTop < this.stayedAt && scrollTop >= scrollHeight - clientHeight - 1;
    if ((Math.abs(scrollTop - this.stayedAt) > 2 && !clamped) || !this.#waiting.some(({ pending }) => pending.call === this.anchor)) this.anchor = null;
  }

  // Whoever is at the end goes with it as it moves; the card that was opened at stays where it is. Nothing moves under a
  // user who writes or presses, or while another card waits.
  #stay() {
    const { box } = this;
    if (!box || this.pressed) return;
    this.#release();
    const end = box.scrollHeight - box.clientHeight;
    const waiting = this.#waiting;
    const card = waiting.find(({ pending }) => pending.call === this.anchor);
    const writes = document.activeElement?.matches("input, textarea, select") && box.contains(document.activeElement);
    if (this.held) this.#scrollTo(box.scrollHeight - this.held);
    else if (card) this.#scrollTo(Math.min(end, box.scrollTop + card.getBoundingClientRect().top - box.getBoundingClientRect().top - ABOVE));
    else if (this.atEnd && end !== this.end && !writes && (this.following || !waiting.length)) this.#scrollTo(end);
    this.end = end;
  }

  #scrollTo(top) {
    const { box } = this;
    if (Math.abs(box.scrollTop - top) >= 1) box.scrollTop = top;
    this.stayedAt = box.scrollTop;
    this.away = !near(box);
  }

  // What becomes shorter below must not let what is above slide down.
  #keepHeight() {
    const { scrollTop, clientHeight, firstElementChild } = this.box;
    this.kept = true;
    firstElementChild.style.minHeight = `${Math.floor(scrollTop + clientHeight)}px`;
  }

  #decided() {
    this.anchor = null;
    this.atEnd = near(this.box);
  }

  render() {
    const { live: it } = this;
    if (!it) return nothing;
    if (it.problem) return html`<div class="empty"><h2>Not found</h2><p>${shown(it.problem.message)}</p></div>`;
    const { view } = it;
    const waiting = it.pending;
    return html`${aloud(this.spoken)}
      <div class="scroll" tabindex="0" role="region" aria-label="Conversation" @scroll=${this.#scrolled} @pointerdown=${() => (this.pressed = true)} @decided=${this.#decided}><div class="thread">
        ${it.earlier ? html`<button type="button" class="quiet earlier" @click=${this.#earlier}>Earlier messages</button>` : nothing}
        ${it.ready && !view.items.length && !view.queue.length && !it.live ? html`<div class="empty"><h2>${shown(view.agent || "Assent")}</h2><p>Write a message to begin.</p></div>` : nothing}
        ${repeat(view.items, (item) => item.key, (item) => this.#item(item))}
        ${repeat([...view.calls.values()].filter((call) => call.pending && !call.said), (call) => call.id, (call) => this.#call(call))}
        ${it.live ? html`<div class="said assistant live">${this.#thought(it.live.thinking, !it.live.text)}
          ${it.live.text ? html`<assent-markdown .text=${it.live.text}></assent-markdown>` : nothing}
          ${it.live.drafts.filter(Boolean).map((draft) => html`<assent-tool .client=${this.client} .call=${{ tool: draft.tool, args: {}, decisions: [] }} .draft=${draft.text}></assent-tool>`)}</div>` : nothing}
        ${it.hosted.map((call) => html`<assent-tool .client=${this.client} .call=${call}></assent-tool>`)}
        ${it.retrying ? html`<p class="note warn" role="status">The model did not answer (${it.retrying.error.kind}); the next try is in ${Math.ceil(it.retrying.delay)} s.</p>` : nothing}
        ${view.queue.map((item) => html`<div class="said user queued"><p class="words">${shown(item.text)}</p><p class="meta">queued</p></div>`)}
      </div></div>
      ${this.away ? html`<div class="float"><button type="button" class="pill" aria-label="To the end" title="To the end" @click=${this.#toEnd}>↓</button></div>` : nothing}
      <div class="below">
        ${this.problem ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
        <form class="composer" @submit=${(event) => { event.preventDefault(); this.#send("queue"); }}>
          <textarea rows="1" aria-label="Message" placeholder=${it.idle ? "Write a message" : "Write the next message"} .value=${this.draft ?? ""}
            @input=${(event) => this.#write(event.target.value)} @keydown=${this.#typed}></textarea>
          <div class="buttons"><span class="status" role="status">${this.#status()}</span>
            ${waiting.length ? html`<button type="button" class="quiet jump" @click=${this.#jump}>Jump to it</button>` : nothing}
            <assent-grants .client=${this.client} .conversation=${this.conversation} .grants=${it.grants} @closed=${() => document.activeElement === document.body && this.#focus()}></assent-grants>
            <span class="usage">${usage(it.usage)}</span>
            ${it.idle || !it.ready ? nothing : html`<button type="button" class="stop" @click=${this.#stop}>Stop</button>`}
            ${this.sending.has(this.#key) ? html`<button class="primary" aria-disabled="true">Sending…</button>`
              : it.idle ? html`<button class="primary" ?disabled=${!this.draft?.trim()}>Send</button>`
              : this.draft?.trim() ? html`<button type="button" @click=${() => this.#send("interrupt")}>Interrupt</button><button class="primary">Queue</button>` : nothing}</div>
        </form></div>`;
  }

  #status() {
    const { ready, state, unclaimed, view } = this.live;
    if (unclaimed !== null) return unclaimed ? "Waiting for a free worker" : html`Waiting for a worker that runs ${shown(view.agent)}`;
    return ready ? STATES[state] ?? state : "Opening…";
  }

  #typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#send("queue");
  }

  #toEnd() {
    Object.assign(this, { atEnd: true, following: true, away: false, end: null, stayedAt: undefined, anchor: null, kept: false });
    if (this.box) this.box.firstElementChild.style.minHeight = "";
  }

  #thought(text, open) {
    return text ? html`<details class="thinking" ?open=${open}><summary>Thinking</summary><p>${shown(text)}</p></details>` : nothing;
  }

  #item(item) {
    if (item.kind === "note") return html`<div class="note ${item.tone}"><p>${shown(item.text)}</p>${item.details ? html`<details><summary>Details</summary><p>${shown(item.details)}</p></details>` : nothing}</div>`;
    if (item.kind === "user") return html`<div class="said user"><p class="words">${shown(item.text)}</p><p class="meta">${shown(item.by)}</p></div>`;
    return html`<div class="said assistant">${this.#thought(item.thinking, false)}
      ${item.hosted.map((call) => html`<assent-tool .client=${this.client} .call=${call}></assent-tool>`)}
      ${item.text ? html`<assent-markdown .text=${item.text}></assent-markdown>` : nothing}
      ${item.partial ? html`<p class="meta">cut off here</p>` : nothing}
      ${repeat(item.calls, (id) => id, (id) => this.#call(this.live.view.calls.get(id)))}</div>`;
  }

  #call(call) {
    const { pending } = call;
    if (!pending) return html`<assent-tool .client=${this.client} .call=${call}></assent-tool>`;
    if (pending.kind === "approval") return html`<assent-approval .client=${this.client} .pending=${pending}></assent-approval>`;
    return html`<assent-question .client=${this.client} .pending=${pending}></assent-question>${call.progress ? html`<assent-tool .client=${this.client} .call=${call}></assent-tool>` : nothing}`;
  }
}

const near = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;

function keep(key, draft) {
  if (draft) localStorage.setItem(key, draft);
  else localStorage.removeItem(key);
}

/** What is said comes as a line of its own, so that the same words are said again. */
export const spoken = (lines = [], text) => [...lines.slice(-4), { text: spelled(text) }];
export const aloud = (lines = []) => html`<div class="sr" role="status" aria-live="polite">${repeat(lines, (line) => line, ({ text }) => html`<p>${text}</p>`)}</div>`;

function usage({ input_tokens, output_tokens, cost } = {}) {
  const tokens = (input_tokens ?? 0) + (output_tokens ?? 0);
  return [tokens ? `${tokens.toLocaleString()} tokens` : "", cost ? `$${cost.toFixed(cost < 0.1 ? 4 : 2)}` : ""].filter(Boolean).join(" · ");
}

customElements.define("assent-chat", Chat);
