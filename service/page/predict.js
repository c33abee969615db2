// Predictions for the view Try.

import { request, requestJson, ServiceError } from "./api.js";
import { useEffect, useRef, useState } from "./components.js";

const RETRY_MS = 1000; // after a 429
const MAX_SAMPLES = 300_000; // per-draw numbers requested for plots
const MAX_EXAMPLES = 12;
const MAX_EXPLAINED = 10_000; // numbers of a row whose explanation is always requested

/**
 * Predict rows or files, and explain a single row. Invalid files are skipped: `indices` are the predicted rows and
 * `rejections` the messages about the others.
 */
export async function predict({ rows, files, fields, manifest }) {
  const size = manifest.input.shape.reduce((a, b) => a * b, 1);
  const return_samples = rows.length * fields.num_samples * (manifest.output.classes?.length ?? 2) <= MAX_SAMPLES;
  const explain = rows.length === 1 && size <= MAX_EXPLAINED;
  const sent = await sendRows(files, rows, { ...fields, return_samples, explain });
  const [row] = sent.answer.predictions;
  // The explanation of a long row is large, so it is requested only if the row is flagged.
  if (rows.length > 1 || explain || !row.flag) return sent;
  return sendRows(files, rows, { ...fields, version: sent.answer.version, return_samples, explain: true });
}

async function sendRows(files, rows, fields) {
  let indices = rows.map((_, i) => i);
  const rejections = [];
  for (;;) {
    try {
      if (!files) return { answer: await requestJson("predict", { method: "POST", json: { ...fields, inputs: rows } }), indices, rejections };
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
      for (const i of indices) form.append("inputs", files[i]);
      return { answer: await (await request("predict", { method: "POST", body: form })).json(), indices, rejections };
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

/** Predict one query at a time, the latest next: {result, error, isPending, submit}. `submit(null)` clears the result. */
export function usePrediction() {
  const [state, setState] = useState({ result: null, error: null, isPending: false });
  const queue = useRef({ next: undefined, isRunning: false, isMounted: true });
  useEffect(() => () => (queue.current.isMounted = false), []);
  const submit = async (query) => {
    const work = queue.current;
    work.next = query;
    if (work.isRunning) return;
    work.isRunning = true;
    while (work.next !== undefined && work.isMounted) {
      const current = work.next;
      work.next = undefined;
      if (!current || current.error) {
        setState({ result: null, error: current?.error ?? null, isPending: false });
        continue;
      }
      setState((before) => ({ ...before, isPending: true }));
      const start = performance.now();
      try {
        const sent = await predict(current);
        if (work.next === undefined || work.next) setState({ result: { ...sent, query: current, milliseconds: performance.now() - start }, error: null, isPending: work.next !== undefined });
      } catch (error) {
        const isBusy = error.status === 429;
        setState({ result: null, error: isBusy ? new ServiceError(429, `The service is busy. Retrying. ${error.message}`) : error, isPending: isBusy });
        if (!(error instanceof ServiceError)) reportError(error);
        if (!isBusy) continue;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        work.next ??= current;
      }
    }
    work.isRunning = false;
  };
  return { ...state, submit };
}

/**
 * Find training rows as examples: all `rows`, and the `chosen` ones with their predictions. Classifiers have one for each of up to 12 labels, if possible unflagged and complete;
 * regressions have three across the range of predictions. Older versions have none.
 */
export async function findExamples(model, version, { task }) {
  const { inputs } = await requestJson("predict/examples", { query: { model, version } });
  if (!inputs.length) return { rows: [], chosen: [] };
  const { predictions } = await requestJson("predict", { method: "POST", json: { model, version, inputs } });
  const rows = predictions.map((row, i) => ({ row: inputs[i], flag: row.flag, p: row.p_value, label: row.label, mean: row.mean, gaps: Object.values(inputs[i]).filter((cell) => cell === null).length }));
  const usual = [...rows].sort((a, b) => a.flag - b.flag || a.gaps - b.gaps || b.p - a.p);
  const chosen = task === "regression" ? spread(usual.filter(({ flag, gaps }) => flag === usual[0].flag && gaps === usual[0].gaps)) : [...new Map([...usual].reverse().map((row) => [row.label, row])).values()].sort((a, b) => (a.label < b.label ? -1 : 1)).slice(0, MAX_EXAMPLES);
  return { rows: inputs, chosen };
}

/** Select the rows with the lowest, median and highest mean. */
function spread(rows) {
  const sorted = [...rows].sort((a, b) => a.mean - b.mean);
  return [...new Set([sorted[0], sorted[Math.floor(sorted.length / 2)], sorted.at(-1)])].filter(Boolean);
}
