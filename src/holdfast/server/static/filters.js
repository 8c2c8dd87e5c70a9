// The filters of the inbox: pure functions over pending calls. A filter is the query of the page's address, such as
// "q=lamp+high&tool=refund&sort=oldest", so that it can be shared and saved.
import { byDeadline } from "./client.js";
import { brief } from "./text.js";

const HOUR = 3600, DAY = 86_400;
export const KINDS = { approval: "Approvals", elicitation: "Questions", manual: "Manual tasks", client_exec: "Browser" };
export const CHIPS = { elicitation: "question", manual: "manual", client_exec: "browser" };
export const AGES = { "1h": ["over an hour", HOUR], "1d": ["over a day", DAY], "1w": ["over a week", 7 * DAY] };
export const DUES = { "1h": ["within an hour", HOUR], "1d": ["within a day", DAY], "1w": ["within a week", 7 * DAY] };
export const SORTS = { "": "Deadline", oldest: "Oldest", risk: "Risk" };
const RISKS = ["high", "medium", "low"];
/** Filters by a field of the call: name -> the field's text. */
export const FIELDS = { tool: ({ tool }) => tool, risk: ({ kind, risk }) => (kind === "approval" ? risk : ""), agent: ({ agent }) => agent ?? "", requester: ({ principal }) => principal?.id ?? "" };
const NAMES = ["q", "kind", ...Object.keys(FIELDS), "age", "due", "sort"];

/** Return the filters in a query, {name: text}; unknown names are ignored. */
export function readFilters(query) {
  const given = new URLSearchParams(query);
  return Object.fromEntries(NAMES.map((name) => [name, given.get(name) ?? ""]));
}

export const writeFilters = (filters) => new URLSearchParams(NAMES.filter((name) => filters[name]).map((name) => [name, filters[name]])).toString();

/** Return the names of the filters that hide calls. */
export const activeFilters = (filters) => NAMES.filter((name) => name !== "sort" && filters[name]);

const texts = new WeakMap(); // pending call -> its text in lower case

function textOf(entry, title) {
  let known = texts.get(entry);
  if (known?.title !== title) {
    const { tool, prompt, conversation, agent, principal, risk, kind, args } = entry;
    const all = [tool, prompt, conversation, title, agent, principal?.id, kind === "approval" ? `${risk} risk` : "", kind, CHIPS[kind], brief(args)];
    texts.set(entry, (known = { title, text: all.join(" ").toLowerCase() }));
  }
  return known.text;
}

/** Return a function that says whether a call has every word and fits all other filters; titleOf(entry) is its title. */
export function matcher(filters, now, titleOf) {
  const words = filters.q.toLowerCase().split(/\s+/).filter(Boolean);
  const fields = Object.entries(FIELDS).filter(([name]) => filters[name]);
  const age = AGES[filters.age]?.[1] ?? -Infinity, due = DUES[filters.due]?.[1] ?? Infinity;
  return (entry) =>
    (!filters.kind || entry.kind === filters.kind) &&
    fields.every(([name, field]) => field(entry) === filters[name]) &&
    now - entry.since >= age && entry.deadline - now <= due &&
    (!words.length || words.every((word) => textOf(entry, titleOf(entry)).includes(word)));
}

/** Return the order of calls; calls that it does not distinguish stay in that of their deadlines, as in the client. */
export const order = (sort) => (a, b) => ({ oldest: a.since - b.since, risk: rank(a) - rank(b) })[sort] || byDeadline(a, b);
const rank = (entry) => RISKS.indexOf(FIELDS.risk(entry)) >>> 0;

/** Return the values of a field in these calls, sorted, and the chosen one. */
export const choices = (name, entries, chosen) => [...new Set([...entries.map(FIELDS[name]), chosen])].filter(Boolean).sort();

// --- filters saved by name, in this browser ---

const SAVED = "holdfast.filters";

/** Return [name, query] pairs in the order of their names. */
export function savedFilters() {
  try {
    const saved = Object.entries(JSON.parse(localStorage.getItem(SAVED) ?? "{}"));
    return saved.filter(([, query]) => typeof query === "string").sort(([a], [b]) => a.localeCompare(b));
  } catch {
    return []; // another program's data, or no storage
  }
}

/** Save a filter under a name. With an old name it is renamed; without a name the old one is deleted. */
export function saveFilter(name, query, old = "") {
  const saved = new Map(savedFilters());
  saved.delete(old);
  if (name) saved.set(name, query);
  localStorage.setItem(SAVED, JSON.stringify(Object.fromEntries(saved)));
}
