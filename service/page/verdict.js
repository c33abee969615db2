// Judge answers: a verdict, and reasons that follow from the same cause. Pure functions.

import { number, percent } from "./format.js";

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
  roughness: "neighbouring pixels that differ as in noise",
};
const POSTERIOR_DETECTORS = new Set(["entropy", "bald", "mean_std", "variation_ratio", "std", "aleatoric_std", "epistemic_std"]);
const FAR = 4; // standard deviations
const SURE = 0.9; // probability of a reliable answer
const MIN_FALL = 0.1; // nats
const MAX_COLUMNS = 4; // named in a sentence
const MAX_NAMES = 4; // alternatives named in a sentence

const VERDICTS = {
  reliable: ["good", "Looks reliable"],
  unsure: ["check", "Check this answer"],
  abstained: ["check", "Too uncertain to answer"],
  uncertain: ["check", "Less certain than usual"],
  ordinary: ["check", "Unusually ordinary input"],
  training: ["check", "Known training row"],
  unfamiliar: ["bad", "Unfamiliar input"],
};

/** Describe what a detector reacts to. */
export const describeDetector = (name, spec) => (DETECTORS[name] ?? name.replaceAll("_", " ")).replace("{input}", inputWord(spec));

/** Name a model's kind of input, as a plural. */
function inputWord(spec) {
  if (spec.text) return "words";
  if (spec.columns.length) return "columns";
  if (spec.image || (spec.shape.length >= 2 && !spec.dtype.startsWith("int"))) return "pixels";
  return "numbers";
}

/**
 * Judge how far an answer can be trusted: `kind` (good, check or bad), `cause`, `word`, `answer` and `reasons`.
 * `row` is one of the answer's predictions, `manifest` describes the version that answered, and `input` is the row sent.
 */
export function judge(row, answer, manifest, input = null) {
  const { summary, certainty, isSure } = manifest.task === "regression" ? describeTarget(row, answer, manifest) : describeLabel(row, answer);
  const cause = row.flag ? findCause(row, manifest) : row.abstain ? "abstained" : isSure ? "reliable" : "unsure";
  const reasons = {
    reliable: () => [`${certainty}.`, "Nothing unusual found in the input."],
    unsure: () => [`${certainty}.`],
    abstained: () => [`More than ${percent(answer.risk)} of answers this uncertain may be wrong.`],
    uncertain: () => [`${certainty}.`, "Have someone check."],
    ordinary: () => ["The input is smoother or closer to the average than new rows usually are."],
    training: () => ["The model was trained on this row, so a correct answer proves little."],
    unfamiliar: () => [...describeInput(row, manifest, input), "Do not rely on this answer."],
  };
  const [kind, word] = VERDICTS[cause];
  return { kind, cause, word, answer: row.label ?? number(row.mean, 4), reasons: [`${summary}.`, ...reasons[cause]()] };
}

/** Find the cause of a flag: the detectors of the input, or those of the uncertainty, whichever have the smallest p-value. */
function findCause(row, manifest) {
  const combined = Object.entries(row.detectors).filter(([name]) => manifest.detectors.combined.includes(name)).sort(([, a], [, b]) => a.p_value - b.p_value);
  const [ofInput, ofPosterior] = [false, true].map((isPosterior) => combined.find(([name]) => POSTERIOR_DETECTORS.has(name) === isPosterior));
  if (!row.missing?.length && ofPosterior && !(ofInput?.[1].p_value <= ofPosterior[1].p_value)) return "uncertain";
  const { detectors, nearest } = row.explanation ?? {};
  if (nearest?.[0]?.distance < 1e-6) return "training";
  const shares = Object.entries(detectors ?? {}).filter(([name]) => !POSTERIOR_DETECTORS.has(name)).sort(([, a], [, b]) => b.share - a.share);
  return shares[0]?.[1].low && !row.missing?.length ? "ordinary" : "unfamiliar";
}

/** Explain what is unfamiliar about the input. */
function describeInput(row, manifest, input) {
  const { columns } = manifest.input, { unseen, columns: falls, detectors } = row.explanation ?? {};
  const sentences = (unseen ?? []).map((column) => `“${input?.[column]}” never appeared in ${column} during training.`);
  if (row.missing?.length) sentences.push(`${list(row.missing)} ${row.missing.length > 1 ? "are" : "is"} missing, which never happened in training.`);
  const numeric = columns.filter(({ kind }) => kind === "numeric");
  const far = numeric.map((column) => ({ ...column, value: input?.[column.name], distance: Math.abs(input?.[column.name] - column.mean) / column.std })).filter(({ value, distance }) => typeof value === "number" && distance > FAR);
  far.sort((a, b) => b.distance - a.distance);
  const describe = ({ name, value, mostly }) => `${name} ${number(value)}${mostly ? ` (usually ${number(mostly[0])} to ${number(mostly[1])})` : ""}`;
  if (far.length > MAX_COLUMNS) sentences.push(`${far.length === numeric.length ? "All" : `${far.length} of`} ${numeric.length} numeric columns are far outside the training data, for example ${far.slice(0, 2).map(describe).join(" and ")}.`);
  else if (far.length) sentences.push(`Far outside the training data: ${far.map(describe).join(", ")}.`);
  if (sentences.length) return sentences;
  const fallen = (falls ?? []).filter(({ fall }) => fall > MIN_FALL).slice(0, MAX_COLUMNS);
  if (fallen.length) return [`Most unusual columns: ${fallen.map(({ column }) => column).join(", ")}.`];
  if (falls) return ["No single column explains it: the combination is unusual."];
  const strongest = Object.entries(detectors ?? row.detectors).filter(([name]) => manifest.detectors.combined.includes(name) && !POSTERIOR_DETECTORS.has(name)).sort(([, a], [, b]) => (detectors ? b.share - a.share : a.p_value - b.p_value))[0];
  return [strongest ? `Main reason: ${describeDetector(strongest[0], manifest.input)}.` : `The ${inputWord(manifest.input)} differ from the training data.`];
}

