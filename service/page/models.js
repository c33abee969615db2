// The view of models: which there are, what is known of one of them, and two of its versions side by side.
// `#/models/NAME` shows a model, `#/models/NAME/1` a version of it, and `#/models/NAME/1/2` compares two.

import { ask, askJson, askPicture, Refused } from "./api.js";
import { comparison } from "./comparison.js";
import { bytes, download, field, fill, h, moment, notice, number, table, unpublished } from "./dom.js";
import { figureOf, figuresOf, share } from "./figures.js";
import { promote } from "./learning.js";
import { strengthsOf } from "./strengths.js";

const MOST_VERSIONS = 10; // whose details are asked for at once, the latest ones
const PLOTS = {
  "reliability.png": "Reliability: accuracy by confidence",
  "pit.png": "Where the targets lie in their predictive distributions",
  "predicted.png": "Predicted against true targets",
  "risk-coverage.png": "Error of the rows that are answered, by how many are",
  "entropy-cdf.png": "Entropy of test rows and of rows unlike them",
  "std-cdf.png": "Standard deviation of test rows and of rows unlike them",
  "roc.png": "Rows unlike the data, told from test rows: ROC curves",
};

/** The order of plots, of entries of a report's files. */
const byPlot = ([a], [b]) => Object.keys(PLOTS).indexOf(a) - Object.keys(PLOTS).indexOf(b);

