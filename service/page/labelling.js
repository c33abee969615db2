// The step Label: the selected rows one at a time, with buttons, keys or a field.

import { requestJson } from "./api.js";
import { address, Button, Card, download, Element, html, Name, Notice, Table, useEffect, useFetch, useRef, useState } from "./components.js";
import { moment, number } from "./format.js";
import * as plots from "./plots.js";

const MAX_BUTTONS = 30; // with more classes there is a text field
const MAX_WHY_DRAWS = 200;
const MAX_VOTES = 5; // classes with their votes
const MANY_COLUMNS = 12; // more are shown side by side

/** Show the rows of a session and store their labels. */
export function Labelling({ session }) {
  const { model, rows, labels, unsure, unsent, current, manifest, preview, rejections, error } = session;
  const { output } = manifest;
  const place = useRef(null);
  const [isWhyOpen, setIsWhyOpen] = useState(false);
  const keys = classKeys(output.classes);
  useEffect(() => {
    if (keys.length) place.current?.focus({ preventScroll: true });
  }, []);
  if (!rows.length) return html`<${Card} title="Label"><p>Select rows of a pool first.</p><p class="actions"><a href=${address("label", model, "pool")}>Choose a pool</a></p><//>`;
  const onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.matches("input, select, textarea, summary")) return;
    const key = event.key.toLowerCase();
    if (event.key === "ArrowLeft") session.undo();
    else if (event.key === "ArrowRight" && session.current) session.markUnsure();
    else if (session.current && keys.includes(key)) session.label(output.classes[keys.indexOf(key)]);
    else return;
    event.preventDefault();
  };
  return html`
    <section class="card labelling" aria-label="Label a row" tabindex="-1" ref=${place} onkeydown=${onkeydown}>
      <p class="labelling-head" role="status">
        <strong>${current ? `Row ${rows.indexOf(current) + 1} of ${number(rows.length)}` : unsure.size ? "Only unsure rows are left" : "All rows are labelled"}</strong>
        <span class="quiet">${number(labels.size)} labelled${unsure.size ? `, ${number(unsure.size)} unsure` : ""}${unsent.size ? `, saving ${number(unsent.size)} …` : ""}</span>
      </p>
      <progress max=${rows.length} value=${labels.size} aria-label="Labelled rows" />
      ${error && html`<${Notice}>${number(unsent.size)} ${unsent.size === 1 ? "label is" : "labels are"} not stored yet: ${error} <${Button} onclick=${() => session.flush()}>Try again<//><//>`}
      ${rejections.map((text) => html`<${Notice}>${text}<//>`)}
      ${preview.note && html`<${Notice} kind="told">${preview.note}<//>`}
      ${current ? html`
        <div class="labelling-row"><${Row} key=${current.index} row=${current} preview=${preview} />${session.hasIds && html`<p class="quiet">${current.id}</p>`}</div>
        ${output.classes && output.classes.length <= MAX_BUTTONS
          ? html`<div class="classes" role="group" aria-label="Classes">${output.classes.map((name, i) => html`
              <button type="button" class=${labels.get(current.index) === name ? "was" : null} onclick=${() => session.label(name)}>${keys[i] && keys[i] !== name.toLowerCase() && html`<kbd>${keys[i]}</kbd>`}<span>${name}</span></button>`)}</div>`
          : html`<${ValueField} key=${current.index} session=${session} />`}
        <${Comment} key=${`comment-${current.index}`} session=${session} row=${current} onenter=${() => place.current.focus()} />` : null}
      <p class="actions">
        <button type="button" disabled=${!labels.size} onclick=${() => session.undo()}>Undo <kbd>←</kbd></button>
        ${current && html`<button type="button" onclick=${() => session.markUnsure()}>Unsure <kbd>→</kbd></button>`}
        ${!current && unsure.size > 0 && html`<button type="button" onclick=${() => session.goTo(rows.find(({ index }) => unsure.has(index)))}>Show unsure rows</button>`}
        ${labels.size > 0 && html`<a class=${current ? null : "button main"} href=${address("label", model, "fit")}>${current ? "Go on to the fit" : "Next: fit a candidate"}</a>`}
      </p>
      ${current && preview.input && html`<details open=${isWhyOpen} ontoggle=${(event) => setIsWhyOpen(event.target.open)}><summary>Why this row?</summary>${isWhyOpen && html`<${Why} key=${current.index} session=${session} row=${current} />`}</details>`}
    </section>
    <${Rows} session=${session} />
    <${Labels} model=${model} revision=${labels.size - unsent.size} />`;
}

/** Return the key of each class; digits and letters are their own keys. */
function classKeys(classes) {
  if (!classes || classes.length > MAX_BUTTONS) return [];
  const areKeys = classes.every((name) => [...name].length === 1);
  return classes.map((name, i) => (areKeys ? name.toLowerCase() : i < 9 ? String(i + 1) : null));
}

/** Show a field for a class or a target. */
function ValueField({ session }) {
  const { classes, target } = session.manifest.output;
  const field = useRef(null);
  useEffect(() => field.current.focus({ preventScroll: true }), []);
  const submit = (event) => {
    event.preventDefault();
    const { value } = event.target.elements.label;
    if (value !== "") session.label(classes ? value : Number(value));
  };
  const value = session.labels.get(session.current.index) ?? "";
  return html`<form class="actions" novalidate onsubmit=${submit}>
    <label for="label-value">${classes ? "Class" : target ?? "Target"}</label>
    <input id="label-value" name="label" type=${classes ? "text" : "number"} step="any" list=${classes && "label-classes"} spellcheck="false" autocomplete="off" defaultValue=${value} ref=${field} />
    ${classes && html`<datalist id="label-classes">${classes.map((name) => html`<option value=${name} />`)}</datalist>`}
    <button type="submit" class="main">Label</button>
  </form>`;
}

/** Show a field for a comment, which is stored with the label. */
function Comment({ session, row, onenter }) {
  const onkeydown = (event) => {
    if (event.key === "Enter") onenter();
  };
  return html`<p class="comment"><label for="comment">Comment</label> <input id="comment" type="text" maxlength="1000" placeholder="optional" autocomplete="off" defaultValue=${session.comments.get(row.index) ?? ""} onkeydown=${onkeydown} onchange=${(event) => session.comment(row, event.target.value)} /></p>`;
}

/** Show a row large enough to label it, with all its columns. */
function Row({ row, preview: { kind, contents, names } }) {
  const content = contents?.get(row.index);
  if (content === undefined) return html`<p class="quiet">No preview.</p>`;
  if (kind === "texts") return html`<blockquote>${content}</blockquote>`;
  if (kind === "columns") return html`<div class="scroll" tabindex="0" role="region" aria-label="Columns of the row"><dl class=${names.length > MANY_COLUMNS ? "facts many" : "facts"}>${names.map((name, i) => html`<dt><${Name}>${name}<//></dt><dd>${content[i]}</dd>`)}</dl></div>`;
  return html`<${Element} element=${content} />`;
}

/** Show how the draws of the ranking disagree about a row. */
function Why({ session, row }) {
  const { classes, target } = session.manifest.output;
  const { data, error } = useFetch(async (signal) => {
    const { model, version, num_samples, seed } = session.answer;
    const json = { model, version, seed, num_samples: Math.min(num_samples, MAX_WHY_DRAWS), return_samples: true, inputs: [await session.preview.input(row.index)] };
    const { predictions, coverage } = await requestJson("predict", { method: "POST", json, signal });
    return { row: predictions[0], coverage };
  }, []);
  if (error) return html`<${Notice}>${error.message}<//>`;
  if (!data) return html`<p class="quiet">Loading …</p>`;
  const sentence = row.control ? "Selected at random, to measure accuracy. " : "";
  if (!classes) return html`<p>${sentence}The draws predict from ${number(Math.min(...data.row.samples.map(({ mean }) => mean)))} to ${number(Math.max(...data.row.samples.map(({ mean }) => mean)))}.</p>${plots.target(target ?? "Target", data.row, data.coverage)}`;
  const votes = new Map();
  for (const draw of data.row.samples) {
    const name = classes[draw.indexOf(Math.max(...draw))];
    votes.set(name, (votes.get(name) ?? 0) + 1);
  }
  const sorted = [...votes].sort((a, b) => b[1] - a[1]);
  const hidden = sorted.length - MAX_VOTES;
  return html`<p>${sentence}Votes of ${number(data.row.samples.length)} draws: ${sorted.slice(0, MAX_VOTES).map(([name, count]) => `${name} ${number(count)}`).join(", ")}${hidden > 0 ? ` and ${number(hidden)} other classes` : ""}.</p>${plots.probabilities(classes, data.row)}`;
}

