// Image files: chosen, dropped or pasted.

import { h, whenGiven } from "../dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/bmp"];

/** The input of a model of images. The files go to the service as they are. */
export function filesInput(spec, changed) {
  let files = [];
  const choose = h("input", { type: "file", accept: TYPES.join(), multiple: true, id: "image-files", "aria-describedby": "image-hint" });
  const shown = h("ul", { class: "thumbnails", "aria-label": "Images to ask about" });
  const [height, width] = spec.shape.slice(-2);
  const size = spec.image.resize ? `brought to ${width} x ${height} pixels by the service` : `of ${width} x ${height} pixels`;
  const element = h(
    "div",
    { class: "drop" },
    h("label", { for: choose.id }, "Image files"),
    choose,
    h("p", { class: "quiet", id: "image-hint" }, `PNG, JPEG, WebP or BMP, ${size}. Drop them here, or paste one, as well.`),
    shown,
  );
  choose.addEventListener("change", () => take(choose.files));
  whenGiven(element, take);

  function take(given) {
    if (!given.length) return;
    show([...given]);
    changed();
  }

  function show(taken) {
    files.forEach((file) => URL.revokeObjectURL(file.url));
    files = taken.map((file) => ({ file, url: URL.createObjectURL(file) }));
    shown.replaceChildren(...files.map(({ file, url }) => h("li", {}, h("img", { src: url, alt: file.name }), h("span", {}, file.name))));
  }

  return {
    element,
    rows: () => (files.length ? files.map(({ file }) => file.name) : null),
    files: () => (files.length ? files.map(({ file }) => file) : null),
    pictures: () => files.map(({ file, url }) => h("img", { src: url, alt: file.name })),
    saved: () => null, // base64 of files is read when a link is made: `ask.js`
    restore: (saved) => show(saved.map((one) => (one instanceof File ? one : new File([Uint8Array.from(atob(one.content), (c) => c.charCodeAt(0))], one.name)))),
    example: async (row) => [await asFile("example.png", spec, row.flat(Infinity))],
    others: [["Noise", async () => [await asFile("noise.png", spec, Array.from({ length: spec.shape.reduce((a, b) => a * b) }, () => 255 * Math.random()))]]],
  };
}

/** A row of pixels, channels first, as a PNG file. */
async function asFile(name, { shape }, row) {
  const [height, width] = shape.slice(-2), size = height * width;
  const canvas = h("canvas", { width, height });
  const pixels = canvas.getContext("2d").createImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = row[row.length > size ? c * size + i : i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return new File([await new Promise((done) => canvas.toBlob(done))], name, { type: "image/png" });
}
