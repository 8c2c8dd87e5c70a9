// <holdfast-app>: the page: the list of conversations, and the open conversation or another view.
//   properties  client: Client
// The fragment of the address is the route: #/c/CONVERSATION, #/c/CONVERSATION/SEQ (one message), #/t/CONVERSATION (its timeline), #/VIEW, #/VIEW?QUERY.
import { Element, html, nothing, shown } from "./base.js";
import { spoken, aloud } from "./chat.js";
import "./conversations.js";
import "./inbox.js";

const REFRESH = 10_000; // milliseconds

// The views beside the conversations: the route's first word -> its heading and its element.
const VIEWS = {
  inbox: { title: "Inbox", view: ({ client, titles, route }) => html`<holdfast-inbox .client=${client} .titles=${titles} .query=${route.query ?? ""}></holdfast-inbox>` },
  history: { title: "History", view: ({ client, titles }) => html`<holdfast-history .client=${client} .titles=${titles}></holdfast-history>` },
  deputies: { title: "Deputies", view: ({ client }) => html`<holdfast-deputies .client=${client}></holdfast-deputies>` },
};

// Elements that are loaded when their view is first opened.
const LATER = { history: () => import("./history.js"), deputies: () => import("./deputies.js"), timeline: () => import("./timeline.js") };

class App extends Element {
  static properties = { client: {}, route: { state: true }, titles: { state: true }, drawer: { state: true }, theme: { state: true }, me: { state: true }, problem: { state: true }, spoken: { state: true } };

  constructor() {
    super();
    this.theme = localStorage.getItem("holdfast.theme") ?? "auto";
    this.titles = new Map(); // titles of conversations by id, as lists, pending calls and the open conversation give them
    this.#theme(this.theme);
    this.#go();
  }

  connectedCallback() {
    super.connectedCallback();
    this.watch(window, "hashchange", () => this.#go());
    const look = () => document.visibilityState === "visible" && this.#identify();
    this.watch(document, "visibilitychange", look);
    this.tick(REFRESH, look);
    this.watch(this, "titled", ({ detail }) => this.#titled([detail]));
    this.watch(this, "filtered", ({ detail }) => this.#filtered(detail));
    this.watch(this, "listed", ({ detail }) => this.#listed(detail));
  }

  willUpdate(changed) {
    if (!changed.has("client") || !this.client) return;
    const { inbox } = this.client;
    this.watch(inbox, "change", () => {
      document.title = inbox.pending.length ? `(${inbox.pending.length}) Holdfast` : "Holdfast";
      this.#titled(inbox.pending);
      this.requestUpdate();
    });
    this.watch(inbox, "added", ({ detail }) => detail.conversation !== this.route.id && (this.spoken = spoken(this.spoken, `Waiting: ${detail.prompt || detail.tool}`))); // the open conversation announces its own
    this.watch(this.client, "connection", () => {
      if (this.client.connection === "online") this.#identify(), this.#load();
      this.requestUpdate();
    });
    this.#identify();
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
    const [path, query] = location.hash.split(/\?(.*)/s);
    const [, place, id, seq] = path.split("/");
    this.route = (place === "c" || place === "t") && id ? { place: place === "c" ? "chat" : "timeline", id: decoded(id), seq: Number(seq) || null } : { place: Object.hasOwn(VIEWS, place ?? "") ? place : "home", query };
    this.drawer = false;
    this.#load();
  }

  // If the server cannot be reached, the page says so, and this is tried again when it can.
  #load() {
    LATER[this.route.place]?.().catch(() => {});
  }

  // The filters of a view are in the address. Choosing one is a step that Back undoes; typing is not.
  #filtered({ query, typed }) {
    history[typed ? "replaceState" : "pushState"](null, "", `#/${this.route.place}${query && `?${query}`}`);
    this.#go();
  }

  #titled(named) {
    const fresh = named.filter(({ conversation, title }) => title && this.titles.get(conversation) !== title);
    if (fresh.length) this.titles = new Map([...this.titles, ...fresh.map(({ conversation, title }) => [conversation, title])]);
  }

  #listed({ conversations: [first], conversations, archived }) {
    this.#titled(conversations);
    if (this.route.place === "home" && first && !archived && !matchMedia("(max-width: 760px)").matches) location.replace(`#/c/${encodeURIComponent(first.conversation)}`);
  }

