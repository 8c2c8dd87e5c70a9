// Desktop notifications of new pending calls, and the number on the icon of the installed page.
// Permission is asked for only when a person switches notifications on.
import { spelled } from "./text.js";

const ON = "holdfast.notices";
const can = "Notification" in globalThis && isSecureContext;

export const notices = {
  /** Whether this browser has notifications. */
  offered: can,

  get on() {
    return can && Notification.permission === "granted" && localStorage.getItem(ON) === "on";
  },

  get blocked() {
    return can && Notification.permission === "denied";
  },

  /** Switch notifications on or off; on a click, because browsers ask for the permission only then. */
  async switch() {
    if (this.on) return localStorage.removeItem(ON);
    if ((await Notification.requestPermission()) === "granted") localStorage.setItem(ON, "on");
  },

  /** Follow the pending calls of a client: the badge always, notifications while the page is hidden. */
  follow({ inbox }) {
    inbox.addEventListener("change", () => {
      const n = inbox.pending.length;
      (n ? navigator.setAppBadge?.(n) : navigator.clearAppBadge?.())?.catch(() => {}); // not installed, or not allowed
    });
    inbox.addEventListener("added", ({ detail }) => this.on && document.hidden && notify(detail));
  },
};

// Tabs share the tag, so that one call is one notification.
async function notify({ conversation, call, prompt, tool }) {
  const options = { tag: `${conversation}/${call}`, body: "Waiting for a decision", icon: new URL("icon-192.png", import.meta.url).href, data: `#/c/${encodeURIComponent(conversation)}` };
  const worker = await navigator.serviceWorker?.getRegistration();
  if (worker?.active) return worker.showNotification(spelled(prompt || tool), options);
  new Notification(spelled(prompt || tool), options).addEventListener("click", () => (window.focus(), (location.hash = options.data)));
}

// --- the installed page ---

/** Register the service worker, which shows the page while the server cannot be reached. */
export async function install() {
  if (!navigator.serviceWorker || !isSecureContext) return;
  const scope = new URL("../", import.meta.url).href;
  const worker = await navigator.serviceWorker.register(new URL("worker.js", import.meta.url), { scope, updateViaCache: "none" }).catch(() => null); // for example in a private window
  if (!worker) return;
  const { active } = await navigator.serviceWorker.ready;
  const files = performance.getEntriesByType("resource").map(({ name }) => name).filter((name) => name.startsWith(new URL("./", import.meta.url).href));
  active.postMessage({ type: "keep", files: [scope, ...files] }); // they were loaded before the worker existed
}
