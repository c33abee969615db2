// The view Models. `#/models/NAME` shows a model, `#/models/NAME/1` a version, and `#/models/NAME/1/2` compares two.

import { request, requestJson, ServiceError } from "./api.js";
import { Differences } from "./comparison.js";
import { address, Button, Card, download, Failure, Field, html, Notice, Table, useFetch, useMemo, useState } from "./components.js";
import { compareBaselines, describeFigure, mergeFigures } from "./figures.js";
import { moment, number } from "./format.js";
import { Comparison, Promotion } from "./learning.js";
import * as strengths from "./strengths.js";

const MAX_VERSIONS = 10; // loaded at first

export default function Models({ app, model, path }) {
  const [maxVersions, setMaxVersions] = useState(MAX_VERSIONS);
  const { data, error, reload } = useFetch(async () => {
    const description = await app.describe(model, { fresh: true });
    const selected = path.map((version) => description.aliases[version] ?? version);
    const [versions, labels] = await Promise.all([loadVersions(description, maxVersions, selected), requestJson(`models/${encodeURIComponent(model)}/labels`).catch(() => null)]);
    return { description, versions, selected, candidates: labels?.candidates ?? [] };
  }, [maxVersions]);
  const onchange = async () => { await app.refresh(); await reload(); };
  if (error && !data) return html`<h1>Models</h1><${Failure} ...${{ error, reload }} />`;
  if (!data) return html`<p class="quiet">Loading …</p>`;
  const { description, versions, selected, candidates } = data;
  const readable = versions.filter(({ manifest }) => manifest);
  const find = (version) => readable.find((each) => each.version === version);
  const missing = selected.filter((version) => version && !find(version));
  const served = find(description.serving);
  const hidden = description.versions.length - versions.length;
  return html`
    <h1>Models</h1>
    ${app.models.length > 1 && html`<${ModelTable} models=${app.models} model=${model} />`}
    <${Card} title=${description.name}>
      ${error && html`<${Notice}>${error.message}<//>`}
      ${served && html`<p class="says"><${Quality} ...${served.manifest} /></p>`}
      ${description.serving === null && html`<${Notice}>No version of this model can be served.<//>`}
      ${Object.entries(description.broken).map(([version, reason]) => html`<${Notice}>Version ${version} cannot be served: ${reason}<//>`)}
      <${Table} caption="Versions, newest first" heads=${["version", "state", "quality", "aliases", "method", "created"]} rows=${versions.map(({ version, manifest, broken }) => [
        manifest ? html`<a href=${address("models", model, version)}>${version}</a>` : version,
        broken ? html`<span class="badge bad">broken</span>` : version === description.serving ? html`<span class="badge good">served</span>` : html`<${Promotion} key=${version} small model=${model} current=${description.serving} version=${version} onchange=${onchange} />`,
        manifest ? html`<${Quality} ...${manifest} />` : "–",
        Object.keys(description.aliases).filter((alias) => description.aliases[alias] === version).join(", ") || "–",
        manifest?.method ?? "–",
        moment(manifest?.created),
      ])} />
      ${hidden > 0 && html`<p><${Button} onclick=${() => setMaxVersions(Infinity)}>Show ${number(hidden)} more<//></p>`}
    <//>
    ${missing.length ? html`<${Notice}>Cannot show version ${missing.join(" and version ")} of ${model}. Available: ${description.versions.join(", ")}.<//>`
      : readable.length && html`
        ${!selected[1] && html`<${Version} key=${(find(selected[0]) ?? served ?? readable[0]).version} version=${find(selected[0]) ?? served ?? readable[0]} />`}
        ${readable.length > 1 && html`<${Versus} key=${selected.join()} model=${model} readable=${readable} candidates=${candidates} served=${served} pair=${selected[1] ? selected.map(find) : null} />`}`}`;
}

/** Show the main figure of a version next to its baselines. */
const Quality = ({ quality, baselines }) => html`<span class="quality">${compareBaselines(quality, baselines) ?? "–"}</span>`;

function ModelTable({ models, model }) {
  const rows = models.map((each) => {
    const broken = Object.keys(each.broken).length;
    const state = broken ? ["bad", `${broken} broken`] : each.warnings?.length ? ["check", "warning"] : each.too_few_rows ? ["told", "few rows"] : ["good", "OK"];
    return [
      html`<a href=${address("models", each.name)} aria-current=${each.name === model ? "true" : null}>${each.name}</a>`,
      html`<span class=${`badge ${state[0]}`}>${state[1]}</span>`,
      each.serving ?? html`<span class="badge bad">none</span>`,
      html`<${Quality} ...${each} />`, String(each.versions.length), each.task ?? "–", each.method ?? "–",
    ];
  });
  return html`<${Card}><${Table} caption="Published models" heads=${["model", "state", "serving", "quality", "versions", "task", "method"]} rows=${rows} numeric=${[4]} /><//>`;
}

