// Progress of a run: images done, rate, time left.

import { byId } from "./element.js";
import { duration, images } from "./words.js";

const [box, bar, pace, said] = ["progress", "bar", "pace", "said"].map(byId);
const WINDOW = 5_000; // milliseconds over which the rate is measured
const SAY_EVERY = 10_000; // milliseconds between updates for screen readers

let marks = []; // [time, done], the oldest first
let count = 0;
let told = 0;
let clock = null;

function show() {
  const now = performance.now();
  const [, done] = marks.at(-1);
  while (marks.length > 2 && now - marks[1][0] > WINDOW) marks.shift();
  const [since, before] = marks[0];
  const rate = (1000 * (done - before)) / (now - since);
  const parts = [`${done.toLocaleString("en")} of ${images(count)}`];
  if (!done) parts.push(`waiting for the first, ${duration((now - since) / 1000)}`);
  else if (rate > 0) {
    parts.push(`${rate.toLocaleString("en", { maximumSignificantDigits: rate >= 100 ? 3 : 2 })} a second`);
    if (done < count) parts.push(`about ${duration((count - done) / rate)} left`);
  }
  bar.value = done;
  pace.textContent = parts.join(", ");
  if (now - told > SAY_EVERY) {
    told = now;
    said.textContent = pace.textContent;
  }
}

export function begin(total) {
  count = total;
  told = performance.now();
  marks = [[told, 0]];
  bar.max = total;
  box.hidden = false;
  said.textContent = `Generating ${images(total)}.`;
  show();
  clock = setInterval(show, 250);
}

export function reach(done) {
  const now = performance.now();
  // the rate excludes the wait before the first image
  if (done && !marks.at(-1)[1]) marks = [[marks.at(-1)[0], 0]];
  marks.push([now, done]);
}

export function end(words) {
  clearInterval(clock);
  box.hidden = true;
  said.textContent = words;
}