  async #new() {
    const main = this.querySelector("main");
    main.inert = true; // typing must not go to the old conversation
    try {
      location.hash = `#/c/${encodeURIComponent(await this.client.open())}`;
      await this.querySelector("holdfast-conversations").load();
      this.problem = null;
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

  // The first stop of the Tab key: past the list of conversations.
  async #skip(event) {
    event.preventDefault();
    this.drawer = false; // it covers the main part
    await this.updateComplete;
    this.querySelector("main").focus();
  }

  render() {
    if (!this.client) return nothing;
    const waiting = this.client.inbox.pending;
    const { place, id, seq } = this.route;
    const close = () => (this.drawer = false);
    const next = { auto: "light", light: "dark", dark: "auto" }[this.theme];
    return html`<div class="app ${this.drawer || place === "home" ? "drawer" : ""}">
      <a class="skip" href="#main" @click=${this.#skip}>Skip to the main part</a>
      <header class="sr"><h1>Holdfast</h1></header>
      ${aloud(this.spoken)}
      <nav class="side" aria-label="Conversations" @click=${({ target }) => target.closest("a") && close()} @keydown=${({ key }) => key === "Escape" && close()}>
        <div class="brand"><span class="mark" aria-hidden="true"></span><b>Holdfast</b>
          <button type="button" class="quiet theme" title="Colours: ${this.theme}" aria-label="Colours: ${this.theme}; change to ${next}" @click=${() => this.#theme(next)}>${{ auto: "◐", light: "☀", dark: "☾" }[this.theme]}</button></div>
        <a class="link ${place === "inbox" ? "here" : ""}" href="#/inbox" aria-current=${place === "inbox" ? "page" : nothing}>Inbox ${waiting.length ? html`<span class="badge">${waiting.length}<span class="sr"> waiting</span></span>` : nothing}</a>
        <a class="link ${place === "history" ? "here" : ""}" href="#/history" aria-current=${place === "history" ? "page" : nothing}>History</a>
        <button type="button" class="new" @click=${this.#new}>New conversation</button>
        <holdfast-conversations .client=${this.client} .here=${id} .titles=${this.titles}></holdfast-conversations>
        ${this.me ? html`<p class="me">You are <b>${shown(this.me)}</b> <a href="#/deputies" aria-current=${place === "deputies" ? "page" : nothing}>Deputies</a></p>` : nothing}
      </nav>
      <main id="main" tabindex="-1">
        <div class="top"><button type="button" class="quiet menu" aria-label="Conversations" aria-expanded=${Boolean(this.drawer)} @click=${() => (this.drawer = !this.drawer)}>☰</button>
          <h2>${VIEWS[place]?.title ?? (id ? shown(this.titles.get(id) || id) : "Holdfast")}</h2>
          ${id ? html`<a class="pill other" href="#/${place === "chat" ? "t" : "c"}/${encodeURIComponent(id)}">${place === "chat" ? "Timeline" : "Conversation"}</a>` : nothing}
          ${waiting.length && place !== "inbox" ? html`<a class="pill strong" href="#/inbox">${waiting.length} waiting</a>` : nothing}</div>
        ${this.#connection()}
        ${VIEWS[place]?.view(this)
          ?? (place === "timeline" ? html`<holdfast-timeline .client=${this.client} .conversation=${id}></holdfast-timeline>`
          : id ? html`<holdfast-chat .client=${this.client} .conversation=${id} .at=${seq}></holdfast-chat>`
          : html`<div class="empty"><h2>Welcome</h2><p>Open a conversation, or start a new one.</p><button type="button" class="primary" @click=${this.#new}>New conversation</button></div>`)}
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
