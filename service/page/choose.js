// The view Choose: rank a pool and label the selected rows.

import { requestJson, ServiceError } from "./api.js";
import { bytes, field, fill, h, noModel, notice, number, onFiles, tabs } from "./dom.js";
import { jobList } from "./jobs.js";
import { learningSection } from "./learning.js";
import { ACCEPTED, poolFromFiles, poolFromService } from "./pools.js";
import { rankingElement } from "./ranking.js";

// Larger pools become a job.
const LARGE_ROW_DRAWS = 1_000_000;
const LARGE_BYTES = 8 << 20; // if the number of rows is unknown
const STEPS = [
  "Upload a pool of unlabelled rows. The most informative ones are selected for labelling.",
  "Label them here, one at a time, with buttons or keys.",
  "Fit a candidate on the labels, compare it with the served version, and promote it if it is better.",
];
/** The acquisitions of each task, starting with the default: API name, label and hint. */
export const ACQUISITIONS = {
  classification: [
    ["bald", "disagreement between the draws", "BALD, the usual choice"],
    ["bald_corrected", "disagreement, bias-corrected", "BALD, bias-corrected for few draws"],
    ["entropy", "total uncertainty", "entropy of the mean probabilities"],
    ["mean_std", "spread of the probabilities", "mean standard deviation over the draws"],
    ["variation_ratio", "low probability of the label", "1 minus the largest mean probability"],
    ["power_bald", "random, weighted by disagreement", "power BALD, for large batches"],
    ["batchbald", "disagreement of the whole batch", "BatchBALD, for batches of about ten"],
    ["max_det", "uncertainty and diversity", "MaxDet, for batches of up to 1,000"],
    ["random", "random", "for comparison"],
  ],
  regression: [
    ["epistemic_variance", "disagreement between the draws", "variance of the draws' means, the usual choice"],
    ["variance", "total uncertainty", "variance of the prediction"],
    ["max_det", "uncertainty and diversity", "MaxDet, for batches of up to 1,000"],
    ["random", "random", "for comparison"],
  ],
};

/** The acquisitions that support races; the others need all draws of all rows. */
export const RACED = {
  classification: ["bald", "entropy", "mean_std", "variation_ratio"],
  regression: ["epistemic_variance", "variance"],
};
const MAX_CLASSES = 100; // with a field for their share

const states = new Map(); // the form, pool and ranking of each model, restored when the user returns

