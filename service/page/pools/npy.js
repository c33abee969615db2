// Arrays as numpy saves them. Of a file no more is read than the header and the rows that are wanted.

const HEADER_BYTES = 1 << 17; // read at most
const MOST_FORTRAN = 64 << 20; // bytes of an array whose columns lie one after the other, which is read whole
const READERS = {
  f2: "getFloat16", f4: "getFloat32", f8: "getFloat64", i1: "getInt8", u1: "getUint8", i2: "getInt16", u2: "getUint16", i4: "getInt32", u4: "getUint32",
  i8: "getBigInt64", u8: "getBigUint64", b1: "getUint8",
};

/** What the header of a npy file says: {shape, fortran, kind, little, start}; `first` are the file's first bytes. */
export function headerOf(first) {
  const view = new DataView(first.buffer, first.byteOffset, first.byteLength);
  const text = (from, to) => new TextDecoder("latin1").decode(first.subarray(from, to));
  if (first.length < 12 || first[0] !== 0x93 || text(1, 6) !== "NUMPY") throw new Error("it is no npy file");
  const isLong = first[6] > 1;
  const start = (isLong ? 12 : 10) + (isLong ? view.getUint32(8, true) : view.getUint16(8, true));
  if (start > HEADER_BYTES) throw new Error("its header is too long");
  const header = text(isLong ? 12 : 10, start);
  const descr = /'descr':\s*'([<>|=])(\w+)'/.exec(header);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(header);
  if (!descr || !shape) throw new Error("its header says nothing that the page understands");
  return { shape: shape[1].split(",").map((part) => part.trim()).filter(Boolean).map(Number), fortran: /'fortran_order':\s*True/.test(header), kind: descr[2], little: descr[1] !== ">", start };
}

/** The rows of those indices, as arrays of numbers, of a Blob, or of a stream that is read up to the last of them. */
export async function rowsOf(content, indices, mostBytes) {
  const read = content instanceof Blob ? blobReader(content) : streamReader(content, mostBytes);
  const header = headerOf(await read(0, Math.min(HEADER_BYTES, content.size ?? HEADER_BYTES), true));
  if (!READERS[header.kind]) throw new Error(`the page does not read numbers of type ${header.kind}`);
  const bytes = Number(header.kind.slice(1));
  const [count, ...shape] = header.shape;
  const numbers = shape.reduce((a, b) => a * b, 1);
  const rows = new Map();
  if (header.fortran) {
    const size = count * numbers * bytes;
    if (size > MOST_FORTRAN) throw new Error(`it is in Fortran order, of which the page reads ${MOST_FORTRAN >> 20} MB`);
    const whole = await read(header.start, header.start + size);
    await read.end?.();
    if (whole.length < size) throw new Error("it is shorter than its header says");
    const view = new DataView(whole.buffer, whole.byteOffset, whole.byteLength);
    const places = inFortranOrder(shape);
    for (const index of indices) rows.set(index, places.map((place) => numberAt(view, header, (index + count * place) * bytes)));
    return { shape: header.shape, rows };
  }
  for (const index of [...new Set(indices)].sort((a, b) => a - b)) {
    const start = header.start + index * numbers * bytes;
    const part = await read(start, start + numbers * bytes);
    const view = new DataView(part.buffer, part.byteOffset, part.byteLength);
    if (part.length < numbers * bytes) throw new Error("it is shorter than its header says");
    rows.set(index, Array.from({ length: numbers }, (_, i) => numberAt(view, header, i * bytes)));
  }
  await read.end?.();
  return { shape: header.shape, rows };
}

function numberAt(view, { kind, little }, place) {
  return kind === "f2" && !view.getFloat16 ? halfOf(view.getUint16(place, little)) : Number(view[READERS[kind]](place, little));
}

/** A number of half precision, for browsers that do not read one. */
function halfOf(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
  return bits >> 15 ? -size : size;
}

/** Where each number of a row of that shape lies in Fortran order, for the numbers in C order. */
function inFortranOrder(shape) {
  let places = [0], stride = 1;
  for (const length of shape) {
    const before = stride;
    places = places.flatMap((place) => Array.from({ length }, (_, i) => place + i * before));
    stride *= length;
  }
  return places;
}

function blobReader(blob) {
  return async (start, end) => new Uint8Array(await blob.slice(start, end).arrayBuffer());
}

/** Parts of a stream in the order in which they lie: nothing of what is passed over is kept. */
function streamReader(stream, mostBytes) {
  const reader = stream.getReader();
  let held = new Uint8Array(0), heldFrom = 0;
  const read = async (start, end, mayBeShort = false) => {
    if (start > mostBytes) throw new Error("its rows lie further in the file than the page reads");
    while (heldFrom + held.length < end) {
      const { done, value } = await reader.read();
      if (done) break;
      const kept = held.subarray(Math.min(held.length, Math.max(0, Math.min(start, heldFrom + held.length) - heldFrom)));
      const joined = new Uint8Array(kept.length + value.length);
      joined.set(kept);
      joined.set(value, kept.length);
      heldFrom += held.length - kept.length;
      held = joined;
    }
    const part = held.slice(start - heldFrom, end - heldFrom);
    if (part.length < end - start && !mayBeShort) throw new Error("it ends too early");
    return part;
  };
  read.end = () => reader.cancel();
  return read;
}
