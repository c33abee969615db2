// The view Label, in four steps: select rows of a pool, label them, fit a candidate, and approve it.

import { requestJson, ServiceError } from "./api.js";
import { address, Button, Card, Failure, Field, html, Notice, useFetch, useState } from "./components.js";
import { bytes, number } from "./format.js";
import { Jobs } from "./jobs.js";
import { Labelling } from "./labelling.js";
import { Approve, Fit } from "./learning.js";
import { ACCEPTED } from "./pools.js";
import { useSession } from "./session.js";

const STEPS = { pool: "Pool", label: "Label", fit: "Fit", approve: "Approve" };
const RANDOM_SHARE = 0.1;
const MAX_CLASSES = 100; // with a field for their share
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
    ["random", "random", "for comparison"],
  ],
  regression: [
    ["epistemic_variance", "disagreement between the draws", "variance of the draws' means, the usual choice"],
    ["variance", "total uncertainty", "variance of the prediction"],
    ["random", "random", "for comparison"],
  ],
};
/** The acquisitions that support races; the others need all draws of all rows. */
export const RACED = {
  classification: ["bald", "entropy", "mean_std", "variation_ratio"],
  regression: ["epistemic_variance", "variance"],
};

export default function Label({ app, model, path }) {
  const { data: description, error, reload } = useFetch(() => app.describe(model), [model]);
  const session = useSession(model, description?.manifest);
  if (error) return html`<h1>Label</h1><${Failure} ...${{ error, reload }} />`;
  if (!session) return html`<p class="quiet">Loading …</p>`;
  const step = STEPS[path[0]] ? path[0] : session.rows.length ? "label" : "pool";
  const done = { pool: session.pool !== null && session.rows.length > 0, label: session.rows.length > 0 && session.current === null };
  return html`
    <h1>Label rows for <bdi>${model}</bdi></h1>
    <ol class="stepper" aria-label="Steps">${Object.entries(STEPS).map(([key, name]) => html`<li class=${done[key] ? "done" : null}><a href=${address("label", model, key)} aria-current=${key === step ? "step" : null}>${name}${key === "label" && session.rows.length ? ` ${number(session.labels.size)}/${number(session.rows.length)}` : ""}</a></li>`)}</ol>
    ${step === "pool" ? html`<${Pool} session=${session} />` : step === "label" ? html`<${Labelling} session=${session} />` : step === "fit" ? html`<${Fit} session=${session} />` : html`<${Approve} app=${app} model=${model} />`}`;
}

