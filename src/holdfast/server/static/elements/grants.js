// <holdfast-grants>: a button with the remembered approvals of one conversation, hidden while there are none.
//   properties  client: Client   conversation: string (its id)   grants: [Grant], as a Conversation has them
//   events      revoked, with detail {conversation, grant}    closed, when its dialog closes
import { Element, html, nothing, shown } from "./base.js";
import { coverage, reach, when } from "../text.js";

class Grants extends Element {
  static properties = { client: {}, conversation: {}, grants: {}, open: { state: true }, problem: { state: true } };

  async #revoke(id) {
    const cut = id.lastIndexOf("/"), conversation = cut < 0 ? this.conversation : id.slice(0, cut), grant = id.slice(cut + 1);
    this.problem = null;
    this.querySelector("dialog").focus(); // the pressed row disappears: a second press must not hit the next one
    try {
      await this.client.revoke(conversation, grant);
      this.emit("revoked", { conversation, grant });
    } catch (problem) {
      this.problem = problem;
    }
  }

  updated() {
    const dialog = this.querySelector("dialog");
    if (dialog && !dialog.open) dialog.showModal();
  }

  render() {
    const now = this.client?.now();
    const grants = (this.grants ?? []).filter(({ until }) => !until || until > now);
    if (!grants.length && !this.open) return nothing;
    const close = async () => {
      this.open = false;
      await this.updateComplete;
      this.emit("closed");
    };
    return html`<button type="button" class="quiet" @click=${() => (this.open = true)}>${grants.length} remembered</button>
      ${this.open ? html`<dialog class="grants" tabindex="-1" aria-label="Remembered approvals" @close=${close}><h2>Remembered approvals</h2>
        <p class="about">${grants.length ? "These calls run without asking: in this conversation, or further where it says so." : "No approval is remembered. The next call asks again."}</p>
        <ul class="rows">${grants.map(({ id, tool, by, on_behalf_of: other, at, until, ...grant }) => html`<li class="bar">
          <span class="grow"><code>${shown(tool)}</code> with ${shown(coverage(grant))}${reach(grant) ? html` <b class="reach">${shown(reach(grant))}</b>` : nothing}
            <small class="about">allowed by <b>${shown(by.id)}</b>${other ? html` for <b>${shown(other.id)}</b>` : nothing} on ${when(at)}${until ? `, until ${when(until)}` : ""}</small></span>
          <button type="button" class="danger outline" @click=${() => this.#revoke(id)}>Revoke</button></li>`)}</ul>
        ${this.problem ? html`<p class="notice bad" role="alert">${shown(this.problem.message)}</p>` : nothing}
        <div class="actions"><button type="button" @click=${(event) => event.target.closest("dialog").close()}>Close</button></div></dialog>` : nothing}`;
  }
}
customElements.define("holdfast-grants", Grants);
