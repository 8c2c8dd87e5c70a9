// The client library, for any page: requests and two live views.
//
//   const client = new Client({ base: "/holdfast/" });           // default: the document's own address; limits: as LIMITS below
//   client.registerTool("locate", async (args, { progress, signal }) => ({ ... }));
//   const conversation = client.conversation(id);               // live until .close()
//   conversation.addEventListener("change", () => render(conversation.view, conversation.state));
//   client.inbox.addEventListener("change", () => render(client.inbox.pending));
//   await client.resolve(pending, { type: "approve", digest: pending.digest });
//
// A view is a snapshot with the events of the stream applied to it. Everything is keyed, so that repeated events change
// nothing. A stream that ends is reopened after the last event.
// Errors are thrown as Problem: {status, kind, message, details}, like the server's problem documents. Integers that
// JavaScript would round are BigInts.
import { apply, callOf, checklistOf, emptyView } from "./fold.js";
import { json, parse } from "./text.js";

const PAGE = 200; // events read at a time
const BATCH = 200; // decisions in one request: the server's limit
const SEARCHED = 10; // pages before the loaded part in which the last checklist is looked for
const FIRST_WAIT = 250, LONGEST_WAIT = 5000; // milliseconds before a stream is reopened
const MISSED = 1.05; // growth of the wait while the server is unreachable; it doubles after refusals
const LIMITS = {
  request: 20_000, // milliseconds for a complete response
  preview: 60_000, // the same for a preview, which runs the tool's code
  silence: 40_000, // a stream without a byte for this long is dead: the server sends a heartbeat every 15 s
};
const FRAME = 16; // milliseconds: views dispatch changes at most this often
const RENEW = 10_000; // milliseconds; a lease on a client call lasts 30 s
const UNSEEN = 5000; // milliseconds after which a hidden page closes its conversation's stream
const QUIET = 3000; // milliseconds without events after which a page asks whether a worker is running
const LONGEST_MESSAGE = 2000; // characters of the message of an error that a tool threw
const LARGEST = 2 * 1024 * 1024; // bytes of a result: for larger ones the server closes the connection, which looks like an outage
const HAND_OVER = 1000; // milliseconds between requests for a call that another page runs

export class Problem extends Error {
  constructor({ status = 0, kind = "failed", detail, title, details = {} }) {
    super(detail ?? title ?? `the server answered ${status}`);
    Object.assign(this, { status, kind, details: details ?? {} });
  }
}

/** Thrown by a client tool to report an error of this kind; any other error is `handler_failed`. */
export class ToolFailed extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export class Client extends EventTarget {
  #skew = 0;
  #inbox;
  #tools = new Map();
  #attached = new Map(); // conversation -> Attachment, kept after this page has left the conversation
  #approved = new Set(); // calls that were approved here
  #gone = false; // the page was left; the browser may restore it from its cache
  principal = null; // the id of the principal of this page, once it is known
  roles = []; // the principal's roles
  deputyOf = []; // the principals, {id, roles}, for whom it decides as a deputy
  connection = "connecting"; // "connecting" | "online" | "offline" | "refused"

