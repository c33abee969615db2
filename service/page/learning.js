// The steps Fit and Approve: fit a candidate on the labels, compare it with the served version, and approve it.

import { requestJson, ServiceError } from "./api.js";
import { address, Button, Card, Failure, html, Notice, Table, useEffect, useFetch, useRef, useState } from "./components.js";
import { describeFigure, plainKey, signed } from "./figures.js";
import { duration, moment, number } from "./format.js";
import { versionsOnLabels } from "./plots.js";

const POLL_MS = 1000;
const MIN_RANDOM_LABELS = 50; // below this the service returns no live figures
const MAX_LOG_LINES = 8;
const COMPARED = [["accuracy", "log_likelihood", "brier"], ["rmse", "log_likelihood", "interval_coverage_at_95"]];
const path = (name) => `models/${encodeURIComponent(name)}`;

/** Fit a candidate, and show the number of labels and their measured quality. */
export function Fit({ session }) {
  const { model } = session;
  const labels = useFetch((signal) => requestJson(`${path(model)}/labels`, { signal }), [model]);
  const [{ job, lines }, setFit] = useState({ job: null, lines: [] });
  const [error, setError] = useState(null);
  const timer = useRef(null);
  const isMounted = useRef(true);
  const isActive = job !== null && ["queued", "running"].includes(job.state);

  const send = async (method = "GET") => {
    clearTimeout(timer.current);
    try {
      const state = await requestJson(`admin/${path(model)}/candidate`, { method });
      setFit(state);
      setError(null);
      session.isFitting = state.job !== null && ["queued", "running"].includes(state.job.state);
      session.save();
      if (!isMounted.current) return;
      if (session.isFitting) timer.current = setTimeout(send, POLL_MS);
      else labels.reload();
    } catch (failure) {
      if (!(failure instanceof ServiceError)) throw failure;
      setError(failure);
      if (failure.status === 0 && isMounted.current) timer.current = setTimeout(send, POLL_MS);
    }
  };
  useEffect(() => {
    if (session.isFitting) send();
    return () => {
      isMounted.current = false;
      clearTimeout(timer.current);
    };
  }, []);

  if (labels.error) return html`<${Failure} ...${labels} />`;
  if (!labels.data) return html`<p class="quiet">Loading …</p>`;
  const { labels: count, control_labels: random, live, candidates } = labels.data;
  const measured = live.filter((version) => version.figures);
  const isOver = job !== null && !isActive;
  const message = job && { queued: "Waiting in the queue.", running: `Fitting for ${duration(job.worked_s)}.`, done: `Done after ${duration(job.worked_s)}.`, cancelled: "Stopped." }[job.state];
  return html`
    <${Card} title="Fit a candidate">
      <p>${number(count)} ${count === 1 ? "label" : "labels"}, ${number(random)} of them on random rows. The fit starts from the served version and adds the labels to its training rows. Random rows are kept apart, to measure accuracy.</p>
      ${count === 0 && html`<p class="actions"><a href=${address("label", model, "label")}>Label rows first</a></p>`}
      <p class="actions">
        ${!isActive && count > 0 && html`<${Button} main=${!isOver || job.state !== "done"} onclick=${() => send("POST")}>Fit a candidate<//>`}
        ${isActive && html`<${Button} onclick=${() => send("DELETE")}>Stop<//>`}
        ${isOver && job.state === "done" && candidates.length > 0 && html`<a class="button main" href=${address("label", model, "approve")}>Next: compare and approve</a>`}
      </p>
      ${isActive && html`<progress max="1" value=${job.progress || undefined} aria-label="Progress of the fit" />`}
      ${message && html`<p role="status">${message}</p>`}
      ${job?.state === "failed" && html`<${Notice}>${job.error ?? "The fit failed."}<//>`}
      ${error && ([404, 409].includes(error.status) ? html`<${FitCommand} model=${model} error=${error} />` : html`<${Notice}>${error.message}<//>`)}
      ${lines.length > 0 && html`<pre tabindex="0" aria-label="Log of the fit">${lines.slice(-MAX_LOG_LINES).join("\n")}</pre>`}
    <//>
    <${Card} title="Quality on random rows">
      ${measured.length ? html`${versionsOnLabels(measured)}` : html`<p>Label ${MIN_RANDOM_LABELS} random rows to measure real accuracy (${number(random)} so far). A tenth of the selected rows are random, unless you change it.</p>`}
    <//>`;
}

const FitCommand = ({ model, error }) => html`
  <${Notice} kind="told">${error.status === 404 ? "Starting a fit here needs an admin key, but the service has none (DUBITO_ADMIN_KEY)." : "Training is not installed with the service."}<//>
  <p>You can fit the candidate on the command line, with the service's store and state: <code>dubito candidate ${model}</code></p>`;

