// Quality figures: their names, their format and which direction is better.

import { number } from "./format.js";

/** Format a share with one decimal, enough to tell two versions apart. */
export const share = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)}\u00a0%`);

/** Format a difference with its sign; differences of shares are in percentage points. */
export const signed = (x, write) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${write(Math.abs(x)).replace("\u00a0%", " points")}`;

const FIGURES = {
  accuracy: ["Accuracy", share, "higher", "share of correct labels"],
  reliable_accuracy: ["Accuracy of reliable answers", share, "higher", "share of correct labels among the answers that the page calls reliable"],
  log_likelihood: ["Log-likelihood", number, "higher", "per row, in nats"],
  brier: ["Brier score", number, "lower", "squared error of the probabilities"],
  expected_calibration_error: ["Calibration error", number, "lower", "mean gap between confidence and accuracy"],
  rmse: ["Error (RMSE)", number, "lower", "root mean squared error, in the target's units"],
  crps: ["CRPS", number, "lower", "distance between the predictive distribution and the true value"],
  std: ["Standard deviation", number, null, "mean predicted standard deviation"],
  "interval_coverage_at_95": ["Coverage of 95 % intervals", share, "closer to 95 %", "share of targets inside"],
  "interval_width_at_95": ["Width of 95 % intervals", number, "lower", "mean width, in the target's units"],
  "uniform_noise_flagged_at_05": ["Noise flagged", share, "higher", "uniform noise, at a false-positive rate of 5 %"],
};

/** Map the keys that a manifest and a report use for the same figure to a shared key. */
export function plainKey(key) {
  if (key === "flag_rate_at_05") return "flagged_at_0.05";
  return key.replace(/^test_/, "");
}

/** Describe a figure: `name`, the formatter `write`, the `better` direction (or null) and its `meaning`. */
export function describeFigure(key) {
  const plain = plainKey(key);
  if (Object.hasOwn(FIGURES, plain)) {
    const [name, write, better, meaning] = FIGURES[plain];
    return { name, write, better, meaning };
  }
  const flagged = /^flagged_at_(.+)$/.exec(plain);
  if (flagged) {
    const rate = `${Number((100 * Number(flagged[1])).toPrecision(3))}\u00a0%`;
    return { name: `Test rows flagged at ${rate}`, write: share, better: `closer to ${rate}`, meaning: "share flagged at this false-positive rate" };
  }
  const auroc = /^(.+)_flag_auroc$/.exec(plain);
  if (auroc) {
    return { name: `Flag AUROC, ${auroc[1].replaceAll("_", " ")} rows`, write: (x) => number(x, 4), better: "higher", meaning: "1 separates all of them from test rows, 0.5 is chance" };
  }
  return { name: plain.replaceAll("_", " "), write: number, better: null, meaning: "" };
}

/** Merge the figures of a manifest and a report's summary: [{key, published, reported, interval}]. */
export function mergeFigures(manifest, summary = null, intervals = null) {
  const figures = new Map();
  const entry = (key) => {
    const plain = plainKey(key);
    if (!figures.has(plain)) figures.set(plain, { key: plain, published: null, reported: null, interval: null });
    return figures.get(plain);
  };
  for (const [key, value] of Object.entries(manifest?.quality ?? {})) entry(key).published = value;
  for (const [key, value] of Object.entries(summary ?? {})) {
    entry(key).reported = value;
    entry(key).interval = intervals?.[key] ?? null;
  }
  return [...figures.values()];
}

/** Describe the main figure of a version next to its baselines, "Accuracy 79.3 %; boosting 80.7, constant 75"; null without one. */
export function compareBaselines(quality, baselines) {
  const key = ["test_accuracy", "test_rmse"].find((name) => quality?.[name] !== undefined);
  if (!key) return null;
  const { name, write, better } = describeFigure(key);
  const sign = better === "higher" ? -1 : 1;
  const others = Object.keys(baselines ?? {}).filter((other) => baselines[other][key] !== undefined).sort((a, b) => sign * (baselines[a][key] - baselines[b][key])); // the best first
  const texts = others.map((other) => `${other} ${write(baselines[other][key]).replace("\u00a0%", "")}`);
  return `${name} ${write(quality[key])}${texts.length ? `; ${texts.join(", ")}` : ""}`;
}
