// One image, enlarged, beside the public image that it started from.

import { byId, element, save } from "./element.js";
import { blobOf } from "./run.js";
import { ask } from "./token.js";
import { problem, UNREACHABLE } from "./words.js";

const [dialog, large, neighbour, facts, origin, before, after] =
  ["view", "large", "neighbour", "facts", "origin", "view-before", "view-after"].map(byId);
const title = byId("large-title");

let run = null;
let image = null;
let closed = () => {};
let looking = null; // AbortController of the current fetch of a neighbour

function source(picture, blob) {
  const old = picture.src;
  if (blob) picture.src = URL.createObjectURL(blob);
  else picture.removeAttribute("src");
  picture.hidden = !blob;
  if (old.startsWith("blob:")) URL.revokeObjectURL(old);
}

// Both enlarged by a whole factor: side by side where there is room, else the neighbour small below.
function layOut() {
  if (!dialog.open) return;
  const [height, width] = run.info.image_shape;
  const room = dialog.querySelector(".pictures").clientWidth;
  const wide = room >= 480;
  const times = (across, down) => Math.max(1, Math.floor(Math.min(across / width, down / height)));
  const down = window.innerHeight * 0.5;
  const scale = times(wide ? Math.min(384, (room - 24) / 2) : room, wide ? Math.min(384, down) : down);
  const small = wide ? scale : Math.min(scale, times(Math.min(128, room / 2), 128));
  dialog.style.setProperty("--large", `${width * scale}px`);
  dialog.style.setProperty("--small", `${width * small}px`);
}

async function showNeighbour() {
  looking?.abort();
  looking = new AbortController();
  const { signal } = looking;
  if (image.entry === null) {
    source(neighbour, null);
    origin.textContent = "It started from noise alone: no public image was retrieved.";
    return;
  }
  // not the one of another image, which would be compared with this one
  source(neighbour, null);
  origin.textContent = "Loading the public image that it started from…";
  try {
    const response = await ask(`entries/${image.entry}?model=${encodeURIComponent(run.info.model)}&sha256=${run.info.sha256}`, { signal });
    const blob = response.ok ? await response.blob() : null;
    const words = response.ok ? "" : await problem(response);
    if (signal.aborted) return;
    source(neighbour, blob);
    origin.textContent = blob
      ? `The public image that it started from (record ${image.entry.toLocaleString("en")} of the knowledge base).`
      : `The public image that it started from cannot be shown. ${words}`;
  } catch {
    if (signal.aborted) return;
    source(neighbour, null);
    origin.textContent = `The public image that it started from cannot be shown. ${UNREACHABLE}`;
  }
}

/** Updates the buttons when more images have arrived. */
export function more() {
  if (!dialog.open) return;
  before.disabled = !run.near(image, -1);
  after.disabled = !run.near(image, 1);
}

function show(what) {
  image = what;
  const [height, width] = run.info.image_shape;
  for (const picture of [large, neighbour]) Object.assign(picture, { width, height });
  source(large, blobOf(image));
  title.textContent = `Image ${image.index.toLocaleString("en")}${image.label === null ? "" : `, class ${image.label}`}`;
  large.alt = `Synthetic image ${image.index}, enlarged`;
  const told = [["Class", image.label], ["Index", `${image.index.toLocaleString("en")} of 0 to ${(run.count - 1).toLocaleString("en")}`], ["Seed", run.seed], ["Model", run.info.model]];
  facts.replaceChildren(...told.filter(([, value]) => value !== null)
    .map(([name, value]) => element("div", "", element("dt", name), element("dd", value))));
  more();
  layOut();
  showNeighbour();
}

function go(step) {
  const next = run.near(image, step);
  if (next) show(next);
  // a disabled button loses the focus
  if (document.activeElement?.disabled || !dialog.contains(document.activeElement)) (step < 0 ? after : before).focus();
}

/** Opens the view; `close` is called with the last image that it showed. */
export function open(what, of, close) {
  run = of;
  closed = close;
  source(neighbour, null);
  dialog.showModal();
  show(what);
  byId("view-close").focus();
}

before.addEventListener("click", () => go(-1));
after.addEventListener("click", () => go(1));
byId("view-close").addEventListener("click", () => dialog.close());
byId("view-save").addEventListener("click", () => save(blobOf(image), image.name));
dialog.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "ArrowLeft") go(-1);
  if (event.key === "ArrowRight") go(1);
});
// A click beside the dialog closes it, but not the end of a selection that began within.
let pressed = false;
function beside(event) {
  const box = dialog.getBoundingClientRect();
  return event.target === dialog && (event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom);
}
dialog.addEventListener("pointerdown", (event) => { pressed = beside(event); });
dialog.addEventListener("click", (event) => { if (pressed && beside(event)) dialog.close(); });
dialog.addEventListener("close", () => {
  looking?.abort();
  source(large, null);
  source(neighbour, null);
  closed(image);
});
window.addEventListener("resize", layOut);
