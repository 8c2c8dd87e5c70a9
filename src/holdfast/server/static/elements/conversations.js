// <holdfast-conversations>: the list of conversations in the sidebar: search, rename in place, archive.
//   properties  client: Client   here: string (the id of the open conversation)   titles: Map (titles by id, which may be newer than the list)
//   events      listed, with detail {conversations, archived}, when the list was read; titled, with detail {conversation, title}
// It reads PAGE conversations at a time, the latest created first, however many there are. A search finds the rest.
import { Element, html, nothing, shown, oneLine } from "./base.js";
import { repeat } from "lit/directives/repeat.js";
import { ago } from "../text.js";

const REFRESH = 10_000, BURST = 400; // milliseconds between two reads of the list; changes come in bursts
const PAGE = 100; // conversations
const TYPED = 250; // milliseconds after the last key until the search begins
const AGAIN = 2000; // milliseconds until a search is repeated while the index is being built

class Conversations extends Element {
  static properties = { client: {}, here: {}, titles: {}, list: { state: true }, more: { state: true }, archived: { state: true }, text: { state: true }, found: { state: true }, editing: { state: true }, problem: { state: true } };

  constructor() {
    super();
    Object.assign(this, { list: [], most: PAGE, archived: false, text: "" });
  }

  connectedCallback() {
    super.connectedCallback();
    const look = () => document.visibilityState === "visible" && this.load();
    this.watch(document, "visibilitychange", look);
    this.tick(REFRESH, look);
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    for (const timer of [this.due, this.typed]) clearTimeout(timer);
  }

  willUpdate(now) {
    super.willUpdate(now);
    if (now.has("here")) this.editing = false;
    if (!now.has("client") || !this.client) return;
    this.watch(this.client.inbox, "change", () => this.#soon());
    this.watch(this.client, "connection", () => this.client.connection === "online" && this.load());
    this.load();
  }

  back() {
    super.back();
    this.load();
  }

  #soon() {
    this.due ||= setTimeout(() => {
      this.due = 0;
      this.load();
    }, BURST);
    this.requestUpdate();
  }

  async load() {
    const { archived } = this;
    try {
      const list = [];
      let cursor;
      do {
        const { conversations, next } = await this.client.conversations({ order: "newest", archived, cursor, limit: PAGE });
        list.push(...conversations);
        cursor = next;
      } while (cursor && list.length < this.most);
      if (archived !== this.archived) return; // the other list was chosen meanwhile
      Object.assign(this, { list: list.sort((a, b) => b.updated - a.updated), more: cursor, problem: null });
      this.emit("listed", { conversations: this.list, archived });
    } catch (problem) {
      this.problem = problem;
    }
  }