/** List the selected rows, so that any label can be changed or removed. */
function Rows({ session }) {
  const { rows, labels, unsure, unsent, answer, preview } = session;
  const state = ({ index }) => (unsent.has(index) ? "saving" : unsure.has(index) ? "unsure" : "");
  const text = ({ index }) => (preview.kind === "columns" ? preview.contents.get(index)?.slice(0, 4).join(", ") : preview.kind === "texts" ? preview.contents.get(index)?.slice(0, 60) : "");
  const goTo = (row) => {
    session.goTo(row);
    document.querySelector(".labelling").focus();
  };
  const csv = () => {
    const quote = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const lines = answer.ranking.map((row) => [row.rank, row.index, quote(row.id), row.score ?? "", row.control].join(","));
    download(`${answer.model}-to-label.csv`, `${["rank,index,id,score,control", ...lines].join("\r\n")}\r\n`, "text/csv");
  };
  return html`<details class="card"><summary>All ${number(rows.length)} selected rows</summary>
    <${Table} caption="Selected rows" heads=${["row", "label", "actions", "state", "id", "content", "comment"]} rows=${rows.map((row, i) => [
      String(i + 1), String(labels.get(row.index) ?? "–"),
      html`<button type="button" class="small" aria-label=${`Label row ${i + 1}`} onclick=${() => goTo(row)}>${labels.has(row.index) ? "Change" : "Label"}</button>${labels.has(row.index) && html` <button type="button" class="small" aria-label=${`Remove the label of row ${i + 1}`} onclick=${() => session.remove(row)}>Remove</button>`}`,
      row.control ? html`<span class="badge told">random</span> ${state(row)}` : state(row), row.id, text(row) ?? "", session.comments.get(row.index) ?? "",
    ])} />
    <p class="actions"><${Button} onclick=${csv}>Save row IDs (CSV)<//></p>
  </details>`;
}

