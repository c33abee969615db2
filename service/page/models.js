// The view Models. `#/models/NAME` shows a model, `#/models/NAME/1` a version, and `#/models/NAME/1/2` compares two.

import { request, requestJson, requestPictureUrl, ServiceError } from "./api.js";
import { comparison } from "./comparison.js";
import { bytes, download, field, fill, h, moment, noModel, notice, number, table } from "./dom.js";
import { describeFigure, mergeFigures, share } from "./figures.js";
import { promote } from "./learning.js";
import { strengths } from "./strengths.js";

const MAX_VERSIONS = 10; // loaded at first
const PLOTS = {
  "reliability.png": "Reliability: accuracy by confidence",
  "pit.png": "Probability integral transform of the targets",
  "predicted.png": "Predicted and true targets",
  "risk-coverage.png": "Error rate by share of rows answered",
  "entropy-cdf.png": "Entropy of test rows and unfamiliar rows",
  "std-cdf.png": "Standard deviation of test rows and unfamiliar rows",
  "roc.png": "ROC curves: unfamiliar rows against test rows",
};

/** Compare entries of a report's files by the order of their plots. */
const byPlot = ([a], [b]) => Object.keys(PLOTS).indexOf(a) - Object.keys(PLOTS).indexOf(b);

/** Show the view; `link` names the model and up to two versions. */
export async function show(view, app, link) {
  const [linkedName, ...linkedVersions] = link ? link.split("/").map(decode) : [];
  const pictures = new Set(); // URLs to revoke
  let hasLeft = false;
  const linkedModel = app.models.find((model) => model.name === linkedName);
  if (linkedModel && linkedModel.serving !== null) app.choose(linkedName);
  const name = linkedModel?.name ?? app.model ?? app.models[0]?.name ?? null;

  const listPlace = h("div");
  const modelPlace = h("div");
  const status = h("span", { role: "status", class: "quiet" });
  fill(view, h("h1", {}, "Models"), linkedName && !linkedModel ? notice(`There is no model called ${linkedName}.`) : null, listPlace,
    h("p", { class: "actions" }, h("button", { type: "button", onclick: refresh }, "Refresh"), status), modelPlace);
  await build();
  if (linkedVersions.length) modelPlace.querySelector(linkedVersions[1] ? ".versus" : ".version")?.scrollIntoView();

  async function move(version) {
    try {
      const { before } = await promote(name, version);
      await refresh();
      status.textContent = `Now serving version ${version} instead of version ${before}.`;
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      status.textContent = error.status === 404 ? `The service has no admin key (DUBITO_ADMIN_KEY). Use the command line: dubito store alias ${name} latest ${version}` : error.message;
    }
  }

  async function refresh() {
    status.textContent = "Refreshing …";
    try {
      await app.refresh();
      await build();
      status.textContent = `Updated at ${new Date().toLocaleTimeString()}.`;
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      status.textContent = "";
      fill(modelPlace, notice(error.message));
    }
  }

  async function build() {
    fill(listPlace, modelTable(app.models, name));
    if (name === null) {
      fill(view, noModel("Models", app));
      return;
    }
    const description = await app.describe(name, { fresh: true });
    linkedVersions.forEach((version, i) => (linkedVersions[i] = description.aliases[version] ?? version));
    const versions = await loadVersions(description, MAX_VERSIONS, linkedVersions);
    if (hasLeft) return;
    releasePictures();
    await showVersions();

    async function showVersions() {
      fill(modelPlace, modelNotices(description), versionTable(description, versions, showAll, move), ...(await versionSections(description, versions)));
    }

    async function showAll() {
      const all = await loadVersions(description, description.versions.length, []);
      versions.splice(0, versions.length, ...all);
      if (!hasLeft) await showVersions();
    }
  }

  /** Create the section of one version, and the comparison of two. */
  async function versionSections(description, versions) {
    const readable = versions.filter((version) => version.manifest);
    if (!readable.length) return [];
    const isReadable = (number) => readable.some((version) => version.version === number);
    const missing = linkedVersions.filter((number) => number && !isReadable(number));
    if (missing.length) {
      const available = description.versions.length > 1 ? `versions ${description.versions[0]} to ${description.versions.at(-1)}` : `version ${description.versions[0]}`;
      return [notice(`Cannot show version ${missing.join(" and version ")} of ${name}. Available: ${available}.`)];
    }
    const first = isReadable(linkedVersions[0]) ? linkedVersions[0] : isReadable(description.serving) ? description.serving : readable[0].version;
    const picker = (value, onchange) => h("select", { onchange }, readable.map((version) => h("option", { value: version.version, selected: version.version === value }, version.version)));
    const detailsPlace = h("div");
    const selected = picker(first, () => {
      history.replaceState(null, "", `#/models/${[name, selected.value].map(encodeURIComponent).join("/")}`);
      return showDetails();
    });
    const sections = [h("section", { class: "card version", "aria-label": "Version details" }, h("div", { class: "version-head" }, h("h2", {}, "Strengths and weaknesses"), field("Version", selected)), detailsPlace)];
    await showDetails();
    if (readable.length > 1) {
      const isPair = isReadable(linkedVersions[1]);
      const before = picker(isPair ? first : readable.find((version) => version.version !== first).version, () => showComparison());
      const after = picker(isPair ? linkedVersions[1] : first, () => showComparison());
      const place = h("div");
      sections.push(h("section", { class: "card versus", "aria-label": "Compare two versions" }, h("h2", {}, "Compare two versions"),
        h("div", { class: "pair" }, field("First", before), field("Second", after)), place));
      const showComparison = async () => {
        const pair = [before, after].map((select) => readable.find((version) => version.version === select.value));
        const reports = await Promise.all(pair.map(loadReport));
        fill(place, comparison(pair, reports), plotPairs(pair));
      };
      await showComparison();
      for (const select of [before, after]) {
        select.addEventListener("change", () => history.replaceState(null, "", `#/models/${[name, before.value, after.value].map(encodeURIComponent).join("/")}`));
      }
    }
    return sections;

    async function showDetails() {
      const version = readable.find(({ version }) => version === selected.value);
      const report = await loadReport(version);
      if (selected.value === version.version) fill(detailsPlace, warnings(version, description), strengths(version, report), qualitySection(version, report), properties(version), reportSection(version, report));
    }
  }

  /** Load a version's report once: null if there is none, `{error}` if it cannot be read. */
  async function loadReport(version) {
    if (!version.report) return null;
    version.fullReport ??= requestJson(version.report.href).catch((error) => {
      if (!(error instanceof ServiceError)) throw error;
      return { error: error.message };
    });
    return version.fullReport;
  }

  function reportSection(version, report) {
    if (!version.report) return h("p", { class: "quiet" }, "There is no evaluation report yet. Create one with ", h("code", {}, `dubito evaluate ${version.name}:${version.version}`), ".");
    const files = Object.entries(version.report.files).sort(byPlot);
    const dataFiles = files.filter(([file]) => !file.endsWith(".png"));
    return [
      h("h3", {}, "Evaluation report"),
      report.error ? notice(report.error) : h("p", {}, `Created ${moment(report.created)} on ${number(report.test?.rows)} test rows of ${report.data}, with ${number(report.draws)} draws.`,
        report.convergence ? ` Convergence: ${report.convergence.summary}.` : ""),
      h("p", { class: "actions" }, dataFiles.map(([file, href]) => h("button", { type: "button", onclick: () => save(`${version.name}-${version.version}-${file}`, href) }, `Save ${file}`))),
      h("details", {}, h("summary", {}, "Report plots"), h("div", { class: "plots" }, files.filter(([file]) => file.endsWith(".png")).map(([file, href]) => picture(file, href, version.version)))),
    ];
  }

  function plotPairs(pair) {
    const plots = pair.map((version) => Object.entries(version.report?.files ?? {}).filter(([file]) => file.endsWith(".png")));
    if (plots.some((entries) => !entries.length)) {
      const missing = pair.filter((_, i) => !plots[i].length).map((version) => version.version);
      return h("p", { class: "quiet" }, `To compare plots, both versions need a report. Version ${missing.join(" and version ")} has none.`);
    }
    const files = [...new Set(plots.flat().sort(byPlot).map(([file]) => file))];
    return h("details", { class: "pairs" }, h("summary", {}, "Report plots side by side"),
      files.map((file) => h("div", { class: "pair" }, pair.map((version) => {
        const href = version.report.files[file];
        return href ? picture(file, href, version.version) : h("p", { class: "quiet" }, `Version ${version.version} has no ${file}.`);
      }))));
  }

  /** Show a report's plot, fetched with the key as soon as it is nearly visible. */
  function picture(file, href, version) {
    const title = PLOTS[file] ?? file.replace(/\.png$/, "").replaceAll("-", " ");
    const image = h("img", { alt: `${title}, version ${version}`, width: 640, height: 480, class: "pending" });
    const open = h("button", { type: "button", class: "large", "aria-label": `Enlarge ${title}, version ${version}`, onclick: () => showLarge(title, image) }, image);
    const place = h("figure", {}, h("figcaption", {}, title, h("span", { class: "quiet" }, ` version ${version}`)), open);
    const observer = new IntersectionObserver(async (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      try {
        const url = await requestPictureUrl(href);
        if (hasLeft) return URL.revokeObjectURL(url);
        pictures.add(url);
        image.addEventListener("load", () => {
          image.width = image.naturalWidth;
          image.height = image.naturalHeight;
          image.classList.remove("pending");
        }, { once: true });
        image.src = url;
      } catch (error) {
        open.replaceWith(notice(error.message));
      }
    }, { rootMargin: "600px" });
    observer.observe(place);
    return place;
  }

  async function save(file, href) {
    try {
      const answer = await request(href);
      download(file, await answer.blob(), answer.headers.get("Content-Type"));
    } catch (error) {
      status.textContent = error.message;
    }
  }

  function releasePictures() {
    pictures.forEach((url) => URL.revokeObjectURL(url));
    pictures.clear();
  }

  return () => {
    hasLeft = true;
    releasePictures();
  };
}

