// The view `models`.

import { fill, h } from "./dom.js";

/** Show it. */
export async function show(view) {
  fill(view, h("h1", {}, "models"));
  return () => {};
}
