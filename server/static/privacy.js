// The privacy statement of a model, in plain words, as elements of the page.

export function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

// 0.00001, 0.71, 22,026: as people write numbers.
function number(value) {
  if (typeof value !== "number") return String(value);
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1).replace(".0e", "e").replace("e", " × 10^");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 12 : 4 });
}

function power(text) {
  // "1 × 10^-5" with a raised exponent
  const [base, exponent] = text.split("^");
  return exponent === undefined ? [base] : [base, element("sup", exponent.replace("-", "−"))];
}

function factor(epsilon) {
  const value = Math.exp(epsilon);
  if (value >= 1e6) return [`e`, element("sup", number(epsilon))];
  return [value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 0 : 2)];
}

function words(value) {
  if (value === null || typeof value !== "object") return [String(value)];
  return [Object.entries(value).map(([key, part]) => `${key} ${part}`).join(", ")];
}

export function statement(privacy) {
  if (privacy === null) {
    return [
      element("p", "This model was trained on public images only. No private image was used, so there is nothing to protect " +
        "and no guarantee to state."),
    ];
  }
  const unit = privacy.unit ?? "one image";
  const bold = (...children) => element("strong", "", ...children);
  const size = typeof privacy.dataset_size === "number" ? `${number(privacy.dataset_size)} private images` : "private images";
  const rows = Object.entries(privacy).map(([key, value]) => {
    const name = element("th", key.replaceAll("_", " "));
    name.scope = "row";
    return element("tr", "", name, element("td", "", ...(typeof value === "number" ? power(number(value)) : words(value))));
  });
  return [
    element("p", "", "These images are synthetic: a model draws them that learned from ", bold(size), " under differential privacy, with ",
      bold("ε = ", ...power(number(privacy.epsilon))), " and ", bold("δ = ", ...power(number(privacy.delta))), "."),
    element("p", "", `What that promises: with or without ${unit} among the private ones, whatever the model makes, and whatever anyone `,
      "works out from it, would have come about with a similar chance: the two chances differ by a factor of at most ",
      bold(...factor(privacy.epsilon)), " (that is e", element("sup", "ε"), "), except with a probability of about δ. ",
      "Smaller numbers promise more", privacy.epsilon > 3 ? "; with an ε this large, the bound for the worst case is loose. " : ". ",
      "The promise is the same however many images are made."),
    element("p", "", `The promise is for ${unit}${privacy.adjacency ? ` (adjacency: ${privacy.adjacency})` : ""}. `,
      "Several images of one person or thing are, together, protected less. ",
      "The number of private images and the list of classes count as public."),
    element("details", "", element("summary", "All the numbers"), element("table", "", element("tbody", "", ...rows))),
  ];
}
