// Text for people: hidden characters made visible, differences, durations, exact JSON.

// Bidirectional, zero-width and other invisible characters, and controls other than tab and newline.
const HIDDEN = /(?![\t\n])[\p{Cc}\p{Cs}\p{DI}\u2028\u2029\u2800\ufff9-\ufffc]/gu;
const PICTURE = /\p{Extended_Pictographic}|[\u{1f3fb}-\u{1f3ff}]/u;

/** Split a text into strings, and {code} for each invisible character. */
export function visible(text) {
  const pieces = [];
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const at = found.index;
    const code = found[0].codePointAt(0);
    if (ofPicture(text, at, code)) continue;
    if (at > from) pieces.push(text.slice(from, at));
    pieces.push({ code: `U+${code.toString(16).toUpperCase().padStart(4, "0")}` });
    from = at + found[0].length;
  }
  if (from < text.length) pieces.push(text.slice(from));
  return pieces;
}

// Joiners and variation selectors within an emoji are not hidden characters.
function ofPicture(text, at, code) {
  const last = (before) => PICTURE.test([...before.slice(-3)].at(-1) ?? "");
  const before = text.slice(Math.max(0, at - 4), at);
  if (code === 0xfe0f) return last(before) || (text[at + 1] === "\u20e3" && /[0-9#*]$/.test(before));
  return code === 0x200d && last(before.replace(/\ufe0f$/, "")) && PICTURE.test(text.slice(at + 1, at + 3));
}

/** Return the same as one string, for options, labels and titles. */
export const spelled = (text) => visible(String(text)).map((piece) => piece.code ?? piece).join("");

/** Return [" " | "-" | "+", line, old number, new number] for each line; for very long texts all old lines and then all new ones. */
export function lineDiff(before, after) {
  const a = before.split("\n"), b = after.split("\n");
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail);
  const same = (lines) => lines.map((line) => [" ", line]);
  const middle = x.length * y.length > 1_000_000
    ? [...x.map((line) => ["-", line]), ...y.map((line) => ["+", line])]
    : commonOrder(x, y);
  let old = 1, now = 1;
  return [...same(a.slice(0, head)), ...middle, ...same(tail ? a.slice(-tail) : [])]
    .map(([mark, line]) => [mark, line, mark === "+" ? undefined : old++, mark === "-" ? undefined : now++]);
}

/** Return [" " | "-" | "+", item] pairs of two lists, with as many common items as possible. */
export function commonOrder(x, y) {
  const width = y.length + 1;
  const table = new Uint32Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      table[i * width + j] = x[i] === y[j]
        ? table[(i + 1) * width + j + 1] + 1
        : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  const out = [];
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) out.push([" ", x[i++]]), j++;
    else if (i < x.length && (j >= y.length || table[(i + 1) * width + j] >= table[i * width + j + 1])) out.push(["-", x[i++]]);
    else out.push(["+", y[j++]]);
  }
  return out;
}

/** Return the lines of a unified diff, or null if the text is not one. */
export const unifiedDiff = (text) => (typeof text === "string" && /^@@ -\d/m.test(text) && /^(---|\+\+\+) /m.test(text) ? diffOf(text) : null);

/** Return [mark, line, old number, new number] for each line of a unified diff; the mark is "@" for headers.
 *
 * Headers are told from content by the counts of the hunk: a removed line "-- x" looks like the header of a file.
 */
export function diffOf(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  let old, now, oldLeft = 0, newLeft = 0, inHunk = false;
  return lines.map((line, at) => {
    const hunk = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/.exec(line);
    if (hunk) {
      [old, oldLeft, now, newLeft] = [1, 2, 3, 4].map((group) => Number(hunk[group] ?? 1));
      inHunk = true;
    } else if (inHunk && !isHeader(lines, at, oldLeft + newLeft > 0)) {
      if (line[0] === "\\") return ["@", line];
      const rest = line.slice(1);
      if (line[0] !== "+") oldLeft--;
      if (line[0] !== "-") newLeft--;
      if (line[0] === "-") return ["-", rest, old++];
      return line[0] === "+" ? ["+", rest, undefined, now++] : [" ", line.replace(/^ /, ""), old++, now++];
    } else inHunk = false;
    return ["@", line];
  });
}

// Within a hunk only the headers of another file can be followed by "@@": content begins with a blank, + or -.
function isHeader(lines, at, within) {
  const file = lines[at].startsWith("--- ") && lines[at + 1]?.startsWith("+++ ");
  return within ? file && lines[at + 2]?.startsWith("@@ -") : file || !/^([-+ \\]|$)/.test(lines[at]);
}

