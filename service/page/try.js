// The view Try: enter or draw a row, and see the answer with its verdict, reasons and uncertainty.

import { requestJson } from "./api.js";
import { Answer } from "./answer.js";
import { Batch } from "./batch.js";
import { address, Button, Failure, Field, html, Notice, useEffect, useFetch, useMemo, useRef, useState } from "./components.js";
import { number, percent } from "./format.js";
import { History, useHistory } from "./history.js";
import { inputKinds } from "./inputs/index.js";
import { imageSize } from "./inputs/drawing.js";
import { RowPicture } from "./explanation.js";
import { pixelLayout } from "./pictures.js";
import { decodeQuery, encodeQuery } from "./link.js";
import { findExamples, usePrediction } from "./predict.js";
import { measureStyle } from "./strokes.js";

const TYPING_PAUSE_MS = 250;
const ADDRESS_PAUSE_MS = 400;
const MANY_COLUMNS = 12; // more are sorted by influence
const INFLUENCE_DRAWS = 10;
const MAX_INFLUENCE_ROWS = 1000;

export default function Try({ app, model, path }) {
  const start = useFetch(async () => {
    const link = path[0] ? await decodeQuery(path[0]).catch((error) => ({ damage: error.message })) : null;
    return { link, description: await app.describe(model) };
  }, []);
  const [picked, setPicked] = useState(null);
  const carried = useRef(null); // the input, for another version
  const { link, description } = start.data ?? {};
  const version = picked ?? link?.version ?? "latest";
  const versions = description && [...new Set([...Object.keys(description.aliases), ...description.versions])];
  const manifest = useFetch(async () => {
    if (!description) return null;
    return version === "latest" ? description.manifest : (await requestJson(`models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}`)).manifest;
  }, [description, version]);
  const failed = start.error ? start : manifest.error ? manifest : null;
  if (!manifest.data && !failed) return html`<p class="quiet">Loading …</p>`;
  return html`
    <h1>Try <bdi>${model}</bdi></h1>
    ${link?.damage && html`<${Notice}>${link.damage}<//>`}
    ${failed && html`<${Failure} ...${failed} />`}
    ${manifest.data && html`<${Session} key=${version} ...${{ model, version, versions, setVersion: setPicked, manifest: manifest.data, start: carried.current ?? (link?.damage ? null : link), carried }} />`}`;
}

/** Try one version. `start` is the query of an earlier session, if any. */
function Session({ model, version, versions, setVersion, manifest, start, carried }) {
  const spec = manifest.input;
  const kinds = useMemo(() => inputKinds(spec), []);
  const examples = useFetch(() => findExamples(model, version, manifest), []);
  const [input, setInput] = useState(() => (kinds.some(({ name }) => name === start?.kind) ? { kind: start.kind, value: start.value } : { kind: kinds[0].name, value: null }));
  const [options, setOptions] = useState(() => ({ ...defaultOptions(manifest), ...start?.options }));
  const [focused, setFocused] = useState(null);
  const prediction = usePrediction();
  const kind = kinds.find(({ name }) => name === input.kind);
  const style = useMemo(() => {
    const size = imageSize(spec);
    const toInk = (row) => row.flat(Infinity).map((x) => (x - spec.minimum) / (spec.maximum - spec.minimum));
    return size && measureStyle((examples.data?.rows ?? []).map(toInk), size[1], size[0]);
  }, [examples.data]);
  const [example] = examples.data?.chosen ?? [];
  const first = useMemo(() => (spec.columns.length && example ? kind.fromRow(example.row, spec) : kind.empty(spec)), [example, kind]);
  const value = input.value ?? first;
  const isWaiting = spec.columns.length > 0 && input.value === null && examples.isPending; // for the row to start with
  const fields = { model, version, ...options };
  const setValue = (next, isTyped = kind.isTyped) => setInput({ kind: kind.name, value: next, isTyped });

  const getQuery = () => {
    try {
      const rows = kind.rows(value, spec, style);
      return rows && { rows, files: kind.files?.(value) ?? null, fields, manifest, input: { kind: kind.name, value } };
    } catch (error) {
      return { error };
    }
  };
  useEffect(() => {
    if (isWaiting) return undefined;
    const timer = setTimeout(() => prediction.submit(getQuery()), input.isTyped ? TYPING_PAUSE_MS : 0);
    return () => clearTimeout(timer);
  }, [value, options, isWaiting]);

  const { result } = prediction;
  useEffect(() => {
    if (!result) return undefined;
    carried.current = { ...result.query.input, options };
    const timer = setTimeout(async () => {
      const text = await encodeQuery({ ...result.query.input, options, version: result.answer.version });
      if (text && location.hash.startsWith(address("try", model))) history.replaceState(null, "", address("try", model, text));
    }, ADDRESS_PAUSE_MS);
    return () => clearTimeout(timer);
  }, [result]);

  const past = useHistory(model, result, manifest);
  const influence = useInfluence(value, kind, fields, manifest, isWaiting);
  const row = result?.query.rows.length === 1 ? result.query.rows[0] : null;
  return html`
    <div class="two ask">
      <section class="question" aria-label="Input">
        ${kinds.length > 1 && html`<p class="tabs">${kinds.map(({ name, empty }) => html`<button type="button" aria-pressed=${name === kind.name} onclick=${() => name !== kind.name && setInput({ kind: name, value: empty(spec) })}>${name}</button>`)}</p>`}
        <${kind.Control} ...${{ spec, value, onchange: setValue, style, influence, onfocus: setFocused }} />
        <${Examples} chosen=${examples.data?.chosen ?? []} ...${{ kind, spec, value, setValue }} />
        ${spec.columns.length > 0 && html`<${Batch} ...${{ fields, manifest }} />`}
        <details class="options"><summary>Options</summary>
          <${Field} label="Version"><select value=${version} onchange=${(event) => setVersion(event.target.value)}>${versions.map((name) => html`<option value=${name}>${name}</option>`)}</select><//>
          <${Options} ...${{ manifest, options, setOptions }} />
        </details>
        <p class="actions sticky"><${Button} main onclick=${() => setOptions({ ...options, seed: randomSeed() })}>Ask again<//><span class="quiet">${describeQuality(manifest)}</span></p>
      </section>
      <${Answer} ...${{ ...prediction, focused: focused ?? mostInfluential(influence, spec), manifest, retry: () => prediction.submit(getQuery()) }} hint=${kind.name === "Draw" ? "Draw or pick an example." : "Enter data or pick an example."}>
        <${History} ...${past} restore=${(entry) => setInput({ ...entry.input, isTyped: false })} current=${row && result} />
      <//>
    </div>`;
}

/** Offer a training row of each class, as a picture if it is one, and unusual rows. */
function Examples({ chosen, kind, spec, value, setValue }) {
  const layout = pixelLayout(spec);
  return html`<div class="examples" aria-label="Examples" role="group">
    <span class="quiet">Examples</span>
    ${kind.fromRow && chosen.map((example) => html`<button type="button" onclick=${async () => setValue(await kind.fromRow(example.row, spec), false)}>
      ${layout && html`<${RowPicture} row=${example.row} spec=${spec} name="" />`}<bdi>${example.label ?? `about ${number(example.mean)}`}</bdi></button>`)}
    ${kind.odd.map(([name, make]) => html`<button type="button" onclick=${async () => setValue(await make(spec, value), false)}>${name}</button>`)}
  </div>`;
}

/** Compute how much each column changes the prediction between its lowest and highest usual values, in wide tables. */
function useInfluence(value, kind, fields, manifest, isWaiting) {
  const columns = manifest.input.columns;
  const { data } = useFetch(async () => {
    if (columns.length <= MANY_COLUMNS || 2 * columns.length > MAX_INFLUENCE_ROWS || isWaiting) return null;
    const [row] = kind.rows(value, manifest.input);
    const ends = ({ kind: type, mostly, mean, std, categories }) => (type === "categorical" ? [categories[0], categories.at(-1)] : type === "numeric" ? (mostly ?? [mean - std, mean + std]) : null);
    const varied = columns.filter((column) => ends(column));
    const inputs = varied.flatMap((column) => ends(column).map((end) => ({ ...row, [column.name]: end })));
    const { predictions } = await requestJson("predict", { method: "POST", json: { model: fields.model, version: fields.version, num_samples: Math.min(fields.num_samples, INFLUENCE_DRAWS), seed: fields.seed, inputs } });
    const change = (a, b) => (a.probabilities ? a.probabilities.reduce((sum, p, c) => sum + Math.abs(p - b.probabilities[c]), 0) : Math.abs(a.mean - b.mean));
    return new Map(varied.map(({ name }, i) => [name, change(predictions[2 * i], predictions[2 * i + 1])]));
  }, [isWaiting]);
  return data;
}

/** Return the numeric column that changes the prediction most. */
const mostInfluential = (influence, { columns }) => columns.filter(({ kind }) => influence && kind === "numeric").map(({ name }) => name).sort((a, b) => influence.get(b) - influence.get(a))[0];

const randomSeed = () => Math.floor(1e6 * Math.random());

const defaultOptions = ({ noise, detectors }) => ({
  num_samples: Math.min(noise.default_draws, noise.max_draws ?? 1000),
  fpr: Math.max(0.05, roundUp(detectors.smallest_fpr)),
  coverage: 0.95,
  seed: randomSeed(),
});

/** Round up to two digits, so that a slider's smallest rate can be guaranteed. */
function roundUp(rate) {
  const scale = 10 ** (1 - Math.floor(Math.log10(rate)));
  return Math.min(0.5, Math.ceil(rate * scale) / scale);
}

/** Edit draws, rates, coverage and seed. */
function Options({ manifest, options, setOptions }) {
  const { noise, abstention, detectors } = manifest;
  const set = (name) => (value) => setOptions({ ...options, [name]: value });
  const canAbstain = manifest.task !== "regression" && abstention !== null;
  return html`
    <${Slider} label="Draws" min="1" max=${Math.min(noise.max_draws ?? 1000, 1000)} step="1" value=${options.num_samples} format=${String} onchange=${set("num_samples")} />
    <${Rate} label="False-positive rate (fpr)" smallest=${detectors.smallest_fpr} value=${options.fpr} onchange=${set("fpr")} />
    <${Slider} label="Coverage" min="0.5" max="0.99" step="0.01" value=${options.coverage} format=${percent} onchange=${set("coverage")} />
    ${canAbstain && html`<${Field} label="Abstain to keep errors below"><input type="checkbox" checked=${options.risk !== undefined} onchange=${(event) => set("risk")(event.target.checked ? Math.max(0.05, roundUp(abstention.smallest_risk)) : undefined)} /><//>`}
    ${options.risk !== undefined && html`<${Rate} label="Error rate (risk)" smallest=${abstention.smallest_risk} value=${options.risk} onchange=${set("risk")} />`}
    <${Field} label="Seed of the draws"><input type="number" min="0" max=${Number.MAX_SAFE_INTEGER} step="1" value=${options.seed} oninput=${(event) => event.target.checkValidity() && event.target.value !== "" && set("seed")(Number(event.target.value))} /><//>`;
}

/** A slider whose logarithmic scale gives small rates enough room. */
function Rate({ smallest, value, onchange, ...rest }) {
  const min = roundUp(smallest), max = 0.5;
  const toRate = (x) => Math.min(max, Math.max(min, Number((10 ** x).toPrecision(2))));
  return html`<${Slider} min=${Math.log10(min)} max=${Math.log10(max)} step="0.01" value=${Math.log10(value)} format=${(x) => percent(toRate(x))} onchange=${(x) => onchange(toRate(x))} ...${rest} />`;
}

function Slider({ label, value, format, onchange, ...attributes }) {
  return html`<div class="slider"><${Field} label=${label}><input type="range" value=${value} aria-valuetext=${format(value)} oninput=${(event) => onchange(Number(event.target.value))} ...${attributes} /><//><output>${format(value)}</output></div>`;
}

function describeQuality({ quality }) {
  if (quality?.test_accuracy !== undefined) return `Test accuracy: ${percent(quality.test_accuracy)}`;
  return quality?.test_rmse === undefined ? "" : `Test error (RMSE): ${number(quality.test_rmse)}`;
}
