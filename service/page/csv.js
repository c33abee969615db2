// Read and write CSV.

/** Parse CSV to rows of cells. The delimiter is the most frequent of comma, semicolon and tab in the first line. */
export function parseCsv(content) {
  const first = content.split("\n", 1)[0];
  const delimiter = [",", ";", "\t"].reduce((best, each) => (first.split(each).length > first.split(best).length ? each : best));
  const rows = [[""]];
  let isQuoted = false;
  for (let i = 0; i < content.length; i++) {
    const letter = content[i], row = rows.at(-1);
    if (isQuoted && letter === '"' && content[i + 1] === '"') row[row.length - 1] += content[++i];
    else if (letter === '"' && (isQuoted || row.at(-1) === "")) isQuoted = !isQuoted;
    else if (isQuoted || !(letter === delimiter || letter === "\n" || letter === "\r")) row[row.length - 1] += letter;
    else if (letter === delimiter) row.push("");
    else if (letter === "\n") rows.push([""]);
  }
  return rows.filter((row) => row.length > 1 || row[0].trim() !== "").map((row) => row.map((cell) => cell.trim()));
}

/** Write rows of cells as CSV. */
export const writeCsv = (rows) => rows.map((row) => row.map((cell) => (/[",\n]/.test(String(cell ?? "")) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? ""))).join(",")).join("\n") + "\n";
