// People may look at the keyboard while they type. If their field disappears (another person has decided, or the question
// has changed), the rest of their typing must not trigger shortcuts or buttons. So cards and the inbox ignore keys until
// Escape, a pointer press, another view or typing elsewhere shows that the person has noticed.
export const TEXT = "input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]";
export const FIELD = `${TEXT}, form, holdfast-form`;
const DEAF = "holdfast-inbox, holdfast-approval, holdfast-question, holdfast-tool";

let field = null; // the field in use, until the person leaves it

/** Return whether the field has disappeared and the person has not noticed yet. */
export const adrift = () => Boolean(field) && !field.matches(":focus");

const writes = (element) => (field = element.closest?.(FIELD) && element.closest(DEAF) ? element : null);
addEventListener("hashchange", () => (field = null));
const listen = (type, heard) => document.addEventListener(type, heard, true);

listen("pointerdown", () => (field = null));
listen("focusin", ({ target, relatedTarget }) => (!adrift() || relatedTarget === field) && writes(target));
listen("input", ({ target }) => !target.closest(DEAF) && (field = null));
// A pressed button may remove itself or the whole card; a button of a form does so at once.
listen("click", ({ target }) => {
  if (adrift()) return;
  field = null;
  if (target.closest("holdfast-form")) setTimeout(() => field ?? writes(document.activeElement));
});
listen("keydown", (event) => {
  const { key, target } = event;
  const decides = key === "Enter" && (event.ctrlKey || event.metaKey);
  if (key === "Escape" || (decides && !adrift())) field = null;
  else if (!adrift()) writes(target);
  else hush(event);
});
listen("keyup", (event) => adrift() && hush(event)); // the space bar presses buttons on keyup

function hush(event) {
  const { key, target } = event;
  if ((key === "Enter" || key.length === 1) && target.closest?.(DEAF)) event.preventDefault();
}