  #show(archived) {
    Object.assign(this, { archived, list: [], more: null, most: PAGE });
    this.load();
  }

  #type(text) {
    this.text = text;
    clearTimeout(this.typed);
    if (text.trim()) this.typed = setTimeout(() => this.#search(), TYPED);
    else this.found = null;
  }

  async #search(cursor) {
    const { text } = this;
    try {
      const page = await this.client.search({ text, cursor });
      if (text !== this.text) return; // more was typed meanwhile
      const before = cursor ? this.found.hits : [];
      this.found = { ...page, text, hits: [...before, ...page.hits] };
      if (!page.complete) this.typed = setTimeout(() => text === this.text && this.found.hits.length === page.hits.length && this.#search(), AGAIN);
      this.problem = null;
    } catch (problem) {
      this.problem = problem;
    }
  }

  async #edit() {
    this.editing = true;
    await this.updateComplete;
    this.querySelector(".rename input").select();
  }

  async #leave() {
    this.editing = false;
    await this.updateComplete;
    this.querySelector(".change .edit")?.focus();
  }

  async #rename(event, { conversation }) {
    event.preventDefault();
    const title = new FormData(event.target).get("title").trim();
    if (!title) return this.#leave();
    try {
      await this.client.rename(conversation, title);
      this.emit("titled", { conversation, title });
      await this.#leave();
      await this.load();
    } catch (problem) {
      this.problem = problem;
    }
  }

  async #archive({ conversation }) {
    try {
      await this.client.archive(conversation, !this.archived);
      await this.load();
      this.querySelector("input[type=search]").focus(); // its row and its buttons are gone
    } catch (problem) {
      this.problem = problem;
    }
  }

  render() {
    if (!this.client) return nothing;
    const clear = (event) => {
      if (event.key !== "Escape" || !this.text) return;
      event.stopPropagation(); // on a phone it would close the list
      event.preventDefault();
      this.#type("");
    };
    return html`<search><input type="search" aria-label="Search conversations" placeholder="Search" autocomplete="off" .value=${this.text} @input=${({ target }) => this.#type(target.value)} @keydown=${clear}></search>
      ${this.problem?.status ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
      <p class="notice" role="status">${this.#status()}</p>
      ${this.found ? this.#results() : this.#list()}
      ${this.text ? nothing : html`<button type="button" class="quiet archived" aria-pressed=${this.archived} @click=${() => this.#show(!this.archived)}>Archived</button>`}`;
  }

  #status() {
    if (!this.found) return this.archived ? (this.list.length ? "Archived conversations" : "No conversation is archived.") : nothing;
    const { hits, next, complete } = this.found;
    const count = hits.length ? `${hits.length}${next ? " or more" : ""} found` : "Nothing found";
    return complete ? count : `${count} so far. Some conversations are not in the search index yet.`;
  }

  #list() {
    const counts = this.client.inbox.pending.reduce((all, { conversation }) => all.set(conversation, (all.get(conversation) ?? 0) + 1), new Map());
    return html`<ul>${repeat(this.list, (each) => each.conversation, (each) => this.#row(each, counts.get(each.conversation)))}</ul>
      ${this.more ? html`<button type="button" class="quiet" @click=${() => { this.most += PAGE; this.load(); }}>More</button>` : nothing}`;
  }

  #row(each, waiting) {
    const here = each.conversation === this.here;
    const title = this.titles?.get(each.conversation) || each.title || each.conversation;
    if (here && this.editing) return html`<li><form class="rename" @submit=${(event) => this.#rename(event, each)} @keydown=${(event) => event.key === "Escape" && (event.stopPropagation(), this.#leave())}>
      <input name="title" aria-label="Title" maxlength="200" autocomplete="off" .value=${title}><button class="primary">Save</button><button type="button" class="quiet" @click=${this.#leave}>Cancel</button></form></li>`;
    return html`<li class=${here ? "open" : ""}><a class="link ${here ? "here" : ""}" href="#/c/${encodeURIComponent(each.conversation)}" aria-current=${here ? "page" : nothing}>
      <span class="dot ${each.state}" title=${each.state.replace("_", " ")}></span><span class="name" title=${oneLine(title, 200)}>${shown(title)}<small>${shown(each.agent)} · ${ago(each.updated, this.client.now())}</small></span>
      ${waiting ? html`<span class="badge">${waiting}<span class="sr"> waiting</span></span>` : nothing}</a>
      ${here ? html`<span class="change"><button type="button" class="quiet edit" @click=${this.#edit}>Rename</button><button type="button" class="quiet" @click=${() => this.#archive(each)}>${this.archived ? "Unarchive" : "Archive"}</button></span>` : nothing}</li>`;
  }

  #results() {
    const { hits, next, text } = this.found;
    return html`<ul class="found">${hits.map((hit) => html`<li><a class="link" href="#/c/${encodeURIComponent(hit.conversation)}${hit.seq ? `/${hit.seq}` : ""}">
      <span class="name">${shown(hit.title || hit.conversation)}<span class="snippet">${hit.parts.map((part, n) => (n % 2 ? html`<mark>${shown(part)}</mark>` : shown(part)))}</span>
        <small>${hit.by ? html`${shown(hit.by)} · ` : nothing}${ago(hit.at, this.client.now())}${hit.archived ? " · archived" : nothing}</small></span></a></li>`)}</ul>
      ${next && text === this.text ? html`<button type="button" class="quiet" @click=${() => this.#search(next)}>More</button>` : nothing}`;
  }
}

customElements.define("holdfast-conversations", Conversations);
