// A pool of rows in files: how it is sent, and what can be shown of the rows that are chosen.
//
// A pool is an object with
//   name, size                    in words, and in bytes
//   rows()                        how many there are, null where that is not known before the service has read it
//   send(path, fields, signal)    asks the service with it
//   shown(ranking)                what to show of those rows: {kind, of, names, why, forget}; kind is "pictures",
//                                 "columns", "texts" or "none", `of` is what is shown of a row by its index, `why`
//                                 says what is not shown, and `forget` lets go of pictures

import { ask, asText } from "../api.js";
import { h } from "../dom.js";
import * as csv from "./csv.js";
import * as npy from "./npy.js";
import * as parquet from "./parquet.js";
import * as zip from "./zip.js";

const TYPES = { npy: "application/x-npy", npz: "application/x-npz", parquet: "application/vnd.apache.parquet", csv: "text/csv", tsv: "text/csv", zip: "application/zip" };
const ROWS = ["pool", "inputs", "x", "X", "rows", "features"]; // arrays of an npz that rows are looked for in
const MOST_READ = 256 << 20; // bytes of a packed array that are gone through
const MOST_TABLE = 64 << 20; // bytes of a CSV file
const MOST_PICTURE = 16 << 20; // bytes of one image
const MOST_PICTURES = 128 << 20; // bytes of all that are unpacked
const MOST_TEXT = 1 << 20;
const MOST_NUMBERS = 8_000_000; // of the rows of an array
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
  const show = { npy: showNpy, npz: showNpz, parquet: showParquet, csv: showCsv, tsv: showCsv, zip: showZip }[kind];
  return {
    name: file.name,
    size: file.size,
    rows: () => rowsIn(file, kind),
    send: (path, fields, signal) => ask(path, { method: "POST", body: file, type: TYPES[kind], query: fields, signal }),
    async shown(ranking) {
      try {
        return await show(file, spec, ranking);
      } catch (error) {
        return { kind: "none", why: `The rows cannot be shown: ${error.message}.` };
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
    shown: (ranking) => shownFiles(ranking, spec, async (row) => sorted[row.index]),
  };
}

/** How many rows a file has, where its beginning or its list says so; else null. */
async function rowsIn(file, kind) {
  try {
    if (kind === "npy") return npy.headerOf(new Uint8Array(await file.slice(0, 1 << 17).arrayBuffer())).shape[0];
    if (kind === "zip") return (await zip.entriesOf(file)).size;
    if (kind === "parquet") return await parquet.countOf(file);
  } catch {
    return null; // the service says what is wrong with it
  }
  return null;
}

async function showNpy(file, spec, ranking) {
  return ofNumbers(file, spec, ranking);
}

async function showNpz(file, spec, ranking) {
  const entries = await zip.entriesOf(file);
  const names = [...entries.keys()].filter((name) => name.endsWith(".npy")).map((name) => name.slice(0, -4)).filter((name) => name !== "ids");
  const name = names.length === 1 ? names[0] : ROWS.find((one) => names.includes(one));
  return ofNumbers(await zip.contentOf(file, entries.get(`${name}.npy`)), spec, ranking);
}

async function showParquet(file, spec, ranking) {
  const { kind, names, rows } = await parquet.rowsOf(file, ranking.map((row) => row.index), spec);
  if (kind === "cells") return ofCells(names, new Map([...rows].map(([index, cells]) => [index, cells.map(shortened)])));
  if (kind === "numbers") return ofRows(spec, ranking, async () => rows);
  return shownFiles(ranking, spec, async (row, most) => {
    const content = rows.get(row.index);
    if (content.length > most) throw new Error("it is too large to be shown");
    return new Blob([content]);
  });
}

async function showCsv(file, spec, ranking) {
  if (file.size > MOST_TABLE) throw new Error(`the page reads CSV files of up to ${MOST_TABLE >> 20} MB`);
  const { names, rows } = csv.rowsOf(new Uint8Array(await file.arrayBuffer()), ranking.map((row) => row.index));
  if (spec.text) {
    const place = names.indexOf(spec.text.column);
    return { kind: "texts", of: new Map([...rows].map(([index, row]) => [index, shortened(row[place] ?? "")])) };
  }
  const wanted = spec.columns.map((column) => column.name);
  return ofCells(wanted, new Map([...rows].map(([index, row]) => [index, wanted.map((name) => row[names.indexOf(name)] ?? "")])));
}

async function showZip(file, spec, ranking) {
  const entries = await zip.entriesOf(file);
  let left = MOST_PICTURES;
  const one = async (row, most) => {
    const entry = entries.get(row.id);
    if (!entry) throw new Error("its file was not found");
    const bytes = await zip.bytesOf(await zip.contentOf(file, entry), Math.min(most, left));
    left -= bytes.length;
    return new Blob([bytes], { type: typeOf(row.id) });
  };
  return shownFiles(ranking, spec, one);
}

/** Pictures or the beginnings of texts; `blobOf(row, most)` gives the file of a row. */
async function shownFiles(ranking, spec, blobOf) {
  const of = new Map(), urls = [];
  for (const row of ranking) {
    try {
      const blob = await blobOf(row, spec.text ? MOST_TEXT : MOST_PICTURE);
      if (spec.text) of.set(row.index, shortened(await blob.slice(0, 8 * LETTERS).text()));
      else {
        const url = URL.createObjectURL(blob);
        urls.push(url);
        of.set(row.index, h("img", { src: url, alt: row.id, loading: "lazy" }));
      }
    } catch (error) {
      of.set(row.index, h("span", { class: "quiet" }, error.message));
    }
  }
  return { kind: spec.text ? "texts" : "pictures", of, forget: () => urls.forEach((url) => URL.revokeObjectURL(url)) };
}

/** Rows of numbers, as pictures where they are some, else as columns. */
async function ofNumbers(content, spec, ranking) {
  return ofRows(spec, ranking, async (indices) => (await npy.rowsOf(content, indices, MOST_READ)).rows);
}

/** The same of the rows that `read` gives, by their indices. */
async function ofRows(spec, ranking, read) {
  const size = spec.shape.reduce((a, b) => a * b, 1);
  const shown = ranking.slice(0, Math.floor(MOST_NUMBERS / size)).map((row) => row.index);
  if (!shown.length) throw new Error(`a row has ${size} numbers`);
  const rows = await read(shown);
  const why = shown.length < ranking.length ? `The first ${shown.length} rows are shown, as large as they are.` : null;
  const first = rows.values().next().value ?? [];
  if (first.length !== size) throw new Error(`a row has ${first.length} numbers in place of ${size}`);
  const planes = planesOf(spec);
  if (planes) return { kind: "pictures", of: new Map([...rows].map(([index, row]) => [index, drawn(row, planes, spec, index)])), why };
  const names = spec.columns.length && spec.columns.length === size ? spec.columns.map((column) => column.name) : Array.from({ length: size }, (_, i) => String(i));
  return ofCells(names, new Map([...rows].map(([index, row]) => [index, row.map((x) => String(Number(x.toPrecision(5))))])));
}

function ofCells(names, of) {
  const why = names.length > COLUMNS ? `The first ${COLUMNS} of ${names.length} columns are shown.` : null;
  return { kind: "columns", names: names.slice(0, COLUMNS), of: new Map([...of].map(([index, cells]) => [index, cells.slice(0, COLUMNS)])), why };
}

/** How the numbers of a row lie as a picture: {height, width, at(y, x, channel), channels}; null where they are none. */
function planesOf({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32" || shape.length < 2 || shape.length > 3) return null;
  const [channels, height, width] = shape.length === 2 ? [1, ...shape] : shape[2] <= 3 && shape[0] > 3 ? [shape[2], shape[0], shape[1]] : shape;
  if (![1, 3].includes(channels) || Math.min(height, width) < 2) return null;
  const isLast = shape.length === 3 && shape[2] <= 3 && shape[0] > 3;
  return { channels, height, width, at: (y, x, c) => (isLast ? (y * width + x) * channels + c : (c * height + y) * width + x) };
}

/** A row on a canvas: photographs as they are; of other grey numbers the large ones are ink. */
function drawn(row, { channels, height, width, at }, { image, minimum, maximum }, index) {
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

const shortened = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS)} …` : text);

function typeOf(name) {
  return { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", webp: "image/webp", bmp: "image/bmp" }[name.toLowerCase().split(".").pop()] ?? "";
}
