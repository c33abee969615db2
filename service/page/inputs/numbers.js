// Rows of numbers, as JSON or with commas, spaces or tabs between: a row a line.

import { field, h } from "../dom.js";

/** The input of a model of numbers. */
export function numbersInput(spec, changed) {
  const size = spec.shape.reduce((a, b) => a * b, 1);
  const area = h("textarea", { rows: 8, oninput: changed, spellcheck: "false", class: "code" });
  const what = spec.dtype === "int32" ? "ids" : "numbers";
  return {
    element: field(`Rows of ${size} ${what}`, area, `From ${spec.minimum} to ${spec.maximum} in the training data. A row a line, with commas or spaces between; or JSON.`),
    rows: () => parsed(area.value),
    saved: () => area.value,
    restore(saved) {
      area.value = saved;
    },
    example: (row) => row.flat(Infinity).join(", "),
    others: [["Noise", () => Array.from({ length: size }, () => chance(spec)).join(", ")]],
  };
}

const chance = ({ minimum, maximum, dtype }) => {
  const value = minimum + Math.random() * (maximum - minimum);
  return dtype === "int32" ? Math.round(value) : Number(value.toPrecision(4));
};

/** Rows of what was typed; what is no number is left as it is, so that the service says where it stands. */
function parsed(text) {
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
