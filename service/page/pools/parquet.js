// Parquet files, read where they lie by hyparquet, which is loaded when there is one: of a file no more than the
// columns that rows are taken from, of the row groups that the wanted rows are in.

const MOST_UNPACKED = 256 << 20; // bytes of those columns in those groups
const CODECS = ["UNCOMPRESSED", "SNAPPY", "ZSTD"];
const ID = "id";
const NUMBERS = ["BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE"];
const ROWS = ["pool", "inputs", "x", "X", "rows", "features", "image"]; // looked for where there are several

/** How many rows a file has. */
export async function countOf(file) {
  const { parquetMetadataAsync } = await library();
  return Number((await parquetMetadataAsync(bufferOf(file))).num_rows);
}

/** The rows of those indices: {names, kind, rows: Map}. `kind` is "cells", "numbers" (a flat row), "files" or "texts". */
export async function rowsOf(file, indices, spec) {
  const { parquetMetadataAsync, parquetReadObjects, parquetSchema } = await library();
  const { decompress } = await import("../vendor/fzstd-0.1.1.js");
  const buffer = bufferOf(file);
  const metadata = await parquetMetadataAsync(buffer);
  const { kind, names } = wanted(parquetSchema(metadata).children, spec);
  const parts = [];
  let first = 0, unpacked = 0;
  for (const group of metadata.row_groups) {
    const end = first + Number(group.num_rows);
    const inside = indices.filter((index) => index >= first && index < end);
    if (inside.length) {
      parts.push(inside);
      for (const { meta_data: column } of group.columns.filter(({ meta_data }) => names.includes(meta_data.path_in_schema[0]))) {
        if (!CODECS.includes(column.codec)) throw new Error(`it is packed by ${column.codec.toLowerCase()}, and the page reads Parquet packed by Snappy or Zstandard, or not at all`);
        unpacked += Number(column.total_uncompressed_size);
      }
    }
    first = end;
  }
  if (unpacked > MOST_UNPACKED) throw new Error(`the page reads ${MOST_UNPACKED >> 20} MB of a Parquet file, and these rows lie among more`);
  const rows = new Map();
  for (const inside of parts) {
    const rowStart = Math.min(...inside);
    const read = await parquetReadObjects({ file: buffer, metadata, columns: names, rowStart, rowEnd: Math.max(...inside) + 1, compressors: { ZSTD: (packed, size) => decompress(packed, new Uint8Array(size)) }, utf8: false });
    for (const index of inside) rows.set(index, rowOf(names.map((name) => read[index - rowStart][name]), kind));
  }
  return { kind, names, rows };
}

/** The columns that the service takes rows from, and what they hold. */
function wanted(columns, spec) {
  if (spec.columns.length) return { kind: "cells", names: spec.columns.map((column) => column.name) };
  if (spec.text) return { kind: "texts", names: [spec.text.column] };
  const size = spec.shape.reduce((a, b) => a * b, 1);
  const of = (test) => columns.filter(({ element }) => element.name !== ID).filter(test).map(({ element }) => element.name);
  const isText = ({ element }) => element.logical_type?.type === "STRING" || element.converted_type === "UTF8";
  const files = spec.image ? of((column) => column.children.some(({ element }) => element.name === "bytes") || (column.element.type === "BYTE_ARRAY" && !isText(column))) : [];
  const lists = of((column) => column.element.logical_type?.type === "LIST" || column.element.converted_type === "LIST" || column.element.repetition_type === "REPEATED");
  for (const [kind, found] of [["files", files], ["numbers", lists]]) {
    const chosen = found.length === 1 ? found : ROWS.filter((name) => found.includes(name));
    if (chosen.length === 1) return { kind, names: chosen };
  }
  const numbers = of((column) => NUMBERS.includes(column.element.type) && !column.children.length);
  if (numbers.length === size) return { kind: "numbers", names: numbers };
  throw new Error("the page does not see which of its columns hold the rows");
}

function rowOf(values, kind) {
  if (kind === "cells") return values.map(cellOf);
  if (kind === "texts") return cellOf(values[0]);
  if (kind === "files") return values[0]?.bytes ?? values[0];
  return values.flat(Infinity).map(Number);
}

function cellOf(value) {
  if (value === null || value === undefined) return "–";
  if (value instanceof Date) return value.toISOString().replace("T00:00:00.000Z", "");
  if (value instanceof Uint8Array) return new TextDecoder().decode(value);
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(7)));
  return String(value);
}

const library = () => import("../vendor/hyparquet-1.31.5/index.js");

function bufferOf(file) {
  return { byteLength: file.size, slice: (start, end) => file.slice(start, end).arrayBuffer() };
}
