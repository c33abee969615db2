// The view Ask: an input, options, and the answer.

import { request, requestJson, ServiceError } from "./api.js";
import { badge, detailsElement, verdictElement } from "./answer.js";
import { download, field, fill, h, noModel, notice, number, percent, slider } from "./dom.js";
import { canBeDrawn } from "./inputs/canvas.js";
import { inputFor } from "./inputs/index.js";
import * as replay from "./replay.js";
import { explanationElement, showPending } from "./why.js";

const MAX_SAMPLES = 300_000; // per-draw numbers requested for plots
const RETRY_MS = 1000; // after a 429
const SLOW_MS = 150; // before a pending answer is announced
const MAX_CARDS = 200; // rows shown
let isWelcome = true; // until the first answer or "Got it"

/** Show the view; `link` holds an earlier query to replay. */
export async function show(view, app, link) {
  let query = null, damaged = null;
  try {
    if (link) query = await replay.decode(link);
  } catch (error) {
    damaged = notice(error.message);
  }
  if (query) app.choose(query.model);
  if (!app.model) {
    fill(view, noModel("Ask", app));
    return () => {};
  }
  const description = await app.describe(app.model);
  const versions = [...new Set([...Object.keys(description.aliases), ...description.versions])];
  let manifest = description.manifest;
  let latestTurn = 0; // number of the latest request
  let pending = null; // its AbortController
  let isOutdated = false; // whether the input changed while it was pending
  let last = null; // the last answer with its request
  let explaining = null; // AbortController of the explanation

  const version = h("select", { onchange: changeVersion }, versions.map((name) => h("option", { value: name, selected: name === (query?.version ?? "latest") }, name)));
  const inputPlace = h("div");
  const optionsPlace = h("div");
  const answerPlace = h("section", { class: "answers", "aria-label": "Answer" });
  const morePlace = h("section", { class: "about", "aria-label": "Details of the answer", hidden: true });
  let input, options;
  fill(
    view,
    h("h1", {}, `Ask ${app.model}`),
    damaged,
    h("div", { class: "two ask" },
      h("section", { class: "question", "aria-label": "Question" }, inputPlace, h("p", { class: "actions" }, h("button", { type: "button", class: "main", onclick: predict }, "Ask"), h("span", { class: "quiet" }, summary(description))), h("details", { class: "options" }, h("summary", {}, "Options"), field("Version", version), optionsPlace)),
      answerPlace, morePlace),
  );
  showWelcome();
  if (query && query.version !== "latest") await changeVersion();
  else build();
  if (query) {
    input.restore(query.input);
    options.restore(query);
    predict();
  }

  async function changeVersion() {
    try {
      manifest = version.value === "latest" ? description.manifest : (await requestJson(`models/${encodeURIComponent(app.model)}/versions/${encodeURIComponent(version.value)}`)).manifest;
      build();
    } catch (error) {
      showOnly(notice(error.message));
    }
  }

  function build() {
    const before = input?.saved();
    input = inputFor(manifest.input, predictSoon);
    options = optionsFor(manifest, predictSoon);
    fill(inputPlace, input.element);
    fill(optionsPlace, options.element);
    if (before) {
      try {
        input.restore(before);
      } catch {
        // This version takes another kind of input, so start with an empty one.
      }
    }
    const target = input;
    usualRows(app.model, version.value, manifest).then((rows) => target.offer(rows, !query && latestTurn === 0 && !inputPlace.contains(document.activeElement)), ignoreServiceErrors);
  }

  /** Predict once no request is pending, with the input of that time. */
  function predictSoon() {
    if (pending) isOutdated = true;
    else predict();
  }

  /** Replace the answer by other content. */
  function showOnly(...content) {
    last = null;
    explaining?.abort();
    morePlace.hidden = true;
    holdHeight();
    fill(answerPlace, content);
  }

  /** Keep the height while the user draws, so that on a phone the board below does not move under the pen. */
  function holdHeight() {
    if (!document.querySelector(".board:active")) return;
    answerPlace.style.minHeight = `${answerPlace.offsetHeight}px`;
    addEventListener("pointerup", () => (answerPlace.style.minHeight = ""), { once: true });
  }

  /** Explain uncertainty until the first answer, then just say how to start. */
  function showWelcome() {
    if (!isWelcome) return showOnly(h("p", { class: "quiet" }, `${canBeDrawn(manifest.input) ? "Draw" : "Enter data"} or pick an example.`));
    const close = h("button", { type: "button", onclick: () => { isWelcome = false; showWelcome(); } }, "Got it");
    showOnly(h("div", { class: "welcome" }, h("h2", {}, "A model that knows when it is uncertain"), h("ul", {}, WELCOME.map(([sign, text]) => h("li", { class: sign }, text))), close));
  }

  async function predict() {
    let rows = null, invalid = null;
    try {
      rows = input.rows();
    } catch (error) {
      invalid = notice(error.message);
    }
    isOutdated = false;
    if (rows === null) {
      latestTurn++; // so that a pending answer is ignored
      pending?.abort();
      if (invalid) showOnly(invalid);
      else showWelcome();
      return;
    }
    const turn = ++latestTurn;
    const files = input.files();
    const fields = { model: app.model, version: version.value, ...options.fields(), return_samples: rows.length * options.draws * (manifest.output.classes?.length ?? 2) <= MAX_SAMPLES };
    pending?.abort();
    const controller = (pending = new AbortController());
    const slow = setTimeout(() => {
      answerPlace.setAttribute("aria-busy", "true");
      if (!last) showOnly(h("p", { class: "quiet", role: "status" }, "Waiting for the answer …"));
    }, SLOW_MS);
    let isBusy = false;
    try {
      const start = performance.now();
      const { answer, indices, rejections } = await sendRows(files, rows, fields, controller.signal);
      if (turn === latestTurn) {
        isWelcome = false;
        last = { answer, saved: input.saved(), rows, files: files && indices.map((i) => files[i]), fields, indices };
        showAnswer(answer, performance.now() - start, rejections);
      }
    } catch (error) {
      if (error.name !== "AbortError" && turn === latestTurn) {
        isBusy = error.status === 429;
        showOnly(notice(isBusy ? `The service is busy. Retrying. ${error.message}` : error.message), error.status === 0 ? h("button", { type: "button", onclick: predict }, "Try again") : null);
        if (!(error instanceof ServiceError)) throw error;
      }
    } finally {
      clearTimeout(slow);
      if (pending === controller) {
        pending = null;
        answerPlace.removeAttribute("aria-busy");
      }
      if (turn === latestTurn && isBusy) setTimeout(() => turn === latestTurn && predictSoon(), RETRY_MS);
      else if (turn === latestTurn && isOutdated) predict();
    }
  }

  function showAnswer(answer, milliseconds, rejections) {
    const pictures = input.pictures();
    const verdictPlace = h("div"), whyPlace = h("div"), detail = h("div");
    const explanations = new Map(); // elements by row
    const wasOpen = [...morePlace.querySelectorAll("details")].map((details) => details.open);
    const select = (i) => {
      const row = answer.predictions[i];
      answerPlace.querySelectorAll(".cards button").forEach((button, n) => button.setAttribute("aria-pressed", String(n === i)));
      fill(verdictPlace, verdictElement(row, answer, manifest));
      fill(detail, detailsElement(row, answer, manifest));
      detail.querySelectorAll("details").forEach((details, n) => (details.open = wasOpen[n] ?? false));
      explaining?.abort();
      fill(whyPlace, explanations.get(i));
      if (row.flag && !explanations.has(i)) explain(i, whyPlace, pictures?.[last.indices[i]]?.cloneNode()).then((element) => explanations.set(i, element), ignoreServiceErrors);
    };
    const cards = answer.predictions.length > 1
      ? h("ul", { class: "cards", "aria-label": "Rows" }, answer.predictions.slice(0, MAX_CARDS).map((row, i) =>
          h("li", {}, h("button", { type: "button", onclick: () => select(i) }, pictures?.[last.indices[i]] ?? null, h("span", {}, `${last.indices[i] + 1}: ${row.label ?? number(row.mean, 4)}`), badge(row, answer, manifest)))))
      : null;
    const hidden = answer.predictions.length > MAX_CARDS ? notice(`Showing the first ${MAX_CARDS} of ${answer.predictions.length} rows.`, "told") : null;
    const link = h("button", { type: "button", onclick: copyLink }, "Copy link to this answer");
    const save = h("button", { type: "button", onclick: () => download("answer.json", JSON.stringify(answer, null, 1), "application/json") }, "Save answer (JSON)");
    holdHeight();
    fill(answerPlace, rejections.map((text) => notice(text)), hidden, cards, verdictPlace, unusualCellsNotice(answer, last.rows));
    fill(morePlace, whyPlace, detail, h("p", { class: "actions" }, link, " ", save, " ", h("span", { class: "quiet" }, `${number(milliseconds, 2)} ms`)), h("p", { id: "link-said", role: "status" }));
    morePlace.hidden = false;
    select(0);
  }

  /** Request the explanation of a flagged row, with the draws that flagged it, and show it. */
  async function explain(i, place, picture) {
    const { answer, rows, files, fields } = last;
    explaining = new AbortController();
    showPending(place);
    const sameDraws = { ...fields, version: answer.version, seed: answer.seed, return_samples: false, explain: true };
    try {
      const { answer: { predictions: [{ explanation }] } } = await sendRows(files && [files[i]], [rows[i]], sameDraws, explaining.signal);
      const element = explanationElement(explanation, manifest, { pixels: files ? null : [rows[i]].flat(Infinity), picture });
      fill(place, element);
      return element;
    } catch (error) {
      if (error.name !== "AbortError") fill(place, h("p", { class: "quiet" }, `Cannot explain this row: ${error.message}`));
      throw error;
    }
  }

  async function copyLink() {
    const { answer, saved, files, fields } = last;
    const status = document.getElementById("link-said");
    const content = files ? { kind: "Image files", saved: await Promise.all(files.map(encodeFile)) } : saved;
    const encoded = await replay.encode({ ...fields, version: answer.version, seed: answer.seed, input: content });
    if (encoded === null) {
      status.textContent = "The input is too large for a link. Save the answer instead: it contains the seed.";
      return;
    }
    const address = `${location.href.replace(/#.*/, "")}#/try/${encodeURIComponent(app.model)}/${encoded}`;
    history.replaceState(null, "", address);
    try {
      await navigator.clipboard.writeText(address);
      status.textContent = "Link copied. It contains the input, seed and options, but no key.";
    } catch {
      status.textContent = "The link is now in the address bar. It contains the input, seed and options, but no key.";
    }
  }

  return () => {
    latestTurn++;
    pending?.abort();
    explaining?.abort();
  };
}

