// The list of jobs: how far each is, and what can be done with it. Jobs that are not over are asked after each second.

import { ask, askJson, Refused } from "./api.js";
import { download, duration, fill, h, moment, notice, number, percent } from "./dom.js";

const POLL_MS = 1000;
const MOST_POOLS = 20; // that are remembered, by the jobs that they belong to
const MOST_SHOWN = 100;
const BADGES = { queued: "told", running: "told", done: "good", failed: "bad", cancelled: "bad" };
const ENDINGS = { "application/x-npz": "npz", "application/vnd.apache.parquet": "parquet", "application/json": "json" };

const pools = new Map(); // by job, also for when one comes back to the view

/** The list; `show(job, pool)` shows the ranking of a job that is done, `without(job)` that there will be none. */
export function jobsOf({ show, without }) {
  const rows = new Map(); // by id: {job, element, update}
  const awaited = new Set(); // jobs of this visit, whose results are shown when they are done
  const said = h("p", { role: "status", class: "quiet" });
  const trouble = h("div");
  const body = h("tbody");
  const region = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "List of jobs" },
    h("table", { class: "jobs" }, h("caption", {}, "Jobs, the latest first"), h("thead", {}, h("tr", {}, ["state", "asked for", "what", "rows", "progress", "time left", "actions"].map((head) => h("th", { scope: "col" }, head)))), body));
  const element = h("section", { "aria-label": "Jobs", class: "card job-list" }, h("h2", {}, "Jobs"), trouble, said, region, h("p", { class: "actions" }, h("button", { type: "button", onclick: refresh }, "Refresh the list")));
  let timer = null;
  let left = false;
  document.addEventListener("visibilitychange", next);

  async function refresh() {
    try {
      const { jobs } = await askJson("jobs");
      if (left) return;
      fill(trouble, jobs.length > MOST_SHOWN ? notice(`The latest ${MOST_SHOWN} of ${number(jobs.length)} jobs are shown.`, "told") : null);
      const latest = jobs.slice(0, MOST_SHOWN);
      for (const id of [...rows.keys()]) if (!latest.some((job) => job.id === id)) rows.delete(id);
      for (const job of latest) take(job);
      body.replaceChildren(...latest.map((job) => rows.get(job.id).element));
      said.textContent = jobs.length ? "" : "There are none.";
      region.hidden = jobs.length === 0;
      next();
    } catch (error) {
      failed(error);
    }
  }

  function take(job) {
    const known = rows.get(job.id);
    const wasOver = known ? isOver(known.job) : true;
    if (known) known.update(job);
    else rows.set(job.id, rowOf(job));
    if (!wasOver && isOver(job)) ended(job);
  }

  function ended(job) {
    said.textContent = `The job of ${number(job.rows)} rows is ${job.state}${job.error ? `: ${job.error}` : "."}`;
    if (!awaited.delete(job.id)) return;
    if (job.state === "done") show(job, pools.get(job.id) ?? null);
    else without(job);
  }

  /** Ask after the jobs that are not over, each second, while there are some and one looks. */
  function next() {
    clearTimeout(timer);
    if (left || document.hidden || ![...rows.values()].some(({ job }) => !isOver(job))) return;
    timer = setTimeout(poll, POLL_MS);
  }

  async function poll() {
    const open = [...rows.values()].filter(({ job }) => !isOver(job));
    try {
      for (const { job } of open) {
        const found = await askJson(`jobs/${job.id}`);
        if (left) return;
        take(found);
      }
    } catch (error) {
      failed(error);
    }
    next();
  }

  function rowOf(first) {
    const state = h("td"), left = h("td", { class: "number" }), actions = h("td", { class: "actions" });
    const bar = h("progress", { max: 1, "aria-label": `Progress of the job of ${number(first.rows)} rows` });
    const share = h("span", { class: "quiet" });
    const buttons = {
      show: h("button", { type: "button", onclick: () => show(row.job, pools.get(row.job.id) ?? null) }, "Show"),
      save: h("button", { type: "button", onclick: () => save(row.job) }, "Save"),
      cancel: h("button", { type: "button", onclick: () => act(`jobs/${first.id}/cancel`, "POST") }, "Cancel"),
      remove: h("button", { type: "button", onclick: remove }, "Delete"),
    };
    actions.append(...Object.values(buttons));
    const row = {
      job: first,
      element: h("tr", {}, state, h("td", {}, moment(first.created)), h("td", {}, `${first.kind === "acquire" ? "rank" : "predict"}: ${first.model} ${first.version}`, h("span", { class: "quiet" }, ` ${first.id.slice(0, 8)}`)), h("td", { class: "number" }, number(first.rows)), h("td", {}, bar, share), left, actions),
      update(job) {
        row.job = job;
        fill(state, h("span", { class: `badge ${BADGES[job.state]}` }, job.state), job.error ? h("p", { class: "quiet" }, job.error) : null);
        bar.value = job.progress;
        share.textContent = ` ${percent(job.progress)}`;
        left.textContent = isOver(job) ? `took ${duration(job.worked_s)}` : duration(job.seconds_left);
        buttons.show.hidden = job.state !== "done" || job.kind !== "acquire";
        buttons.save.hidden = job.state !== "done";
        buttons.cancel.hidden = isOver(job);
        buttons.remove.hidden = !isOver(job);
      },
    };
    row.update(first);
    return row;

    async function remove() {
      await act(`jobs/${first.id}`, "DELETE");
      await refresh();
    }
  }

  async function act(path, method) {
    try {
      const job = await askJson(path, { method });
      if (!left && rows.has(job.id)) take(job);
      next();
    } catch (error) {
      failed(error);
    }
  }

  async function save(job) {
    try {
      const answer = await ask(job.result);
      const type = answer.headers.get("Content-Type").split(";")[0];
      download(`${job.model}-${job.id.slice(0, 8)}.${ENDINGS[type] ?? "bin"}`, await answer.blob(), type);
    } catch (error) {
      failed(error);
    }
  }

  function failed(error) {
    if (!(error instanceof Refused)) throw error;
    if (!left) fill(trouble, notice(error.message));
  }

  return {
    element,
    begin: refresh,
    /** A job that was just asked for, with its pool. */
    add(job, pool) {
      pools.set(job.id, pool);
      if (pools.size > MOST_POOLS) pools.delete(pools.keys().next().value);
      awaited.add(job.id);
      take(job);
      body.prepend(rows.get(job.id).element);
      region.hidden = false;
      said.textContent = "";
      next();
    },
    end() {
      left = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", next);
    },
  };
}

const isOver = (job) => ["done", "failed", "cancelled"].includes(job.state);
