// The privacy guarantee of a model, explained, as elements of the page.

import { element } from "./element.js";
import { number, numerals, rounded } from "./words.js";

const DETAILS = ["event", "packages"]; // long; the model details have them

function factor(epsilon) {
  const value = Math.exp(epsilon);
  if (value >= 1e6) return ["e", element("sup", number(epsilon))];
  return [value >= 10 ? Math.ceil(value).toLocaleString("en") : String(rounded(value, 3))];
}

// Less noise is less privacy: the noise multiplier is rounded down, all else up.
function text(value, name) {
  if (typeof value === "number") return numerals(value, name === "noise_multiplier" ? -1 : 1);
  if (value === null) return ["none"];
  if (typeof value !== "object") return [String(value)];
  const named = (key) => (Array.isArray(value) ? "" : `${key.replaceAll("_", " ")} `);
  const parts = Object.entries(value).filter(([key]) => !DETAILS.includes(key))
    .flatMap(([key, part]) => [Array.isArray(value) ? "; " : ", ", named(key), ...text(part, key)]);
  return parts.slice(1);
}

function table(rows) {
  const lines = rows.map(([name, ...value]) => {
    const head = element("th", name);
    head.scope = "row";
    return element("tr", "", head, element("td", "", ...value));
  });
  return element("table", "", element("tbody", "", ...lines));
}

function strength(epsilon) {
  if (epsilon <= 1) return "An ε of 1 or less is a strong guarantee. ";
  if (epsilon <= 3) return "An ε of 1 to 3 is a moderate guarantee. ";
  return "With an ε this large the worst-case guarantee is weak: such a factor rules out little by itself. Known attacks " +
    "achieve far less than it allows, but that is experience, not proof. ";
}

function point(title, ...parts) {
  return element("li", "", element("strong", `${title} `), ...parts);
}

const MARKED = point("Every PNG states its origin.", "A text chunk says that it is synthetic, which model made it, and the ε and δ of that model if it has any.");

// What is true of the public images behind a model, of which there may be none.
function unprotected(words, bundle) {
  if (!bundle.public) return [];
  const shown = "knowledge_base" in bundle.components
    ? " Where an image started from a public one, its enlarged view shows that one." : "";
  return [point("The public images have no protection.", words + shown)];
}

/** What the guarantee of a model covers and what it does not, as list items. */
export function meaning({ privacy, bundle }) {
  if (privacy === null) {
    return [
      bundle.public?.origins?.length
        ? point("Private images were used by other models only,", "which made some of the images behind this one. Their guarantees are stated below.")
        : point("No private image was used,", "so there is nothing private to protect, and no guarantee is stated."),
      ...unprotected("An image may closely resemble one of them.", bundle),
      MARKED.cloneNode(true),
    ];
  }
  const unit = privacy.unit ?? "one image";
  const person = unit === "one person";
  const counted = person ? "people with private images" : "private images";
  const size = typeof privacy.dataset_size === "number" ? `the ${number(privacy.dataset_size)} ${counted}` : `the ${counted}`;
  return [
    point("The guarantee.", `Whether or not ${unit} was among ${size}, any output of this model, and anything inferred from it, is about ` +
      "equally likely. The two probabilities differ by a factor of at most ", element("strong", "", ...factor(privacy.epsilon)),
      " (that is e", element("sup", "ε"), "), except for a probability of about δ = ", ...numerals(privacy.delta), ". Smaller numbers are a stronger guarantee. ",
      strength(privacy.epsilon)),
    point("It does not wear off.", "It holds however many images are made, and whatever is done with them. Generating more costs no privacy."),
    point(`It protects ${unit}.`, person ? "All images of a person are protected together, however many they are."
      : "People with several of the private images are protected less."),
    point("What it does not hide.", "What is true of the private images as a whole, such as what a class looks like: showing that is the purpose of synthetic images. " +
      `The number of ${person ? "people" : "private images"} and the names of the classes count as public.`),
    ...unprotected("The model also learned from public images.", bundle),
    point("Not for facts about single cases.", "A synthetic image is not a record of a real case, and it shows rare features of the private images worst."),
    MARKED.cloneNode(true),
  ];
}

/** The privacy statement: a text, and its numbers in tables. */
export function statement({ privacy, privacy_in_words }) {
  const words = element("p", privacy_in_words);
  if (privacy === null) return [words];
  const main = [
    ["Epsilon (ε)", ...numerals(privacy.epsilon)],
    ["Delta (δ)", ...numerals(privacy.delta)],
    ["Adjacency", privacy.adjacency],
    ["Unit", privacy.unit],
    ["Accountant", privacy.accountant],
  ].filter(([, ...value]) => value.every((part) => part !== undefined));
  const all = Object.entries(privacy).filter(([key]) => !DETAILS.includes(key)).map(([key, value]) => [key.replaceAll("_", " "), ...text(value, key)]);
  return [words, table(main), element("details", "", element("summary", "All the numbers"), table(all))];
}