const WELCOME = [
  ["agree", "Each dot is one plausible model's answer."],
  ["scatter", "If the dots agree, the model is certain. If they scatter, it is uncertain."],
  ["strange", "Unfamiliar input is flagged, however certain the answer looks."],
];

/** Ignore errors of optional requests. */
function ignoreServiceErrors(error) {
  if (error.name !== "AbortError" && !(error instanceof ServiceError)) throw error;
}

/**
 * Find training rows that the model does not flag, the most usual first: [name, row]. Classification returns one row
 * per label; versions published without example rows return none.
 */
async function usualRows(model, version, { task }) {
  const { inputs } = await requestJson("predict/examples", { query: { model, version } });
  if (!inputs.length) return [];
  const { predictions } = await requestJson("predict", { method: "POST", json: { model, version, inputs } });
  const usual = predictions.map((row, i) => ({ ...row, input: inputs[i] })).filter((row) => !row.flag).sort((a, b) => b.p_value - a.p_value);
  const named = usual.map((row) => [task === "regression" ? `About ${number(row.mean)}` : row.label, row.input]);
  return task === "regression" ? named.slice(0, 3) : [...new Map(named.reverse())].sort(([a], [b]) => (a < b ? -1 : 1)).slice(0, 10);
}

/**
 * Predict rows or files. Invalid files are skipped: `indices` are the predicted rows and `rejections` the messages
 * about the others.
 */
