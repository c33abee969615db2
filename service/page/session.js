// Labelling sessions: the pool, the selected rows and the labels of each model. They survive a reload in IndexedDB.

import { requestJson, ServiceError } from "./api.js";
import { useEffect, useState } from "./components.js";
import { poolFromFiles, poolFromService } from "./pools.js";

// Larger pools become a job.
const LARGE_ROW_DRAWS = 1_000_000;
const LARGE_BYTES = 8 << 20; // if the number of rows is unknown
const MAX_ROWS = 200; // with a preview
const RETRY_MS = 3000;

let database = null; // promise of the open database
const sessions = new Map(); // promises by model

/** Return the session of a model, null while it loads. The component is drawn again whenever it changes. */
export function useSession(model, manifest) {
  const [session, setSession] = useState(null);
  const [, draw] = useState(0);
  useEffect(() => {
    if (!manifest) return;
    if (!sessions.has(model)) sessions.set(model, new Session(model, manifest).restore());
    let isMounted = true;
    const redraw = () => draw((count) => count + 1);
    const loading = sessions.get(model);
    loading.then((loaded) => {
      if (!isMounted) return;
      loaded.listeners.add(redraw);
      setSession(loaded);
    });
    return () => {
      isMounted = false;
      loading.then((loaded) => loaded.listeners.delete(redraw));
    };
  }, [model, manifest]);
  return session;
}

class Session {
  constructor(model, manifest) {
    this.model = model;
    this.manifest = manifest;
    this.listeners = new Set();
    this.pool = null;
    this.job = null; // {id} of the job that ranks the pool
    this.isFitting = false; // a fit was started on this page
    this.reset(null);
  }

  reset(answer) {
    if (this.unsent?.size) throw new ServiceError(0, `${this.unsent.size} labels are not stored yet. Try again when they are.`);
    this.answer = answer; // of /acquire
    this.rows = answer ? mixRandomRows(answer.ranking).slice(0, MAX_ROWS) : [];
    this.hasIds = !this.rows.every(({ id }) => /^row-[0-9a-f]{16}/.test(id)); // otherwise an ID is a hash of the row
    this.preview?.release?.();
    this.preview = null;
    this.labels = new Map(); // by index, in the order of labelling
    this.comments = new Map(); // by index
    this.unsure = new Set();
    this.unsent = new Map(); // values by index, null to delete the label
    this.rejections = []; // messages
    this.error = null; // message of the last request that failed
    this.current = null;
  }

