// The list of jobs, with their progress and actions.

import { request, requestJson } from "./api.js";
import { Button, Card, download, html, Notice, Table, useEffect, usePolling, useState } from "./components.js";
import { duration, moment, number, percent } from "./format.js";

const POLL_MS = 2000;
const MAX_JOBS = 100; // in the list
const BADGES = { done: "good", failed: "bad", cancelled: "bad" };
const ENDINGS = { "application/x-npz": "npz", "application/vnd.apache.parquet": "parquet", "application/json": "json" };
const isOver = ({ state }) => ["done", "failed", "cancelled"].includes(state);

/** Show the jobs of this key. `onresult(job)` labels a finished ranking; it is called once for the job `awaited`. */
export function Jobs({ awaited, onresult }) {
  const { data, error, reload } = usePolling((signal) => requestJson("jobs", { signal }), POLL_MS, []);
  const [failure, setFailure] = useState(null);
  const awaitedJob = data?.jobs.find(({ id }) => id === awaited);
  useEffect(() => {
    if (awaitedJob?.state === "done") onresult(awaitedJob);
  }, [awaitedJob?.state]);
  if (!data?.jobs.length) return error && html`<${Notice}>${error.message}<//>`;
  const attempt = (work) => async () => {
    try {
      await work();
      setFailure(null);
      await reload();
    } catch (problem) {
      setFailure(problem.message);
    }
  };
  const save = async (job) => {
    const answer = await request(job.result);
    const type = answer.headers.get("Content-Type").split(";")[0];
    download(`${job.model}-${job.id.slice(0, 8)}.${ENDINGS[type] ?? "bin"}`, await answer.blob(), type);
  };
  const rows = data.jobs.filter(({ kind }) => kind !== "candidate").slice(0, MAX_JOBS).map((job) => [
    html`<span class=${`badge ${BADGES[job.state] ?? "told"}`}>${job.state}</span>${job.error && html`<p class="quiet">${job.error}</p>`}`,
    moment(job.created),
    html`${job.kind === "acquire" ? "rank" : "predict"}: ${job.model} ${job.version} <span class="quiet">${job.id.slice(0, 8)}</span>`,
    number(job.rows),
    isOver(job) ? `took ${duration(job.worked_s)}` : html`<progress max="1" value=${job.progress} aria-label=${`Progress of the job with ${number(job.rows)} rows`} /> ${percent(job.progress)}, ${duration(job.seconds_left)} left`,
    html`<span class="actions">
      ${job.state === "done" && job.kind === "acquire" && html`<${Button} class="small" onclick=${attempt(() => onresult(job))}>Label<//>`}
      ${job.state === "done" && html`<${Button} class="small" onclick=${attempt(() => save(job))}>Save<//>`}
      ${isOver(job) ? html`<${Button} class="small" onclick=${attempt(() => requestJson(`jobs/${job.id}`, { method: "DELETE" }))}>Delete<//>` : html`<${Button} class="small" onclick=${attempt(() => requestJson(`jobs/${job.id}/cancel`, { method: "POST" }))}>Cancel<//>`}
    </span>`,
  ]);
  return html`<${Card} title="Jobs" class="card jobs">${(failure ?? error?.message) && html`<${Notice}>${failure ?? error.message}<//>`}${rows.length > 0 && html`<${Table} caption="Jobs, newest first" heads=${["state", "created", "job", "rows", "progress", "actions"]} rows=${rows} numeric=${[3]} />`}<//>`;
}
