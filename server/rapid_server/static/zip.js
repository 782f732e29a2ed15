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

const MOST = 0xffff; // files that the plain end of a zip can count

/** files: [{name, bytes}], names in ASCII, less than 4 GiB together. Returns a Blob. */
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
  const count = files.length;
  // more files than that are counted in an end of their own (zip64), and a word that says where it is
  const large = count < MOST ? [] : [
    fields([4, 0x06064b50], [8, 44], [2, 45], [2, 45], [4, 0], [4, 0], [8, count], [8, count], [8, directorySize], [8, offset]),
    fields([4, 0x07064b50], [4, 0], [8, offset + directorySize], [4, 1]),
  ];
  const counted = Math.min(count, MOST);
  const end = fields([4, 0x06054b50], [2, 0], [2, 0], [2, counted], [2, counted], [4, directorySize], [4, offset], [2, 0]);
  return new Blob([...parts, ...directory, ...large, end], { type: "application/zip" });
}
