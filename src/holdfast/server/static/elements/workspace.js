// Rendering of what the workspace tools return: plans of file changes and of commands, results, the checklist.
//
// Values are recognised by their shape. Fields that are not known here are shown as a table, so that nothing of what is
// approved is left out.
import { html, nothing } from "lit";
import { shown, value, table, rows, diffLines } from "./values.js";
import { isObject, isChecklist, diffOf, bytes } from "../text.js";

const isText = (it) => typeof it === "string";
const isArtifact = (it) => isObject(it) && isText(it.sha256) && typeof it.size === "number";
const isFile = (it) => isObject(it) && isText(it.path) && it.action in ACTIONS;
const isChange = (it) => isObject(it) && isText(it.path) && "before" in it && "after" in it && "kept" in it;
const all = (list, test) => Array.isArray(list) && list.length > 0 && list.every(test);

/** Render a value that has the shape of a plan or result of the workspace tools; null if it has not. */
export function workspaceValue(it, source) {
  if (!isObject(it)) return null;
  if (all(it.files, isFile)) return fileChanges(it, source);
  if (isFile(it)) return fileChanges({ files: [it] }, source);
  if (all(it.changes, isChange)) return keptContents(it, source);
  if (isText(it.command) && isObject(it.guarantees) && (it.argv === "opaque" || all(it.argv, isText))) return commandPlan(it, source);
  if ("exit_code" in it && isText(it.output)) return commandResult(it, source);
  if (isObject(it.guarantees) && isText(it.sandbox)) return sandboxFacts(it, source);
  if (isChecklist(it.checklist) && it.checklist.length) return html`<div class="checklist">${checklist(it.checklist)}</div>${others(it, ["checklist"], source)}`;
  return null;
}

// The fields that are not rendered otherwise.
function others(it, known, source) {
  const rest = Object.fromEntries(Object.entries(it).filter(([key]) => !known.includes(key)));
  return Object.keys(rest).length ? table(rest, source, 1) : nothing;
}

/** Render a part of an artifact, and a button that loads the whole of it.
 *
 * needed: the whole of it must be seen before the call can be approved. The attribute is set as soon as the card is
 * rendered, and again for another artifact; the element removes it when the content is there.
 */
export const artifact = (it, { client, conversation }, { what, head = null, cut = nothing, needed = false }) =>
  html`<holdfast-artifact .client=${client} .conversation=${conversation} .artifact=${it} .what=${what} .head=${head} .cut=${cut} unloaded=${needed ? it.sha256 : nothing}></holdfast-artifact>`;

// --- files ---

const ACTIONS = { create: ["new file", "good"], replace: ["changed", ""], delete: ["deleted", "bad"], unchanged: ["unchanged", ""] };

function fileChanges(it, source) {
  const { files, diff } = it;
  return html`<ul class="files">${files.map((file) => fileLine(file, source))}</ul>
    ${isArtifact(it.diff_artifact) ? wholeDiff(it, source) : diff ? diffLines(diffOf(diff)) : nothing}
    ${others(it, ["files", "diff", ...(isArtifact(it.diff_artifact) ? ["diff_cut", "diff_artifact"] : [])], source)}`;
}

/** Render the part of a long diff that a plan has, and a button that loads all of it. */
export const wholeDiff = (it, source) =>
  isArtifact(it?.diff_artifact) ? artifact(it.diff_artifact, source, { what: "diff", head: String(it.diff ?? ""), needed: true }) : nothing;

function fileLine(file, source) {
  const { path, action, added, removed, mode } = file;
  const [words, tone] = ACTIONS[action];
  return html`<li><code class="path">${shown(path)}</code> <span class="chip ${tone}">${words}</span>${
    added || removed ? html` <span class="counts"><span class="plus">+${added}</span> <span class="minus">−${removed}</span><span class="sr"> lines added and removed</span></span>` : nothing}${
    mode === undefined ? nothing : html` <span class="about">mode ${shown(String(mode).replace(/^0o/, ""))}</span>`}
    ${others(file, ["path", "action", "added", "removed", "mode", "before", "after", "version"], source)}</li>`;
}