  constructor({ base = document.baseURI, limits = {} } = {}) {
    super();
    this.limits = { ...LIMITS, ...limits };
    this.base = new URL("api/", new URL(base, location.href).href.replace(/[?#].*$/, ""));
    this.id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    addEventListener("pagehide", () => {
      this.#gone = true;
      this.#attached.forEach((each) => each.leave());
    });
    addEventListener("pageshow", () => {
      this.#gone = false;
      this.#look();
    });
  }

  // --- requests ---

  me = () => this.request("GET", "me").then((me) => this.#identify(me));
  conversations = ({ status, order, archived, cursor, limit = 100 } = {}) => this.request("GET", `conversations?${query({ status, order, archived, cursor, limit })}`);
  /** Return {hits, next, complete}: messages, replies and titles that have all words. */
  search = ({ text, archived, cursor, limit = 20 }) => this.request("GET", `search?${query({ text, archived, cursor, limit })}`);
  /** Return {decisions, next, complete, problems}: what was decided, the latest first. */
  decisions = (filters) => this.request("GET", `decisions?${query(filters)}`);
  exportAddress = (filters) => new URL(`decisions/export?${query(filters)}`, this.base).href;
  rename = (id, title) => this.request("POST", `conversations/${enc(id)}/rename`, { title });
  archive = (id, archived = true) => this.request("POST", `conversations/${enc(id)}/archive`, { archived });
  snapshot = (id) => this.request("GET", `conversations/${enc(id)}`);
  worker = (id) => this.request("GET", `conversations/${enc(id)}/worker`);
  open = (options = {}) => this.request("POST", "conversations", options).then((reply) => reply.conversation);
  send = (id, text, options = {}) => this.request("POST", `conversations/${enc(id)}/messages`, { text, ...options });
  cancel = (id, reason) => this.request("POST", `conversations/${enc(id)}/cancel`, reason ? { reason } : {});
  log = (id, range) => this.request("GET", `conversations/${enc(id)}/log?${query(range)}`).then((reply) => reply.events);
  /** Return {title, turns, earlier}: where the time and the cost of the turns went, the newest first; before: `earlier` of the last page. */
  timeline = (id, { before, turns } = {}) => this.request("GET", `conversations/${enc(id)}/timeline?${query({ before, turns })}`);
  timelineAddress = (id) => new URL(`conversations/${enc(id)}/timeline/file`, this.base).href;
  resolve = (pending, decision) => this.#decide([{ ...pending, decision }], `conversations/${enc(pending.conversation)}/calls/${enc(nameOf(pending))}/resolve`, { decision });
  /** Return what became of a call, {status, value, error, pending, ...}, once it has ended or waits again, or after some seconds. */
  outcome = ({ conversation, call }, wait = 0) => this.request("GET", `conversations/${enc(conversation)}/calls/${enc(call)}?${query({ wait })}`, undefined, { limit: wait * 1000 + this.limits.request });
  preview = ({ conversation, call }, args) => this.request("POST", `conversations/${enc(conversation)}/calls/${enc(call)}/preview`, { args }, { limit: this.limits.preview });
  scopes = ({ conversation, call }) => this.request("GET", `conversations/${enc(conversation)}/calls/${enc(call)}/scopes`);
  /** Return the remembered approvals of a conversation; without one, all that reach beyond their conversation. */
  grants = (conversation) => this.request("GET", conversation === undefined ? "grants" : `grants?${query({ conversation })}`).then((reply) => reply.grants);
  artifactAddress = (conversation, sha256) => new URL(`conversations/${enc(conversation)}/artifacts/${enc(sha256)}`, this.base).href;
  revoke = (conversation, grant) => this.request("DELETE", `grants/${enc(conversation)}/${enc(grant)}`);
  deputies = () => this.request("GET", "deputies").then((reply) => reply.delegations);
  /** Name a deputy of this principal: {to, duration: "14d"} or {to, until: seconds since the epoch}. */
  nameDeputy = (named) => this.request("POST", "deputies", named);
  endDelegation = (id) => this.request("DELETE", `deputies/${enc(id)}`);
  /** Return whether a card offers this: "approve", "edit", "remember", "deny", "stop", "extend", "submit". A signed link may allow less. */
  allows = () => true;

  /** Decide several calls: [{conversation, call, seq, decision}]. Return the results, in this order. */
  async resolveAll(all) {
    const results = [];
    for (let at = 0; at < all.length; at += BATCH) {
      const part = all.slice(at, at + BATCH);
      const decisions = part.map(({ decision, ...pending }) => ({ conversation: pending.conversation, call: nameOf(pending), decision }));
      try {
        results.push(...(await this.#decide(part, "pending/resolve", { decisions })).results);
      } catch (problem) {
        if (!at) throw problem;
        results.push(...all.slice(at).map(({ conversation }) => ({ conversation, problem: { status: problem.status, detail: `Not sent, or the outcome is unknown: ${problem.message}` } }))); // what was decided before is reported
        break;
      }
    }
    return results.map((result, n) => ({ ...result, call: all[n].call }));
  }

  /** Return the text of an artifact: what a tool kept, or a result that is too large for the log. */
  artifact(conversation, sha256) {
    return this.#read("GET", this.artifactAddress(conversation, sha256), { headers: { Accept: "*/*" } }, this.limits.preview).then(({ text }) => text);
  }

  /** Return the server's time in seconds since the epoch: the local clock may be wrong. */
  now() {
    return Date.now() / 1000 + this.#skew;
  }

  /** Return a live conversation; call its close() when it is no longer shown. */
  conversation(id) {
    return new Conversation(this, id);
  }

  /** The pending calls of all conversations; opened on first use. */
  get inbox() {
    if (!this.#inbox) {
      this.#inbox = new Inbox(this);
      this.#inbox.addEventListener("change", () => this.#look());
    }
    return this.#inbox;
  }

  async request(method, path, body, { limit = this.limits.request, ...options } = {}) {
    const init = { headers: { Accept: "application/json" }, ...options };
    if (body !== undefined) Object.assign(init, { body: json(body, 0), headers: { ...init.headers, "Content-Type": "application/json" } });
    const { reply, text } = await this.#read(method, path, init, limit);
    try {
      return reply.status === 204 ? null : parse(text);
    } catch {
      throw new Problem({ kind: "unreachable", detail: "the response is not the server's" }); // for example a truncated one
    }
  }

  async #read(method, path, init, limit) {
    const signal = AbortSignal.timeout(limit);
    const late = (failure) => {
      throw signal.aborted ? new Problem({ kind: "timeout", detail: `the server did not answer within ${Math.ceil(limit / 1000)} s` }) : failure;
    };
    const reply = await this.fetch(path, { method, signal, ...init }).catch(late);
    const text = await reply.text().catch(() => late(new Problem({ kind: "unreachable", detail: "the connection was lost" })));
    return { reply, text };
  }

  #identify(me) {
    Object.assign(this, { principal: me.principal, roles: me.roles ?? [], deputyOf: me.deputy_of ?? [] });
    return me;
  }

  #decide(decisions, path, body) {
    for (const each of decisions) if (each.decision.type === "approve") this.#approved.add(keyOf(each));
    return this.request("POST", path, body);
  }

  async fetch(path, init) {
    let reply;
    try {
      reply = await fetch(new URL(path, this.base), init);
    } catch (failure) {
      if (init.signal?.aborted) throw failure;
      throw new Problem({ kind: "unreachable", detail: "the server cannot be reached" });
    }
    const date = Date.parse(reply.headers.get("Date") ?? "");
    if (date) this.#skew = Math.abs(date - Date.now()) > 2000 ? (date - Date.now()) / 1000 : 0;
    if (reply.ok) return reply;
    throw new Problem({ ...(await reply.json().catch(() => ({}))), status: reply.status });
  }

  failed({ status }) {
    this.connected([401, 403].includes(status) ? "refused" : "offline");
  }

  connected(state) {
    if (state === this.connection) return;
    this.connection = state;
    this.dispatchEvent(new Event("connection"));
  }

  // --- tools that run in this page ---

  /** Run calls of the client tool `name` with `fn(args, {progress, signal})`. With a label it waits for a click. */
  registerTool(name, fn, { label = null } = {}) {
    this.#tools.set(name, { fn, label });
    this.#attached.forEach((each) => each.tell());
    this.#look();
    return () => {
      this.#tools.delete(name);
      this.#attached.forEach((each) => each.tell());
    };
  }

  tool = (name) => this.#tools.get(name);
  toolNames = () => [...this.#tools.keys()];

  /** Let this page run all client tools of the conversation, until the returned function is called. */
  attach(id) {
    const attachment = this.#attachment(id);
    attachment.users++;
    this.inbox; // client calls arrive there
    this.#look();
    return () => {
      attachment.users--;
      this.#look();
    };
  }

  #attachment(id) {
    if (!this.#attached.has(id)) this.#attached.set(id, new Attachment(this, id, () => this.#look()));
    return this.#attached.get(id);
  }

  // This page always runs the calls of its own principal and the calls that were approved here. Other calls run only in a
  // page that shows their conversation: a tool such as `locate` must not reveal another person's location.
  #look() {
    if (this.#gone) return;
    const waiting = new Map([...this.#attached.keys()].map((id) => [id, []]));
    for (const entry of this.#inbox?.pending ?? []) {
      if (entry.kind !== "client_exec" || !this.tool(entry.tool)) continue;
      const { users, calls } = this.#attached.get(entry.conversation) ?? {};
      if (users || calls?.get(entry.call)?.state === "running" || entry.principal?.id === this.principal || this.#approved.has(keyOf(entry)))
        waiting.set(entry.conversation, [...(waiting.get(entry.conversation) ?? []), entry]);
    }
    waiting.forEach((entries, id) => this.#attachment(id).look(entries));
  }

  /** Return how this page handles a client call: undefined, or {state: "asking" | "elsewhere" | "running" | "click", run}. */
  clientCall = (pending) => this.#attached.get(pending.conversation)?.calls.get(pending.call);
}

/** A view with "change" events: at most one per frame, and none after close(). */
class View extends EventTarget {
  #timer = 0;
  closed = false;
  changed() {
    this.#timer ||= setTimeout(() => {
      this.#timer = 0;
      if (!this.closed) this.dispatchEvent(new Event("change"));
    }, FRAME);
  }
}

/** Server-sent events over fetch, with the heartbeats and status codes that EventSource hides.
 *
 * A connection may die silently, for example when the machine sleeps. So a stream is given up when the browser goes
 * offline, and when no byte has arrived for `limits.silence` by the wall clock, which includes sleep.
 */
class Stream {
  #closed = new AbortController();
  #wake = () => {};
  #abort = () => {}; // close the open connection
  #heard = Date.now(); // when the last byte arrived

  /** path() returns where to continue; event({type, data}); lost(problem): the source does not exist. */
  constructor(client, { path, event, lost = () => {} }) {
    Object.assign(this, { client, path, event, lost });
    const { signal } = this.#closed;
    const nudge = () => {
      if (document.visibilityState !== "visible") return;
      this.#check();
      this.#wake();
    };
    addEventListener("online", nudge, { signal });
    addEventListener("pageshow", nudge, { signal });
    document.addEventListener("visibilitychange", nudge, { signal });
    addEventListener("offline", () => this.#abort(), { signal });
    client.addEventListener("connection", () => client.connection === "online" && this.#wake(), { signal }); // another stream has reconnected
    this.#run();
  }

  close() {
    this.#closed.abort();
    this.#abort();
    this.#wake();
  }

  #check() {
    if (Date.now() - this.#heard > this.client.limits.silence) this.#abort();
  }

  async #run() {
    let wait = FIRST_WAIT;
    while (!this.#closed.signal.aborted) {
      try {
        await this.#read(() => {
          wait = FIRST_WAIT;
          this.client.connected("online");
        });
      } catch (problem) {
        if (this.#closed.signal.aborted) return;
        if (problem.status === 404) return this.lost(problem);
        wait = Math.min(wait * (problem.status ? 2 : MISSED), LONGEST_WAIT);
        this.client.failed(problem);
      }
      if (this.#closed.signal.aborted) return;
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, wait * (0.75 + Math.random() / 2));
      });
    }
  }

  async #read(connected) {
    const gone = new AbortController();
    let watch;
    try {
      const path = await this.path(); // its requests have their own time limits
      this.#heard = Date.now();
      this.#abort = () => gone.abort();
      if (this.#closed.signal.aborted) return;
      watch = setInterval(() => this.#check(), Math.min(1000, this.client.limits.silence / 4));
      const reply = await this.client.fetch(path, { headers: { Accept: "text/event-stream" }, cache: "no-store", signal: gone.signal });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) return;
        this.#heard = Date.now();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#parse(block, connected);
      }
    } finally {
      clearInterval(watch);
      gone.abort();
    }
  }

  // Connected from the first event or heartbeat on: an open response alone does not prove that the source works.
  #parse(block, connected) {
    let type = "message";
    const data = [];
    for (const line of block.split("\n")) {
      if (line.startsWith("event:")) type = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
    const message = data.length ? parse(data.join("\n")) : null;
    if (type === "problem") throw new Problem(message);
    if (message || block.startsWith(":")) connected();
    if (message) this.event({ type, data: message });
  }
}

/** One conversation, live. Read view (see fold.js), state, live, usage, pending, grants, seq, problem; listen to "change". */
export class Conversation extends View {
  #events = []; // the loaded part of the log: gapless, oldest first
  #stream;
  #liveFrom = 0; // the seq of the snapshot that `live` comes from
  view;
  state = "preparing";
  ready = false;
  live = null; // the reply in progress: {id, epoch, text, thinking, drafts: [{tool, text}], n, m}
  hosted = []; // calls that the provider runs, of the reply in progress
  usage = {};
  grants = []; // remembered approvals: its own, and those of others that reach further (with ids CONVERSATION/ID)
  retrying = null;
  unclaimed = null; // while no worker runs it: the number of workers that could
  problem = null;
  seq = 0;

  constructor(client, id) {
    super();
    Object.assign(this, { client, id, view: emptyView(id) });
    document.addEventListener("visibilitychange", this.#seen);
    this.#open();
    this.#seen();
  }

  #open() {
    const { client, id } = this;
    this.#stream = new Stream(client, {
      path: async () => {
        await this.#look(true);
        client.connected("online");
        return `conversations/${enc(id)}/events?after=${this.seq}`;
      },
      event: (event) => this.#take(event),
      lost: (problem) => {
        this.problem = problem;
        this.changed();
      },
    });
  }

  close() {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.#seen);
    clearTimeout(this.#unseen);
    this.#stop();
  }

  #stop() {
    this.#asking = clearTimeout(this.#asking);
    this.#stream.close();
  }

  // Browsers limit the connections to a server: pages in the background must not hold them all.
  #unseen = 0;
  #paused = false;
  #seen = () => {
    clearTimeout(this.#unseen);
    if (document.visibilityState === "hidden")
      this.#unseen = setTimeout(() => {
        this.#paused = true;
        this.#stop();
      }, UNSEEN);
    else if (this.#paused) {
      this.#paused = false;
      this.#open();
    }
  };

  /** The calls of this conversation that wait for a decision, in order. */
  get pending() {
    return [...this.view.calls.values()].map((call) => call.pending).filter((pending) => pending && !pending.starts_at);
  }

  get idle() {
    return this.state === "idle";
  }

  /** Whether the log has events before the loaded part. */
  get earlier() {
    return this.#events.length > 0 && this.#events[0].seq > 1;
  }

  /** Load the page of the log before the loaded part. */
  async readEarlier() {
    if (!this.earlier || this.reading) return;
    this.reading = true;
    try {
      const first = this.#events[0].seq;
      const before = await this.client.log(this.id, { before: first, limit: PAGE, last: true });
      this.#events = [...before, ...this.#events];
      this.#fold();
    } finally {
      this.reading = false;
      this.changed();
    }
  }

  /** Load the log back to this event. */
  async readUntil(seq) {
    while (this.earlier && this.#events[0].seq > seq) {
      const first = this.#events[0].seq;
      await this.readEarlier();
      if (this.#events[0]?.seq === first) await pause(HAND_OVER); // another reader is at it
    }
  }

  async #look(anew = false) {
    const snapshot = await this.client.snapshot(this.id);
    if (anew && this.seq) {
      // A log that was restored or replaced has another event at our position, or none: reload it from its end.
      const [last] = await this.client.log(this.id, { after: this.seq - 1, limit: 1 });
      if (last?.at !== this.#events.at(-1)?.at) Object.assign(this, { ready: false, seq: 0, view: emptyView(this.id) });
    }
    if (snapshot.seq < this.seq) return; // the stream is ahead
    if (!this.ready) {
      this.#events = await this.client.log(this.id, { before: snapshot.seq + 1, limit: PAGE, last: true });
      this.#fold();
      this.seq = snapshot.seq;
      this.ready = true;
      this.#findChecklist().catch(() => {}); // the next one that is written is shown
    }
    this.#live(snapshot);
    this.readGrants();
    this.changed();
  }

  // The agent's checklist may be older than the loaded part of the log: a page that is opened late shows it, too.
  async #findChecklist() {
    let before = this.#events[0]?.seq ?? 0;
    for (let page = 0; page < SEARCHED && before > 1 && !this.view.checklist && !this.closed; page++) {
      const events = await this.client.log(this.id, { before, limit: PAGE, last: true });
      if (!events.length) return;
      before = events[0].seq;
      const found = events.map(checklistOf).findLast(Boolean);
      if (found) this.view.checklist ??= found;
    }
    this.changed();
  }

  /** Read the remembered approvals again: another conversation's log says when one of its own ends. */
  readGrants() {
    Promise.all([this.client.grants(this.id), this.client.grants()]).then(([own, shared]) => {
      this.grants = [...own, ...shared.filter(({ id }) => id.slice(0, id.lastIndexOf("/")) !== this.id)];
      this.changed();
    }, () => {}); // the next refresh reads them again
  }

  #fold() {
    const { calls, checklist, title } = this.view;
    this.view = emptyView(this.id);
    for (const event of this.#events) apply(this.view, event);
    this.view.checklist ??= checklist;
    this.view.title = title || this.view.title;
    for (const [id, old] of calls) {
      const call = this.view.calls.get(id);
      if (call) Object.assign(call, { progress: old.progress, lost: old.lost });
      else if (old.pending) this.view.calls.set(id, old);
    }
  }

  #live(snapshot) {
    this.#liveFrom = snapshot.seq;
    this.state = snapshot.state;
    this.view.title = snapshot.title || this.view.title;
    this.usage = { ...snapshot.usage };
    this.retrying = null;
    this.live = (snapshot.partial || snapshot.thinking) && !this.view.seen.has(snapshot.message_id)
      ? { id: snapshot.message_id, epoch: snapshot.epoch, text: snapshot.partial, thinking: snapshot.thinking, drafts: [], n: snapshot.partial_n, m: snapshot.thinking_n }
      : null;
    if (!this.live) this.hosted = []; // the reply that they belonged to is complete
    if (snapshot.seq <= this.seq)
      for (const pending of snapshot.pending) {
        const call = callOf(this.view, { call_id: pending.call, tool: pending.tool });
        Object.assign(call, { pending: { before: call.pending?.before, remind: call.pending?.remind, ...pending }, phase: "waiting" });
      }
    for (const flying of snapshot.in_flight) {
      const call = this.view.calls.get(flying.call_id);
      if (call && flying.progress !== null) call.progress = flying.progress;
    }
    this.view.agent ||= snapshot.agent;
    this.#quiet();
  }

  // Work may wait for a worker that is not running: then the page must not say that the model is thinking.
  #quiet() {
    clearTimeout(this.#asking);
    this.unclaimed = null;
    if (["idle", "awaiting_input"].includes(this.state)) return;
    const asking = (this.#asking = setTimeout(async () => {
      const { state, claimed, able } = await this.client.worker(this.id).catch(() => ({ claimed: true }));
      if (asking !== this.#asking) return;
      if (!claimed) this.state = state; // the event of its end may have been missed
      if (this.#quiet() && !claimed) this.unclaimed = able;
      this.changed();
    }, QUIET));
    return true;
  }
  #asking = 0;

  #take({ type, data }) {
    if (type === "backpressure") return; // the stream ends and is reopened
    if (data.seq !== undefined) {
      if (data.seq <= this.seq) return;
      this.seq = data.seq;
      this.#events.push(data);
      apply(this.view, data);
      if (data.seq > this.#liveFrom) this.#news(data);
      if (data.type.startsWith("Grant")) this.readGrants();
      if (data.type === "CallSuspended") this.dispatchEvent(new CustomEvent("suspended", { detail: this.view.calls.get(data.call_id).pending }));
    } else this.#lively(data);
    this.#quiet();
    this.changed();
  }

  // Apply an event that is newer than the snapshot.
  #news({ type, attempts = [] }) {
    if (type === "TurnEnded" || (type === "MessageReceived" && this.idle)) this.state = this.view.queue.length ? "preparing" : "idle";
    if (["AssistantSaid", "AsideAnswered", "TurnEnded", "OutputRejected"].includes(type)) Object.assign(this, { live: null, hosted: [], retrying: null });
    for (const { usage } of attempts)
      for (const [name, n] of Object.entries(usage ?? {})) if (n !== null) this.usage[name] = (this.usage[name] ?? 0) + n;
  }

  #lively(data) {
    if (this.view.seen.has(data.message_id) || data.epoch < this.live?.epoch) return; // the reply is complete, or restarted by another worker
    switch (data.type) {
      case "state_changed":
        this.state = data.state;
        if (data.state === "preparing") this.hosted = [];
        break;
      case "text_delta":
        this.#piece(data, "text", "n");
        break;
      case "thinking_delta":
        this.#piece(data, "thinking", "m");
        break;
      case "tool_args_delta": {
        const draft = (this.#writing(data).drafts[data.index] ??= { tool: "", text: "" });
        if (data.tool) draft.tool = data.tool;
        draft.text += data.text;
        break;
      }
      case "message_completed":
        if (this.live) this.live.text = data.text;
        break;
      case "tool_call_started":
        if (data.executor === "provider") this.hosted = [...this.hosted.filter((call) => call.id !== data.call_id), { id: data.call_id, tool: data.tool, args: data.args, executor: "provider", phase: "running", started: this.client.now(), decisions: [] }];
        break;
      case "tool_call_resolved":
      case "tool_call_errored":
        this.hosted = this.hosted.map((call) => (call.id === data.call_id ? { ...call, phase: "done", ok: !data.error, error: data.error } : call));
        break;
      case "tool_progress": {
        const call = this.view.calls.get(data.call_id);
        if (call && call.phase !== "done") call.progress = data.payload;
        break;
      }
      case "retrying":
        this.retrying = data;
        break;
    }
  }

  // Deltas are numbered: a repeated one changes nothing, and after a gap the snapshot is read again.
  #piece(data, field, count) {
    const live = this.#writing(data), { n } = data;
    if (n === live[count] + 1) Object.assign(live, { [field]: live[field] + data.text, [count]: n });
    else if (n > live[count] + 1) this.#again ??= this.#look().catch(() => {}).then(() => (this.#again = null)); // if it fails, the stream ends, too
  }
  #again = null;

  #writing({ message_id: id, epoch }) {
    this.retrying = null;
    if (this.live?.id !== id || this.live.epoch < epoch) this.live = { id, epoch, text: "", thinking: "", drafts: [], n: 0, m: 0 };
    return this.live;
  }
}

