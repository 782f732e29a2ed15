// The token: requested only when the server requires one, kept until the tab is closed, sent with every request.

import { byId } from "./element.js";

const KEY = "rapid-token";
const [dialog, form, field, wrong, forget] = ["token-dialog", "token-form", "token", "token-wrong", "forget"].map(byId);

let token = stored();
let asking = null; // a promise, while the dialog is open

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // storage is blocked: the token lives as long as the page
  }
}

function keep(value) {
  token = value;
  forget.hidden = !token;
  try {
    if (token) sessionStorage.setItem(KEY, token);
    else sessionStorage.removeItem(KEY);
  } catch {
    // see above
  }
}

function complain(words) {
  wrong.textContent = words;
  wrong.hidden = !words;
}

// Opens the dialog; resolves to true when a token was entered, to false when it was closed without one.
function entered() {
  asking ??= new Promise((resolve) => {
    field.value = "";
    dialog.returnValue = ""; // of an earlier time
    dialog.showModal();
    field.focus();
    dialog.addEventListener("close", () => { asking = null; resolve(dialog.returnValue === "entered"); }, { once: true });
  });
  return asking;
}

/** fetch with the token; on 401 it asks for one and tries again. */
export async function ask(path, options = {}) {
  for (;;) {
    const sent = token;
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...(sent && { Authorization: `Bearer ${sent}` }) } });
    if (response.status !== 401) return response;
    if (token !== sent) continue; // another request has got one meanwhile
    complain(sent ? "The server does not know this token." : "");
    if (!(await entered())) return response;
    options.signal?.throwIfAborted();
  }
}

export const hasToken = () => Boolean(token);

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const value = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(value)) {
    complain("A token has letters, digits and punctuation, and no spaces.");
    field.focus();
    return;
  }
  keep(value);
  dialog.close("entered");
});
byId("token-later").addEventListener("click", () => dialog.close("later"));
dialog.addEventListener("cancel", () => { dialog.returnValue = "later"; });
forget.addEventListener("click", () => { keep(null); location.reload(); });
forget.hidden = !token;
