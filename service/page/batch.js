// Predict the rows of a CSV file, and save the predictions as CSV.

import { requestJson } from "./api.js";
import { Button, download, html, Notice, useRef, useState } from "./components.js";
import { number } from "./format.js";
import { parseCsv, writeCsv } from "./csv.js";
import { parseCell } from "./inputs/columns.js";

const CHUNK_ROWS = 256;

/** Offer to predict a file. */
export function Batch({ fields, manifest }) {
  const [state, setState] = useState({ done: 0 });
  const run = useRef(0); // number of the latest file
  const columns = manifest.input.columns;
  const predictFile = async (file) => {
    const turn = ++run.current;
    const update = (next) => turn === run.current && setState(next);
    try {
      const [head, ...cells] = parseCsv(await file.text());
      const missing = columns.filter(({ name }) => !head?.includes(name)).map(({ name }) => name);
      if (missing.length) throw new Error(`The file lacks the columns ${missing.join(", ")}.`);
      const rows = cells.map((row, n) => Object.fromEntries(columns.map((column) => {
        try {
          return [column.name, parseCell(column, row[head.indexOf(column.name)] ?? null)];
        } catch (error) {
          throw new Error(`Row ${n + 1}: ${error.message}`);
        }
      })));
      const predictions = [];
      for (let start = 0; start < rows.length && turn === run.current; start += CHUNK_ROWS) {
        update({ name: file.name, done: start, total: rows.length });
        const inputs = rows.slice(start, start + CHUNK_ROWS);
        try {
          predictions.push(...(await requestJson("predict", { method: "POST", json: { ...fields, inputs } })).predictions);
        } catch (error) {
          throw new Error(error.message.replace(/^inputs\.(\d+)\.?/, (_, n) => `Row ${start + Number(n) + 1}: `));
        }
      }
      update({ name: file.name, done: rows.length, total: rows.length, flagged: predictions.filter(({ flag }) => flag).length, content: writeCsv([[...head, ...NAMES[manifest.task === "regression" ? "regression" : "classification"]], ...cells.map((row, i) => [...head.map((_, c) => row[c] ?? ""), ...results(predictions[i])])]) });
    } catch (error) {
      update({ done: 0, error: error.message });
    }
  };
  return html`<details class="batch"><summary>Predict a CSV file</summary>
    <p><label for="batch-file">CSV file with a header</label> <input type="file" id="batch-file" accept=".csv,text/csv" onchange=${(event) => event.target.files[0] && predictFile(event.target.files[0])} /></p>
    ${state.error && html`<${Notice}>${state.error}<//>`}
    ${state.total > 0 && html`<p role="status">${number(state.done)} of ${number(state.total)} rows${state.content ? `; ${number(state.flagged)} are flagged.` : " …"}</p>`}
    ${state.content && html`<p><${Button} onclick=${() => download("predictions.csv", state.content, "text/csv")}>Save predictions (CSV)<//></p>`}
  </details>`;
}

const NAMES = {
  classification: ["prediction", "probability", "prediction_set", "flag", "p_value"],
  regression: ["prediction", "std", "low", "high", "flag", "p_value"],
};

function results(row) {
  const end = [row.flag, row.p_value];
  if (row.mean !== undefined) return [row.mean, row.std, ...row.interval, ...end];
  return [row.label, Math.max(...row.probabilities), row.prediction_set.join(" | "), ...end];
}
