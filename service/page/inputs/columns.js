// A row of columns, as a form: each with its usual value, its categories or range, and "missing".

import { h, number } from "../dom.js";

const OTHER = "\u0000other"; // no category is called so

/** The input of a model of columns. */
export function columnsInput(spec, changed) {
  const columns = spec.columns.map((column) => oneColumn(column, changed));
  const hasNumbers = spec.columns.some(({ kind }) => kind === "numeric");
  return {
    element: h("div", { class: "columns" }, columns.map((column) => column.element)),
    rows: () => [Object.fromEntries(columns.map((column, i) => [spec.columns[i].name, column.value()]))],
    saved: () => columns.map((column) => column.value()),
    restore(saved) {
      columns.forEach((column, i) => column.restore(saved[i]));
    },
    example: (row) => spec.columns.map(({ name }) => row[name]),
    others: [["Something strange", () => spec.columns.map((column, i) => strange(column, hasNumbers) ?? columns[i].value())]],
  };
}

/** A value that no training row has; null of a column that is left as it is. */
function strange({ kind, mean, std }, hasNumbers) {
  return kind === "numeric" ? Number((mean + 20 * std).toPrecision(3)) : kind === "categorical" && !hasNumbers ? "something else" : null;
}

let made = 0;

function oneColumn(column, changed) {
  const { control, value, restore, hint } = { numeric, categorical, time }[column.kind](column, changed);
  const missing = h("input", { type: "checkbox", id: `missing-${++made}` });
  control.id = `column-${made}`;
  const known = h("span", {}, control);
  const empty = h("span", { hidden: true }, ": nothing is written");
  known.addEventListener("input", () => (empty.hidden = value() !== null));
  missing.addEventListener("change", () => {
    known.querySelectorAll("input, select").forEach((each) => (each.disabled = missing.checked));
    changed();
  });
  const element = h(
    "div",
    { class: "column" },
    h("label", { for: control.id }, column.name),
    known,
    column.missing === false ? null : h("label", { class: "quiet", for: missing.id }, missing, " missing", empty),
    hint && h("span", { class: "quiet hint", id: `hint-${made}` }, hint),
  );
  if (hint) control.setAttribute("aria-describedby", `hint-${made}`);
  return {
    element,
    value: () => (missing.checked ? null : value()),
    restore(saved) {
      missing.checked = saved === null;
      empty.hidden = true;
      known.querySelectorAll("input, select").forEach((each) => (each.disabled = missing.checked));
      if (saved !== null) restore(saved);
    },
  };
}

function numeric(column, changed) {
  const usual = column.usual ?? column.mean;
  const control = h("input", { type: "number", step: "any", value: Number(usual.toPrecision(4)), oninput: changed });
  return {
    control,
    hint: column.mostly ? `mostly ${number(column.mostly[0])} to ${number(column.mostly[1])}` : `on average ${number(column.mean)}`,
    value() {
      if (control.validity.badInput) throw new Error(`${column.name}: this is no number, or too large a one. The decimal sign is a point.`);
      return control.value === "" ? null : Number(control.value);
    },
    restore: (saved) => (control.value = saved),
  };
}

function categorical(column, changed) {
  const usual = column.usual ?? column.categories[0];
  const options = column.categories.map((name) => h("option", { value: name, selected: name === usual }, name));
  const control = h("select", { onchange: onPick }, options, h("option", { value: OTHER }, "another …"));
  const another = h("input", { type: "text", "aria-label": `${column.name}: another category`, hidden: true, oninput: changed });
  const both = h("span", {}, another);
  function showOther() {
    another.hidden = control.value !== OTHER;
    if (!control.parentElement.contains(another)) control.after(both);
  }
  function onPick() {
    showOther();
    changed();
  }
  return {
    control,
    hint: null,
    value: () => (control.value === OTHER ? another.value : control.value),
    restore(saved) {
      const isKnown = column.categories.includes(saved);
      control.value = isKnown ? saved : OTHER;
      another.value = isKnown ? "" : saved;
      showOther();
    },
  };
}

function time(column, changed) {
  const withDay = column.cycles.includes("day");
  const usual = new Date(1000 * (column.usual ?? column.mean)).toISOString().slice(0, withDay ? 16 : 10);
  const control = h("input", { type: withDay ? "datetime-local" : "date", value: usual, oninput: changed });
  const day = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 10);
  return {
    control,
    hint: `${column.mostly ? `mostly ${day(column.mostly[0])} to ${day(column.mostly[1])}` : `on average ${day(column.mean)}`}${withDay ? ", in UTC" : ""}`,
    value: () => (control.value === "" ? null : control.value),
    restore: (saved) => (control.value = saved),
  };
}
