// An answer in JSON lines, as it comes.

/** The objects of the lines, in lists of those that came together. */
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
    reader.cancel().catch(() => {}); // it has failed, or nobody reads on
  }
}
