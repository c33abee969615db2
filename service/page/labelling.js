// Labels for the rows that were chosen: one row at a time, by buttons, keys or a number field; each is sent at once.

import { askJson, Refused } from "./api.js";
import { fill, h, notice, number } from "./dom.js";

const MOST_BUTTONS = 30; // of classes; of more there is a field to write into

/** What people label `rows` with, or null where the rows cannot be seen; `labelled()` is called after each label. */
export function labelling({ model, output, rows, shown, pool, labelled }) {
  const named = rows.some((row) => row.id !== String(row.index)); // else these are no ids, but places in this pool
  const queue = rows.filter((row) => shown.of?.has(row.index));
  if (!queue.length || !shown.input) return null;
  const given = new Map(); // labels by row, in the order in which they came
  const skipped = new Set();
  let current = null, busy = false;

  const head = h("p", { class: "labelling-head", role: "status" });
  const bar = h("progress", { max: queue.length, value: 0, "aria-label": "Rows that are labelled" });
  const place = h("div", { class: "labelling-row" });
  const trouble = h("div");
  const answers = answersOf(output, give);
  const undo = h("button", { type: "button", onclick: takeBack }, "Undo ", h("kbd", {}, "←"));
  const skip = h("button", { type: "button", onclick: pass }, "Skip ", h("kbd", {}, "→"));
  const again = h("button", { type: "button", onclick: () => { skipped.clear(); next(); } }, "See the skipped rows again");
  const element = h("section", { class: "labelling", "aria-label": "Label a row", tabindex: -1, onkeydown: typed }, head, bar, place, answers.element, trouble, h("p", { class: "actions" }, undo, skip, again));
  next();
  return { element, focus: () => element.focus({ preventScroll: true }) };

  function next(row = queue.find((one) => !given.has(one) && !skipped.has(one)) ?? null) {
    current = row;
    const left = queue.length - given.size;
    bar.value = given.size;
    fill(head, current ? h("strong", {}, `Row ${queue.indexOf(current) + 1} of ${number(queue.length)}`) : h("strong", {}, left ? "That was the last one" : "All rows are labelled"),
      h("span", { class: "quiet" }, `${number(given.size)} labelled${skipped.size ? `, ${number(skipped.size)} skipped` : ""}`));
    fill(place, current && largeOf(shown, current), current && named ? h("p", { class: "quiet" }, current.id) : null);
    answers.element.hidden = !current;
    skip.hidden = !current;
    undo.disabled = given.size === 0;
    again.hidden = current !== null || skipped.size === 0;
    answers.clear(given.get(current));
  }

  async function give(value) {
    const row = current;
    await send(async () => {
      const input = pool.kept ? {} : { input: await shown.input(row.index) };
      const entry = { id: idOf(row, input.input), [output.classes ? "label" : "target"]: value, ...input };
      await askJson("labels", { method: "POST", json: { model, labels: [entry], replace: true } });
      given.set(row, value);
      row.sent = entry.id;
      next();
    });
  }

  async function takeBack() {
    const [row] = [...given.keys()].slice(-1);
    if (!row) return;
    await send(async () => {
      await askJson("labels/delete", { method: "POST", json: { model, ids: [row.sent] } });
      given.delete(row);
      next(row);
    });
  }

  /** One thing at a time, so that labels come in the order in which they are given. */
  async function send(work) {
    if (busy) return;
    busy = true;
    try {
      await work();
      fill(trouble);
      labelled();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fill(trouble, notice(error.message));
    } finally {
      busy = false;
    }
  }

  function pass() {
    skipped.add(current);
    next();
  }

  function typed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (event.key === "ArrowLeft") takeBack();
    else if (event.key === "ArrowRight" && current) pass();
    else if (current && answers.byKey.has(event.key.toLowerCase())) give(answers.byKey.get(event.key.toLowerCase()));
    else return;
    event.preventDefault();
  }

  function idOf(row, input) {
    return named || pool.kept ? row.id : `row-${hash(JSON.stringify(input))}`;
  }
}

/** What one answers with: a button for each class, with its key, or a field. */
function answersOf({ classes, target }, give) {
  if (classes && classes.length <= MOST_BUTTONS) {
    const isKey = classes.every((name) => [...name].length === 1); // digits and letters are their own keys
    const keys = classes.map((name, i) => (isKey ? name.toLowerCase() : i < 9 ? String(i + 1) : null));
    const buttons = classes.map((name, i) => h("button", { type: "button", onclick: () => give(name) }, keys[i] && !isKey ? h("kbd", {}, keys[i]) : null, h("span", {}, name)));
    return {
      element: h("div", { class: "classes", role: "group", "aria-label": "Classes" }, buttons),
      byKey: new Map(keys.map((key, i) => [key, classes[i]]).filter(([key]) => key)),
      clear: (value) => buttons.forEach((button, i) => button.classList.toggle("was", classes[i] === value)),
    };
  }
  const field = h("input", classes ? { type: "text", list: "label-classes", spellcheck: "false" } : { type: "number", step: "any" });
  field.id = "label-value";
  const form = h("form", { class: "actions", novalidate: true, onsubmit: (event) => { event.preventDefault(); if (field.value !== "") give(classes ? field.value : Number(field.value)); } },
    h("label", { for: field.id }, classes ? "Class" : target ?? "Target"), field, classes ? h("datalist", { id: "label-classes" }, classes.map((name) => h("option", { value: name }))) : null, h("button", { type: "submit", class: "main" }, "Label"));
  return { element: form, byKey: new Map(), clear: (value) => (field.value = value ?? "") };
}

/** A row as large as one needs it to see what it is. */
function largeOf(shown, row) {
  const found = shown.of.get(row.index);
  if (shown.kind === "texts") return h("blockquote", {}, found);
  if (shown.kind === "columns") return h("dl", { class: "facts" }, shown.names.map((name, i) => [h("dt", {}, name), h("dd", {}, found[i])]));
  const copy = found.cloneNode();
  if (found instanceof HTMLCanvasElement) copy.getContext("2d").drawImage(found, 0, 0);
  return copy;
}

/** A name of 53 bits for a row that has none: the same row has the same (cyrb53). */
function hash(text) {
  let a = 0xdeadbeef, b = 0x41c6ce57;
  for (let i = 0; i < text.length; i++) {
    const letter = text.charCodeAt(i);
    a = Math.imul(a ^ letter, 2654435761);
    b = Math.imul(b ^ letter, 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return (4294967296 * (2097151 & b) + (a >>> 0)).toString(36);
}
