// <holdfast-artifact>: a stored text of which a part is shown. A button loads the whole of it.
//   properties  client: Client   conversation: string (its id)   artifact: {sha256, size, media_type, name}
//               what: "diff" | "output" | "result"   head: string (the part)   cut: how the part is rendered, if not as a diff
//   events      loaded, when the whole of it is rendered
//   attribute   unloaded, while an approval needs what is not loaded (guard.js)
import { Element, html, nothing, shown, diffLines } from "./base.js";
import { bytes, diffOf, json, parse } from "../text.js";

const LARGEST = 16e6; // bytes that are shown in the page; a larger one can only be saved

class Artifact extends Element {
  static properties = { client: {}, conversation: {}, artifact: {}, what: {}, head: {}, cut: {}, text: { state: true }, problem: { state: true }, busy: { state: true } };

  // What is loaded does not change, and may have 200,000 lines: it is rendered once.
  shouldUpdate(now) {
    return !this.text || now.has("text") || this.artifact.sha256 !== this.key;
  }

  willUpdate(now) {
    super.willUpdate(now);
    const { sha256 } = this.artifact;
    if (sha256 !== this.key) Object.assign(this, { key: sha256, text: null, problem: null, busy: false });
  }

  async #load() {
    const { key, artifact } = this;
    Object.assign(this, { busy: true, problem: null });
    const text = await this.client.artifact(this.conversation, artifact.sha256).catch((problem) => {
      if (key === this.key) this.problem = problem;
      return null;
    });
    if (key !== this.key) return; // of another value meanwhile
    const focused = this.contains(document.activeElement);
    Object.assign(this, { text, busy: false });
    if (text === null) return;
    await this.updateComplete;
    this.removeAttribute("unloaded");
    this.emit("loaded");
    if (focused) this.querySelector(".whole").focus({ preventScroll: true }); // the button is gone
  }

  render() {
    const { artifact, what, head, text } = this;
    if (text !== null) return html`<div class="whole" tabindex="-1" role="group" aria-label="The whole ${what}">${what === "diff" ? diffLines(diffOf(text)) : html`<pre class="code output">${shown(what === "result" ? readable(text) : text)}</pre>`}</div>`;
    const size = bytes(artifact.size);
    return html`${what === "diff" ? diffLines(diffOf(head)) : this.cut}
      <div class="more">
        <p>${what === "diff" ? `This is the beginning: ${bytes(new TextEncoder().encode(head).length)} of ${size}.` : `Shortened. Full ${what}: ${size}.`}</p>
        ${this.problem ? html`<p class="notice bad" role="alert">Not loaded: ${shown(this.problem.message)}</p>` : nothing}
        <p class="links">${artifact.size > LARGEST ? nothing : html`<button type="button" aria-disabled=${Boolean(this.busy)} @click=${() => this.busy || this.#load()}>${this.busy ? "Loading…" : this.problem ? "Try again" : `Show the whole ${what}`}</button>`}
          <a href=${this.client.artifactAddress(this.conversation, artifact.sha256)} download>Save it as a file</a></p>
      </div>`;
  }
}

// A result is stored as JSON: a text is shown as such, anything else with line breaks.
function readable(text) {
  try {
    const value = parse(text);
    return typeof value === "string" ? value : json(value);
  } catch {
    return text;
  }
}

customElements.define("holdfast-artifact", Artifact);
