// The page: one client, the root element, and the demo's client tools.
import { Client, ToolFailed } from "./client.js";
import { install, notices } from "./notices.js";
import "./elements/app.js";

const LIMIT = 256 * 1024; // bytes of a picked file; well below the server's limit on answers

const client = new Client();
client.registerTool("locate", locate);
client.registerTool("pick_file", pickFile, { label: "Choose a file" });
document.querySelector("holdfast-app").client = client;
window.holdfast = client; // so that other scripts can register their own tools
notices.follow(client);
navigator.serviceWorker?.addEventListener("message", ({ data }) => data.type === "go" && (location.hash = data.to));
addEventListener("load", install);

function locate() {
  return new Promise((resolve, reject) => {
    if (!navigator.geolocation) return reject(new ToolFailed("resource_missing", "this browser has no geolocation"));
    navigator.geolocation.getCurrentPosition(
      ({ coords }) => resolve({ latitude: coords.latitude, longitude: coords.longitude, accuracy: coords.accuracy }),
      (problem) => reject(problem.code === 1 ? new ToolFailed("denied", "the browser denied access to its location") : new ToolFailed("resource_missing", problem.message || "the location is unknown")),
      { timeout: 30_000 },
    );
  });
}

// Browsers open a file picker only on a click: with a label the card shows a button.
function pickFile(args, { progress }) {
  return new Promise((resolve, reject) => {
    const input = Object.assign(document.createElement("input"), { type: "file", accept: args.accept ?? "" });
    input.addEventListener("cancel", () => reject(new ToolFailed("denied", "no file was chosen")));
    input.addEventListener("change", async () => {
      const [file] = input.files;
      if (file.size > LIMIT) return reject(new ToolFailed("too_large", `${file.name} has ${file.size} bytes; the limit is ${LIMIT}`));
      progress(`reading ${file.name}`);
      resolve({ name: file.name, type: file.type, size: file.size, text: await file.text() });
    });
    input.click();
  });
}
