// The view `live`.

import { fill, h } from "./dom.js";

/** Show it. */
export async function show(view) {
  fill(view, h("h1", {}, "live"));
  return () => {};
}
