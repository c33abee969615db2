// The view that chooses: a pool of rows in a file, and which of them to label.

import { askJson, Refused } from "./api.js";
import { bytes, field, fill, h, notice, number, tabs, unpublished, whenGiven } from "./dom.js";
import { jobsOf } from "./jobs.js";
import { learningOf } from "./learning.js";
import { ACCEPTED, poolAtService, poolOf } from "./pools.js";
import { shownRanking } from "./ranking.js";

const LARGE_ROW_DRAWS = 1_000_000; // of a pool that is better ranked by a job
const LARGE_BYTES = 8 << 20; // the same, where the number of rows is not known
const STEPS = [
  "Give it a pool: rows that nobody has labelled. It chooses those whose labels it would learn most from.",
  "Label them here, one at a time, by buttons or keys.",
  "Fit a candidate on the labels, compare it with the version that is served, and promote it if it is better.",
];
/** What to choose by, the first of a task being its default: the name, why a row is taken, and a hint. */
export const ACQUISITIONS = {
  classification: [
    ["bald", "the draws disagree about its label", "BALD: the usual choice"],
    ["bald_corrected", "they disagree, corrected for their number", "BALD as it were with no end of draws"],
    ["entropy", "it is unsure, for whatever reason", "entropy of the mean probabilities"],
    ["mean_std", "its probabilities differ between draws", "their mean standard deviation"],
    ["variation_ratio", "its label is improbable", "1 - the largest mean probability"],
    ["power_bald", "chance takes it, led by disagreement", "power BALD: for large batches"],
    ["batchbald", "it adds most to those before it", "BatchBALD: for batches of about ten"],
    ["max_det", "it differs from those before it", "MaxDet: for batches of up to 1000"],
    ["random", "chance takes it", "random, to compare with"],
  ],
  regression: [
    ["epistemic_variance", "the draws disagree about its target", "variance of their means: the usual choice"],
    ["variance", "it is unsure, for whatever reason", "variance of the prediction"],
    ["max_det", "it differs from those before it", "MaxDet: for batches of up to 1000"],
    ["random", "chance takes it", "random, to compare with"],
  ],
};

/** Those by which rows can race: the others need all draws of all rows. */
export const RACED = {
  classification: ["bald", "entropy", "mean_std", "variation_ratio"],
  regression: ["epistemic_variance", "variance"],
};
const MOST_CLASSES = 100; // whose shares can be stated here

const kept = new Map(); // by model, for when one comes back to the view: its pool, its ranking and what was asked

