// A form for a row of columns. The value has each column's text as typed, or null if it is missing.

import { html, Name, useEffect, useRef, useState } from "../components.js";
import { number } from "../format.js";
import { parseCsv } from "../csv.js";

const MANY = 12; // columns; more get a search
const MAX_VISIBLE = 24; // columns shown at first
const OTHER = "\u0000other"; // cannot be the name of a category
const PLAIN = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const DECIMAL_MARK = new Intl.NumberFormat().formatToParts(1.5).find(({ type }) => type === "decimal").value; // the reader's

/** Parse a number with a decimal point, or with a comma if the reader's language uses it; NaN otherwise. */
function toNumber(text) {
  const plain = DECIMAL_MARK === "," ? text.trim().replace(",", ".") : text.trim();
  return PLAIN.test(plain) && Number.isFinite(Number(plain)) ? Number(plain) : NaN;
}

/** Parse the text of a column; throws a readable Error. */
export function parseCell({ name, kind, categories, missing }, text) {
  if (text === null || text === "") return null;
  if (kind !== "numeric") return text;
  const value = toNumber(text);
  if (!Number.isNaN(value)) return value;
  throw new Error(text.includes(",") ? `${name}: “${text}” has a comma. Write a decimal point and no thousands separators, for example 12.5 or 1200.` : `${name}: “${text}” is not a number.`);
}

/** Return the range of a column's slider: the usual values and as much on either side. */
export function sliderRange({ mean, std, mostly }) {
  const [low, high] = mostly ?? [mean - 2 * std, mean + 2 * std];
  const width = high - low || std || 1;
  return { min: low >= 0 ? Math.max(0, Number((low - width).toPrecision(3))) : Number((low - width).toPrecision(3)), max: Number((high + width).toPrecision(3)), step: 10 ** Math.floor(Math.log10(width / 20)) };
}

const day = (seconds, hasTime) => new Date(1000 * seconds).toISOString().slice(0, hasTime ? 16 : 10);

function Control({ spec, value, onchange, influence, onfocus }) {
  const [search, setSearch] = useState("");
  const [isAll, setIsAll] = useState(false);
  const change = (name, text, isTyped) => onchange({ ...value, [name]: text }, isTyped);
  const paste = (event) => {
    const cells = parseCsv(event.clipboardData.getData("text"));
    const row = cells.length === 2 ? Object.fromEntries(cells[0].map((name, i) => [name, cells[1][i]])) : cells.length === 1 && cells[0].length === spec.columns.length ? Object.fromEntries(spec.columns.map(({ name }, i) => [name, cells[0][i]])) : null;
    if (!row || spec.columns.length === 1 || !spec.columns.every(({ name }) => name in row)) return;
    event.preventDefault();
    onchange(Object.fromEntries(spec.columns.map(({ name }) => [name, row[name] === "" ? null : row[name]])));
  };
  const columns = spec.columns.filter(({ name }) => name.toLowerCase().includes(search.toLowerCase()));
  if (influence) columns.sort((a, b) => (influence.get(b.name) ?? 0) - (influence.get(a.name) ?? 0));
  const visible = isAll ? columns : columns.slice(0, MAX_VISIBLE);
  return html`
    ${spec.columns.length > MANY && html`<p class="search"><label for="column-search">Search columns</label> <input type="search" id="column-search" value=${search} oninput=${(event) => setSearch(event.target.value)} /> <span class="quiet" role="status">${columns.length} of ${spec.columns.length}${influence ? ", most influential first" : ""}</span></p>`}
    <div class="columns" onpaste=${paste}>${visible.map((column) => html`<${Column} key=${column.name} column=${column} text=${value[column.name]} change=${change} onfocus=${() => onfocus(column.name)} />`)}</div>
    ${visible.length < columns.length && html`<p><button type="button" onclick=${() => setIsAll(true)}>Show ${columns.length - visible.length} more columns</button></p>`}
    <p class="quiet">You can paste a CSV row into any column.</p>`;
}

