// Learning from labels: live quality, fits of candidates, and promotion.

import { requestJson, ServiceError } from "./api.js";
import { duration, fill, h, moment, notice, number, table } from "./dom.js";
import { describeFigure, mergeFigures, plainKey } from "./figures.js";
import { versionsOnLabels } from "./plots.js";

const POLL_MS = 1000;
const MIN_CONTROL_LABELS = 50; // below this the service returns no live figures
const MAX_LOG_LINES = 8;
const path = (name) => `models/${encodeURIComponent(name)}`;
const polledModels = new Set(); // models whose fit the page's admin key may poll

/** Move `latest` to a version, forward or back. */
export const promote = (name, version) => requestJson(`admin/${path(name)}/versions/${encodeURIComponent(version)}/promote`, { method: "POST" });

/** Create the section; `onpromote()` is called when another version is served. */
export function learningSection(name, onpromote) {
  const figures = h("div"), fit = h("div", { "aria-live": "polite" }), outcome = h("div"), trouble = h("div");
  const start = h("button", { type: "button", class: "main", onclick: () => requestFit("POST") }, "Fit a candidate");
  const stop = h("button", { type: "button", hidden: true, onclick: () => requestFit("DELETE") }, "Stop");
  const element = h("section", { class: "card learning", "aria-label": "Learn from labels" }, h("h2", {}, "Learn from labels"), figures,
    h("p", { class: "actions" }, start, stop, h("span", { class: "quiet" }, "starts from the served version and uses its training rows and the labels")), trouble, fit, outcome);
  let timer = null, hasLeft = false, wasActive = false;

  async function refresh() {
    try {
      const [labels, description] = await Promise.all([requestJson(`${path(name)}/labels`), requestJson(path(name))]);
      if (hasLeft) return;
      start.disabled = labels.labels === 0;
      fill(figures, labelFigures(labels));
      fill(outcome, await candidateSection(labels, description, move));
    } catch (error) {
      showError(error);
    }
  }

  async function requestFit(method = "GET") {
    clearTimeout(timer);
    try {
      const state = await requestJson(`admin/${path(name)}/candidate`, { method });
      if (hasLeft) return;
      polledModels.add(name);
      fill(trouble);
      showFit(state);
    } catch (error) {
      if (error.status === 404 || error.status === 409) fill(fit, fitCommand(error));
      else showError(error);
    }
  }

  function showFit({ job, lines }) {
    const isActive = job !== null && ["queued", "running"].includes(job.state);
    start.disabled = isActive;
    stop.hidden = !isActive;
    if (!job) return;
    const bar = h("progress", { max: 1, "aria-label": "Progress of the fit" });
    if (job.progress > 0) bar.value = job.progress;
    const message = { queued: "Waiting in the queue.", running: `Fitting for ${duration(job.worked_s)}.`, done: `Done after ${duration(job.worked_s)}.`, cancelled: "Stopped.", failed: null }[job.state];
    fill(fit, isActive ? bar : null, message ? h("p", { role: "status" }, message) : notice(job.error ?? "The fit failed."), lines.length ? h("pre", { tabindex: 0, "aria-label": "Log of the fit" }, lines.slice(-MAX_LOG_LINES).join("\n")) : null);
    if (isActive) timer = setTimeout(requestFit, POLL_MS);
    else if (wasActive) refresh();
    wasActive = isActive;
  }
  async function move(version) {
    try {
      await promote(name, version);
      await onpromote();
      if (!hasLeft) await refresh();
    } catch (error) {
      showError(error);
    }
  }

  function fitCommand(error) {
    const reason = error.status === 404 ? "Starting a fit here needs an admin key, but the service has none (DUBITO_ADMIN_KEY)." : "Training is not installed with the service.";
    return [notice(reason, "told"), h("p", {}, "You can fit the candidate on the command line, with the service's store and state: ", h("code", {}, `dubito candidate ${name}`))];
  }

  function showError(error) {
    if (!(error instanceof ServiceError)) throw error;
    if (!hasLeft) fill(trouble, notice(error.message));
  }

  return {
    element,
    refresh,
    async begin() {
      await refresh();
      if (polledModels.has(name)) await requestFit();
    },
    end() {
      hasLeft = true;
      clearTimeout(timer);
    },
  };
}

