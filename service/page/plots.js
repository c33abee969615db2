// Plots with Observable Plot. Each is a figure with a description for screen readers and a table in <details>.

import { Element, html, Table } from "./components.js";
import { number, percent } from "./format.js";

const MAX_WIDTH = 560; // on a phone a plot is as wide as the screen
const MARGINS = 64; // left and right of a plot together
export const INK = "var(--ink)";
export const ACCENT = "var(--accent)";
export const BAD = "var(--bad)";
export const QUIET = "var(--quiet)";
const MAX_CLASSES = 12;

const plotWidth = () => Math.min(MAX_WIDTH, Math.max(280, document.documentElement.clientWidth - MARGINS));

/** Shorten a name to one line. */
function shorten(name, maxLetters) {
  const letters = [...name.replace(/\s+/g, " ")];
  return letters.length > maxLetters ? `${letters.slice(0, maxLetters - 1).join("")}…` : letters.join("");
}

/** Create a figure with a plot; `label` describes it to screen readers and `data` is its table. */
export function figure(title, label, options, data = null) {
  const { width = plotWidth(), ...rest } = options;
  const svg = globalThis.Plot.plot({ width, ariaLabel: label, marginTop: 12, marginBottom: 40, ...rest });
  svg.setAttribute("role", "img");
  for (const mark of svg.querySelectorAll("[aria-label]")) {
    mark.dataset.mark = mark.getAttribute("aria-label"); // screen readers read the plot's own label
    mark.removeAttribute("aria-label");
  }
  return html`<figure><figcaption>${title}</figcaption><${Element} element=${svg} />${data && html`<details><summary>As a table</summary><${Table} caption=${title} ...${data} /></details>`}</figure>`;
}

/** Return a number in [-1, 1] that looks random but is always the same, so that dots do not move. */
const jitter = (i) => 2 * ((i * 0.6180339887498949) % 1) - 1;

/**
 * Plot class probabilities: a bar for the mean and a dot for each draw (`samples`, draws × classes, or null).
 * With many classes, only the most probable are shown.
 */
export function probabilities(classes, row) {
  const inside = new Set(row.prediction_set ?? []);
  const order = classes.map((name, c) => c).sort((a, b) => row.probabilities[b] - row.probabilities[a]);
  const visible = classes.length <= MAX_CLASSES ? classes.map((_, c) => c) : order.slice(0, MAX_CLASSES);
  const means = visible.map((c) => ({ name: classes[c], p: row.probabilities[c] }));
  const draws = (row.samples ?? []).flatMap((draw, k) => visible.map((c) => ({ name: classes[c], p: draw[c], k })));
  const band = 22;
  const left = Math.min(180, 0.4 * plotWidth(), 24 + 7 * Math.max(...visible.map((c) => classes[c].length)));
  const maxLetters = Math.floor((left - 20) / 7);
  return figure(
    `Class probabilities${classes.length > visible.length ? ` (top ${visible.length} of ${classes.length})` : ""}`,
    `${row.label}: ${percent(Math.max(...row.probabilities))}. ${row.samples ? "Each dot is one draw, and each bar is their mean." : "Each bar is the mean over the draws."}`,
    {
      marginLeft: left,
      marginRight: 52,
      height: 56 + band * visible.length,
      x: { domain: [0, 1], label: "probability", labelAnchor: "center", labelArrow: "none", grid: true, ticks: plotWidth() < 400 ? [0, 0.5, 1] : 5 },
      y: { domain: visible.map((c) => classes[c]), label: null, tickSize: 0, tickFormat: (name) => shorten(name, maxLetters) },
      marks: [
        globalThis.Plot.barX(means, { x: "p", y: "name", fill: (d) => (inside.has(d.name) ? ACCENT : QUIET), fillOpacity: 0.28, insetTop: 3, insetBottom: 3 }),
        globalThis.Plot.dot(draws, { x: "p", y: "name", r: 2, fill: ACCENT, fillOpacity: draws.length > 400 ? 0.25 : 0.45, ...jittered(draws) }),
        globalThis.Plot.tickX(means, { x: "p", y: "name", stroke: INK, strokeWidth: 2, insetTop: 2, insetBottom: 2 }),
        globalThis.Plot.text(means, { x: 1, y: "name", text: (d) => percent(d.p), textAnchor: "start", dx: 6, fill: INK }),
      ],
    },
    {
      heads: ["class", "probability", "5 % quantile of the draws", "95 % quantile", "in the prediction set"],
      rows: visible.map((c) => [classes[c], percent(row.probabilities[c]), ...quantiles((row.samples ?? []).map((draw) => draw[c])), inside.has(classes[c]) ? "yes" : "no"]),
      numeric: [1, 2, 3],
    },
  );
}

/** Move each dot a little off the middle of its band; Plot has no channel for this. */
function jittered(draws) {
  return {
    render(index, scales, values, dimensions, context, next) {
      const ys = Float64Array.from(values.y);
      for (const i of index) ys[i] += 7 * jitter(draws[i].k + 1);
      return next(index, scales, { ...values, y: ys }, dimensions, context);
    },
  };
}

function quantiles(values) {
  if (values.length < 2) return ["–", "–"];
  const sorted = [...values].sort((a, b) => a - b);
  return [0.05, 0.95].map((q) => percent(sorted[Math.round(q * (sorted.length - 1))]));
}

