// The page: reads the models from /info, sends the form to /generate, shows the images as they arrive.

import { byId, save } from "./element.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import { meaning, statement } from "./privacy.js";
import * as progress from "./progress.js";
import { Run } from "./run.js";
import { lines } from "./stream.js";
import { ask, hasToken } from "./token.js";
import * as view from "./view.js";
import { images, problem, STRANGE, UNREACHABLE } from "./words.js";
import { zip } from "./zip.js";

const [error, generate, cancel, results, grid, again, pack] = ["error", "generate", "cancel", "results", "grid", "again", "zip"].map(byId);

let loaded = false;
let run = null; // its images are on the page
let running = null; // AbortController of the current run

// Shows an error beside its field, or above the button without one.
function fail(words, field) {
  error.textContent = words;
  error.hidden = !words;
  if (field) field.closest(".field, fieldset").append(error);
  else generate.before(error);
  if (words && !field) error.scrollIntoView({ block: "nearest" });
}

function showModel(model) {
  const [height, width] = model.image_shape;
  document.title = `${model.model}: synthetic images`;
  byId("name").textContent = model.model;
  byId("about").textContent = `, ${width} × ${height} pixels`;
  byId("statement").replaceChildren(...statement(model));
  byId("meaning-list").replaceChildren(...meaning(model));
}

// Reads /info; returns whether that succeeded.
async function load() {
  fail("");
  loaded = false;
  byId("retry").hidden = true;
  try {
    const response = await ask("info");
    if (!response.ok) throw new Error(await problem(response));
    form.fill(await response.json());
    showModel(form.chosenModel());
    loaded = true;
  } catch (reason) {
    fail(reason instanceof TypeError ? UNREACHABLE : reason instanceof SyntaxError ? STRANGE : reason.message);
    if (reason instanceof form.NoGenerator) showModel(reason.model);
    else byId("retry").hidden = false;
  }
  generate.setAttribute("aria-disabled", String(!loaded || Boolean(running)));
  return loaded;
}

function busy(controller) {
  running = controller;
  generate.setAttribute("aria-disabled", String(Boolean(running)));
  results.classList.toggle("busy", Boolean(running));
  grid.setAttribute("aria-busy", String(Boolean(running))); // not the whole section: its status must be heard
  again.hidden = pack.hidden = Boolean(running) || !run?.done;
}

function kept() {
  return run.done ? `, and ${run.done === 1 ? "is" : "are"} kept` : "";
}

// Shows images as they arrive; returns the error that ended the response early, or "".
async function receive(response, asked) {
  if (!response.headers.get("Content-Type")?.startsWith("application/x-ndjson")) return STRANGE;
  const digest = response.headers.get("X-Rapid-Sha256");
  if (digest && digest !== asked.model.sha256) {
    await response.body.cancel();
    return (await load()) ? "The server has another model of this name now, which the page has loaded. Generate again."
      : "The server has another model of this name now. Load the page again.";
  }
  run = new Run(asked.model, response.headers.get("X-Rapid-Seed"), asked.count, asked.classes); // a number in JSON would lose digits
  gallery.show(run, (image) => view.open(image, run, gallery.focusOn));
  for await (const found of lines(response)) {
    for (const line of found) {
      if (line.type === "image") run.put(line);
      else if (line.type === "error") return `The server ended the response: ${line.detail}. ${images(run.done)} of ${asked.count.toLocaleString("en")} arrived${kept()}.`;
      else if (line.type === "end") return "";
    }
    progress.reach(run.done);
    gallery.more();
    view.more();
  }
  throw new TypeError("incomplete response");
}

async function make(asked) {
  const controller = new AbortController();
  const { signal } = controller;
  const before = run;
  busy(controller);
  progress.begin(asked.count);
  let words = "";
  try {
    const response = await ask("generate", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "application/x-ndjson" },
      body: asked.body,
      signal,
    });
    words = response.ok ? await receive(response, asked) : await problem(response);
  } catch {
    if (!signal.aborted) {
      words = run === before ? UNREACHABLE
        : `The connection was lost. ${images(run.done)} of ${asked.count.toLocaleString("en")} arrived${kept()}.`;
    }
  }
  const held = document.activeElement === cancel;
  if (run !== before) {
    run.finish();
    gallery.settle();
    view.more();
  }
  progress.end(ended(signal.aborted, run !== before, asked.count));
  busy(null);
  fail(words);
  if (held) generate.focus({ preventScroll: true });
}

function ended(cancelled, begun, count) {
  if (!begun) return cancelled ? "Cancelled." : run ? summary() : "No images yet.";
  return cancelled ? `Cancelled: ${run.done.toLocaleString("en")} of ${images(count)}. ${run.done ? `Seed ${run.seed}.` : ""}` : summary();
}

function summary() {
  const whose = byId("models").hidden ? "" : ` of ${run.info.model}`;
  return run.done ? `${images(run.done)}${whose}, seed ${run.seed}. Click one to enlarge it.` : "No images arrived.";
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!loaded || running) return;
  try {
    const asked = form.request();
    fail("");
    make(asked);
    results.scrollIntoView({ block: matchMedia("(min-width: 52rem)").matches ? "nearest" : "start" });
  } catch (wrong) {
    if (!(wrong instanceof form.Wrong)) throw wrong;
    fail(wrong.message, wrong.field);
    if (wrong.field.type !== "radio") wrong.field.setAttribute("aria-invalid", "true");
    wrong.field.focus();
  }
});
byId("model").addEventListener("change", () => { form.showModel(); showModel(form.chosenModel()); });
for (const name of ["count", "seed", "steps"]) byId(name).addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
byId("retry").addEventListener("click", load);
cancel.addEventListener("click", () => running?.abort());
again.addEventListener("click", () => form.useSeed(run.seed));
pack.addEventListener("click", () => save(zip(run.files), run.zipName));
byId("details").addEventListener("click", async (event) => {
  if (!hasToken()) return; // a plain link sends no token
  event.preventDefault();
  try {
    const response = await ask("info");
    if (response.ok) save(await response.blob(), "info.json");
    else fail(await problem(response));
  } catch {
    fail(UNREACHABLE);
  }
});

load();
