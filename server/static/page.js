// The page: asks /info what the model is, POSTs to /generate, shows the images.

import { element, statement } from "./privacy.js";
import { zip } from "./zip.js";

const byId = (id) => document.getElementById(id);
const [form, grid, results, status, error] = ["form", "grid", "results", "status", "error"].map(byId);

let info = null; // the answer of /info
let shown = null; // {files: [{name, bytes}], seed} of the images on the page

function images(count) {
  return `${count.toLocaleString("en")} image${count === 1 ? "" : "s"}`;
}

function fail(message) {
  error.textContent = message;
  error.hidden = !message;
}

// What a server's answer says is wrong, in words.
async function problem(response) {
  try {
    const { detail } = await response.json();
    if (typeof detail === "string") return `The server says: ${detail}`;
  } catch {
    // not JSON: say what is known
  }
  return `The server answered ${response.status} ${response.statusText}.`;
}

// --- the form -------------------------------------------------------------------------------------------------------

const boxes = () => [...document.querySelectorAll("#boxes input")];
const chosen = () => boxes().filter((box) => box.checked).map((box) => Number(box.value));

function showChosen() {
  byId("chosen").textContent = `${chosen().length} of ${info.classes.length}`;
}

function choose(all) {
  for (const box of boxes()) box.checked = all;
  showChosen();
}

function fillForm() {
  document.title = `${info.model}: synthetic images`;
  byId("model").textContent = info.model;
  byId("count").max = info.max_count;
  byId("count").value = Math.min(byId("count").value, info.max_count);
  byId("count-hint").textContent = `${info.classes.length ? "the classes in turn; " : ""}at most ${info.max_count}`;
  byId("statement").replaceChildren(...statement(info.privacy));
  info.classes.forEach((name, place) => {
    const box = element("input");
    Object.assign(box, { type: "checkbox", value: place, checked: true });
    byId("boxes").append(element("label", "", box, element("span", name)));
  });
  byId("boxes").classList.toggle("wide", info.classes.some((name) => name.length > 4));
  byId("classes").hidden = info.classes.length === 0;
  if (info.classes.length) showChosen();
}

// The request as text, so that a seed beyond 2^53 keeps all its digits. Throws words for a person.
function request() {
  const count = Number(byId("count").value);
  if (!Number.isInteger(count) || count < 1 || count > info.max_count) {
    throw new RangeError(`Images: a whole number from 1 to ${info.max_count}, please.`);
  }
  const seed = byId("seed").value.trim();
  if (!/^[0-9]{0,19}$/.test(seed) || (seed && BigInt(seed) >= 2n ** 63n)) {
    throw new RangeError("Seed: a whole number from 0 to 9223372036854775807, or nothing, please.");
  }
  const classes = chosen();
  if (info.classes.length && !classes.length) throw new RangeError("Classes: choose at least one, please.");
  const labels = classes.length ? Array.from({ length: count }, (_, i) => classes[i % classes.length]) : null;
  return { count, body: `{"count":${count},"labels":${JSON.stringify(labels)},"seed":${seed ? BigInt(seed) : "null"}}` };
}

// --- the images -----------------------------------------------------------------------------------------------------

function save(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Small images are enlarged by a whole factor, so that their pixels stay square; 5 to 10 classes get a column each if they fit.
function layOut(count, classes) {
  const width = info.image_shape[1];
  const gap = 10;
  const needed = (scale) => classes * (width * scale + gap) - gap;
  const usual = Math.max(1, Math.round(96 / width));
  let scale = usual;
  if (classes < 5 || classes > 10 || count <= classes) scale = 0;
  while (scale > 0 && needed(scale) > grid.clientWidth) scale--;
  const columns = width * scale >= 48;
  grid.style.setProperty("--cell", `${width * (columns ? scale : usual)}px`);
  grid.style.maxWidth = columns ? `${needed(scale)}px` : "none";
}

function show(answer, seed) {
  const stem = info.model.replace(/[^A-Za-z0-9_-]+/g, "_");
  shown = { seed, files: [] };
  const figures = answer.images.map((image, place) => {
    const label = answer.labels[place];
    const safe = label === null ? "" : `-${label.replace(/[^A-Za-z0-9_-]+/g, "_").slice(0, 60)}`;
    const name = `${stem}-${seed}-${String(place).padStart(5, "0")}${safe}.png`;
    shown.files.push({ name, bytes: Uint8Array.from(atob(image), (char) => char.charCodeAt(0)) });
    const picture = element("img");
    const what = label === null ? `synthetic image ${place + 1}` : `synthetic image ${place + 1}, class ${label}`;
    Object.assign(picture, { src: `data:image/png;base64,${image}`, alt: what, width: info.image_shape[1], height: info.image_shape[0] });
    const link = element("a", "", picture);
    Object.assign(link, { href: picture.src, download: name, title: "Download this PNG" });
    return element("figure", "", link, ...(label === null ? [] : [element("figcaption", label)]));
  });
  layOut(figures.length, new Set(answer.labels).size);
  grid.replaceChildren(...figures);
}

function busy(on) {
  byId("generate").disabled = on;
  byId("generate").textContent = on ? "Generating…" : "Generate";
  results.classList.toggle("busy", on);
  results.setAttribute("aria-busy", String(on));
}

async function generate() {
  let asked;
  fail("");
  try {
    asked = request();
  } catch (words) {
    fail(words.message);
    return;
  }
  const start = performance.now();
  const seconds = () => Math.round((performance.now() - start) / 1000);
  busy(true);
  results.scrollIntoView({ block: "nearest" });
  status.textContent = `Making ${images(asked.count)}…`;
  const clock = setInterval(() => { byId("generate").textContent = `Generating… ${seconds()} s`; }, 1000);
  try {
    const response = await fetch("generate", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "application/json" },
      body: asked.body,
    });
    if (!response.ok) {
      fail(await problem(response));
    } else {
      show(await response.json(), response.headers.get("X-Rapid-Seed")); // a number in JSON would lose digits
    }
  } catch {
    fail("The server cannot be reached. Is it still running?");
  } finally {
    clearInterval(clock);
    busy(false);
    status.textContent = shown ? `${images(shown.files.length)}, seed ${shown.seed}. Click an image to download it.` : "No images yet.";
    byId("zip").hidden = byId("again").hidden = !shown;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (info && !byId("generate").disabled) generate();
});
byId("boxes").addEventListener("change", showChosen);
byId("all").addEventListener("click", () => choose(true));
byId("none").addEventListener("click", () => choose(false));
byId("again").addEventListener("click", () => { byId("seed").value = shown.seed; byId("seed").focus(); });
byId("zip").addEventListener("click", () => save(zip(shown.files), `${info.model}-${shown.seed}.zip`));

try {
  const response = await fetch("info");
  if (!response.ok) throw new Error(await problem(response));
  info = await response.json();
  fillForm();
} catch (reason) {
  byId("generate").disabled = true;
  fail(reason instanceof TypeError ? "The server cannot be reached. Is it still running?" : reason.message);
}
