// Queries in addresses. The fragment of an address is never sent to a server.

const MAX_LENGTH = 60_000; // characters of an address
const FILES = "\u0000files"; // key of encoded files

/** Encode a query for an address; null if it is too long. */
export async function encodeQuery(query) {
  const packed = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify({ ...query, value: await packFiles(query.value) })));
  const text = toBase64(packed).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return text.length > MAX_LENGTH ? null : text;
}

/** Decode a query; throws if the address is damaged. */
export async function decodeQuery(text) {
  try {
    const unpacked = await through(new DecompressionStream("deflate-raw"), fromBase64(text.replaceAll("-", "+").replaceAll("_", "/")));
    const query = JSON.parse(new TextDecoder().decode(unpacked));
    return { ...query, value: query.value?.[FILES]?.map(({ name, content }) => new File([fromBase64(content)], name)) ?? query.value };
  } catch {
    throw new Error("This link is damaged. It may have been cut off when it was copied.");
  }
}

async function packFiles(value) {
  if (!Array.isArray(value) || !(value[0] instanceof File)) return value;
  if (value.reduce((sum, file) => sum + file.size, 0) > MAX_LENGTH) return null;
  return { [FILES]: await Promise.all(value.map(async (file) => ({ name: file.name, content: toBase64(new Uint8Array(await file.arrayBuffer())) }))) };
}

const toBase64 = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

async function through(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