/** All pending calls. Read pending (soonest deadline first) and ready; listen to "change" and "added".
 *
 * One tab of the browser holds the stream and broadcasts to the other tabs, so that they share one connection.
 */
export class Inbox extends View {
  #entries = new Map();
  #sorted = null; // what pending returns, until an entry changes
  ready = false;

  constructor(client) {
    super();
    this.#join(client);
  }

  // Tabs of one principal share. The next principal who signs in with this browser must not see the first one's calls.
  async #join(client) {
    const who = async () => (await client.me()).principal;
    for (;;) {
      try {
        const me = await who();
        client.connected("online");
        await this.#share(client, `holdfast ${client.base} ${me}`, async () => (await who()) === me);
      } catch (problem) {
        client.failed(problem);
        await pause(1000);
      }
    }
  }

  async #share(client, name, still) {
    const others = new BroadcastChannel(name);
    const ended = new AbortController();
    let leads = false;
    others.onmessage = ({ data }) => {
      if (data.type !== "hello") this.#take(data);
      else if (leads && this.ready) others.postMessage({ type: "pending", data: { pending: this.pending } });
      if (data.type === "connection" && !leads) client.connected(data.data);
    };
    others.postMessage({ type: "hello" });
    const lead = () => new Promise((leave) => {
      leads = true;
      client.addEventListener("connection", () => others.postMessage({ type: "connection", data: client.connection }), { signal: ended.signal });
      const stream = new Stream(client, {
        path: async () => {
          if (!(await still())) stream.close(), leave();
          return "pending/events";
        },
        event: (event) => {
          this.#take(event);
          others.postMessage(event);
        },
      });
    });
    if (navigator.locks) await navigator.locks.request(name, lead);
    else await lead(); // no secure context: each page has its own stream
    ended.abort();
    others.close();
    this.#entries.clear();
    this.#sorted = null;
    this.ready = false;
    this.changed();
  }

  #take({ type, data }) {
    if (type === "pending") {
      const old = this.#entries;
      this.#entries = new Map(data.pending.map((entry) => [keyOf(entry), entry]));
      for (const [key, entry] of this.#entries) if (this.ready && !old.has(key)) this.#tell(entry);
      this.ready = true;
    } else if (type === "added") {
      const known = this.#entries.has(keyOf(data));
      this.#entries.set(keyOf(data), data);
      if (!known) this.#tell(data);
    } else if (type === "removed") this.#entries.delete(keyOf(data));
    else return; // the stream ends and is reopened
    this.#sorted = null;
    this.changed();
  }

  get pending() {
    return (this.#sorted ??= [...this.#entries.values()].sort(byDeadline));
  }

  get = (entry) => this.#entries.get(keyOf(entry));
  #tell = (entry) => this.dispatchEvent(new CustomEvent("added", { detail: entry }));
}

