// What made a row strange, as people read it: of an answer's `explanation`.

import { fill, h, number } from "./dom.js";
import { drawn, planesOf } from "./pools.js";
import { detectorSays, inputWord } from "./sentences.js";

const COLUMNS = 4; // that are named
const LEAST_FALL = 0.1; // nats, of a column that is named
const MOST_PIXELS = 256 * 256;

/** An element that says why: `pixels` are the row's numbers, `picture` of it an element; null where there are none. */
export function shownWhy(explanation, manifest, { pixels = null, picture = null } = {}) {
  const { detectors, columns, map, unseen, missing, nearest } = explanation;
  const [name, strongest] = Object.entries(detectors).sort(([, a], [, b]) => b.share - a.share)[0] ?? [null, null];
  const input = inputWord(manifest.input);
  const said = !strongest ? null
    : strongest.low ? "It is too ordinary: smoother, or more average, than real rows are."
    : `It stands out by ${detectorSays(name, input)}.`;
  return h(
    "section",
    { class: "why", "aria-label": "What made it strange" },
    h("h3", {}, "What made it strange"),
    said && h("p", {}, said),
    unseen?.length ? h("p", {}, "Never seen in training: ", unseen.map(({ column, value }, i) => [i ? ", " : null, h("strong", {}, column), " ", h("q", {}, value)]), ".") : null,
    missing?.length ? h("p", {}, `Missing: ${missing.join(", ")}.`) : null,
    columns && ofColumns(columns.filter(({ fall }) => fall > LEAST_FALL).slice(0, COLUMNS)),
    map && ofPixels(map.flat(Infinity), manifest.input, pixels, picture),
    nearest && h("p", { class: "quiet" }, "Nearest training rows: ", nearest.map(({ id, distance }, i) => [i ? ", " : null, h("bdi", {}, id), ` (${number(distance, 2)} away)`]), "."),
  );
}

/** Columns by what it would help if each had its usual value. */
function ofColumns(falls) {
  if (!falls.length) return h("p", {}, "No single column makes it so: it is how they go together.");
  const most = falls[0].fall;
  return h("div", {}, h("p", {}, "It would be less strange with the usual value of"),
    h("ul", { class: "falls" }, falls.map(({ column, fall }) => h("li", {}, h("span", {}, column), h("meter", { min: 0, max: most, value: fall, "aria-label": `${column}: ${number(fall, 2)} nats` })))));
}

/** A map of the pixels that were strange, on the row's picture. */
function ofPixels(shares, spec, pixels, picture) {
  const planes = planesOf(spec);
  const most = Math.max(...shares);
  if (!planes || !(most > 0) || planes.width * planes.height > MOST_PIXELS) return null;
  const { width, height, channels, at } = planes;
  const heat = h("canvas", { width, height, role: "img", "aria-label": "Map of the pixels that made it strange" });
  const on = heat.getContext("2d");
  on.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad");
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let share = 0;
      for (let c = 0; c < channels; c++) share = Math.max(share, shares[at(y, x, c)]);
      on.globalAlpha = 0.9 * Math.sqrt(share / most);
      on.fillRect(x, y, 1, 1);
    }
  }
  const below = picture ?? (pixels && drawn(pixels, planes, spec, 0));
  return h("figure", { class: "small" }, h("div", { class: "heat" }, below, heat), h("figcaption", {}, "Red: the pixels that made it strange"));
}

/** Say in a place that the reasons are looked for. */
export const lookForWhy = (place) => fill(place, h("p", { class: "quiet", role: "status" }, "Looking for what makes it strange …"));
