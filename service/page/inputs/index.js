// What one asks with, by what the model takes. Each input is an object with
//   element          what people see
//   rows()           rows as JSON, or null while there is nothing to ask; throws, in words, where one is wrong
//   files()          image files to send as a form instead, or null
//   pictures()       for each row a picture of it, or null
//   saved()          what `restore` brings back, for a link; null where it is too much for one, or one is wrong
//   restore(saved)

import { h, tabs } from "../dom.js";
import { canvasInput, canBeDrawn } from "./canvas.js";
import { columnsInput } from "./columns.js";
import { filesInput } from "./files.js";
import { numbersInput } from "./numbers.js";
import { textInput } from "./text.js";

/** The input for a model, by its manifest's `input`; `changed` is called when there is something else to ask. */
export function inputFor(spec, changed) {
  const kinds = [];
  if (spec.text) kinds.push(["Text", textInput]);
  if (spec.columns.length) kinds.push(["Columns", columnsInput]);
  if (canBeDrawn(spec)) kinds.push(["Draw", canvasInput]);
  if (spec.image) kinds.push(["Image files", filesInput]);
  if (!spec.text && !spec.columns.length) kinds.push(["Numbers", numbersInput]);
  const inputs = kinds.map(([, make]) => make(spec, changed));
  let started = false;
  const bar = tabs("How to ask", kinds.map(([name], i) => [name, h("div", {}, inputs[i].element)]), () => {
    if (started) changed();
  });
  started = true;
  const now = () => inputs[bar.chosen];
  return {
    element: bar.element,
    rows: () => now().rows(),
    files: () => now().files?.() ?? null,
    pictures: () => now().pictures?.() ?? null,
    saved() {
      let saved = null;
      try {
        saved = now().saved();
      } catch {
        // what is wrong is not kept
      }
      return saved === null ? null : { kind: kinds[bar.chosen][0], saved };
    },
    restore({ kind, saved }) {
      const i = kinds.findIndex(([name]) => name === kind);
      if (i < 0) throw new Error(`this model is not asked by "${kind}"`);
      inputs[i].restore(saved);
      bar.choose(i);
    },
  };
}
