// A run: a request, and the images that have arrived.

const safe = (text) => text.replace(/[^A-Za-z0-9_-]+/g, "_").slice(0, 60) || "_";

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return bytes;
}

export class Run {
  /** info: of the model, as in /info; seed: all its digits, as text. */
  constructor(info, seed, count, classes) {
    Object.assign(this, { info, seed, count, classes });
    this.slots = new Array(count).fill(null); // by place; null: not yet arrived
    this.done = 0;
    this.finished = false;
  }

  /** Takes a line of the stream whose type is image. */
  put({ index, label, entry, image }) {
    const end = label === null ? "" : `-${safe(label)}`;
    const name = `${safe(this.info.model)}-${this.seed}-${String(index).padStart(5, "0")}${end}.png`;
    if (!this.slots[index]) this.done += 1;
    this.slots[index] = { index, label, entry, name, bytes: bytesOf(image) };
  }

  /** No more images will arrive: removes empty places. */
  finish() {
    this.slots = this.slots.filter(Boolean);
    this.finished = true;
  }

  get files() {
    return this.slots.filter(Boolean);
  }

  get zipName() {
    return `${safe(this.info.model)}-${this.seed}.zip`;
  }

  /** The nearest image before (step -1) or after (step 1) another, or undefined. */
  near(image, step) {
    let slot = this.slots.indexOf(image) + step;
    while (slot >= 0 && slot < this.slots.length && !this.slots[slot]) slot += step;
    return this.slots[slot] ?? undefined;
  }
}

export function blobOf(image) {
  return new Blob([image.bytes], { type: "image/png" });
}
