// The selected rows: previews with ranks and scores, labelling, and files of their IDs.

import { labelling } from "./labelling.js";
import { download, h, notice, number, table } from "./dom.js";

const MAX_ROWS = 200;

/** Show the answer of /acquire with controls for labelling; `pool` is null if the page no longer has it. */
export async function rankingElement(answer, pool, output, onlabel) {
  const { ranking } = answer;
  const first = ranking.slice(0, MAX_ROWS);
  const preview = pool === null
    ? { kind: "none", note: "The page no longer has the pool, so only index and ID are shown." }
    : await pool.preview(first, answer);
  const hidden = ranking.length > first.length ? `Showing the first ${MAX_ROWS} of ${number(ranking.length)} rows. The saved files contain all.` : null;
  const name = `${answer.model}-to-label`;
  const labels = labelling({ model: answer.model, output, rows: first, preview, pool, onlabel });
  const element = h("div", {},
    h("h2", {}, `Label ${ranking.length === 1 ? "this row" : `these ${number(ranking.length)} rows`} of ${number(answer.pool_size)}`),
    h("p", { class: "quiet" }, description(answer)),
    [preview.note, hidden].filter(Boolean).map((text) => notice(text, "told")),
    labels?.element,
    h("p", { class: "actions" },
      h("button", { type: "button", onclick: () => download(`${name}.csv`, asCsv(ranking), "text/csv") }, "Save IDs (CSV)"),
      h("button", { type: "button", onclick: () => download(`${name}.json`, JSON.stringify(answer, null, 1), "application/json") }, "Save IDs (JSON)")),
    rowList(first, preview));
  return { element, focus: labels?.focus ?? (() => {}), release: preview.release ?? (() => {}) };
}

function description(answer) {
  const excluded = answer.excluded ? ` Skipped ${number(answer.excluded)} labelled rows.` : "";
  const draws = answer.acquisition === "random" ? "" : `, ${number(answer.num_samples)} draws`;
  const race = answer.race ? `, race${answer.finalists === null ? "" : ` (${number(answer.finalists)} rows got all draws)`}` : "";
  const shares = answer.priors ? ", your class shares" : "";
  return `Ranked by ${answer.acquisition.replaceAll("_", " ")}${draws}${race}${shares}, seed ${answer.seed}, version ${answer.version}.${excluded}`;
}

function rowList(rows, { kind, contents, names = [] }) {
  if (kind === "pictures") {
    return h("ol", { class: "cards chosen-rows" }, rows.map((row) => h("li", {}, contents.get(row.index) ?? null, h("span", {}, h("strong", {}, `${row.rank}. `), row.id), scoreElement(row))));
  }
  if (kind === "texts") {
    return h("ol", { class: "texts chosen-rows" }, rows.map((row) => h("li", {}, h("p", {}, h("strong", {}, `${row.rank}. `), row.id, " ", scoreElement(row)), h("blockquote", {}, contents.get(row.index) ?? "–"))));
  }
  const cells = (row) => contents?.get(row.index) ?? names.map(() => "–");
  return table("Rows to label", ["rank", "id", "row", "score", ...names], rows.map((row) => [String(row.rank), row.id, number(row.index), row.control ? "control" : number(row.score), ...cells(row)]), [0, 2, 3]);
}

function scoreElement(row) {
  return row.control ? h("span", { class: "badge told" }, "control") : h("span", { class: "quiet" }, `score ${number(row.score)}`);
}

function asCsv(ranking) {
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const lines = ranking.map((row) => [row.rank, row.index, quoted(row.id), row.score ?? "", row.control].join(","));
  return `${["rank,index,id,score,control", ...lines].join("\r\n")}\r\n`;
}
