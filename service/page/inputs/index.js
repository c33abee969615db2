// What one asks with, by what the model takes. Each input is an object with
//   element          what people see
//   rows()           rows as JSON, or null while there is nothing to ask; throws, in words, where one is wrong
//   files()          image files to send as a form instead, or null
//   pictures()       for each row a picture of it, or null
//   saved()          what `restore` brings back, for a link; null where it is too much for one, or one is wrong
//   restore(saved)     shows it, and asks nothing
//   example(row)       what `restore` takes to show a row of GET /predict/examples
//   others             further examples, [name, what makes what `restore` takes]: something strange

import { fill, h, tabs } from "../dom.js";
import { canvasInput, canBeDrawn } from "./canvas.js";
import { columnsInput } from "./columns.js";
import { filesInput } from "./files.js";
import { numbersInput } from "./numbers.js";
import { textInput } from "./text.js";

const PAUSE_MS = 300; // of typing, before what was typed is asked

/** The input for a model, by its manifest's `input`; `changed` is called when there is something else to ask. */
export function inputFor(spec, changed) {
  const typed = afterPause(changed);
  const kinds = [];
  if (spec.text) kinds.push(["Text", textInput, typed]);
  if (spec.columns.length) kinds.push(["Columns", columnsInput, typed]);
  if (canBeDrawn(spec)) kinds.push(["Draw", canvasInput, changed]);
  if (spec.image) kinds.push(["Image files", filesInput, changed]);
  if (!spec.text && !spec.columns.length) kinds.push(["Numbers", numbersInput, typed]);
  const inputs = kinds.map(([, make, then]) => make(spec, then));
  const examples = h("p", { class: "examples" });
  let started = false;
  const bar = tabs("How to ask", kinds.map(([name], i) => [name, h("div", {}, inputs[i].element)]), () => {
    if (started) changed();
  });
  started = true;
  const now = () => inputs[bar.chosen];
  const example = (name, saved) => h("button", { type: "button", onclick: async () => {
    now().restore(await saved());
    changed();
  } }, name);
  const offer = (rows, words = null) => fill(examples, words, h("span", { class: "quiet" }, "Try"), rows.map(([name, row]) => example(name, () => now().example(row))), inputs[0].others.map(([name], i) => example(name, () => now().others[i][1]())));
  offer([]);
  return {
    element: h("div", {}, bar.element, examples),
    /** Offer rows, [name, row]; a form shows the first where `isFirst`. */
    offer(rows, isFirst) {
      offer(rows, spec.columns.length && !rows.length ? h("span", { class: "quiet" }, "Each column begins with its usual value; together they need not be usual.") : null);
      if (isFirst && spec.columns.length && rows.length) now().restore(now().example(rows[0][1]));
    },
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

/** The same, called once when there was a pause after the last call. */
function afterPause(call) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, PAUSE_MS);
  };
}
