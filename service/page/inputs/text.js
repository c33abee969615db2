// Texts, and rows of numbers.

import { Field, html } from "../components.js";

const EXAMPLES = ["What a lovely day it was.", "I have never been so disappointed.", "xqzv jkkp wwlo tzzg"];

/** A text, or several separated by empty lines. */
export const text = {
  name: "Text",
  isTyped: true,
  Control: ({ spec, value, onchange }) => html`
    <${Field} label="Text" hint=${`Separate texts with an empty line. A text of more than ${spec.text.max_tokens} tokens is cut off at the ${spec.text.truncation === "left" ? "beginning" : "end"}.`}>
      <textarea rows="8" spellcheck="true" value=${value} oninput=${(event) => onchange(event.target.value)} />
    <//>`,
  empty: () => "",
  rows(value) {
    const texts = value.split(/\n\s*\n/).map((each) => each.trim()).filter(Boolean);
    return texts.length ? texts : null;
  },
  odd: EXAMPLES.map((each) => [each, () => each]),
};

/** Rows of numbers: JSON, or a row per line separated by commas, spaces or tabs. */
export const numbers = {
  name: "Numbers",
  isTyped: true,
  Control: ({ spec, value, onchange }) => html`
    <${Field} label=${`Rows of ${spec.shape.reduce((a, b) => a * b, 1)} ${spec.dtype === "int32" ? "ids" : "numbers"}`} hint=${`Training range: ${spec.minimum} to ${spec.maximum}. One row per line, separated by commas or spaces; or JSON.`}>
      <textarea rows="8" spellcheck="false" class="code" value=${value} oninput=${(event) => onchange(event.target.value)} />
    <//>`,
  empty: () => "",
  rows: parseRows,
  fromRow: (row) => row.flat(Infinity).join(", "),
  odd: [["Noise", ({ shape, minimum, maximum, dtype }) => Array.from({ length: shape.reduce((a, b) => a * b, 1) }, () => {
    const value = minimum + Math.random() * (maximum - minimum);
    return dtype === "int32" ? Math.round(value) : Number(value.toPrecision(4));
  }).join(", ")]],
};

/** Parse rows; invalid numbers stay text, so that the service reports their position. */
function parseRows(content) {
  const trimmed = content.trim();
  if (!trimmed) return null;
  if (trimmed.startsWith("[")) {
    try {
      const rows = JSON.parse(trimmed);
      return Array.isArray(rows[0]) ? rows : [rows];
    } catch {
      return [trimmed];
    }
  }
  return trimmed.split(/\n+/).map((line) => line.trim().split(/[\s,;]+/).map((x) => (x !== "" && Number.isFinite(Number(x)) ? Number(x) : x)));
}
