// The view that watches: what the service counts, and the drift of a model, every few seconds while one looks.

import { ask, changeKey, Refused } from "./api.js";
import { duration, field, fill, h, notice, number, percent, unpublished } from "./dom.js";
import * as lines from "./liveplots.js";
import { expectedBand, History, parsed, quantile } from "./metrics.js";

const POLL_MS = 5000;
const HOUR_MS = 3_600_000;
const MOST_SPANS = 60; // of a plot over time
const FLAG_AT = 0.05; // p-values up to this are what the drift test calls flagged, whatever the requests' own rates
const HISTOGRAMS = ["dubito_request_seconds", "dubito_flag_p_value", "dubito_entropy", "dubito_std"];
const COUNTING = [...HISTOGRAMS.map((name) => `${name}_bucket`), "dubito_requests_total", "dubito_rows_total", "dubito_flags_total", "dubito_draws_made_total", "dubito_draws_reused_total"];
const GAUGES = ["dubito_queued_row_draws", "dubito_queued_requests", "dubito_drift_evidence_nats", "dubito_drift_alarm", "dubito_calibration_rows"];
// Routes that look at the service; the others have it compute, or keep something.
const LOOKING = /^\/($|page\/|metrics|health|models|docs|redoc|openapi|jobs|admin|v2\/health|ping|version)/;

const history = new History({ kept: [...COUNTING, ...GAUGES], counting: COUNTING, keptMs: HOUR_MS });
let drifts = []; // {time, model, version, drift}: the last hour, of the models that were looked at
let shownMs = HOUR_MS / 12;
let shownRoute = "";

