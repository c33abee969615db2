// CSV files: the rows of some indices, as the service counts them (empty lines are none).

const DELIMITERS = [",", ";", "\t", "|"];

/** The first line's names and the rows of those indices: {names, rows: Map}. */
export function rowsOf(bytes, indices) {
  const text = decoded(bytes);
  const delimiter = delimiterOf(text.slice(0, 1 << 16));
  const wanted = new Set(indices);
  const last = Math.max(...indices);
  const rows = new Map();
  let names = null, index = -1;
  for (const row of parsed(text, delimiter)) {
    if (names === null) names = row;
    else if (wanted.has(++index)) rows.set(index, row);
    if (index >= last) break;
  }
  return { names: names ?? [], rows };
}

/** UTF-8, UTF-16 where it begins so, else cp1252: as the service reads it. */
function decoded(bytes) {
  const mark = (bytes[0] << 8) | bytes[1];
  if (mark === 0xfffe || mark === 0xfeff) return new TextDecoder(mark === 0xfffe ? "utf-16le" : "utf-16be").decode(bytes);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/** The delimiter by which the lines have as many cells each, most of all; else a comma. */
function delimiterOf(sample) {
  let best = ",", cells = 1;
  for (const delimiter of DELIMITERS) {
    const widths = [...parsed(sample, delimiter)].slice(0, -1).map((row) => row.length);
    if (widths.length && widths[0] > cells && widths.every((width) => width === widths[0])) [best, cells] = [delimiter, widths[0]];
  }
  return best;
}

/** Rows of cells; a quoted cell may hold delimiters and line ends. */
export function* parsed(text, delimiter) {
  let row = [], cell = "", isQuoted = false, wasQuoted = false;
  for (let i = 0; i < text.length; i++) {
    const letter = text[i];
    if (isQuoted) {
      if (letter !== '"') cell += letter;
      else if (text[i + 1] === '"') cell += text[i++];
      else isQuoted = false;
    } else if (letter === '"' && cell === "") isQuoted = wasQuoted = true;
    else if (letter === delimiter) {
      row.push(cell);
      cell = "";
    } else if (letter === "\n" || letter === "\r") {
      if (letter === "\r" && text[i + 1] === "\n") i++;
      if (row.length || cell !== "" || wasQuoted) yield [...row, cell];
      [row, cell, wasQuoted] = [[], "", false];
    } else cell += letter;
  }
  if (row.length || cell !== "") yield [...row, cell];
}
