// The view Live: the service's metrics and a model's drift, polled while the page is visible.

import { changeKey, request, ServiceError } from "./api.js";
import { duration, field, fill, h, noModel, notice, number, percent } from "./dom.js";
import * as plots from "./liveplots.js";
import { expectedBand, History, parseMetrics, quantile } from "./metrics.js";

const POLL_MS = 5000;
const HOUR_MS = 3_600_000;
const MAX_SPANS = 60; // per plot
const FLAG_AT = 0.05; // the p-value of the drift test, independent of the fpr of requests
const HISTOGRAMS = ["dubito_request_seconds", "dubito_flag_p_value", "dubito_entropy", "dubito_std"];
const COUNTERS = [...HISTOGRAMS.map((name) => `${name}_bucket`), "dubito_requests_total", "dubito_rows_total", "dubito_flags_total", "dubito_draws_made_total", "dubito_draws_reused_total"];
const GAUGES = ["dubito_queued_row_draws", "dubito_queued_requests", "dubito_drift_evidence_nats", "dubito_drift_alarm", "dubito_calibration_rows"];
// Routes that only read the state of the service.
const READ_ROUTES = /^\/($|page\/|metrics|health|models|docs|redoc|openapi|jobs|admin|v2\/health|ping|version)/;

const history = new History({ names: [...COUNTERS, ...GAUGES], counters: COUNTERS, maxAgeMs: HOUR_MS });
let drifts = []; // {time, model, version, drift} of the last hour
let periodMs = HOUR_MS / 12;
let selectedRoute = "";