async function sendRows(files, rows, fields, signal) {
  let indices = rows.map((_, i) => i);
  const rejections = [];
  for (;;) {
    try {
      if (!files) return { answer: await requestJson("predict", { method: "POST", json: { ...fields, inputs: rows }, signal }), indices, rejections };
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
      for (const i of indices) form.append("inputs", files[i]);
      return { answer: await (await request("predict", { method: "POST", body: form, signal })).json(), indices, rejections };
    } catch (error) {
      const [prefix, position] = /^inputs\.(\d+)/.exec(error.message) ?? [];
      if (!files || !prefix || !(position in indices)) throw error;
      const message = `${files[indices[position]].name}${error.message.slice(prefix.length)}`;
      if (indices.length === 1) throw new ServiceError(error.status, [...rejections, message].join(" "));
      rejections.push(message);
      indices = indices.filter((_, n) => n !== Number(position));
    }
  }
}

async function encodeFile(file) {
  let text = "";
  for (const byte of new Uint8Array(await file.arrayBuffer())) text += String.fromCharCode(byte);
  return { name: file.name, content: btoa(text) };
}

function unusualCellsNotice({ unknown_categories, predictions }, rows) {
  const names = Object.entries(unknown_categories).filter(([, count]) => count > 0).map(([name]) => name);
  const value = (name) => (rows.length === 1 && rows[0][name] !== undefined ? `“${rows[0][name]}”` : "A value");
  const missing = [...new Set(predictions.flatMap((row) => row.missing ?? []))];
  const sentences = names.map((name) => `${value(name)} never appeared in ${name} during training.`);
  if (missing.length) sentences.push(`Predicted from usual values, because these are missing: ${missing.join(", ")}.`);
  return sentences.length ? notice(sentences.join(" "), "told") : null;
}

