// Renders /openapi.json.

import { byId, element } from "./element.js";

const main = byId("main");
const JSON_TYPE = "application/json";
// curl options for types that are not JSON
const KEPT = {
  "image/png": "-o images.png", "application/zip": "-o images.zip", "application/x-ndjson": "--no-buffer", "text/event-stream": "--no-buffer",
};

let schemas = {};

function resolve(schema) {
  return schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

// A schema in short: "integer from 1 to 1000 | null".
function words(schema) {
  schema = resolve(schema);
  if (!schema || Object.keys(schema).length === 0) return "anything";
  if (schema.anyOf) return schema.anyOf.map(words).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of (${words(schema.items)})`;
  if (schema.type === "integer" || schema.type === "number") {
    const end = schema.exclusiveMaximum === undefined ? schema.maximum : `below ${power(schema.exclusiveMaximum)}`;
    const from = schema.minimum === undefined ? "" : ` from ${schema.minimum}`;
    return schema.type + from + (end === undefined ? "" : ` to ${end}`);
  }
  if (schema.properties) return `object (${Object.keys(schema.properties).join(", ")})`;
  return schema.type ?? "anything";
}

function power(value) {
  const exponent = Math.log2(value);
  return Number.isInteger(exponent) && exponent > 20 ? `2^${exponent}` : String(value);
}

// Text in which `this` is code.
function marked(text) {
  return text.split("`").map((part, place) => (place % 2 ? element("code", part) : part));
}

function table(names, rows) {
  const head = element("tr", "", ...names.map((name) => Object.assign(element("th", name), { scope: "col" })));
  const lines = rows.map((cells) => element("tr", "", ...cells.map((parts) => element("td", "", ...[parts].flat()))));
  const made = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...lines)));
  made.className = "scroll";
  return made;
}

function fields(schema) {
  const optional = (name) => !(schema.required ?? []).includes(name);
  return table(["Field", "Type", "Meaning"], Object.entries(schema.properties).map(([name, property]) =>
    [element("code", name), words(property), marked((optional(name) ? "(optional) " : "") + (property.description ?? ""))]));
}

function parameters(given) {
  return table(["Name", "Type", "Where"], given.map((one) =>
    [element("code", one.name), words(one.schema), `${one.required ? "" : "(optional) "}in the ${one.in}`]));
}

// The address of an operation; whole numbers in the path are 0, other parameters their name in capitals.
function address(path, parameters = []) {
  const value = (name) => (resolve(parameters.find((one) => one.name === name)?.schema)?.type === "integer" ? "0" : name.toUpperCase());
  return new URL(path.replace(/^\//, "").replace(/\{([^}:]+)[^}]*\}/g, (_, name) => value(name)), document.baseURI).href;
}

function command(method, url, body, type) {
  const parts = [`curl ${url}`];
  if (method !== "get") parts.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(body)}'`);
  if (type && method !== "get") parts.push(`-H 'Accept: ${type}' ${KEPT[type] ?? ""}`.trim());
  else if (KEPT[type]) parts.push(KEPT[type]);
  return parts.join(method === "get" ? " " : " \\\n     ");
}

function code(text) {
  const made = element("pre", text);
  made.tabIndex = 0; // it may scroll
  return made;
}

function operation(method, path, content) {
  const badge = element("span", method.toUpperCase());
  badge.className = "method";
  const made = element("section", "", element("h2", "", badge, element("code", path)));
  const about = [content.summary, content.description].filter(Boolean).map((text) => (/[.?]$/.test(text) ? text : `${text}.`));
  made.append(element("p", "", ...marked(about.join(" "))));
  if (content.parameters?.length) made.append(element("h3", "Parameters"), parameters(content.parameters));
  const asked = resolve(content.requestBody?.content[JSON_TYPE]?.schema);
  if (asked) made.append(element("h3", "Body (JSON)"), fields(asked));
  made.append(element("h3", "Try it"));
  const types = Object.keys(content.responses[200]?.content ?? {});
  const url = address(path, content.parameters);
  for (const example of asked?.examples ?? [null]) {
    made.append(code(command(method, url, example, types.includes(JSON_TYPE) ? null : types[0])));
  }
  for (const type of asked ? types : []) {
    if (type !== JSON_TYPE) made.append(code(command(method, url, asked.examples?.[0], type)));
  }
  if (content.requestBody?.content["image/png"]) made.append(code(`curl ${url} -H 'Content-Type: image/png' --data-binary @image.png`));
  const statuses = Object.entries(content.responses).map(([status, response]) => [
    element("code", status),
    marked(response.description === "Successful Response" ? "Success" : response.description),
    Object.keys(response.content ?? {}).join(", "),
  ]);
  made.append(element("h3", "Responses"), table(["Status", "When", "Type"], statuses));
  const given = resolve(content.responses[200]?.content?.[JSON_TYPE]?.schema);
  if (given?.properties) made.append(element("h3", "Fields of the JSON response"), fields(given));
  return made;
}

try {
  const response = await fetch("openapi.json");
  const description = await response.json();
  schemas = description.components?.schemas ?? {};
  byId("about").textContent = `${description.info.title} ${description.info.version}. ${description.info.description}`;
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, content] of Object.entries(methods)) main.append(operation(method, path, content));
  }
  byId("tokens").hidden = false;
} catch {
  byId("error").textContent = "The description cannot be read. Is the server still running?";
  byId("error").hidden = false;
}
