// A response in JSON lines, while it arrives.

/** Yields lists of objects: the lines that arrived together. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (rest + value).split("\n");
      rest = found.pop();
      if (found.length) yield found.map((line) => JSON.parse(line));
    }
  } finally {
    reader.cancel().catch(() => {}); // it failed, or the reader has stopped
  }
}
