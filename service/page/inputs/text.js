// A text, or several separated by empty lines.

import { field, h } from "../dom.js";

const EXAMPLES = ["What a lovely day it was.", "I have never been so disappointed.", "xqzv jkkp wwlo tzzg"];

/** Create the input of a text model. */
export function textInput(spec, changed) {
  const area = h("textarea", { rows: 8, oninput: changed, spellcheck: "true" });
  return {
    element: field("Text", area, `Separate texts with an empty line. A text of more than ${spec.text.max_tokens} tokens is cut off at the ${spec.text.truncation === "left" ? "beginning" : "end"}.`),
    rows() {
      const texts = area.value.split(/\n\s*\n/).map((text) => text.trim()).filter(Boolean);
      return texts.length ? texts : null;
    },
    saved: () => area.value,
    restore(saved) {
      area.value = saved;
    },
    others: EXAMPLES.map((text) => [text, () => text]),
  };
}
