// Two versions side by side, in words and numbers: what differs is marked.

import { bytes, h, moment, number } from "./dom.js";
import { figureOf, figuresOf } from "./figures.js";

/** A table of two versions, as GET /models/{name}/versions/{version} describes them, and their reports (or null). */
export function comparison(two, reports) {
  const groups = [
    ["Quality", quality(two, reports)],
    ["Data", data(two, reports)],
    ["Method", method(two)],
    ["Draws and detectors", detectors(two)],
    ["Recipe, where it differs", recipe(two)],
  ].filter(([, rows]) => rows.length);
  const only = h("input", { type: "checkbox", id: "only-differences" });
  const body = groups.map(([title, rows]) => h("tbody", {}, h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: 4 }, title)), rows.map(rowOf)));
  const shown = h("table", { class: "versions" },
    h("caption", {}, "What differs is marked with ≠. Whether a difference is more than chance, the intervals of the reports show."),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "what"), two.map((version) => h("th", { scope: "col" }, `version ${version.version}`)), h("th", { scope: "col" }, "difference"))),
    body);
  only.addEventListener("change", () => shown.classList.toggle("only", only.checked));
  return [
    h("p", {}, only, " ", h("label", { for: only.id }, "Only what differs")),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "What differs" }, shown),
  ];
}

function rowOf({ name, texts, differs, difference = "" }) {
  return h("tr", { class: differs ? "differs" : null },
    h("th", { scope: "row" }, differs ? h("span", { class: "mark", title: "differs" }, "≠ ") : null, name),
    texts.map((text) => h("td", {}, text)),
    h("td", { class: "number" }, difference));
}

/** A row of any two values. */
function row(name, values, write = said) {
  return { name, texts: values.map((value) => write(value)), differs: JSON.stringify(values[0] ?? null) !== JSON.stringify(values[1] ?? null) };
}

function quality(two, reports) {
  const figures = two.map((version, i) => figuresOf(version.manifest, version.report?.summary, reports[i]?.summary_intervals));
  const keys = [...new Set(figures.flat().map((figure) => figure.key))];
  const of = (i, key) => figures[i].find((figure) => figure.key === key) ?? { published: null, reported: null, interval: null };
  return keys.flatMap((key) => {
    const { name, write, better } = figureOf(key);
    const told = better ? ` (${better} is better)` : "";
    const found = [of(0, key), of(1, key)];
    const rows = [];
    if (found.some((figure) => figure.published !== null)) rows.push(numbers(`${name}${told}`, found.map((figure) => figure.published), write));
    if (found.some((figure) => figure.reported !== null)) {
      const withInterval = (value, i) => (found[i].interval ? `${write(value)} (${found[i].interval.map((end) => write(end)).join(" to ")})` : write(value));
      rows.push(numbers(`${name}, by the report${told}`, found.map((figure) => figure.reported), write, withInterval));
    }
    return rows;
  });
}

function numbers(name, values, write, each = (value) => write(value)) {
  const [a, b] = values;
  const both = typeof a === "number" && typeof b === "number";
  const change = both && a !== b ? `${b > a ? "+" : "−"}${write(Math.abs(b - a)).replace("\u00a0%", " points")}` : "";
  return { name, texts: values.map((value, i) => each(value, i)), differs: a !== b, difference: change };
}

function data(two, reports) {
  const of = (f) => two.map(({ manifest }) => f(manifest.training?.recipe?.data ?? {}, manifest));
  const sizes = [...new Set(two.flatMap(({ manifest }) => Object.keys(manifest.training?.rows ?? {})))];
  return [
    row("Source", of((data) => data.source)),
    row("Digest of the data", two.map(({ manifest }) => manifest.training?.data_digest?.slice(0, 12))),
    ...sizes.map((name) => row(`${name === "train" ? "Training" : `${name[0].toUpperCase()}${name.slice(1)}`} rows`, two.map(({ manifest }) => manifest.training?.rows?.[name]))),
    row("The report is of", reports.map((report) => (report && !report.cannot ? `${number(report.test?.rows)} rows of ${report.data}, ${number(report.draws)} draws` : null))),
    row("Target", of((data, manifest) => manifest.output.target ?? data.target)),
    row("Classes", two.map(({ manifest }) => manifest.output.classes), (classes) => (classes ? String(classes.length) : "–")),
    row("Input", two.map(({ manifest }) => manifest.input.shape), (shape) => shape.join(" × ")),
  ];
}

function method(two) {
  const of = (f) => two.map(({ manifest }) => f(manifest.training ?? {}, manifest));
  return [
    row("Method", of((_, manifest) => manifest.method)),
    row("Made", of((_, manifest) => manifest.created), moment),
    row("Parameters", of((training) => training.parameters)),
    row("Epochs", of((training) => training.epochs)),
    row("Seconds of the fit", of((training) => training.seconds)),
    row("Went on from", of((training) => training.warm_start)),
    row("The fit", of((training) => training.convergence?.says)),
    row("Temperature", of((training) => training.temperature?.value)),
    row("Numbers", of((_, manifest) => manifest.precision)),
    row("Encoder", of((_, manifest) => manifest.encoder ?? null)),
    row("Size of its files", of((_, manifest) => Object.values(manifest.files).reduce((sum, file) => sum + file.size, 0)), bytes),
  ];
}

function detectors(two) {
  const of = (f) => two.map(({ manifest }) => f(manifest.detectors, manifest));
  return [
    row("Draws", of((_, manifest) => manifest.noise.default_draws)),
    row("Most draws", of((_, manifest) => manifest.noise.max_draws), (most) => most ?? "any"),
    row("The flag is made of", of((found) => found.combined)),
    row("All detectors", of((found) => found.density)),
    row("Calibration rows", of((found) => found.ranking_rows)),
    row("Smallest fpr", of((found) => found.smallest_fpr)),
    row("Smallest risk", of((_, manifest) => manifest.abstention?.smallest_risk)),
    row("Calibrated by", of((_, manifest) => manifest.categories?.kind), (kind) => kind ?? "all rows together"),
  ];
}

function recipe(two) {
  const flat = two.map(({ manifest }) => flattened(manifest.training?.recipe ?? {}));
  const keys = [...new Set(flat.flatMap((values) => [...values.keys()]))].sort();
  return keys.map((key) => row(key, flat.map((values) => values.get(key)))).filter((found) => found.differs);
}

function flattened(value, path = "", into = new Map()) {
  for (const [key, inner] of Object.entries(value)) {
    const name = path ? `${path}.${key}` : key;
    if (inner !== null && typeof inner === "object" && !Array.isArray(inner)) flattened(inner, name, into);
    else into.set(name, inner);
  }
  return into;
}

function said(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map((one) => (typeof one === "string" ? one.replaceAll("_", " ") : said(one))).join(", ") || "–";
  return JSON.stringify(value);
}
