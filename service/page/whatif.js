// How the answer changes if one column changes.

import { html, useFetch } from "./components.js";
import { number, percent } from "./format.js";
import { predict } from "./predict.js";

const POINTS = 21;
const [WIDTH, HEIGHT, MARGIN] = [360, 110, 8];

/** Plot the answer, with its band, over the values of a numeric column; `row` is the current row. */
export function WhatIf({ column, range, row, label, fields, manifest }) {
  const others = JSON.stringify({ ...row, [column]: null });
  const { data } = useFetch(async () => {
    const values = Array.from({ length: POINTS }, (_, i) => range.min + ((range.max - range.min) * i) / (POINTS - 1));
    const { answer } = await predict({ rows: values.map((value) => ({ ...row, [column]: value })), files: null, fields, manifest });
    return values.map((value, i) => ({ value, flag: answer.predictions[i].flag, ...bandOf(answer.predictions[i], label, manifest) }));
  }, [column, others, label, JSON.stringify(fields)]);
  if (!data) return null;
  const isClassification = manifest.task !== "regression", value = row[column];
  const ends = isClassification ? [0, 1] : [Math.min(...data.map(({ low }) => low)), Math.max(...data.map(({ high }) => high))];
  const x = (at) => MARGIN + ((WIDTH - 2 * MARGIN) * (Math.min(range.max, Math.max(range.min, at)) - range.min)) / (range.max - range.min);
  const y = (at) => MARGIN + (HEIGHT - 2 * MARGIN) * (1 - (at - ends[0]) / (ends[1] - ends[0] || 1));
  const path = (points) => points.map(([at, level], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(level).toFixed(1)}`).join("");
  const write = isClassification ? percent : number;
  const flagged = data.filter(({ flag }) => flag).length;
  return html`<figure class="what-if-plot">
    <figcaption>If only <bdi>${column}</bdi> changes: ${isClassification ? html`probability of <bdi>${label}</bdi>` : html`<bdi>${manifest.output.target ?? "the target"}</bdi>`}</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`From ${write(data[0].mean)} at ${number(range.min)} to ${write(data.at(-1).mean)} at ${number(range.max)}. ${flagged} of ${POINTS} values are flagged.`}>
      <path class="band" d=${`${path([...data.map((d) => [d.value, d.low]), ...data.toReversed().map((d) => [d.value, d.high])])}Z`} />
      <path class="line" d=${path(data.map((d) => [d.value, d.mean]))} />
      ${data.map((d) => html`<circle class=${d.flag ? "flagged" : ""} cx=${x(d.value)} cy=${y(d.mean)} r="3" />`)}
      ${typeof value === "number" && html`<line class="now" x1=${x(value)} x2=${x(value)} y1="0" y2=${HEIGHT} />`}
    </svg>
    <p class="ends quiet"><span>${number(range.min)}</span><span>${write(ends[0])} to ${write(ends[1])}${flagged > 0 && html`; <span class="flagged">red: flagged</span>`}</span><span>${number(range.max)}</span></p>
  </figure>`;
}

/** Return the mean and band of an answer: the interval, or for a class the central 90 % of the draws. */
function bandOf(row, label, manifest) {
  if (manifest.task === "regression") {
    const [low, high] = row.interval;
    return { mean: row.mean, low: low ?? row.mean - 2 * row.std, high: high ?? row.mean + 2 * row.std };
  }
  const c = manifest.output.classes.indexOf(label), mean = row.probabilities[c];
  const draws = (row.samples ?? [row.probabilities]).map((draw) => draw[c]).sort((a, b) => a - b);
  return { mean, low: draws[Math.round(0.05 * (draws.length - 1))], high: draws[Math.round(0.95 * (draws.length - 1))] };
}
