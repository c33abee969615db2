// Zip archives, read where they lie: the list of entries at the end, and each entry alone when it is wanted.

const END = 0x06054b50, ENTRY = 0x02014b50, LOCAL = 0x04034b50;
const END_BYTES = 22, LONGEST_COMMENT = 0xffff;
const MOST_LIST_BYTES = 32 << 20; // of entries

/** The entries of a zip, by name: {name, method, packed, size, offset}. Throws where it cannot be read. */
export async function entriesOf(file) {
  const tail = await viewOf(file, Math.max(0, file.size - END_BYTES - LONGEST_COMMENT), file.size);
  let at = tail.byteLength - END_BYTES;
  while (at >= 0 && tail.getUint32(at, true) !== END) at--;
  if (at < 0) throw new Error("it is no zip file");
  const count = tail.getUint16(at + 10, true), size = tail.getUint32(at + 12, true), start = tail.getUint32(at + 16, true);
  if (start === 0xffffffff || count === 0xffff) throw new Error("it is larger than the page reads zip files");
  if (size > MOST_LIST_BYTES || start + size > file.size) throw new Error("its list of files cannot be read");
  const list = await viewOf(file, start, start + size);
  const entries = new Map();
  for (let i = 0, place = 0; i < count && place + 46 <= list.byteLength; i++) {
    if (list.getUint32(place, true) !== ENTRY) throw new Error("its list of files is damaged");
    const [nameBytes, extra, comment] = [28, 30, 32].map((offset) => list.getUint16(place + offset, true));
    const name = new TextDecoder().decode(new Uint8Array(list.buffer, place + 46, nameBytes));
    entries.set(name, { name, method: list.getUint16(place + 10, true), packed: list.getUint32(place + 20, true), size: list.getUint32(place + 24, true), offset: list.getUint32(place + 42, true) });
    place += 46 + nameBytes + extra + comment;
  }
  return entries;
}

/** What is in an entry, as a stream. A Blob instead where nothing is packed: parts of it can then be read alone. */
export async function contentOf(file, entry) {
  const local = await viewOf(file, entry.offset, entry.offset + 30);
  if (local.byteLength < 30 || local.getUint32(0, true) !== LOCAL) throw new Error("an entry is damaged");
  const start = entry.offset + 30 + local.getUint16(26, true) + local.getUint16(28, true);
  const packed = file.slice(start, start + entry.packed);
  if (entry.method === 0) return packed;
  if (entry.method === 8) return packed.stream().pipeThrough(new DecompressionStream("deflate-raw"));
  throw new Error("it is packed in a way that the page does not read");
}

/** The bytes of a stream or Blob; throws where there are more than `most`. */
export async function bytesOf(content, most) {
  const reader = (content instanceof Blob ? content.stream() : content).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) {
      await reader.cancel();
      throw new Error("it is too large to be shown");
    }
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function viewOf(file, start, end) {
  return new DataView(await file.slice(start, end).arrayBuffer());
}
