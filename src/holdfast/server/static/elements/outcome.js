// <holdfast-outcome>: what became of a call after its decision, updated until it has ended.
//   properties  client: Client   pending: Pending (the call that was decided)
import { Element, html, nothing, shown } from "./base.js";
import { keyOf } from "../client.js";
import { brief } from "../text.js";

const WAIT = 20; // seconds that the server waits for the call to end
const LOST = 2000; // milliseconds before the next request, if one has failed
const LONGEST = 300; // characters of a result

class Outcome extends Element {
  static properties = { client: {}, pending: {}, outcome: { state: true } };

  willUpdate(changed) {
    super.willUpdate(changed);
    if (!changed.has("pending") || !this.client || !this.pending || keyOf(this.pending) === this.key) return;
    this.key = keyOf(this.pending);
    this.outcome = null;
    this.#follow(this.key);
  }

  async #follow(key) {
    for (let wait = 0; this.isConnected && key === this.key; wait = WAIT) {
      try {
        const outcome = await this.client.outcome(this.pending, wait);
        if (key !== this.key) return;
        this.outcome = outcome;
        if (outcome.status !== "running" && outcome.status !== "approved") return;
      } catch (problem) {
        if (problem.status >= 400 && problem.status < 500) return;
        await new Promise((resolve) => setTimeout(resolve, LOST));
      }
    }
  }

  get #words() {
    const { status, value, error, pending } = this.outcome;
    const result = brief(value ?? null);
    return {
      done: `It ran and returned ${result.length > LONGEST ? `${result.slice(0, LONGEST)}…` : result}`,
      failed: `It did not succeed: ${error?.message ?? "no reason was given"}`,
      waiting: `It waits again${pending?.reason ? `: ${pending.reason}` : ""}`,
      approved: "It is approved and has not started yet",
      running: "It is running",
    }[status];
  }

  render() {
    return this.outcome ? html`<p class="notice ${{ done: "good", failed: "bad", waiting: "warn" }[this.outcome.status] ?? ""}" role="status">${shown(this.#words)}.</p>` : nothing;
  }
}
customElements.define("holdfast-outcome", Outcome);