const list = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]);

function describeLabel(row, answer) {
  const p = Math.max(...row.probabilities);
  const alternatives = (row.prediction_set ?? []).filter((name) => name !== row.label);
  const isSure = alternatives.length === 0 && p > SURE;
  const suffix = alternatives.length === 0 || row.flag ? "" : alternatives.length > MAX_NAMES ? `, or one of ${alternatives.length} others` : `, or ${alternatives.map(isolated).join(" or ")}`;
  const share = row.entropy > 0 ? row.bald / row.entropy : 0;
  const certainty =
    answer.num_samples === 1 ? "A single draw cannot measure uncertainty"
    : row.entropy < 0.1 ? "The draws agree, each with high confidence"
    : isSure ? (share > 0.15 ? "Most draws agree" : "The draws agree")
    : share > 0.4 ? "The draws disagree: labels for similar rows would help"
    : share > 0.15 ? "The draws disagree somewhat, and each is uncertain"
    : "Truly ambiguous: more labels will not help";
  return { summary: `${row.flag ? "Best guess: " : ""}${isolated(row.label)} (${percent(p)})${suffix}`, certainty, isSure };
}

function describeTarget(row, answer, manifest) {
  const [low, high] = row.interval;
  const isBounded = low !== null || high !== null;
  const range = low === null ? `up to ${number(high, 4)}` : high === null ? `${number(low, 4)} or more` : `${number(low, 4)} to ${number(high, 4)}`;
  const interval = isBounded ? `${percent(answer.coverage)} interval: ${range}` : `too few calibration rows for a ${percent(answer.coverage)} interval`;
  const share = row.epistemic_std === null ? null : row.epistemic_std ** 2 / row.std ** 2;
  const certainty =
    share === null ? "A single draw cannot measure uncertainty"
    : share > 0.5 ? "Mostly model uncertainty: labels for similar rows would help"
    : share > 0.15 ? "Mostly noise in the data, with some model uncertainty"
    : "Mostly noise in the data";
  const { target } = manifest.output;
  const prefix = row.flag ? "Best guess:" : target ? `${target} is about` : "About";
  return { summary: `${prefix} ${number(row.mean, 4)}${row.flag ? "" : ` (${interval})`}`, certainty, isSure: isBounded && !(share > 0.5) };
}

/**
 * Split the uncertainty of a row into shares of a bar: noise in the data, disagreement of the model's draws, and, if
 * the input is unfamiliar, how far its p-value is below the flag's limit. Entropies are relative to the number of classes.
 */
export function splitUncertainty(row, answer, manifest, cause) {
  const unfamiliar = cause === "unfamiliar" ? Math.max(0, 1 - row.p_value / answer.fpr) : 0;
  const isRegression = manifest.task === "regression";
  const total = isRegression ? row.std ** 2 : Math.log(row.probabilities.length);
  const model = (isRegression ? (row.epistemic_std ?? 0) ** 2 : Math.max(0, row.bald ?? 0)) / total;
  const data = isRegression ? 1 - model : Math.max(0, row.entropy / total - model);
  const parts = [
    { kind: "data", label: "noise in the data", share: data },
    { kind: "model", label: "model uncertainty", share: model },
    ...(isRegression ? [] : [{ kind: "certain", label: "certain", share: Math.max(0, 1 - data - model) }]),
  ].map((part) => ({ ...part, share: part.share * (1 - unfamiliar) }));
  return unfamiliar ? [{ kind: "unfamiliar", label: "unfamiliar", share: unfamiliar }, ...parts] : parts;
}

/** Describe how often verdicts like this one were right on test data, or return null. */
export function describeRecord({ cause }, answer, { quality }) {
  if (cause !== "reliable") return null;
  const accuracy = quality?.test_reliable_accuracy, coverage = quality?.test_interval_coverage_at_95;
  if (accuracy !== undefined) return accuracy === 1 ? "On test data, all such answers were right." : `On test data, ${percent(accuracy)} of such answers were right.`;
  return coverage !== undefined && answer.coverage === 0.95 ? `On test data, ${percent(coverage)} of such intervals contained the true value.` : null;
}

/** Wrap a name in Unicode isolates, so that right-to-left letters do not reorder the sentence. */
const isolated = (name) => `\u2068${name}\u2069`;