/** Fetch all labels of a model, or with `former` the replaced and deleted labels. */
async function fetchLabels(model, former, signal) {
  const labels = [];
  let after = 0;
  do {
    const page = await requestJson("labels", { query: { model, former, after }, signal });
    labels.push(...page.labels);
    after = page.next;
  } while (after !== null);
  return labels;
}

/** Export the model's labels, and review rows whose label was changed. */
function Labels({ model, revision }) {
  const { data, error, reload } = useFetch(async (signal) => {
    const [labels, former] = await Promise.all([fetchLabels(model, false, signal), fetchLabels(model, true, signal)]);
    const current = new Map(labels.map((label) => [label.id, label]));
    const value = ({ label, target }) => label ?? target;
    const conflicts = former.filter((entry) => current.has(entry.id) && value(current.get(entry.id)) !== value(entry)).map((entry) => ({ id: entry.id, now: current.get(entry.id), before: entry, value }));
    return { labels, conflicts };
  }, [model, revision]);
  if (error) return html`<${Notice}>${error.message}<//>`;
  if (!data?.labels.length) return null;
  const save = () => {
    const quote = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
    const fields = ["id", "label", "target", "annotator", "time", "control", "comment"];
    download(`${model}-labels.csv`, `${[fields.join(","), ...data.labels.map((label) => fields.map((field) => quote(label[field])).join(","))].join("\r\n")}\r\n`, "text/csv");
  };
  const restore = async ({ id, before }) => {
    await requestJson("labels", { method: "POST", json: { model, replace: true, labels: [before.label === null ? { id, target: before.target } : { id, label: before.label }] } });
    reload();
  };
  const by = ({ annotator, time }) => `${annotator ?? "no key"}, ${moment(time)}`;
  return html`<details class="card"><summary>All ${number(data.labels.length)} stored labels of ${model}${data.conflicts.length ? `, ${number(data.conflicts.length)} changed` : ""}</summary>
    <p class="actions"><${Button} onclick=${save}>Save labels (CSV)<//></p>
    ${data.conflicts.length ? html`<${Table} caption="Rows with conflicting labels" heads=${["row", "current label", "by", "earlier label", "by", "action"]} rows=${data.conflicts.map((conflict) => [
      conflict.id, String(conflict.value(conflict.now)), by(conflict.now), String(conflict.value(conflict.before)), by(conflict.before),
      html`<${Button} class="small" onclick=${() => restore(conflict)}>Restore<//>`])} />` : html`<p class="quiet">No label was changed.</p>`}
  </details>`;
}