/** Show it. */
export async function show(view, app) {
  if (!app.model) {
    fill(view, unpublished("Choose what to label", app));
    return () => {};
  }
  const description = await app.describe(app.model);
  let manifest = description.manifest;
  const before = kept.get(app.model);
  let pool = before?.pool ?? null;
  let ranked = null; // what is shown: {answer, asked}
  let busy = null; // the controller of the question on its way
  let forget = () => {}; // of the pictures that are shown
  let left = false;

  const versions = [...new Set([...Object.keys(description.aliases), ...description.versions])];
  const version = h("select", { onchange: changeVersion }, versions.map((name) => h("option", { value: name, selected: name === "latest" }, name)));
  const files = h("input", { type: "file", multiple: true, accept: ACCEPTED.join(), id: "pool-files", "aria-describedby": "pool-hint", onchange: () => take(files.files) });
  const poolSaid = h("p", { role: "status" });
  const drop = h("div", { class: "drop" }, h("label", { for: files.id }, "The pool"), " ", files, h("p", { class: "quiet", id: "pool-hint" }, hint(manifest.input)), poolSaid);
  const named = h("input", { type: "text", spellcheck: "false" });
  const source = tabs("Where the pool is", [["Your files", h("div", {}, drop)], ["At the service", h("div", {}, field("File", named, "its name in the service's folder of pools, if it has one (DUBITO_POOLS)"))]]);
  const k = h("input", { type: "number", min: 1, step: 1, value: 10 });
  const acquisition = h("select", { onchange: explain });
  const acquisitionSaid = h("span", { class: "quiet" });
  const draws = h("input", { type: "number", min: 1, max: manifest.noise.max_draws ?? 1000, step: 1, value: manifest.noise.default_draws });
  const seed = h("input", { type: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 });
  const race = h("select", {}, [["", "no: each row takes all draws"], ["0.05", "yes; one is missed with 5 %"], ["0.01", "yes; one is missed with 1 %"], ["0.001", "yes; one is missed with .1 %"]].map(([value, name]) => h("option", { value }, name)));
  const raceField = field("Race", race, "rows that cannot be among the best take fewer draws: quicker where few rows are uncertain");
  const sharesPlace = h("div");
  let shares = null; // of the classes, where they may be stated
  const how = h("select", {}, [["", "by its size"], ["now", "at once"], ["job", "as a job"]].map(([value, name]) => h("option", { value }, name)));
  const excluded = h("input", { type: "checkbox", checked: true });
  const keep = h("input", { type: "checkbox", onchange: () => (control.disabled = !keep.checked) });
  const control = h("input", { type: "number", min: 0, max: 1, step: 0.05, value: 0, disabled: true });
  const start = h("button", { type: "submit", class: "main" }, "Choose");
  const stop = h("button", { type: "button", hidden: true, onclick: () => busy?.abort() }, "Stop");
  const place = h("section", { class: "chosen", "aria-label": "Rows to label" }, h("h2", {}, "The rows that teach the model most"), h("ol", { class: "steps" }, STEPS.map((text) => h("li", {}, text))));
  const acquisitionField = field("Take a row because", acquisition);
  acquisitionField.classList.add("wide");
  acquisitionField.append(acquisitionSaid);
  const jobs = jobsOf({ show: showJob, without: (job) => fill(place, notice(job.error ?? `The job was ${job.state}.`)) });
  const learning = learningOf(app.model, async () => { await app.refresh(); });
  const form = h("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); choose(); } },
    source.element, field("Rows to label (k)", k), acquisitionField,
    h("p", { class: "actions" }, start, stop),
    h("details", { class: "options" }, h("summary", {}, "Options"), field("Version", version), field("Draws", draws), field("Seed", seed, "empty: fresh draws, and the answer says which"), raceField, field("Rank", how, "large pools become a job: it goes on when this page is closed"),
      field("Leave out labelled rows", excluded, "those whose id has a label already"), field("Keep the chosen rows", keep, "on the service's disk, so that a label needs the id alone; the pool must have ids"), field("Share set aside", control, "of the k rows, at random: their labels judge the model. Needs kept rows"),
      sharesPlace));
  const controls = { named, version, k, draws, seed, how, race, excluded, keep, control, acquisition };
  fill(view, h("h1", {}, `Choose what to label for ${app.model}`), h("div", { class: "two" }, h("section", { "aria-label": "Pool" }, form), place), learning.element, jobs.element);
  whenGiven(drop, take);
  acquisitionsOf();
  if (before) await restore();
  await Promise.all([jobs.begin(), learning.begin()]);

  function acquisitionsOf() {
    const known = ACQUISITIONS[manifest.task];
    const before = acquisition.value;
    fill(acquisition, known.map(([name, because]) => h("option", { value: name, selected: name === before }, because)));
    shares = sharesOf(manifest);
    fill(sharesPlace, shares?.element);
    explain();
  }

  /** Put back what was asked and what came of it when one left the view. */
  async function restore() {
    source.choose(before.source);
    for (const [name, value] of Object.entries(before.values)) {
      if (controls[name].type === "checkbox") controls[name].checked = value;
      else controls[name].value = value;
    }
    if (version.value === "") version.value = "latest"; // the one that was chosen is gone
    if (version.value !== "latest") await changeVersion();
    draws.value = before.values.draws;
    if (acquisition.value === "") acquisition.selectedIndex = 0;
    control.disabled = !keep.checked;
    shares?.restore(before.shares);
    explain();
    if (pool) await sayPool();
    if (before.ranked) await showRanking(before.ranked.answer, before.ranked.asked);
  }

  function explain() {
    acquisitionSaid.textContent = ACQUISITIONS[manifest.task].find(([name]) => name === acquisition.value)?.[2] ?? "";
    raceField.hidden = !RACED[manifest.task].includes(acquisition.value);
  }

  async function changeVersion() {
    try {
      manifest = version.value === "latest" ? description.manifest : (await askJson(`models/${encodeURIComponent(app.model)}/versions/${encodeURIComponent(version.value)}`)).manifest;
      draws.value = manifest.noise.default_draws;
      acquisitionsOf();
    } catch (error) {
      fail(error);
    }
  }

  async function take(given) {
    const chosen = [...given];
    if (!chosen.length) return;
    try {
      pool = await poolOf(chosen, manifest.input);
      await sayPool();
    } catch (error) {
      pool = null;
      fill(poolSaid, notice(error.message));
    }
  }

  async function sayPool() {
    const rows = await pool.rows({ model: app.model, version: version.value });
    fill(poolSaid, `${pool.name}: ${rows === null ? "" : `${number(rows)} ${rows === 1 ? "row" : "rows"}, `}${bytes(pool.size)}.`);
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
    const isOwn = source.chosen === 0;
    const given = isOwn ? pool : named.value.trim() ? poolAtService(named.value.trim()) : null;
    if (!given) {
      fill(place, notice(isOwn ? "Choose the file of the pool first." : "Write the name of the pool's file first."));
      (isOwn ? files : named).focus();
      return;
    }
    const controller = (busy = new AbortController()), wanted = fields(), asked = { ...given, kept: wanted.keep };
    const rows = await asked.rows(wanted);
    const isLarge = rows === null ? asked.size > LARGE_BYTES : rows * (wanted.num_samples ?? 1) > LARGE_ROW_DRAWS;
    const isJob = how.value === "job" || (how.value === "" && isLarge);
    start.disabled = true;
    stop.hidden = false;
    forget();
    ranked = null;
    fill(place, h("p", { class: "quiet", role: "status" }, isJob ? "Sending the pool." : "Ranking."));
    try {
      const answer = await (await asked.send(isJob ? "acquire/jobs" : "acquire", wanted, controller.signal)).json();
      if (left) return;
      if (isJob) {
        fill(place, h("p", { role: "status" }, `It is a job now, of ${number(answer.rows)} rows. Its result comes here; later it is found in the list of jobs below.`));
        jobs.add(answer, asked);
      } else (await showRanking(answer, asked))?.focus();
    } catch (error) {
      if (error.name === "AbortError") fill(place, h("p", { class: "quiet", role: "status" }, "Stopped."));
      else fail(error);
    } finally {
      start.disabled = false;
      stop.hidden = true;
    }
  }

  async function showJob(job, asked) {
    try {
      const answer = await askJson(job.result);
      if (!left) await showRanking(answer, asked);
    } catch (error) {
      fail(error);
    }
  }

  async function showRanking(answer, asked) {
    forget();
    const shown = await shownRanking(answer, asked, manifest.output, learning.refresh);
    if (left) {
      shown.forget();
      return null;
    }
    forget = shown.forget;
    ranked = { answer, asked };
    fill(place, shown.element);
    return shown;
  }

  function fail(error) {
    fill(place, notice(error.message));
    if (!(error instanceof Refused)) throw error;
  }

  return () => {
    const values = Object.fromEntries(Object.entries(controls).map(([name, one]) => [name, one.type === "checkbox" ? one.checked : one.value]));
    kept.set(description.name, { pool, ranked, values, source: source.chosen, shares: shares?.saved() ?? null });
    left = true;
    busy?.abort();
    forget();
    jobs.end();
    learning.end();
  };
}