/** Show it. */
export async function show(view, app) {
  if (!app.model) {
    fill(view, unpublished("Live", app));
    return () => {};
  }
  const model = app.model; // another one may be chosen while an answer is on its way
  const span = h("select", { onchange: () => { shownMs = Number(span.value); draw(); } },
    [[HOUR_MS / 12, "5 minutes"], [HOUR_MS / 4, "15 minutes"], [HOUR_MS, "hour"]].map(([ms, name]) => h("option", { value: ms, selected: ms === shownMs }, name)));
  const route = h("select", { onchange: () => { shownRoute = route.value; draw(); } });
  const state = h("p", { class: "quiet", id: "live-state" });
  const troublePlace = h("div");
  const emptyPlace = h("p", { class: "quiet" });
  const tilesPlace = h("dl", { class: "tiles" });
  const driftPlace = h("div");
  const figuresPlace = h("div");
  const bandPlace = h("p", { class: "band" });
  const places = Object.fromEntries(["requests", "seconds", "flags", "pValues", "evidence", "doubt", "queue", "draws"].map((name) => [name, h("div", { id: `live-${name}` })]));
  let timer = null;
  let left = false;
  let description = null;
  let told = { service: null, metrics: null, reset: null }; // what goes wrong, by whom one asks: {text, act}

  fill(view, h("h1", {}, "Live"), h("div", { class: "live-options" }, field("The last", span), field("Requests", route)), state, troublePlace, tilesPlace,
    h("section", { class: "card", "aria-label": "Requests" }, h("h2", {}, "The service"), emptyPlace, h("div", { class: "plots" }, places.requests, places.seconds, places.queue, places.draws)),
    h("section", { class: "card", "aria-label": "Rows" }, h("h2", {}, `Rows of ${model}`), driftPlace, figuresPlace, bandPlace, h("div", { class: "plots" }, places.flags, places.pValues, places.evidence, places.doubt)));
  document.addEventListener("visibilitychange", changed);
  draw();
  poll();

  function changed() {
    clearTimeout(timer);
    if (document.hidden) state.textContent = "Paused while this page is hidden.";
    else poll();
  }

  async function poll() {
    clearTimeout(timer);
    const time = Date.now();
    await Promise.all([pollMetrics(time), pollModel(time)]);
    if (left) return;
    draw();
    clearTimeout(timer); // of another look that was under way
    if (!document.hidden) timer = setTimeout(poll, Math.max(POLL_MS / 5, time + POLL_MS - Date.now()));
  }

  async function pollMetrics(time) {
    try {
      const text = await (await ask("metrics")).text();
      if (history.looks.length && time <= history.looks.at(-1).time) return;
      history.take(time, parsed(text));
      told.metrics = null;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      told.metrics = error.status === 403 ? { ...troubleOf(error), text: `Requests, latency, p-values and entropies are not shown: ${error.message}` } : troubleOf(error);
    }
  }

  async function pollModel(time) {
    try {
      description = await app.describe(model, { fresh: true });
      told.service = null;
      if (!description.drift) return;
      drifts.push({ time, model, version: description.serving, drift: description.drift });
      drifts = drifts.filter((one) => one.time > time - HOUR_MS);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      told.service = troubleOf(error);
    }
  }

  /** What went wrong in words, and what one may do about it: [name, act]. */
  function troubleOf(error) {
    if (error.status === 0) return { text: `The service cannot be reached: is it running, and are you online? It is asked again every ${POLL_MS / 1000} seconds; what is shown is of before.`, act: ["Try now", poll] };
    if (error.status === 403) return { text: error.message, act: ["Give another key", async () => (await changeKey(), poll())] };
    return { text: error.message, act: ["Try now", poll] };
  }

  async function resetDrift() {
    try {
      await ask(`admin/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(description.serving)}/drift/reset`, { method: "POST" });
      told.reset = null;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      told.reset = error.status === 404 ? { text: "The alarm cannot be reset here: the service has no key for administration. A restart begins again too." } : troubleOf(error);
    }
    poll();
  }

  function draw() {
    const looks = history.since(shownMs);
    const troubles = new Map(Object.values(told).filter(Boolean).map(({ text, act }) => [text, act]));
    replace(troublePlace, [...troubles].map(([text, act]) => h("div", { class: "trouble" }, notice(text), act && h("button", { type: "button", onclick: act[1] }, act[0]))));
    const latest = Math.max(looks.at(-1)?.time ?? 0, drifts.at(-1)?.time ?? 0);
    state.textContent = latest ? `Asked every ${POLL_MS / 1000} seconds, last at ${new Date(latest).toLocaleTimeString()}. What was seen is kept in this page for an hour.` : "Asking for the first time.";
    routesOf();
    const isService = looks.length > 1;
    const of = { model, version: description?.serving };
    const tiles = [];
    if (isService) drawService(looks, tiles);
    else emptyPlace.textContent = told.metrics === null ? "One moment: rates need two looks." : "";
    if (description) drawRows(looks, of, tiles);
    fill(tilesPlace, tiles.map(([name, value, kind]) => h("div", { class: kind ?? null }, h("dt", {}, name), h("dd", {}, value))));
  }

  /** The routes that were seen, which are only ever more. */
  function routesOf() {
    const seen = [...new Set(history.of("dubito_requests_total").map((place) => history.series[place].labels.route))].sort();
    const wanted = ["", "*", ...seen];
    if (route.options.length === wanted.length) return;
    const name = (value) => ({ "": "for answers", "*": "of all routes" })[value] ?? value;
    fill(route, wanted.map((value) => h("option", { value, selected: value === shownRoute }, name(value))));
  }

  function drawService(looks, tiles) {
    const where = ({ route: name }) => (shownRoute === "" ? !LOOKING.test(name) : shownRoute === "*" || name === shownRoute);
    const counters = history.of("dubito_requests_total", where);
    const spans = spansOf(looks);
    const seconds = (looks.at(-1).time - looks[0].time) / 1000;
    const requests = spans.map(({ from, to }) => ({ from, to, statuses: history.riseBy(from, to, counters, "status") }));
    const all = history.riseBy(looks[0], looks.at(-1), counters, "status");
    const bins = history.bins(looks[0], looks.at(-1), "dubito_request_seconds", where);
    const [p50, p99] = [0.5, 0.99].map((q) => quantile(bins, q));
    const rate = [...all.values()].reduce((a, b) => a + b, 0) / seconds;
    const bad = [...all].filter(([status]) => !/^[23]/.test(status)).reduce((sum, [, count]) => sum + count, 0);
    const queued = history.gauges(looks.at(-1), "dubito_queued_row_draws").reduce((sum, { value }) => sum + value, 0);
    const isQuiet = rate === 0 && queued === 0;
    emptyPlace.textContent = isQuiet ? `Nobody has asked for an answer in this time. Requests show here as they come: send one to ${new URL("predict", document.baseURI)}, or choose a longer time above.` : "";
    for (const name of ["requests", "seconds", "queue", "draws"]) places[name].hidden = isQuiet;
    if (isQuiet) return;
    tiles.push(["requests a second", number(rate)], ["not answered as asked", bad === 0 ? "none" : percent(bad / (rate * seconds)), bad ? "bad" : null], ["half within", within(p50)], ["99 % within", within(p99)], ["queue, rows × draws", number(queued)]);
    put(places.requests, lines.requests(requests));
    put(places.seconds, lines.seconds(spans.map(({ from, to }) => {
      const found = history.bins(from, to, "dubito_request_seconds", where);
      return { from, to, count: found.reduce((sum, bin) => sum + bin.count, 0), p50: quantile(found, 0.5), p99: quantile(found, 0.99) };
    })));
    const sum = (look, name) => history.gauges(look, name).reduce((total, { value }) => total + value, 0);
    put(places.queue, lines.queue(looks.map((look) => ({ time: look.time, rowDraws: sum(look, "dubito_queued_row_draws"), requests: sum(look, "dubito_queued_requests") }))));
    const [made, reused] = ["dubito_draws_made_total", "dubito_draws_reused_total"].map((name) => history.of(name));
    put(places.draws, lines.draws(spans.map(({ from, to }) => ({ from, to, made: history.rise(from, to, made), reused: history.rise(from, to, reused) }))));
  }

  function drawRows(looks, of, tiles) {
    const { drift, manifest } = description;
    const where = (labels) => labels.model === of.model && labels.version === of.version;
    const isCounted = looks.length > 1;
    if (drift) {
      const rate = drift.expected_flag_rate;
      const counted = isCounted ? history.gauges(looks.at(-1), "dubito_calibration_rows", where) : [];
      const calibration = counted[0]?.value ?? manifest.detectors.ranking_rows;
      const flagged = (from, to) => {
        const bins = history.bins(from, to, "dubito_flag_p_value", where);
        const all = bins.reduce((sum, bin) => sum + bin.count, 0);
        return { rows: all, flags: bins.filter((bin) => bin.to <= FLAG_AT).reduce((sum, bin) => sum + bin.count, 0), bins };
      };
      const said = driftSays(drift);
      if (isCounted) {
        const { rows, flags, bins } = flagged(looks[0], looks.at(-1));
        const band = expectedBand(rate, rows, calibration);
        const spans = spansOf(looks).map(({ from, to }) => ({ from, to, ...flagged(from, to) })).filter((one) => one.rows > 0);
        bandPlace.textContent = drift.rows ? bandSays(rows, flags, rate, band) : "";
        if (rows) tiles.push([`p-values up to ${FLAG_AT}`, percent(flags / rows), flags / rows > band[1] ? "bad" : null]);
        put(places.flags, lines.flags(spans.map((one) => ({ ...one, band: expectedBand(rate, one.rows, calibration) })), rate));
        put(places.pValues, rows ? lines.pValues(bins, rows) : null);
      } else if (drift.flag_rate !== null) tiles.push([`p-values up to ${FLAG_AT}, of late`, percent(drift.flag_rate)]);
      tiles.push(["drift evidence", `${number(drift.evidence, 2)} of ${number(drift.alarm_at, 2)}`, drift.alarm ? "bad" : null]);
      replace(driftPlace, said.alarm ? [h("div", { class: "trouble" }, said.alarm, drift.alarm && h("button", { type: "button", onclick: resetDrift }, "Reset the alarm"))] : []);
      fill(figuresPlace, said.figures);
      put(places.evidence, drift.rows ? lines.evidence(evidenceOf(of, where), drift.alarm_at) : null);
    } else fill(figuresPlace, h("p", { class: "quiet" }, "No rows of this model are watched for drift."));
    if (isCounted) {
      const isClassified = manifest?.task !== "regression";
      const bins = history.bins(looks[0], looks.at(-1), isClassified ? "dubito_entropy" : "dubito_std", where);
      put(places.doubt, lines.doubt(bins, isClassified));
    }
  }

  /** The evidence over time, which all workers have alike: of the metrics where there are some, else as one was told of the model. */
  function evidenceOf(of, where) {
    const since = Date.now() - shownMs;
    const points = history.looks.filter((look) => look.time >= since).flatMap((look) =>
      history.gauges(look, "dubito_drift_evidence_nats", where).slice(0, 1).map(({ value }) => ({ time: look.time, evidence: value })));
    if (points.length && told.metrics === null) return points;
    return drifts.filter((one) => one.time >= since && one.model === of.model && one.version === of.version).map((one) => ({ time: one.time, evidence: one.drift.evidence }));
  }

  return () => {
    left = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", changed);
  };
}

