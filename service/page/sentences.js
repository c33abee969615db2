// What an answer means, in words.

import { number, percent } from "./dom.js";

/** What each detector looks at; `{input}` becomes what the model takes: the pixels, the columns, ... */
const DETECTORS = {
  entropy: "how unsure the prediction is",
  bald: "how much the draws disagree",
  mean_std: "how far the draws' probabilities are spread",
  variation_ratio: "how probable it is that the label is wrong",
  std: "how wide the prediction is",
  aleatoric_std: "how much noise the draws expect",
  epistemic_std: "how much the draws disagree",
  residual: "what of {input} the training data cannot explain",
  mahalanobis: "how far {input} are from the training data, as those vary",
  input_neighbours: "whether any training row has {input} like these",
  feature_neighbours: "whether the network sees in it what it saw in any training row",
  cosine_neighbours: "whether the encoder sees in it what it saw in any training row",
  feature_gaussian: "how far what the network sees in it is from every class",
  roughness: "whether neighbouring pixels differ as noise does",
};
const OF_THE_POSTERIOR = new Set(["entropy", "bald", "mean_std", "variation_ratio", "std", "aleatoric_std", "epistemic_std"]);

/** What a detector looks at, of what a model takes. */
export function detectorSays(name, input) {
  return (DETECTORS[name] ?? name.replaceAll("_", " ")).replace("{input}", input);
}

/** What a model takes, as a plural: the pixels, the columns. */
export function inputWord(spec) {
  if (spec.text) return "the words";
  if (spec.columns.length) return "the columns";
  if (spec.image || (spec.shape.length >= 2 && !spec.dtype.startsWith("int"))) return "the pixels";
  return "the numbers";
}

/**
 * How far an answer is to be trusted: `kind` ("good", "check" or "bad"), `word`, and `why`, in plain words.
 * `manifest` is of the version that answered.
 */
export function verdict(row, answer, manifest) {
  const said = manifest.task === "regression" ? ofTarget(row, answer, manifest) : ofLabel(row, answer);
  if (row.flag) {
    const input = inputWord(manifest.input);
    const isDoubt = OF_THE_POSTERIOR.has(strongestOf(row, manifest)?.[0]);
    return isDoubt
      ? { kind: "check", word: "Check this", why: `It is less sure of this than it is of usual data: look yourself. ${said.what}.` }
      : { kind: "bad", word: "Unlike anything I know", why: `${capital(input)} are unlike all that it learnt from: do not rely on the answer. ${said.what}.` };
  }
  if (row.abstain === true) return { kind: "check", word: "Check this", why: `Undecided: of answers as unsure as this, more than ${percent(answer.risk)} may be wrong. ${said.what}.` };
  const rest = `${said.what}: ${said.why}.`;
  return said.isSure ? { kind: "good", word: "Trust this", why: `${rest} ${capital(inputWord(manifest.input))} are like those it learnt from.` } : { kind: "check", word: "Check this", why: rest };
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** The combined detector that finds a row strangest: [name, what it found]; undefined where there is none. */
const strongestOf = (row, manifest) =>
  Object.entries(row.detectors).filter(([name]) => manifest.detectors.combined.includes(name)).sort(([, a], [, b]) => a.p_value - b.p_value)[0];

function ofLabel(row, answer) {
  const p = Math.max(...row.probabilities);
  const others = (row.prediction_set ?? []).filter((name) => name !== row.label);
  const also = others.length === 0 || row.flag ? "" : others.length > 4 ? ` or one of ${others.length} others` : ` or ${others.map(asWritten).join(" or ")}`;
  const name = asWritten(row.label);
  const what = row.flag ? `Its guess is ${name}` : p > 0.99 ? `Almost certainly ${name}` : p > 0.9 && !also ? `Most likely ${name}` : `Perhaps ${name}${also}`;
  const share = row.entropy > 0 ? row.bald / row.entropy : 0;
  const isSure = others.length === 0 && p > 0.9;
  let why;
  if (answer.num_samples === 1) why = "one draw cannot say how sure it is";
  else if (row.entropy < 0.1) why = "the draws agree, and each is sure";
  else if (isSure) why = share > 0.15 ? "most draws agree" : "the draws agree";
  else if (share > 0.4) why = "the draws disagree: labels of rows like it would teach the model";
  else if (share > 0.15) why = "the draws disagree somewhat, and each is unsure by itself";
  else why = "the draws agree that it is ambiguous: more labels would not help";
  return { what: `${what} (${percent(p)})`, why, isSure };
}

function ofTarget(row, answer, manifest) {
  const [low, high] = row.interval;
  const isBounded = low !== null || high !== null;
  const between = isBounded
    ? `with ${percent(answer.coverage)} between ${low === null ? "minus infinity" : number(low, 4)} and ${high === null ? "infinity" : number(high, 4)}`
    : `no interval has a coverage of ${percent(answer.coverage)} with so few calibration rows`;
  const share = row.epistemic_std === null ? null : row.epistemic_std ** 2 / row.std ** 2;
  const why =
    share === null ? "one draw cannot say how sure it is"
    : share > 0.5 ? "most of the doubt is the model's: the draws disagree, and labels of rows like it would teach it"
    : share > 0.15 ? "the doubt is the data's noise, and in part the model's own"
    : "the doubt is the data's noise: the draws agree";
  const name = manifest.output.target ?? "it";
  const about = row.flag ? "Its guess is" : name === "it" ? "About" : `${name} is about`;
  return { what: `${about} ${number(row.mean, 4)}${row.flag ? "" : `, ${between}`}`, why, isSure: isBounded && !(share > 0.5) };
}

/** What the flag was made of, in numbers. */
export function flagSays(row, answer, manifest) {
  const [name, strongest] = strongestOf(row, manifest) ?? [null, null];
  const of = strongest ? `; ${label(name)} alone: p = ${number(strongest.p_value, 2)}${strongest.fired ? ", which fired" : ""}` : "";
  const rate = answer.fdr === null ? `Of usual rows at most ${percent(answer.fpr)} are flagged` : `False flags are at most ${percent(answer.fdr)}`;
  return `Flagged: ${row.flag ? "yes" : "no"}, p = ${number(row.p_value, 2)}${of}. ${rate}.`;
}

/** A name whose letters may run from right to left, and leave those around it as they are. */
const asWritten = (name) => `\u2068${name}\u2069`;

const label = (name) => name.replaceAll("_", " ");
