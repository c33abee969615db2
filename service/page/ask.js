// The view that asks: what to ask with, by what options, and the answer.

import { ask, askJson, Refused } from "./api.js";
import { badge, shownAnswer, shownVerdict } from "./answer.js";
import { download, field, fill, h, notice, number, percent, slider, unpublished } from "./dom.js";
import { inputFor } from "./inputs/index.js";
import * as replay from "./replay.js";
import { lookForWhy, shownWhy } from "./why.js";

const MOST_SAMPLES = 300_000; // numbers of draws in an answer that the plots are worth
const AGAIN_MS = 1000; // before one asks again who was too early
const SLOW_MS = 150; // after which one is told that the answer is on its way
const MOST_CARDS = 200; // rows of an answer that are shown
let isWelcome = true; // until an answer was given, or somebody has read enough

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
    fill(view, unpublished("Ask", app));
    return () => {};
  }
  const description = await app.describe(app.model);
  const versions = [...new Set([...Object.keys(description.aliases), ...description.versions])];
  let manifest = description.manifest;
  let asked = 0; // questions, to know the latest
  let busy = null; // the controller of the one that is being answered
  let waiting = false; // whether there is something newer to ask
  let last = null; // the last answer, with what was asked
  let reasons = null; // the controller of what asks why a row is strange

  const version = h("select", { onchange: changeVersion }, versions.map((name) => h("option", { value: name, selected: name === (question?.version ?? "latest") }, name)));
  const inputPlace = h("div");
  const optionsPlace = h("div");
  const answerPlace = h("section", { class: "answers", "aria-label": "Answer" });
  const morePlace = h("section", { class: "about", "aria-label": "More about the answer", hidden: true });
  let input, options;
  fill(
    view,
    h("h1", {}, `Ask ${app.model}`),
    damaged,
    h("div", { class: "two ask" },
      h("section", { class: "question", "aria-label": "Question" }, inputPlace, h("p", { class: "actions" }, h("button", { type: "button", class: "main", onclick: now }, "Ask"), h("span", { class: "quiet" }, summary(description))), h("details", { class: "options" }, h("summary", {}, "Options"), field("Version", version), optionsPlace)),
      answerPlace, morePlace),
  );
  greet();
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
      say(notice(error.message));
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
    const offered = input;
    usualRows(app.model, version.value, manifest).then((rows) => offered.offer(rows, !question && asked === 0 && !inputPlace.contains(document.activeElement)), ignoreRefusals);
  }

  /** Ask when there is no question on its way; of those that come meanwhile the last alone is asked. */
  function soon() {
    if (busy) waiting = true;
    else now();
  }

  /** Show one thing where answers are, and nothing of another answer. */
  function say(...what) {
    last = null;
    reasons?.abort();
    morePlace.hidden = true;
    keepPlace();
    fill(answerPlace, what);
  }

  /** What is drawn below the answer on a phone stays under the pen, whatever takes the welcome's place. */
  function keepPlace() {
    if (!document.querySelector(".board:active")) return;
    answerPlace.style.minHeight = `${answerPlace.offsetHeight}px`;
    addEventListener("pointerup", () => (answerPlace.style.minHeight = ""), { once: true });
  }

  /** Before there is anything to answer: what doubt is, to those who have not seen it yet. */
  function greet() {
    const nothing = h("p", { class: "quiet" }, "The answer comes here as soon as there is something to ask.");
    if (!isWelcome) return say(nothing);
    const close = h("button", { type: "button", onclick: () => { isWelcome = false; greet(); } }, "Got it");
    say(h("div", { class: "welcome" }, h("h2", {}, "A model that knows when it doubts"), h("ul", {}, WELCOME.map(([sign, text]) => h("li", { class: sign }, text))), close));
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
      if (wrong) say(wrong);
      else greet();
      return;
    }
    const turn = ++asked;
    const files = input.files();
    const fields = { model: app.model, version: version.value, ...options.fields(), return_samples: rows.length * options.draws * (manifest.output.classes?.length ?? 2) <= MOST_SAMPLES };
    busy?.abort();
    const controller = (busy = new AbortController());
    const slow = setTimeout(() => {
      answerPlace.setAttribute("aria-busy", "true");
      if (!last) say(h("p", { class: "quiet", role: "status" }, "Asking the model …"));
    }, SLOW_MS);
    let again = false;
    try {
      const begun = performance.now();
      const { answer, kept, refused } = await askedBy(files, rows, fields, controller.signal);
      if (turn === asked) {
        isWelcome = false;
        last = { answer, saved: input.saved(), rows, files: files && kept.map((i) => files[i]), fields, kept };
        showAnswer(answer, performance.now() - begun, refused);
      }
    } catch (error) {
      if (error.name !== "AbortError" && turn === asked) {
        again = error.status === 429;
        say(notice(again ? `The service is busy; asking again. ${error.message}` : error.message), error.status === 0 ? h("button", { type: "button", onclick: now }, "Try again") : null);
        if (!(error instanceof Refused)) throw error;
      }
    } finally {
      clearTimeout(slow);
      if (busy === controller) {
        busy = null;
        answerPlace.removeAttribute("aria-busy");
      }
      if (turn === asked && again) setTimeout(() => turn === asked && soon(), AGAIN_MS);
      else if (turn === asked && waiting) now();
    }
  }

  function showAnswer(answer, milliseconds, refused) {
    const pictures = input.pictures();
    const verdictPlace = h("div"), whyPlace = h("div"), detail = h("div");
    const why = new Map(); // the element that says why, by row
    const open = [...morePlace.querySelectorAll("details")].map((each) => each.open); // stays so with the next answer
    const chosen = (i) => {
      const row = answer.predictions[i];
      answerPlace.querySelectorAll(".cards button").forEach((each, n) => each.setAttribute("aria-pressed", String(n === i)));
      fill(verdictPlace, shownVerdict(row, answer, manifest));
      fill(detail, shownAnswer(row, answer, manifest));
      detail.querySelectorAll("details").forEach((each, n) => (each.open = open[n] ?? false));
      reasons?.abort();
      fill(whyPlace, why.get(i));
      if (row.flag && !why.has(i)) explain(i, whyPlace, pictures?.[last.kept[i]]?.cloneNode()).then((found) => why.set(i, found), ignoreRefusals);
    };
    const many = answer.predictions.length > 1
      ? h("ul", { class: "cards", "aria-label": "Rows" }, answer.predictions.slice(0, MOST_CARDS).map((row, i) =>
          h("li", {}, h("button", { type: "button", onclick: () => chosen(i) }, pictures?.[last.kept[i]] ?? null, h("span", {}, `${last.kept[i] + 1}: ${row.label ?? number(row.mean, 4)}`), badge(row, answer, manifest)))))
      : null;
    const hidden = answer.predictions.length > MOST_CARDS ? notice(`${answer.predictions.length} rows were answered; the first ${MOST_CARDS} are shown.`, "told") : null;
    const link = h("button", { type: "button", onclick: copyLink }, "Copy a link that replays it");
    const asJson = h("button", { type: "button", onclick: () => download("answer.json", JSON.stringify(answer, null, 1), "application/json") }, "Save the answer");
    keepPlace();
    fill(answerPlace, refused.map((text) => notice(text)), hidden, many, verdictPlace, unknown(answer));
    fill(morePlace, whyPlace, detail, h("p", { class: "actions" }, link, " ", asJson, " ", h("span", { class: "quiet" }, `${number(milliseconds, 2)} ms`)), h("p", { id: "link-said", role: "status" }));
    morePlace.hidden = false;
    chosen(0);
  }

  /** Ask why a row of the last answer is strange, with the draws that flagged it, and show it. */
  async function explain(i, place, picture) {
    const { answer, rows, files, fields } = last;
    reasons = new AbortController();
    lookForWhy(place);
    const again = { ...fields, version: answer.version, seed: answer.seed, return_samples: false, explain: true };
    try {
      const { answer: { predictions: [{ explanation }] } } = await askedBy(files && [files[i]], [rows[i]], again, reasons.signal);
      const found = shownWhy(explanation, manifest, { pixels: files ? null : [rows[i]].flat(Infinity), picture });
      fill(place, found);
      return found;
    } catch (error) {
      if (error.name !== "AbortError") fill(place, h("p", { class: "quiet" }, `Why it is strange is not known: ${error.message}`));
      throw error;
    }
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
    reasons?.abort();
  };
}

