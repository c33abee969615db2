// Plots of a version's strengths and weaknesses, from its evaluation report or, without one, from its manifest.

import { describeFigure } from "./figures.js";
import { number, percent } from "./format.js";
import { ACCENT, figure, INK, QUIET } from "./plots.js";

const MAX_CLASSES = 12;
const MIN_ROWS = 5; // for a meaningful share
const shareAxis = { domain: [0, 1], tickFormat: (x) => `${Math.round(100 * x)} %`, ticks: 5, grid: true };
const centred = { labelAnchor: "center", labelArrow: "none" };

/** Create plots of a version; `report` may be null. */
export function plots({ manifest }, report) {
  const test = report?.test ?? null;
  const figures = test?.confusion ? [classPlot(report), coveragePlot(test), confidencePlot(test)] : test?.by_spread ? [spreadPlot(test, manifest.output.target), intervalPlot(test)] : [];
  return [...figures, baselinePlot(manifest)].filter(Boolean);
}

/** Describe the quality of a version on unseen rows. */
export function sentence({ manifest: { task, quality } }, report) {
  const isRegression = task === "regression";
  const write = isRegression ? number : percent;
  const value = isRegression ? (report?.test?.rmse ?? quality.test_rmse) : (report?.test?.accuracy ?? quality.test_accuracy);
  const rows = `${report?.test ? `${number(report.test.rows)} ` : ""}unseen rows`;
  const interval = report?.summary_intervals?.[isRegression ? "test_rmse" : "test_accuracy"];
  return `${isRegression ? "Typical error (RMSE)" : "Accuracy"} on ${rows}: ${write(value)}${interval ? ` (95 % CI ${write(interval[0])} to ${write(interval[1])})` : ""}.`;
}

function classPlot({ parts, test: { classes, confusion } }) {
  const sorted = parts.filter((part) => part.by === "class").sort((a, b) => a.accuracy - b.accuracy);
  const rows = sorted.slice(0, MAX_CLASSES).map((part) => {
    const [low, high] = part.confidence_intervals.accuracy;
    const errors = confusion[classes.indexOf(part.name)].map((count, i) => [count, classes[i]]).filter(([count, name]) => count && name !== part.name).sort((a, b) => b[0] - a[0]);
    return { name: part.name, value: part.accuracy, low, high, rows: part.rows, confusion: errors.length ? `${errors[0][1]} (${errors[0][0]})` : "–" };
  });
  if (!rows.length) return null;
  return figure(
    `Accuracy per class${sorted.length > rows.length ? ` (${rows.length} worst of ${sorted.length})` : ""}`,
    `Share of each class's rows that are correct. Worst: ${rows[0].name} with ${percent(rows[0].value)}.`,
    barOptions(rows, "share correct, with 95 % interval"),
    { heads: ["class", "correct", "from", "to", "rows", "most often confused with"], rows: rows.map((d) => [d.name, percent(d.value), percent(d.low), percent(d.high), number(d.rows), d.confusion]), numeric: [1, 2, 3, 4] },
  );
}

/** Create the plot options for bars of shares with whiskers. */
function barOptions(rows, label) {
  const left = Math.min(150, 20 + 7 * Math.max(...rows.map((d) => d.name.length)));
  const letters = Math.floor((left - 16) / 7);
  return {
    marginLeft: left,
    marginRight: 52,
    height: 56 + 24 * rows.length,
    x: { ...shareAxis, ...centred, ticks: [0, 0.5, 1], label },
    y: { domain: rows.map((d) => d.name), label: null, tickSize: 0, tickFormat: (name) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name) },
    marks: [
      globalThis.Plot.barX(rows, { x: "value", y: "name", fill: (d) => (d.faint ? QUIET : ACCENT), fillOpacity: 0.3, insetTop: 4, insetBottom: 4 }),
      globalThis.Plot.ruleY(rows.filter((d) => d.low !== undefined), { y: "name", x1: "low", x2: "high", stroke: INK, strokeOpacity: 0.55 }),
      globalThis.Plot.tickX(rows, { x: "value", y: "name", stroke: INK, strokeWidth: 2, insetTop: 3, insetBottom: 3 }),
      globalThis.Plot.text(rows, { y: "name", text: (d) => percent(d.value), frameAnchor: "right", textAnchor: "start", dx: 8, fill: INK }),
    ],
  };
}

/** Plot accuracy by the share of rows answered, the most confident first, from the confidence bins. */
function coveragePlot({ reliability, rows: rowCount }) {
  let answered = 0, correct = 0;
  const points = reliability.toReversed().map((bin) => {
    answered += bin.rows;
    correct += bin.rows * bin.accuracy;
    return { share: answered / rowCount, value: correct / answered, from: bin.confidence, answered };
  }).filter((point) => point.answered >= MIN_ROWS);
  if (points.length < 2) return null;
  const low = Math.min(0.9, Math.floor(20 * Math.min(...points.map((d) => d.value))) / 20);
  return figure(
    "Accuracy if only the most confident rows are answered",
    points.map((d) => `${percent(d.share)} answered: ${percent(d.value)} correct`).join("; "),
    {
      height: 240,
      marginLeft: 52,
      marginTop: 26,
      x: { ...shareAxis, ...centred, domain: [Math.min(0.5, Math.floor(10 * points[0].share) / 10), 1], label: "share of rows answered" },
      y: { ...shareAxis, domain: [low, 1], label: "accuracy", labelArrow: "none" },
      marks: [
        globalThis.Plot.areaY(points, { x: "share", y1: low, y2: "value", fill: ACCENT, fillOpacity: 0.12 }),
        globalThis.Plot.line(points, { x: "share", y: "value", stroke: ACCENT, strokeWidth: 2 }),
        globalThis.Plot.dot(points, { x: "share", y: "value", fill: ACCENT, r: 4, title: (d) => `confidence of ${percent(d.from)} or more` }),
      ],
    },
    { heads: ["answered", "accuracy", "confidence (about)"], rows: points.map((d) => [percent(d.share), percent(d.value), percent(d.from)]), numeric: [0, 1, 2] },
  );
}