/** This page as a client of one conversation: present while it sends heartbeats, and running a call while it holds the lease. */
// It is present while it has users or pending calls.
class Attachment {
  users = 0;
  calls = new Map();
  #there = false;
  #announced = []; // the tools that the server knows
  #line = Promise.resolve(); // announcements must reach the server in order
  #beating = 0;
  #unknown = false; // whether the server does not know the conversation

  /** told() is called after each announcement. */
  constructor(client, id, told) {
    Object.assign(this, { client, told, at: `conversations/${enc(id)}/` });
  }

  tell() {
    this.#line = this.#line.then(() => this.#tell());
  }

  // A repeated announcement is a heartbeat that works even if the server has lost the first one.
  async #tell() {
    clearTimeout(this.#beating);
    const tools = this.#there ? this.client.toolNames() : [];
    if (!tools.length) return this.#announced.length && this.#goodbye();
    let again = 2000;
    try {
      const { heartbeat } = await this.client.request("POST", `${this.at}clients`, { client: this.client.id, tools });
      again = heartbeat * 1000;
      this.#announced = tools;
    } catch (problem) {
      if (problem.status === 404) return (this.#unknown = true); // until a call of the conversation is pending
    }
    this.#beating = setTimeout(() => this.tell(), again);
    this.told();
  }

  #goodbye() {
    this.#announced = [];
    return this.client.request("DELETE", `${this.at}clients/${this.client.id}`, undefined, { keepalive: true }).catch(() => {});
  }

