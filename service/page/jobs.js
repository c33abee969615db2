// The list of jobs with their progress and actions. Active jobs are polled every second.

import { request, requestJson, ServiceError } from "./api.js";
import { download, duration, fill, h, moment, notice, number, percent } from "./dom.js";

const POLL_MS = 1000;
const MAX_POOLS = 20; // in memory
const MAX_JOBS = 100; // in the list
const BADGES = { queued: "told", running: "told", done: "good", failed: "bad", cancelled: "bad" };
const ENDINGS = { "application/x-npz": "npz", "application/vnd.apache.parquet": "parquet", "application/json": "json" };

const pools = new Map(); // by job ID, kept while other views are open

/** Create the list; `onresult(job, pool)` shows a finished ranking, `onfailure(job)` that there is none. */
export function jobList({ onresult, onfailure }) {
  const rows = new Map(); // by ID: {job, element, update}
  const awaited = new Set(); // jobs whose results are shown once they are done
  const status = h("p", { role: "status", class: "quiet" });
  const trouble = h("div");
  const body = h("tbody");
  const region = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "List of jobs" },
    h("table", { class: "jobs" }, h("caption", {}, "Jobs, newest first"), h("thead", {}, h("tr", {}, ["state", "created", "job", "rows", "progress", "time left", "actions"].map((head) => h("th", { scope: "col" }, head)))), body));
  const element = h("section", { "aria-label": "Jobs", class: "card job-list" }, h("h2", {}, "Jobs"), trouble, status, region, h("p", { class: "actions" }, h("button", { type: "button", onclick: refresh }, "Refresh")));
  let timer = null;
  let hasLeft = false;
  document.addEventListener("visibilitychange", schedulePoll);

  async function refresh() {
    try {
      const { jobs } = await requestJson("jobs");
      if (hasLeft) return;
      fill(trouble, jobs.length > MAX_JOBS ? notice(`Showing the latest ${MAX_JOBS} of ${number(jobs.length)} jobs.`, "told") : null);
      const latest = jobs.slice(0, MAX_JOBS);
      for (const id of [...rows.keys()]) if (!latest.some((job) => job.id === id)) rows.delete(id);
      for (const job of latest) updateJob(job);
      body.replaceChildren(...latest.map((job) => rows.get(job.id).element));
      status.textContent = jobs.length ? "" : "No jobs yet.";
      region.hidden = jobs.length === 0;
      schedulePoll();
    } catch (error) {
      showError(error);
    }
  }

  function updateJob(job) {
    const row = rows.get(job.id);
    const wasActive = row ? !isOver(row.job) : false;
    if (row) row.update(job);
    else rows.set(job.id, jobRow(job));
    if (wasActive && isOver(job)) finish(job);
  }

  function finish(job) {
    status.textContent = `Job with ${number(job.rows)} rows: ${job.state}${job.error ? `: ${job.error}` : "."}`;
    if (!awaited.delete(job.id)) return;
    if (job.state === "done") onresult(job, pools.get(job.id) ?? null);
    else onfailure(job);
  }

  /** Poll again in a second if a job is active and the page is visible. */
  function schedulePoll() {
    clearTimeout(timer);
    if (hasLeft || document.hidden || ![...rows.values()].some(({ job }) => !isOver(job))) return;
    timer = setTimeout(poll, POLL_MS);
  }

  async function poll() {
    const active = [...rows.values()].filter(({ job }) => !isOver(job));
    try {
      for (const { job } of active) {
        const update = await requestJson(`jobs/${job.id}`);
        if (hasLeft) return;
        updateJob(update);
      }
    } catch (error) {
      showError(error);
    }
    schedulePoll();
  }

  function jobRow(first) {
    const state = h("td"), time = h("td", { class: "number" }), actions = h("td", { class: "actions" });
    const bar = h("progress", { max: 1, "aria-label": `Progress of the job with ${number(first.rows)} rows` });
    const share = h("span", { class: "quiet" });
    const buttons = {
      show: h("button", { type: "button", onclick: () => onresult(row.job, pools.get(row.job.id) ?? null) }, "Show"),
      save: h("button", { type: "button", onclick: () => save(row.job) }, "Save"),
      cancel: h("button", { type: "button", onclick: () => change(`jobs/${first.id}/cancel`, "POST") }, "Cancel"),
      remove: h("button", { type: "button", onclick: remove }, "Delete"),
    };
    actions.append(...Object.values(buttons));
    const row = {
      job: first,
      element: h("tr", {}, state, h("td", {}, moment(first.created)), h("td", {}, `${first.kind === "acquire" ? "rank" : "predict"}: ${first.model} ${first.version}`, h("span", { class: "quiet" }, ` ${first.id.slice(0, 8)}`)), h("td", { class: "number" }, number(first.rows)), h("td", {}, bar, share), time, actions),
      update(job) {
        row.job = job;
        fill(state, h("span", { class: `badge ${BADGES[job.state]}` }, job.state), job.error ? h("p", { class: "quiet" }, job.error) : null);
        bar.value = job.progress;
        share.textContent = ` ${percent(job.progress)}`;
        time.textContent = isOver(job) ? `took ${duration(job.worked_s)}` : duration(job.seconds_left);
        buttons.show.hidden = job.state !== "done" || job.kind !== "acquire";
        buttons.save.hidden = job.state !== "done";
        buttons.cancel.hidden = isOver(job);
        buttons.remove.hidden = !isOver(job);
      },
    };
    row.update(first);
    return row;

    async function remove() {
      await change(`jobs/${first.id}`, "DELETE");
      await refresh();
    }
  }

  async function change(path, method) {
    try {
      const job = await requestJson(path, { method });
      if (!hasLeft && rows.has(job.id)) updateJob(job);
      schedulePoll();
    } catch (error) {
      showError(error);
    }
  }

  async function save(job) {
    try {
      const answer = await request(job.result);
      const type = answer.headers.get("Content-Type").split(";")[0];
      download(`${job.model}-${job.id.slice(0, 8)}.${ENDINGS[type] ?? "bin"}`, await answer.blob(), type);
    } catch (error) {
      showError(error);
    }
  }

  function showError(error) {
    if (!(error instanceof ServiceError)) throw error;
    if (!hasLeft) fill(trouble, notice(error.message));
  }

  return {
    element,
    begin: refresh,
    /** Add a new job with its pool. */
    add(job, pool) {
      pools.set(job.id, pool);
      if (pools.size > MAX_POOLS) pools.delete(pools.keys().next().value);
      awaited.add(job.id);
      updateJob(job);
      body.prepend(rows.get(job.id).element);
      region.hidden = false;
      status.textContent = "";
      schedulePoll();
    },
    end() {
      hasLeft = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", schedulePoll);
    },
  };
}

const isOver = (job) => ["done", "failed", "cancelled"].includes(job.state);
