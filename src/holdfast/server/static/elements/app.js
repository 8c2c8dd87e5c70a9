// <holdfast-app>: the page: the list of conversations, and the open conversation or the inbox.
//   properties  client: Client
// The fragment of the address is the route: #/inbox, #/deputies, #/c/CONVERSATION.
import { Element, html, nothing, shown } from "./base.js";
import { repeat } from "lit/directives/repeat.js";
import { ago } from "../text.js";
import { spoken, aloud } from "./chat.js";
import "./inbox.js";
import "./deputies.js";

const REFRESH = 10_000; // milliseconds
const NAMED = 20; // conversations per load for which the first message is read
const PAGE = 500, MOST = 1000; // conversations read at a time, and listed before "More" is pressed
const TITLES = "holdfast.titles";

class App extends Element {
  static properties = { client: {}, route: { state: true }, list: { state: true }, more: { state: true }, drawer: { state: true }, theme: { state: true }, me: { state: true }, problem: { state: true }, spoken: { state: true } };

  constructor() {
    super();
    this.list = [];
    this.theme = localStorage.getItem("holdfast.theme") ?? "auto";
    this.titles = new Map(Object.entries(JSON.parse(localStorage.getItem(TITLES) ?? "{}")));
    this.untitled = new Map(); // conversation -> its `updated` time when it had no title
    this.most = MOST;
    this.#theme(this.theme);
    this.#go();
  }

  connectedCallback() {
    super.connectedCallback();
    this.watch(window, "hashchange", () => this.#go());
    const look = () => document.visibilityState === "visible" && (this.#identify(), this.#load());
    this.watch(document, "visibilitychange", look);
    this.tick(REFRESH, look);
    this.watch(this, "titled", ({ detail }) => this.#titled(detail));
  }

  willUpdate(changed) {
    if (!changed.has("client") || !this.client) return;
    const { inbox } = this.client;
    this.watch(inbox, "change", () => {
      document.title = inbox.pending.length ? `(${inbox.pending.length}) Holdfast` : "Holdfast";
      this.#soon();
      this.requestUpdate();
    });
    this.watch(inbox, "added", ({ detail }) => detail.conversation !== this.route.id && (this.spoken = spoken(this.spoken, `Waiting: ${detail.prompt || detail.tool}`))); // the open conversation announces its own
    const online = () => {
      this.#identify();
      this.#load();
    };
    this.watch(this.client, "connection", () => {
      if (this.client.connection === "online") online();
      this.requestUpdate();
    });
    online();
  }

  // While the list of conversations covers the page, it has the focus.
  updated(now) {
    if (now.has("drawer") && (this.drawer || now.get("drawer"))) this.querySelector(this.drawer ? ".side .link" : ".menu").focus();
  }

  // Roles and delegations change: cards say who may decide.
  #identify() {
    this.client?.me().then(({ principal }) => (this.me = principal), () => {});
  }

  #go() {
    const [, place, id] = location.hash.split("/");
    this.route = place === "c" && id ? { place: "chat", id: decoded(id) } : { place: ["inbox", "deputies"].includes(place) ? place : "home" };
    this.drawer = false;
  }

  // Changes come in bursts: read the list once per burst.
  #soon() {
    this.due ||= setTimeout(() => {
      this.due = 0;
      this.#load();
    }, 400);
  }

