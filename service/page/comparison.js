// Compare two versions in a table, with the differences marked.

import { requestJson } from "./api.js";
import { html, useFetch, useState } from "./components.js";
import { describeFigure, mergeFigures, signed } from "./figures.js";
import { bytes, duration, moment, number } from "./format.js";

/** Show all properties of two versions from GET /models/{name}/versions/{version}. */
export function Differences({ pair }) {
  const [isOnly, setIsOnly] = useState(false);
  const { data: reports } = useFetch((signal) => Promise.all(pair.map(({ report }) => (report ? requestJson(report.href, { signal }).catch(() => null) : null))), []);
  if (!reports) return html`<p class="quiet">Loading …</p>`;
  const groups = [
    ["Quality", qualityRows(pair, reports)],
    ["Data", dataRows(pair, reports)],
    ["Method", methodRows(pair)],
    ["Draws and detectors", detectorRows(pair)],
    ["Recipe differences", recipeRows(pair)],
  ].filter(([, rows]) => rows.length);
  return html`
    <p><input type="checkbox" id="only-differences" checked=${isOnly} onchange=${() => setIsOnly(!isOnly)} /> <label for="only-differences">Only differences</label></p>
    <div class="scroll" tabindex="0" role="region" aria-label="Differences"><table class=${`versions ${isOnly ? "only" : ""}`}>
      <caption>Differences are marked with ≠.</caption>
      <thead><tr><th scope="col">property</th>${pair.map(({ version }) => html`<th scope="col">version ${version}</th>`)}<th scope="col">difference</th></tr></thead>
      ${groups.map(([title, rows]) => html`<tbody><tr class="group"><th scope="rowgroup" colspan="4">${title}</th></tr>${rows.map(({ name, texts, differs, difference = "" }) => html`
        <tr class=${differs ? "differs" : null}><th scope="row">${differs && html`<span class="mark" title="differs">≠ </span>`}${name}</th>${texts.map((text) => html`<td>${text}</td>`)}<td class="number">${difference}</td></tr>`)}</tbody>`)}
    </table></div>`;
}

function row(name, values, write = format) {
  return { name, texts: values.map((value) => write(value)), differs: JSON.stringify(values[0] ?? null) !== JSON.stringify(values[1] ?? null) };
}

function qualityRows(pair, reports) {
  const figures = pair.map((version, i) => mergeFigures(version.manifest, version.report?.summary, reports[i]?.summary_intervals));
  const keys = [...new Set(figures.flat().map((figure) => figure.key))];
  const find = (i, key) => figures[i].find((figure) => figure.key === key) ?? { published: null, reported: null, interval: null };
  return keys.flatMap((key) => {
    const { name, write, better } = describeFigure(key);
    const direction = better ? ` (${better} is better)` : "";
    const both = [find(0, key), find(1, key)];
    const rows = [];
    if (both.some((figure) => figure.published !== null)) rows.push(numberRow(`${name}${direction}`, both.map((figure) => figure.published), write));
    if (both.some((figure) => figure.reported !== null)) {
      const withInterval = (value, i) => (both[i].interval ? `${write(value)} (${both[i].interval.map((end) => write(end)).join(" to ")})` : write(value));
      rows.push(numberRow(`${name}, report${direction}`, both.map((figure) => figure.reported), write, withInterval));
    }
    return rows;
  });
}

function numberRow(name, values, write, describe = (value) => write(value)) {
  const [a, b] = values;
  const areNumbers = typeof a === "number" && typeof b === "number";
  const change = areNumbers && a !== b ? signed(b - a, write) : "";
  return { name, texts: values.map((value, i) => describe(value, i)), differs: a !== b, difference: change };
}

function dataRows(pair, reports) {
  const both = (f) => pair.map(({ manifest }) => f(manifest.training?.recipe?.data ?? {}, manifest));
  const parts = [...new Set(pair.flatMap(({ manifest }) => Object.keys(manifest.training?.rows ?? {})))];
  return [
    row("Source", both((data) => data.source)),
    row("Data digest", pair.map(({ manifest }) => manifest.training?.data_digest?.slice(0, 12))),
    ...parts.map((name) => row(`${name === "train" ? "Training" : `${name[0].toUpperCase()}${name.slice(1)}`} rows`, pair.map(({ manifest }) => manifest.training?.rows?.[name]))),
    row("Report", reports.map((report) => (report ? `${number(report.test?.rows)} rows of ${report.data}, ${number(report.draws)} draws` : null))),
    row("Target", both((data, manifest) => manifest.output.target ?? data.target)),
    row("Classes", pair.map(({ manifest }) => manifest.output.classes), (classes) => (classes ? String(classes.length) : "–")),
    row("Input", pair.map(({ manifest }) => manifest.input.shape), (shape) => shape.join(" × ")),
  ];
}

function methodRows(pair) {
  const both = (f) => pair.map(({ manifest }) => f(manifest.training ?? {}, manifest));
  return [
    row("Method", both((_, manifest) => manifest.method)),
    row("Created", both((_, manifest) => manifest.created), moment),
    row("Parameters", both((training) => training.parameters)),
    row("Epochs", both((training) => training.epochs)),
    row("Duration of the fit", both((training) => training.seconds), duration),
    row("Started from", both((training) => training.warm_start), (parent) => (parent ? `${parent.name}, version ${parent.version}` : "–")),
    row("Convergence", both((training) => training.convergence?.summary)),
    row("Temperature", both((training) => training.temperature?.value)),
    row("Precision", both((_, manifest) => manifest.precision)),
    row("Encoder", both((_, manifest) => manifest.encoder ?? null)),
    row("Size of the files", both((_, manifest) => Object.values(manifest.files).reduce((sum, file) => sum + file.size, 0)), bytes),
  ];
}

function detectorRows(pair) {
  const both = (f) => pair.map(({ manifest }) => f(manifest.detectors, manifest));
  return [
    row("Draws", both((_, manifest) => manifest.noise.default_draws)),
    row("Maximum draws", both((_, manifest) => manifest.noise.max_draws), (max) => max ?? "unlimited"),
    row("Detectors in the flag", both((detectors) => detectors.combined)),
    row("All detectors", both((detectors) => detectors.density)),
    row("Calibration rows", both((detectors) => detectors.ranking_rows)),
    row("Smallest fpr", both((detectors) => detectors.smallest_fpr)),
    row("Smallest risk", both((_, manifest) => manifest.abstention?.smallest_risk)),
    row("Calibrated per", both((_, manifest) => manifest.categories?.kind), (kind) => kind ?? "model"),
  ];
}

function recipeRows(pair) {
  const recipes = pair.map(({ manifest }) => flatten(manifest.training?.recipe ?? {}));
  const keys = [...new Set(recipes.flatMap((values) => [...values.keys()]))].sort();
  return keys.map((key) => row(key, recipes.map((values) => values.get(key)))).filter((row) => row.differs);
}

function flatten(value, path = "", into = new Map()) {
  for (const [key, inner] of Object.entries(value)) {
    const name = path ? `${path}.${key}` : key;
    if (inner !== null && typeof inner === "object" && !Array.isArray(inner)) flatten(inner, name, into);
    else into.set(name, inner);
  }
  return into;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map((item) => (typeof item === "string" ? item.replaceAll("_", " ") : format(item))).join(", ") || "–";
  return JSON.stringify(value);
}