/** Looks in pairs, as many as a plot is wide enough for. A pause between two looks is one span. */
function spansOf(looks) {
  const least = shownMs / MOST_SPANS;
  const spans = [];
  let from = looks[0];
  for (const look of looks.slice(1)) {
    if (look.time - from.time < least && look !== looks.at(-1)) continue;
    spans.push({ from, to: look });
    from = look;
  }
  return spans;
}

const within = (seconds) => (seconds === null ? "–" : seconds === Infinity ? "over 30 s" : duration(seconds));

/** Put elements in place of others that say something else: what is said again is not read out again. */
function replace(place, fresh) {
  if (place.textContent !== fresh.map((element) => element.textContent).join("")) fill(place, fresh);
}

/** Put a figure where another one was; what of it is open or focused stays so. */
function put(place, fresh) {
  const old = place.querySelector("figure");
  if (!fresh) return place.replaceChildren();
  const [table, freshTable] = [old?.querySelector("tbody"), fresh.querySelector("tbody")];
  if (!old || !table !== !freshTable) return place.replaceChildren(fresh);
  for (const part of ["figcaption", "svg"]) old.querySelector(`:scope > ${part}`).replaceWith(fresh.querySelector(`:scope > ${part}`));
  table?.replaceWith(freshTable);
}

