// What a version is good at and what not, in pictures: of its evaluation report, and without one of its publication.

import { h, number, percent } from "./dom.js";
import { figureOf } from "./figures.js";
import { ACCENT, figure, INK, QUIET } from "./plots.js";

const MOST_CLASSES = 12; // the worst ones are shown
const LEAST_ROWS = 5; // that are answered, below which a share of right ones says nothing
const asShare = { domain: [0, 1], tickFormat: (x) => `${Math.round(100 * x)} %`, ticks: 5, grid: true };
const middle = { labelAnchor: "center", labelArrow: "none" };

/** A sentence and pictures; `report` may be null or one that cannot be read. */
export function strengthsOf({ manifest }, report) {
  const test = report?.test ?? null;
  const pictures = test?.by_class ? [byClass(test, manifest.output.classes), byShareAnswered(test), byConfidence(test)] : test?.by_spread ? [bySpread(test, manifest.output.target), byInterval(test)] : [];
  pictures.push(againstPlain(manifest));
  return [h("p", { class: "says" }, sentence(manifest, report)), h("div", { class: "plots" }, pictures.filter(Boolean))];
}

function sentence({ task, quality, output }, report) {
  const rows = report?.test ? ` of ${number(report.test.rows)} rows that it had not seen` : " of the rows that it had not seen";
  const interval = report?.summary_intervals?.[task === "regression" ? "test_rmse" : "test_accuracy"];
  if (task === "regression") return `Off by ${number(report?.test?.rmse ?? quality.test_rmse)} as a rule (root mean square of its errors${rows.replace(" of", " on")})${interval ? `, from ${number(interval[0])} to ${number(interval[1])} with 95 %` : ""}; what it says of ${output.target ?? "the target"} comes with an interval.`;
  return `Right on ${percent(report?.test?.accuracy ?? quality.test_accuracy)}${rows}${interval ? `, which may be from ${percent(interval[0])} to ${percent(interval[1])} on others like them (95 %)` : ""}.`;
}

function byClass({ by_class }, classes) {
  const found = by_class.filter((one) => one.recall !== null).sort((a, b) => a.recall - b.recall);
  const rows = found.slice(0, MOST_CLASSES).map((one) => {
    const [low, high] = one.confidence_intervals.recall ?? [one.recall, one.recall];
    const others = one.labelled.map((count, i) => [count, classes[i]]).filter(([count, name]) => count && name !== one.name).sort((a, b) => b[0] - a[0]);
    return { name: one.name, value: one.recall, low, high, rows: one.rows, taken: others.length ? `${others[0][1]} (${others[0][0]})` : "–" };
  });
  if (!rows.length) return null;
  return figure(
    `What it knows, class by class${found.length > rows.length ? `: the ${rows.length} worst of ${found.length}` : ""}`,
    `Of the rows of each class, the share that it gets right; the worst is ${rows[0].name} with ${percent(rows[0].value)}.`,
    bars(rows, "share that it gets right, 95 % interval"),
    { heads: ["class", "right", "from", "to", "rows", "most often taken for"], rows: rows.map((d) => [d.name, percent(d.value), percent(d.low), percent(d.high), number(d.rows), d.taken]), numeric: [1, 2, 3, 4] },
  );
}

/** Bars of shares with whiskers. */
function bars(rows, label) {
  const left = Math.min(150, 20 + 7 * Math.max(...rows.map((d) => d.name.length)));
  const letters = Math.floor((left - 16) / 7);
  return {
    marginLeft: left,
    marginRight: 52,
    height: 56 + 24 * rows.length,
    x: { ...asShare, ...middle, ticks: [0, 0.5, 1], label },
    y: { domain: rows.map((d) => d.name), label: null, tickSize: 0, tickFormat: (name) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name) },
    marks: [
      globalThis.Plot.barX(rows, { x: "value", y: "name", fill: (d) => (d.faint ? QUIET : ACCENT), fillOpacity: 0.3, insetTop: 4, insetBottom: 4 }),
      globalThis.Plot.ruleY(rows.filter((d) => d.low !== undefined), { y: "name", x1: "low", x2: "high", stroke: INK, strokeOpacity: 0.55 }),
      globalThis.Plot.tickX(rows, { x: "value", y: "name", stroke: INK, strokeWidth: 2, insetTop: 3, insetBottom: 3 }),
      globalThis.Plot.text(rows, { y: "name", text: (d) => percent(d.value), frameAnchor: "right", textAnchor: "start", dx: 8, fill: INK }),
    ],
  };
}

/** Accuracy of the surest rows, by how many are answered: from the bins of confidence, the surest first. */
function byShareAnswered({ reliability, rows: all }) {
  let answered = 0, right = 0;
  const points = reliability.toReversed().map((bin) => {
    answered += bin.rows;
    right += bin.rows * bin.accuracy;
    return { share: answered / all, value: right / answered, from: bin.confidence, answered };
  }).filter((point) => point.answered >= LEAST_ROWS);
  if (points.length < 2) return null;
  const low = Math.min(0.9, Math.floor(20 * Math.min(...points.map((d) => d.value))) / 20);
  return figure(
    "If it answered only where it is surest, and left the rest to people",
    points.map((d) => `${percent(d.share)} answered: ${percent(d.value)} right`).join("; "),
    {
      height: 240,
      marginLeft: 52,
      marginTop: 26,
      x: { ...asShare, ...middle, domain: [Math.min(0.5, Math.floor(10 * points[0].share) / 10), 1], label: "share of the rows that it answers" },
      y: { ...asShare, domain: [low, 1], label: "right", labelArrow: "none" },
      marks: [
        globalThis.Plot.areaY(points, { x: "share", y1: low, y2: "value", fill: ACCENT, fillOpacity: 0.12 }),
        globalThis.Plot.line(points, { x: "share", y: "value", stroke: ACCENT, strokeWidth: 2 }),
        globalThis.Plot.dot(points, { x: "share", y: "value", fill: ACCENT, r: 4, title: (d) => `when its confidence is ${percent(d.from)} or more` }),
      ],
    },
    { heads: ["answered", "right", "confidence, about"], rows: points.map((d) => [percent(d.share), percent(d.value), percent(d.from)]), numeric: [0, 1, 2] },
  );
}