/** Show the view. */
export async function show(view, app) {
  if (!app.model) {
    fill(view, noModel("Choose rows to label", app));
    return () => {};
  }
  const description = await app.describe(app.model);
  let manifest = description.manifest;
  const state = states.get(app.model);
  let pool = state?.pool ?? null;
  let ranked = null; // {answer, source} of the visible ranking
  let pending = null; // AbortController of the request
  let releasePictures = () => {};
  let hasLeft = false;

  const versions = [...new Set([...Object.keys(description.aliases), ...description.versions])];
  const version = h("select", { onchange: changeVersion }, versions.map((name) => h("option", { value: name, selected: name === "latest" }, name)));
  const files = h("input", { type: "file", multiple: true, accept: ACCEPTED.join(), id: "pool-files", "aria-describedby": "pool-hint", onchange: () => selectFiles(files.files) });
  const poolStatus = h("p", { role: "status" });
  const drop = h("div", { class: "drop" }, h("label", { for: files.id }, "Pool"), " ", files, h("p", { class: "quiet", id: "pool-hint" }, hint(manifest.input)), poolStatus);
  const poolName = h("input", { type: "text", spellcheck: "false" });
  const source = tabs("Location of the pool", [["Upload", h("div", {}, drop)], ["On the server", h("div", {}, field("File", poolName, "a file name in the service's folder of pools (DUBITO_POOLS)"))]]);
  const k = h("input", { type: "number", min: 1, step: 1, value: 10 });
  const acquisition = h("select", { onchange: explain });
  const acquisitionHint = h("span", { class: "quiet" });
  const draws = h("input", { type: "number", min: 1, max: manifest.noise.max_draws ?? 1000, step: 1, value: manifest.noise.default_draws });
  const seed = h("input", { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 });
  const race = h("select", {}, [["", "Off"], ["0.05", "On: 5 % chance of missing a top row"], ["0.01", "On: 1 % chance of missing a top row"], ["0.001", "On: 0.1 % chance of missing a top row"]].map(([value, name]) => h("option", { value }, name)));
  const raceField = field("Race", race, "drops hopeless rows early, which is faster if few rows are uncertain");
  const sharesPlace = h("div");
  let shares = null; // fields for class shares, if the model supports them
  const mode = h("select", {}, [["", "automatic"], ["now", "immediately"], ["job", "as a job"]].map(([value, name]) => h("option", { value }, name)));
  const excluded = h("input", { type: "checkbox", checked: true });
  const keep = h("input", { type: "checkbox", onchange: () => (control.disabled = !keep.checked) });
  const control = h("input", { type: "number", min: 0, max: 1, step: 0.05, value: 0, disabled: true });
  const start = h("button", { type: "submit", class: "main" }, "Choose");
  const stop = h("button", { type: "button", hidden: true, onclick: () => pending?.abort() }, "Stop");
  const place = h("section", { class: "chosen", "aria-label": "Rows to label" }, h("h2", {}, "How it works"), h("ol", { class: "steps" }, STEPS.map((text) => h("li", {}, text))));
  const acquisitionField = field("Rank by", acquisition);
  acquisitionField.classList.add("wide");
  acquisitionField.append(acquisitionHint);
  const jobs = jobList({ onresult: showJob, onfailure: (job) => fill(place, notice(job.error ?? `The job was ${job.state}.`)) });
  const learning = learningSection(app.model, async () => { await app.refresh(); });
  const form = h("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); choose(); } },
    source.element, field("Rows to label (k)", k), acquisitionField,
    h("p", { class: "actions" }, start, stop),
    h("details", { class: "options" }, h("summary", {}, "Options"), field("Version", version), field("Draws", draws), field("Seed", seed, "empty: a new seed each time"), raceField, field("Run", mode, "large pools become a job, which continues after you close the page"),
      field("Skip labelled rows", excluded, "rows whose ID already has a label"), field("Store the selected rows", keep, "on the service's disk, so that a label needs only the ID; the pool must have IDs"), field("Share of control rows", control, "chosen at random to measure the real quality; needs stored rows"),
      sharesPlace));
  const controls = { poolName, version, k, draws, seed, mode, race, excluded, keep, control, acquisition };
  fill(view, h("h1", {}, `Choose rows to label for ${app.model}`), h("div", { class: "two" }, h("section", { "aria-label": "Pool" }, form), place), learning.element, jobs.element);
  onFiles(drop, selectFiles);
  updateOptions();
  if (state) await restore();
  await Promise.all([jobs.begin(), learning.begin()]);

  function updateOptions() {
    const before = acquisition.value;
    fill(acquisition, ACQUISITIONS[manifest.task].map(([name, label]) => h("option", { value: name, selected: name === before }, label)));
    shares = classShares(manifest);
    fill(sharesPlace, shares?.element);
    explain();
  }

  async function restore() {
    source.choose(state.source);
    for (const [name, value] of Object.entries(state.values)) {
      if (controls[name].type === "checkbox") controls[name].checked = value;
      else controls[name].value = value;
    }
    if (version.value === "") version.value = "latest"; // the selected version is gone
    if (version.value !== "latest") await changeVersion();
    draws.value = state.values.draws;
    if (acquisition.value === "") acquisition.selectedIndex = 0;
    control.disabled = !keep.checked;
    shares?.restore(state.shares);
    explain();
    if (pool) await showPool();
    if (state.ranked) await showRanking(state.ranked.answer, state.ranked.source);
  }

  function explain() {
    acquisitionHint.textContent = ACQUISITIONS[manifest.task].find(([name]) => name === acquisition.value)?.[2] ?? "";
    raceField.hidden = !RACED[manifest.task].includes(acquisition.value);
  }

  async function changeVersion() {
    try {
      manifest = version.value === "latest" ? description.manifest : (await requestJson(`models/${encodeURIComponent(app.model)}/versions/${encodeURIComponent(version.value)}`)).manifest;
      draws.value = manifest.noise.default_draws;
      updateOptions();
    } catch (error) {
      fail(error);
    }
  }

  async function selectFiles(selection) {
    if (!selection.length) return;
    try {
      pool = await poolFromFiles([...selection], manifest.input);
      await showPool();
    } catch (error) {
      pool = null;
      fill(poolStatus, notice(error.message));
    }
  }

  async function showPool() {
    const rows = await pool.rows({ model: app.model, version: version.value });
    fill(poolStatus, `${pool.name}: ${rows === null ? "" : `${number(rows)} ${rows === 1 ? "row" : "rows"}, `}${bytes(pool.size)}.`);
  }

  function fields() {
    const asNumber = (input) => (input.value === "" ? null : Number(input.value));
    return {
      model: app.model, version: version.value, acquisition: acquisition.value, k: asNumber(k), num_samples: asNumber(draws), seed: asNumber(seed),
      race: race.value === "" || raceField.hidden ? null : Number(race.value), priors: shares?.value() ?? null,
      exclude_labelled: excluded.checked ? null : false, keep: keep.checked ? true : null, control: keep.checked && Number(control.value) > 0 ? Number(control.value) : null,
    };
  }

  async function choose() {
    const isUpload = source.selected === 0;
    const selection = isUpload ? pool : poolName.value.trim() ? poolFromService(poolName.value.trim()) : null;
    if (!selection) {
      fill(place, notice(isUpload ? "Choose a pool file first." : "Enter the name of a pool file first."));
      (isUpload ? files : poolName).focus();
      return;
    }
    const controller = (pending = new AbortController()), options = fields(), rankedPool = { ...selection, isStored: options.keep };
    const rows = await rankedPool.rows(options);
    const isLarge = rows === null ? rankedPool.size > LARGE_BYTES : rows * (options.num_samples ?? 1) > LARGE_ROW_DRAWS;
    const isJob = mode.value === "job" || (mode.value === "" && isLarge);
    start.disabled = true;
    stop.hidden = false;
    releasePictures();
    ranked = null;
    fill(place, h("p", { class: "quiet", role: "status" }, isJob ? "Uploading the pool …" : "Ranking …"));
    try {
      const answer = await (await rankedPool.send(isJob ? "acquire/jobs" : "acquire", options, controller.signal)).json();
      if (hasLeft) return;
      if (isJob) {
        fill(place, h("p", { role: "status" }, `Started a job for ${number(answer.rows)} rows. Its result will appear here and in the list of jobs below.`));
        jobs.add(answer, rankedPool);
      } else (await showRanking(answer, rankedPool))?.focus();
    } catch (error) {
      if (error.name === "AbortError") fill(place, h("p", { class: "quiet", role: "status" }, "Stopped."));
      else fail(error);
    } finally {
      start.disabled = false;
      stop.hidden = true;
    }
  }

  async function showJob(job, rankedPool) {
    try {
      const answer = await requestJson(job.result);
      if (!hasLeft) await showRanking(answer, rankedPool);
    } catch (error) {
      fail(error);
    }
  }

  async function showRanking(answer, rankedPool) {
    releasePictures();
    const ranking = await rankingElement(answer, rankedPool, manifest.output, learning.refresh);
    if (hasLeft) {
      ranking.release();
      return null;
    }
    releasePictures = ranking.release;
    ranked = { answer, source: rankedPool };
    fill(place, ranking.element);
    return ranking;
  }

  function fail(error) {
    fill(place, notice(error.message));
    if (!(error instanceof ServiceError)) throw error;
  }

  return () => {
    const values = Object.fromEntries(Object.entries(controls).map(([name, input]) => [name, input.type === "checkbox" ? input.checked : input.value]));
    states.set(description.name, { pool, ranked, values, source: source.selected, shares: shares?.saved() ?? null });
    hasLeft = true;
    pending?.abort();
    releasePictures();
    jobs.end();
    learning.end();
  };
}