/** Show a plot as large as the window. */
function showLarge(title, image) {
  const dialog = h("dialog", { class: "large", "aria-label": title, onclick: () => dialog.close(), onclose: () => dialog.remove() }, h("form", { method: "dialog" }, h("strong", {}, title), h("button", { type: "submit" }, "Close")), image.cloneNode());
  document.body.append(dialog);
  dialog.showModal();
}

/** Decode a part of an address, or return it unchanged if it is invalid. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function modelTable(models, name) {
  const rows = models.map((model) => {
    const broken = Object.keys(model.broken).length;
    return [
      h("a", { href: `#/models/${encodeURIComponent(model.name)}`, "aria-current": model.name === name ? "true" : null }, model.name),
      broken ? h("span", { class: "badge bad" }, `${broken} broken`) : model.warnings?.length ? h("span", { class: "badge told" }, "warning") : model.too_few_rows ? h("span", { class: "badge told" }, "few rows") : h("span", { class: "badge good" }, "OK"),
      model.serving ?? h("span", { class: "badge bad" }, "none"),
      mainFigure(model.quality),
      String(model.versions.length),
      model.task ?? "–",
      model.method ?? "–",
    ];
  });
  return models.length ? table("Published models", ["model", "state", "serving", "quality", "versions", "task", "method"], rows, [4]) : null;
}

function mainFigure(quality) {
  for (const key of ["test_accuracy", "test_rmse"]) {
    if (quality?.[key] !== undefined) return `${describeFigure(key).name} ${describeFigure(key).write(quality[key])}`;
  }
  return "–";
}

function modelNotices(description) {
  const broken = Object.entries(description.broken);
  return [
    h("h2", {}, description.name),
    description.serving === null ? notice("No version of this model can be served.") : null,
    (description.warnings ?? []).map((warning) => notice(warning, "told")),
    description.too_few_rows ? notice(description.too_few_rows, "told") : null,
    broken.map(([version, reason]) => notice(`Version ${version} cannot be served: ${reason}`)),
  ];
}

/** Load the details of the latest `max` versions, the served one and `extra` ones, newest first. */
async function loadVersions(description, max, extra) {
  const numbers = description.versions.slice(-max);
  for (const version of [...extra, description.serving]) {
    if (description.versions.includes(version) && !numbers.includes(version)) numbers.unshift(version);
  }
  const path = (version) => `models/${encodeURIComponent(description.name)}/versions/${encodeURIComponent(version)}`;
  const versions = await Promise.all(numbers.map(async (version) => {
    try {
      return await requestJson(path(version));
    } catch (error) {
      if (!(error instanceof ServiceError) || error.status === 0) throw error;
      return { name: description.name, version, aliases: [], broken: error.message, manifest: null, report: null };
    }
  }));
  return versions.reverse();
}

