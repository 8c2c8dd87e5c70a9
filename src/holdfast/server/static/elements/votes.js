// Who may decide about a call, and who has approved it: in cards, rows and batches.
import { html, nothing } from "lit";
import { shown } from "./values.js";
import { listed, moment, people } from "../text.js";

/** Return whether a call needs several approvers. They approve it as it is shown, once: it can be neither edited nor remembered. */
export const several = ({ kind, approvers }) => kind === "approval" && approvers > 1;

export const missing = ({ approvers, votes }) => approvers - votes.length;

/** Return whether a principal has approved the call, or a deputy has for this principal. */
export const hasVoted = (pending, me) => several(pending) && pending.votes.some(({ by, on_behalf_of: other }) => by.id === me || other?.id === me);

/** Return why the server would refuse every decision of this page's principal: "requester", "role", or "" if it would not.
 *
 * A deputy has the roles of the principal for whom it decides; neither of the two may be the requester.
 */
export const barred = (pending, client) => (decider(pending, client) ? "" : reason(pending, client.principal, self(client)));

/** Return the principal, {id}, for whom this page's principal would decide as a deputy; null if for itself, or not at all. */
export function represented(pending, client) {
  const acting = decider(pending, client);
  return acting && acting.id !== client.principal ? acting : null;
}

const self = ({ principal: id, roles }) => ({ id, roles });

const decider = (pending, client) =>
  [self(client), ...client.deputyOf].find((acting, n) => !reason(pending, client.principal, acting) && !(n && hasVoted(pending, acting.id)));

// As decider_refusal in core/decisions.py.
function reason({ kind, not_requester, principal, approver_roles: needed = [], escalated_to: escalated = [] }, me, { id, roles = [] }) {
  if (kind !== "approval" || me === null) return "";
  if (not_requester && [me, id].includes(principal?.id)) return "requester";
  return !needed.length || roles.some((role) => needed.includes(role)) || [id, ...roles].some((name) => escalated.includes(name)) ? "" : "role";
}

/** "1 of 2 approved", or nothing if one approval is enough. */
export const tally = (pending) => (several(pending) ? `${pending.votes.length} of ${pending.approvers} approved` : "");

/** Render in words who may decide about a call, and who has approved it. */
export function deciders(pending, client) {
  const { principal, not_requester, voided = [], approver_roles: roles = [], escalate_to: later = [], escalate_at: at, escalated_to: now = [] } = pending;
  const me = client.principal, today = client.now(), why = barred(pending, client), other = represented(pending, client);
  const voter = (by) => (by.id === me ? "you" : shown(by.id));
  return html`
    ${several(pending) ? html`<p class="about">It needs the approval of ${pending.approvers} people; <b>${pending.votes.length ? `${missing(pending)} more ${missing(pending) > 1 ? "are" : "is"} missing` : "nobody has approved it yet"}</b>.</p>` : nothing}
    ${several(pending) && pending.votes.length ? html`<ul class="voters">${pending.votes.map((vote) => html`<li><b>${vote.by.id === me ? "You" : shown(vote.by.id)}</b>${vote.on_behalf_of ? html` for <b>${voter(vote.on_behalf_of)}</b>` : nothing} approved, <time>${moment(vote.at, today)}</time></li>`)}</ul>` : nothing}
    ${voided.length ? html`<p class="notice warn">${shown(listed(voided))} had approved an earlier plan; ${voided.length > 1 ? "they are" : `${shown(voided[0])} is`} asked again.</p>` : nothing}
    ${roles.length ? html`<p class="about">Only people with the role <b>${shown(listed(roles, "or"))}</b> may decide.</p>` : nothing}
    ${why === "role" ? html`<p class="notice warn">You do not have ${roles.length > 1 ? "any of these roles" : "this role"}, so another person has to decide about it.</p>` : nothing}
    ${other ? html`<p class="about">You decide about it for <b>${shown(other.id)}</b>, as a deputy.</p>` : nothing}
    ${why === "requester" ? html`<p class="notice warn">You asked for this call, so another person has to decide about it.</p>`
      : not_requester ? html`<p class="about"><b>${shown(principal?.id ?? "The requester")}</b>, who asked for it, may not decide.</p>` : nothing}
    ${now.length ? html`<p class="about">Escalated to <b>${shown(listed(now))}</b>, who may decide as well.</p>`
      : at && later.length ? html`<p class="about">From ${moment(at, today)} <b>${shown(listed(later))}</b> may decide as well.</p>` : nothing}`;
}

/** Return why a call no longer waits, from the problem of a decision: "decided by ada"; "" if it still waits, or for another reason. */
export function meanwhile({ status, details: { reason, winner } = {} }, me) {
  if (status !== 409 && status !== 410) return "";
  return winner ? `decided by ${winner === me ? "you" : winner}` : { expired: "expired", cancelled: "cancelled", resolved: "decided", unknown: "cancelled", phase: "decided" }[reason] ?? "";
}

/** Describe the results of a batch: "2 approved, 1 waits for one more approver, 1 was decided by ada meanwhile, 1 failed." */
export function summary(results, denied, me) {
  const accepted = results.filter((result) => !result.problem), late = new Map();
  for (const { problem } of results) {
    const why = problem && meanwhile(problem, me);
    if (why) late.set(why, (late.get(why) ?? 0) + 1);
  }
  const waiting = accepted.filter((result) => result.missing > 0);
  const done = accepted.length - waiting.length, failed = results.length - accepted.length - [...late.values()].reduce((all, n) => all + n, 0);
  const counts = new Set(waiting.map((result) => result.missing));
  const approvers = counts.size === 1 ? people([...counts][0], "more approver") : "more approvers";
  return [
    done || !waiting.length ? `${done} ${denied ? "denied" : "approved"}` : "",
    waiting.length ? `${waiting.length} ${waiting.length > 1 ? "wait" : "waits"} for ${approvers}` : "",
    ...[...late].map(([why, n]) => (why === "expired" ? `${n} expired meanwhile` : `${n} ${n > 1 ? "were" : "was"} ${why} meanwhile`)),
    failed ? `${failed} failed` : "",
  ].filter(Boolean).join(", ") + ".";
}
