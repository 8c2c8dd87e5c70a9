// Folds the events of a log into a view: a timeline of items and a map of calls.
//
// view.items   messages and notes, in order, each with a key: {kind: "user" | "assistant" | "note", ...}
// view.calls   call id -> {tool, args, phase: "ready" | "waiting" | "running" | "done", pending, decisions, ok, ...}
// view.queue   messages that wait for a turn
// view.turn    the open turn, or null
// view.checklist  the agent's latest checklist: [{content, status, priority}], or null

import { actor, coverage, reach, isChecklist, isObject, listed, people, when } from "./text.js";

export function emptyView(conversation) {
  return { conversation, items: [], calls: new Map(), queue: [], turn: null, checklist: null, agent: "", seen: new Set(), title: "" };
}

const STOPPED = { step_limit: "step", token_limit: "token", cost_limit: "cost", time_limit: "time" };

export function apply(view, event) {
  const note = (text, tone = "info", details = "") =>
    view.items.push({ key: `n${event.seq}`, kind: "note", text, tone, details, at: event.at });
  switch (event.type) {
    case "ConversationOpened":
      view.agent = event.agent;
      break;
    case "MessageReceived":
      if (event.aside) {
        view.items.push({ key: `m${event.seq}`, kind: "user", seq: event.seq, text: event.text, by: event.by.id, at: event.at, aside: "asked while this waits" });
        break;
      }
      view.title ||= event.text.trim().slice(0, 80);
      view.queue.push({ key: `m${event.seq}`, kind: "user", seq: event.seq, text: event.text, by: event.by.id, at: event.at });
      break;
    case "TurnStarted": {
      const at = view.queue.findIndex((message) => message.seq === event.message);
      const [message] = at < 0 ? [] : view.queue.splice(at, 1);
      if (message) view.items.push(message);
      view.turn = { number: event.turn, by: message ? { id: message.by } : null };
      view.agent = event.agent;
      break;
    }
    case "AssistantSaid":
      addReply(view, event);
      break;
    case "AsideAnswered":
      view.seen.add(event.id);
      if (event.text || event.thinking)
        view.items.push({ key: event.id, kind: "assistant", seq: event.seq, at: event.at, text: event.text ?? "", thinking: event.thinking ?? "", partial: Boolean(event.error), calls: [], hosted: [] });
      if (event.error) note(`The question was not answered: ${event.error.message}`, event.error.kind === "cancelled" ? "info" : "bad", event.error.kind);
      break;
    case "OutputRejected":
      note("A reply was rejected; the model was asked again.", "warn", event.message);
      break;
    case "CallSuspended": {
      const call = callOf(view, event);
      const { seq, at, by, v, type, call_id, ...shown } = event;
      call.phase = "waiting";
      call.pending = {
        preview: null, preview_error: null, schema: null, choices: null, on_expiry: "error", risk: "low", recovery: false, reason: null, continues: false,
        approvers: 1, approver_roles: [], not_requester: false, escalate_to: [], escalate_at: null, escalated_to: [], voided: [], extend_until: null, remind: [],
        grace: 0, starts_at: null, approved_by: null, ...shown, conversation: view.conversation, call: call_id, seq, since: at, votes: [], agent: view.agent, principal: view.turn?.by ?? null,
      };
      call.pending.next_reminder = nextReminder(call.pending, at);
      if (event.voided?.length) call.decisions = call.decisions.map((each) => (each.type === "approve" ? { ...each, voided: true } : each));
      call.args = event.args;
      if (call.asked?.kind === event.kind && call.asked.digest !== event.digest) call.pending.before = call.asked;
      call.asked = call.pending;
      break;
    }
    case "CallResolved": {
      const call = callOf(view, event);
      call.decisions = [...call.decisions, { by: actor(event), at: event.at, seq: event.seq, ...event.decision, asked: event.kind }];
      if (event.starts_at) {
        if (call.pending) call.pending = { ...call.pending, starts_at: event.starts_at, approved_by: event.by.id };
        break;
      }
      const { type, stop } = event.decision;
      const again = type === "answer" || (type === "deny" && !stop && call.asked?.denial_continues);
      if (again && call.asked?.continues) call.continued = (call.continued ?? 0) + 1;
      call.pending = null;
      call.phase = "ready";
      break;
    }
    case "ApprovalTakenBack": {
      const call = callOf(view, event);
      call.decisions = call.decisions.map((each) => ([event.approval, event.vote ?? null].includes(each.seq) ? { ...each, takenBack: true } : each));
      if (call.pending) call.pending = { ...call.pending, starts_at: null, approved_by: null, deadline: event.deadline, votes: call.pending.votes.filter(({ seq }) => seq !== event.vote) };
      note(`${actor(event)} took the approval of ${toolOf(view, event)} back before it ran.`);
      break;
    }
    case "GraceEnded":
      Object.assign(callOf(view, event), { phase: "ready", pending: null });
      break;
    case "VoteCast":
      // The last vote is followed by its CallResolved.
      change(view, event, ({ votes }) => ({ votes: [...votes, { by: event.by, on_behalf_of: event.on_behalf_of, at: event.at, seq: event.seq }] }), ({ decisions }) =>
        event.missing ? { decisions: [...decisions, { by: actor(event), at: event.at, kind: "approval", seq: event.seq, type: "approve" }] } : {});
      note(`${actor(event)} approved ${toolOf(view, event)}${event.missing ? `; ${people(event.missing, "more approver")} ${event.missing > 1 ? "are" : "is"} needed` : ", as the last approver that was needed"}.`);
      break;
    case "DeadlineExtended":
      change(view, event, (pending) => ({ deadline: event.until, next_reminder: nextReminder({ ...pending, deadline: event.until }, event.at) }));
      note(`${actor(event)} gave ${toolOf(view, event)} more time: it expires ${when(event.until)}.`);
      break;
    case "ReminderDue":
      change(view, event, (pending) => ({ next_reminder: nextReminder(pending, pending.deadline - event.before) }));
      note(`Reminder: ${toolOf(view, event)} is still waiting.`);
      break;
    case "CallEscalated":
      change(view, event, () => ({ escalate_at: null, escalated_to: event.to }));
      note(`${toolOf(view, event)} has waited for long, so it was escalated to ${listed(event.to)}.`);
      break;
    case "CallStarted": {
      const call = callOf(view, event);
      Object.assign(call, { phase: "running", started: event.at, attempt: event.attempt, pending: null, grant: event.grant ?? call.grant });
      if (event.args) call.args = event.args;
      break;
    }
    case "CallReturned": {
      const call = callOf(view, event);
      const { ok, value, data, error, edited, artifact, size, images } = event;
      Object.assign(call, { phase: "done", pending: null, ended: event.at, ok, value, data, error, artifact, size, images });
      if (edited) Object.assign(call, { original: call.original ?? call.args, args: edited });
      view.checklist = checklistOf(event) ?? view.checklist;
      break;
    }
    case "CancelRequested":
      note(`Stopped by ${actor(event)}${event.reason ? `: ${event.reason}` : ""}.`);
      break;
    case "HistorySummarised":
      note("Beyond this point the model sees a summary of what came before. Nothing was deleted.", "info", event.text);
      break;
    case "TurnEnded":
      view.turn = null;
      for (const call of view.calls.values())
        if (call.phase !== "done") Object.assign(call, { phase: "done", pending: null, ok: false, error: { kind: "cancelled", message: "the turn has ended" } });
      if (event.reason === "failed") note(`The turn failed: ${event.error?.message ?? "no reason was given"}`, "bad", event.error?.kind ?? "");
      else if (event.reason in STOPPED) note(`The turn reached its ${STOPPED[event.reason]} limit.`, "warn");
      else if (event.halted) note(`The turn was halted: ${event.reason}`, "warn");
      break;
    case "GrantGiven":
      note(`${event.by.id} allowed ${event.tool} with ${coverage(event)}${reach(event) && ` ${reach(event)},`} from now on${event.until ? `, until ${when(event.until)}` : ""}.`);
      break;
    case "GrantRevoked":
      note(`${event.by.id} revoked a remembered approval.`);
      break;
    case "ResolutionRefused":
      note(`${event.by.id} may not decide this: ${event.reason}`, "warn");
      break;
    case "ConversationRenamed":
      view.title = event.title;
      note(`${event.by.id} renamed this conversation: ${event.title}`);
      break;
    case "ConversationArchived":
      note(event.archived ? `${event.by.id} archived this conversation.` : `${event.by.id} unarchived this conversation.`);
      break;
    case "ConversationImported":
      for (const call of view.calls.values()) call.pending = null;
      note(event.trusted ? `${event.by.id} imported this conversation from a file.` : `${event.by.id} imported this conversation from an untrusted file: it is read-only.`, event.trusted ? "info" : "warn");
  }
}

