// The form: what can be asked for, and what is.

import { byId, element } from "./element.js";

const [model, classes, boxes, some, count, seed, steps] = ["model", "classes", "boxes", "some", "count", "seed", "steps"].map(byId);
const LARGEST_SEED = 2n ** 63n - 1n;

let info = null; // the answer of /info

/** Why something cannot be asked for, in words, and the field that is wrong. */
export class Wrong extends Error {
  constructor(field, words) {
    super(words);
    this.field = field;
  }
}

/** The model that is chosen, as /info tells of it. */
export const chosenModel = () => info.models[Number(model.value) || 0];

const chosenClasses = () => (some.checked ? [...boxes.querySelectorAll(":checked")].map((box) => Number(box.value)) : []);

function showClasses() {
  boxes.hidden = !some.checked;
  byId("all-count").textContent = `(${chosenModel().classes.length})`;
  byId("chosen").textContent = some.checked ? `(${chosenClasses().length})` : "";
}

/** Fits the form to the chosen model. */
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
  steps.placeholder = `${chosen.steps}, the model's own`;
  showClasses();
}

/** Takes the answer of /info. */
export function fill(answer) {
  info = answer;
  model.replaceChildren(...info.models.map((one, place) => Object.assign(element("option", one.model), { value: place })));
  byId("models").hidden = info.models.length < 2;
  count.max = info.max_count;
  if (Number(count.value) > info.max_count) count.value = info.max_count;
  steps.max = info.max_steps;
  byId("count-most").textContent = info.max_count.toLocaleString("en");
  byId("steps-most").textContent = info.max_steps.toLocaleString("en");
  showModel();
}

/** Puts the seed of a run into the form. */
export function useSeed(value) {
  seed.value = value;
  seed.focus();
}

function whole(field, name, most) {
  const value = Number(field.value);
  // what is not a number at all has no value here
  if (field.validity.badInput || !Number.isInteger(value) || value < 1 || value > most) {
    throw new Wrong(field, `${name}: a whole number from 1 to ${most.toLocaleString("en")}, please.`);
  }
  return value;
}

/** What is asked for; its body is text, so that a seed beyond 2^53 keeps all its digits. Throws Wrong. */
export function request() {
  for (const field of [count, seed, steps]) field.removeAttribute("aria-invalid");
  const chosen = chosenModel();
  const picked = chosenClasses();
  if (some.checked && !classes.hidden && !picked.length) throw new Wrong(some, "Classes: choose at least one, please.");
  const images = whole(count, "Images", info.max_count);
  const digits = seed.value.trim();
  if (!/^[0-9]{0,19}$/.test(digits) || (digits && BigInt(digits) > LARGEST_SEED)) {
    throw new Wrong(seed, `Seed: a whole number from 0 to ${LARGEST_SEED}, or nothing, please.`);
  }
  const own = steps.value === "" && !steps.validity.badInput;
  const labels = picked.length ? Array.from({ length: images }, (_, place) => picked[place % picked.length]) : null;
  const fields = {
    model: JSON.stringify(chosen.model),
    count: images,
    labels: JSON.stringify(labels),
    seed: digits ? BigInt(digits) : "null",
    steps: own ? "null" : whole(steps, "Steps", info.max_steps),
  };
  const body = `{${Object.entries(fields).map(([name, value]) => `"${name}":${value}`).join(",")}}`;
  return { body, model: chosen, count: images, classes: picked.length || chosen.classes.length };
}

classes.addEventListener("change", showClasses);