const WELCOME = [
  ["agree", "It answers with many models that fit its data equally well: each is a dot."],
  ["scatter", "Where the dots lie together the models agree; where they scatter, it doubts, and says so first."],
  ["strange", "What is unlike all that it learnt from is flagged, however sure the answer looks."],
];

/** Nothing is lost where what is only offered is refused. */
function ignoreRefusals(error) {
  if (error.name !== "AbortError" && !(error instanceof Refused)) throw error;
}

/**
 * Training rows that the model does not flag, the most usual first: [name, row], of a classification one of each
 * label. None of versions that were published without them.
 */
async function usualRows(model, version, { task }) {
  const { inputs } = await askJson("predict/examples", { query: { model, version } });
  if (!inputs.length) return [];
  const { predictions } = await askJson("predict", { method: "POST", json: { model, version, inputs } });
  const usual = predictions.map((row, i) => ({ ...row, input: inputs[i] })).filter((row) => !row.flag).sort((a, b) => b.p_value - a.p_value);
  const named = usual.map((row) => [task === "regression" ? `About ${number(row.mean)}` : row.label, row.input]);
  return task === "regression" ? named.slice(0, 3) : [...new Map(named.reverse())].sort(([a], [b]) => (a < b ? -1 : 1)).slice(0, 10);
}

/** The answer to rows, or to files; of several files those that are refused are left out, and `refused` says why. */
async function askedBy(files, rows, fields, signal) {
  let kept = rows.map((_, i) => i);
  const refused = [];
  for (;;) {
    try {
      if (!files) return { answer: await askJson("predict", { method: "POST", json: { ...fields, inputs: rows }, signal }), kept, refused };
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
      for (const i of kept) form.append("inputs", files[i]);
      return { answer: await (await ask("predict", { method: "POST", body: form, signal })).json(), kept, refused };
    } catch (error) {
      const [found, place] = /^inputs\.(\d+)/.exec(error.message) ?? [];
      if (!files || !found || !(place in kept)) throw error;
      const said = `${files[kept[place]].name}${error.message.slice(found.length)}`;
      if (kept.length === 1) throw new Refused(error.status, [...refused, said].join(" "));
      refused.push(said);
      kept = kept.filter((_, n) => n !== Number(place));
    }
  }
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
  return told && `${told[0].toUpperCase()}${told.slice(1)}.`;
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
