// What the labels say of a model, a candidate that is fitted on them, and `latest` moved to a version and back.

import { askJson, Refused } from "./api.js";
import { duration, fill, h, moment, notice, number, table } from "./dom.js";
import { figureOf, figuresOf, plainKey } from "./figures.js";
import { versionsOnLabels } from "./plots.js";

const POLL_MS = 1000;
const FEWEST = 50; // labels of rows that were set aside, below which the service gives no figures
const LINES = 8; // of what the fit says
const path = (name) => `models/${encodeURIComponent(name)}`;
const asked = new Set(); // models whose candidates this page has asked about, with a key that may

/** Have `latest` name a version: a promotion, or a roll-back. */
export const promote = (name, version) => askJson(`admin/${path(name)}/versions/${encodeURIComponent(version)}/promote`, { method: "POST" });

/** The part of the view that learns; `changed()` is called when another version is served. */
export function learningOf(name, changed) {
  const figures = h("div"), fit = h("div", { "aria-live": "polite" }), outcome = h("div"), trouble = h("div");
  const start = h("button", { type: "button", class: "main", onclick: () => fitting("POST") }, "Fit a candidate");
  const stop = h("button", { type: "button", hidden: true, onclick: () => fitting("DELETE") }, "Stop");
  const element = h("section", { class: "card learning", "aria-label": "Learn from the labels" }, h("h2", {}, "Learn from the labels"), figures,
    h("p", { class: "actions" }, start, stop, h("span", { class: "quiet" }, "starts from the served version, on its training rows and the labels")), trouble, fit, outcome);
  let timer = null, left = false;

  async function refresh() {
    try {
      const [labels, description] = await Promise.all([askJson(`${path(name)}/labels`), askJson(path(name))]);
      if (left) return;
      start.disabled = labels.labels === 0;
      fill(figures, figuresOfLabels(labels));
      fill(outcome, await candidateOf(labels, description, move));
    } catch (error) {
      failed(error);
    }
  }

  async function fitting(method = "GET") {
    clearTimeout(timer);
    try {
      const found = await askJson(`admin/${path(name)}/candidate`, { method });
      if (left) return;
      asked.add(name);
      fill(trouble);
      showFit(found);
    } catch (error) {
      if (error.status === 404 || error.status === 409) fill(fit, byCommand(error));
      else failed(error);
    }
  }

  function showFit({ job, lines }) {
    const isOn = job !== null && ["queued", "running"].includes(job.state);
    start.disabled = isOn;
    stop.hidden = !isOn;
    if (!job) return;
    const bar = h("progress", { max: 1, "aria-label": "Progress of the fit" });
    if (job.progress > 0) bar.value = job.progress;
    const said = { queued: "It waits for its turn.", running: `Fitting, for ${duration(job.worked_s)} so far.`, done: `Done after ${duration(job.worked_s)}.`, cancelled: "Stopped.", failed: null }[job.state];
    fill(fit, isOn ? bar : null, said ? h("p", { role: "status" }, said) : notice(job.error ?? "It failed."), lines.length ? h("pre", { tabindex: 0, "aria-label": "What the fit says" }, lines.slice(-LINES).join("\n")) : null);
    if (isOn) timer = setTimeout(fitting, POLL_MS);
    else if (wasOn) refresh();
    wasOn = isOn;
  }
  let wasOn = false;

  async function move(version) {
    try {
      await promote(name, version);
      await changed();
      if (!left) await refresh();
    } catch (error) {
      failed(error);
    }
  }

  function byCommand(error) {
    const why = error.status === 404 ? "Only an administrator's key can start a fit here, and the service has none (DUBITO_ADMIN_KEY)." : "Training is not installed where the service runs.";
    return [notice(why, "told"), h("p", {}, "This command fits the candidate, with the service's store and state: ", h("code", {}, `dubito candidate ${name}`))];
  }

  function failed(error) {
    if (!(error instanceof Refused)) throw error;
    if (!left) fill(trouble, notice(error.message));
  }

  return {
    element,
    refresh,
    async begin() {
      await refresh();
      if (asked.has(name)) await fitting();
    },
    end() {
      left = true;
      clearTimeout(timer);
    },
  };
}