function versionTable(description, versions, showAll, move) {
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
    table("Versions, newest first", ["version", "state", "quality", "aliases", "method", "created", "in memory", "report"], rows),
    hidden > 0 ? h("p", {}, h("button", { type: "button", onclick: showAll }, `Show ${hidden} more`)) : null,
  ];
}

function warnings({ manifest }, description) {
  return [
    manifest.version in description.broken ? notice(description.broken[manifest.version]) : null,
    manifest.warnings.map((warning) => notice(warning, "told")),
    manifest.too_few_rows ? notice(manifest.too_few_rows, "told") : null,
  ];
}

function properties({ manifest, aliases }) {
  const { detectors, noise, abstention, categories, training } = manifest;
  const rows = [
    ["Task", manifest.task === "regression" ? `regression of ${manifest.output.target ?? "a number"}` : `classification into ${manifest.output.classes.length} classes`],
    ["Method", manifest.method],
    ["Input", describeInput(manifest.input)],
    ["Draws", `${noise.default_draws} by default${noise.max_draws ? `, up to ${noise.max_draws}` : ""}`],
    ["Flag", `combines ${detectors.combined.map((name) => name.replaceAll("_", " ")).join(", ")}; calibrated on ${number(detectors.ranking_rows)} rows`],
    ["Smallest fpr", number(detectors.smallest_fpr)],
    ["Smallest risk", abstention ? number(abstention.smallest_risk) : "does not abstain"],
    ["Categories", categories ? `calibrated per ${categories.kind}${categories.column ? ` (${categories.column})` : ""}: ${categories.names.join(", ")}` : "one calibration for all rows"],
    ["Created", `${moment(manifest.created)}${training?.recipe?.data ? ` from ${training.recipe.data.source}` : ""}`],
    ["Aliases", aliases.join(", ") || "none"],
  ];
  const classes = manifest.output.classes;
  return [
    h("h3", {}, "Properties"),
    h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    classes ? h("details", {}, h("summary", {}, `Classes (${classes.length})`), h("p", {}, classes.slice(0, 1000).join(", "), classes.length > 1000 ? " …" : "")) : null,
    manifest.input.columns.length ? h("details", {}, h("summary", {}, `Columns (${manifest.input.columns.length})`), columnTable(manifest.input.columns)) : null,
  ];
}

