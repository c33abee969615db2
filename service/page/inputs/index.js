// Input controls, chosen by the model's input. Each is an object with
//   element            its element
//   rows()             rows as JSON, or null if empty; throws a readable Error if a value is invalid
//   files()            image files to send as a form instead, or null
//   pictures()         an element for each row, or null
//   saved()            state for `restore`, or null if it is too large or invalid
//   restore(saved)     shows a saved state without predicting
//   example(row)       converts a row of GET /predict/examples to a saved state
//   others             unusual examples: [name, function that returns a saved state]

import { fill, h, tabs } from "../dom.js";
import { canvasInput, canBeDrawn } from "./canvas.js";
import { columnsInput } from "./columns.js";
import { filesInput } from "./files.js";
import { numbersInput } from "./numbers.js";
import { textInput } from "./text.js";

const TYPING_PAUSE_MS = 300;

/** Create the input for a manifest's `input`; `changed` is called when the rows change. */
export function inputFor(spec, changed) {
  const typed = afterPause(changed);
  const kinds = [];
  if (spec.text) kinds.push(["Text", textInput, typed]);
  if (spec.columns.length) kinds.push(["Columns", columnsInput, typed]);
  if (canBeDrawn(spec)) kinds.push(["Draw", canvasInput, changed]);
  if (spec.image) kinds.push(["Image files", filesInput, changed]);
  if (!spec.text && !spec.columns.length) kinds.push(["Numbers", numbersInput, typed]);
  const inputs = kinds.map(([, create, onchange]) => create(spec, onchange));
  const examples = h("p", { class: "examples" });
  let isReady = false;
  const bar = tabs("Input type", kinds.map(([name], i) => [name, h("div", {}, inputs[i].element)]), () => {
    if (isReady) changed();
  });
  isReady = true;
  const current = () => inputs[bar.selected];
  const exampleButton = (name, saved) => h("button", { type: "button", onclick: async () => {
    current().restore(await saved());
    changed();
  } }, name);
  const showExamples = (rows, hint = null) => fill(examples, hint, h("span", { class: "quiet" }, "Examples"), rows.map(([name, row]) => exampleButton(name, () => current().example(row))), inputs[0].others.map(([name], i) => exampleButton(name, () => current().others[i][1]())));
  showExamples([]);
  return {
    element: h("div", {}, bar.element, examples),
    /** Show example rows, [name, row]; with `fillsForm` a form starts with the first. */
    offer(rows, fillsForm) {
      showExamples(rows, spec.columns.length && !rows.length ? h("span", { class: "quiet" }, "Each column starts at its usual value; the combination may be unusual.") : null);
      if (fillsForm && spec.columns.length && rows.length) current().restore(current().example(rows[0][1]));
    },
    rows: () => current().rows(),
    files: () => current().files?.() ?? null,
    pictures: () => current().pictures?.() ?? null,
    saved() {
      let saved = null;
      try {
        saved = current().saved();
      } catch {
        // An invalid value cannot be saved.
      }
      return saved === null ? null : { kind: kinds[bar.selected][0], saved };
    },
    restore({ kind, saved }) {
      const i = kinds.findIndex(([name]) => name === kind);
      if (i < 0) throw new Error(`this model has no input of type "${kind}"`);
      inputs[i].restore(saved);
      bar.choose(i);
    },
  };
}

/** Debounce a function until the user stops typing. */
function afterPause(call) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, TYPING_PAUSE_MS);
  };
}
