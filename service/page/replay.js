// A question as a link, and back. It holds the input itself, in the part of the address that browsers send to nobody.

const MOST = 60_000; // characters of a link

/** The part of an address after `#/ask/` for a question; null where it would be too long. */
export async function written(question) {
  const packed = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(question)));
  let text = "";
  for (const byte of packed) text += String.fromCharCode(byte);
  const link = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return link.length > MOST ? null : link;
}

/** The question of such a link; throws where it is none. */
export async function read(link) {
  try {
    const text = atob(link.replaceAll("-", "+").replaceAll("_", "/"));
    const unpacked = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(text, (c) => c.charCodeAt(0)));
    return JSON.parse(new TextDecoder().decode(unpacked));
  } catch {
    throw new Error("This link is damaged: it may have been cut off where it was copied.");
  }
}

async function through(stream, bytes) {
  const result = new Response(new Blob([bytes]).stream().pipeThrough(stream));
  return new Uint8Array(await result.arrayBuffer());
}