  /** Leave at once: while the page unloads there is no time to wait for earlier requests. */
  leave() {
    if (this.#there || this.#announced.length) this.#goodbye();
    this.#there = false;
    this.calls.forEach((call) => call.abort.abort());
    this.calls.clear();
  }

  look(waiting) {
    for (const [id, call] of this.calls)
      if (!waiting.some((entry) => entry.call === id)) {
        call.abort.abort();
        this.calls.delete(id);
      }
    const needed = this.users + waiting.length > 0;
    if (needed !== this.#there || (this.#unknown && waiting.length)) {
      this.#there = needed;
      this.#unknown = false;
      this.tell();
    }
    for (const entry of waiting)
      if (!this.calls.has(entry.call) && this.#announced.includes(entry.tool)) {
        const { label } = this.client.tool(entry.tool);
        const call = { entry, label, abort: new AbortController(), state: label ? "click" : "asking", run: () => this.#run(call) };
        this.calls.set(entry.call, call);
        if (!label) this.#run(call);
      }
  }

  #state(call, state, message = "") {
    Object.assign(call, { state, message });
    this.client.inbox.changed();
  }

  async #run(call) {
    const { entry, abort } = call;
    const path = `${this.at}calls/${enc(entry.call)}/`;
    const me = this.client.id;
    const lease = () => this.client.request("POST", `${path}lease`, { client: me }).then((reply) => reply.leased, () => false);
    const { fn, label } = this.client.tool(entry.tool);
    // A file picker needs a recent click: such a tool starts at once, while the lease is requested.
    const started = label ? this.#start(fn, entry, path, abort) : null;
    // Pages that show the conversation have priority.
    let wait = HAND_OVER;
    if (!label && !this.users) await pause(wait);
    while (!abort.signal.aborted && !(await lease())) {
      if (abort.signal.aborted) return;
      this.#state(call, "elsewhere");
      if (label) return;
      await pause(wait);
      wait = this.users ? HAND_OVER : Math.min(2 * wait, RENEW);
    }
    if (abort.signal.aborted) return;
    this.#state(call, "running");
    const renewing = setInterval(lease, RENEW);
    try {
      await this.#settle(entry, await (started ?? this.#start(fn, entry, path, abort)), abort);
    } catch (problem) {
      if (!abort.signal.aborted) this.#state(call, label ? "click" : "failed", problem.message);
    } finally {
      clearInterval(renewing);
    }
  }

