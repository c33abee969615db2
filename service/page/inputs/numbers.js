// Rows of numbers: JSON, or a row per line separated by commas, spaces or tabs.

import { field, h } from "../dom.js";

/** Create the input of a model that takes numbers. */
export function numbersInput(spec, changed) {
  const size = spec.shape.reduce((a, b) => a * b, 1);
  const area = h("textarea", { rows: 8, oninput: changed, spellcheck: "false", class: "code" });
  const unit = spec.dtype === "int32" ? "ids" : "numbers";
  return {
    element: field(`Rows of ${size} ${unit}`, area, `Training range: ${spec.minimum} to ${spec.maximum}. One row per line, separated by commas or spaces; or JSON.`),
    rows: () => parseRows(area.value),
    saved: () => area.value,
    restore(saved) {
      area.value = saved;
    },
    example: (row) => row.flat(Infinity).join(", "),
    others: [["Noise", () => Array.from({ length: size }, () => randomValue(spec)).join(", ")]],
  };
}

const randomValue = ({ minimum, maximum, dtype }) => {
  const value = minimum + Math.random() * (maximum - minimum);
  return dtype === "int32" ? Math.round(value) : Number(value.toPrecision(4));
};

/** Parse rows; invalid numbers stay text, so that the service reports their position. */
function parseRows(text) {
  const trimmed = text.trim();
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