/** Show the view. */
export async function show(view, app) {
  if (!app.model) {
    fill(view, noModel("Live", app));
    return () => {};
  }
  const model = app.model; // app.model may change during a request
  const period = h("select", { onchange: () => { periodMs = Number(period.value); draw(); } },
    [[HOUR_MS / 12, "last 5 minutes"], [HOUR_MS / 4, "last 15 minutes"], [HOUR_MS, "last hour"]].map(([ms, name]) => h("option", { value: ms, selected: ms === periodMs }, name)));
  const route = h("select", { onchange: () => { selectedRoute = route.value; draw(); } });
  const state = h("p", { class: "quiet", id: "live-state" });
  const troublePlace = h("div");
  const emptyPlace = h("p", { class: "quiet" });
  const tilesPlace = h("dl", { class: "tiles" });
  const driftPlace = h("div");
  const figuresPlace = h("div");
  const bandPlace = h("p", { class: "band" });
  const places = Object.fromEntries(["requests", "latency", "flags", "pValues", "evidence", "doubt", "queue", "draws"].map((name) => [name, h("div", { id: `live-${name}` })]));
  let timer = null;
  let hasLeft = false;
  let description = null;
  const problems = { model: null, metrics: null, reset: null }; // {text, action: [name, function]} by request

  fill(view, h("h1", {}, "Live"), h("div", { class: "live-options" }, field("Period", period), field("Requests", route)), state, troublePlace, tilesPlace,
    h("section", { class: "card", "aria-label": "Requests" }, h("h2", {}, "The service"), emptyPlace, h("div", { class: "plots" }, places.requests, places.latency, places.queue, places.draws)),
    h("section", { class: "card", "aria-label": "Rows" }, h("h2", {}, `Rows of ${model}`), driftPlace, figuresPlace, bandPlace, h("div", { class: "plots" }, places.flags, places.pValues, places.evidence, places.doubt)));
  document.addEventListener("visibilitychange", onVisibilityChange);
  draw();
  poll();

  function onVisibilityChange() {
    clearTimeout(timer);
    if (document.hidden) state.textContent = "Paused while this page is hidden.";
    else poll();
  }

  async function poll() {
    clearTimeout(timer);
    const time = Date.now();
    await Promise.all([pollMetrics(time), pollModel(time)]);
    if (hasLeft) return;
    draw();
    clearTimeout(timer); // a concurrent poll may have set it
    if (!document.hidden) timer = setTimeout(poll, Math.max(POLL_MS / 5, time + POLL_MS - Date.now()));
  }

  async function pollMetrics(time) {
    try {
      const text = await (await request("metrics")).text();
      if (history.snapshots.length && time <= history.snapshots.at(-1).time) return;
      history.add(time, parseMetrics(text));
      problems.metrics = null;
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      problems.metrics = error.status === 403 ? { ...describeProblem(error), text: `Cannot show requests, latency, p-values and uncertainty: ${error.message}` } : describeProblem(error);
    }
  }

  async function pollModel(time) {
    try {
      description = await app.describe(model, { fresh: true });
      problems.model = null;
      if (!description.drift) return;
      drifts.push({ time, model, version: description.serving, drift: description.drift });
      drifts = drifts.filter((entry) => entry.time > time - HOUR_MS);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      problems.model = describeProblem(error);
    }
  }

  function describeProblem(error) {
    if (error.status === 0) return { text: `Cannot reach the service. Is it running, and are you online? The page retries every ${POLL_MS / 1000} seconds and shows older data until then.`, action: ["Try now", poll] };
    if (error.status === 403) return { text: error.message, action: ["Enter another key", async () => (await changeKey(), poll())] };
    return { text: error.message, action: ["Try now", poll] };
  }

  async function resetDrift() {
    try {
      await request(`admin/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(description.serving)}/drift/reset`, { method: "POST" });
      problems.reset = null;
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      problems.reset = error.status === 404 ? { text: "Resetting the alarm needs an admin key, but the service has none (DUBITO_ADMIN_KEY). A restart resets it too." } : describeProblem(error);
    }
    poll();
  }

  function draw() {
    const snapshots = history.latest(periodMs);
    const actions = new Map(Object.values(problems).filter(Boolean).map(({ text, action }) => [text, action]));
    replaceIfChanged(troublePlace, [...actions].map(([text, action]) => h("div", { class: "trouble" }, notice(text), action && h("button", { type: "button", onclick: action[1] }, action[0]))));
    const latest = Math.max(snapshots.at(-1)?.time ?? 0, drifts.at(-1)?.time ?? 0);
    state.textContent = latest ? `Updated every ${POLL_MS / 1000} seconds, last at ${new Date(latest).toLocaleTimeString()}. The page keeps up to an hour of history.` : "Loading …";
    updateRoutes();
    const tiles = [];
    if (snapshots.length > 1) drawService(snapshots, tiles);
    else emptyPlace.textContent = problems.metrics === null ? "Waiting for a second measurement …" : "";
    if (description) drawRows(snapshots, tiles);
    fill(tilesPlace, tiles.map(([name, value, kind]) => h("div", { class: kind ?? null }, h("dt", {}, name), h("dd", {}, value))));
  }

  /** Add routes that appeared since; none ever disappears. */
  function updateRoutes() {
    const routes = [...new Set(history.find("dubito_requests_total").map((index) => history.series[index].labels.route))].sort();
    const values = ["", "*", ...routes];
    if (route.options.length === values.length) return;
    const name = (value) => ({ "": "all except status requests", "*": "all" })[value] ?? value;
    fill(route, values.map((value) => h("option", { value, selected: value === selectedRoute }, name(value))));
  }

  function drawService(snapshots, tiles) {
    const where = ({ route: name }) => (selectedRoute === "" ? !READ_ROUTES.test(name) : selectedRoute === "*" || name === selectedRoute);
    const counters = history.find("dubito_requests_total", where);
    const spans = toSpans(snapshots);
    const first = snapshots[0], last = snapshots.at(-1);
    const seconds = (last.time - first.time) / 1000;
    const requests = spans.map(({ from, to }) => ({ from, to, statuses: history.increaseBy(from, to, counters, "status") }));
    const all = history.increaseBy(first, last, counters, "status");
    const bins = history.bins(first, last, "dubito_request_seconds", where);
    const [p50, p99] = [0.5, 0.99].map((q) => quantile(bins, q));
    const rate = [...all.values()].reduce((a, b) => a + b, 0) / seconds;
    const errors = [...all].filter(([status]) => !/^[23]/.test(status)).reduce((sum, [, count]) => sum + count, 0);
    const sum = (snapshot, name) => history.gauges(snapshot, name).reduce((total, { value }) => total + value, 0);
    const queued = sum(last, "dubito_queued_row_draws");
    const isIdle = rate === 0 && queued === 0;
    emptyPlace.textContent = isIdle ? `No requests in this period. Send one to ${new URL("predict", document.baseURI)}, or choose a longer period.` : "";
    for (const name of ["requests", "latency", "queue", "draws"]) places[name].hidden = isIdle;
    if (isIdle) return;
    tiles.push(["requests per second", number(rate)], ["error rate", errors === 0 ? "0 %" : percent(errors / (rate * seconds)), errors ? "bad" : null], ["median latency", formatLatency(p50)], ["99 % within", formatLatency(p99)], ["queued row-draws", number(queued)]);
    updateFigure(places.requests, plots.requests(requests));
    updateFigure(places.latency, plots.latency(spans.map(({ from, to }) => {
      const spanBins = history.bins(from, to, "dubito_request_seconds", where);
      return { from, to, count: spanBins.reduce((total, bin) => total + bin.count, 0), p50: quantile(spanBins, 0.5), p99: quantile(spanBins, 0.99) };
    })));
    updateFigure(places.queue, plots.queue(snapshots.map((snapshot) => ({ time: snapshot.time, rowDraws: sum(snapshot, "dubito_queued_row_draws"), requests: sum(snapshot, "dubito_queued_requests") }))));
    const [made, reused] = ["dubito_draws_made_total", "dubito_draws_reused_total"].map((name) => history.find(name));
    updateFigure(places.draws, plots.draws(spans.map(({ from, to }) => ({ from, to, made: history.increase(from, to, made), reused: history.increase(from, to, reused) }))));
  }

  function drawRows(snapshots, tiles) {
    const { drift, manifest, serving } = description;
    const where = (labels) => labels.model === model && labels.version === serving;
    const hasMetrics = snapshots.length > 1;
    const first = snapshots[0], last = snapshots.at(-1);
    if (drift) {
      const rate = drift.expected_flag_rate;
      const gauges = hasMetrics ? history.gauges(last, "dubito_calibration_rows", where) : [];
      const calibration = gauges[0]?.value ?? manifest.detectors.ranking_rows;
      const countFlags = (from, to) => {
        const bins = history.bins(from, to, "dubito_flag_p_value", where);
        return { rows: bins.reduce((sum, bin) => sum + bin.count, 0), flags: bins.filter((bin) => bin.to <= FLAG_AT).reduce((sum, bin) => sum + bin.count, 0), bins };
      };
      if (hasMetrics) {
        const { rows, flags, bins } = countFlags(first, last);
        const band = expectedBand(rate, rows, calibration);
        const spans = toSpans(snapshots).map(({ from, to }) => ({ from, to, ...countFlags(from, to) })).filter((span) => span.rows > 0);
        bandPlace.textContent = drift.rows ? describeFlags(rows, flags, rate, band) : "";
        if (rows) tiles.push([`p-values up to ${FLAG_AT}`, percent(flags / rows), flags / rows > band[1] ? "bad" : null]);
        updateFigure(places.flags, plots.flags(spans.map((span) => ({ ...span, band: expectedBand(rate, span.rows, calibration) })), rate));
        updateFigure(places.pValues, rows ? plots.pValues(bins, rows) : null);
      } else if (drift.flag_rate !== null) tiles.push([`recent p-values up to ${FLAG_AT}`, percent(drift.flag_rate)]);
      tiles.push(["drift", drift.alarm ? "detected" : "none", drift.alarm ? "bad" : null]);
      replaceIfChanged(driftPlace, drift.alarm ? [h("div", { class: "trouble" }, notice(describeAlarm(drift)), h("button", { type: "button", onclick: resetDrift }, "Reset the alarm"))] : []);
      fill(figuresPlace, h("p", {}, describeEvidence(drift)));
      updateFigure(places.evidence, drift.rows ? plots.evidence(evidencePoints(serving, where), drift.alarm_at) : null);
    } else fill(figuresPlace, h("p", { class: "quiet" }, "Drift is not monitored for this model."));
    if (hasMetrics) {
      const isClassification = manifest?.task !== "regression";
      const bins = history.bins(first, last, isClassification ? "dubito_entropy" : "dubito_std", where);
      updateFigure(places.doubt, plots.uncertainty(bins, isClassification));
    }
  }

  /** Return the evidence over time from the metrics (equal in all workers), or else from the model's descriptions. */
  function evidencePoints(version, where) {
    const start = Date.now() - periodMs;
    const points = history.snapshots.filter((snapshot) => snapshot.time >= start).flatMap((snapshot) =>
      history.gauges(snapshot, "dubito_drift_evidence_nats", where).slice(0, 1).map(({ value }) => ({ time: snapshot.time, evidence: value })));
    if (points.length && problems.metrics === null) return points;
    return drifts.filter((entry) => entry.time >= start && entry.model === model && entry.version === version).map((entry) => ({ time: entry.time, evidence: entry.drift.evidence }));
  }

  return () => {
    hasLeft = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisibilityChange);
  };
}

