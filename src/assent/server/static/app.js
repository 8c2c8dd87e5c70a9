// The page: one client, the element that shows it all, and the demo's tools.
import { Client, ToolFailed } from "./client.js";
import "./elements/app.js";

const LIMIT = 256 * 1024; // of a picked file: what fits into an answer with room to spare

const client = new Client();
client.registerTool("locate", locate);
client.registerTool("pick_file", pickFile, { label: "Choose a file" });
document.querySelector("assent-app").client = client;
window.assent = client; // for pages and people that want to register tools of their own

function locate() {
  return new Promise((resolve, reject) => {
    if (!navigator.geolocation) return reject(new ToolFailed("resource_missing", "this browser has no geolocation"));
    navigator.geolocation.getCurrentPosition(
      ({ coords }) => resolve({ latitude: coords.latitude, longitude: coords.longitude, accuracy: coords.accuracy }),
      (problem) => reject(problem.code === 1 ? new ToolFailed("denied", "the browser was not allowed to say where it is") : new ToolFailed("resource_missing", problem.message || "the position is not known")),
      { timeout: 30_000 },
    );
  });
}

// A picker opens only from a person's click: hence the label, for which the card shows a button.
function pickFile(args, { progress }) {
  return new Promise((resolve, reject) => {
    const input = Object.assign(document.createElement("input"), { type: "file", accept: args.accept ?? "" });
    input.addEventListener("cancel", () => reject(new ToolFailed("denied", "no file was chosen")));
    input.addEventListener("change", async () => {
      const [file] = input.files;
      if (file.size > LIMIT) return reject(new ToolFailed("too_large", `${file.name} has ${file.size} bytes; at most ${LIMIT} are taken`));
      progress(`reading ${file.name}`);
      resolve({ name: file.name, type: file.type, size: file.size, text: await file.text() });
    });
    input.click();
  });
}