/** Show the number of labels, and the live quality of versions on control rows. */
function labelFigures({ labels, control_labels, waiting, live, candidates }) {
  const newLabels = labels - control_labels - (candidates[0]?.labels ?? 0);
  const tiles = [["labels", labels], ["control rows labelled", control_labels], candidates.length ? ["new since the last candidate", Math.max(0, newLabels)] : ["waiting for labels", waiting]];
  const measured = live.filter((version) => version.figures);
  const count = Math.max(0, ...live.map((version) => version.control_labels));
  return [
    h("dl", { class: "tiles" }, tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value))))),
    measured.length ? versionsOnLabels(measured) : h("p", { class: "quiet" }, `Label ${MIN_CONTROL_LABELS} random rows to measure real quality (${count} so far). The selected rows are harder than average, so they cannot measure it. To get random rows, store the selected rows and set a share of control rows in the options above.`),
  ];
}

/** Compare the newest candidate with the version it started from, and offer to promote it or roll it back. */
async function candidateSection({ candidates }, description, move) {
  const [newest] = candidates.filter(({ version }) => description.versions.includes(version));
  if (!newest) return null;
  const { version, against, control } = newest;
  const pair = await Promise.all([against, version].map((number) => requestJson(`${path(description.name)}/versions/${number}`).catch(() => null)));
  const [before, after] = pair.map((details) => new Map(mergeFigures(details?.manifest).map((figure) => [figure.key, figure.published])));
  const rows = [...after].filter(([key, value]) => before.has(key) && describeFigure(key).better && value !== null).map(([key, value]) => figureRow(describeFigure(key), before.get(key), value));
  const labelRows = Object.entries(control?.figures ?? {}).map(([key, figure]) => figureRow(describeFigure(plainKey(key)), figure.against, figure.candidate, figure.interval));
  const isServed = description.serving === version;
  const isWorse = newest.reason.startsWith("gate:");
  const reason = isWorse ? "it is significantly worse than the served version" : newest.reason.split(": `")[0]; // the page has a button instead of the command
  const heads = ["figure", `version ${against}`, `version ${version}`, "difference"];
  const target = isServed ? against : version;
  return [
    h("h3", {}, `The candidate: version ${version} `, h("span", { class: `badge ${isServed ? "good" : "told"}` }, isServed ? "served" : `version ${description.serving} is served`)),
    h("p", {}, `Fitted on ${number(newest.labels)} labels, ${moment(newest.time)}. `, isServed ? null : newest.promoted ? "It was promoted and later rolled back." : `Waiting for approval: ${reason}.`),
    labelRows.length ? table(`On ${number(control.rows)} labelled control rows`, heads, labelRows, [1, 2, 3]) : null,
    rows.length ? table("On the test rows", heads, rows, [1, 2, 3]) : null,
    h("p", { class: "actions" }, description.versions.includes(target) ? h("button", { type: "button", class: isServed || isWorse ? null : "main", onclick: () => move(target) }, isServed ? `Roll back to version ${target}` : `Promote version ${target}`) : null,
      h("a", { href: `#/${path(description.name)}/${against}/${version}` }, "All differences")),
  ];
}

function figureRow({ name, write, better }, before, after, interval = null) {
  const change = after - before;
  const signed = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${write(Math.abs(x))}`;
  const isBetter = change === 0 || !["higher", "lower"].includes(better) ? null : (better === "higher") === change > 0;
  return [name, write(before), write(after), h("span", { class: isBetter === null ? null : isBetter ? "better" : "worse" }, signed(change), interval ? ` (${signed(interval[0])} to ${signed(interval[1])})` : null)];
}