function Column({ column, text, change, onfocus }) {
  const { name, kind } = column;
  const id = `column-${name}`;
  const isMissing = text === null;
  let error = null;
  try {
    parseCell(column, text);
  } catch (problem) {
    error = problem.message;
  }
  const hasTime = column.cycles?.includes("day");
  const write = kind === "time" ? (x) => day(x, hasTime) : number;
  const hint = kind === "categorical" ? null : `${column.mostly ? `usually ${write(column.mostly[0])} to ${write(column.mostly[1])}` : `mean ${write(column.mean)}`}${hasTime ? ", in UTC" : ""}`;
  const attributes = { id, disabled: isMissing, onfocus, "aria-describedby": hint && `${id}-hint`, "aria-invalid": error !== null };
  const control =
    kind === "numeric" ? html`<input type="text" inputmode="decimal" autocomplete="off" value=${text ?? ""} oninput=${(event) => change(name, event.target.value, true)} ...${attributes} />
      <input type="range" class="what-if" aria-label=${`${name}: slider`} disabled=${isMissing} ...${sliderRange(column)} value=${Number.isNaN(toNumber(text ?? "")) ? column.mean : toNumber(text)} onfocus=${onfocus} oninput=${(event) => change(name, event.target.value, false)} />`
    : kind === "categorical" ? html`<${Category} column=${column} text=${text} change=${change} attributes=${attributes} />`
    : html`<input type=${hasTime ? "datetime-local" : "date"} value=${text ?? ""} oninput=${(event) => change(name, event.target.value, true)} ...${attributes} />`;
  return html`<div class="column">
    <label for=${id}><${Name}>${name}<//></label>
    <span>${control}</span>
    ${column.missing !== false && html`<label class="quiet"><input type="checkbox" checked=${isMissing} onchange=${(event) => change(name, event.target.checked ? null : usualText(column), false)} /> missing${text === "" ? ": the field is empty" : ""}</label>`}
    ${hint && html`<span class="quiet hint" id=${`${id}-hint`}>${hint}</span>`}
    ${error && html`<span class="error" role="alert">${error}</span>`}
  </div>`;
}

function Category({ column, text, change, attributes }) {
  const isOther = text !== null && !column.categories.includes(text);
  const field = useRef(null);
  const wasOther = useRef(isOther);
  useEffect(() => {
    if (isOther && !wasOther.current) field.current.focus();
    wasOther.current = isOther;
  }, [isOther]);
  return html`<select value=${isOther ? OTHER : (text ?? "")} onchange=${(event) => change(column.name, event.target.value === OTHER ? "" : event.target.value, false)} ...${attributes}>
      ${column.categories.map((name) => html`<option value=${name}>${name}</option>`)}<option value=${OTHER}>other …</option>
    </select>
    ${isOther && html`<input ref=${field} type="text" aria-label=${`${column.name}: other category`} value=${text} oninput=${(event) => change(column.name, event.target.value, true)} />`}`;
}

function usualText({ kind, usual, mean, categories, cycles }) {
  if (kind === "categorical") return usual ?? categories[0];
  return kind === "time" ? day(usual ?? mean, cycles.includes("day")) : String(Number((usual ?? mean).toPrecision(4)));
}

/** Write a cell of an example row as the form shows it. */
function cellText({ kind, cycles }, cell) {
  if (cell === null || cell === undefined) return null;
  return kind === "time" ? String(cell).slice(0, cycles.includes("day") ? 16 : 10) : String(cell);
}

export const columns = {
  name: "Columns",
  isTyped: true,
  Control,
  empty: (spec) => Object.fromEntries(spec.columns.map((column) => [column.name, usualText(column)])),
  rows: (value, spec) => [Object.fromEntries(spec.columns.map((column) => [column.name, parseCell(column, value[column.name] ?? null)]))],
  fromRow: (row, spec) => Object.fromEntries(spec.columns.map((column) => [column.name, cellText(column, row[column.name])])),
  odd: [["Unusual row", (spec, value) => {
    const hasNumbers = spec.columns.some(({ kind }) => kind === "numeric");
    return Object.fromEntries(spec.columns.map(({ name, kind, mean, std }) => [name, kind === "numeric" ? String(Number((mean + 20 * std).toPrecision(3))) : kind === "categorical" && !hasNumbers ? "something else" : value[name]]));
  }]],
};