/** Show it; `link` names the model, and one or two of its versions. */
export async function show(view, app, link) {
  const [linked, ...wanted] = link ? link.split("/").map(plain) : [];
  const pictures = new Set(); // URLs to be revoked
  let left = false;
  const named = linked && app.models.some((model) => model.name === linked) ? linked : null;
  if (named && app.models.find((model) => model.name === named).serving !== null) app.choose(named);
  const name = named ?? app.model ?? app.models[0]?.name ?? null;

  const listPlace = h("div");
  const modelPlace = h("div");
  const said = h("span", { role: "status", class: "quiet" });
  fill(view, h("h1", {}, "Models"), linked && !named ? notice(`There is no model called ${linked}.`) : null, listPlace,
    h("p", { class: "actions" }, h("button", { type: "button", onclick: refresh }, "Refresh"), said), modelPlace);
  await build();
  if (wanted.length) modelPlace.querySelector(wanted[1] ? ".versus" : ".version")?.scrollIntoView();

  async function move(version) {
    try {
      const { before } = await promote(name, version);
      await refresh();
      said.textContent = `Version ${version} is served now, in place of version ${before}.`;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      said.textContent = error.status === 404 ? `The service has no administrator's key (DUBITO_ADMIN_KEY): dubito store alias ${name} latest ${version}` : error.message;
    }
  }

  async function refresh() {
    said.textContent = "Asking …";
    try {
      await app.refresh();
      await build();
      said.textContent = `As of ${new Date().toLocaleTimeString()}.`;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      said.textContent = "";
      fill(modelPlace, notice(error.message));
    }
  }

  async function build() {
    fill(listPlace, listOf(app.models, name));
    if (name === null) {
      fill(view, unpublished("Models", app));
      return;
    }
    const description = await app.describe(name, { fresh: true });
    wanted.forEach((version, i) => (wanted[i] = description.aliases[version] ?? version));
    const versions = await newest(description, MOST_VERSIONS, wanted);
    if (left) return;
    forget();
    fill(modelPlace, modelOf(description), versionsOf(description, versions, all, move), ...(await shownVersions(description, versions)));

    async function all() {
      const rest = await newest(description, description.versions.length, []);
      versions.splice(0, versions.length, ...rest);
      if (!left) fill(modelPlace, modelOf(description), versionsOf(description, versions, all, move), ...(await shownVersions(description, versions)));
    }
  }

  /** One version's figures and report, and two side by side. */
  async function shownVersions(description, versions) {
    const readable = versions.filter((version) => version.manifest);
    if (!readable.length) return [];
    const is = (number) => readable.some((version) => version.version === number);
    const missing = wanted.filter((number) => number && !is(number));
    if (missing.length) {
      const there = description.versions.length > 1 ? `versions ${description.versions[0]} to ${description.versions.at(-1)}` : `version ${description.versions[0]}`;
      return [notice(`${name} has no version ${missing.join(" and no version ")} that can be shown: it has ${there}.`)];
    }
    const first = is(wanted[0]) ? wanted[0] : is(description.serving) ? description.serving : readable[0].version;
    const picker = (value, onchange) => h("select", { onchange }, readable.map((version) => h("option", { value: version.version, selected: version.version === value }, version.version)));
    const onePlace = h("div");
    const one = picker(first, () => {
      history.replaceState(null, "", `#/models/${[name, one.value].map(encodeURIComponent).join("/")}`);
      return showOne();
    });
    const parts = [h("section", { class: "card version", "aria-label": "A version" }, h("div", { class: "version-head" }, h("h2", {}, "What it is good at, and what not"), field("Version", one)), onePlace)];
    await showOne();
    if (readable.length > 1) {
      const others = readable.map((version) => version.version).filter((version) => version !== first);
      const before = picker(is(wanted[1]) ? first : others[0], () => showTwo());
      const after = picker(is(wanted[1]) ? wanted[1] : first, () => showTwo());
      const place = h("div");
      parts.push(h("section", { class: "card versus", "aria-label": "Two versions side by side" }, h("h2", {}, "Two versions side by side"),
        h("div", { class: "pair" }, field("First", before), field("Second", after)), place));
      const showTwo = async () => {
        const two = [before, after].map((select) => readable.find((version) => version.version === select.value));
        const reports = await Promise.all(two.map(reportOf));
        fill(place, comparison(two, reports), plotPairs(two));
      };
      await showTwo();
      for (const select of [before, after]) {
        select.addEventListener("change", () => history.replaceState(null, "", `#/models/${[name, before.value, after.value].map(encodeURIComponent).join("/")}`));
      }
    }
    return parts;

    async function showOne() {
      const version = readable.find(({ version }) => version === one.value);
      const report = await reportOf(version);
      if (one.value === version.version) fill(onePlace, warningsOf(version, description), strengthsOf(version, report), qualityOf(version, report), factsOf(version), reportCard(version, report));
    }
  }

  /** A version's whole report: null where there is none, a message where it cannot be read. Asked for once. */
  async function reportOf(version) {
    if (!version.report) return null;
    version.fullReport ??= askJson(version.report.href).catch((error) => {
      if (!(error instanceof Refused)) throw error;
      return { cannot: error.message };
    });
    return version.fullReport;
  }

  function reportCard(version, report) {
    if (!version.report) return h("p", { class: "quiet" }, "No evaluation report: ", h("code", {}, `dubito evaluate ${version.name}:${version.version}`), " makes one.");
    const files = Object.entries(version.report.files).sort(byPlot);
    const saved = files.filter(([file]) => !file.endsWith(".png"));
    return [
      h("h3", {}, "Evaluation report"),
      report.cannot ? notice(report.cannot) : h("p", {}, `Made ${moment(report.created)} on ${number(report.test?.rows)} test rows of ${report.data}, ${number(report.draws)} draws each.`,
        report.convergence ? ` Its fit: ${report.convergence.says}.` : ""),
      h("p", { class: "actions" }, saved.map(([file, href]) => h("button", { type: "button", onclick: () => save(`${version.name}-${version.version}-${file}`, href) }, `Save ${file}`))),
      h("details", {}, h("summary", {}, "The report's plots"), h("div", { class: "plots" }, files.filter(([file]) => file.endsWith(".png")).map(([file, href]) => picture(file, href, version.version)))),
    ];
  }

  /** The plots of two reports in pairs. */
  function plotPairs(two) {
    const plots = two.map((version) => Object.entries(version.report?.files ?? {}).filter(([file]) => file.endsWith(".png")));
    if (plots.some((found) => !found.length)) {
      const without = two.filter((_, i) => !plots[i].length).map((version) => version.version);
      return h("p", { class: "quiet" }, `Plots side by side need a report of both: version ${without.join(" and version ")} has none.`);
    }
    const files = [...new Set(plots.flat().sort(byPlot).map(([file]) => file))];
    return h("details", { class: "pairs" }, h("summary", {}, "The reports' plots, side by side"),
      files.map((file) => h("div", { class: "pair" }, two.map((version) => {
        const href = version.report.files[file];
        return href ? picture(file, href, version.version) : h("p", { class: "quiet" }, `Version ${version.version} has no ${file}.`);
      }))));
  }

  /** A plot of a report: fetched, for a key may be needed, once it comes near the window. */
  function picture(file, href, version) {
    const title = PLOTS[file] ?? file.replace(/\.png$/, "").replaceAll("-", " ");
    const shown = h("img", { alt: `${title}, version ${version}`, width: 640, height: 480, class: "pending" });
    const open = h("button", { type: "button", class: "large", "aria-label": `Show it large: ${title}, version ${version}`, onclick: () => showLarge(title, shown) }, shown);
    const place = h("figure", {}, h("figcaption", {}, title, h("span", { class: "quiet" }, ` version ${version}`)), open);
    const near = new IntersectionObserver(async (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      near.disconnect();
      try {
        const url = await askPicture(href);
        if (left) return URL.revokeObjectURL(url);
        pictures.add(url);
        shown.addEventListener("load", () => {
          shown.width = shown.naturalWidth;
          shown.height = shown.naturalHeight;
          shown.classList.remove("pending");
        }, { once: true });
        shown.src = url;
      } catch (error) {
        open.replaceWith(notice(error.message));
      }
    }, { rootMargin: "600px" });
    near.observe(place);
    return place;
  }

  async function save(file, href) {
    try {
      const answer = await ask(href);
      download(file, await answer.blob(), answer.headers.get("Content-Type"));
    } catch (error) {
      said.textContent = error.message;
    }
  }

  function forget() {
    pictures.forEach((url) => URL.revokeObjectURL(url));
    pictures.clear();
  }

  return () => {
    left = true;
    forget();
  };
}

