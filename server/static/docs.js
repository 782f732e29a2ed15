// Show /openapi.json to a reader.

import { element } from "./privacy.js";

const main = document.getElementById("main");
const STATUS = { 200: "Done" };

let schemas = {};

function resolve(schema) {
  return schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

// A schema as a few words: "integer from 1 to 1000 | null".
function words(schema) {
  schema = resolve(schema);
  if (!schema || Object.keys(schema).length === 0) return "anything";
  if (schema.anyOf) return schema.anyOf.map(words).join(" | ");
  if (schema.type === "array") return `list of (${words(schema.items)})`;
  if (schema.type === "integer" || schema.type === "number") {
    const end = schema.exclusiveMaximum === undefined ? schema.maximum : `below ${power(schema.exclusiveMaximum)}`;
    const from = schema.minimum === undefined ? "" : ` from ${schema.minimum}`;
    return schema.type + from + (end === undefined ? "" : ` to ${end}`);
  }
  return schema.type ?? "anything";
}

function power(value) {
  const exponent = Math.log2(value);
  return Number.isInteger(exponent) && exponent > 20 ? `2^${exponent}` : String(value);
}

function table(schema) {
  const optional = (name) => !(schema.required ?? []).includes(name);
  const rows = Object.entries(schema.properties).map(([name, property]) => element("tr", "",
    element("td", "", element("code", name)),
    element("td", words(property)),
    element("td", "", ...marked((optional(name) ? "(optional) " : "") + (property.description ?? "")))));
  const head = element("tr", "", ...["Field", "Type", "Meaning"].map((text) => element("th", text)));
  const made = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...rows)));
  made.className = "scroll";
  return made;
}

// Text in which `this` is code.
function marked(text) {
  return text.split("`").map((part, place) => (place % 2 ? element("code", part) : part));
}

function command(method, path, body) {
  const address = new URL(path.replace(/^\//, ""), document.baseURI).href;
  if (method === "get") return `curl ${address}`;
  return `curl ${address} -H 'Content-Type: application/json' \\\n     -d '${JSON.stringify(body)}'`;
}

function operation(method, path, content) {
  const badge = element("span", method.toUpperCase());
  badge.className = "method";
  const made = element("section", "", element("h2", "", badge, element("code", path)));
  made.append(element("p", "", ...marked([content.summary, content.description].filter(Boolean).join(". "))));
  const asked = resolve(content.requestBody?.content["application/json"]?.schema);
  if (asked) made.append(element("h4", "Body (JSON)"), table(asked));
  made.append(element("h4", "Try it"));
  for (const example of asked?.examples ?? [null]) made.append(element("pre", command(method, path, example)));
  if (asked) made.append(element("pre", `${command(method, path, asked.examples?.[0])} \\\n     -H 'Accept: image/png' -o images.png`));
  const answers = Object.entries(content.responses).map(([code, answer]) => {
    const types = Object.keys(answer.content ?? {}).join(", ");
    return element("tr", "", element("td", "", element("code", code)),
      element("td", "", ...marked(STATUS[code] && answer.description === "Successful Response" ? STATUS[code] : answer.description)), element("td", types));
  });
  const head = element("tr", "", ...["Status", "When", "Type"].map((text) => element("th", text)));
  const list = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...answers)));
  list.className = "scroll";
  made.append(element("h4", "Answers"), list);
  const given = resolve(content.responses[200]?.content?.["application/json"]?.schema);
  if (given?.properties) made.append(element("h4", "Fields of the JSON answer"), table(given));
  return made;
}

try {
  const response = await fetch("openapi.json");
  const description = await response.json();
  schemas = description.components?.schemas ?? {};
  document.getElementById("about").textContent = `${description.info.title} ${description.info.version}. ${description.info.description}`;
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, content] of Object.entries(methods)) main.append(operation(method, path, content));
  }
} catch {
  const error = document.getElementById("error");
  error.textContent = "The description cannot be read. Is the server still running?";
  error.hidden = false;
}