/** Alarms are read out once: the figures, which change at each look, stand apart from them. */
function driftSays(drift) {
  const after = ` after ${number(drift.rows)} rows${drift.of_all ? "" : " of the process that answered, which cannot reach the others"}`;
  const figures = drift.rows === 0 ? "No row of this version was asked about since it was loaded. Questions asked on this page, and tests, are not counted: what is shown here is traffic." : `Evidence of drift: ${number(drift.evidence, 2)} nats${after}; the alarm is at ${number(drift.alarm_at, 2)}.`;
  const alarm = drift.alarm ? notice(`Drift: rows are not like those that the flag was calibrated on. Evidence reached the alarm, ${number(drift.alarm_at, 2)} nats${drift.evidence < drift.alarm_at ? "; it has fallen since, but the alarm stays until it is reset" : ""}.`)
    : null;
  return { alarm, figures: h("p", {}, figures) };
}

function bandSays(rows, flags, rate, [low, high]) {
  if (rows === 0) return "No new row was watched in this time, so nothing is said of flags.";
  const share = flags / rows;
  const is = share > high ? "more than" : share < low ? "less than" : "as";
  return `Of ${number(rows)} rows watched in this time ${percent(share)} have a p-value up to ${FLAG_AT}: ${is} expected. Of rows like the calibration data it would be ${percent(rate)}, and between ${percent(low)} and ${percent(high)} in 95 of 100 such times, given how many rows calibrated the flag.`;
}
