// The images of a run, a page at a time: what is on the page is bounded, however many there are.

import { byId, element } from "./element.js";
import { blobOf } from "./run.js";

const PAGE = 240; // fills whole rows of 2, 3, 4, 5, 6, 8, 10 or 12
const FRAME = 60; // most images that are added per frame
const GAP = 10;
const [grid, pager, range, before, after] = ["grid", "pager", "range", "before", "after"].map(byId);

let run = null;
let first = 0; // slot of the first image on the page
let cells = []; // the elements on the page, by slot - first
let urls = [];
let opened = () => {};
let waiting = false; // for the next frame

const shown = new WeakMap(); // the image of a button
const buttons = () => cells.map((cell) => cell.firstChild).filter((button) => shown.has(button));

// Small images are enlarged by a whole factor, so that their pixels stay square; 5 to 10 classes in turn get a column each
// if they fit.
function layOut() {
  if (!run) return;
  const width = run.info.image_shape[1];
  const needed = (scale) => run.classes * (width * scale + GAP) - GAP;
  const usual = Math.max(1, Math.round(96 / width));
  let scale = usual;
  if (run.classes < 5 || run.classes > 10 || run.count <= run.classes) scale = 0;
  while (scale > 0 && needed(scale) > grid.clientWidth) scale--;
  const columns = width * scale >= 48;
  grid.style.setProperty("--cell", `${width * (columns ? scale : usual)}px`);
  grid.style.setProperty("--columns", columns ? run.classes : "auto-fill");
}

function fill(cell, image) {
  const url = URL.createObjectURL(blobOf(image));
  urls.push(url);
  const picture = element("img");
  const [height, width] = run.info.image_shape;
  const alt = `Synthetic image ${image.index}${image.label === null ? "" : ", class"}`;
  Object.assign(picture, { src: url, alt, width, height });
  const button = element("button", "", picture, ...(image.label === null ? [] : [element("span", image.label)]));
  Object.assign(button, { type: "button", className: "cell", tabIndex: -1 });
  button.addEventListener("click", () => opened(image));
  shown.set(button, image);
  cell.replaceChildren(button);
}

function empty() {
  const [height, width] = run.info.image_shape;
  const frame = element("div");
  frame.style.aspectRatio = `${width} / ${height}`;
  const hole = element("div", "", frame);
  hole.className = "hole";
  if (run.info.classes.length) hole.append(element("span", "\u00a0")); // space for the class
  return element("li", "", hole);
}

function clear() {
  for (const url of urls) URL.revokeObjectURL(url);
  urls = [];
  cells = [];
  grid.replaceChildren();
}

function build() {
  clear();
  const slots = run.slots.slice(first, first + PAGE);
  cells = slots.map(empty);
  grid.append(...cells);
  layOut();
  update();
}

// Shows the images of this page that have arrived.
function update() {
  waiting = false;
  if (!run) return;
  let left = FRAME;
  cells.forEach((cell, place) => {
    const image = run.slots[first + place];
    if (image && !shown.has(cell.firstChild) && left-- > 0) fill(cell, image);
  });
  if (left < 0) more();
  if (!grid.contains(document.activeElement)) hold(buttons()[0]);
  const total = run.slots.length;
  pager.hidden = total <= PAGE;
  range.textContent = `${(first + 1).toLocaleString("en")} to ${Math.min(first + PAGE, total).toLocaleString("en")} of ${total.toLocaleString("en")}`;
  before.disabled = first === 0;
  after.disabled = first + PAGE >= total;
}

function turn(to) {
  first = to;
  build();
}

// The tab key reaches one image; arrow keys move from there.
function hold(button) {
  for (const other of grid.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  if (button) button.tabIndex = 0;
}

function focus(button) {
  hold(button);
  button.focus();
}

/** Shows a run in place of the one before; `open` is called with an image that is clicked. */
export function show(what, open) {
  run = what;
  opened = open;
  turn(0);
}

/** More images have arrived; shows them in the next frame. */
export function more() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(update);
}

/** The run is finished: closes the gaps of images that did not arrive. */
export function settle() {
  if (run.slots.length < run.count) {
    const held = shown.get(document.activeElement);
    turn(Math.max(0, Math.min(first, run.slots.length - 1 - ((run.slots.length - 1) % PAGE))));
    if (held) focusOn(held);
  } else {
    update();
  }
}

/** Brings the focus to an image. */
export function focusOn(image) {
  const slot = run.slots.indexOf(image);
  if (slot < 0) return; // of a run before
  if (slot < first || slot >= first + PAGE) turn(slot - (slot % PAGE));
  const cell = cells[slot - first];
  if (!shown.has(cell.firstChild)) fill(cell, image);
  focus(cell.firstChild);
}

function columns() {
  return getComputedStyle(grid).gridTemplateColumns.split(" ").length;
}

const MOVES = {
  ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: columns, ArrowUp: () => -columns(), Home: () => -Infinity, End: () => Infinity,
};

grid.addEventListener("keydown", (event) => {
  const all = buttons();
  const held = all.indexOf(event.target);
  if (held < 0 || !(event.key in MOVES) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  focus(all[Math.max(0, Math.min(all.length - 1, held + MOVES[event.key]()))]);
});
before.addEventListener("click", () => { turn(first - PAGE); grid.scrollIntoView(); if (before.disabled) after.focus(); });
after.addEventListener("click", () => { turn(first + PAGE); grid.scrollIntoView(); if (after.disabled) before.focus(); });
new ResizeObserver(layOut).observe(grid);
