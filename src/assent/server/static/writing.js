// Whoever writes may look at their hands. If the field goes from under them (somebody else has decided, the question has
// changed), the rest of what they type is no shortcut and presses no button: cards and the inbox hear no keys until
// they have looked up: Escape, a pointer, another view, or something written elsewhere says so.
export const TEXT = "input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]";
export const FIELD = `${TEXT}, form, assent-form`;
const DEAF = "assent-inbox, assent-approval, assent-question, assent-tool";

let field = null; // where somebody writes, until they leave it themselves

/** The field has gone, and who wrote in it has not looked up yet. */
export const adrift = () => Boolean(field) && !field.matches(":focus");

const writes = (element) => (field = element.closest?.(FIELD) && element.closest(DEAF) ? element : null);
addEventListener("hashchange", () => (field = null));
const listen = (type, heard) => document.addEventListener(type, heard, true);

listen("pointerdown", () => (field = null));
listen("focusin", ({ target, relatedTarget }) => (!adrift() || relatedTarget === field) && writes(target));
listen("input", ({ target }) => !target.closest(DEAF) && (field = null));
// A button that was pressed may take itself, or the whole card, away; one of a form's own does so at once.
listen("click", ({ target }) => {
  if (adrift()) return;
  field = null;
  if (target.closest("assent-form")) setTimeout(() => field ?? writes(document.activeElement));
});
listen("keydown", (event) => {
  const { key, target } = event;
  const decides = key === "Enter" && (event.ctrlKey || event.metaKey);
  if (key === "Escape" || (decides && !adrift())) field = null;
  else if (!adrift()) writes(target);
  else hush(event);
});
listen("keyup", (event) => adrift() && hush(event)); // where a space bar presses

function hush(event) {
  const { key, target } = event;
  if ((key === "Enter" || key.length === 1) && target.closest?.(DEAF)) event.preventDefault();
}
