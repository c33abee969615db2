// Plots, made with Observable Plot. Each returns a <figure> with what it shows in words, and a table in <details>.

import { h, number, percent, table } from "./dom.js";

const WIDTH = 560; // at most: on a phone a plot is as wide as the screen
const BESIDE = 64; // of the screen, left and right of a plot
export const INK = "var(--ink)";
export const ACCENT = "var(--accent)";
export const BAD = "var(--bad)";
export const QUIET = "var(--quiet)";
const CLASSES_SHOWN = 12;

const plotWidth = () => Math.min(WIDTH, Math.max(280, document.documentElement.clientWidth - BESIDE));

/** A name, shortened, on one line. */
function cut(name, letters) {
  const line = [...name.replace(/\s+/g, " ")];
  return line.length > letters ? `${line.slice(0, letters - 1).join("")}…` : line.join("");
}

/** A plot in a figure: `label` says to those who do not see it what it shows; `rows` is the same as a table. */
export function figure(title, label, options, data = null) {
  const { width = plotWidth(), ...rest } = options;
  const svg = globalThis.Plot.plot({ width, ariaLabel: label, marginTop: 12, marginBottom: 40, ...rest });
  svg.setAttribute("role", "img");
  for (const mark of svg.querySelectorAll("[aria-label]")) {
    mark.dataset.mark = mark.getAttribute("aria-label"); // "dot": of no use to who cannot see it, and not allowed there
    mark.removeAttribute("aria-label");
  }
  const more = data && h("details", {}, h("summary", {}, "As a table"), table(title, data.heads, data.rows, data.numeric));
  return h("figure", {}, h("figcaption", {}, title), svg, more);
}

/** A number in [-1, 1] that looks random and is the same each time, so that dots do not dance. */
const jitter = (i) => 2 * ((i * 0.6180339887498949) % 1) - 1;

/**
 * Probabilities of classes: a bar for the mean, a dot for each draw (`samples`, draws x classes, or null).
 * Of many classes the most probable are shown.
 */
export function probabilities(classes, row) {
  const inside = new Set(row.prediction_set ?? []);
  const order = classes.map((name, c) => c).sort((a, b) => row.probabilities[b] - row.probabilities[a]);
  const kept = classes.length <= CLASSES_SHOWN ? classes.map((_, c) => c) : order.slice(0, CLASSES_SHOWN);
  const means = kept.map((c) => ({ name: classes[c], p: row.probabilities[c] }));
  const draws = (row.samples ?? []).flatMap((draw, k) => kept.map((c) => ({ name: classes[c], p: draw[c], k })));
  const band = 22;
  const spread = (c) => spreadOf((row.samples ?? []).map((draw) => draw[c]));
  const left = Math.min(180, 0.4 * plotWidth(), 24 + 7 * Math.max(...kept.map((c) => classes[c].length)));
  const letters = Math.floor((left - 20) / 7); // that there is room for
  const says = `${row.label}: ${percent(Math.max(...row.probabilities))}`;
  return figure(
    `Probability of each class${classes.length > kept.length ? `, the ${kept.length} most probable of ${classes.length}` : ""}`,
    `${says}; ${row.samples ? "a dot is one of the draws, " : ""}a bar their mean.`,
    {
      marginLeft: left,
      marginRight: 52,
      height: 56 + band * kept.length,
      x: { domain: [0, 1], label: "probability", labelAnchor: "center", labelArrow: "none", grid: true, ticks: plotWidth() < 400 ? [0, 0.5, 1] : 5 },
      y: { domain: kept.map((c) => classes[c]), label: null, tickSize: 0, tickFormat: (name) => cut(name, letters) },
      marks: [
        globalThis.Plot.barX(means, { x: "p", y: "name", fill: (d) => (inside.has(d.name) ? ACCENT : QUIET), fillOpacity: 0.28, insetTop: 3, insetBottom: 3 }),
        globalThis.Plot.dot(draws, { x: "p", y: "name", r: 2, fill: ACCENT, fillOpacity: draws.length > 400 ? 0.25 : 0.45, ...spreadOut(draws) }),
        globalThis.Plot.tickX(means, { x: "p", y: "name", stroke: INK, strokeWidth: 2, insetTop: 2, insetBottom: 2 }),
        globalThis.Plot.text(means, { x: 1, y: "name", text: (d) => percent(d.p), textAnchor: "start", dx: 6, fill: INK }),
      ],
    },
    {
      heads: ["class", "probability", "5 % of the draws are below", "5 % are above", "in the prediction set"],
      rows: kept.map((c) => [classes[c], percent(row.probabilities[c]), ...spread(c), inside.has(classes[c]) ? "yes" : "no"]),
      numeric: [1, 2, 3],
    },
  );
}

