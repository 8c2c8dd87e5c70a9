// <holdfast-chat>: one conversation.
//   properties  client: Client   conversation: string (its id)   at: number (optional: the seq of a message to show)
//   events      titled, with detail {conversation, title}, when its title is known or changes; those of the cards inside
// The draft of a message is kept in this browser. Enter sends, Shift+Enter inserts a new line.
// The view opens at the first pending card, or else at the end. At the end it follows new messages, except while a card
// is pending: then it never scrolls automatically, and keeps its position after a decision.
import { Element, html, nothing, shown, oneLine, unanswered } from "./base.js";
import { repeat } from "lit/directives/repeat.js";
import { checklist } from "./workspace.js";
import { listed, spelled } from "../text.js";
import "./markdown.js";
import "./tool.js";
import "./approval.js";
import "./question.js";
import "./grants.js";

const STATES = { idle: "", preparing: "Thinking…", streaming: "Writing…", executing_tools: "Running tools…", awaiting_input: "Waiting for a decision" };
const CARDS = "holdfast-approval, holdfast-question";
const PLAN = "holdfast.plan"; // whether the checklist is open: "open" or "closed"
const NEAR = 80; // pixels from the end that still count as the end
const ABOVE = 12; // pixels between the top of the view and the card at which it opens
const MANY = 4; // calls of one tool in one reply that are shown as one line
const HOLD = 400; // milliseconds until the layout of earlier messages settles

class Chat extends Element {
  static properties = { client: {}, conversation: {}, at: {}, draft: { state: true }, problem: { state: true }, away: { state: true }, spoken: { state: true }, asking: { state: true } };

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
    // A person who edits a card is told when another person decides the call.
    for (const card of this.querySelectorAll(CARDS)) {
      const { mode, busy, pending } = card;
      const call = this.live?.view.calls.get(pending.call);
      if ((mode || card.querySelector("form :focus")) && !busy && call && !call.pending) Object.assign(call, { lost: true, kept: call.kept || card.written });
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
    this.cards = new Set(); // the calls that have been shown as cards
    this.problem = this.asking = null;
    this.draft = localStorage.getItem(this.#key) ?? "";
    this.live.addEventListener("change", () => {
      if (this.live.view.title && this.heading !== this.live.view.title) this.emit("titled", { conversation: this.conversation, title: (this.heading = this.live.view.title) });
      this.requestUpdate();
    });
    this.live.addEventListener("suspended", ({ detail }) => (this.spoken = spoken(this.spoken, `${detail.kind === "approval" ? "Approval needed" : "Waiting for you"}: ${detail.prompt || detail.tool}`)));
  }

  get #key() {
    return `holdfast.draft.${this.conversation}`;
  }

  #write(text) {
    this.draft = text;
    keep(this.#key, text);
  }

