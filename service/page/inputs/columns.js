// A form for a row of columns: each has its usual value, its categories or range, and a box for missing values.
import { h, number } from "../dom.js";

const OTHER = "\u0000other"; // cannot be the name of a category

/** Create the input of a model with columns. */
export function columnsInput(spec, changed) {
  const columns = spec.columns.map((column) => columnField(column, changed));
  const hasNumbers = spec.columns.some(({ kind }) => kind === "numeric");
  return {
    element: h("div", { class: "columns" }, columns.map((column) => column.element)),
    rows: () => [Object.fromEntries(columns.map((column, i) => [spec.columns[i].name, column.value()]))],
    saved: () => columns.map((column) => column.value()),
    restore(saved) {
      columns.forEach((column, i) => column.restore(saved[i]));
    },
    example: (row) => spec.columns.map(({ name }) => row[name]),
    others: [["Unusual row", () => spec.columns.map((column, i) => unusualValue(column, hasNumbers) ?? columns[i].value())]],
  };
}

/** Return a value that no training row has; null leaves the column unchanged. */
function unusualValue({ kind, mean, std }, hasNumbers) {
  return kind === "numeric" ? Number((mean + 20 * std).toPrecision(3)) : kind === "categorical" && !hasNumbers ? "something else" : null;
}

let idCount = 0;

function columnField(column, changed) {
  const { control, value, restore, hint } = { numeric, categorical, time }[column.kind](column, changed);
  const missing = h("input", { type: "checkbox", id: `missing-${++idCount}` });
  control.id = `column-${idCount}`;
  const controls = h("span", {}, control);
  const empty = h("span", { hidden: true }, ": the field is empty");
  const updateDisabled = () => controls.querySelectorAll("input, select").forEach((each) => (each.disabled = missing.checked));
  controls.addEventListener("input", () => (empty.hidden = value() !== null));
  missing.addEventListener("change", () => {
    updateDisabled();
    changed();
  });
  const element = h(
    "div",
    { class: "column" },
    h("label", { for: control.id }, column.name),
    controls,
    column.missing === false ? null : h("label", { class: "quiet", for: missing.id }, missing, " missing", empty),
    hint && h("span", { class: "quiet hint", id: `hint-${idCount}` }, hint),
  );
  if (hint) control.setAttribute("aria-describedby", `hint-${idCount}`);
  return {
    element,
    value: () => (missing.checked ? null : value()),
    restore(saved) {
      missing.checked = saved === null;
      empty.hidden = true;
      updateDisabled();
      if (saved !== null) restore(saved);
    },
  };
}

function numeric(column, changed) {
  const usual = column.usual ?? column.mean;
  const control = h("input", { type: "number", step: "any", value: Number(usual.toPrecision(4)), oninput: changed });
  return {
    control,
    hint: column.mostly ? `usually ${number(column.mostly[0])} to ${number(column.mostly[1])}` : `mean ${number(column.mean)}`,
    value() {
      if (control.validity.badInput) throw new Error(`${column.name}: not a number, or too large. Use a point as the decimal sign.`);
      return control.value === "" ? null : Number(control.value);
    },
    restore: (saved) => (control.value = saved),
  };
}

function categorical(column, changed) {
  const usual = column.usual ?? column.categories[0];
  const options = column.categories.map((name) => h("option", { value: name, selected: name === usual }, name));
  const control = h("select", { onchange: onPick }, options, h("option", { value: OTHER }, "other …"));
  const otherName = h("input", { type: "text", "aria-label": `${column.name}: other category`, hidden: true, oninput: changed });
  const wrapper = h("span", {}, otherName);
  function showOther() {
    otherName.hidden = control.value !== OTHER;
    if (!control.parentElement.contains(otherName)) control.after(wrapper);
  }
  function onPick() {
    showOther();
    changed();
  }
  return {
    control,
    hint: null,
    value: () => (control.value === OTHER ? otherName.value : control.value),
    restore(saved) {
      const isKnown = column.categories.includes(saved);
      control.value = isKnown ? saved : OTHER;
      otherName.value = isKnown ? "" : saved;
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
    hint: `${column.mostly ? `usually ${day(column.mostly[0])} to ${day(column.mostly[1])}` : `mean ${day(column.mean)}`}${withDay ? ", in UTC" : ""}`,
    value: () => (control.value === "" ? null : control.value),
    restore: (saved) => (control.value = saved),
  };
}