/** Pair snapshots to up to MAX_SPANS spans; a longer pause is one span. */
function toSpans(snapshots) {
  const minMs = periodMs / MAX_SPANS;
  const spans = [];
  let from = snapshots[0];
  for (const snapshot of snapshots.slice(1)) {
    if (snapshot.time - from.time < minMs && snapshot !== snapshots.at(-1)) continue;
    spans.push({ from, to: snapshot });
    from = snapshot;
  }
  return spans;
}

const formatLatency = (seconds) => (seconds === null ? "–" : seconds === Infinity ? "over 30 s" : duration(seconds));

/** Replace elements only if their text changed, so that screen readers do not repeat them. */
function replaceIfChanged(place, fresh) {
  if (place.textContent !== fresh.map((element) => element.textContent).join("")) fill(place, fresh);
}

/** Replace a figure but keep what is open or focused in it. */
function updateFigure(place, fresh) {
  const old = place.querySelector("figure");
  if (!fresh) return place.replaceChildren();
  const [table, freshTable] = [old?.querySelector("tbody"), fresh.querySelector("tbody")];
  if (!old || !table !== !freshTable) return place.replaceChildren(fresh);
  for (const part of ["figcaption", "svg"]) old.querySelector(`:scope > ${part}`).replaceWith(fresh.querySelector(`:scope > ${part}`));
  table?.replaceWith(freshTable);
}

