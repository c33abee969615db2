// Show an answer with its verdict, uncertainty and details.

import { hasKey } from "./api.js";
import { Bar, Button, download, Failure, html, Notice, Table, useEffect, useFetch, useMemo, useState, Verdict } from "./components.js";
import { Explanation, NearestRows, RowPicture } from "./explanation.js";
import { number, percent } from "./format.js";
import { sliderRange } from "./inputs/columns.js";
import { ImageFile } from "./inputs/images.js";
import { pixelLayout } from "./pictures.js";
import * as plots from "./plots.js";
import { predict } from "./predict.js";
import { describeDetector, describeRecord, judge, splitUncertainty } from "./verdict.js";
import { WhatIf } from "./whatif.js";

const MAX_CARDS = 200; // rows shown
const MAX_NAMES = 20; // of a prediction set
const MAX_SNIPPET = 4000; // characters

/** Show the result of a prediction; `focused` is the column to vary, and `children` follow the details. */
export function Answer({ result, error, isPending, focused, manifest, retry, hint, children }) {
  const [selected, setSelected] = useState(0);
  useEffect(() => setSelected(0), [result?.query]);
  const { answer, query, indices, rejections, milliseconds } = result ?? {};
  const index = Math.min(selected, (answer?.predictions.length ?? 1) - 1);
  const base = answer?.predictions[index];
  const file = query?.files?.[indices[index]] ?? null;
  const input = query?.rows[indices[index]];
  const single = useFetch(async () => {
    if (!answer || answer.predictions.length === 1 || !base.flag) return null;
    return predict({ ...query, rows: [input], files: file && [file], fields: { ...query.fields, version: answer.version } });
  }, [answer, index]);
  const busy = isPending ? { "aria-busy": "true" } : {};
  if (!result) {
    return html`<section class="answers" aria-label="Answer" ...${busy}>
      ${!error ? html`<p class="quiet" role="status">${isPending ? "Waiting for the answer …" : hint}</p>` : error.status === 0 ? html`<${Failure} error=${error} reload=${retry} />` : html`<${Notice}>${error.message}<//>`}</section>
      <section class="about" aria-label="Details of the answer">${children}</section>`;
  }
  const row = single.data?.answer.predictions[0] ?? base;
  const verdict = judge(row, answer, manifest, input);
  const record = describeRecord(verdict, answer, manifest);
  const isClassification = manifest.task !== "regression";
  const column = manifest.input.columns.find(({ name, kind }) => kind === "numeric" && name === focused) ?? manifest.input.columns.find(({ kind }) => kind === "numeric");
  return html`
    <section class="answers" aria-label="Answer" ...${busy}>
      ${rejections.map((text) => html`<${Notice}>${text}<//>`)}
      ${answer.predictions.length > 1 && html`<${Cards} ...${{ result, manifest, index, setSelected }} />`}
      <${Verdict} ...${verdict}>
        <p class="says" role="status">${verdict.reasons.join(" ")}</p>
        ${record && html`<p class="record">${record}</p>`}
      <//>
      ${verdict.cause !== "unfamiliar" && describeCells(answer, row, input).map((text) => html`<${Notice} kind="told">${text}<//>`)}
    </section>
    <section class="about" aria-label="Details of the answer">
      <${Bar} label="Uncertainty" parts=${splitUncertainty(row, answer, manifest, verdict.cause)} />
      ${column && answer.predictions.length === 1 && html`<${WhatIf} column=${column.name} range=${sliderRange(column)} row=${input} label=${row.label} fields=${{ ...query.fields, version: answer.version }} manifest=${manifest} />`}
      ${verdict.cause === "unfamiliar" && row.explanation && html`<${Explanation} row=${row} manifest=${manifest} pixels=${input} file=${file} />`}
      <${Draws} ...${{ row, answer, manifest }} />
      ${isClassification ? html`<${PredictionSet} ...${{ row, answer, classes: manifest.output.classes }} />` : row.flag && html`<p class="promise">This row is flagged, so the interval has no guarantee.</p>`}
      ${row.explanation?.nearest && html`<${NearestRows} model=${answer.model} version=${answer.version} nearest=${row.explanation.nearest} manifest=${manifest} />`}
      <details class="deeper"><summary>Details: detectors, scores, draws</summary>
        <${Detectors} ...${{ row, answer, manifest }} />
        <${Scores} row=${row} isClassification=${isClassification} />
        <p class="quiet meta">${answer.model}, version ${answer.version} (${manifest.method}); ${row.num_samples} draws, seed ${answer.seed}.${describeCategory(row)} ${number(milliseconds, 2)} ms.</p>
      </details>
      <${Code} ...${{ query, answer }} />
      ${children}
      <${Share} answer=${answer} />
    </section>`;
}

/** List the rows of an answer. */
function Cards({ result: { answer, query, indices }, manifest, index, setSelected }) {
  const layout = pixelLayout(manifest.input);
  return html`
    ${answer.predictions.length > MAX_CARDS && html`<${Notice} kind="told">Showing the first ${MAX_CARDS} of ${answer.predictions.length} rows.<//>`}
    <ul class="cards" aria-label="Rows">${answer.predictions.slice(0, MAX_CARDS).map((row, i) => {
      const { kind, word, answer: name } = judge(row, answer, manifest, query.rows[indices[i]]);
      const file = query.files?.[indices[i]];
      return html`<li><button type="button" aria-pressed=${i === index} onclick=${() => setSelected(i)}>
        ${file ? html`<${ImageFile} file=${file} />` : layout && html`<${RowPicture} row=${query.rows[indices[i]]} spec=${manifest.input} name="" />`}
        <span>${indices[i] + 1}: <bdi>${name}</bdi></span><span class=${`badge ${kind}`}>${word}</span></button></li>`;
    })}</ul>`;
}

/** Plot the probabilities or the target with each draw. */
function Draws({ row, answer, manifest }) {
  const plot = useMemo(() => (manifest.task === "regression" ? plots.target(manifest.output.target ?? "the target", row, answer.coverage) : plots.probabilities(manifest.output.classes, row)), [row]);
  return html`${plot}${row.samples?.length > 1 && html`<p class="quiet">Each dot is one plausible model's answer. If the dots scatter, the model is uncertain.</p>`}`;
}

function Detectors({ row, answer, manifest }) {
  const plot = useMemo(() => plots.detectors(row, answer.fpr, manifest.detectors.combined, (name) => describeDetector(name, manifest.input)), [row]);
  const rate = answer.fdr === null ? `At most ${percent(answer.fpr)} of usual rows are flagged` : `At most ${percent(answer.fdr)} of flags are false`;
  return html`<p>Flagged: ${row.flag ? "yes" : "no"}, p = ${number(row.p_value, 2)}. ${rate}.</p>${plot}`;
}

/** Show the prediction set, shortened to its most probable classes; it guarantees nothing for a flagged row. */
function PredictionSet({ row, answer, classes }) {
  const p = new Map(classes.map((name, c) => [name, row.probabilities[c]]));
  const all = row.prediction_set.length > MAX_NAMES ? [...row.prediction_set].sort((a, b) => p.get(b) - p.get(a)) : row.prediction_set;
  const names = all.slice(0, MAX_NAMES), hidden = all.length - names.length;
  const set = html`<strong>${names.map((name, i) => html`${i ? ", " : ""}<bdi>${name}</bdi>`)}${hidden > 0 && ` and ${number(hidden)} more`}</strong>`;
  if (row.flag) return html`<p class="promise">For familiar rows the ${percent(answer.coverage)} set would be ${set}. This row is flagged, so there is no guarantee.</p>`;
  return html`<p class="promise">${percent(answer.coverage)} prediction set${answer.confidence === null ? "" : ` (confidence ${percent(answer.confidence)})`}: ${set}.</p>`;
}

function Scores({ row, isClassification }) {
  const names = isClassification
    ? [["entropy", "total uncertainty, in nats"], ["expected_entropy", "mean uncertainty of a single draw"], ["bald", "disagreement between the draws"], ["bald_corrected", "BALD, bias-corrected"], ["mean_std", "spread of the probabilities"], ["variation_ratio", "1 minus the largest probability"]]
    : [["std", "total uncertainty, in the target's units"], ["aleatoric_std", "noise in the data"], ["epistemic_std", "disagreement between the draws"]];
  const rows = names.map(([name, meaning]) => [name, number(row[name]), row.standard_error[name] ? `± ${number(row.standard_error[name], 2)}` : "–", meaning]);
  return html`<${Table} caption="Scores, with their standard errors over the draws" heads=${["score", "value", "standard error", "meaning"]} rows=${rows} numeric=${[1, 2]} />`;
}

/** Describe unknown categories and replaced missing values, which alone need not make a row unusual. */
function describeCells({ unknown_categories, predictions }, row, input) {
  const unknown = predictions.length > 1 ? [] : Object.entries(unknown_categories).filter(([, count]) => count > 0);
  const sentences = unknown.map(([name]) => `“${input[name]}” never appeared in ${name} during training.`);
  return row.missing?.length ? [...sentences, `Predicted from usual values, because these are missing: ${row.missing.join(", ")}.`] : sentences;
}

const describeCategory = ({ category }) => (category === null ? "" : ` Calibrated on ${category.rows} rows ${category.name === null ? "without a known category" : `of ${category.name}`}.`);

/** Show how to make the same request with curl and Python. */
function Code({ query: { rows, files, fields }, answer }) {
  const url = document.baseURI.replace(/#.*/, ""), base = url.replace(/\/$/, "");
  const { model, version, ...options } = { ...fields, version: answer.version };
  const inputs = JSON.stringify(rows), quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  if (inputs.length > MAX_SNIPPET) return null;
  const header = hasKey() ? ' -H "Authorization: Bearer $DUBITO_API_KEY"' : "";
  const curl = files
    ? `curl -s ${base}/predict${header} -F model=${model} ${files.map((file) => `-F inputs=@${quote(file.name)}`).join(" ")}`
    : `curl -s ${base}/predict${header} -H 'Content-Type: application/json' \\\n  -d ${quote(JSON.stringify({ model, version, ...options, inputs: rows }))}`;
  const python = `from dubito import Client\n\nwith Client("${base}"${hasKey() ? ', key=os.environ["DUBITO_API_KEY"]' : ""}) as client:\n    answer = client.predict(${inputs.replace(/"(?:[^"\\]|\\.)*"|null/g, (part) => (part === "null" ? "None" : part))}, model=${JSON.stringify(model)}, version=${JSON.stringify(version)}, seed=${options.seed})\nprint(answer)`;
  return html`<details class="code-snippets"><summary>Use from code</summary><h3>curl</h3><pre tabindex="0">${curl}</pre>${!files && html`<h3>Python</h3><pre tabindex="0">${hasKey() ? `import os\n${python}` : python}</pre>`}</details>`;
}

function Share({ answer }) {
  const [status, setStatus] = useState("");
  useEffect(() => setStatus(""), [answer]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      setStatus("Link copied. It contains the input, seed and options, but no key.");
    } catch {
      setStatus("Copy the link from the address bar. It contains the input, seed and options, but no key.");
    }
  };
  return html`<p class="actions"><${Button} onclick=${copy}>Copy link to this answer<//> <${Button} onclick=${() => download("answer.json", JSON.stringify(answer, null, 1), "application/json")}>Save answer (JSON)<//></p><p id="link-said" role="status">${status}</p>`;
}
