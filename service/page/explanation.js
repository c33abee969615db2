// Why a row is unusual: columns, a map of pixels, and the nearest training rows.

import { requestJson } from "./api.js";
import { Element, html, Name, Notice, useFetch, useMemo } from "./components.js";
import { number } from "./format.js";
import { ImageFile } from "./inputs/images.js";
import { drawRow, pixelLayout } from "./pictures.js";

const MAX_COLUMNS = 4;
const MIN_FALL = 0.1; // nats
const MAX_PIXELS = 256 * 256;
const MAX_CELLS = 6; // of a training row

/** Show what makes a flagged row unusual; `pixels` are the row's numbers, or `file` is its image. */
export function Explanation({ row, manifest, pixels, file }) {
  const { columns, map } = row.explanation;
  const falls = (columns ?? []).filter(({ fall }) => fall > MIN_FALL).slice(0, MAX_COLUMNS);
  const layout = map && pixelLayout(manifest.input);
  const hasMap = layout && layout.width * layout.height <= MAX_PIXELS && map.flat(Infinity).some((share) => share > 0);
  if (!falls.length && !hasMap) return null;
  return html`<section class="why" aria-label="What is unusual">
    ${falls.length > 0 && html`<h3>Most unusual columns</h3><ul class="falls">${falls.map(({ column, fall }) => html`<li><${Name}>${column}<//><meter min="0" max=${falls[0].fall} value=${fall} aria-label=${`${column}: ${number(fall, 2)} nats`} /></li>`)}</ul>`}
    ${hasMap && html`<h3>Most unusual pixels</h3><div class="heat">${file ? html`<${ImageFile} file=${file} />` : html`<${RowPicture} row=${pixels} spec=${manifest.input} name="Input" />`}<${HeatMap} shares=${map.flat(Infinity)} layout=${layout} /></div>`}
  </section>`;
}

function HeatMap({ shares, layout }) {
  const canvas = useMemo(() => {
    const { width, height, channels, index } = layout, max = Math.max(...shares);
    const heat = Object.assign(document.createElement("canvas"), { width, height });
    heat.setAttribute("role", "img");
    heat.setAttribute("aria-label", "Map of the most unusual pixels");
    const context = heat.getContext("2d");
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad");
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const share = Math.max(...Array.from({ length: channels }, (_, c) => shares[index(y, x, c)]));
        context.globalAlpha = 0.9 * Math.sqrt(share / max);
        context.fillRect(x, y, 1, 1);
      }
    }
    return heat;
  }, [shares]);
  return html`<${Element} element=${canvas} />`;
}

/** Show a row of pixels as a picture. */
export function RowPicture({ row, spec, name }) {
  const canvas = useMemo(() => drawRow([row].flat(Infinity), pixelLayout(spec), spec, name), [row]);
  return html`<${Element} element=${canvas} />`;
}

/** Show the nearest training rows as pictures or cells, with their labels if the version has them. */
export function NearestRows({ model, version, nearest, manifest }) {
  const { data, error } = useFetch(async (signal) => {
    const ids = nearest.map(({ id }) => `id=${encodeURIComponent(id)}`).join("&");
    return requestJson(`predict/examples?${ids}`, { query: { model, version }, signal });
  }, [nearest.map(({ id }) => id).join("\n")]);
  if (error) return html`<${Notice} kind="told">Cannot show the nearest training rows: ${error.message}<//>`;
  const classes = manifest.output.classes;
  const found = new Map((data?.ids ?? []).map((id, i) => [id, { row: data.inputs[i], label: data.labels?.[i] }]));
  const name = (label) => (label === null || label === undefined ? null : (classes?.[label] ?? number(label, 4)));
  return html`<section aria-label="Nearest training rows"><h3>Nearest training rows</h3><ul class="nearest">${nearest.map(({ id, distance }) => {
    const { row, label } = found.get(id) ?? {};
    return html`<li key=${id}>
      ${row && pixelLayout(manifest.input) && html`<${RowPicture} row=${row} spec=${manifest.input} name=${`Training row ${id}`} />`}
      ${name(label ?? null) !== null && html`<strong><bdi>${name(label)}</bdi></strong>`}
      ${row && !Array.isArray(row) && Object.entries(row).slice(0, MAX_CELLS).map(([column, cell]) => html`<span><${Name}>${column}<//> ${typeof cell === "number" ? number(cell) : (cell ?? "–")}</span>`)}
      <span class="quiet"><bdi>${id}</bdi>, distance ${number(distance, 2)}</span>
    </li>`;
  })}</ul></section>`;
}
