// Prevents accidental presses: a button works only after it has not moved for a moment, and an approval only after
// everything that it approves has been on screen.
//
//   const guard = new Guard(element, { buttons: () => [...], parts: () => [...], changed: () => ... });
//   guard.start();            // and guard.stop()
//   guard.armed               // as of the last sample: the buttons have not moved, and the content is not new
//   guard.unseen(parts)       // the first of these parts that was not completely on screen, or undefined
//   guard.steady()            // whether a press at this moment counts
// changed() may return a promise that resolves when the change is rendered.
//
// A part has been seen when its top and bottom edges have been on screen and, if it scrolls, its end. While a part of it
// is not loaded, it has not been seen. The keyboard acts on the focused button, so that moves do not matter to it; new
// content does.

export const SETTLE = 700; // milliseconds; longer than a double click
const SAMPLE = 100; // milliseconds between two samples of the buttons' positions
const EDGE = 2; // pixels between a part's edge and the point that must be visible
const SLACK = 6; // pixels that may be missing at the end of a scrolled box

export const UNLOADED = "[unloaded]"; // an element whose content is loaded on request

let byPointer = true; // how the last press was made
addEventListener("pointerdown", () => (byPointer = true), true);
addEventListener("keydown", () => (byPointer = false), true);

const owners = new WeakMap(); // element -> its guard
const inView = new Set(); // guards with an element that is at least partly on screen
let timer = 0;

/** Sample all guards in view, after a change of the layout. */
export const sampleAll = () => document.visibilityState === "visible" && inView.forEach((guard) => guard.sample());
addEventListener("scroll", sampleAll, { capture: true, passive: true });
const views = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) owners.get(target)?.enter(isIntersecting && target.isConnected);
});

/** Return whether the bottom of a box is in view. */
export const atBottom = (box) => box.clientHeight > 0 && box.scrollTop + box.clientHeight >= box.scrollHeight - SLACK;

/** Return whether a box is scrolled to its end, in both directions. */
export const atEnd = (box) => atBottom(box) && Math.abs(box.scrollLeft) + box.clientWidth >= box.scrollWidth - SLACK;

export class Guard {
  armed = false;
  #renewed = performance.now(); // when the content was last new
  #position = ""; // of the buttons, at the last sample
  #since = Infinity; // when the buttons moved there
  #adopting = false; // the buttons are being rendered as enabled, which may change their widths
  #reported = undefined; // the unseen part when changed() was last called
  #edges = new WeakMap(); // part -> {top, bottom}: which of its edges have been seen

  constructor(element, { buttons = () => [element], parts = () => [], changed = () => {} } = {}) {
    Object.assign(this, { element, buttons, parts, changed });
  }

  start() {
    owners.set(this.element, this);
    views.observe(this.element);
  }

  stop() {
    views.unobserve(this.element);
    this.enter(false);
  }

  enter(visible) {
    if (visible) inView.add(this);
    else inView.delete(this);
    if (inView.size) timer ||= setInterval(sampleAll, SAMPLE);
    else timer = clearInterval(timer);
    if (visible) return this.sample();
    this.#position = "";
    this.#arm(false);
  }

  /** The content is new: ignore presses for a moment, and require these parts to be seen again. */
  renew(parts = this.parts()) {
    this.#renewed = performance.now();
    parts.forEach((part) => this.#edges.delete(part));
    this.#arm(false);
  }

  /** Return whether a press at this moment counts. */
  steady() {
    this.sample();
    return performance.now() - Math.max(this.#renewed, byPointer ? this.#since : 0) >= SETTLE;
  }

  unseen(parts = this.parts()) {
    return parts.find((part) => {
      const { top, bottom } = this.#edges.get(part) ?? {};
      return !(top && bottom);
    });
  }

  /** Return the edge of a part to scroll to: the first that was not seen. */
  missing(part) {
    return this.#edges.get(part)?.top ? "end" : "start";
  }

  sample() {
    if (!this.element.isConnected || this.#adopting) return;
    const now = performance.now();
    const position = this.#measure();
    if (position !== this.#position) {
      this.#position = position;
      this.#since = now;
    }
    this.parts().forEach((part) => this.#look(part));
    // A focused button is not shown as disabled because the page has scrolled to it.
    const moved = this.buttons().some((button) => button.matches(":focus-visible")) ? 0 : this.#since;
    this.#arm(inView.has(this) && now - Math.max(this.#renewed, moved) >= SETTLE);
  }

  #arm(armed) {
    const unseen = this.unseen();
    if (armed === this.armed && unseen === this.#reported) return;
    this.#reported = unseen;
    this.#adopting = armed && !this.armed;
    this.armed = armed;
    const drawn = Promise.resolve(this.changed());
    if (this.#adopting)
      drawn.finally(() => {
        this.#position = this.#measure();
        this.#adopting = false;
      });
  }

  #measure() {
    return this.buttons().map(placeOf).join(" ");
  }

  #look(part) {
    const edges = this.#edges.get(part) ?? { top: false, bottom: false };
    if ((edges.top && edges.bottom) || part.querySelector(UNLOADED)) return;
    const { left, width, top, bottom } = part.getBoundingClientRect();
    const onScreen = (y) => [left + width / 2, left + EDGE, left + width - EDGE].some((x) => part.contains(part.getRootNode().elementFromPoint(x, y)));
    edges.top ||= onScreen(Math.min(top + EDGE, bottom - 1));
    edges.bottom ||= (getComputedStyle(part).overflowY === "visible" || atEnd(part)) && onScreen(Math.max(bottom - EDGE, top));
    this.#edges.set(part, edges);
  }
}

function placeOf(element) {
  const { x, y, width } = element.getBoundingClientRect();
  return [x, y, width].map(Math.round);
}
