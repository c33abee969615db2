// Image files that are selected, dropped or pasted.

import { h, onFiles } from "../dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/bmp"];

/** Create the input of an image model; the service decodes the files. */
export function filesInput(spec, changed) {
  let files = [];
  const picker = h("input", { type: "file", accept: TYPES.join(), multiple: true, id: "image-files", "aria-describedby": "image-hint" });
  const thumbnails = h("ul", { class: "thumbnails", "aria-label": "Selected images" });
  const [height, width] = spec.shape.slice(-2);
  const size = spec.image.resize ? `resized to ${width} × ${height} pixels by the service` : `${width} × ${height} pixels`;
  const element = h(
    "div",
    { class: "drop" },
    h("label", { for: picker.id }, "Image files"),
    picker,
    h("p", { class: "quiet", id: "image-hint" }, `PNG, JPEG, WebP or BMP, ${size}. You can also drop or paste images here.`),
    thumbnails,
  );
  picker.addEventListener("change", () => select(picker.files));
  onFiles(element, select);

  function select(selection) {
    if (!selection.length) return;
    show([...selection]);
    changed();
  }

  function show(selection) {
    files.forEach((file) => URL.revokeObjectURL(file.url));
    files = selection.map((file) => ({ file, url: URL.createObjectURL(file) }));
    thumbnails.replaceChildren(...files.map(({ file, url }) => h("li", {}, h("img", { src: url, alt: file.name }), h("span", {}, file.name))));
  }

  return {
    element,
    rows: () => (files.length ? files.map(({ file }) => file.name) : null),
    files: () => (files.length ? files.map(({ file }) => file) : null),
    pictures: () => files.map(({ file, url }) => h("img", { src: url, alt: file.name })),
    saved: () => null, // `ask.js` encodes the files when a link is made
    restore: (saved) => show(saved.map((file) => (file instanceof File ? file : new File([Uint8Array.from(atob(file.content), (c) => c.charCodeAt(0))], file.name)))),
    example: async (row) => [await toPng("example.png", spec, row.flat(Infinity))],
    others: [["Noise", async () => [await toPng("noise.png", spec, Array.from({ length: spec.shape.reduce((a, b) => a * b) }, () => 255 * Math.random()))]]],
  };
}

/** Encode a row of pixels, channels first, as a PNG file. */
async function toPng(name, { shape }, row) {
  const [height, width] = shape.slice(-2), size = height * width;
  const canvas = h("canvas", { width, height });
  const pixels = canvas.getContext("2d").createImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = row[row.length > size ? c * size + i : i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return new File([await new Promise((resolve) => canvas.toBlob(resolve))], name, { type: "image/png" });
}
