// Pools of rows: how they are sent, and previews of selected rows.
//
// A pool is an object with
//   name, size                    display name, and size in bytes
//   rows(options)                 number of rows, or null if unknown before ranking
//   send(path, fields, signal)    sends the pool to the service
//   preview(ranking, options)     previews of rows: {kind, contents, names, note, input, release}; kind is "pictures",
//                                 "columns", "texts" or "none", `contents` maps a row's index to its preview, `note`
//                                 explains what is missing, `input(index)` returns a whole row for its label, and
//                                 `release` revokes pictures
//   files                         the selected files, so that the page can store them; not for a file of the service
// where `options` have the model and version. The service parses files of rows and returns previews.

import { asText, request } from "./api.js";
import { drawRow, pixelLayout } from "./pictures.js";

const TYPES = { npy: "application/x-npy", npz: "application/x-npz", parquet: "application/vnd.apache.parquet", csv: "text/csv", tsv: "text/csv", zip: "application/zip" };
const MAX_COUNTED_BYTES = 8 << 20; // larger files are not uploaded just to count rows
const MAX_PICTURE_BYTES = 16 << 20;
const MAX_TEXT_BYTES = 1 << 20;
const MAX_LETTERS = 400; // of a text
export const ACCEPTED = [".npy", ".npz", ".parquet", ".csv", ".tsv", ".zip", ".txt", "image/png", "image/jpeg", "image/webp", "image/bmp"];

/** Create a pool from selected files; throws a readable Error if they are unsuitable. */
export async function poolFromFiles(files, spec) {
  const ending = (file) => file.name.toLowerCase().split(".").pop();
  const tables = files.filter((file) => TYPES[ending(file)]);
  if (tables.length && files.length > 1) throw new Error("Choose either one file of rows, or several images or texts.");
  if (tables.length) return rowFilePool(files[0], ending(files[0]), spec);
  if (!spec.image && !spec.text) throw new Error("This model needs a file of rows: .npy, .npz, .parquet or .csv.");
  return multiFilePool(files, spec);
}

/** Create a pool from a file in the service's folder of pools; it counts as large. */
export function poolFromService(name) {
  const withoutNulls = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined));
  return {
    name,
    size: Infinity,
    rows: async () => null,
    send: (path, fields, signal) => request(path, { method: "POST", json: { ...withoutNulls(fields), pool_file: name }, signal }),
    preview: async () => ({ kind: "none", note: "The service does not return rows of its own files, so only index and ID are shown." }),
  };
}

function rowFilePool(file, kind, spec) {
  const send = (path, fields, signal) => request(path, { method: "POST", body: file, type: TYPES[kind], query: fields, signal });
  const requestPreview = async ({ model, version }, rows) => (await send("acquire/preview", { model, version, rows })).json();
  return {
    files: [file],
    name: file.name,
    size: file.size,
    async rows(options) {
      try {
        return file.size > MAX_COUNTED_BYTES ? null : (await requestPreview(options, [])).rows;
      } catch {
        return null; // ranking will report the error
      }
    },
    send,
    async preview(ranking, options) {
      try {
        const rows = (await requestPreview(options, ranking.map((row) => row.index))).preview;
        const inputs = new Map(rows.map(({ index, row }) => [index, row]));
        return { ...previewRows(rows, ranking, spec), input: (index) => inputs.get(index) };
      } catch (error) {
        return { kind: "none", note: `Cannot show the rows: ${error.message}` };
      }
    },
  };
}

function multiFilePool(files, spec) {
  const sorted = [...files].sort((a, b) => (a.name < b.name ? -1 : 1));
  return {
    files: sorted,
    name: sorted.length === 1 ? sorted[0].name : `${sorted.length} files`,
    size: sorted.reduce((sum, file) => sum + file.size, 0),
    rows: async () => sorted.length,
    send(path, fields, signal) {
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) if (value !== null && value !== undefined) form.append(name, asText(value));
      form.append("ids", JSON.stringify(sorted.map((file) => file.name)));
      for (const file of sorted) form.append("pool", file);
      return request(path, { method: "POST", body: form, signal });
    },
    preview: async (ranking) => ({ ...(await previewFiles(ranking, spec, (row) => sorted[row.index])), input: (index) => (spec.text ? sorted[index].text() : base64(sorted[index])) }),
  };
}

/** Create previews of rows that the service has parsed. */
function previewRows(rows, ranking, spec) {
  const note = rows.length < ranking.length ? `Only the first ${rows.length} rows are shown, because they are large.` : null;
  const byIndex = (content) => new Map(rows.map(({ index, row, id }) => [index, content(row, id, index)]));
  const first = rows[0]?.row;
  if (spec.text && typeof first === "string") return { kind: "texts", contents: byIndex(shorten), note };
  if (spec.columns.length && !Array.isArray(first)) {
    const names = spec.columns.map((column) => column.name);
    return { kind: "columns", names, contents: byIndex((row) => names.map((name) => (row[name] === null ? "–" : shorten(String(row[name]))))), note };
  }
  if (typeof first === "string") {
    const urls = rows.map(({ row, id }) => URL.createObjectURL(new Blob([Uint8Array.from(atob(row), (letter) => letter.charCodeAt(0))], { type: mediaType(id) })));
    const pictures = rows.map(({ index, id }, i) => [index, picture(urls[i], id)]);
    return { kind: "pictures", contents: new Map(pictures), note, release: () => urls.forEach((url) => URL.revokeObjectURL(url)) };
  }
  const layout = pixelLayout(spec);
  if (layout) return { kind: "pictures", contents: byIndex((row, id, index) => drawRow(row, layout, spec, `Row ${index}`)), note };
  const names = spec.columns.length === first?.length ? spec.columns.map((column) => column.name) : (first ?? []).map((_, i) => String(i));
  return { kind: "columns", names, contents: byIndex((row) => row.map((x) => (x === null ? "–" : String(Number(x.toPrecision(5)))))), note };
}

/** Create previews of image or text files; `getFile(row)` returns the file of a row. */
async function previewFiles(ranking, spec, getFile) {
  const contents = new Map(), urls = [];
  for (const row of ranking) {
    const file = getFile(row);
    if (file.size > (spec.text ? MAX_TEXT_BYTES : MAX_PICTURE_BYTES)) contents.set(row.index, document.createTextNode("too large to show"));
    else if (spec.text) contents.set(row.index, shorten(await file.slice(0, 8 * MAX_LETTERS).text()));
    else {
      urls.push(URL.createObjectURL(file));
      contents.set(row.index, picture(urls.at(-1), row.id));
    }
  }
  return { kind: spec.text ? "texts" : "pictures", contents, release: () => urls.forEach((url) => URL.revokeObjectURL(url)) };
}

const picture = (src, alt) => Object.assign(new Image(), { src, alt });

async function base64(file) {
  const letters = Array.from(new Uint8Array(await file.arrayBuffer()), (byte) => String.fromCharCode(byte));
  return btoa(letters.join(""));
}

const shorten = (text) => (text.length > MAX_LETTERS ? `${text.slice(0, MAX_LETTERS)} …` : text);

function mediaType(name) {
  return { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", webp: "image/webp", bmp: "image/bmp" }[name.toLowerCase().split(".").pop()] ?? "";
}
