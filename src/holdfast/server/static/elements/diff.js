// Rendering of differences: lines [mark, text, old number, new number] with the mark " ", "+", "-", or "@" for a header.
// Long unchanged parts are folded, and the changed words of a changed line are marked.
// This is not based on Element: base.js imports values.js, which imports this file.
import { LitElement, html, nothing } from "lit";
import { shown } from "./values.js";
import { commonOrder, visible } from "../text.js";

const BLOCK = 200; // lines: the browser lays out only the blocks near the screen
const AROUND = 3; // unchanged lines that stay beside a change
const FOLDED = 6; // fewer unchanged lines are not folded
const LONGEST = 2000; // characters of a line whose words are compared
const WORDS = 10_000; // pairs of words that are compared
const ALIKE = 0.3; // share of two lines that must be the same: else marks would only be noise
const PAIRS = 5000; // changed lines: more have no marked words, which takes too long

/** Render lines. `whole`: nothing is folded, because the unchanged lines are part of what is approved. */
export function diffLines(lines, { whole = false } = {}) {
  const numbers = lines.flatMap(([, , old, now]) => [old ?? 0, now ?? 0]).reduce((a, b) => Math.max(a, b), 0);
  const marks = changedWords(lines);
  return html`<div class="diff ${numbers ? "numbered" : ""} ${numbers > 999 ? "long" : ""}" role="group" aria-label="Differences">${blocks(whole ? lines : fold(lines), marks)}</div>`;
}

function blocks(items, marks) {
  const all = [];
  for (let at = 0; at < items.length; at += BLOCK) all.push(items.slice(at, at + BLOCK));
  return all.map((block) => html`<div class="block">${block.map((item) => (item.folded ? html`<holdfast-fold .lines=${item.folded}></holdfast-fold>` : diffLine(item, marks)))}</div>`);
}

const KINDS = { "+": ["added", "added: "], "-": ["removed", "removed: "], "@": ["about"] };

function diffLine(line, marks) {
  const [mark, text, old, now] = line;
  const [kind, aloud] = KINDS[mark] ?? ["kept"];
  const words = marks.get(line);
  return html`<div class="line ${kind}" data-old=${old ?? nothing} data-new=${now ?? nothing}><span class="mark" aria-hidden="true">${mark === "@" ? "" : mark}</span>${
    aloud ? html`<span class="sr">${aloud}</span>` : nothing}<code>${words?.map(({ text, changed }) => (!changed ? shown(text) : mark === "+" ? html`<ins>${shown(text)}</ins>` : html`<del>${shown(text)}</del>`)) ?? shown(text)}</code></div>`;
}

// Replace the middle of long unchanged parts by {folded: lines}.
function fold(lines) {
  const out = [];
  for (let at = 0, end; at < lines.length; at = end) {
    for (end = at; end < lines.length && lines[end][0] === " "; ) end++;
    if (end === at) out.push(lines[end++]);
    else {
      const changed = (line) => line && line[0] !== "@";
      const from = changed(lines[at - 1]) ? at + AROUND : at;
      const to = changed(lines[end]) ? end - AROUND : end;
      if (to - from < FOLDED) out.push(...lines.slice(at, end));
      else out.push(...lines.slice(at, from), { folded: lines.slice(from, to) }, ...lines.slice(to, end));
    }
  }
  return out;
}

// Removed lines are compared with the added lines that follow them, one by one.
function changedWords(lines) {
  const marks = new Map();
  const pairs = [];
  for (let at = 0; at < lines.length; ) {
    const run = (mark) => {
      const from = at;
      while (at < lines.length && lines[at][0] === mark) at++;
      return lines.slice(from, at);
    };
    const before = run("-"), after = run("+");
    if (!before.length && !after.length) at++;
    for (let n = 0; n < Math.min(before.length, after.length); n++) pairs.push([before[n], after[n]]);
  }
  if (pairs.length <= PAIRS)
    for (const [before, after] of pairs) {
      const [old, now] = compareWords(before[1], after[1]) ?? [];
      if (old) marks.set(before, old).set(after, now);
    }
  return marks;
}

// A line with hidden characters or joined pictures is not split: a part alone might be shown differently.
const plain = (text) => text.length <= LONGEST && !/[\u200d\ufe0f]/.test(text) && visible(text).every((piece) => typeof piece === "string");

function compareWords(before, after) {
  if (!plain(before) || !plain(after)) return null;
  const [a, b] = [before, after].map((text) => text.match(/[\p{L}\p{N}\p{M}_]+|\s+|[^]/gu) ?? []);
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail);
  const middle = x.length * y.length > WORDS ? [...x.map((word) => ["-", word]), ...y.map((word) => ["+", word])] : commonOrder(x, y);
  const all = [...a.slice(0, head).map((word) => [" ", word]), ...middle, ...a.slice(a.length - tail).map((word) => [" ", word])];
  const same = all.reduce((sum, [mark, word]) => sum + (mark === " " ? word.trim().length : 0), 0);
  if (same < ALIKE * Math.max(before.trim().length, after.trim().length)) return null;
  return ["-", "+"].map((side) => {
    const pieces = [];
    for (const [mark, text] of all) {
      if (mark !== " " && mark !== side) continue;
      const changed = mark !== " ";
      if (pieces.at(-1)?.changed === changed) pieces.at(-1).text += text;
      else pieces.push({ text, changed });
    }
    return pieces;
  });
}

// <holdfast-fold>: unchanged lines that are rendered when they are opened. Property lines.
class Fold extends LitElement {
  static properties = { lines: {}, open: { state: true } };

  createRenderRoot() {
    return this;
  }

  render() {
    return html`<details class="fold" ?open=${this.open} @toggle=${(event) => (this.open = event.target.open)}><summary>${this.lines.length} unchanged lines</summary>${
      this.open ? blocks(this.lines, new Map()) : nothing}</details>`;
  }
}
customElements.define("holdfast-fold", Fold);