/** Describe the alarm without the current evidence, so that screen readers announce it only once. */
function describeAlarm(drift) {
  const ending = drift.evidence < drift.alarm_at ? " It has fallen since, but the alarm stays until you reset it." : "";
  return `Drift detected: the inputs differ from the calibration data. The evidence reached the alarm level of ${number(drift.alarm_at, 2)} nats.${ending}`;
}

function describeEvidence(drift) {
  if (drift.rows === 0) return "No traffic for this version since it was loaded. Requests from this page and other tests are not counted.";
  const scope = drift.is_global ? "" : " in one worker process, which cannot reach the others";
  return `Evidence of drift: ${number(drift.evidence, 2)} nats after ${number(drift.rows)} rows${scope}; alarm at ${number(drift.alarm_at, 2)}.`;
}

function describeFlags(rows, flags, rate, [low, high]) {
  if (rows === 0) return "No new rows in this period.";
  const share = flags / rows;
  const judgement = share > high ? "more than expected" : share < low ? "less than expected" : "as expected";
  return `${percent(share)} of the ${number(rows)} rows in this period have a p-value up to ${FLAG_AT}: ${judgement}. For rows like the calibration data, ${percent(rate)} is expected, and ${percent(low)} to ${percent(high)} in 95 % of such periods.`;
}
