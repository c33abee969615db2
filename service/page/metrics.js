// What GET /metrics says, and its history: counters that start over never count backwards.

/** The samples of a page of Prometheus text: [{name, labels, value}]. Lines that are none are passed over. */
export function parsed(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!found || line.startsWith("#")) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, after) => (after === "n" ? "\n" : after));
    }
    samples.push({ name: found[1], labels, value: valueOf(found[3]) });
  }
  return samples;
}

const valueOf = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity, NaN })[text] ?? Number(text);

const MOST_NUMBERS = 3_000_000; // of all that is kept

/**
 * Samples over time. Those of `counting` families are counters and the parts of histograms: what is kept of them is
 * how far they have risen since the first look, so that `rise` between any two looks is right, whatever started over
 * between them.
 */
export class History {
  /** `kept`: names of samples that are kept at all; `counting`: which of them count; `keptMs`: for how long. */
  constructor({ kept, counting, keptMs }) {
    this.kept = new Set(kept);
    this.counting = new Set(counting);
    this.keptMs = keptMs;
    this.looks = []; // {time, values}: a number for each series, NaN where there was none
    this.series = []; // {name, labels}
    this.places = new Map(); // of the series, by name and labels
    this.last = []; // the last value of each, as it came
    this.starts = new Map(); // when each worker began
    this.numbers = 0;
  }

  /** Take in a page, at `time` in milliseconds. */
  take(time, samples) {
    const restarted = this.restarted(samples);
    const found = new Map(); // place: value
    const groups = new Map(); // a counter, or the parts of a histogram, which start over together: their places
    for (const { name, labels, value } of samples) {
      if (!this.kept.has(name)) continue;
      const place = this.place(name, labels);
      const { group } = this.series[place];
      found.set(place, value);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(place);
    }
    const before = this.looks.at(-1)?.values ?? [];
    const values = Float64Array.from(this.series, ({ name }, place) => (this.counting.has(name) ? at({ values: before }, place) : NaN));
    for (const places of groups.values()) {
      const isAnew = places.some((place) => this.counting.has(this.series[place].name) && found.get(place) < this.last[place]);
      for (const place of places) {
        const { name, labels } = this.series[place];
        const value = found.get(place);
        if (!this.counting.has(name)) values[place] = value;
        else if (this.looks.length) values[place] += isAnew || restarted.has(labels.worker) ? value : value - (this.last[place] ?? 0);
      }
    }
    this.last = Array.from(this.series, (_, place) => found.get(place) ?? 0); // what is gone counts from 0 when it is back
    this.looks.push({ time, values });
    this.numbers += values.length;
    while (this.looks.length > 2 && (this.looks[0].time < time - this.keptMs || this.numbers > MOST_NUMBERS)) {
      this.numbers -= this.looks.shift().values.length;
    }
  }

  /** The workers (undefined: the only process) that are not the ones of the look before. */
  restarted(samples) {
    const workers = new Set();
    for (const { name, labels, value } of samples) {
      if (name !== "process_start_time_seconds") continue;
      if (this.starts.has(labels.worker) && this.starts.get(labels.worker) !== value) workers.add(labels.worker);
      this.starts.set(labels.worker, value);
    }
    return workers;
  }

  place(name, labels) {
    const key = `${name}${JSON.stringify(Object.entries(labels).sort())}`;
    let place = this.places.get(key);
    if (place === undefined) {
      place = this.series.length;
      this.places.set(key, place);
      const { le, ...others } = labels;
      const family = le === undefined && !/_(sum|count)$/.test(name) ? name : name.replace(/_(bucket|sum|count)$/, "");
      this.series.push({ name, labels, group: `${family}${JSON.stringify(Object.entries(others).sort())}` });
    }
    return place;
  }

  /** The looks of the `ms` milliseconds up to the latest. */
  since(ms) {
    const end = this.looks.at(-1)?.time ?? 0;
    const first = this.looks.findIndex((look) => look.time >= end - ms);
    return first < 0 ? [] : this.looks.slice(first);
  }

  /** The series of a name for which `where(labels)` holds: their places. */
  of(name, where = () => true) {
    const places = [];
    this.series.forEach((one, place) => {
      if (one.name === name && where(one.labels)) places.push(place);
    });
    return places;
  }

  /** How much those counters have risen together from one look to another. */
  rise(from, to, places) {
    let sum = 0;
    for (const place of places) sum += at(to, place) - at(from, place);
    return sum;
  }

  /** The rise by a label: a Map from its values to their sums. */
  riseBy(from, to, places, label) {
    const sums = new Map();
    for (const place of places) {
      const value = this.series[place].labels[label];
      sums.set(value, (sums.get(value) ?? 0) + at(to, place) - at(from, place));
    }
    return sums;
  }

  /** A histogram's rise: [{from, to, count}], bins by their ends, the last one without end where it has any. */
  bins(from, to, name, where) {
    const sums = this.riseBy(from, to, this.of(`${name}_bucket`, where), "le");
    const ends = [...sums].map(([le, count]) => [valueOf(le), count]).sort(([a], [b]) => a - b);
    return ends.map(([end, count], i) => ({ from: i ? ends[i - 1][0] : 0, to: end, count: Math.max(0, count - (i ? ends[i - 1][1] : 0)) }));
  }

  /** The values of a gauge at a look, by series: [{labels, value}]. */
  gauges(look, name, where = () => true) {
    return this.of(name, where)
      .map((place) => ({ labels: this.series[place].labels, value: look.values[place] ?? NaN }))
      .filter(({ value }) => !Number.isNaN(value));
  }
}

function at(look, place) {
  const value = place < look.values.length ? look.values[place] : 0;
  return Number.isNaN(value) ? 0 : value;
}

/** The value below which a share `q` of a histogram lies, taken as evenly spread in its bin; null where it is empty. */
export function quantile(bins, q) {
  const all = bins.reduce((sum, bin) => sum + bin.count, 0);
  if (all === 0) return null;
  let below = 0;
  for (const bin of bins) {
    if (bin.count > 0 && below + bin.count >= q * all) {
      if (bin.to === Infinity) return Infinity; // more than the last end
      return bin.from + ((q * all - below) / bin.count) * (bin.to - bin.from);
    }
    below += bin.count;
  }
  return bins.findLast((bin) => bin.count > 0).to;
}

/**
 * Between which shares of `n` rows' flags lie with a probability of `level`, for rows like the calibration data:
 * [low, high]. The calibration is itself a sample, of `calibration` rows, so counts are beta-binomial: the urn that
 * the drift test takes for granted too. Without `calibration` they are binomial.
 */
export function expectedBand(rate, n, calibration = null, level = 0.95) {
  if (n === 0 || rate <= 0 || rate >= 1) return [rate, rate];
  const balls = calibration === null ? 1e12 : calibration + 1;
  const [a, b] = [rate * balls, (1 - rate) * balls];
  // log P(0) = sum over i < n of log((b + i) / (a + b + i)), and each P(k + 1) of the one before.
  let log = 0;
  for (let i = 0; i < n; i++) log += Math.log((b + i) / (a + b + i));
  const tail = (1 - level) / 2;
  let below = 0, low = null;
  for (let k = 0; k <= n; k++) {
    below += Math.exp(log);
    if (low === null && below >= tail) low = k;
    if (below >= 1 - tail) return [low / n, k / n];
    log += Math.log(((n - k) * (a + k)) / ((k + 1) * (b + n - k - 1)));
  }
  return [(low ?? 0) / n, 1];
}
