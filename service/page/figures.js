// Figures of quality: what people call them, how they are written, and what is better.

import { number } from "./dom.js";

/** A share with two digits, so that two versions can be told apart. */
export const share = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(2)}\u00a0%`);

const FIGURES = {
  accuracy: ["Accuracy", share, "more", "share of the labels that are right"],
  log_likelihood: ["Log-likelihood", number, "more", "of what was observed, in nats a row"],
  brier: ["Brier score", number, "less", "squared error of the probabilities"],
  expected_calibration_error: ["Calibration error", number, "less", "how far confidence is from accuracy, on average"],
  adaptive_calibration_error: ["Calibration error, adaptive", number, "less", "the same, in bins of as many rows each"],
  classwise_calibration_error: ["Calibration error by class", number, "less", "the same of each class's probability, on average"],
  rmse: ["Error (RMSE)", number, "less", "root of the mean squared error, in the target's units"],
  crps: ["CRPS", number, "less", "distance of the predictive distribution from what was observed"],
  std: ["Standard deviation", number, null, "that is predicted, on average"],
  "interval_coverage_at_95": ["Coverage of 95 % intervals", share, "nearer to 95 %", "share of the targets inside"],
  "interval_width_at_95": ["Width of 95 % intervals", number, "less", "on average, in the target's units"],
  "uniform_noise_flagged_at_05": ["Noise that is flagged", share, "more", "uniform noise, at a false-positive rate of 5 %"],
};

/** Figures by one key each: those of a publication and of a report that are the same have the same key. */
export function plainKey(key) {
  if (key === "flag_rate_at_05") return "flagged_at_0.05";
  return key.replace(/^test_/, "");
}

/** What a figure is: `name`, how to `write` it, which is `better` (null where neither is), and what it `says`. */
export function figureOf(key) {
  const plain = plainKey(key);
  if (Object.hasOwn(FIGURES, plain)) {
    const [name, write, better, says] = FIGURES[plain];
    return { name, write, better, says };
  }
  const flagged = /^flagged_at_(.+)$/.exec(plain);
  if (flagged) {
    const rate = `${Number((100 * Number(flagged[1])).toPrecision(3))}\u00a0%`;
    return { name: `Usual rows flagged at ${rate}`, write: share, better: `nearer to ${rate}`, says: "test rows that are flagged at this false-positive rate" };
  }
  const told = /^(.+)_flag_auroc$/.exec(plain);
  if (told) {
    return { name: `Flag against ${told[1].replaceAll("_", " ")} rows`, write: (x) => number(x, 4), better: "more", says: "AUROC: 1 tells all of them from test rows, .5 is chance" };
  }
  return { name: plain.replaceAll("_", " "), write: number, better: null, says: "" };
}

/** The figures of a version: [{key, published, reported, interval}], of its manifest and its report's summary. */
export function figuresOf(manifest, summary = null, intervals = null) {
  const found = new Map();
  const at = (key) => {
    const plain = plainKey(key);
    if (!found.has(plain)) found.set(plain, { key: plain, published: null, reported: null, interval: null });
    return found.get(plain);
  };
  for (const [key, value] of Object.entries(manifest?.quality ?? {})) at(key).published = value;
  for (const [key, value] of Object.entries(summary ?? {})) {
    at(key).reported = value;
    at(key).interval = intervals?.[key] ?? null;
  }
  return [...found.values()];
}