/** Choose a pool, and select the rows to label. */
function Pool({ session }) {
  const { model, manifest, pool } = session;
  const { noise, task, input, output } = manifest;
  const [message, setMessage] = useState(null); // {kind, text}
  const [acquisition, setAcquisition] = useState(ACQUISITIONS[task][0][0]);
  const fail = (error) => setMessage({ kind: "bad", text: error.message });
  const canShare = output.classes && output.priors && !manifest.categories && output.classes.length <= MAX_CLASSES;
  const choose = async (source) => {
    try {
      setMessage(null);
      await session.setPool(source);
    } catch (error) {
      fail(error);
    }
  };
  const goOn = () => (location.hash = address("label", model, "label"));

  async function select(event) {
    event.preventDefault();
    const form = event.target.elements;
    const asNumber = (field) => (field.value === "" ? null : Number(field.value));
    const shares = canShare && output.classes.map((name, i) => Number(form[`share-${i}`].value));
    const total = shares && shares.reduce((sum, share) => sum + share, 0);
    const isChanged = canShare && output.classes.some((_, i) => form[`share-${i}`].value !== form[`share-${i}`].defaultValue);
    try {
      if (form.server.value.trim()) await session.setPool(form.server.value.trim());
      if (!session.pool) return setMessage({ kind: "bad", text: "Choose a pool first." });
      setMessage({ kind: "told", text: "Selecting rows …" });
      const isJob = await session.rank({
        acquisition, k: asNumber(form.k), num_samples: asNumber(form.draws), seed: asNumber(form.seed), race: asNumber(form.race ?? { value: "" }),
        priors: isChanged ? Object.fromEntries(output.classes.map((name, i) => [name, shares[i] / (total || 1)])) : null,
      }, Number(form.random.value) / 100);
      if (isJob) setMessage({ kind: "told", text: "The pool is large, so a job ranks it. It continues if you close the page." });
      else goOn();
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      fail(error);
    }
  }

  const showJob = async (job) => {
    const isAwaited = job.id === session.job?.id;
    await session.start(await requestJson(job.result), isAwaited ? pool : null);
    session.job = null;
    session.save(true);
    goOn();
  };

  return html`
    <${Card} title="Which rows should be labelled?">
      <p>Upload unlabelled rows. Dubito selects the most informative ones.</p>
      <form novalidate onsubmit=${select}>
        <div class="drop" ondragover=${(event) => event.preventDefault()} ondrop=${(event) => { event.preventDefault(); choose(event.dataTransfer.files); }}>
          <label for="pool-files">Pool</label> <input id="pool-files" type="file" multiple accept=${ACCEPTED.join()} aria-describedby="pool-hint" onchange=${(event) => event.target.files.length && choose(event.target.files)} />
          <p class="quiet" id="pool-hint">${hint(input)}</p>
          ${pool && html`<p role="status">${pool.name}${session.poolRows ? `: ${number(session.poolRows)} ${session.poolRows === 1 ? "row" : "rows"}` : ""}${Number.isFinite(pool.size) ? `, ${bytes(pool.size)}` : ""}.</p>`}
        </div>
        <${Field} label="Rows to label"><input name="k" type="number" min="1" step="1" defaultValue="20" /><//>
        <p class="actions"><button type="submit" class="main">Select rows</button></p>
        ${message && html`<${Notice} kind=${message.kind}>${message.text}<//>`}
        <details class="options"><summary>Advanced</summary>
          <${Field} label="Rank by" hint=${ACQUISITIONS[task].find(([name]) => name === acquisition)[2]}><select value=${acquisition} onchange=${(event) => setAcquisition(event.target.value)}>${ACQUISITIONS[task].map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select><//>
          <${Field} label="Random rows, in %" hint="to measure real accuracy"><input name="random" type="number" min="0" max="100" defaultValue=${100 * RANDOM_SHARE} /><//>
          <${Field} label="Draws"><input name="draws" type="number" min="1" max=${noise.max_draws ?? 1000} step="1" defaultValue=${noise.default_draws} /><//>
          <${Field} label="Seed" hint="empty: a new seed each time"><input name="seed" type="number" min="0" step="1" /><//>
          ${RACED[task].includes(acquisition) && html`<${Field} label="Race" hint="drops hopeless rows early"><select name="race"><option value="">Off</option>${[0.05, 0.01, 0.001].map((risk) => html`<option value=${risk}>On: ${100 * risk} % chance of missing a top row</option>`)}</select><//>`}
          <${Field} label="File on the server" hint="a name in the service's folder of pools (DUBITO_POOLS)"><input name="server" type="text" spellcheck="false" /><//>
          ${canShare && html`<details><summary>Class shares</summary><p class="quiet">in %, if they differ from the training data</p><div class="shares">${output.classes.map((name, i) => html`<${Field} label=${name}><input name=${`share-${i}`} type="number" min="0" step="any" defaultValue=${Number((100 * output.priors[i]).toPrecision(3))} /><//>`)}</div></details>`}
        </details>
      </form>
    <//>
    <${Jobs} awaited=${session.job?.id} onresult=${showJob} />`;
}

function hint(spec) {
  const formats = spec.text ? "CSV with a column of texts, .txt files, a ZIP of text files, " : spec.columns.length ? "CSV with the model's columns, " : spec.image ? "Images, a ZIP of images, " : "";
  return `${formats}.npy, .npz or .parquet. Row IDs come from an id column, the file names or the rows themselves.`;
}