/** Load the details of the latest `max` versions, the served version and the versions in `extra`, newest first. */
async function loadVersions(description, max, extra) {
  const numbers = description.versions.slice(-Math.min(max, description.versions.length));
  for (const version of [...extra, description.serving]) if (description.versions.includes(version) && !numbers.includes(version)) numbers.unshift(version);
  const versions = await Promise.all(numbers.map(async (version) => {
    try {
      return await requestJson(`models/${encodeURIComponent(description.name)}/versions/${encodeURIComponent(version)}`);
    } catch (error) {
      if (!(error instanceof ServiceError) || error.status === 0) throw error;
      return { name: description.name, version, broken: error.message, manifest: null, report: null };
    }
  }));
  return versions.reverse();
}

/** Load a version's report; null if there is none or it cannot be read. */
const useReport = (version) => useFetch((signal) => (version.report ? requestJson(version.report.href, { signal }) : null), [version.report?.href, version.report?.created]);

/** Show the pictures and figures of a version. */
function Version({ version }) {
  const { manifest, report: links } = version;
  const { data: report, error, isPending } = useReport(version);
  const plots = useMemo(() => (isPending ? [] : strengths.plots(version, report)), [report, isPending]);
  const save = (file) => async () => {
    const answer = await request(links.files[file]);
    download(`${version.name}-${version.version}-${file}`, await answer.blob(), answer.headers.get("Content-Type"));
  };
  const files = Object.keys(links?.files ?? {});
  return html`<${Card} title=${`Version ${version.version}: strengths and weaknesses`} class="card version">
    ${version.broken && html`<${Notice}>${version.broken}<//>`}
    ${[...manifest.warnings, manifest.too_few_rows].filter(Boolean).map((text) => html`<${Notice} kind="told">Warning: ${text}<//>`)}
    ${error && html`<${Notice}>${error.message}<//>`}
    <p class="says">${strengths.sentence(version, report)}</p>
    <div class="plots">${plots}</div>
    <details><summary>All figures</summary><${QualityTable} version=${version} report=${report} /></details>
    ${links ? html`<details><summary>Evaluation report</summary>
      ${report && html`<p>Created ${moment(report.created)} on ${number(report.test?.rows)} test rows of ${report.data}, with ${number(report.draws)} draws.${manifest.training?.convergence ? ` Convergence: ${manifest.training.convergence.summary}.` : ""}</p>`}
      <p class="actions">${files.map((file) => html`<${Button} onclick=${save(file)}>Save ${file}<//>`)}</p>
    </details>` : html`<p class="quiet">There is no evaluation report. Create one with <code>dubito evaluate ${version.name}:${version.version}</code>.</p>`}
    <details><summary>Properties</summary><${Properties} manifest=${manifest} /></details>
  <//>`;
}

/** Show all quality figures, with intervals if there is a report. */
function QualityTable({ version, report }) {
  const figures = mergeFigures(version.manifest, version.report?.summary, report?.summary_intervals);
  const isReported = figures.some(({ reported }) => reported !== null);
  const rows = figures.map(({ key, published, reported, interval }) => {
    const { name, write, better, meaning } = describeFigure(key);
    return [name, write(published), ...(isReported ? [write(reported), interval ? `${write(interval[0])} to ${write(interval[1])}` : "–"] : []), `${meaning}${better ? `; ${better} is better` : ""}`];
  });
  return html`<${Table} caption=${`Quality of version ${version.version}`} heads=${["figure", "at publication", ...(isReported ? ["report", "95 % interval"] : []), "meaning"]} rows=${rows} numeric=${isReported ? [1, 2, 3] : [1]} />`;
}

function Properties({ manifest }) {
  const { detectors, noise, abstention, categories, training, input, output } = manifest;
  const rows = [
    ["Task", manifest.task === "regression" ? `regression of ${output.target ?? "a number"}` : `classification into ${output.classes.length} classes`],
    ["Method", manifest.method],
    ["Input", describeInput(input)],
    ["Draws", `${noise.default_draws} by default${noise.max_draws ? `, up to ${noise.max_draws}` : ""}`],
    ["Flag", `combines ${detectors.combined.map((name) => name.replaceAll("_", " ")).join(", ")}; calibrated on ${number(detectors.ranking_rows)} rows`],
    ["Smallest fpr", number(detectors.smallest_fpr)],
    ["Smallest risk", abstention ? number(abstention.smallest_risk) : "does not abstain"],
    ["Categories", categories ? `calibrated per ${categories.kind}${categories.column ? ` (${categories.column})` : ""}: ${categories.names.join(", ")}` : "one calibration for all rows"],
    ["Created", `${moment(manifest.created)}${training?.recipe?.data ? ` from ${training.recipe.data.source}` : ""}`],
    ...(output.classes ? [["Classes", `${output.classes.slice(0, 1000).join(", ")}${output.classes.length > 1000 ? " …" : ""}`]] : []),
  ];
  return html`<dl class="facts">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
    ${input.columns.length > 0 && html`<${Table} caption="Columns" heads=${["column", "kind", "usual values"]} rows=${input.columns.map((column) => [column.name, column.kind,
      column.categories ? column.categories.slice(0, 20).join(", ") + (column.categories.length > 20 ? " …" : "") : column.kind === "numeric" ? `${number(column.mean)} ± ${number(column.std)}` : ""])} />`}`;
}

function describeInput({ shape, dtype, minimum, maximum, image, columns, text }) {
  if (text) return `text, up to ${text.max_tokens} tokens`;
  if (columns.length) return `rows of ${columns.length} ${columns.length === 1 ? "column" : "columns"}`;
  const size = shape.join(" × ");
  if (image) return `images of ${size} values (${image.mode}${image.resize ? ", resized by the service" : ""})`;
  return `${size} ${dtype === "int32" ? "ids" : "numbers"}, ${number(minimum)} to ${number(maximum)} in the training data`;
}

/** Compare two versions; by default the newest other version with the served one. */
function Versus({ model, readable, candidates, served, pair }) {
  const second = pair?.[1] ?? readable.find((version) => version !== served);
  const first = pair?.[0] ?? served ?? readable.find((version) => version !== second);
  const [isOpen, setIsOpen] = useState(pair !== null);
  const candidate = candidates.find(({ version, against }) => version === second.version && against === first.version);
  const picker = (label, selected, go) => html`<${Field} label=${label}><select value=${selected.version} onchange=${(event) => (location.hash = go(event.target.value))}>${readable.map(({ version }) => html`<option value=${version}>${version}</option>`)}</select><//>`;
  return html`<${Card} title="Compare versions" class="card versus">
    <div class="pair">${picker("Current", first, (version) => address("models", model, version, second.version))}${picker("Candidate", second, (version) => address("models", model, first.version, version))}</div>
    ${candidate && html`<${Comparison} candidate=${candidate} kind="test" /><${Comparison} candidate=${candidate} kind="control" />`}
    <details open=${isOpen} ontoggle=${(event) => setIsOpen(event.target.open)}><summary>All differences</summary>${isOpen && html`<${Differences} pair=${[first, second]} />`}</details>
  <//>`;
}
