// Plots of the view Live. Times are in the reader's time zone.

import { duration, h, number, percent } from "./dom.js";
import { ACCENT, BAD, figure, INK, QUIET } from "./plots.js";

/** Return a plot size that keeps its text readable on a phone. */
const size = () => ({ width: Math.max(300, Math.min(560, document.documentElement.clientWidth - 32)), height: 220 });
const MAX_LATENCY_S = 30; // the last finite end of the histogram
const clock = (time) => new Date(time).toLocaleTimeString();
const range = ({ from, to }) => ({ x1: new Date(from.time), x2: new Date(to.time), seconds: (to.time - from.time) / 1000 });
const time = { type: "time", label: null, ticks: 5 };
// Outcomes of requests in stacking order: name, pattern of the status, colour, opacity, CSS class.
const OUTCOMES = [["answered", /^[23]/, ACCENT, 0.55, "answered"], ["refused (4xx)", /^4/, QUIET, 0.7, "refused"], ["failed (5xx)", /^5/, BAD, 0.9, "failed"], ["disconnected", /^n/, INK, 0.9, "gone"]];

/** Plot requests per second by outcome. `spans`: {from, to, statuses: Map of counts}. */
export function requests(spans) {
  const counted = spans.map((span) => ({ ...range(span), counts: OUTCOMES.map(([, pattern]) => [...span.statuses].reduce((sum, [status, count]) => sum + (pattern.test(status) ? count : 0), 0)) }));
  const totals = OUTCOMES.map((_, i) => counted.reduce((sum, span) => sum + span.counts[i], 0));
  const rects = counted.flatMap((span) => {
    let below = 0;
    return OUTCOMES.map(([name, , colour, opacity], i) => {
      const y1 = below, y2 = (below += span.counts[i] / span.seconds);
      return { ...span, name, colour, opacity, y1, y2 };
    }).filter(({ y1, y2 }) => y2 > y1);
  });
  const label = OUTCOMES.map(([name], i) => `${name} ${number(totals[i])}`).filter((_, i) => totals[i] > 0).join(", ");
  const legend = OUTCOMES.filter((_, i) => totals[i] > 0).map(([name, , , , style]) => h("span", { class: `swatch ${style}` }, name));
  return withLegend(legend, figure("Requests per second", `${label || "None in this period"}.`,
    {
      ...size(), x: domain(counted), y: { label: null, grid: true, ...from0(rects.map((d) => d.y2)) },
      marks: [globalThis.Plot.rect(rects, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: "colour", fillOpacity: "opacity", title: "name", inset: 0.25 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["from", "to", ...OUTCOMES.map(([name]) => name)], rows: spans.map((span, i) => [clock(span.from.time), clock(span.to.time), ...counted[i].counts.map((count) => number(count))]), numeric: [2, 3, 4, 5] }));
}

/** Plot latency. `spans`: {from, to, count, p50, p99}. */
export function latency(spans) {
  const points = spans.map((span) => ({ x: middle(span), p50: span.count ? Math.min(span.p50, MAX_LATENCY_S) : NaN, p99: span.count ? Math.min(span.p99, MAX_LATENCY_S) : NaN }));
  const measured = points.filter((_, i) => spans[i].count > 0);
  const last = measured.slice(-1);
  return figure("Latency", last.length ? `Latest: 50 % within ${duration(last[0].p50)}, 99 % within ${duration(last[0].p99)}.` : "No requests in this period.",
    {
      ...size(), marginLeft: 56, marginRight: 44, x: domain(spans.map(range)), y: { label: null, grid: true, tickFormat: (s) => duration(s), ticks: 5, ...from0(measured.map((d) => d.p99)) },
      marks: [["p50", ACCENT], ["p99", QUIET]].flatMap(([name, colour]) => [
        globalThis.Plot.lineY(points, { x: "x", y: name, stroke: colour, strokeWidth: 2 }),
        globalThis.Plot.dot(measured, { x: "x", y: name, r: 2, fill: colour }),
        globalThis.Plot.text(last, { x: "x", y: name, text: () => name, textAnchor: "start", dx: 6, fill: colour }),
      ]),
    },
    { heads: ["from", "to", "requests", "50 % within", "99 % within"], rows: spans.map((s) => [clock(s.from.time), clock(s.to.time), number(s.count), duration(s.p50), s.p99 === Infinity ? "over 30 s" : duration(s.p99)]), numeric: [2, 3, 4] });
}

/** Plot queued and running work. `points`: {time, rowDraws, requests}. */
export function queue(points) {
  const max = Math.max(...points.map((point) => point.rowDraws));
  return figure("Queue, in row-draws", `Now ${number(points.at(-1).rowDraws)}, maximum ${number(max)}.`,
    {
      ...size(), marginLeft: 56, x: domain(points.map((p) => ({ x1: new Date(p.time), x2: new Date(p.time) }))), y: { label: null, grid: true, ...from0(points.map((p) => p.rowDraws)) },
      marks: [globalThis.Plot.ruleY([0], { stroke: QUIET }), globalThis.Plot.areaY(points, { x: (p) => new Date(p.time), y: "rowDraws", fill: ACCENT, fillOpacity: 0.2 }), globalThis.Plot.lineY(points, { x: (p) => new Date(p.time), y: "rowDraws", stroke: ACCENT })],
    },
    { heads: ["time", "row-draws", "requests"], rows: points.slice(-60).map((p) => [clock(p.time), number(p.rowDraws), number(p.requests)]), numeric: [1, 2] });
}

/** Plot new and reused draws per second. `spans`: {from, to, made, reused}. */
export function draws(spans) {
  const rects = spans.flatMap((span) => {
    const { seconds, ...x } = range(span);
    const made = span.made / seconds;
    return [{ ...x, y1: 0, y2: made, name: "new", opacity: 0.55 }, { ...x, y1: made, y2: made + span.reused / seconds, name: "reused", opacity: 0.2 }];
  }).filter(({ y1, y2 }) => y2 > y1);
  const [made, reused] = ["made", "reused"].map((name) => spans.reduce((sum, span) => sum + span[name], 0));
  return figure("Draws per second", `${number(made)} new, ${number(reused)} reused from earlier answers (lighter).`,
    {
      ...size(), marginLeft: 56, x: domain(spans.map(range)), y: { label: null, grid: true, ...from0(rects.map((d) => d.y2)) },
      marks: [globalThis.Plot.rect(rects, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: ACCENT, fillOpacity: "opacity", title: "name", inset: 0.25 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["from", "to", "new", "reused"], rows: spans.map((s) => [clock(s.from.time), clock(s.to.time), number(s.made), number(s.reused)]), numeric: [2, 3] });
}

/** Plot the share of small p-values. `spans`: {from, to, rows, flags, band: [low, high]}; `rate` is the expected share. */
export function flags(spans, rate) {
  if (!spans.length) return null;
  const points = spans.map((span) => ({ ...range(span), x: middle(span), share: span.flags / span.rows, low: span.band[0], high: span.band[1] }));
  const isOutside = (p) => p.share > p.high || p.share < p.low;
  const outside = points.filter(isOutside).length;
  return figure("Share of p-values up to 0.05, with its expected range", `${points.length - outside} of ${points.length} points are within the expected range.`,
    {
      ...size(), marginLeft: 48, x: domain(points), y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0([0.1, ...points.flatMap((p) => [p.share, p.high])]) },
      marks: [
        globalThis.Plot.rect(points, { x1: "x1", x2: "x2", y1: "low", y2: "high", fill: ACCENT, fillOpacity: 0.15 }),
        globalThis.Plot.ruleY([rate], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.dot(points, { x: "x", y: "share", r: 3.5, fill: (p) => (isOutside(p) ? BAD : ACCENT), symbol: (p) => (isOutside(p) ? "times" : "circle"), stroke: (p) => (isOutside(p) ? BAD : "none"), strokeWidth: 2 }),
      ],
    },
    { heads: ["from", "to", "rows", "up to 0.05", "expected from", "to"], rows: spans.map((s, i) => [clock(s.from.time), clock(s.to.time), number(s.rows), percent(points[i].share), percent(points[i].low), percent(points[i].high)]), numeric: [2, 3, 4, 5] });
}

/** Plot p-values in ten bins, which are equally full if the rows are like the calibration data. */
export function pValues(bins, rows) {
  const finite = bins.filter((bin) => bin.to <= 1);
  const bars = Array.from({ length: 10 }, (_, i) => {
    const inside = finite.filter((bin) => bin.to > i / 10 + 1e-9 && bin.to <= (i + 1) / 10 + 1e-9);
    return { from: i / 10, to: (i + 1) / 10, share: inside.reduce((sum, bin) => sum + bin.count, 0) / rows };
  });
  return figure(`p-values of ${number(rows)} rows`, `${percent(bars[0].share)} are up to 0.1; 10 % is expected.`,
    {
      ...size(), marginLeft: 48, x: { domain: [0, 1], label: "p-value", labelAnchor: "center", labelArrow: "none" },
      y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0([0.2, ...bars.map((d) => d.share)]) },
      marks: [globalThis.Plot.rect(bars, { x1: "from", x2: "to", y1: () => 0, y2: "share", fill: ACCENT, fillOpacity: 0.45, insetLeft: 0.5, insetRight: 0.5 }), globalThis.Plot.ruleY([0.1], { stroke: INK, strokeDasharray: "4 3" }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["above", "up to", "rows", "share"], rows: finite.map((bin) => [number(bin.from), number(bin.to), number(bin.count), percent(bin.count / rows)]), numeric: [0, 1, 2, 3] });
}

/** Plot the evidence of drift. `points`: {time, evidence}. */
export function evidence(points, alarmAt) {
  if (!points.length) return null;
  const values = [...points.map((point) => point.evidence), alarmAt * 1.15, 0];
  return figure("Evidence of drift, in nats", `Now ${number(points.at(-1).evidence, 2)}; alarm at ${number(alarmAt, 2)}.`,
    {
      ...size(), marginRight: 44, x: domain(points.map((p) => ({ x1: new Date(p.time), x2: new Date(p.time) }))), y: { label: null, grid: true, domain: [Math.min(...values), Math.max(...values)], nice: true },
      marks: [
        globalThis.Plot.ruleY([alarmAt], { stroke: BAD, strokeDasharray: "4 3" }),
        globalThis.Plot.text([alarmAt], { y: (x) => x, frameAnchor: "right", dx: 4, textAnchor: "start", text: () => "alarm", fill: BAD }),
        globalThis.Plot.lineY(points, { x: (p) => new Date(p.time), y: "evidence", stroke: ACCENT, strokeWidth: 2 }),
        globalThis.Plot.dot(points.slice(-1), { x: (p) => new Date(p.time), y: "evidence", r: 3, fill: ACCENT }),
      ],
    },
    { heads: ["time", "evidence"], rows: points.slice(-60).map((p) => [clock(p.time), number(p.evidence)]), numeric: [1] });
}

/** Plot the uncertainty of answers: entropy, or the standard deviation for regression. `bins`: {from, to, count}. */
export function uncertainty(bins, isClassification) {
  const total = bins.reduce((sum, bin) => sum + bin.count, 0);
  if (!total) return null;
  const first = bins.findIndex((bin) => bin.count > 0), last = bins.findLastIndex((bin) => bin.count > 0);
  const bars = bins.slice(Math.max(0, first - 1), last + 2).map((bin) => ({ ...bin, share: bin.count / total, name: bin.to === Infinity ? "more" : number(bin.to) }));
  const labelStep = Math.ceil(bars.length / (size().width / 45)); // so that the labels do not overlap
  const quantity = isClassification ? "Entropy" : "Predicted standard deviation";
  return figure(`${quantity} of ${number(total)} rows`, `Most common: up to ${bars.reduce((a, b) => (b.count > a.count ? b : a)).name}.`,
    {
      ...size(), marginLeft: 48, x: { domain: bars.map((bar) => bar.name), label: isClassification ? "up to … nats" : "up to …, in the target's units", labelAnchor: "center", labelArrow: "none", tickSize: 0, ticks: bars.filter((_, i) => i % labelStep === 0).map((bar) => bar.name) },
      y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0(bars.map((bar) => bar.share)) },
      marks: [globalThis.Plot.barY(bars, { x: "name", y: "share", fill: ACCENT, fillOpacity: 0.45, inset: 0.5 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["above", "up to", "rows", "share"], rows: bars.map((bar) => [number(bar.from), bar.name, number(bar.count), percent(bar.share)]), numeric: [0, 1, 2, 3] });
}

const middle = ({ from, to }) => new Date((from.time + to.time) / 2);

/** Return a scale from 0 to the largest value, or to 1 if there is none. */
function from0(values) {
  const max = Math.max(0, ...values.filter(Number.isFinite));
  return { domain: [0, max > 0 ? max : 1], nice: true };
}

function domain(ranges) {
  if (!ranges.length) return time;
  const first = Math.min(...ranges.map(({ x1 }) => +x1)), last = Math.max(...ranges.map(({ x2 }) => +x2));
  return { ...time, domain: [new Date(first), new Date(Math.max(last, first + 1000))] };
}

function withLegend(legend, figure) {
  if (legend.length) figure.querySelector("figcaption").append(h("span", { class: "key" }, legend));
  return figure;
}