/** Plot a target: each draw's mean and standard deviation in ascending order, and the interval. */
export function target(name, row, coverage) {
  const draws = (row.samples ?? []).map(({ mean, std }) => ({ mean, low: mean - std, high: mean + std }));
  draws.sort((a, b) => a.mean - b.mean);
  draws.forEach((draw, i) => (draw.i = i));
  const [low, high] = row.interval;
  const ends = [low, high].filter((end) => end !== null);
  return figure(
    `${name}: prediction of each draw, and ${percent(coverage)} interval`,
    `${number(row.mean)}, ${percent(coverage)} interval from ${bound(low, "minus infinity")} to ${bound(high, "infinity")}. Each line is one draw with its standard deviation.`,
    {
      height: 190,
      x: { label: name, grid: true, nice: true },
      y: { axis: null, domain: [-1, Math.max(1, draws.length)] },
      marks: [
        globalThis.Plot.rectX([row], { x1: low ?? Math.min(...draws.map((d) => d.low)), x2: high ?? Math.max(...draws.map((d) => d.high)), fill: ACCENT, fillOpacity: 0.12 }),
        globalThis.Plot.ruleX(ends, { stroke: ACCENT }),
        globalThis.Plot.ruleY(draws, { x1: "low", x2: "high", y: "i", stroke: QUIET, strokeOpacity: 0.25 }),
        globalThis.Plot.dot(draws, { x: "mean", y: "i", r: 2, fill: ACCENT }),
        globalThis.Plot.ruleX([row.mean], { stroke: INK, strokeWidth: 2 }),
      ],
    },
  );
}

const bound = (end, infinite) => (end === null ? infinite : number(end, 4));

/** Plot the detectors' p-values; those left of the line fire. `combined` names the detectors in the flag. */
export function detectors(row, fpr, combined, describe) {
  const single = Object.entries(row.detectors).map(([name, result]) => ({
    name: name.replaceAll("_", " "), p: Math.max(result.p_value, 1e-4), ...result, description: describe(name), isCombined: combined.includes(name),
  }));
  single.sort((a, b) => b.isCombined - a.isCombined || a.p - b.p);
  const all = { name: "combined", p: Math.max(row.p_value, 1e-4), fired: row.flag, isCombined: true };
  const rows = [all, ...single];
  const min = Math.min(fpr / 5, 0.01, ...rows.map((d) => d.p)) * 0.8;
  return figure(
    "How unusual the row is: p-values of the detectors",
    `Combined: p = ${number(row.p_value)}. ${single.filter((d) => d.fired).map((d) => d.name).join(", ") || "None"} fired.`,
    {
      marginLeft: 142,
      marginRight: 52,
      height: 56 + 20 * rows.length,
      x: { type: "log", domain: [min, 1], label: `p-value (unusual below ${number(fpr)})`, labelAnchor: "center", labelArrow: "none", grid: true, ticks: 4, tickFormat: (x) => String(Number(x.toPrecision(1))) },
      y: { domain: rows.map((d) => d.name), label: null, tickSize: 0 },
      marks: [
        globalThis.Plot.ruleX([fpr], { stroke: BAD, strokeDasharray: "4 3" }),
        globalThis.Plot.ruleY(rows, { y: "name", x1: min, x2: "p", stroke: QUIET, strokeOpacity: 0.35 }),
        globalThis.Plot.dot(rows, { x: "p", y: "name", r: (d) => (d === all ? 6 : 4.5), fill: (d) => (d.fired ? BAD : d.isCombined ? ACCENT : "none"), stroke: (d) => (d.fired ? BAD : ACCENT), title: "description" }),
        globalThis.Plot.text(rows, { x: 1, y: "name", text: (d) => number(d.p, 2), textAnchor: "start", dx: 6, fill: INK }),
      ],
    },
    {
      heads: ["detector", "p-value", "score", "fired", "in the flag", "reacts to"],
      rows: single.map((d) => [d.name, number(d.p_value), number(d.score), d.fired ? "yes" : "no", d.isCombined ? "yes" : "no", d.description]),
      numeric: [1, 2],
    },
  );
}

/** Plot the accuracy (for regression, the RMSE) of versions on labelled control rows, with intervals. */
export function versionsOnLabels(live) {
  const [key, title] = live[0].figures.accuracy ? ["accuracy", "Accuracy on labelled control rows"] : ["rmse", "Error (RMSE) on labelled control rows"];
  const write = key === "accuracy" ? percent : number;
  const rows = live.toReversed().map(({ version, serving, control_labels, figures }) => {
    const { value, interval } = figures[key];
    return { name: `version ${version}`, value, low: interval[0], high: interval[1], serving, control_labels };
  });
  return figure(
    title,
    rows.map((d) => `${d.name}: ${write(d.value)} (95 % interval: ${write(d.low)} to ${write(d.high)})`).join("; "),
    {
      marginLeft: 84,
      marginRight: 56,
      height: 56 + 30 * rows.length,
      x: { label: "with 95 % interval", labelAnchor: "center", labelArrow: "none", grid: true, ...(key === "accuracy" ? { domain: [Math.min(0.5, ...rows.map((d) => d.low)), 1], tickFormat: (x) => `${Math.round(100 * x)} %`, ticks: 5 } : { zero: true }) },
      y: { domain: rows.map((d) => d.name), label: null, tickSize: 0 },
      marks: [
        globalThis.Plot.ruleY(rows, { y: "name", x1: "low", x2: "high", stroke: ACCENT, strokeWidth: 3, strokeOpacity: 0.4 }),
        globalThis.Plot.dot(rows, { x: "value", y: "name", r: 5, fill: (d) => (d.serving ? ACCENT : "var(--card)"), stroke: ACCENT, strokeWidth: 2 }),
        globalThis.Plot.text(rows, { y: "name", text: (d) => write(d.value), frameAnchor: "right", textAnchor: "start", dx: 8, fill: INK }),
      ],
    },
    { heads: ["version", "value", "from", "to", "labels"], rows: rows.map((d) => [d.name, write(d.value), write(d.low), write(d.high), number(d.control_labels)]), numeric: [1, 2, 3, 4] },
  );
}
