// Formats of numbers, shares, times and sizes.

/** Format a number with about three digits: 1,234 or 0.0012, with an exponent only below 0.0001. */
export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "string") return x; // a report file may hold "NaN"
  if (x !== 0 && Math.abs(x) < 1e-4) return x.toExponential(1);
  return x.toLocaleString("en", Math.abs(x) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

/** Format a share as a percentage with up to one decimal, never rounded to 0 or 100: 95 %, 99.4 %, > 99.9 %. */
export function percent(x) {
  if (x === null || x === undefined) return "–";
  const value = 100 * x;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value > 99.9) return "> 99.9 %";
  return `${Number(value.toFixed(value < 10 || value > 90 ? 1 : 0))} %`;
}

/** Format a duration in seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(1000 * seconds, 2)} ms`;
  if (seconds < 90) return `${number(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 2)} h`;
}

/** Format a size in bytes. */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const power = size < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${number(size / 1000 ** power)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

/** Format a time (ISO 8601 or seconds since 1970) in the reader's time zone: 2026-11-22 16:51. */
export function moment(time) {
  if (time === null || time === undefined) return "–";
  const date = new Date(typeof time === "number" ? 1000 * time : time);
  if (Number.isNaN(date.getTime())) return String(time);
  const two = (x) => String(x).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}