/** A plot as large as the window lets it be. */
function showLarge(title, shown) {
  const dialog = h("dialog", { class: "large", "aria-label": title, onclick: () => dialog.close(), onclose: () => dialog.remove() }, h("form", { method: "dialog" }, h("strong", {}, title), h("button", { type: "submit" }, "Close")), shown.cloneNode());
  document.body.append(dialog);
  dialog.showModal();
}

/** A part of an address as it was before it became one. */
function plain(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // it is none of ours
  }
}

/** All models: what is served of each. */
function listOf(models, name) {
  const rows = models.map((model) => {
    const broken = Object.keys(model.broken).length;
    return [
      h("a", { href: `#/models/${encodeURIComponent(model.name)}`, "aria-current": model.name === name ? "true" : null }, model.name),
      broken ? h("span", { class: "badge bad" }, `${broken} broken`) : model.warnings?.length ? h("span", { class: "badge told" }, "doubtful fit") : model.too_few_rows ? h("span", { class: "badge told" }, "few rows") : h("span", { class: "badge good" }, "fine"),
      model.serving ?? h("span", { class: "badge bad" }, "none"),
      mainFigure(model.quality),
      String(model.versions.length),
      model.task ?? "–",
      model.method ?? "–",
    ];
  });
  return models.length ? table("Models that are published", ["model", "state", "serves", "quality", "versions", "task", "method"], rows, [4]) : null;
}

function mainFigure(quality) {
  for (const key of ["test_accuracy", "test_rmse"]) {
    if (quality?.[key] !== undefined) return `${figureOf(key).name} ${figureOf(key).write(quality[key])}`;
  }
  return "–";
}

/** What is known of a model as a whole. */
function modelOf(description) {
  const broken = Object.entries(description.broken);
  return [
    h("h2", {}, description.name),
    description.serving === null ? notice("Nothing of this model can be served.") : null,
    (description.warnings ?? []).map((warning) => notice(warning, "told")),
    description.too_few_rows ? notice(description.too_few_rows, "told") : null,
    broken.map(([version, why]) => notice(`Version ${version} cannot be served: ${why}`)),
  ];
}

/** The versions that are known in detail: those that are wanted, and the latest. */
async function newest(description, most, wanted) {
  const numbers = description.versions.slice(-most);
  for (const version of [...wanted, description.serving]) {
    if (description.versions.includes(version) && !numbers.includes(version)) numbers.unshift(version);
  }
  const path = (version) => `models/${encodeURIComponent(description.name)}/versions/${encodeURIComponent(version)}`;
  const found = await Promise.all(numbers.map(async (version) => {
    try {
      return await askJson(path(version));
    } catch (error) {
      if (!(error instanceof Refused) || error.status === 0) throw error;
      return { name: description.name, version, aliases: [], broken: error.message, manifest: null, report: null };
    }
  }));
  return found.reverse();
}

function versionsOf(description, versions, all, move) {
  const rows = versions.map((version) => {
    const aliases = Object.entries(description.aliases).filter(([, number]) => number === version.version).map(([alias]) => alias);
    const size = description.in_memory[version.version];
    return [
      version.manifest ? h("a", { href: `#/models/${encodeURIComponent(description.name)}/${encodeURIComponent(version.version)}` }, version.version) : version.version,
      version.broken ? h("span", { class: "badge bad" }, "broken") : version.version === description.serving ? h("span", { class: "badge good" }, "served") : h("button", { type: "button", class: "small", onclick: () => move(version.version) }, Number(version.version) > Number(description.serving) ? "Promote" : "Roll back"),
      mainFigure(version.manifest?.quality),
      aliases.join(", ") || "–",
      version.manifest?.method ?? "–",
      version.manifest ? moment(version.manifest.created) : "–",
      size === undefined ? "no" : bytes(size),
      version.report ? "yes" : "no",
    ];
  });
  const hidden = description.versions.length - versions.length;
  return [
    table("Versions, the latest first", ["version", "state", "quality", "aliases", "method", "made", "in memory", "report"], rows),
    hidden > 0 ? h("p", {}, h("button", { type: "button", onclick: all }, `Show ${hidden} more`)) : null,
  ];
}

