// The card of an approved call inside its grace window: when it runs, and a button that takes the approval back.
import { html, nothing } from "lit";
import { shown } from "./values.js";
import { spelled, startsIn } from "../text.js";

const span = (seconds) => (seconds % 60 || seconds < 60 ? `${seconds} seconds` : seconds > 60 ? `${seconds / 60} minutes` : "one minute");

/** Return the notice on a card that says how long an approval can be taken back. */
export const graceNotice = ({ grace }) => (grace ? html`<p class="about">Once approved, it runs after ${span(grace)}; until then the approval can be taken back.</p>` : nothing);

/** Return the content of an approval's card while its window is open. */
export function graceCard(card) {
  const { pending, client, busy } = card;
  const by = pending.approved_by === client.principal ? "You" : shown(pending.approved_by);
  return html`<article class="card approval approved risk-${pending.risk}" tabindex="-1" aria-label="Approved: ${spelled(pending.prompt || pending.tool)}">
    <header><h3>${shown(pending.prompt || `Run ${pending.tool}?`)}</h3></header>
    <div class="facts">${card.about(html`<span class="chip good">approved</span>`)}
      <p class="notice good" role="status">${by} approved it.</p>
      <p class="about">It ${startsIn(pending.starts_at - client.now())}.</p></div>
    ${card.refusal()}
    ${card.problem?.final ? nothing : html`<div class="actions"><button type="button" class="undo" ?disabled=${Boolean(busy)} @click=${() => card.decide({ type: "take_back" })}>${card.label("take_back", "Undo")}</button></div>`}
  </article>`;
}