function describeInput({ shape, dtype, minimum, maximum, image, columns, text }) {
  if (text) return `text, up to ${text.max_tokens} tokens`;
  if (columns.length) return `rows of ${columns.length} ${columns.length === 1 ? "column" : "columns"}`;
  const size = shape.join(" × ");
  if (image) return `images of ${size} values (${image.mode}${image.resize ? ", resized by the service" : ""})`;
  return `${size} ${dtype === "int32" ? "ids" : "numbers"}, ${number(minimum)} to ${number(maximum)} in the training data`;
}

function columnTable(columns) {
  const rows = columns.map((column) => [column.name, column.kind, column.categories ? column.categories.slice(0, 20).join(", ") + (column.categories.length > 20 ? " …" : "") : column.mean === undefined ? "" : column.kind === "numeric" ? `${number(column.mean)} ± ${number(column.std)}` : ""]);
  return table("Columns", ["column", "kind", "usual values"], rows);
}

/** Show all quality figures, with intervals if there is a report. */
function qualitySection(version, report) {
  const figures = mergeFigures(version.manifest, version.report?.summary, report?.summary_intervals);
  const isReported = figures.some(({ reported }) => reported !== null);
  const rows = figures.map(({ key, published, reported, interval }) => {
    const { name, write, better, meaning } = describeFigure(key);
    const reportCells = isReported ? [write(reported), interval ? `${write(interval[0])} to ${write(interval[1])}` : "–"] : [];
    return [name, write(published), ...reportCells, `${meaning}${better ? `; ${better} is better` : ""}`];
  });
  const level = report?.confidence_level ? `${share(report.confidence_level).replace(".00", "")} interval` : "interval";
  const heads = ["figure", "at publication", ...(isReported ? ["report", level] : []), "meaning"];
  return [
    h("h3", {}, "Quality"),
    table(`Quality of version ${version.version}`, heads, rows, isReported ? [1, 2, 3] : [1]),
    baselineTable(version.manifest),
  ];
}

/** Show the baselines' quality on the same rows; null if there are none. */
function baselineTable({ quality, baselines, output }) {
  const names = Object.keys(baselines);
  if (!names.length) return null;
  const figures = Object.keys(baselines[names[0]]);
  const constant = output.classes ? "constant (most frequent class)" : "constant (mean)";
  const rows = [["this model", quality], ...names.map((name) => [name === "constant" ? constant : name, baselines[name]]).reverse()];
  return table("Baselines on the same rows", ["model", ...figures.map((key) => describeFigure(key).name)],
    rows.map(([name, values]) => [name, ...figures.map((key) => describeFigure(key).write(values[key]))]), figures.map((_, i) => i + 1));
}