/** 812 bytes, 33 kB, 1.2 MB. */
export function bytes(size) {
  if (size < 1000) return `${size} byte${size === 1 ? "" : "s"}`;
  return size < 1e6 ? `${Math.round(size / 1000)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}

/** Return whether a value is a checklist as update_plan records it. */
export const isChecklist = (list) => Array.isArray(list) && list.every((each) => isObject(each) && typeof each.content === "string" && ["pending", "in_progress", "completed"].includes(each.status));

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// Integers that a double would round are BigInts, and pass through JSON as strings with a random mark.
const MARK = crypto.getRandomValues(new Uint32Array(4)).join("-") + ":";
const MARKED = new RegExp(`"${MARK}(-?\\d+)"`, "g");
const unsafe = (text) => /^-?\d{16,}$/.test(text) && !Number.isSafeInteger(Number(text));

export function number(text) {
  if (unsafe(text)) return BigInt(text);
  if (!Number.isFinite(Number(text))) throw new SyntaxError("no number");
  return Number(text);
}

export function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  let rounds = false; // digests have many digits, too: the reviver is called only if it is needed, because it is slow
  const marked = text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*/g, (found) => (unsafe(found) ? ((rounds = true), `"${MARK}${found}"`) : found));
  if (!rounds) return JSON.parse(text);
  return JSON.parse(marked, (_, value) => (typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value));
}

export const json = (value, indent = 2) =>
  (JSON.stringify(value, (_, each) => (typeof each === "bigint" ? MARK + each : each), indent) ?? "").replace(MARKED, "$1");
export const brief = (value) => (typeof value === "string" ? value : json(value, 0));

/** Return whether two JSON values are equal, regardless of the order of keys. */
export function same(a, b) {
  if (a === b) return true;
  if (Array.isArray(a)) return Array.isArray(b) && a.length === b.length && a.every((item, i) => same(item, b[i]));
  if (!isObject(a) || !isObject(b)) return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((key) => key in b && same(a[key], b[key]));
}

/** 12 ms, 9.4 s, 9 s, 1:05, 2:03:04, 6 days. Days are rounded up from 23 hours. */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.1) return `${Math.ceil(s * 1000)} ms`;
  if (s < 10) return `${Number.isInteger(s) ? s : s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  const days = Math.floor((s + 3600) / 86_400);
  if (days > 1) return `${days} days`;
  const pad = (n) => String(Math.floor(n)).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${pad(s % 60)}` : `${Math.floor(s / 3600)}:${pad((s / 60) % 60)}:${pad(s % 60)}`;
}

/** Return a date and time in the browser's format. */
export const when = (at) => new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

/** Return the time of day, and the date if it is not today's. */
export function moment(at, now) {
  const [then, today] = [at, now].map((seconds) => new Date(seconds * 1000));
  return then.toDateString() === today.toDateString() ? then.toLocaleTimeString(undefined, { timeStyle: "short" }) : when(at);
}

/** "ada", "ada and bob", "ada, bob and carl". */
export const listed = (names, word = "and") => (names.length > 1 ? `${names.slice(0, -1).join(", ")} ${word} ` : "") + (names.at(-1) ?? "");

/** Return who did what an event says: "ben", or "ben for ada" if ben is a deputy. */
export const actor = ({ by, on_behalf_of: other }) => (other ? `${by.id} for ${other.id}` : by.id);

/** "one more approver", "2 more approvers". */
export const people = (n, what) => (n === 1 ? `one ${what}` : `${n} ${what}s`);

/** Return the age of a time: "now", "4 min", "3 h", or a date. */
export function ago(at, now) {
  const s = now - at;
  if (s < 60) return "now";
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h`;
  return new Date(at * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** Return when an approved call runs, by the seconds until then: "runs in 30s". */
export const startsIn = (left) => (left > 0 ? `runs in ${duration(Math.ceil(left))}` : "is about to run");

/** Describe a decision with its principal and reason. */
export function outcome({ type, asked, args, reason, voided, takenBack }, by) {
  if (type === "detached") return "No open page could run this.";
  if (type === "failed" && asked === "client_exec") return by === "system" ? "failed in a browser" : `failed in the browser of ${by}`;
  const words = { approve: takenBack ? "an approval was taken back, given" : voided ? "an earlier plan was approved" : args ? "approved as edited" : "approved", deny: "denied", answer: "answered", client_result: "run in a browser", submit: "done manually", failed: "reported as failed", expired: "expired: nobody answered in time" };
  return `${words[type] ?? type}${by === "system" ? "" : ` by ${by}`}${reason ? `: ${reason}` : ""}`;
}

/** Describe the arguments that a remembered approval covers. */
export function coverage({ remember, compares, args }) {
  if (remember !== "args") return "any arguments";
  if (!compares?.length) return "the same arguments";
  return compares.map((name) => (name in (args ?? {}) ? `${name} ${json(args[name], 0)}` : `no ${name}`)).join(", ");
}

/** Describe where a remembered approval holds; "" if in its own conversation only. */
export function reach({ scope, user }) {
  return { user: `in every conversation of ${user}`, everyone: "in every conversation, for everyone" }[scope] ?? "";
}

/** Describe the effect of an expiry. */
export function atZero(onExpiry) {
  if (isObject(onExpiry)) return `it is answered with ${brief(onExpiry.value)}`;
  return { deny: "it is denied", halt: "the turn stops" }[onExpiry] ?? "the agent is told that nobody answered";
}
