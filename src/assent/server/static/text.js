// What people read: hidden characters made visible, differences, durations, JSON. No DOM, no framework.

// Bidirectional controls, zero-width and other invisible characters, and control characters other than tab and newline.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffc\ud800-\udfff\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/gu;
const NAMES = {
  0x00ad: "soft hyphen", 0x061c: "Arabic letter mark", 0x200b: "zero-width space", 0x200c: "zero-width non-joiner",
  0x200d: "zero-width joiner", 0x200e: "left-to-right mark", 0x200f: "right-to-left mark",
  0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding", 0x202c: "pop directional formatting",
  0x202d: "left-to-right override", 0x202e: "right-to-left override", 0x2060: "word joiner",
  0x2066: "left-to-right isolate", 0x2067: "right-to-left isolate", 0x2068: "first strong isolate",
  0x2069: "pop directional isolate", 0xfeff: "zero-width no-break space",
};
const PICTURE = /\p{Extended_Pictographic}|[\u{1f3fb}-\u{1f3ff}]/u;

/** Pieces of a text: strings, and {code, name} where a character would not be seen. */
export function visible(text) {
  const pieces = [];
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const at = found.index;
    const code = found[0].codePointAt(0);
    if (code === 0x200d && joinsPictures(text, at)) continue; // a family, a profession: one picture
    if (at > from) pieces.push(text.slice(from, at));
    pieces.push({ code: `U+${code.toString(16).toUpperCase().padStart(4, "0")}`, name: NAMES[code] ?? "invisible character" });
    from = at + found[0].length;
  }
  if (from < text.length) pieces.push(text.slice(from));
  return pieces;
}

function joinsPictures(text, at) {
  const before = text.slice(Math.max(0, at - 4), at).replace(/\ufe0f$/, "");
  return PICTURE.test([...before].at(-1) ?? "") && PICTURE.test(text.slice(at + 1, at + 3));
}

/** Line by line: [" " | "-" | "+", line]. Beyond the bound, all old lines and then all new ones. */
export function lineDiff(before, after) {
  const a = before.split("\n"), b = after.split("\n");
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail);
  const same = (lines) => lines.map((line) => [" ", line]);
  const middle = x.length * y.length > 1_000_000
    ? [...x.map((line) => ["-", line]), ...y.map((line) => ["+", line])]
    : longestCommon(x, y);
  return [...same(a.slice(0, head)), ...middle, ...same(tail ? a.slice(-tail) : [])];
}

function longestCommon(x, y) {
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

/** The lines of a unified diff, or null where the text is none. */
export function unifiedDiff(text) {
  if (typeof text !== "string" || !/^@@ -\d/m.test(text) || !/^(---|\+\+\+) /m.test(text)) return null;
  return text.replace(/\n$/, "").split("\n").map((line) => {
    if (/^(---|\+\+\+|@@|diff |index )/.test(line)) return ["@", line];
    return "+-".includes(line[0]) && line ? [line[0], line.slice(1)] : [" ", line.replace(/^ /, "")];
  });
}

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const json = (value) => JSON.stringify(value, null, 2) ?? "";
export const brief = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

/** Whether two JSON values are the same, whatever the order of their keys. */
export function same(a, b) {
  if (a === b) return true;
  if (Array.isArray(a)) return Array.isArray(b) && a.length === b.length && a.every((item, i) => same(item, b[i]));
  if (!isObject(a) || !isObject(b)) return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((key) => key in b && same(a[key], b[key]));
}

/** 12 ms, 9.4 s, 9 s, 1:05, 2:03:04, 6 days. */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.1) return `${Math.ceil(s * 1000)} ms`;
  if (s < 10) return `${Number.isInteger(s) ? s : s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s >= 172_800) return `${Math.floor(s / 86_400)} days`;
  const pad = (n) => String(Math.floor(n)).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${pad(s % 60)}` : `${Math.floor(s / 3600)}:${pad((s / 60) % 60)}:${pad(s % 60)}`;
}

/** A date and a time, as this browser writes them. */
export const when = (at) => new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

/** When it was, for people: "now", "4 min", "3 h", a date. */
export function ago(at, now) {
  const s = now - at;
  if (s < 60) return "now";
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h`;
  return new Date(at * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** What was decided, and by whom. */
export function outcome({ type }, by) {
  const words = { approve: "approved", deny: "denied", answer: "answered", client_result: "run in a browser", submit: "done by hand", failed: "tried", expired: "expired: nobody answered in time", detached: "no page was there" };
  return `${words[type] ?? type}${by === "system" ? "" : ` by ${by}`}`;
}

/** What silence leads to. */
export function atZero(onExpiry) {
  if (isObject(onExpiry)) return `it is answered with ${brief(onExpiry.value)}`;
  return { deny: "it is denied", halt: "the turn stops" }[onExpiry] ?? "the model is told that nobody answered";
}