/** Compare the newest candidate with the version it started from, and approve it or roll it back. */
export function Approve({ app, model, session }) {
  const { data, error, reload } = useFetch(async () => {
    const [labels, description] = await Promise.all([requestJson(`${path(model)}/labels`), app.describe(model, { fresh: true })]);
    return { description, candidate: labels.candidates.find(({ version }) => description.versions.includes(version)) ?? null };
  }, [model]);
  if (error) return html`<${Failure} ...${{ error, reload }} />`;
  if (!data) return html`<p class="quiet">Loading …</p>`;
  const { description, candidate } = data;
  if (!candidate) return html`<${Card} title="Approve"><p>There is no candidate yet.</p><p class="actions"><a class="button main" href=${address("label", model, "fit")}>Fit a candidate</a></p><//>`;
  const { version, against } = candidate;
  const isServed = description.serving === version;
  return html`<${Card} title=${`Version ${version}`}>
    <p><span class=${`badge ${isServed ? "good" : "told"}`}>${isServed ? "served" : "waiting for approval"}</span> Fitted on ${number(candidate.labels)} labels, ${moment(candidate.time)}.${candidate.promoted && !isServed ? " It was served and later rolled back." : ""}</p>
    <${Comparison} candidate=${candidate} kind="test" />
    <${Comparison} candidate=${candidate} kind="control" />
    ${candidate.reason !== "no worse" && html`<${Notice} kind="told">${candidate.reason.replace(/^gate: /, "")}<//>`}
    <${Promotion} model=${model} current=${description.serving} version=${isServed ? against : version} onchange=${async () => { await app.refresh(); reload(); }} />
    <p class="actions"><a href=${address("models", model, against, version)}>All differences</a></p>
  <//>`;
}

/** Show three figures of both versions on the same rows, and whether they differ significantly. */
export function Comparison({ candidate, kind }) {
  const compared = candidate[kind];
  if (!compared) return null;
  const keys = COMPARED.find(([first]) => first in compared.figures) ?? [];
  const rows = keys.filter((key) => key in compared.figures).map((key) => {
    const { first, second, interval } = compared.figures[key];
    const difference = second - first;
    const { name, write, better } = describeFigure(plainKey(key));
    const isDifferent = interval[0] > 0 || interval[1] < 0;
    const verdict = !["higher", "lower"].includes(better) ? "–" : !isDifferent ? "no difference" : (better === "higher") === difference > 0 ? "better" : "worse";
    const [low, high] = interval.map((end) => signed(end, write).replace(" points", ""));
    return [name, verdict === "–" ? verdict : html`<span class=${`badge ${{ better: "good", worse: "bad" }[verdict] ?? "told"}`}>${verdict}</span>`, write(first), write(second), `${signed(difference, write)} (${low} to ${high})`];
  });
  const title = kind === "test" ? `On the same ${number(compared.rows)} test rows` : `On ${number(compared.rows)} labelled random rows`;
  return html`<${Table} caption=${`${title}, with 95 % intervals`} heads=${["figure", "verdict", `version ${candidate.against}`, `version ${candidate.version}`, "difference"]} rows=${rows} numeric=${[2, 3, 4]} />`;
}

/** Move `latest` to a version after a confirmation, and show the line of the audit log. */
export function Promotion({ model, current, version, onchange, small = false }) {
  const [isAsking, setIsAsking] = useState(false);
  const [result, setResult] = useState(null);
  const isForward = Number(version) > Number(current);
  const verb = isForward ? "Approve" : "Roll back to";
  const move = async () => {
    try {
      const { before, key } = await requestJson(`admin/${path(model)}/versions/${encodeURIComponent(version)}/promote`, { method: "POST" });
      setResult(html`<${Notice} kind="good">Version ${version} answers all requests instead of version ${before}. Audit log: ${moment(Date.now() / 1000)}, ${key ?? "no key"}, ${before} → ${version}.<//>`);
      setIsAsking(false);
      await onchange();
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      const reason = { 404: "The service has no admin key (DUBITO_ADMIN_KEY).", 409: "The service cannot write to its store." }[error.status];
      setResult(html`<${Notice}>${reason ? html`${reason} Run <code>dubito store alias ${model} latest ${version}</code> where the store can be written.` : error.message}<//>`);
    }
  };
  return html`<div>
    ${isAsking ? html`<p>Version ${version} will answer all requests${current ? ` instead of version ${current}` : ""}.</p><p class="actions"><${Button} main onclick=${move}>Yes, ${isForward ? "approve" : "roll back"}<//><${Button} onclick=${() => setIsAsking(false)}>Cancel<//></p>`
      : html`<p class="actions"><button type="button" class=${small ? "small" : isForward ? "main" : null} onclick=${() => { setResult(null); setIsAsking(true); }}>${verb} version ${version}</button></p>`}
    ${result}
  </div>`;
}
