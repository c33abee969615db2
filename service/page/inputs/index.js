// Kinds of input. Each is an object with
//   name, isTyped             whether to wait for a pause in typing
//   Control({spec, value, onchange, style})
//   empty(spec)               the value before anything is entered
//   rows(value, spec)         rows as JSON, or null without input; throws a readable Error if a value is invalid
//   fromRow(row, spec)        the value of an example row
//   odd                       unusual examples: [name, function of spec and value]
//   files(value)              optional: image files to send instead of rows

import { drawing } from "./drawing.js";
import { columns } from "./columns.js";
import { images } from "./images.js";
import { numbers, text } from "./text.js";

/** Return the kinds of input that a model takes; the first is the default. */
export function inputKinds(spec) {
  if (spec.text) return [text];
  if (spec.columns.length) return [columns];
  return [drawing.suits(spec) && drawing, spec.image && images, numbers].filter(Boolean);
}