  async #start(fn, entry, path, abort) {
    const progress = (payload) => this.client.request("POST", `${path}progress`, { client: this.client.id, payload }).catch(() => {});
    try {
      return { type: "client_result", value: (await fn(entry.args, { progress, signal: abort.signal })) ?? null };
    } catch (failure) {
      const kind = failure instanceof ToolFailed ? failure.kind : "handler_failed";
      return { type: "failed", kind, message: String(failure?.message ?? failure).slice(0, LONGEST_MESSAGE).replace(/\p{Cs}/gu, "\ufffd") };
    }
  }

  // A tool never runs twice: while the server is unreachable, the result is kept and sent again. A result that the server
  // refuses ends the call with an error.
  async #settle(entry, decision, { signal }) {
    for (let wait = FIRST_WAIT; !signal.aborted; )
      try {
        if (new Blob([json(decision, 0)]).size > LARGEST) throw new Problem({ status: 413, detail: `the result is larger than ${LARGEST} bytes` });
        return await this.client.resolve(entry, decision);
      } catch (problem) {
        const { status, kind, message } = problem;
        if ([404, 409, 410].includes(status)) return;
        if ([0, 408, 429].includes(status) || status >= 500) {
          await pause(wait);
          wait = Math.min(wait * 2, LONGEST_WAIT);
        } else if (decision.type === "client_result") decision = { type: "failed", kind: status === 413 || kind === "too_large" ? "too_large" : "invalid_result", message };
        else if (decision.kind !== "handler_failed") decision = { ...decision, kind: "handler_failed" };
        else throw problem;
      }
  }
}

export const keyOf = ({ conversation, call }) => `${conversation}/${call}`;
export const byDeadline = (a, b) => a.deadline - b.deadline || (keyOf(a) < keyOf(b) ? -1 : 1);
/** Return the name of a suspension, CALL:SEQ: a decision under it is for nothing that came later. */
export const nameOf = ({ call, seq }) => (seq ? `${call}:${seq}` : call);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const enc = encodeURIComponent;
const query = (values) => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null));