function confidencePlot({ reliability }) {
  const rows = reliability.map((bin) => ({ ...bin, low: bin.confidence_intervals.accuracy?.[0] ?? bin.accuracy, high: bin.confidence_intervals.accuracy?.[1] ?? bin.accuracy }));
  return figure(
    "Is the confidence calibrated?",
    `The dashed line is perfect calibration. ${rows.map((d) => `Confidence ${percent(d.confidence)}: ${percent(d.accuracy)} of ${d.rows} rows correct`).join("; ")}`,
    {
      height: 260,
      marginLeft: 52,
      marginTop: 26,
      x: { ...shareAxis, ...centred, label: "confidence" },
      y: { ...shareAxis, label: "accuracy", labelArrow: "none" },
      marks: [
        globalThis.Plot.line([[0, 0], [1, 1]], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.ruleX(rows, { x: "confidence", y1: "low", y2: "high", stroke: ACCENT, strokeOpacity: 0.5 }),
        globalThis.Plot.dot(rows, { x: "confidence", y: "accuracy", r: (d) => 3 + Math.min(7, Math.sqrt(d.rows) / 3), fill: ACCENT, fillOpacity: 0.8 }),
      ],
    },
    { heads: ["confidence", "accuracy", "from", "to", "rows"], rows: rows.map((d) => [percent(d.confidence), percent(d.accuracy), percent(d.low), percent(d.high), number(d.rows)]), numeric: [0, 1, 2, 3, 4] },
  );
}

function spreadPlot({ by_spread: rows }, target) {
  if (!rows.length) return null;
  const max = 1.05 * Math.max(...rows.flatMap((d) => [d.std, d.rmse]));
  return figure(
    "Is the uncertainty calibrated?",
    `The dashed line is perfect calibration. ${rows.map((d) => `Predicted error ${number(d.std)}: actual error ${number(d.rmse)}`).join("; ")}`,
    {
      height: 260,
      marginLeft: 60,
      marginTop: 26,
      x: { ...centred, grid: true, domain: [0, max], label: `predicted error${target ? `, in units of ${target}` : ""}`, ticks: 5 },
      y: { grid: true, domain: [0, max], label: "actual error", labelArrow: "none", ticks: 5 },
      marks: [
        globalThis.Plot.line([[0, 0], [max, max]], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.dot(rows, { x: "std", y: "rmse", r: 5, fill: ACCENT, fillOpacity: 0.8 }),
      ],
    },
    { heads: ["predicted error", "actual error", "rows", "inside 95 % intervals"], rows: rows.map((d) => [number(d.std), number(d.rmse), number(d.rows), percent(d.covered)]), numeric: [0, 1, 2, 3] },
  );
}

function intervalPlot({ intervals }) {
  const rows = intervals.map((d) => ({ name: `${percent(d.nominal)} intervals`, value: d.covered, low: d.confidence_intervals.covered?.[0], high: d.confidence_intervals.covered?.[1], nominal: d.nominal }));
  if (!rows.length) return null;
  return figure("Are the intervals calibrated?", rows.map((d) => `${d.name}: ${percent(d.value)} of targets inside`).join("; "), barOptions(rows, "share of targets inside"), {
    heads: ["interval", "targets inside"], rows: rows.map((d) => [d.name, percent(d.value)]), numeric: [1],
  });
}

/** Plot this model next to its baselines on the same rows; null if there are none. */
function baselinePlot({ quality, baselines, task }) {
  const key = task === "regression" ? "test_rmse" : "test_accuracy";
  const names = Object.keys(baselines).filter((name) => baselines[name][key] !== undefined);
  if (!names.length || quality[key] === undefined) return null;
  const rows = [{ name: "this model", value: quality[key] }, ...names.map((name) => ({ name, value: baselines[name][key], faint: true }))];
  rows.sort((a, b) => (task === "regression" ? a.value - b.value : b.value - a.value));
  const { name, write } = describeFigure(key);
  const options = barOptions(rows, task === "regression" ? "error (lower is better)" : "share correct");
  if (task === "regression") Object.assign(options, { x: { ...centred, grid: true, zero: true, label: options.x.label } });
  options.marks.splice(-1, 1, globalThis.Plot.text(rows, { y: "name", text: (d) => write(d.value), frameAnchor: "right", textAnchor: "start", dx: 8, fill: INK }));
  return figure("Compared with baselines", rows.map((d) => `${d.name}: ${write(d.value)}`).join("; "), options, { heads: ["model", name], rows: rows.map((d) => [d.name, write(d.value)]), numeric: [1] });
}
