// The service worker: shows the page while the server cannot be reached.
// The server is always asked first, so that a new version is shown at once; the last answers are kept for when it cannot be
// reached. Only the page's own files are kept, never a response of the API, and no address with a token.
const SHELL = "holdfast-shell";
const home = self.registration.scope;
const files = new URL("static/", home).href;

addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) => event.waitUntil(clients.claim()));

const isShell = ({ method, url, mode }) => method === "GET" && (url.startsWith(files) || (mode === "navigate" && url.replace(/#.*/, "") === home));

addEventListener("fetch", (event) => {
  if (isShell(event.request)) event.respondWith(load(event.request));
});

async function load(request) {
  const shell = await caches.open(SHELL);
  try {
    const reply = await fetch(request);
    if (reply.ok && reply.type === "basic" && !reply.redirected) await shell.put(request.url, reply.clone());
    return reply;
  } catch (failure) {
    const kept = await shell.match(request.url);
    if (kept) return kept;
    throw failure;
  }
}

// The page names the files that it has loaded; files of an earlier version are dropped.
addEventListener("message", (event) => {
  const { type, files: wanted } = event.data;
  if (type !== "keep") return;
  event.waitUntil((async () => {
    const shell = await caches.open(SHELL);
    const known = (await shell.keys()).map(({ url }) => url);
    await Promise.all(known.filter((url) => !wanted.includes(url)).map((url) => shell.delete(url)));
    await Promise.all(wanted.filter((url) => (url === home || url.startsWith(files)) && !known.includes(url)).map((url) => shell.add(url).catch(() => {})));
  })());
});

addEventListener("notificationclick", (event) => {
  const { notification } = event;
  notification.close();
  event.waitUntil((async () => {
    const [page] = await clients.matchAll({ type: "window" });
    if (!page) return clients.openWindow(home + notification.data);
    page.postMessage({ type: "go", to: notification.data });
    return page.focus();
  })());
});
