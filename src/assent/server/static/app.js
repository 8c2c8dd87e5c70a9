// The page: one client, its tools, and the element that shows it all.
import { Client } from "./client.js";
import { registerDemoTools } from "./tools.js";
import "./elements/app.js";

const client = new Client();
registerDemoTools(client);
document.querySelector("assent-app").client = client;
window.assent = client; // for pages and people that want to register tools of their own