function summary({ quality }) {
  if (quality?.test_accuracy !== undefined) return `Test accuracy: ${percent(quality.test_accuracy)}.`;
  if (quality?.test_rmse !== undefined) return `Test error (RMSE): ${number(quality.test_rmse)}.`;
  return "";
}

/** Round up to two digits, so that a slider's smallest rate can be guaranteed. */
function roundUp(rate) {
  const scale = 10 ** (1 - Math.floor(Math.log10(rate)));
  return Math.min(0.5, Math.ceil(rate * scale) / scale);
}

/** Create the options: draws, rates, coverage and seed. */
function optionsFor(manifest, changed) {
  const { noise, abstention, detectors } = manifest;
  const maxDraws = Math.min(noise.max_draws ?? 1000, 1000);
  const draws = slider("Draws", { min: 1, max: maxDraws, step: 1, value: Math.min(noise.default_draws, maxDraws), onchange: changed });
  // A logarithmic scale gives small rates, which matter most, enough room.
  const rateSlider = (text, smallest) => {
    const min = roundUp(smallest), max = 0.5;
    return slider(text, { min: Math.log10(min), max: Math.log10(max), step: 0.01, value: Math.log10(Math.max(0.05, smallest)), toValue: (x) => Math.min(max, Math.max(min, Number((10 ** x).toPrecision(2)))), format: percent, onchange: changed });
  };
  const fpr = rateSlider("False-positive rate (fpr)", detectors.smallest_fpr);
  const coverage = slider("Coverage", { min: 0.5, max: 0.99, step: 0.01, value: 0.95, format: percent, onchange: changed });
  const usesRisk = h("input", { type: "checkbox", onchange: changed });
  const canAbstain = manifest.task !== "regression" && abstention !== null;
  const risk = canAbstain ? rateSlider("Error rate (risk)", abstention.smallest_risk) : null;
  const usesSeed = h("input", { type: "checkbox", onchange: changed });
  const seed = h("input", { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, value: 7, oninput: () => usesSeed.checked && changed() });
  return {
    element: h("div", {}, draws.element, fpr.element, coverage.element, risk && [field("Abstain to keep errors below", usesRisk), risk.element], field("Use the same draws each time", usesSeed, "off: new draws for each answer"), field("Seed", seed)),
    get draws() {
      return draws.value;
    },
    fields() {
      return { num_samples: draws.value, fpr: fpr.value, coverage: coverage.value, ...(usesRisk.checked && risk ? { risk: risk.value } : {}), ...(usesSeed.checked && seed.value !== "" ? { seed: Number(seed.value) } : {}) };
    },
    restore(query) {
      draws.position = query.num_samples;
      fpr.position = Math.log10(query.fpr);
      coverage.position = query.coverage;
      usesRisk.checked = query.risk !== undefined;
      if (query.risk !== undefined && risk) risk.position = Math.log10(query.risk);
      usesSeed.checked = true;
      seed.value = query.seed;
    },
  };
}