/** How many labels there are, and how often the versions were right on those of rows that were set aside. */
function figuresOfLabels({ labels, control_labels, waiting, live, candidates }) {
  const since = labels - control_labels - (candidates[0]?.labels ?? 0);
  const tiles = [["labels", labels], ["of rows set aside by chance", control_labels], candidates.length ? ["since the last candidate", Math.max(0, since)] : ["kept rows without one", waiting]];
  const known = live.filter((version) => version.figures);
  const most = Math.max(0, ...live.map((version) => version.control_labels));
  return [
    h("dl", { class: "tiles" }, tiles.map(([said, count]) => h("div", {}, h("dt", {}, said), h("dd", {}, number(count))))),
    known.length ? versionsOnLabels(known) : h("p", { class: "quiet" }, `Rows that were chosen because they are hard cannot say how often the model is right; rows set aside by chance can, from ${FEWEST} labels on (there are ${most}). Options, above, keep the chosen rows and set a share aside.`),
  ];
}

/** The newest candidate against the version that it began at: figures, why it was not promoted, and what can be done. */
async function candidateOf({ candidates }, description, move) {
  const [newest] = candidates.filter(({ version }) => description.versions.includes(version));
  if (!newest) return null;
  const { version, against, control } = newest;
  const two = await Promise.all([against, version].map((number) => askJson(`${path(description.name)}/versions/${number}`).catch(() => null)));
  const [before, after] = two.map((found) => new Map(figuresOf(found?.manifest).map((figure) => [figure.key, figure.published])));
  const rows = [...after].filter(([key, value]) => before.has(key) && figureOf(key).better && value !== null).map(([key, value]) => row(figureOf(key), before.get(key), value));
  const onLabels = Object.entries(control?.figures ?? {}).map(([key, found]) => row(figureOf(plainKey(key)), found.against, found.candidate, found.interval));
  const isServed = description.serving === version;
  const isWorse = newest.why.startsWith("gate:");
  const why = isWorse ? "it is worse than what is served, beyond chance" : newest.why.split(": `")[0]; // without the command: there is a button
  const heads = ["figure", `version ${against}`, `version ${version}`, "difference"];
  const other = isServed ? against : version;
  return [
    h("h3", {}, `The candidate: version ${version} `, h("span", { class: `badge ${isServed ? "good" : "told"}` }, isServed ? "served" : `version ${description.serving} is served`)),
    h("p", {}, `Fitted on ${number(newest.labels)} labels, ${moment(newest.time)}. `, isServed ? null : newest.promoted ? "It was promoted, and rolled back since." : `Not promoted by itself: ${why}.`),
    onLabels.length ? table(`On ${number(control.rows)} labelled rows that were set aside`, heads, onLabels, [1, 2, 3]) : null,
    rows.length ? table("On the test rows of the data", heads, rows, [1, 2, 3]) : null,
    h("p", { class: "actions" }, description.versions.includes(other) ? h("button", { type: "button", class: isServed || isWorse ? null : "main", onclick: () => move(other) }, isServed ? `Roll back to version ${other}` : `Promote version ${other}`) : null,
      h("a", { href: `#/${path(description.name)}/${against}/${version}` }, "All that differs")),
  ];
}

function row({ name, write, better }, before, after, interval = null) {
  const by = after - before;
  const sign = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${write(Math.abs(x))}`;
  const isBetter = by === 0 || !["more", "less"].includes(better) ? null : (better === "more") === by > 0;
  return [name, write(before), write(after), h("span", { class: isBetter === null ? null : isBetter ? "better" : "worse" }, sign(by), interval ? ` (${sign(interval[0])} to ${sign(interval[1])})` : null)];
}