function hint(spec) {
  const formats = spec.text ? "CSV with a column of texts, .txt files, a ZIP of text files, " : spec.columns.length ? "CSV with the model's columns, " : spec.image ? "Images, a ZIP of images, " : "";
  return `${formats}.npy, .npz or .parquet. Row IDs come from an id column or the file names.`;
}

/** Create fields for the class shares of the pool; null if the model's shares cannot be changed. */
function classShares({ output, categories }) {
  if (!output.classes || !output.priors || categories || output.classes.length > MAX_CLASSES) return null;
  const uses = h("input", { type: "checkbox", onchange: () => (list.hidden = !uses.checked) });
  const inputs = output.classes.map((_, i) => h("input", { type: "number", min: 0, step: "any", value: Number((100 * output.priors[i]).toPrecision(3)) }));
  const list = h("div", { class: "shares", hidden: true }, output.classes.map((name, i) => field(name, inputs[i])));
  return {
    element: [field("Set class shares", uses, "in %, if they differ from the training data"), list],
    /** Return shares by class that sum to 1; null to use those of the training data. */
    value() {
      const sum = inputs.reduce((total, input) => total + Number(input.value), 0);
      return uses.checked ? Object.fromEntries(output.classes.map((name, i) => [name, sum > 0 ? Number(inputs[i].value) / sum : 0])) : null;
    },
    saved: () => ({ uses: uses.checked, values: inputs.map((input) => input.value) }),
    restore(saved) {
      if (saved?.values.length !== inputs.length) return;
      uses.checked = saved.uses;
      list.hidden = !saved.uses;
      saved.values.forEach((value, i) => (inputs[i].value = value));
    },
  };
}
