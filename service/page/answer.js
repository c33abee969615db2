// Show the answer for a row.

import { h, number, percent, table } from "./dom.js";
import * as plots from "./plots.js";
import { describeDetector, describeFlag, inputWord, verdict } from "./sentences.js";

const LONG_NAME = 30; // letters
const MAX_NAMES = 20; // of a prediction set

/** Show the verdict on `row`, an entry of `answer.predictions`. */
export function verdictElement(row, answer, manifest) {
  const isClassification = manifest.task !== "regression";
  const { kind, word, reason } = verdict(row, answer, manifest);
  return h(
    "article",
    { class: `answer verdict ${kind}` },
    h("p", { class: "word" }, word),
    h("h2", { class: isClassification && row.label.length > LONG_NAME ? "long" : null }, isClassification ? h("bdi", {}, row.label) : number(row.mean, 4)),
    h("p", { class: "says", role: "status" }, reason),
  );
}

/** Show the draws and the prediction set, and in a closed section the detectors and scores. */
export function detailsElement(row, answer, manifest) {
  const isClassification = manifest.task !== "regression";
  return h(
    "article",
    { class: "answer more" },
    isClassification
      ? plots.probabilities(manifest.output.classes, row)
      : plots.target(manifest.output.target ?? "the target", row, answer.coverage),
    isClassification ? predictionSet(row, answer, manifest.output.classes) : row.flag ? h("p", { class: "promise" }, "This row is flagged, so the interval has no guarantee.") : null,
    h(
      "details",
      { class: "deeper" },
      h("summary", {}, "Details: detectors, scores, draws"),
      h("p", {}, describeFlag(row, answer, manifest)),
      plots.detectors(row, answer.fpr, manifest.detectors.combined, (name) => describeDetector(name, inputWord(manifest.input))),
      scoreTable(row, isClassification),
      h("p", { class: "quiet meta" }, `${answer.model}, version ${answer.version} (${manifest.method}); ${row.num_samples} draws, seed ${answer.seed}.`, categorySentence(row)),
    ),
  );
}

/** Show a row's verdict as a badge. */
export function badge(row, answer, manifest) {
  const { kind, word } = verdict(row, answer, manifest);
  return h("span", { class: `badge ${kind}` }, word);
}

/** Show the prediction set, shortened to its most probable classes; it guarantees nothing for a flagged row. */
function predictionSet(row, answer, classes) {
  const share = new Map(classes.map((name, c) => [name, row.probabilities[c]]));
  const all = row.prediction_set.length > MAX_NAMES ? [...row.prediction_set].sort((a, b) => share.get(b) - share.get(a)) : row.prediction_set;
  const names = all.slice(0, MAX_NAMES), hiddenCount = all.length - names.length;
  const set = h("strong", {}, names.flatMap((name, i) => [i ? ", " : null, h("bdi", {}, name)]), hiddenCount ? ` and ${number(hiddenCount)} more` : null);
  if (row.flag) return h("p", { class: "promise" }, `For familiar rows the ${percent(answer.coverage)} set would be `, set, ". This row is flagged, so there is no guarantee.");
  const confidence = answer.confidence === null ? "" : ` (confidence ${percent(answer.confidence)})`;
  return h("p", { class: "promise" }, `${percent(answer.coverage)} prediction set${confidence}: `, set, ".");
}

function categorySentence({ category }) {
  if (category === null) return "";
  return ` Calibrated on ${category.rows} rows ${category.name === null ? "without a known category" : `of ${category.name}`}.`;
}

function scoreTable(row, isClassification) {
  const names = isClassification
    ? [["entropy", "total uncertainty, in nats"], ["expected_entropy", "mean uncertainty of a single draw"], ["bald", "disagreement between the draws"], ["bald_corrected", "BALD, bias-corrected"], ["mean_std", "spread of the probabilities"], ["variation_ratio", "1 minus the largest probability"]]
    : [["std", "total uncertainty, in the target's units"], ["aleatoric_std", "noise in the data"], ["epistemic_std", "disagreement between the draws"]];
  const rows = names.map(([name, meaning]) => [name, number(row[name]), row.standard_error[name] ? `± ${number(row.standard_error[name], 2)}` : "–", meaning]);
  return table("Scores, with their standard errors over the draws", ["score", "value", "standard error", "meaning"], rows, [1, 2]);
}