// The data of a file tool's result: the contents before, which undo puts back.
function keptContents(it, source) {
  return html`<ul class="files">${it.changes.map((change) => html`<li><code class="path">${shown(change.path)}</code> <span class="chip">${change.before === null ? "new file" : change.after === null ? "deleted" : "changed"}</span>
    ${isText(change.kept) ? html`<span class="about">content before: <a href=${source.client.artifactAddress(source.conversation, change.kept)} download>save</a></span>` : nothing}
    ${others(change, ["path", "before", "after", "kept", "mode"], source)}</li>`)}</ul>${others(it, ["changes"], source)}`;
}

// --- commands ---

const PLAN = ["command", "argv", "executable", "executable_in_workspace", "cwd", "environment", "files", "timeout", "workspace", "sandbox", "guarantees", "guarantees_in_words"];

function commandPlan(it, source) {
  const { argv, executable, cwd, environment, files, timeout, workspace } = it;
  const facts = [];
  if (isText(executable)) facts.push(["Program", html`<code>${shown(executable)}</code>${it.executable_in_workspace ? html` <span class="chip warn">from the workspace</span>` : nothing}`]);
  if (isText(cwd)) facts.push(["Directory", cwd === "." ? "the workspace" : html`<code>${shown(cwd)}</code>`]);
  if (isText(workspace)) facts.push(["Workspace", shown(workspace)]);
  if (typeof timeout === "number") facts.push(["Time limit", `${timeout} s`]);
  if (Array.isArray(environment)) facts.push(["Variables", environment.length ? html`<code>${shown(environment.join(" "))}</code>` : "none"]);
  if (isObject(files)) facts.push(["Files", boundFiles(files)]);
  return html`<div class="command"><pre class="code">${shown(it.command)}</pre>
    ${argv === "opaque" ? html`<p class="notice warn">Runs in bash. The command was not analysed.</p>`
      : html`<p class="notice">Runs without a shell:</p><ol class="argv">${argv.map((word) => html`<li><code>${word === "" ? html`<span class="null">empty</span>` : shown(word)}</code></li>`)}</ol>`}
    ${all(it.not_bound, isText) ? notBound(it.not_bound) : nothing}
    ${sandbox(it)}${rows(facts)}${others(it, Array.isArray(it.not_bound) && it.not_bound.every(isText) ? [...PLAN, "not_bound"] : PLAN, source)}</div>`;
}

// What can change after the approval without a new question.
const notBound = (lines) => html`<div class="missing unbound"><p><b>You are not asked again if these change:</b></p><ul>${lines.map((line) => html`<li>${shown(line)}</li>`)}</ul></div>`;

// The files of the plan: if the content of one changes, the approval does not hold for the run.
function boundFiles(files) {
  const each = Object.entries(files).sort(([a], [b]) => (a === "...") - (b === "...")); // "..." stands for the rest
  if (!each.length) return "none is named in the command";
  return html`<p class="about">This approval is for their present content. If one changes, you are asked again.</p>
    <ul class="bound">${each.map(([path, version]) => {
      const hash = /^sha256:([0-9a-f]{64})$/.exec(version)?.[1];
      return html`<li>${path === "..." ? nothing : html`<code class="path">${shown(path)}</code>`} ${hash ? html`<code class="about">${hash.slice(0, 12)}</code>` : html`<span class="notice warn">${shown(String(version))}</span>`}</li>`;
    })}</ul>`;
}

const GUARANTEES = {
  write: ["nothing outside the workspace can be changed", "files outside the workspace can be changed"],
  read: ["only the workspace and system directories can be read", "files outside the workspace can be read"],
  net_tcp: ["no TCP and Unix-socket connections", "TCP and Unix-socket connections are possible"],
  net_udp: ["no UDP and DNS", "UDP and DNS are possible"],
  pids: ["no process is left behind, other processes are out of reach", "other processes are within reach"],
  env: ["the server's environment cannot be read", "the server's environment can be read"],
  protected: ["protected paths that exist cannot be changed", "protected paths can be changed"],
};

