// <holdfast-time>: a time in words that stay current, with the date and the time zone on hover.
//   properties  at: seconds since the epoch   client: Client (its clock)   mode: "age" ("4 min") | "left" ("1:05", "expired") | "start" ("runs in 30s")
// Its text changes by itself: the element around it does not render for that.
import { ago, duration, startsIn } from "../text.js";

const INTERVAL = 1000; // milliseconds
const SOON = 60; // seconds before a deadline that is shown in red

const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" }); // slow to make
const shown = new Set(); // all times in the page
let timer = 0;

class Time extends HTMLElement {
  #at;
  client = null;
  mode = "age";

  // Properties that were set before this file was loaded hide the setter.
  connectedCallback() {
    if (Object.hasOwn(this, "at")) {
      const { at } = this;
      delete this.at;
      this.at = at;
    }
    shown.add(this);
    timer ||= setInterval(() => document.visibilityState === "visible" && shown.forEach((time) => time.tell()), INTERVAL);
    this.tell();
  }

  disconnectedCallback() {
    shown.delete(this);
    if (!shown.size) timer = clearInterval(timer);
  }

  get at() {
    return this.#at;
  }

  set at(at) {
    this.#at = at;
    if (this.isConnected) this.tell();
  }

  tell() {
    if (!Number.isFinite(this.#at)) return;
    const time = this.firstElementChild ?? this.appendChild(document.createElement("time"));
    const now = this.client?.now() ?? Date.now() / 1000, left = this.#at - now;
    const words = { age: () => ago(this.#at, now), left: () => (left > 0 ? duration(Math.ceil(left)) : "expired"), start: () => startsIn(left) }[this.mode]();
    if (time.textContent !== words) time.textContent = words;
    time.classList.toggle("soon", this.mode === "left" && left < SOON);
    const iso = new Date(this.#at * 1000).toISOString();
    if (time.dateTime === iso) return;
    time.dateTime = iso;
    time.title = absolute.format(this.#at * 1000);
  }
}
customElements.define("holdfast-time", Time);
