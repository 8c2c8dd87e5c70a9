// <holdfast-markdown>: a model's text while it grows.
//   property text: string
// Raw HTML is shown as text; links lead to http, https and mailto only; an image becomes a link and is never fetched.
// Only changed blocks are rendered again. The work is linear in the length of any text: patterns are unambiguous, and
// their lookahead is bounded.
import { Element, html, nothing, shown } from "./base.js";
import { noChange } from "lit";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const BULLET = /^(\s{0,60})([-*+]|\d{1,9}[.)])\s/;
const QUOTE = /^\s{0,60}> ?/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const DEEPEST = 20; // nesting of quotes and lists

/** Split a text into blocks: a fence is one block, as is the text between empty lines. */
export function blocks(text) {
  const out = [];
  let open = [], fence = null;
  const close = () => {
    if (open.length) out.push(open.join("\n"));
    open = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      open.push(line);
      if (mark && mark[1].startsWith(fence) && !mark[2]) fence = null, close();
    } else if (mark && !/^\s/.test(line)) {
      close();
      fence = mark[1];
      open.push(line);
    } else if (!line.trim()) {
      // A continued item or the next item belongs to the same list.
      if (open.length && BULLET.test(open[0])) open.push(line);
      else close();
    } else if (open.length && BULLET.test(open[0]) && open.at(-1).trim() === "" && !BULLET.test(line) && !/^\s/.test(line)) {
      close();
      open.push(line);
    } else if (/^#{1,6}\s/.test(line) || RULE.test(line)) {
      close();
      out.push(line);
    } else if (open.length && BULLET.test(line) && !BULLET.test(open[0]) && !QUOTE.test(open[0])) {
      close();
      open.push(line);
    } else open.push(line);
  }
  close();
  return out;
}

function block(source, depth = 0) {
  const lines = source.replace(/(?<!\n)\n+$/, "").split("\n");
  const inside = (text) => blocks(text).map((each) => block(each, depth + 1));
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const ended = lines.length > 1 && FENCE.exec(lines.at(-1))?.[1].startsWith(fence[1]);
    const code = lines.slice(1, ended ? -1 : undefined).join("\n");
    return html`<pre class="code" data-language=${fence[2] || nothing} tabindex="0"><code>${shown(code)}</code></pre>`;
  }
  const heading = /^(#{1,6})\s(.*)/s.exec(lines[0]);
  if (heading) return html`<p class="heading h${heading[1].length}" role="heading" aria-level=${Math.min(6, heading[1].length + 2)}>${inline(heading[2].trim().replace(/(?<!#)#+$/, "").trimEnd())}</p>`;
  if (RULE.test(lines[0]) && lines.length === 1) return html`<hr>`;
  if (depth < DEEPEST && lines.every((line) => QUOTE.test(line))) return html`<blockquote>${inside(lines.map((line) => line.replace(QUOTE, "")).join("\n"))}</blockquote>`;
  if (depth < DEEPEST && BULLET.test(lines[0])) return list(lines, inside);
  if (lines.length > 1 && lines[0].includes("|") && cells(lines[1]).every((cell) => /^:?-+:?$/.test(cell))) return grid(lines);
  const broken = (line) => line.endsWith("  ") || line.endsWith("\\");
  return html`<p>${lines.map((line, i) => html`${i ? (broken(lines[i - 1]) ? html`<br>` : "\n") : nothing}${inline(broken(line) ? line.trimEnd().replace(/\\$/, "") : line)}`)}</p>`;
}

