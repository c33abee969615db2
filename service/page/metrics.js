// A history of GET /metrics in which counters keep rising when a process restarts.

/** Parse Prometheus text to samples, [{name, labels, value}], and skip other lines. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
    }
    samples.push({ name: match[1], labels, value: parseValue(match[3]) });
  }
  return samples;
}

const parseValue = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity, NaN })[text] ?? Number(text);

const MAX_VALUES = 3_000_000; // in the whole history

/**
 * Snapshots of samples over time. Counters (including the parts of histograms) are stored as their increase since the
 * first snapshot, so that differences between snapshots are right even if a process restarted in between.
 */
export class History {
  /** Record the samples in `names`; those in `counters` only rise. */
  constructor({ names, counters, maxAgeMs }) {
    this.names = new Set(names);
    this.counters = new Set(counters);
    this.maxAgeMs = maxAgeMs;
    this.snapshots = []; // {time, values}: a number per series, NaN if absent
    this.series = []; // {name, labels, group}
    this.indices = new Map(); // of the series, by name and labels
    this.lastValues = []; // raw
    this.startTimes = new Map(); // by worker
    this.valueCount = 0;
  }

  /** Add the samples of `time`, in milliseconds. */
  add(time, samples) {
    const restarted = this.restartedWorkers(samples);
    const current = new Map(); // values by index
    const groups = new Map(); // indices of the series that restart together, such as the parts of a histogram
    for (const { name, labels, value } of samples) {
      if (!this.names.has(name)) continue;
      const index = this.indexFor(name, labels);
      const { group } = this.series[index];
      current.set(index, value);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(index);
    }
    const before = this.snapshots.at(-1)?.values ?? [];
    const values = Float64Array.from(this.series, ({ name }, index) => (this.counters.has(name) ? valueAt({ values: before }, index) : NaN));
    for (const indices of groups.values()) {
      const isReset = indices.some((index) => this.counters.has(this.series[index].name) && current.get(index) < this.lastValues[index]);
      for (const index of indices) {
        const { name, labels } = this.series[index];
        const value = current.get(index);
        if (!this.counters.has(name)) values[index] = value;
        else if (this.snapshots.length) values[index] += isReset || restarted.has(labels.worker) ? value : value - (this.lastValues[index] ?? 0);
      }
    }
    this.lastValues = Array.from(this.series, (_, index) => current.get(index) ?? 0); // a series that returns counts from 0
    this.snapshots.push({ time, values });
    this.valueCount += values.length;
    while (this.snapshots.length > 2 && (this.snapshots[0].time < time - this.maxAgeMs || this.valueCount > MAX_VALUES)) {
      this.valueCount -= this.snapshots.shift().values.length;
    }
  }

  /** Return the workers that restarted since the last snapshot (undefined is the only process). */
  restartedWorkers(samples) {
    const workers = new Set();
    for (const { name, labels, value } of samples) {
      if (name !== "process_start_time_seconds") continue;
      if (this.startTimes.has(labels.worker) && this.startTimes.get(labels.worker) !== value) workers.add(labels.worker);
      this.startTimes.set(labels.worker, value);
    }
    return workers;
  }

  indexFor(name, labels) {
    const key = `${name}${JSON.stringify(Object.entries(labels).sort())}`;
    let index = this.indices.get(key);
    if (index === undefined) {
      index = this.series.length;
      this.indices.set(key, index);
      const { le, ...groupLabels } = labels;
      const family = le === undefined && !/_(sum|count)$/.test(name) ? name : name.replace(/_(bucket|sum|count)$/, "");
      this.series.push({ name, labels, group: `${family}${JSON.stringify(Object.entries(groupLabels).sort())}` });
    }
    return index;
  }

  /** Return the snapshots of the last `ms` milliseconds. */
  latest(ms) {
    const end = this.snapshots.at(-1)?.time ?? 0;
    const first = this.snapshots.findIndex((snapshot) => snapshot.time >= end - ms);
    return first < 0 ? [] : this.snapshots.slice(first);
  }

  /** Return the indices of the series with a name and labels that satisfy `where`. */
  find(name, where = () => true) {
    const indices = [];
    this.series.forEach((series, index) => {
      if (series.name === name && where(series.labels)) indices.push(index);
    });
    return indices;
  }

  /** Sum the increase of counters between two snapshots. */
  increase(from, to, indices) {
    let sum = 0;
    for (const index of indices) sum += valueAt(to, index) - valueAt(from, index);
    return sum;
  }

  /** Sum the increase for each value of a label, as a Map. */
  increaseBy(from, to, indices, label) {
    const sums = new Map();
    for (const index of indices) {
      const value = this.series[index].labels[label];
      sums.set(value, (sums.get(value) ?? 0) + valueAt(to, index) - valueAt(from, index));
    }
    return sums;
  }

  /** Return a histogram's increase as bins, [{from, to, count}]; the last may end at Infinity. */
  bins(from, to, name, where) {
    const sums = this.increaseBy(from, to, this.find(`${name}_bucket`, where), "le");
    const ends = [...sums].map(([le, count]) => [parseValue(le), count]).sort(([a], [b]) => a - b);
    return ends.map(([end, count], i) => ({ from: i ? ends[i - 1][0] : 0, to: end, count: Math.max(0, count - (i ? ends[i - 1][1] : 0)) }));
  }

  /** Return a gauge's values in a snapshot, by series: [{labels, value}]. */
  gauges(snapshot, name, where = () => true) {
    return this.find(name, where)
      .map((index) => ({ labels: this.series[index].labels, value: snapshot.values[index] ?? NaN }))
      .filter(({ value }) => !Number.isNaN(value));
  }
}

function valueAt(snapshot, index) {
  const value = index < snapshot.values.length ? snapshot.values[index] : 0;
  return Number.isNaN(value) ? 0 : value;
}

/** Estimate the q-quantile of a histogram, interpolated linearly in its bin; null if the histogram is empty. */
export function quantile(bins, q) {
  const total = bins.reduce((sum, bin) => sum + bin.count, 0);
  if (total === 0) return null;
  let below = 0;
  for (const bin of bins) {
    if (bin.count > 0 && below + bin.count >= q * total) {
      if (bin.to === Infinity) return Infinity;
      return bin.from + ((q * total - below) / bin.count) * (bin.to - bin.from);
    }
    below += bin.count;
  }
  return bins.findLast((bin) => bin.count > 0).to;
}

/**
 * Return the range [low, high] that contains the share of flags among `n` rows with probability `level`, if the rows
 * are like the calibration data. Counts are beta-binomial, as in the drift test, because the calibration data are a
 * sample of `calibration` rows; without that number they are binomial.
 */
export function expectedBand(rate, n, calibration = null, level = 0.95) {
  if (n === 0 || rate <= 0 || rate >= 1) return [rate, rate];
  const balls = calibration === null ? 1e12 : calibration + 1;
  const [a, b] = [rate * balls, (1 - rate) * balls];
  // log P(0) = sum over i < n of log((b + i) / (a + b + i)); each P(k + 1) follows from P(k).
  let logP = 0;
  for (let i = 0; i < n; i++) logP += Math.log((b + i) / (a + b + i));
  const tail = (1 - level) / 2;
  let below = 0, low = null;
  for (let k = 0; k <= n; k++) {
    below += Math.exp(logP);
    if (low === null && below >= tail) low = k;
    if (below >= 1 - tail) return [low / n, k / n];
    logP += Math.log(((n - k) * (a + k)) / ((k + 1) * (b + n - k - 1)));
  }
  return [(low ?? 0) / n, 1];
}