  // While the turn waits for a decision, a message is a question about it, unless the person chose otherwise: it is
  // answered, and the turn keeps waiting. A view that is still opening asks the server for the state.
  async #send(chosen) {
    const { conversation, draft, live } = this;
    const key = this.#key;
    if (!draft.trim() || this.sending.has(key)) return;
    this.sending.add(key);
    this.requestUpdate();
    this.problem = null;
    this.#toEnd();
    try {
      const { state } = live.ready ? live : await this.client.snapshot(conversation);
      const when_busy = state === "idle" ? "queue" : chosen ?? (state === "awaiting_input" ? "aside" : "queue");
      await this.client.send(conversation, draft.trim(), { when_busy });
      // Text typed meanwhile, here, in another conversation or in another tab, is kept.
      const rest = (written) => (written.startsWith(draft) ? written.slice(draft.length).trimStart() : written);
      if (key === this.#key) this.draft = rest(this.draft);
      keep(key, rest(localStorage.getItem(key) ?? ""));
    } catch (problem) {
      if (key === this.#key) this.problem = problem; // the draft is kept
    }
    this.sending.delete(key);
    this.requestUpdate();
    if (key === this.#key && !this.box?.contains(document.activeElement)) this.#focus();
  }

  #focus = () => this.querySelector(".composer textarea")?.focus();

  // What a stop would lose: decisions that are waited for, and approved calls without a result.
  get #lost() {
    const { pending, view } = this.live;
    const approved = [...view.calls.values()].filter(({ phase, decisions }) => ["ready", "running"].includes(phase) && decisions.some(({ type, voided }) => type === "approve" && !voided));
    return [
      pending.length ? `${pending.length === 1 ? "One request is" : `${pending.length} requests are`} waiting for a decision and would be dropped.` : "",
      approved.length ? `${listed(approved.map(({ tool }) => tool))} ${approved.length === 1 ? "was" : "were"} approved and would be stopped.` : "",
    ].filter(Boolean);
  }

  // Ask before an approval or a request for one would be lost.
  #ask(act, words) {
    if (this.#lost.length) this.asking = { act, words };
    else act();
  }

  #question() {
    const { act, words } = this.asking;
    const lost = this.#lost;
    const close = (event) => event.target.closest("dialog").close();
    return html`<dialog class="stopping" aria-label="${words}?" @close=${() => (this.asking = null)}><h2>${words}?</h2>
      ${lost.length ? lost.map((line) => html`<p>${shown(line)}</p>`) : html`<p>Nothing would be lost any more.</p>`}
      <div class="actions"><button type="button" class="keep" autofocus @click=${close}>Keep it running</button>
        <button type="button" class="danger" @click=${(event) => { close(event); act(); }}>${words}</button></div></dialog>`;
  }

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
    // Content that grows below does not scroll: only scrolling up leaves the end.
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
    // Keep the visible messages in place while the messages above them are laid out.
    this.held = box.scrollHeight - box.scrollTop;
    setTimeout(() => (this.held = null), HOLD);
    this.requestUpdate();
  }

  // Show the message that the route names: a search has found it.
  async #show() {
    const { live, at } = this;
    this.shownAt = `${this.conversation}/${at}`;
    await live.readUntil(at).catch((problem) => (this.problem = problem));
    this.requestUpdate(); // the view announces its changes later
    await this.updateComplete;
    const found = this.querySelector(`[data-seq="${at}"]`);
    if (!found || live !== this.live) return;
    Object.assign(this, { atEnd: false, following: false, anchor: null });
    found.scrollIntoView({ block: "center" });
    found.focus({ preventScroll: true });
  }

  #jump() {
    const cards = [...this.querySelectorAll("holdfast-approval .card, holdfast-question .card")];
    const at = cards.indexOf(document.activeElement?.closest(".card"));
    const card = cards[(at + 1) % cards.length];
    card?.scrollIntoView({ block: "start" });
    card?.focus({ preventScroll: true });
  }

  // When a focused card disappears, the focus moves to its replacement, never to another card.
  #refocus(id) {
    this.had = null;
    const instead = [...this.querySelectorAll(`${CARDS}, holdfast-tool`)].find(({ call, pending }) => (pending?.call ?? call?.id) === id);
    instead?.updateComplete.then(() => document.activeElement === document.body && instead.querySelector("summary, .card")?.focus({ preventScroll: true }));
  }

  updated() {
    const dialog = this.querySelector("dialog.stopping");
    if (dialog && !dialog.open) dialog.showModal();
    if (this.had) this.#refocus(this.had);
    const box = this.querySelector(".scroll");
    if (box && box !== this.box) {
      // Cards render after us and grow: stay at the end.
      this.box = box;
      this.sizes = new ResizeObserver(() => this.#stay());
      this.sizes.observe(box);
      this.sizes.observe(box.firstElementChild);
    }
    this.#arrivals();
    this.#stay();
    if (this.at && this.live?.ready && this.shownAt !== `${this.conversation}/${this.at}`) this.#show();
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

  // A new card is shown from its top, unless the user has scrolled elsewhere or another card is pending.
  #arrivals() {
    if (!this.live?.ready) return;
    const waiting = this.#waiting;
    const fresh = waiting.filter(({ pending }) => !this.cards.has(pending.call));
    if (fresh.length && (this.opening || (this.atEnd && fresh.length === waiting.length))) Object.assign(this, { anchor: fresh[0].pending.call, stayedAt: undefined, atEnd: false });
    if (fresh.length) this.following = false;
    fresh.forEach(({ pending }) => this.cards.add(pending.call));
    this.opening = false;
    // The last card is gone, and it was at the end.
    if (!waiting.length && this.box && near(this.box)) this.atEnd = true;
  }

  // Release the anchor if the user has scrolled or the card is gone. Shrinking content may also scroll, to the new end.
  #release() {
    if (!this.box || !this.anchor) return;
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const clamped = scrollTop < this.stayedAt && scrollTop >= scrollHeight - clientHeight - 1;
    if ((Math.abs(scrollTop - this.stayedAt) > 2 && !clamped) || !this.#waiting.some(({ pending }) => pending.call === this.anchor)) this.anchor = null;
  }

  // Follow the end, or keep the anchored card in place. Never scroll while the user types or presses, or while another
  // card is pending.
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

  // Content that shrinks below must not move the content above.
  #keepHeight() {
    if (!this.box) return; // the conversation has been closed
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
        ${it.ready && !view.items.length && !view.queue.length && !it.live ? html`<div class="empty"><h2>${shown(view.agent || "Holdfast")}</h2><p>Write a message to begin.</p></div>` : nothing}
        ${repeat(view.items, (item) => item.key, (item) => this.#item(item))}
        ${repeat([...view.calls.values()].filter((call) => call.pending && !call.said), (call) => call.id, (call) => this.#call(call))}
        ${it.live ? html`<div class="said assistant live">${this.#thought(it.live.thinking, !it.live.text)}
          ${it.live.text ? html`<holdfast-markdown .text=${it.live.text}></holdfast-markdown>` : nothing}
          ${it.live.drafts.filter(Boolean).map((draft) => html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${{ tool: draft.tool, args: {}, decisions: [] }} .draft=${draft.text}></holdfast-tool>`)}</div>` : nothing}
        ${it.hosted.map((call) => html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${call}></holdfast-tool>`)}
        ${it.retrying ? html`<p class="note warn" role="status">The model did not respond (${it.retrying.error.kind}); retrying in ${Math.ceil(it.retrying.delay)} s.</p>` : nothing}
        ${view.queue.map((item) => html`<div class="said user queued"><p class="words">${shown(item.text)}</p><p class="meta">queued</p></div>`)}
      </div></div>
      ${this.away ? html`<div class="float"><button type="button" class="pill" aria-label="To the end" title="To the end" @click=${this.#toEnd}>↓</button></div>` : nothing}
      <div class="below">
        ${this.problem ? html`<p class="notice bad" role="alert">${unanswered(this.problem) ? "Not confirmed: " : nothing}${shown(this.problem.message)}</p>` : nothing}
        ${this.#plan(view.checklist, waiting.length)}
        <form class="composer" @submit=${(event) => { event.preventDefault(); this.#send(); }}>
          <textarea rows="1" aria-label="Message" placeholder=${it.idle || !it.ready ? "Write a message" : this.#asks ? "Ask about it, or write the next message" : "Write the next message"} .value=${this.draft ?? ""}
            @input=${(event) => this.#write(event.target.value)} @keydown=${this.#typed}></textarea>
          <div class="buttons"><span class="status" role="status">${this.#status()}</span>
            ${waiting.length ? html`<button type="button" class="quiet jump" @click=${this.#jump}>Next waiting (${waiting.length})</button>` : nothing}
            <holdfast-grants .client=${this.client} .conversation=${this.conversation} .grants=${it.grants} @revoked=${() => it.readGrants()} @closed=${() => document.activeElement === document.body && this.#focus()}></holdfast-grants>
            <span class="usage">${usage(it.usage)}</span>
            ${it.idle || !it.ready ? nothing : html`<button type="button" class="stop" @click=${() => this.#ask(() => this.#stop(), "Stop the turn")}>Stop</button>`}
            ${this.sending.has(this.#key) ? html`<button class="primary" aria-disabled="true">Sending…</button>`
              : it.idle || !it.ready ? html`<button class="primary" ?disabled=${!this.draft?.trim()}>Send</button>`
              : this.draft?.trim() ? html`<button type="button" @click=${() => this.#ask(() => this.#send("interrupt"), "Interrupt the turn")}>Interrupt</button>${
                this.#asks ? html`<button type="button" @click=${() => this.#send("queue")}>Queue</button><button class="primary">Ask</button>` : html`<button class="primary">Queue</button>`}` : nothing}</div>
        </form></div>
      ${this.asking ? this.#question() : nothing}`;
  }

  // The agent's checklist. Until a person opens or closes it, it is open, except on phones, while a card needs the space,
  // and when all is done.
  #plan(list, waiting) {
    if (!list?.length) return nothing;
    const done = list.filter(({ status }) => status === "completed").length;
    const now = list.find(({ status }) => status === "in_progress");
    const kept = localStorage.getItem(PLAN);
    const open = kept ? kept === "open" : done < list.length && !waiting && !matchMedia("(max-width: 760px)").matches;
    const toggle = () => {
      localStorage.setItem(PLAN, open ? "closed" : "open");
      this.requestUpdate();
    };
    return html`<section class="checklist panel" aria-label="Plan">
      <button type="button" class="quiet" aria-expanded=${open} @click=${toggle}><span class="turn" aria-hidden="true">▸</span><b>Plan</b> <span class="count">${done} of ${list.length} done</span>${
        now && !open ? html` <span class="now">${oneLine(now.content, 200)}</span>` : nothing}</button>
      ${open ? html`<div class="steps" tabindex="0" role="group" aria-label="Steps">${checklist(list)}</div>` : nothing}</section>`;
  }

  #status() {
    const { ready, state, unclaimed, view } = this.live;
    if (unclaimed !== null) return unclaimed ? "Waiting for a free worker" : html`Waiting for a worker that runs ${shown(view.agent)}`;
    if (ready && state === "awaiting_input" && !this.live.pending.length) return "Approved; not started yet";
    return ready ? STATES[state] ?? state : "Opening…";
  }

  #typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#send();
  }

  get #asks() {
    return this.live.state === "awaiting_input";
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
    if (item.kind === "user") return html`<div class="said user" data-seq=${item.seq} tabindex="-1"><p class="words">${shown(item.text)}</p><p class="meta">${shown(item.by)}${item.aside ? `, ${item.aside}` : nothing}</p></div>`;
    return html`<div class="said assistant" data-seq=${item.seq} tabindex="-1">${this.#thought(item.thinking, false)}
      ${item.hosted.map((call) => html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${call}></holdfast-tool>`)}
      ${item.text ? html`<holdfast-markdown .text=${item.text}></holdfast-markdown>` : nothing}
      ${item.partial ? html`<p class="meta">cut off here</p>` : nothing}
      ${this.#calls(item.calls.map((id) => this.live.view.calls.get(id)))}</div>`;
  }

  // Many calls of one tool are one line. A call that was shown as a card here stays where its card was: nothing else moves.
  #calls(calls) {
    const groups = new Map();
    for (const call of calls) {
      const group = groups.get(call.tool) ?? groups.set(call.tool, { calls: [], waiting: 0 }).get(call.tool);
      if (call.pending) group.waiting++;
      else if (!this.cards.has(call.id)) group.calls.push(call);
    }
    const grouped = ({ tool, id, pending }) => groups.get(tool).calls.length >= MANY && !pending && !this.cards.has(id);
    const shown = calls.filter((call) => !grouped(call) || call === groups.get(call.tool).calls[0]);
    return repeat(shown, ({ id }) => id, (call) => {
      const { calls: many, waiting } = groups.get(call.tool);
      return grouped(call) ? html`<holdfast-calls .client=${this.client} .conversation=${this.conversation} .calls=${many} .waiting=${waiting}></holdfast-calls>` : this.#call(call);
    });
  }

  #call(call) {
    const { pending } = call;
    if (!pending) return html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${call}></holdfast-tool>`;
    if (pending.kind === "approval") return html`<holdfast-approval .client=${this.client} .pending=${pending}></holdfast-approval>`;
    return html`<holdfast-question .client=${this.client} .pending=${pending}></holdfast-question>${call.progress ? html`<holdfast-tool .client=${this.client} .conversation=${this.conversation} .call=${call}></holdfast-tool>` : nothing}`;
  }
}

const near = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;

function keep(key, draft) {
  if (draft) localStorage.setItem(key, draft);
  else localStorage.removeItem(key);
}

/** Add a line for screen readers. Each line is a new element, so that a repeated text is read again. */
export const spoken = (lines = [], text) => [...lines.slice(-4), { text: spelled(text) }];
export const aloud = (lines = []) => html`<div class="sr" role="status" aria-live="polite">${repeat(lines, (line) => line, ({ text }) => html`<p>${text}</p>`)}</div>`;

function usage({ input_tokens, output_tokens, cost } = {}) {
  const tokens = (input_tokens ?? 0) + (output_tokens ?? 0);
  return [tokens ? `${tokens.toLocaleString()} tokens` : "", cost ? `$${cost.toFixed(cost < 0.1 ? 4 : 2)}` : ""].filter(Boolean).join(" · ");
}

customElements.define("holdfast-chat", Chat);
