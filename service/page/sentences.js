// Explain answers in words.

import { number, percent } from "./dom.js";

/** What raises each detector's score; `{input}` is replaced by the model's kind of input. */
const DETECTORS = {
  entropy: "an uncertain prediction",
  bald: "disagreement between the draws",
  mean_std: "probabilities that vary between the draws",
  variation_ratio: "a label that is probably wrong",
  std: "a wide predictive distribution",
  aleatoric_std: "high expected noise",
  epistemic_std: "disagreement between the draws",
  residual: "a combination of {input} never seen in training",
  mahalanobis: "{input} far from the training data",
  input_neighbours: "no training row with similar {input}",
  feature_neighbours: "no training row with similar network features",
  cosine_neighbours: "no training row with similar encoder features",
  feature_gaussian: "network features far from every class",
  roughness: "neighbouring pixels that differ as in noise",
};
const POSTERIOR_DETECTORS = new Set(["entropy", "bald", "mean_std", "variation_ratio", "std", "aleatoric_std", "epistemic_std"]);

/** Describe what a detector reacts to; `input` is a plural from `inputWord`. */
export function describeDetector(name, input) {
  return (DETECTORS[name] ?? spaced(name)).replace("{input}", input);
}

/** Name a model's kind of input, as a plural. */
export function inputWord(spec) {
  if (spec.text) return "words";
  if (spec.columns.length) return "columns";
  if (spec.image || (spec.shape.length >= 2 && !spec.dtype.startsWith("int"))) return "pixels";
  return "numbers";
}

/**
 * Judge how far an answer can be trusted: `kind` ("good", "check" or "bad"), `word`, and `reason` in sentences.
 * `manifest` belongs to the version that answered.
 */
export function verdict(row, answer, manifest) {
  const { summary, reason, isSure } = manifest.task === "regression" ? describeTarget(row, answer, manifest) : describeLabel(row, answer);
  if (row.flag) {
    const isUncertain = POSTERIOR_DETECTORS.has(strongestDetector(row, manifest)?.[0]);
    return isUncertain
      ? { kind: "check", word: "Check this", reason: `Less certain than usual. Have someone check. ${summary}.` }
      : { kind: "bad", word: "Unfamiliar input", reason: `The ${inputWord(manifest.input)} differ from the training data, so do not rely on this answer. ${summary}.` };
  }
  if (row.abstain === true) return { kind: "check", word: "Check this", reason: `Abstained: more than ${percent(answer.risk)} of answers this uncertain may be wrong. ${summary}.` };
  const sentences = `${summary}. ${reason}.`;
  return isSure ? { kind: "good", word: "Looks reliable", reason: `${sentences} Nothing unusual found in the input.` } : { kind: "check", word: "Check this", reason: sentences };
}

/** Find the detector in the flag with the smallest p-value: [name, result], or undefined. */
const strongestDetector = (row, manifest) =>
  Object.entries(row.detectors).filter(([name]) => manifest.detectors.combined.includes(name)).sort(([, a], [, b]) => a.p_value - b.p_value)[0];

function describeLabel(row, answer) {
  const p = Math.max(...row.probabilities);
  const alternatives = (row.prediction_set ?? []).filter((name) => name !== row.label);
  const isSure = alternatives.length === 0 && p > 0.9;
  const suffix = alternatives.length === 0 || row.flag ? "" : alternatives.length > 4 ? `, or one of ${alternatives.length} others` : `, or ${alternatives.map(isolated).join(" or ")}`;
  const prefix = row.flag ? "Best guess: " : p > 0.99 ? "Almost certainly " : p > 0.9 && !suffix ? "Most likely " : "";
  const share = row.entropy > 0 ? row.bald / row.entropy : 0;
  let reason;
  if (answer.num_samples === 1) reason = "A single draw cannot measure uncertainty";
  else if (row.entropy < 0.1) reason = "The draws agree, each with high confidence";
  else if (isSure) reason = share > 0.15 ? "Most draws agree" : "The draws agree";
  else if (share > 0.4) reason = "The draws disagree: labels for similar rows would help";
  else if (share > 0.15) reason = "The draws disagree somewhat, and each is uncertain";
  else reason = "Truly ambiguous: more labels will not help";
  return { summary: `${prefix}${isolated(row.label)} (${percent(p)})${suffix}`, reason, isSure };
}

function describeTarget(row, answer, manifest) {
  const [low, high] = row.interval;
  const isBounded = low !== null || high !== null;
  const range = low === null ? `up to ${number(high, 4)}` : high === null ? `${number(low, 4)} or more` : `${number(low, 4)} to ${number(high, 4)}`;
  const interval = isBounded ? `${percent(answer.coverage)} interval: ${range}` : `too few calibration rows for a ${percent(answer.coverage)} interval`;
  const share = row.epistemic_std === null ? null : row.epistemic_std ** 2 / row.std ** 2;
  const reason =
    share === null ? "A single draw cannot measure uncertainty"
    : share > 0.5 ? "Mostly model uncertainty: labels for similar rows would help"
    : share > 0.15 ? "Mostly noise in the data, with some model uncertainty"
    : "Mostly noise in the data";
  const target = manifest.output.target;
  const prefix = row.flag ? "Best guess:" : target ? `${target} is about` : "About";
  return { summary: `${prefix} ${number(row.mean, 4)}${row.flag ? "" : ` (${interval})`}`, reason, isSure: isBounded && !(share > 0.5) };
}

/** Describe the flag in numbers. */
export function describeFlag(row, answer, manifest) {
  const [name, strongest] = strongestDetector(row, manifest) ?? [null, null];
  const detector = strongest ? ` Strongest detector: ${spaced(name)}, p = ${number(strongest.p_value, 2)}${strongest.fired ? ", fired" : ""}.` : "";
  const rate = answer.fdr === null ? `At most ${percent(answer.fpr)} of usual rows are flagged` : `At most ${percent(answer.fdr)} of flags are false`;
  return `Flagged: ${row.flag ? "yes" : "no"}, p = ${number(row.p_value, 2)}.${detector} ${rate}.`;
}

/** Wrap a name in Unicode isolates, so that right-to-left letters do not reorder the sentence. */
const isolated = (name) => `\u2068${name}\u2069`;

const spaced = (name) => name.replaceAll("_", " ");