/** Have each dot a little above or below the middle of its band: no channel of Plot's does it for bands. */
function spreadOut(draws) {
  return {
    render(index, scales, values, dimensions, context, next) {
      const ys = Float64Array.from(values.y);
      for (const i of index) ys[i] += 7 * jitter(draws[i].k + 1);
      return next(index, scales, { ...values, y: ys }, dimensions, context);
    },
  };
}

function spreadOf(values) {
  if (values.length < 2) return ["–", "–"];
  const sorted = [...values].sort((a, b) => a - b);
  return [0.05, 0.95].map((q) => percent(sorted[Math.round(q * (sorted.length - 1))]));
}

/** A target: each draw's mean and standard deviation, from least to greatest, next to the interval. */
export function target(name, row, coverage) {
  const draws = (row.samples ?? []).map(({ mean, std }) => ({ mean, low: mean - std, high: mean + std }));
  draws.sort((a, b) => a.mean - b.mean);
  draws.forEach((draw, i) => (draw.i = i));
  const [low, high] = row.interval;
  const ends = [low, high].filter((end) => end !== null);
  const says = `${number(row.mean)}, with ${percent(coverage)} between ${bound(low, "minus infinity")} and ${bound(high, "infinity")}`;
  return figure(
    `${name}: what each draw says, and where it lies with ${percent(coverage)}`,
    `${says}; a line is one of the draws and its standard deviation.`,
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

/** The detectors' p-values: what is left of the line fires. `combined` are those that the flag is made of. */
export function detectors(row, fpr, combined, describe) {
  const shown = Object.entries(row.detectors).map(([name, found]) => ({
    name: name.replaceAll("_", " "), p: Math.max(found.p_value, 1e-4), ...found, told: describe(name), isCombined: combined.includes(name),
  }));
  shown.sort((a, b) => b.isCombined - a.isCombined || a.p - b.p);
  const all = { name: "all together", p: Math.max(row.p_value, 1e-4), fired: row.flag, isCombined: true };
  const rows = [all, ...shown];
  const least = Math.min(fpr / 5, 0.01, ...rows.map((d) => d.p)) * 0.8;
  return figure(
    "How usual the row is: p-values of the detectors",
    `All together: p = ${number(row.p_value)}. ${shown.filter((d) => d.fired).map((d) => d.name).join(", ") || "None"} fired.`,
    {
      marginLeft: 142,
      marginRight: 52,
      height: 56 + 20 * rows.length,
      x: { type: "log", domain: [least, 1], label: `p-value: left of ${number(fpr)} is unusual`, labelAnchor: "center", labelArrow: "none", grid: true, ticks: 4, tickFormat: (x) => String(Number(x.toPrecision(1))) },
      y: { domain: rows.map((d) => d.name), label: null, tickSize: 0 },
      marks: [
        globalThis.Plot.ruleX([fpr], { stroke: BAD, strokeDasharray: "4 3" }),
        globalThis.Plot.ruleY(rows, { y: "name", x1: least, x2: "p", stroke: QUIET, strokeOpacity: 0.35 }),
        globalThis.Plot.dot(rows, { x: "p", y: "name", r: (d) => (d === all ? 6 : 4.5), fill: (d) => (d.fired ? BAD : d.isCombined ? ACCENT : "none"), stroke: (d) => (d.fired ? BAD : ACCENT), title: "told" }),
        globalThis.Plot.text(rows, { x: 1, y: "name", text: (d) => number(d.p, 2), textAnchor: "start", dx: 6, fill: INK }),
      ],
    },
    {
      heads: ["detector", "p-value", "score", "fired", "of the flag", "what it looks at"],
      rows: shown.map((d) => [d.name, number(d.p_value), number(d.score), d.fired ? "yes" : "no", d.isCombined ? "yes" : "no", d.told]),
      numeric: [1, 2],
    },
  );
}

/** How often versions were right on labels of rows that no score chose, with intervals; of a regression, how far off. */
export function versionsOnLabels(live) {
  const [key, title] = live[0].figures.accuracy ? ["accuracy", "How often it was right on your labelled rows"] : ["rmse", "How far off it was on your labelled rows (RMSE)"];
  const write = key === "accuracy" ? percent : number;
  const rows = live.toReversed().map(({ version, serving, control_labels, figures }) => {
    const { value, interval } = figures[key];
    return { name: `version ${version}`, value, low: interval[0], high: interval[1], serving, control_labels };
  });
  return figure(
    title,
    rows.map((d) => `${d.name}: ${write(d.value)}, from ${write(d.low)} to ${write(d.high)} with 95 %`).join("; "),
    {
      marginLeft: 84,
      marginRight: 56,
      height: 56 + 30 * rows.length,
      x: { label: "with its 95 % interval", labelAnchor: "center", labelArrow: "none", grid: true, ...(key === "accuracy" ? { domain: [Math.min(0.5, ...rows.map((d) => d.low)), 1], tickFormat: (x) => `${Math.round(100 * x)} %`, ticks: 5 } : { zero: true }) },
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
