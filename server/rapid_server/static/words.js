// Numbers and durations in readable form, and the message of an error response.

import { element } from "./element.js";

export function images(count) {
  return `${count.toLocaleString("en")} image${count === 1 ? "" : "s"}`;
}

/** A positive number rounded to significant digits: never below the value, or with `direction` -1 never above it. */
export function rounded(value, digits, direction = 1) {
  if (!(value > 0 && value < Infinity)) return value;
  const [mantissa, exponent] = value.toExponential().split("e");
  const all = mantissa.replace(".", "");
  const kept = all.slice(0, digits);
  const more = direction > 0 && Number(all.slice(digits)) > 0 ? 1 : 0;
  return Number(`${Number(kept) + more}e${Number(exponent) - kept.length + 1}`);
}

// 0.00001, 0.71, 22,026: rounded up, as epsilon and delta must be, or with `direction` -1 down.
export function number(value, direction = 1) {
  if (typeof value !== "number") return String(value);
  if (value !== 0 && Math.abs(value) < 1e-4) return rounded(value, 2, direction).toExponential(1).replace(".0e", "e").replace("e", " × 10^");
  const digits = Math.abs(value) >= 1000 ? 12 : 4;
  return rounded(value, digits, direction).toLocaleString("en", { maximumSignificantDigits: digits });
}

// The same as parts of an element: "1 × 10^-5" with a raised exponent.
export function numerals(value, direction = 1) {
  const [base, exponent] = number(value, direction).split("^");
  return exponent === undefined ? [base] : [base, element("sup", exponent.replace("-", "−"))];
}

export function duration(seconds) {
  const whole = Math.max(1, Math.round(seconds));
  if (whole < 100) return `${whole} s`;
  if (whole < 6000) return `${Math.round(whole / 60)} min`;
  return `${(whole / 3600).toFixed(1)} h`;
}

/** The message of an error response. */
export async function problem(response) {
  if (response.status === 401) return "The server requires a token.";
  let words = `The server responded ${response.status} ${response.statusText}`.trim();
  try {
    const { detail } = await response.json();
    if (typeof detail === "string") words = `The server says: ${detail}`;
  } catch {
    // not JSON: the status has to do
  }
  const later = Number(response.headers.get("Retry-After"));
  const end = later > 0 ? `. Try again in about ${duration(later)}.` : ".";
  return words.replace(/\.$/, "") + end;
}

export const STRANGE = "The response is not one of rapid serve. Is there a proxy that answers for it?";

export const UNREACHABLE = "The server cannot be reached. Is it still running?";