// Change the suspension that an event is about, if it is loaded. Cards compare the objects, so each change is a new one.
function change(view, { call_id, suspension }, fields, ofCall = () => ({})) {
  const call = view.calls.get(call_id);
  if (call) Object.assign(call, ofCall(call));
  if (call?.pending?.seq === suspension) call.pending = { ...call.pending, ...fields(call.pending) };
}

const toolOf = (view, { call_id }) => view.calls.get(call_id)?.tool || "a call";

/** Return when the next reminder after this time is due, or null. */
const nextReminder = ({ deadline, remind }, after) => (remind ?? []).map((before) => deadline - before).filter((at) => at > after).sort((a, b) => a - b)[0] ?? null;

/** Return the checklist that an event records: the data of the tool update_plan. Undefined if there is none. */
export function checklistOf({ type, ok, data }) {
  const { checklist } = type === "CallReturned" && ok && isObject(data) ? data : {};
  return isChecklist(checklist) ? checklist : undefined;
}

function addReply(view, event) {
  view.seen.add(event.id);
  const calls = event.calls ?? [];
  for (const made of calls)
    view.calls.set(made.id, {
      id: made.id, tool: made.tool, args: made.args, executor: made.executor ?? "server",
      phase: "ready", decisions: [], pending: null, grant: made.grant, said: true,
    });
  const hosted = hostedCalls(event.parts);
  if (event.partial && !event.text && !event.thinking) return;
  view.items.push({
    key: event.id, kind: "assistant", seq: event.seq, at: event.at, text: event.text ?? "", thinking: event.thinking ?? "",
    partial: event.partial ?? false, calls: calls.map((made) => made.id), hosted,
  });
}

// The calls that the provider ran itself, taken from the parts of the reply.
function hostedCalls(parts) {
  const found = new Map();
  for (const { kind, data } of Array.isArray(parts) ? parts : []) {
    if (kind === "hosted_call") found.set(data.id, { id: data.id, tool: data.tool, args: data.args ?? {}, executor: "provider", phase: "done", ok: true, decisions: [] });
    else if (kind === "hosted_result" && found.has(data.id)) found.get(data.id).value = data.content;
  }
  return [...found.values()];
}

/** Return a call by its id. A call without `said` belongs to a message that is not loaded. */
export function callOf(view, { call_id, tool }) {
  let call = view.calls.get(call_id);
  if (!call) {
    call = { id: call_id, tool: tool ?? "", args: {}, executor: "server", phase: "ready", decisions: [], pending: null };
    view.calls.set(call_id, call);
  }
  return call;
}