function warningsOf({ manifest }, description) {
  return [
    manifest.version in description.broken ? notice(description.broken[manifest.version]) : null,
    manifest.warnings.map((warning) => notice(warning, "told")),
    manifest.too_few_rows ? notice(manifest.too_few_rows, "told") : null,
  ];
}

/** What a version is: pairs of a name and what is said, as the page and the comparison show them. */
function factsOf({ manifest, aliases }) {
  const { detectors, noise, abstention, categories, training } = manifest;
  const rows = [
    ["Task", manifest.task === "regression" ? `regression of ${manifest.output.target ?? "a number"}` : `classification into ${manifest.output.classes.length} classes`],
    ["Method", manifest.method],
    ["Takes", takes(manifest.input)],
    ["Draws", `${noise.default_draws} unless asked otherwise${noise.max_draws ? `, at most ${noise.max_draws}` : ""}`],
    ["Flag", `of ${detectors.combined.map((name) => name.replaceAll("_", " ")).join(", ")}; calibrated on ${number(detectors.ranking_rows)} rows`],
    ["Smallest fpr", number(detectors.smallest_fpr)],
    ["Smallest risk", abstention ? number(abstention.smallest_risk) : "does not abstain"],
    ["Categories", categories ? `calibrated by ${categories.kind}${categories.column ? ` (${categories.column})` : ""}: ${categories.names.join(", ")}` : "one calibration for all rows"],
    ["Made", `${moment(manifest.created)}${training?.recipe?.data ? `, of ${training.recipe.data.source}` : ""}`],
    ["Aliases", aliases.join(", ") || "none"],
  ];
  const classes = manifest.output.classes;
  return [
    h("h3", {}, "How it is made"),
    h("dl", { class: "facts" }, rows.map(([name, what]) => [h("dt", {}, name), h("dd", {}, what)])),
    classes ? h("details", {}, h("summary", {}, `Classes (${classes.length})`), h("p", {}, classes.slice(0, 1000).join(", "), classes.length > 1000 ? " …" : "")) : null,
    manifest.input.columns.length ? h("details", {}, h("summary", {}, `Columns (${manifest.input.columns.length})`), columnsOf(manifest.input.columns)) : null,
  ];
}

/** What a version takes, in words. */
export function takes({ shape, dtype, minimum, maximum, image, columns, text }) {
  if (text) return `text, of which ${text.max_tokens} tokens are read`;
  if (columns.length) return `rows of ${columns.length} ${columns.length === 1 ? "column" : "columns"}`;
  const size = shape.join(" × ");
  if (image) return `images of ${size} numbers (${image.mode}${image.resize ? ", brought to that size" : ""})`;
  return `${size} ${dtype === "int32" ? "ids" : "numbers"}, from ${number(minimum)} to ${number(maximum)} in the training data`;
}

function columnsOf(columns) {
  const rows = columns.map((column) => [column.name, column.kind, column.categories ? column.categories.slice(0, 20).join(", ") + (column.categories.length > 20 ? " …" : "") : column.mean === undefined ? "" : column.kind === "numeric" ? `${number(column.mean)} ± ${number(column.std)}` : ""]);
  return table("Columns", ["column", "kind", "usual values"], rows);
}

/** All figures of quality, with their intervals where there is a report. */
function qualityOf(version, report) {
  const figures = figuresOf(version.manifest, version.report?.summary, report?.summary_intervals);
  const isReported = figures.some(({ reported }) => reported !== null);
  const rows = figures.map(({ key, published, reported, interval }) => {
    const { name, write, better, says } = figureOf(key);
    const ofReport = isReported ? [write(reported), interval ? `${write(interval[0])} to ${write(interval[1])}` : "–"] : [];
    return [name, write(published), ...ofReport, `${says}${better ? `; ${better} is better` : ""}`];
  });
  const level = report?.confidence_level ? `${share(report.confidence_level).replace(".00", "")} interval` : "interval";
  const heads = ["figure", "when published", ...(isReported ? ["report", level] : []), "what it is"];
  return [
    h("h3", {}, "Quality"),
    table(`Quality of version ${version.version}`, heads, rows, isReported ? [1, 2, 3] : [1]),
    baselinesOf(version.manifest),
  ];
}

/** What plain models reach on the same rows; null where there are none. */
function baselinesOf({ quality, baselines, output }) {
  const names = Object.keys(baselines);
  if (!names.length) return null;
  const figures = Object.keys(baselines[names[0]]);
  const always = output.classes ? "constant (the most frequent class)" : "constant (the mean)";
  const rows = [["this model", quality], ...names.map((name) => [name === "constant" ? always : name, baselines[name]]).reverse()];
  return table("Plain models on the same rows", ["model", ...figures.map((key) => figureOf(key).name)],
    rows.map(([name, found]) => [name, ...figures.map((key) => figureOf(key).write(found[key]))]), figures.map((_, i) => i + 1));
}