  async #load() {
    try {
      const list = [];
      let cursor;
      do {
        const { conversations, next } = await this.client.conversations({ order: "newest", cursor, limit: PAGE });
        list.push(...conversations);
        cursor = next;
      } while (cursor && list.length < this.most);
      this.list = list.sort((a, b) => b.updated - a.updated);
      this.more = cursor;
      this.problem = null;
      const waits = new Set(this.client.inbox.pending.map(({ conversation }) => conversation)); // the inbox shows their titles, too
      const unnamed = this.list.slice(0, MOST).filter(({ conversation, updated }) => !this.titles.has(conversation) && this.untitled.get(conversation) !== updated);
      this.#name(unnamed.sort((a, b) => waits.has(b.conversation) - waits.has(a.conversation)).slice(0, NAMED));
      if (this.route.place === "home" && this.list.length && !matchMedia("(max-width: 760px)").matches) location.replace(`#/c/${encodeURIComponent(this.list[0].conversation)}`);
    } catch (problem) {
      this.problem = problem;
    }
  }

  // The title of a conversation is its first message.
  async #name(unnamed) {
    if (this.naming) return; // the next load continues
    this.naming = true;
    for (const { conversation, updated } of unnamed) {
      const [first] = await this.client.log(conversation, { limit: 5 }).then((events) => events.filter((event) => event.type === "MessageReceived"), () => []);
      if (first) this.#titled({ conversation, title: first.text });
      else this.untitled.set(conversation, updated);
    }
    this.naming = false;
  }

  #titled({ conversation, title }) {
    this.titles.delete(conversation);
    this.titles = new Map([[conversation, title.slice(0, 80)], ...this.titles].slice(0, 2 * MOST));
    localStorage.setItem(TITLES, JSON.stringify(Object.fromEntries(this.titles)));
    this.requestUpdate();
  }

  async #new() {
    const main = this.querySelector("main");
    main.inert = true; // typing must not go to the old conversation
    try {
      location.hash = `#/c/${encodeURIComponent(await this.client.open())}`;
      await this.#load();
    } catch (problem) {
      this.problem = problem;
    }
    main.inert = false;
    this.querySelector(".composer textarea")?.focus();
  }

  #theme(theme) {
    this.theme = theme;
    if (theme === "auto") localStorage.removeItem("holdfast.theme");
    else localStorage.setItem("holdfast.theme", theme);
    document.documentElement.dataset.theme = theme;
  }

  render() {
    if (!this.client) return nothing;
    const waiting = this.client.inbox.pending;
    const counts = waiting.reduce((all, { conversation }) => all.set(conversation, (all.get(conversation) ?? 0) + 1), new Map());
    const { place, id } = this.route;
    const close = () => (this.drawer = false);
    const next = { auto: "light", light: "dark", dark: "auto" }[this.theme];
    return html`<div class="app ${this.drawer || place === "home" ? "drawer" : ""}">
      <header class="sr"><h1>Holdfast</h1></header>
      ${aloud(this.spoken)}
      <nav class="side" aria-label="Conversations" @click=${({ target }) => target.closest("a") && close()} @keydown=${({ key }) => key === "Escape" && close()}>
        <div class="brand"><span class="mark" aria-hidden="true"></span><b>Holdfast</b>
          <button type="button" class="quiet theme" title="Colours: ${this.theme}" aria-label="Colours: ${this.theme}; change to ${next}" @click=${() => this.#theme(next)}>${{ auto: "◐", light: "☀", dark: "☾" }[this.theme]}</button></div>
        <a class="link ${place === "inbox" ? "here" : ""}" href="#/inbox" aria-current=${place === "inbox" ? "page" : nothing}>Inbox ${waiting.length ? html`<span class="badge">${waiting.length}<span class="sr"> waiting</span></span>` : nothing}</a>
        <button type="button" class="new" @click=${this.#new}>New conversation</button>
        <ul>${repeat(this.list, (each) => each.conversation, (each) => html`<li><a class="link ${each.conversation === id ? "here" : ""}" href="#/c/${encodeURIComponent(each.conversation)}" aria-current=${each.conversation === id ? "page" : nothing}>
          <span class="dot ${each.state}" title=${each.state.replace("_", " ")}></span><span class="name">${shown(this.titles.get(each.conversation) ?? each.conversation)}<small>${shown(each.agent)} · ${ago(each.updated, this.client.now())}</small></span>
          ${counts.has(each.conversation) ? html`<span class="badge">${counts.get(each.conversation)}<span class="sr"> waiting</span></span>` : nothing}</a></li>`)}</ul>
        ${this.more ? html`<button type="button" class="quiet" @click=${() => { this.most += MOST; this.#load(); }}>More</button>` : nothing}
        ${this.me ? html`<p class="me">You are <b>${shown(this.me)}</b> <a href="#/deputies" aria-current=${place === "deputies" ? "page" : nothing}>Deputies</a></p>` : nothing}
      </nav>
      <main>
        <div class="top"><button type="button" class="quiet menu" aria-label="Conversations" aria-expanded=${Boolean(this.drawer)} @click=${() => (this.drawer = !this.drawer)}>☰</button>
          <h2>${place === "inbox" ? "Inbox" : place === "deputies" ? "Deputies" : id ? shown(this.titles.get(id) ?? id) : "Holdfast"}</h2>
          ${waiting.length && place !== "inbox" ? html`<a class="pill strong" href="#/inbox">${waiting.length} waiting</a>` : nothing}</div>
        ${this.#connection()}
        ${place === "inbox" ? html`<holdfast-inbox .client=${this.client} .titles=${this.titles}></holdfast-inbox>`
          : place === "deputies" ? html`<holdfast-deputies .client=${this.client}></holdfast-deputies>`
          : id ? html`<holdfast-chat .client=${this.client} .conversation=${id}></holdfast-chat>`
          : html`<div class="empty"><h2>Welcome</h2><p>Open a conversation, or start a new one.</p><button type="button" class="primary" @click=${this.#new}>New conversation</button></div>`}
      </main></div>`;
  }

  #connection() {
    const { connection } = this.client;
    if (connection === "offline") return html`<p class="banner" role="status">The server cannot be reached. The page reconnects by itself; nothing is lost.</p>`;
    if (connection === "refused") return html`<p class="banner" role="status">You are signed out. Open the link that the server printed when it started.</p>`;
    return this.problem?.status ? html`<p class="banner" role="status">${shown(this.problem.message)}</p>` : nothing;
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by a person
  }
}

customElements.define("holdfast-app", App);