// The sentences of the plan, if it has some: they also name limits. Else those of its guarantees.
function guarantees({ guarantees: held, guarantees_in_words: words }) {
  const lines = Array.isArray(words) ? words.map(String) : Object.entries(held).map(([name, kept]) => `${kept ? "holds" : "DOES NOT HOLD"}: ${GUARANTEES[name]?.[kept ? 0 : 1] ?? name}`);
  const found = { held: [], missing: [] };
  for (const line of lines) {
    const [, kind, rest] = /^(holds|DOES NOT HOLD): ([^]*)$/.exec(line) ?? [, "", line];
    if (kind || !/^(sandbox level|no sandbox)/.test(line)) found[kind === "DOES NOT HOLD" ? "missing" : "held"].push(rest);
  }
  return found;
}

function sandbox(it) {
  const { held, missing } = guarantees(it);
  const title = it.sandbox === "none" ? "There is no sandbox" : `Sandbox level ${it.sandbox}`;
  const list = (lines) => html`<ul>${lines.map((line) => html`<li>${shown(line)}</li>`)}</ul>`;
  return html`${missing.length ? html`<div class="missing ${it.sandbox === "none" ? "bad" : ""}"><p><b>${shown(title)}${it.sandbox === "none" ? "." : " does not hold everything."}</b></p>${list(missing)}</div>` : nothing}
    ${held.length ? html`<div class="held"><p>${missing.length ? "What holds:" : html`<b>${shown(title)}</b>`}</p>${list(held)}</div>` : nothing}`;
}

const sandboxFacts = (it, source) => html`<div class="command">${sandbox(it)}${others(it, ["sandbox", "guarantees", "guarantees_in_words"], source)}</div>`;

const RESULT = ["ok", "exit_code", "output", "output_bytes", "cut", "artifact", "encoding", "protected_changed", "quarantined", "quarantine_note"];
const CUT = /\n\[\.\.\. (\d+) bytes omitted \.\.\.\]\n/;

function commandResult(it, source) {
  const { exit_code: code, output, cut } = it;
  const [head, omitted, tail] = cut ? output.split(CUT) : [output];
  const short = html`<pre class="code output">${shown(head)}${omitted ? html`<span class="cut">${bytes(Number(omitted))} left out here</span>${shown(tail)}` : nothing}</pre>`;
  return html`<div class="command"><p><span class="chip ${code === 0 ? "good" : "bad"}">${code === null ? "no exit code" : `exit code ${code}`}</span>${
      typeof it.output_bytes === "number" ? html` <span class="about">${bytes(it.output_bytes)} of output</span>` : nothing}</p>
    ${isArtifact(it.artifact) ? artifact(it.artifact, source, { what: "output", head: output, cut: short }) : output ? short : nothing}
    ${it.encoding ? html`<p class="notice warn">${shown(String(it.encoding))}</p>` : nothing}
    ${it.protected_changed?.length ? html`<div class="notice bad">Protected paths were changed: ${value(it.protected_changed)}</div>` : nothing}
    ${it.quarantined ? html`<div class="notice warn">The command created protected paths, which were renamed: ${value(it.quarantined)}</div>` : nothing}
    ${others(it, [...RESULT.slice(0, 5), ...(isArtifact(it.artifact) ? ["artifact"] : []), ...RESULT.slice(6)], source)}</div>`;
}

// --- the checklist ---

const STATES = { completed: ["✓", "done"], in_progress: ["▸", "in progress"], pending: ["○", "pending"] };

export const checklist = (list) => html`<ol>${list.map(({ content, status, priority }) => html`<li class=${status}><span class="mark" aria-hidden="true">${STATES[status][0]}</span><span><span class="sr">${STATES[status][1]}: </span>${shown(content)}${
  priority === "high" && status !== "completed" ? html` <span class="chip warn">high priority</span>` : nothing}</span></li>`)}</ol>`;
