// Pack files into a zip without compression: PNGs are compressed already.

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = CRC_TABLE[(value ^ byte) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

// Little-endian fields: pairs of [bytes, value].
function fields(...pairs) {
  const out = [];
  for (const [size, value] of pairs) for (let i = 0; i < size; i++) out.push(Math.floor(value / 256 ** i) % 256);
  return Uint8Array.from(out);
}

/** files: [{name, bytes}], names in ASCII, fewer than 65,536. Returns a Blob. */
export function zip(files) {
  const parts = [];
  const directory = [];
  let offset = 0;
  let directorySize = 0;
  for (const { name, bytes } of files) {
    const path = new TextEncoder().encode(name);
    // version 2.0, no flags, stored, 1980-01-01 00:00
    const common = [[2, 20], [2, 0], [2, 0], [2, 0], [2, 0x21], [4, crc32(bytes)], [4, bytes.length], [4, bytes.length],
      [2, path.length], [2, 0]];
    const local = fields([4, 0x04034b50], ...common);
    const entry = fields([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]);
    parts.push(local, path, bytes);
    directory.push(entry, path);
    offset += local.length + path.length + bytes.length;
    directorySize += entry.length + path.length;
  }
  const end = fields([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, directorySize], [4, offset], [2, 0]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}