function list(lines, inside) {
  const [, indent, mark] = BULLET.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = BULLET.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([line.slice(found[0].length).trimStart()]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${indent.length + mark.length + 1}}`), ""));
  }
  const rendered = items.map((item) => {
    const task = /^\[([ xX])\]\s/.exec(item[0]);
    const [first, ...rest] = item;
    return html`<li>${task ? html`<span class="task">${task[1] === " " ? "☐" : "☑"} </span>` : nothing}${inline(task ? first.slice(4).trimStart() : first)}${inside(rest.join("\n"))}</li>`;
  });
  return /\d/.test(mark) ? html`<ol start=${parseInt(mark, 10)}>${rendered}</ol>` : html`<ul>${rendered}</ul>`;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

function grid(lines) {
  const [head, , ...rows] = lines;
  return html`<div class="grid" tabindex="0" role="group" aria-label="Table"><table><thead><tr>${cells(head).map((cell) => html`<th scope="col">${inline(cell)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table></div>`;
}

// In this order: code, image, link, address, bold, italic, strikethrough, escaped character.
const INLINE = /(?<!`)(`{1,3})(?!`)(.{1,500}?)(?<!`)\1(?!`)|(!?)\[((?:[^\[\]]|\[[^\[\]]{0,99}\]){0,500})\]\(\s{0,9}<?([^\s()<>]{0,2000}(?:\([^\s()]{0,99}\)[^\s()<>]{0,99}){0,9})>?(?:\s{1,9}"[^"]{0,500}")?\s{0,9}\)|\b(https?:\/\/[^\s<>"'`\])]+[^\s<>"'`\]).,;:!?])|\*\*(?=\S)(.{1,500}?\S?)\*\*|__(?=\S)(.{1,500}?)__(?!\w)|\*(?=[^\s*])(.{1,500}?)\*(?!\*)|(?<!\w)_(?=[^\s_])(.{1,500}?)_(?!\w)|~~(?=\S)(.{1,500}?)~~|\\([\\`*_{}\[\]()#+\-.!|~>])/;

export function inline(text, depth = 0) {
  const out = [];
  while (text) {
    const found = depth > 8 ? null : INLINE.exec(text);
    if (!found) return [...out, shown(text)];
    if (found.index) out.push(shown(text.slice(0, found.index)));
    const [all, , code, bang, label, target, address, strong, strong2, em, em2, struck, mark] = found;
    if (code !== undefined) out.push(html`<code>${shown(code.trim() || code)}</code>`);
    else if (target !== undefined) out.push(link(target, bang ? html`image: ${shown(label || target)}` : inline(label, depth + 1), all, label));
    else if (address) out.push(link(address, shown(address), all, address));
    else if (strong ?? strong2) out.push(html`<strong>${inline(strong ?? strong2, depth + 1)}</strong>`);
    else if (em ?? em2) out.push(html`<em>${inline(em ?? em2, depth + 1)}</em>`);
    else if (struck) out.push(html`<s>${inline(struck, depth + 1)}</s>`);
    else out.push(mark);
    text = text.slice(found.index + all.length);
  }
  return out;
}

const HOST = /(?:[\p{L}\p{N}-]+\.)+\p{L}[\p{L}\p{N}-]+|\d+(?:\.\d+){3}/gu;
const PATH = /(?<!\/)\/(?!\/)\S*/g;

/** Return whether a text names a host (or what looks like one) that is neither this one nor a parent of it. */
function namesOther(text, host) {
  return (text.replace(PATH, " ").match(HOST) ?? []).slice(0, 20).some((name) => {
    const named = URL.parse?.(`http://${name}`)?.hostname ?? name.toLowerCase();
    return named !== host && !host.endsWith(`.${named}`);
  });
}

function link(target, label, source, text) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    return shown(source); // a relative address would point into this page
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return shown(source);
  const host = url.hostname || url.pathname.split("@").at(-1);
  return html`<a href=${url.href} title=${url.href} target="_blank" rel="noopener noreferrer">${label}</a>${namesOther(text, host) ? html` <span class="host">(leads to ${shown(url.host || url.pathname)})</span>` : nothing}`;
}

/** Show a block as plain text if rendering it fails. */
function safe(source) {
  try {
    return block(source);
  } catch {
    return html`<pre class="text">${shown(source)}</pre>`;
  }
}

class Markdown extends Element {
  static properties = { text: {} };

  render() {
    const old = this.drawn ?? [];
    this.drawn = blocks(this.text ?? "");
    return this.drawn.map((source, i) => (source === old[i] ? noChange : safe(source)));
  }
}
customElements.define("holdfast-markdown", Markdown);
