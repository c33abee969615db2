// One row's answer, as people read it.

import { h, number, percent, table } from "./dom.js";
import * as plots from "./plots.js";
import { detectorSays, flagSays, inputWord, verdict } from "./sentences.js";

const LONG_NAME = 30; // letters
const MOST_NAMES = 20; // of a prediction set

/** How far the answer about `row`, one of `answer.predictions`, is to be trusted: what one reads first. */
export function shownVerdict(row, answer, manifest) {
  const isClassified = manifest.task !== "regression";
  const { kind, word, why } = verdict(row, answer, manifest);
  return h(
    "article",
    { class: `answer verdict ${kind}` },
    h("p", { class: "word" }, word),
    h("h2", { class: isClassified && row.label.length > LONG_NAME ? "long" : null }, isClassified ? h("bdi", {}, row.label) : number(row.mean, 4)),
    h("p", { class: "says", role: "status" }, why),
  );
}

/** The rest of it: the draws as dots, what is promised, and folded away the detectors and scores. */
export function shownAnswer(row, answer, manifest) {
  const isClassified = manifest.task !== "regression";
  return h(
    "article",
    { class: "answer more" },
    isClassified
      ? plots.probabilities(manifest.output.classes, row)
      : plots.target(manifest.output.target ?? "the target", row, answer.coverage),
    isClassified ? setOf(row, answer, manifest.output.classes) : row.flag ? h("p", { class: "promise" }, "The interval is promised for rows like the training data: of this one it does not hold.") : null,
    h(
      "details",
      { class: "deeper" },
      h("summary", {}, "Details: detectors, scores, draws"),
      h("p", {}, flagSays(row, answer, manifest)),
      plots.detectors(row, answer.fpr, manifest.detectors.combined, (name) => detectorSays(name, inputWord(manifest.input))),
      scores(row, isClassified),
      h("p", { class: "quiet meta" }, `${answer.model}, version ${answer.version} (${manifest.method}); ${row.num_samples} draws of seed ${answer.seed}.`, category(row)),
    ),
  );
}

/** What is to be seen at once of one row of several. */
export function badge(row, answer, manifest) {
  const { kind, word } = verdict(row, answer, manifest);
  return h("span", { class: `badge ${kind}` }, word);
}

/** The prediction set in words; of very many classes the most probable. Of a flagged row it promises nothing. */
export function setOf(row, answer, classes) {
  const sure = answer.confidence === null ? "on average" : `with a confidence of ${percent(answer.confidence)}`;
  const share = new Map(classes.map((name, c) => [name, row.probabilities[c]]));
  const all = row.prediction_set.length > MOST_NAMES ? [...row.prediction_set].sort((a, b) => share.get(b) - share.get(a)) : row.prediction_set;
  const names = all.slice(0, MOST_NAMES), others = all.length - names.length;
  const listed = names.flatMap((name, i) => [i ? " or " : null, h("bdi", {}, name)]);
  const set = h("strong", {}, listed, others ? ` or one of ${number(others)} others` : null);
  return row.flag
    ? h("p", { class: "promise" }, `Of rows like the training data one could say that with ${percent(answer.coverage)} it is `, set, ". Of this row that does not hold.")
    : h("p", { class: "promise" }, `With ${percent(answer.coverage)} (${sure}) it is `, set, ".");
}

function category(row) {
  return row.category === null ? "" : ` Judged among ${row.category.rows} rows of ${row.category.name ?? "no known category"}.`;
}

function scores(row, isClassified) {
  const names = isClassified
    ? [["entropy", "all doubt, in nats"], ["expected_entropy", "doubt of every single draw"], ["bald", "disagreement of the draws"], ["bald_corrected", "the same, were there no end of draws"], ["mean_std", "spread of the probabilities"], ["variation_ratio", "1 - the largest probability"]]
    : [["std", "all doubt, in the target's units"], ["aleatoric_std", "noise of the data"], ["epistemic_std", "disagreement of the draws"]];
  const rows = names.map(([name, meaning]) => [name, number(row[name]), row.standard_error[name] ? `± ${number(row.standard_error[name], 2)}` : "–", meaning]);
  return table("Scores, and how much they may change with other draws", ["score", "value", "standard error", "what it is"], rows, [1, 2]);
}
