// Links that replay a query. The input is in the address's fragment, which browsers never send.

const MAX_LENGTH = 60_000; // characters of a link

/** Encode a query as the part of an address after `#/ask/`; null if it is too long. */
export async function encode(query) {
  const packed = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(query)));
  let text = "";
  for (const byte of packed) text += String.fromCharCode(byte);
  const link = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return link.length > MAX_LENGTH ? null : link;
}

/** Decode a query from a link; throws if the link is damaged. */
export async function decode(link) {
  try {
    const text = atob(link.replaceAll("-", "+").replaceAll("_", "/"));
    const unpacked = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(text, (c) => c.charCodeAt(0)));
    return JSON.parse(new TextDecoder().decode(unpacked));
  } catch {
    throw new Error("This link is damaged. It may have been cut off when it was copied.");
  }
}

async function through(stream, bytes) {
  const result = new Response(new Blob([bytes]).stream().pipeThrough(stream));
  return new Uint8Array(await result.arrayBuffer());
}
