// A pool of rows in files: how it is sent, and what can be shown of the rows that are chosen.
//
// A pool is an object with
//   name, size                    in words, and in bytes
//   rows(asked)                   how many there are, null where that is not known before it is ranked
//   send(path, fields, signal)    asks the service with it
//   shown(ranking, asked)         what to show of those rows: {kind, of, names, why, input, forget}; kind is "pictures",
//                                 "columns", "texts" or "none", `of` is what is shown of a row by its index, `why`
//                                 says what is not shown, `input(index)` gives a whole row as labels have it, and
//                                 `forget` lets go of pictures
//   kept                          whether the service keeps the rows that are chosen
// where `asked` has the model and version. Files of rows are read by the service: it shows their rows to the page.

import { ask, asText } from "./api.js";
import { h } from "./dom.js";

const TYPES = { npy: "application/x-npy", npz: "application/x-npz", parquet: "application/vnd.apache.parquet", csv: "text/csv", tsv: "text/csv", zip: "application/zip" };
const MOST_COUNTED = 8 << 20; // bytes of a file that is sent to have its rows counted
const MOST_PICTURE = 16 << 20; // bytes of one image
const MOST_TEXT = 1 << 20;
const MOST_SIDE = 256; // pixels of a picture of numbers; of larger ones some are left out
const LETTERS = 400; // of a text
const COLUMNS = 12; // of a row that are shown
export const ACCEPTED = [".npy", ".npz", ".parquet", ".csv", ".tsv", ".zip", ".txt", "image/png", "image/jpeg", "image/webp", "image/bmp"];

/** The pool that chosen files are. Throws, in words, where they are none. */
export async function poolOf(files, spec) {
  const ending = (file) => file.name.toLowerCase().split(".").pop();
  const tables = files.filter((file) => TYPES[ending(file)]);
  if (tables.length && files.length > 1) throw new Error("A pool is one file of rows, or several images or texts: choose either.");
  if (tables.length) return fileOfRows(files[0], ending(files[0]), spec);
  if (!spec.image && !spec.text) throw new Error("This model takes a file of rows: .npy, .npz, .parquet or .csv.");
  return severalFiles(files, spec);
}

/** A pool that lies in the service's own folder of pools. It is taken for a large one. */
export function poolAtService(name) {
  const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined));
  return {
    name,
    size: Infinity,
    rows: async () => null,
    send: (path, fields, signal) => ask(path, { method: "POST", json: { ...given(fields), pool_file: name }, signal }),
    shown: async () => ({ kind: "none", why: "The pool lies at the service, which gives the rows of its files to nobody: index and id alone are shown." }),
  };
}

function fileOfRows(file, kind, spec) {
  const send = (path, fields, signal) => ask(path, { method: "POST", body: file, type: TYPES[kind], query: fields, signal });
  const preview = async ({ model, version }, rows) => (await send("acquire/preview", { model, version, rows })).json();
  return {
    name: file.name,
    size: file.size,
    async rows(asked) {
      try {
        return file.size > MOST_COUNTED ? null : (await preview(asked, [])).rows;
      } catch {
        return null; // the service says what is wrong with it when it is to rank it
      }
    },
    send,
    async shown(ranking, asked) {
      try {
        const rows = (await preview(asked, ranking.map((row) => row.index))).preview;
        const inputs = new Map(rows.map(({ index, row }) => [index, row]));
        return { ...shownRows(rows, ranking, spec), input: (index) => inputs.get(index) };
      } catch (error) {
        return { kind: "none", why: `The rows cannot be shown: ${error.message}` };
      }
    },
  };
}

function severalFiles(files, spec) {
  const sorted = [...files].sort((a, b) => (a.name < b.name ? -1 : 1));
  return {
    name: sorted.length === 1 ? sorted[0].name : `${sorted.length} files`,
    size: sorted.reduce((sum, file) => sum + file.size, 0),
    rows: async () => sorted.length,
    send(path, fields, signal) {
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) if (value !== null && value !== undefined) form.append(name, asText(value));
      form.append("ids", JSON.stringify(sorted.map((file) => file.name)));
      for (const file of sorted) form.append("pool", file);
      return ask(path, { method: "POST", body: form, signal });
    },
    shown: async (ranking) => ({ ...(await shownFiles(ranking, spec, (row) => sorted[row.index])), input: (index) => (spec.text ? sorted[index].text() : base64(sorted[index])) }),
  };
}

