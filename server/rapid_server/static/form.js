// The form: choices of the request, and their validation.

import { byId, element } from "./element.js";

const [model, classes, boxes, some, count, seed, steps] = ["model", "classes", "boxes", "some", "count", "seed", "steps"].map(byId);
const LARGEST_SEED = 2n ** 63n - 1n;

let info = null; // the response of /info

/** An invalid field, with a message for the user. */
export class Wrong extends Error {
  constructor(field, words) {
    super(words);
    this.field = field;
  }
}

/** The server has no model that makes images; `model` is its first classifier. */
export class NoGenerator extends Error {
  constructor(model) {
    super("This server only classifies images: send them to POST /predict, see HTTP interface.");
    this.model = model;
  }
}

/** The selected model, as /info describes it. */
export const chosenModel = () => info.models[Number(model.value) || 0];

const chosenClasses = () => (some.checked ? [...boxes.querySelectorAll(":checked")].map((box) => Number(box.value)) : []);

function showClasses() {
  boxes.hidden = !some.checked;
  byId("all-count").textContent = `(${chosenModel().classes.length})`;
  byId("chosen").textContent = some.checked ? `(${chosenClasses().length})` : "";
}

/** Adapts the form to the selected model. */
export function showModel() {
  const chosen = chosenModel();
  byId("all").checked = true;
  boxes.replaceChildren(...chosen.classes.map((name, place) => {
    const box = element("input");
    Object.assign(box, { type: "checkbox", value: place, name: "class" });
    return element("label", "", box, element("span", name));
  }));
  boxes.classList.toggle("wide", chosen.classes.some((name) => name.length > 4));
  classes.hidden = chosen.classes.length === 0;
  count.max = chosen.max_count;
  if (Number(count.value) > chosen.max_count) count.value = chosen.max_count;
  byId("count-most").textContent = chosen.max_count.toLocaleString("en");
  steps.placeholder = `${chosen.steps} (default)`;
  steps.max = chosen.max_steps;
  byId("steps-most").textContent = chosen.max_steps.toLocaleString("en");
  // a model of one call has no choice
  steps.closest(".field").hidden = chosen.max_steps < 2;
  showClasses();
}

/** Takes the response of /info. */
export function fill(answer) {
  info = { ...answer, models: answer.models.filter((one) => one.task === "generation") };
  if (!info.models.length) throw new NoGenerator(answer.models[0]);
  model.replaceChildren(...info.models.map((one, place) => Object.assign(element("option", one.model), { value: place })));
  byId("models").hidden = info.models.length < 2;
  showModel();
}

/** Puts the seed of a run into the form. */
export function useSeed(value) {
  seed.value = value;
  seed.focus();
}

function whole(field, name, most) {
  const value = Number(field.value);
  // the value of text that is not a number is empty
  if (field.validity.badInput || !Number.isInteger(value) || value < 1 || value > most) {
    throw new Wrong(field, `${name}: enter a whole number from 1 to ${most.toLocaleString("en")}.`);
  }
  return value;
}

/** The request; its body is text, so that a seed above 2^53 keeps all its digits. Throws Wrong. */
export function request() {
  for (const field of [count, seed, steps]) field.removeAttribute("aria-invalid");
  const chosen = chosenModel();
  const picked = chosenClasses();
  if (some.checked && !classes.hidden && !picked.length) throw new Wrong(some, "Classes: select at least one.");
  const images = whole(count, "Images", chosen.max_count);
  const digits = seed.value.trim();
  if (!/^[0-9]{0,19}$/.test(digits) || (digits && BigInt(digits) > LARGEST_SEED)) {
    throw new Wrong(seed, `Seed: enter a whole number from 0 to ${LARGEST_SEED}, or leave it empty.`);
  }
  const own = chosen.max_steps < 2 || (steps.value === "" && !steps.validity.badInput);
  const labels = picked.length ? Array.from({ length: images }, (_, place) => picked[place % picked.length]) : null;
  const fields = {
    model: JSON.stringify(chosen.model),
    count: images,
    labels: JSON.stringify(labels),
    seed: digits ? BigInt(digits) : "null",
    steps: own ? "null" : whole(steps, "Steps", chosen.max_steps),
  };
  const body = `{${Object.entries(fields).map(([name, value]) => `"${name}":${value}`).join(",")}}`;
  return { body, model: chosen, count: images, classes: picked.length || chosen.classes.length };
}

classes.addEventListener("change", showClasses);
