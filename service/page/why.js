// Explain why a row is unusual, from an answer's `explanation`.

import { fill, h, number } from "./dom.js";
import { drawRow, pixelLayout } from "./pictures.js";
import { describeDetector, inputWord } from "./sentences.js";

const MAX_COLUMNS = 4;
const MIN_FALL = 0.1; // nats
const MAX_PIXELS = 256 * 256;

/** Build the explanation; `pixels` are the row's numbers and `picture` is an element showing it, or null. */
export function explanationElement(explanation, manifest, { pixels = null, picture = null } = {}) {
  const { detectors, columns, map, unseen, missing, nearest } = explanation;
  const [name, strongest] = Object.entries(detectors).sort(([, a], [, b]) => b.share - a.share)[0] ?? [null, null];
  const reason = !strongest ? null
    : strongest.low ? "The input is smoother or closer to the average than real data."
    : `Main reason: ${describeDetector(name, inputWord(manifest.input))}.`;
  return h(
    "section",
    { class: "why", "aria-label": "Why it is unusual" },
    h("h3", {}, "Why it is unusual"),
    reason && h("p", {}, reason),
    unseen?.length ? h("p", {}, "Never seen in training: ", unseen.map(({ column, value }, i) => [i ? ", " : null, h("strong", {}, column), " ", h("q", {}, value)]), ".") : null,
    missing?.length ? h("p", {}, `Missing: ${missing.join(", ")}.`) : null,
    columns && columnList(columns.filter(({ fall }) => fall > MIN_FALL).slice(0, MAX_COLUMNS)),
    map && heatMap(map.flat(Infinity), manifest.input, pixels, picture),
    nearest && h("p", { class: "quiet" }, "Nearest training rows: ", nearest.map(({ id, distance }, i) => [i ? ", " : null, h("bdi", {}, id), ` (distance ${number(distance, 2)})`]), "."),
  );
}

/** List columns by how far the score falls when each gets its usual value. */
function columnList(columns) {
  if (!columns.length) return h("p", {}, "No single column is unusual, but the combination is.");
  const max = columns[0].fall;
  return h("div", {}, h("p", {}, "Most unusual columns:"),
    h("ul", { class: "falls" }, columns.map(({ column, fall }) => h("li", {}, h("span", {}, column), h("meter", { min: 0, max, value: fall, "aria-label": `${column}: ${number(fall, 2)} nats` })))));
}

/** Mark the unusual pixels on the row's picture. */
function heatMap(shares, spec, pixels, picture) {
  const layout = pixelLayout(spec);
  const max = Math.max(...shares);
  if (!layout || !(max > 0) || layout.width * layout.height > MAX_PIXELS) return null;
  const { width, height, channels, index } = layout;
  const heat = h("canvas", { width, height, role: "img", "aria-label": "Map of the most unusual pixels" });
  const context = heat.getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad");
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let share = 0;
      for (let c = 0; c < channels; c++) share = Math.max(share, shares[index(y, x, c)]);
      context.globalAlpha = 0.9 * Math.sqrt(share / max);
      context.fillRect(x, y, 1, 1);
    }
  }
  const background = picture ?? (pixels && drawRow(pixels, layout, spec, "Input"));
  return h("figure", { class: "small" }, h("div", { class: "heat" }, background, heat), h("figcaption", {}, "Red: the most unusual pixels"));
}

/** Show that the explanation is on its way. */
export const showPending = (element) => fill(element, h("p", { class: "quiet", role: "status" }, "Finding out why it is unusual …"));
