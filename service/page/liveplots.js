// The plots of the view that watches. Times are of the reader's own clock.

import { duration, h, number, percent } from "./dom.js";
import { ACCENT, BAD, figure, INK, QUIET } from "./plots.js";

/** On a phone plots are narrower, so that what is written in them is not. */
const size = () => ({ width: Math.max(300, Math.min(560, document.documentElement.clientWidth - 32)), height: 220 });
const clock = (time) => new Date(time).toLocaleTimeString();
const range = ({ from, to }) => ({ x1: new Date(from.time), x2: new Date(to.time), seconds: (to.time - from.time) / 1000 });
const time = { type: "time", label: null, ticks: 5 };
// How a request ended, by the first character of its status, in the order in which they are stacked.
const KINDS = [["answered", /^[23]/, ACCENT, 0.55, "answered"], ["refused (4xx)", /^4/, QUIET, 0.7, "refused"], ["failed (5xx)", /^5/, BAD, 0.9, "failed"], ["client gone", /^n/, INK, 0.9, "gone"]];

/** Requests a second by how they ended. `spans`: {from, to, statuses: Map of counts}. */
export function requests(spans) {
  const counted = spans.map((span) => ({ ...range(span), counts: KINDS.map(([, like]) => [...span.statuses].reduce((sum, [status, count]) => sum + (like.test(status) ? count : 0), 0)) }));
  const seen = KINDS.map((_, i) => counted.reduce((sum, span) => sum + span.counts[i], 0));
  const rects = counted.flatMap((span) => {
    let below = 0;
    return KINDS.map(([name, , colour, opacity], i) => {
      const y1 = below, y2 = (below += span.counts[i] / span.seconds);
      return { ...span, name, colour, opacity, y1, y2 };
    }).filter(({ y1, y2 }) => y2 > y1);
  });
  const says = KINDS.map(([name], i) => `${name} ${number(seen[i])}`).filter((_, i) => seen[i] > 0).join(", ");
  const key = KINDS.filter((_, i) => seen[i] > 0).map(([name, , , , sort]) => h("span", { class: `swatch ${sort}` }, name));
  return withKey(key, figure("Requests a second", `${says || "None in this time"}.`,
    {
      ...size(), x: domain(counted), y: { label: null, grid: true, ...from0(rects.map((d) => d.y2)) },
      marks: [globalThis.Plot.rect(rects, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: "colour", fillOpacity: "opacity", title: "name", inset: 0.25 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["from", "to", ...KINDS.map(([name]) => name)], rows: spans.map((span, i) => [clock(span.from.time), clock(span.to.time), ...counted[i].counts.map((count) => number(count))]), numeric: [2, 3, 4, 5] }));
}

/** Seconds until the answer. `spans`: {from, to, count, p50, p99}. */
export function seconds(spans) {
  const most = 30;
  const known = spans.filter((span) => span.count > 0).map((span) => ({ ...span, x: middle(span), p50: Math.min(span.p50, most), p99: Math.min(span.p99, most) }));
  const points = spans.map((span) => ({ x: middle(span), p50: span.count ? Math.min(span.p50, most) : NaN, p99: span.count ? Math.min(span.p99, most) : NaN }));
  const last = known.slice(-1);
  return figure("Time to answer", last.length ? `Half within ${duration(last[0].p50)}, 99 % within ${duration(last[0].p99)} at the end.` : "No requests in this time.",
    {
      ...size(), marginLeft: 56, marginRight: 44, x: domain(spans.map(range)), y: { label: null, grid: true, tickFormat: (s) => duration(s), ticks: 5, ...from0(known.map((d) => d.p99)) },
      marks: [["p50", ACCENT], ["p99", QUIET]].flatMap(([name, colour]) => [
        globalThis.Plot.lineY(points, { x: "x", y: name, stroke: colour, strokeWidth: 2 }),
        globalThis.Plot.dot(known, { x: "x", y: name, r: 2, fill: colour }),
        globalThis.Plot.text(last, { x: "x", y: name, text: () => name, textAnchor: "start", dx: 6, fill: colour }),
      ]),
    },
    { heads: ["from", "to", "requests", "half within", "99 % within"], rows: spans.map((s) => [clock(s.from.time), clock(s.to.time), number(s.count), duration(s.p50), s.p99 === Infinity ? "over 30 s" : duration(s.p99)]), numeric: [2, 3, 4] });
}

/** Work that waits or is being done. `points`: {time, rowDraws, requests}. */
export function queue(points) {
  const most = Math.max(...points.map((point) => point.rowDraws));
  return figure("In the queue: rows × draws", `${number(points.at(-1).rowDraws)} now, at most ${number(most)} when it was looked at.`,
    {
      ...size(), marginLeft: 56, x: domain(points.map((p) => ({ x1: new Date(p.time), x2: new Date(p.time) }))), y: { label: null, grid: true, ...from0(points.map((p) => p.rowDraws)) },
      marks: [globalThis.Plot.ruleY([0], { stroke: QUIET }), globalThis.Plot.areaY(points, { x: (p) => new Date(p.time), y: "rowDraws", fill: ACCENT, fillOpacity: 0.2 }), globalThis.Plot.lineY(points, { x: (p) => new Date(p.time), y: "rowDraws", stroke: ACCENT })],
    },
    { heads: ["at", "rows × draws", "requests"], rows: points.slice(-60).map((p) => [clock(p.time), number(p.rowDraws), number(p.requests)]), numeric: [1, 2] });
}

/** Draws behind answers. `spans`: {from, to, made, reused}. */
export function draws(spans) {
  const rects = spans.flatMap((span) => {
    const { seconds, ...x } = range(span);
    const made = span.made / seconds;
    return [{ ...x, y1: 0, y2: made, name: "made for answers", opacity: 0.55 }, { ...x, y1: made, y2: made + span.reused / seconds, name: "made for earlier answers", opacity: 0.2 }];
  }).filter(({ y1, y2 }) => y2 > y1);
  const [made, reused] = ["made", "reused"].map((name) => spans.reduce((sum, span) => sum + span[name], 0));
  return figure("Draws a second", `${number(made)} were made for answers, ${number(reused)} had been made for earlier ones (lighter).`,
    {
      ...size(), marginLeft: 56, x: domain(spans.map(range)), y: { label: null, grid: true, ...from0(rects.map((d) => d.y2)) },
      marks: [globalThis.Plot.rect(rects, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: ACCENT, fillOpacity: "opacity", title: "name", inset: 0.25 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["from", "to", "made", "made earlier"], rows: spans.map((s) => [clock(s.from.time), clock(s.to.time), number(s.made), number(s.reused)]), numeric: [2, 3] });
}

/** The share of small p-values. `spans`: {from, to, rows, flags, band: [low, high]}; `rate` is expected. */
export function flags(spans, rate) {
  if (!spans.length) return null;
  const points = spans.map((span) => ({ ...range(span), x: middle(span), share: span.flags / span.rows, low: span.band[0], high: span.band[1] }));
  const out = points.filter((p) => p.share > p.high || p.share < p.low).length;
  return figure("Share of p-values up to .05, and where it is expected", `${points.length - out} of ${points.length} times within the band that is expected.`,
    {
      ...size(), marginLeft: 48, x: domain(points), y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0([0.1, ...points.flatMap((p) => [p.share, p.high])]) },
      marks: [
        globalThis.Plot.rect(points, { x1: "x1", x2: "x2", y1: "low", y2: "high", fill: ACCENT, fillOpacity: 0.15 }),
        globalThis.Plot.ruleY([rate], { stroke: QUIET, strokeDasharray: "4 3" }),
        globalThis.Plot.dot(points, { x: "x", y: "share", r: 3.5, fill: (p) => (p.share > p.high || p.share < p.low ? BAD : ACCENT), symbol: (p) => (p.share > p.high || p.share < p.low ? "times" : "circle"), stroke: (p) => (p.share > p.high || p.share < p.low ? BAD : "none"), strokeWidth: 2 }),
      ],
    },
    { heads: ["from", "to", "rows", "up to .05", "expected from", "to"], rows: spans.map((s, i) => [clock(s.from.time), clock(s.to.time), number(s.rows), percent(points[i].share), percent(points[i].low), percent(points[i].high)]), numeric: [2, 3, 4, 5] });
}

/** The p-values of rows, in ten even bins: as many in each where they are like the calibration data. */
export function pValues(bins, rows) {
  const known = bins.filter((bin) => bin.to <= 1);
  const bars = Array.from({ length: 10 }, (_, i) => {
    const inside = known.filter((bin) => bin.to > i / 10 + 1e-9 && bin.to <= (i + 1) / 10 + 1e-9);
    return { from: i / 10, to: (i + 1) / 10, share: inside.reduce((sum, bin) => sum + bin.count, 0) / rows };
  });
  return figure(`p-values of ${number(rows)} rows`, `${percent(bars[0].share)} are up to .1, where 10 % would be usual.`,
    {
      ...size(), marginLeft: 48, x: { domain: [0, 1], label: "p-value", labelAnchor: "center", labelArrow: "none" },
      y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0([0.2, ...bars.map((d) => d.share)]) },
      marks: [globalThis.Plot.rect(bars, { x1: "from", x2: "to", y1: () => 0, y2: "share", fill: ACCENT, fillOpacity: 0.45, insetLeft: 0.5, insetRight: 0.5 }), globalThis.Plot.ruleY([0.1], { stroke: INK, strokeDasharray: "4 3" }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["above", "up to", "rows", "share"], rows: known.map((bin) => [number(bin.from), number(bin.to), number(bin.count), percent(bin.count / rows)]), numeric: [0, 1, 2, 3] });
}

/** Evidence of drift. `points`: {time, evidence}. */
export function evidence(points, alarmAt) {
  if (!points.length) return null;
  const now = points.at(-1).evidence;
  const values = [...points.map((point) => point.evidence), alarmAt * 1.15, 0];
  return figure("Evidence of drift, in nats", `${number(now, 2)} now; ${number(alarmAt, 2)} is an alarm.`,
    {
      ...size(), marginRight: 44, x: domain(points.map((p) => ({ x1: new Date(p.time), x2: new Date(p.time) }))), y: { label: null, grid: true, domain: [Math.min(...values), Math.max(...values)], nice: true },
      marks: [
        globalThis.Plot.ruleY([alarmAt], { stroke: BAD, strokeDasharray: "4 3" }),
        globalThis.Plot.text([alarmAt], { y: (x) => x, frameAnchor: "right", dx: 4, textAnchor: "start", text: () => "alarm", fill: BAD }),
        globalThis.Plot.lineY(points, { x: (p) => new Date(p.time), y: "evidence", stroke: ACCENT, strokeWidth: 2 }),
        globalThis.Plot.dot(points.slice(-1), { x: (p) => new Date(p.time), y: "evidence", r: 3, fill: ACCENT }),
      ],
    },
    { heads: ["at", "evidence"], rows: points.slice(-60).map((p) => [clock(p.time), number(p.evidence)]), numeric: [1] });
}

/** How unsure answers were: entropies, or of a regression standard deviations. `bins`: {from, to, count}. */
export function doubt(bins, isClassified) {
  const all = bins.reduce((sum, bin) => sum + bin.count, 0);
  if (!all) return null;
  const first = bins.findIndex((bin) => bin.count > 0), last = bins.findLastIndex((bin) => bin.count > 0);
  const bars = bins.slice(Math.max(0, first - 1), last + 2).map((bin) => ({ ...bin, share: bin.count / all, name: bin.to === Infinity ? "more" : number(bin.to) }));
  const every = Math.ceil(bars.length / (size().width / 45)); // of the bars has its end written below it
  const what = isClassified ? "Entropies" : "Predicted standard deviations";
  return figure(`${what} of ${number(all)} rows`, `Most often up to ${bars.reduce((a, b) => (b.count > a.count ? b : a)).name}.`,
    {
      ...size(), marginLeft: 48, x: { domain: bars.map((bar) => bar.name), label: isClassified ? "up to this many nats" : "up to, in the target's units", labelAnchor: "center", labelArrow: "none", tickSize: 0, ticks: bars.filter((_, i) => i % every === 0).map((bar) => bar.name) },
      y: { label: null, grid: true, tickFormat: (x) => percent(x), ticks: 5, ...from0(bars.map((bar) => bar.share)) },
      marks: [globalThis.Plot.barY(bars, { x: "name", y: "share", fill: ACCENT, fillOpacity: 0.45, inset: 0.5 }), globalThis.Plot.ruleY([0], { stroke: QUIET })],
    },
    { heads: ["above", "up to", "rows", "share"], rows: bars.map((bar) => [number(bar.from), bar.name, number(bar.count), percent(bar.share)]), numeric: [0, 1, 2, 3] });
}

const middle = ({ from, to }) => new Date((from.time + to.time) / 2);

/** A scale from 0 to the largest value, and to 1 where there is none. */
function from0(values) {
  const most = Math.max(0, ...values.filter(Number.isFinite));
  return { domain: [0, most > 0 ? most : 1], nice: true };
}

function domain(ranges) {
  if (!ranges.length) return time;
  const first = Math.min(...ranges.map(({ x1 }) => +x1)), last = Math.max(...ranges.map(({ x2 }) => +x2));
  return { ...time, domain: [new Date(first), new Date(Math.max(last, first + 1000))] };
}

/** What the colours of a plot stand for, below its title. */
function withKey(key, made) {
  if (key.length) made.querySelector("figcaption").append(h("span", { class: "key" }, key));
  return made;
}