  /** Load the session of an earlier page. */
  async restore() {
    try {
      const [pool, progress] = await Promise.all([this.model, `${this.model}/labels`].map((key) => inStore("readonly", (store) => store.get(key))));
      if (!pool) return this;
      this.pool = pool.files ? await poolFromFiles(pool.files, this.manifest.input) : poolFromService(pool.name);
      this.job = pool.job;
      if (!pool.answer) return this;
      await this.start(pool.answer);
      for (const name of ["labels", "unsent", "comments"]) this[name] = new Map(progress?.[name]);
      this.unsure = new Set(progress?.unsure);
      this.isFitting = progress?.isFitting ?? false;
      this.next();
      this.flush();
    } catch (error) {
      console.info(`Cannot restore the labelling session: ${error.message}`);
    }
    return this;
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  save(withPool = false) {
    const { files = null, name } = this.pool ?? {};
    const { labels, unsent, comments, unsure, isFitting, answer, job } = this;
    const store = (key, value) => inStore("readwrite", (store) => store.put(value, key)).catch(() => {}); // then a reload starts again
    if (withPool) store(this.model, { files, name, answer, job });
    store(`${this.model}/labels`, { labels: [...labels], unsent: [...unsent], comments: [...comments], unsure: [...unsure], isFitting });
    this.changed();
  }

  /** Use files as the pool, or the name of a file in the service's folder of pools. */
  async setPool(source) {
    this.pool = typeof source === "string" ? poolFromService(source) : await poolFromFiles([...source], this.manifest.input);
    this.poolRows = await this.pool.rows({ model: this.model });
    this.changed();
  }

  /** Select rows of the pool for labelling, a share of them at random; returns whether this takes a job. */
  async rank(options, randomShare) {
    const rows = await this.pool.rows({ model: this.model });
    const isJob = rows === null ? this.pool.size > LARGE_BYTES : rows * (options.num_samples ?? 1) > LARGE_ROW_DRAWS;
    const fields = { model: this.model, ...options, keep: true, control: randomShare || null };
    const answer = await (await this.pool.send(isJob ? "acquire/jobs" : "acquire", fields)).json();
    this.job = isJob ? { id: answer.id } : null;
    if (isJob) this.reset(null);
    else await this.start(answer);
    this.save(true);
    return isJob;
  }

  /** Start labelling the rows of an answer. */
  async start(answer, pool = this.pool) {
    this.pool = pool;
    this.reset(answer);
    this.preview = pool && this.rows.length ? await pool.preview(this.rows, { model: this.model, version: answer.version }) : { kind: "none", note: "The page no longer has the pool, so its rows cannot be shown." };
    this.next();
  }

  next() {
    this.current = this.rows.find(({ index }) => !this.labels.has(index) && !this.unsure.has(index)) ?? null;
  }

  label(value) {
    const { index } = this.current;
    this.labels.delete(index); // so that the latest label is the last
    this.labels.set(index, value);
    this.unsure.delete(index);
    this.unsent.set(index, value);
    this.next();
    this.save();
    this.flush();
  }

  /** Set the comment of a row. It is stored with the row's label. */
  comment({ index }, text) {
    this.comments.set(index, text);
    if (this.labels.has(index)) this.unsent.set(index, this.labels.get(index));
    this.save();
    this.flush();
  }

  remove(row) {
    if (this.labels.delete(row.index)) this.unsent.set(row.index, null);
    this.unsure.delete(row.index);
    this.current = row;
    this.save();
    this.flush();
  }

  undo() {
    const index = [...this.labels.keys()].at(-1);
    if (index !== undefined) this.remove(this.rows.find((row) => row.index === index));
  }

  markUnsure() {
    this.unsure.add(this.current.index);
    this.next();
    this.save();
  }

  goTo(row) {
    this.current = row;
    this.changed();
  }

  /** Send waiting labels in order. After a lost connection they are sent again. */
  async flush() {
    if (this.isSending || !this.unsent.size) return;
    this.isSending = true;
    clearTimeout(this.retryTimer);
    try {
      while (this.unsent.size) {
        const [index, value] = this.unsent.entries().next().value;
        const isAccepted = await this.send(this.rows.find((row) => row.index === index), value);
        if (this.unsent.get(index) === value) this.unsent.delete(index); // it may have changed meanwhile
        if (!isAccepted) this.labels.delete(index);
        this.save();
      }
      this.error = null;
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      this.error = error.message;
      if (![401, 403].includes(error.status)) this.retryTimer = setTimeout(() => this.flush(), RETRY_MS);
    } finally {
      this.isSending = false;
      this.changed();
    }
  }

  /** Store or delete a label; returns false if the service rejects it. */
  async send(row, value) {
    const { model, manifest, comments } = this;
    const { id, index } = row;
    try {
      if (value === null) await requestJson("labels/delete", { method: "POST", json: { model, ids: [id] } });
      else await requestJson("labels", { method: "POST", json: { model, replace: true, labels: [{ id, [manifest.output.classes ? "label" : "target"]: value, comment: comments.get(index) ?? null }] } });
      return true;
    } catch (error) {
      if (![404, 409, 413, 422].includes(error.status)) throw error;
      this.rejections.push(`Row ${this.rows.indexOf(row) + 1} was not stored: ${error.message}`);
      return false;
    }
  }
}

/** Spread the random rows, which are last in a ranking, evenly among the others. */
function mixRandomRows(ranking) {
  const random = ranking.filter((row) => row.control), ranked = ranking.filter((row) => !row.control);
  const step = Math.max(1, Math.floor(ranked.length / (random.length || Infinity)));
  return [...ranked.flatMap((row, i) => (step < Infinity && i % step === step - 1 ? [row, ...random.splice(0, 1)] : [row])), ...random];
}

async function inStore(mode, work) {
  database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("dubito", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("sessions");
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  const request = work((await database).transaction("sessions", mode).objectStore("sessions"));
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
