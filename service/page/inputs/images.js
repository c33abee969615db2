// Image files that are selected, dropped or pasted; the service decodes them.

import { html, useFiles, useMemo } from "../components.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/bmp"];

function Control({ spec, value, onchange }) {
  const place = useFiles((files) => files.length && onchange([...files]));
  const [height, width] = spec.shape.slice(-2);
  const size = spec.image.resize ? `resized to ${width} × ${height} pixels by the service` : `${width} × ${height} pixels`;
  return html`<div class="drop" ref=${place}>
    <label for="image-files">Image files</label>
    <input type="file" accept=${TYPES.join()} multiple id="image-files" aria-describedby="image-hint" onchange=${(event) => event.target.files.length && onchange([...event.target.files])} />
    <p class="quiet" id="image-hint">PNG, JPEG, WebP or BMP, ${size}. You can also drop or paste images here.</p>
    <ul class="thumbnails" aria-label="Selected images">${value.map((file) => html`<li><${ImageFile} file=${file} /><span>${file.name}</span></li>`)}</ul>
  </div>`;
}

/** Show an image file. */
export function ImageFile({ file }) {
  const url = useMemo(() => URL.createObjectURL(file), [file]);
  return html`<img src=${url} alt=${file.name} onload=${() => URL.revokeObjectURL(url)} />`;
}

/** Encode a row of pixels, channels first, as a PNG file. */
async function toPng(name, { shape }, row) {
  const [height, width] = shape.slice(-2), size = height * width;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const pixels = canvas.getContext("2d").createImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = row[row.length > size ? c * size + i : i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return new File([await new Promise((resolve) => canvas.toBlob(resolve))], name, { type: "image/png" });
}

export const images = {
  name: "Image files",
  Control,
  empty: () => [],
  rows: (value) => (value.length ? value.map((file) => file.name) : null),
  files: (value) => value,
  fromRow: async (row, spec) => [await toPng("example.png", spec, row.flat(Infinity))],
  odd: [["Noise", async (spec) => [await toPng("noise.png", spec, Array.from({ length: spec.shape.reduce((a, b) => a * b) }, () => 255 * Math.random()))]]],
};
