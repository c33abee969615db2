// The rows that are chosen: pictures, texts or columns, with their ranks and scores, and their ids to be saved.

import { labelling } from "./labelling.js";
import { download, h, notice, number, table } from "./dom.js";

const MOST_SHOWN = 200; // rows of a ranking

/** The answer of /acquire as people read it, and label it; `pool` is null where the page does not know it any more. */
export async function shownRanking(answer, pool, output, labelled) {
  const { ranking } = answer;
  const first = ranking.slice(0, MOST_SHOWN);
  const shown = pool === null
    ? { kind: "none", why: "This page does not know the pool any more, so index and id alone are shown." }
    : await pool.shown(first, answer);
  const hidden = ranking.length > first.length ? `The first ${MOST_SHOWN} of ${number(ranking.length)} rows are shown; what is saved has all.` : null;
  const name = `${answer.model}-to-label`;
  const asked = labelling({ model: answer.model, output, rows: first, shown, pool, labelled });
  const element = h("div", {},
    h("h2", {}, `Label ${ranking.length === 1 ? "this row" : `these ${number(ranking.length)} rows`} of ${number(answer.pool_size)}`),
    h("p", { class: "quiet" }, said(answer)),
    [shown.why, hidden].filter(Boolean).map((text) => notice(text, "told")),
    asked?.element,
    h("p", { class: "actions" },
      h("button", { type: "button", onclick: () => download(`${name}.csv`, asCsv(ranking), "text/csv") }, "Save the ids (CSV)"),
      h("button", { type: "button", onclick: () => download(`${name}.json`, JSON.stringify(answer, null, 1), "application/json") }, "Save the ids (JSON)")),
    rowsOf(first, shown));
  return { element, focus: asked?.focus ?? (() => {}), forget: shown.forget ?? (() => {}) };
}

function said(answer) {
  const excluded = answer.excluded ? ` ${number(answer.excluded)} that have labels were left out.` : "";
  const draws = answer.acquisition === "random" ? "" : `, ${number(answer.num_samples)} draws`;
  const race = answer.race ? `, a race${answer.finalists === null ? "" : ` in which ${number(answer.finalists)} rows took all of them`}` : "";
  const shares = answer.priors ? ", under the shares of classes that were stated" : "";
  return `By ${answer.acquisition.replaceAll("_", " ")}${draws}${race}${shares}, seed ${answer.seed}; version ${answer.version}.${excluded}`;
}

function rowsOf(rows, shown) {
  if (shown.kind === "pictures") {
    return h("ol", { class: "cards chosen-rows" }, rows.map((row) => h("li", {}, shown.of.get(row.index) ?? null, h("span", {}, h("strong", {}, `${row.rank}. `), row.id), scoreOf(row))));
  }
  if (shown.kind === "texts") {
    return h("ol", { class: "texts chosen-rows" }, rows.map((row) => h("li", {}, h("p", {}, h("strong", {}, `${row.rank}. `), row.id, " ", scoreOf(row)), h("blockquote", {}, shown.of.get(row.index) ?? "–"))));
  }
  const names = shown.names ?? [];
  const cells = (row) => (shown.of?.get(row.index) ?? names.map(() => "–"));
  return table("Rows to label", ["rank", "id", "row", "score", ...names], rows.map((row) => [String(row.rank), row.id, number(row.index), row.control ? "set aside" : number(row.score), ...cells(row)]), [0, 2, 3]);
}

function scoreOf(row) {
  return row.control ? h("span", { class: "badge told" }, "set aside") : h("span", { class: "quiet" }, `score ${number(row.score)}`);
}

function asCsv(ranking) {
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const lines = ranking.map((row) => [row.rank, row.index, quoted(row.id), row.score ?? "", row.control].join(","));
  return `${["rank,index,id,score,control", ...lines].join("\r\n")}\r\n`;
}
