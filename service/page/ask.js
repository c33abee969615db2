// The view that asks: what to ask with, by what options, and the answer.

import { ask, askJson, Refused } from "./api.js";
import { badges, shownAnswer } from "./answer.js";
import { download, field, fill, h, notice, number, percent, slider } from "./dom.js";
import { inputFor } from "./inputs/index.js";
import * as replay from "./replay.js";

const MOST_SAMPLES = 300_000; // numbers of draws in an answer that the plots are worth
const AGAIN_MS = 1000; // before one asks again who was too early

/** Show it; `link` is a question of another time. */
export async function show(view, app, link) {
  let question = null, damaged = null;
  try {
    if (link) question = await replay.read(link);
  } catch (error) {
    damaged = notice(error.message);
  }
  if (question) app.choose(question.model);
  if (!app.model) {
    fill(view, h("h1", {}, "There is no model to ask yet"), h("p", {}, "Publish one: ", h("code", {}, "python -m training fit"), ". The page sees it by itself when it is loaded again."));
    return () => {};
  }
  const description = await app.describe(app.model);
  const versions = [...new Set([...Object.keys(description.aliases), ...description.versions])];
  let manifest = description.manifest;
  let asked = 0; // questions, to know the latest
  let busy = null; // the controller of the one that is being answered
  let waiting = false; // whether there is something newer to ask
  let last = null; // the last answer, with what was asked

  const version = h("select", { onchange: changeVersion }, versions.map((name) => h("option", { value: name, selected: name === (question?.version ?? "latest") }, name)));
  const inputPlace = h("div");
  const optionsPlace = h("div");
  const answerPlace = h("section", { class: "answers", "aria-label": "Answer" }, h("p", { class: "quiet" }, "The answer comes here as soon as there is something to ask."));
  let input, options;
  fill(
    view,
    h("h1", {}, `Ask ${app.model}`),
    damaged,
    h("div", { class: "two" },
      h("section", { "aria-label": "Question" }, inputPlace, h("p", { class: "actions" }, h("button", { type: "button", class: "main", onclick: now }, "Ask")), h("details", { class: "options" }, h("summary", {}, "Options"), field("Version", version), optionsPlace), h("p", { class: "quiet" }, summary(description))),
      answerPlace),
  );
  if (question && question.version !== "latest") await changeVersion();
  else build();
  if (question) {
    input.restore(question.input);
    options.restore(question);
    now();
  }

  async function changeVersion() {
    try {
      manifest = version.value === "latest" ? description.manifest : (await askJson(`models/${encodeURIComponent(app.model)}/versions/${encodeURIComponent(version.value)}`)).manifest;
      build();
    } catch (error) {
      fill(answerPlace, notice(error.message));
    }
  }

  function build() {
    const before = input?.saved();
    input = inputFor(manifest.input, soon);
    options = optionsFor(manifest, soon);
    fill(inputPlace, input.element);
    fill(optionsPlace, options.element);
    if (before) {
      try {
        input.restore(before);
      } catch {
        // another kind of input: one starts over
      }
    }
  }

  /** Ask when there is no question on its way; of those that come meanwhile the last alone is asked. */
  function soon() {
    if (busy) waiting = true;
    else now();
  }

  async function now() {
    let rows = null, wrong = null;
    try {
      rows = input.rows();
    } catch (error) {
      wrong = notice(error.message);
    }
    waiting = false;
    if (rows === null) {
      asked++; // an answer that is on its way is to something else
      busy?.abort();
      last = null;
      fill(answerPlace, wrong ?? h("p", { class: "quiet" }, "The answer comes here as soon as there is something to ask."));
      return;
    }
    const turn = ++asked;
    const files = input.files();
    const fields = { model: app.model, version: version.value, ...options.fields(), return_samples: rows.length * options.draws * (manifest.output.classes?.length ?? 2) <= MOST_SAMPLES };
    busy?.abort();
    const controller = (busy = new AbortController());
    let again = false;
    try {
      const begun = performance.now();
      const answer = await askedBy(files, rows, fields, controller.signal);
      if (turn === asked) {
        last = { answer, saved: input.saved(), files, fields };
        showAnswer(answer, performance.now() - begun);
      }
    } catch (error) {
      if (error.name !== "AbortError" && turn === asked) {
        last = null;
        again = error.status === 429;
        const said = files ? named(error.message, files) : error.message;
        fill(answerPlace, notice(again ? `The service is busy; asking again. ${said}` : said));
        if (!(error instanceof Refused)) throw error;
      }
    } finally {
      if (busy === controller) busy = null;
      if (turn === asked && again) setTimeout(() => turn === asked && soon(), AGAIN_MS);
      else if (turn === asked && waiting) now();
    }
  }

  function showAnswer(answer, milliseconds) {
    const pictures = input.pictures();
    const detail = h("div");
    const open = [...answerPlace.querySelectorAll("details")].map((each) => each.open); // stays so with the next answer
    const chosen = (i) => {
      answerPlace.querySelectorAll(".cards button").forEach((each, n) => each.setAttribute("aria-pressed", String(n === i)));
      fill(detail, shownAnswer(answer.predictions[i], answer, manifest));
      detail.querySelectorAll("details").forEach((each, n) => (each.open = open[n] ?? false));
    };
    const many = answer.predictions.length > 1
      ? h("ul", { class: "cards", "aria-label": "Rows" }, answer.predictions.slice(0, 200).map((row, i) =>
          h("li", {}, h("button", { type: "button", onclick: () => chosen(i) }, pictures?.[i] ?? null, h("span", {}, `${i + 1}: ${row.label ?? number(row.mean, 4)}`), badges(row)))))
      : null;
    const hidden = answer.predictions.length > 200 ? notice(`${answer.predictions.length} rows were answered; the first 200 are shown.`, "told") : null;
    const link = h("button", { type: "button", onclick: copyLink }, "Copy a link that replays it");
    const asJson = h("button", { type: "button", onclick: () => download("answer.json", JSON.stringify(answer, null, 1), "application/json") }, "Save the answer");
    fill(answerPlace, hidden, many, detail, unknown(answer), h("p", { class: "actions" }, link, " ", asJson, " ", h("span", { class: "quiet" }, `${number(milliseconds, 2)} ms`)), h("p", { id: "link-said", role: "status" }));
    chosen(0);
  }

  async function copyLink() {
    const { answer, saved, files, fields } = last;
    const said = document.getElementById("link-said");
    const content = files ? { kind: "Image files", saved: await Promise.all(files.map(inBase64)) } : saved;
    const question = { ...fields, version: answer.version, seed: answer.seed, input: content };
    const part = await replay.written(question);
    if (part === null) {
      said.textContent = "The input is too large for a link. Save the answer: its seed replays it.";
      return;
    }
    const address = `${location.href.replace(/#.*/, "")}#/ask/${part}`;
    history.replaceState(null, "", address);
    try {
      await navigator.clipboard.writeText(address);
      said.textContent = "Copied: it holds the input, the seed and the options, but no key.";
    } catch {
      said.textContent = "The address of this page is now the link: it holds the input, the seed and the options, but no key.";
    }
  }

  return () => {
    asked++;
    busy?.abort();
  };
}