/** What to show of rows as the service gives them. */
function shownRows(rows, ranking, spec) {
  const why = rows.length < ranking.length ? `The first ${rows.length} rows are shown, as large as they are.` : null;
  const mapped = (shown) => new Map(rows.map(({ index, row, id }) => [index, shown(row, id, index)]));
  const first = rows[0]?.row;
  if (spec.text && typeof first === "string") return { kind: "texts", of: mapped(shortened), why };
  if (spec.columns.length && !Array.isArray(first)) {
    const names = spec.columns.map((column) => column.name);
    return ofCells(names, mapped((row) => names.map((name) => (row[name] === null ? "–" : shortened(String(row[name]))))));
  }
  if (typeof first === "string") {
    const urls = rows.map(({ row, id }) => URL.createObjectURL(new Blob([Uint8Array.from(atob(row), (letter) => letter.charCodeAt(0))], { type: typeOf(id) })));
    const pictures = rows.map(({ index, id }, i) => [index, h("img", { src: urls[i], alt: id, loading: "lazy" })]);
    return { kind: "pictures", of: new Map(pictures), why, forget: () => urls.forEach((url) => URL.revokeObjectURL(url)) };
  }
  const planes = planesOf(spec);
  if (planes) return { kind: "pictures", of: mapped((row, id, index) => drawn(row, planes, spec, index)), why };
  const names = spec.columns.length === first?.length ? spec.columns.map((column) => column.name) : (first ?? []).map((_, i) => String(i));
  return ofCells(names, mapped((row) => row.map((x) => (x === null ? "–" : String(Number(x.toPrecision(5)))))));
}

/** Pictures or the beginnings of texts; `fileOf(row)` gives the file of a row. */
async function shownFiles(ranking, spec, fileOf) {
  const of = new Map(), urls = [];
  for (const row of ranking) {
    const file = fileOf(row);
    if (file.size > (spec.text ? MOST_TEXT : MOST_PICTURE)) of.set(row.index, h("span", { class: "quiet" }, "it is too large to be shown"));
    else if (spec.text) of.set(row.index, shortened(await file.slice(0, 8 * LETTERS).text()));
    else {
      urls.push(URL.createObjectURL(file));
      of.set(row.index, h("img", { src: urls.at(-1), alt: row.id, loading: "lazy" }));
    }
  }
  return { kind: spec.text ? "texts" : "pictures", of, forget: () => urls.forEach((url) => URL.revokeObjectURL(url)) };
}

function ofCells(names, of) {
  const why = names.length > COLUMNS ? `The first ${COLUMNS} of ${names.length} columns are shown.` : null;
  return { kind: "columns", names: names.slice(0, COLUMNS), of: new Map([...of].map(([index, cells]) => [index, cells.slice(0, COLUMNS)])), why };
}

/** How the numbers of a row lie as a picture: {height, width, at(y, x, channel), channels}; null where they are none. */
export function planesOf({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32" || shape.length < 2 || shape.length > 3) return null;
  const [channels, height, width] = shape.length === 2 ? [1, ...shape] : shape[2] <= 3 && shape[0] > 3 ? [shape[2], shape[0], shape[1]] : shape;
  if (![1, 3].includes(channels) || Math.min(height, width) < 2) return null;
  const isLast = shape.length === 3 && shape[2] <= 3 && shape[0] > 3;
  return { channels, height, width, at: (y, x, c) => (isLast ? (y * width + x) * channels + c : (c * height + y) * width + x) };
}

/** A row on a canvas: photographs as they are; of other grey numbers the large ones are ink. */
export function drawn(row, { channels, height, width, at }, { image, minimum, maximum }, index) {
  const step = Math.ceil(Math.max(height, width) / MOST_SIDE);
  const [tall, wide] = [height, width].map((side) => Math.ceil(side / step));
  const canvas = h("canvas", { width: wide, height: tall, class: "thumbnail", role: "img", "aria-label": `Row ${index}, as a picture` });
  const on = canvas.getContext("2d");
  const pixels = on.createImageData(wide, tall);
  const [low, high] = image ? [0, 255] : [minimum, maximum];
  const scaled = (value) => Math.min(255, Math.max(0, (255 * (value - low)) / (high - low || 1)));
  for (let y = 0; y < tall; y++) {
    for (let x = 0; x < wide; x++) {
      const place = 4 * (y * wide + x);
      for (let c = 0; c < 3; c++) {
        const value = scaled(row[at(y * step, x * step, channels === 3 ? c : 0)]);
        pixels.data[place + c] = channels === 1 && !image ? 255 - value : value;
      }
      pixels.data[place + 3] = 255;
    }
  }
  on.putImageData(pixels, 0, 0);
  return canvas;
}

async function base64(file) {
  const letters = Array.from(new Uint8Array(await file.arrayBuffer()), (byte) => String.fromCharCode(byte));
  return btoa(letters.join(""));
}

const shortened = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS)} …` : text);

function typeOf(name) {
  return { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", webp: "image/webp", bmp: "image/bmp" }[name.toLowerCase().split(".").pop()] ?? "";
}