function byConfidence({ reliability }) {
  const rows = reliability.map((bin) => ({ ...bin, low: bin.confidence_intervals.accuracy?.[0] ?? bin.accuracy, high: bin.confidence_intervals.accuracy?.[1] ?? bin.accuracy }));
  return figure(
    "Does its confidence mean what it says?",
    `On the line it does. ${rows.map((d) => `sure to ${percent(d.confidence)}: right on ${percent(d.accuracy)} of ${d.rows} rows`).join("; ")}`,
    {
      height: 260,
      marginLeft: 52,
      marginTop: 26,
      x: { ...asShare, ...middle, label: "how sure it says that it is" },
      y: { ...asShare, label: "how often it is right", labelArrow: "none" },
      marks: [
        globalThis.Plot.line([[0, 0], [1, 1]], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.ruleX(rows, { x: "confidence", y1: "low", y2: "high", stroke: ACCENT, strokeOpacity: 0.5 }),
        globalThis.Plot.dot(rows, { x: "confidence", y: "accuracy", r: (d) => 3 + Math.min(7, Math.sqrt(d.rows) / 3), fill: ACCENT, fillOpacity: 0.8 }),
      ],
    },
    { heads: ["sure to", "right on", "from", "to", "rows"], rows: rows.map((d) => [percent(d.confidence), percent(d.accuracy), percent(d.low), percent(d.high), number(d.rows)]), numeric: [0, 1, 2, 3, 4] },
  );
}

function bySpread({ by_spread: rows }, target) {
  if (!rows.length) return null;
  const most = Math.max(...rows.flatMap((d) => [d.std, d.rmse]));
  return figure(
    "Does its doubt mean what it says?",
    `On the line it does. ${rows.map((d) => `says ± ${number(d.std)}: off by ${number(d.rmse)}`).join("; ")}`,
    {
      height: 260,
      marginLeft: 60,
      marginTop: 26,
      x: { ...middle, grid: true, domain: [0, most], label: `how far off it says that it may be${target ? `, in units of ${target}` : ""}`, ticks: 5 },
      y: { grid: true, domain: [0, most], label: "how far off it is", labelArrow: "none", ticks: 5 },
      marks: [
        globalThis.Plot.line([[0, 0], [most, most]], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.dot(rows, { x: "std", y: "rmse", r: 5, fill: ACCENT, fillOpacity: 0.8 }),
      ],
    },
    { heads: ["says ±", "off by", "rows", "inside its 95 % intervals"], rows: rows.map((d) => [number(d.std), number(d.rmse), number(d.rows), percent(d.covered)]), numeric: [0, 1, 2, 3] },
  );
}

function byInterval({ intervals }) {
  const rows = intervals.map((d) => ({ name: `${percent(d.nominal)} intervals`, value: d.covered, low: d.confidence_intervals.covered?.[0], high: d.confidence_intervals.covered?.[1], nominal: d.nominal }));
  if (!rows.length) return null;
  return figure("Do its intervals hold what they promise?", rows.map((d) => `${d.name}: ${percent(d.value)} of the targets inside`).join("; "), bars(rows, "share of the targets inside"), {
    heads: ["interval", "targets inside"], rows: rows.map((d) => [d.name, percent(d.value)]), numeric: [1],
  });
}

/** This model next to plain ones on the same rows, where those were fitted. */
function againstPlain({ quality, baselines, output, task }) {
  const key = task === "regression" ? "test_rmse" : "test_accuracy";
  const names = Object.keys(baselines).filter((name) => baselines[name][key] !== undefined);
  if (!names.length || quality[key] === undefined) return null;
  const called = { constant: output.classes ? "most frequent class" : "always the mean", boosting: "boosted trees", linear: "a linear model" };
  const rows = [{ name: "this model", value: quality[key] }, ...names.map((name) => ({ name: called[name] ?? name, value: baselines[name][key], faint: true }))];
  rows.sort((a, b) => (task === "regression" ? a.value - b.value : b.value - a.value));
  const { name, write } = figureOf(key);
  const options = bars(rows, task === "regression" ? "error: less is better" : "share that each gets right");
  if (task === "regression") Object.assign(options, { x: { ...middle, grid: true, zero: true, label: options.x.label } });
  options.marks.splice(-1, 1, globalThis.Plot.text(rows, { y: "name", text: (d) => write(d.value), frameAnchor: "right", textAnchor: "start", dx: 8, fill: INK }));
  return figure("Next to plain models", rows.map((d) => `${d.name}: ${write(d.value)}`).join("; "), options, { heads: ["model", name], rows: rows.map((d) => [d.name, write(d.value)]), numeric: [1] });
}