function hint(spec) {
  const own = spec.text ? "a .csv with a column of texts, a .zip of text files, several .txt files" : spec.columns.length ? "a .csv with its columns" : spec.image ? "image files, or a .zip of them" : null;
  return `${own ? `${own[0].toUpperCase()}${own.slice(1)}, or a` : "A"} file of rows: .npy, .npz or .parquet. A column or array of ids, or the files' names, name the rows.`;
}

/** Fields for the shares of a model's classes in a pool; null where it can have no others than those of its training data. */
function sharesOf({ output, categories }) {
  if (!output.classes || !output.priors || categories || output.classes.length > MOST_CLASSES) return null;
  const uses = h("input", { type: "checkbox", onchange: () => (of.hidden = !uses.checked) });
  const inputs = output.classes.map((_, i) => h("input", { type: "number", min: 0, step: "any", value: Number((100 * output.priors[i]).toPrecision(3)) }));
  const of = h("div", { class: "shares", hidden: true }, output.classes.map((name, i) => field(name, inputs[i])));
  return {
    element: [field("Other shares of classes", uses, "than in the training data: scores are those under the shares that you expect here, in %"), of],
    /** Shares that sum to 1, by class; null where those of the training data hold. */
    value() {
      const sum = inputs.reduce((total, input) => total + Number(input.value), 0);
      return uses.checked ? Object.fromEntries(output.classes.map((name, i) => [name, sum > 0 ? Number(inputs[i].value) / sum : 0])) : null;
    },
    saved: () => ({ uses: uses.checked, values: inputs.map((input) => input.value) }),
    restore(saved) {
      if (saved?.values.length !== inputs.length) return;
      uses.checked = saved.uses;
      of.hidden = !saved.uses;
      saved.values.forEach((value, i) => (inputs[i].value = value));
    },
  };
}
