// A text, or several with an empty line between.

import { field, h } from "../dom.js";

const EXAMPLES = ["What a lovely day it was.", "I have never been so disappointed.", "xqzv jkkp wwlo tzzg"];

/** The input of a model of text. */
export function textInput(spec, changed) {
  const area = h("textarea", { rows: 8, oninput: changed, spellcheck: "true" });
  return {
    element: field("Text", area, `An empty line begins another one. What is beyond ${spec.text.max_tokens} tokens is left out at the ${spec.text.truncation === "left" ? "beginning" : "end"}.`),
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
