// <assent-markdown>: a model's text, as it grows.
//   property text: string
// Raw HTML is text; links go to http, https and mailto only; an image is a link to it, and is never fetched.
// Incremental: the text is cut into blocks, and only a block that has changed is rendered again.
import { Element, html, nothing, shown } from "./base.js";
import { guard } from "lit/directives/guard.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const BULLET = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Blocks, each its own source text: a fence is one block, as is whatever stands between empty lines. */
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
      // An item that goes on, or the next item: one list.
      if (open.length && BULLET.test(open[0])) open.push(line);
      else close();
    } else if (open.length && BULLET.test(open[0]) && open.at(-1).trim() === "" && !BULLET.test(line) && !/^\s/.test(line)) {
      close();
      open.push(line);
    } else if (/^#{1,6}\s/.test(line) || RULE.test(line)) {
      close();
      out.push(line);
    } else if (open.length && BULLET.test(line) && !BULLET.test(open[0]) && !/^\s*>/.test(open[0])) {
      close();
      open.push(line);
    } else open.push(line);
  }
  close();
  return out;
}

function block(source) {
  const lines = source.replace(/\n+$/, "").split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const ended = lines.length > 1 && FENCE.exec(lines.at(-1))?.[1].startsWith(fence[1]);
    const code = lines.slice(1, ended ? -1 : undefined).join("\n");
    return html`<pre class="code" data-language=${fence[2] || nothing} tabindex="0"><code>${shown(code)}</code></pre>`;
  }
  const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(lines[0]);
  if (heading) return html`<p class="heading h${heading[1].length}" role="heading" aria-level=${Math.min(6, heading[1].length + 2)}>${inline(heading[2])}</p>`;
  if (RULE.test(lines[0]) && lines.length === 1) return html`<hr>`;
  if (lines.every((line) => /^\s*>/.test(line))) return html`<blockquote>${blocks(lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n")).map(block)}</blockquote>`;
  if (BULLET.test(lines[0])) return list(lines);
  if (lines.length > 1 && lines[0].includes("|") && DIVIDER.test(lines[1])) return grid(lines);
  return html`<p>${lines.map((line, i) => html`${i ? (/( {2}|\\)$/.test(lines[i - 1]) ? html`<br>` : "\n") : nothing}${inline(line.replace(/( {2,}|\\)$/, ""))}`)}</p>`;
}

function list(lines) {
  const [, indent, mark] = BULLET.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = BULLET.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${indent.length + mark.length + 1}}`), ""));
  }
  const rendered = items.map((item) => {
    const task = /^\[([ xX])\]\s+(.*)$/.exec(item[0]);
    const [first, ...rest] = task ? [task[2], ...item.slice(1)] : item;
    return html`<li>${task ? html`<span class="task">${task[1] === " " ? "☐" : "☑"} </span>` : nothing}${inline(first)}${blocks(rest.join("\n")).map(block)}</li>`;
  });
  return /\d/.test(mark) ? html`<ol start=${parseInt(mark, 10)}>${rendered}</ol>` : html`<ul>${rendered}</ul>`;
}

function grid(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
  const [head, , ...rows] = lines;
  return html`<div class="grid" tabindex="0" role="group" aria-label="Table"><table><thead><tr>${cells(head).map((cell) => html`<th scope="col">${inline(cell)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table></div>`;
}

// The first of: code, image, link, address, bold, italic, struck, an escaped mark.
const INLINE = /(`+)(.+?)\1(?!`)|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)|\b(https?:\/\/[^\s<>"'`\])]+[^\s<>"'`\]).,;:!?])|\*\*(?=\S)(.+?\S?)\*\*|__(?=\S)(.+?)__(?!\w)|\*(?=[^\s*])(.+?)\*(?!\*)|(?<!\w)_(?=[^\s_])(.+?)_(?!\w)|~~(?=\S)(.+?)~~|\\([\\`*_{}\[\]()#+\-.!|~>])/;

export function inline(text, depth = 0) {
  const out = [];
  while (text) {
    const found = depth > 8 ? null : INLINE.exec(text);
    if (!found) return [...out, shown(text)];
    if (found.index) out.push(shown(text.slice(0, found.index)));
    const [all, , code, bang, label, target, address, strong, strong2, em, em2, struck, mark] = found;
    if (code !== undefined) out.push(html`<code>${shown(code.trim() || code)}</code>`);
    else if (target !== undefined) out.push(link(target, bang ? html`image: ${shown(label || target)}` : inline(label, depth + 1), all));
    else if (address) out.push(link(address, shown(address), all));
    else if (strong ?? strong2) out.push(html`<strong>${inline(strong ?? strong2, depth + 1)}</strong>`);
    else if (em ?? em2) out.push(html`<em>${inline(em ?? em2, depth + 1)}</em>`);
    else if (struck) out.push(html`<s>${inline(struck, depth + 1)}</s>`);
    else out.push(mark);
    text = text.slice(found.index + all.length);
  }
  return out;
}

function link(target, label, source) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    return shown(source); // a relative address would lead into this page
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return shown(source);
  return html`<a href=${url.href} title=${url.href} target="_blank" rel="noopener noreferrer">${label}</a>`;
}

class Markdown extends Element {
  static properties = { text: {} };

  render() {
    return blocks(this.text ?? "").map((source) => guard([source], () => block(source)));
  }
}
customElements.define("assent-markdown", Markdown);