async function askedBy(files, rows, fields, signal) {
  if (!files) return askJson("predict", { method: "POST", json: { ...fields, inputs: rows }, signal });
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
  for (const file of files) form.append("inputs", file);
  return (await ask("predict", { method: "POST", body: form, signal })).json();
}

/** What the service says of a row, with the name of its file. */
function named(said, files) {
  return said.replace(/^inputs\.(\d+)/, (field, row) => (files[row] ? `${files[row].name} (${field})` : field));
}

async function inBase64(file) {
  let text = "";
  for (const byte of new Uint8Array(await file.arrayBuffer())) text += String.fromCharCode(byte);
  return { name: file.name, content: btoa(text) };
}

function unknown(answer) {
  const names = Object.entries(answer.unknown_categories).filter(([, count]) => count > 0).map(([name]) => name);
  return names.length ? notice(`No category of the training data: the value of ${names.join(", ")}.`, "told") : null;
}

function summary(description) {
  const quality = description.quality ?? {};
  const told = quality.test_accuracy !== undefined ? `right on ${percent(quality.test_accuracy)} of its test rows` : quality.test_rmse !== undefined ? `a test error (RMSE) of ${number(quality.test_rmse)}` : "";
  return `${description.method}${told ? `, ${told}` : ""}.`;
}

/** The least number of two digits that is not below one, so that the least rate of a slider is one that holds. */
function roundedUp(rate) {
  const scale = 10 ** (1 - Math.floor(Math.log10(rate)));
  return Math.min(0.5, Math.ceil(rate * scale) / scale);
}

/** The options of a question: draws, rates, coverage, and a seed. */
function optionsFor(manifest, changed) {
  const { noise, abstention, detectors } = manifest;
  const most = Math.min(noise.max_draws ?? 1000, 1000);
  const least = detectors.smallest_fpr;
  const draws = slider("Draws", { min: 1, max: most, step: 1, value: Math.min(noise.default_draws, most), onchange: changed });
  // The rates by their logarithms: the small ones are what matters.
  const logarithmic = (text, from, to, value, say) =>
    slider(text, { min: Math.log10(from), max: Math.log10(to), step: 0.01, value: Math.log10(value), write: (x) => Math.min(to, Math.max(from, Number((10 ** x).toPrecision(2)))), say, onchange: changed });
  const fpr = logarithmic("False flags (fpr)", roundedUp(least), 0.5, Math.max(0.05, least), percent);
  const coverage = slider("Coverage", { min: 0.5, max: 0.99, step: 0.01, value: 0.95, say: percent, onchange: changed });
  const usesRisk = h("input", { type: "checkbox", onchange: changed });
  const isClassified = manifest.task !== "regression" && abstention !== null;
  const risk = isClassified ? logarithmic("Wrong labels (risk)", roundedUp(abstention.smallest_risk), 0.5, Math.max(0.05, abstention.smallest_risk), percent) : null;
  const seeded = h("input", { type: "checkbox", onchange: changed });
  const seed = h("input", { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, value: 7, oninput: () => seeded.checked && changed() });
  return {
    element: h("div", {}, draws.element, fpr.element, coverage.element, risk && [field("Be undecided where too many labels would be wrong", usesRisk), risk.element], field("The same draws each time", seeded, "otherwise each answer has fresh ones"), field("Seed", seed)),
    get draws() {
      return draws.value;
    },
    fields() {
      return { num_samples: draws.value, fpr: fpr.value, coverage: coverage.value, ...(usesRisk.checked && risk ? { risk: risk.value } : {}), ...(seeded.checked && seed.value !== "" ? { seed: Number(seed.value) } : {}) };
    },
    restore(question) {
      draws.position = question.num_samples;
      fpr.position = Math.log10(question.fpr);
      coverage.position = question.coverage;
      usesRisk.checked = question.risk !== undefined;
      if (question.risk !== undefined && risk) risk.position = Math.log10(question.risk);
      seeded.checked = true;
      seed.value = question.seed;
    },
  };
}
