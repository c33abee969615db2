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
    const taken = [...given];
    if (!taken.length) return;
    files.forEach((file) => URL.revokeObjectURL(file.url));
    files = taken.map((file) => ({ file, url: URL.createObjectURL(file) }));
    shown.replaceChildren(...files.map(({ file, url }) => h("li", {}, h("img", { src: url, alt: file.name }), h("span", {}, file.name))));
    changed();
  }

  return {
    element,
    rows: () => (files.length ? files.map(({ file }) => file.name) : null),
    files: () => (files.length ? files.map(({ file }) => file) : null),
    pictures: () => files.map(({ file, url }) => h("img", { src: url, alt: file.name })),
    saved: () => null, // base64 of files is read when a link is made: `ask.js`
    restore(saved) {
      take(saved.map(({ name, content }) => new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name)));
    },
  };
}
