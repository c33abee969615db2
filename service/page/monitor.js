// The view Monitor: whether live rows differ from the calibration data, and how.

import { requestJson, ServiceError } from "./api.js";
import { Button, Card, Element, Failure, html, Notice, Table, usePolling, useState } from "./components.js";
import { number, percent } from "./format.js";
import { drawRow, pixelLayout } from "./pictures.js";

const POLL_MS = 5000;
const MAX_COLUMNS = 10;
const clock = (time) => {
  const date = new Date(time), isToday = date.toDateString() === new Date().toDateString();
  return isToday ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : date.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
};

export default function Monitor({ app, model }) {
  const path = `models/${encodeURIComponent(model)}`;
  const state = usePolling((signal) => app.describe(model, { fresh: true, signal }), POLL_MS, [model]);
  const details = usePolling((signal) => requestJson(`${path}/drift`, { signal }), POLL_MS, [model]);
  const [message, setMessage] = useState(null);
  if (!state.data) return html`<h1>Monitor</h1>${state.error ? html`<${Failure} ...${state} />` : html`<p class="quiet">Loading …</p>`}`;
  const { drift, manifest, serving } = state.data;
  const reset = async () => {
    try {
      await requestJson(`admin/${path}/versions/${encodeURIComponent(serving)}/drift/reset`, { method: "POST" });
      setMessage(null);
      await Promise.all([state.reload(), details.reload()]);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setMessage(error.status === 404 ? "Resetting the alarm needs an admin key, but the service has none (DUBITO_ADMIN_KEY). A restart resets it too." : error.message);
    }
  };
  return html`
    <h1>Monitor <bdi>${model}</bdi></h1>
    ${state.error && html`<${Notice}>${state.error.message} Showing older data. <${Button} onclick=${state.reload}>Try again<//><//>`}
    ${drift ? html`<${Card} class=${`card ${drift.alarm ? "verdict bad" : drift.rows ? "verdict good" : ""}`} aria-label="Drift">
      <p class="word" role="status">${describeState(drift, details.data)}</p>
      <p>${describeRows(drift)}</p>
      ${drift.alarm && html`<p class="actions"><${Button} onclick=${reset}>Reset the alarm<//></p>`}
      ${message && html`<${Notice}>${message}<//>`}
    <//>` : html`<${Notice} kind="told">Drift is not monitored for this model.<//>`}
    ${details.error?.status === 403 ? html`<${Notice} kind="told">To see shifted columns and unusual rows, the key needs the scope rows.<//>` : details.data?.rows > 0 && html`<${Shifts} ...${details.data} /><${Unusual} ...${details.data} spec=${manifest.input} />`}
    <p class="quiet">Requests from this page and other tests are not counted. For requests, latency and errors, see <a href="metrics">the metrics</a> or Grafana.</p>`;
}

/** Return the columns with significant shifts. */
const shifted = ({ columns, limit }) => Object.entries(columns).filter(([, shift]) => shift > limit).map(([name]) => name);

function describeState(drift, details) {
  if (!drift.rows) return "No live rows yet";
  if (!drift.alarm) return "No drift";
  const names = details ? shifted(details).slice(0, 2) : [];
  return html`<span>Drift detected ${clock(drift.alarm_time)}${names.length ? html`, mostly in ${names.map((name, i) => html`${i ? " and " : ""}<em>${name}</em>`)}` : ""}</span>`;
}

function describeRows(drift) {
  if (!drift.rows) return "The service has received no rows for this version since it was loaded.";
  return `${percent(drift.flag_rate)} of recent rows are unusual; ${percent(drift.expected_flag_rate)} is expected. ${number(drift.rows)} ${drift.rows === 1 ? "row" : "rows"} since the version was loaded.`;
}

/** Rank the columns by their shift. */
function Shifts({ columns, limit, rows }) {
  const entries = Object.entries(columns);
  if (!entries.length) return null;
  const count = shifted({ columns, limit }).length;
  return html`<${Card} title="Columns by shift">
    <p>Largest difference between the shares of training rows and of ${number(rows)} recent rows, below a value or in a category. ${count ? `${number(count)} of ${number(entries.length)} columns differ significantly.` : "No column differs significantly."}</p>
    <${Table} caption="The largest shifts" heads=${["column", "shift"]} rows=${entries.slice(0, MAX_COLUMNS).map(([name, shift]) => [name, html`<meter min="0" max="1" value=${shift} aria-label=${`Shift of ${name}`}></meter> ${percent(shift)}${shift > limit ? html` <span class="badge bad">shifted</span>` : ""}`])} />
    ${entries.length > MAX_COLUMNS && html`<p class="quiet">${number(entries.length - MAX_COLUMNS)} columns with smaller shifts are not shown.</p>`}
  <//>`;
}

/** Show the recent rows with the smallest p-values. */
function Unusual({ unusual, columns, spec }) {
  if (!unusual.length) return null;
  const layout = pixelLayout(spec);
  const names = Object.keys(columns).slice(0, MAX_COLUMNS);
  return html`<${Card} title="Most unusual recent rows">
    ${layout ? html`<ul class="thumbnails">${unusual.map(({ input, p_value }, i) => html`<li><${Element} element=${drawRow(input.flat(Infinity), layout, spec, `Unusual row ${i + 1}`)} />p = ${number(p_value, 2)}</li>`)}</ul>`
      : names.length ? html`<${Table} caption="Columns with large shifts first" heads=${["p-value", ...names]} numeric=${[0]} rows=${unusual.map(({ input, p_value }) => [number(p_value, 2), ...names.map((name) => (typeof input[name] === "number" ? number(input[name], 4) : input[name] ?? "–"))])} />`
      : html`<${Table} caption="Rows" heads=${["p-value", "row"]} rows=${unusual.map(({ input, p_value }) => [number(p_value, 2), JSON.stringify(input).slice(0, 200)])} />`}
  <//>`;
}
