// The frame of the page: the router and the state that the views share.

import { requestJson, ServiceError } from "./api.js";
import { fill, h, notice } from "./dom.js";

const VIEWS = {
  ask: () => import("./ask.js"),
  models: () => import("./models.js"),
  live: () => import("./live.js"),
  choose: () => import("./choose.js"),
};
const DEFAULT_VIEW = "ask";

/** State shared by the views: `models` as listed by GET /models, and `model`, the name of the selected one. */
const app = {
  models: [],
  model: null,
  descriptions: new Map(),
  /** Return GET /models/{name}, cached unless `fresh`. */
  async describe(name, { fresh = false } = {}) {
    if (fresh || !this.descriptions.has(name)) {
      this.descriptions.set(name, await requestJson(`models/${encodeURIComponent(name)}`));
    }
    return this.descriptions.get(name);
  },
  /** Reload the list of models and drop the cached descriptions of those that changed. */
  async refresh() {
    const before = new Map(this.models.map((model) => [model.name, stateKey(model)]));
    this.models = (await requestJson("models")).models;
    for (const name of [...this.descriptions.keys()]) {
      const current = this.models.find((model) => model.name === name);
      if (!current || stateKey(current) !== before.get(name)) this.descriptions.delete(name);
    }
    const served = this.models.filter((model) => model.serving !== null);
    if (!served.some((model) => model.name === this.model)) this.model = served[0]?.name ?? null;
    fill(select, served.map((model) => h("option", { value: model.name, selected: model.name === this.model }, model.name)));
    select.closest("p").hidden = served.length < 2;
    return this.models;
  },
  choose(name) {
    this.model = name;
    select.value = name;
  },
};

const stateKey = ({ serving, versions, aliases }) => JSON.stringify([serving, versions, aliases]);
const view = document.getElementById("view");
const select = document.getElementById("model");
let leave = () => {};
let navigation = 0;

/** Show the view named by the address, `#/VIEW/LINK`; the view gets the link. */
async function show() {
  const [name, ...link] = location.hash.replace(/^#\/?/, "").split("/");
  const viewName = VIEWS[name] ? name : DEFAULT_VIEW;
  const turn = ++navigation;
  leave();
  leave = () => {};
  for (const anchor of document.querySelectorAll("nav a")) {
    if (anchor.getAttribute("href") === `#/${viewName}`) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  document.title = `Dubito: ${viewName}`;
  fill(view, h("p", { class: "quiet" }, "Loading …"));
  try {
    const [module] = await Promise.all([loadView(viewName), viewName === "models" && app.models.length ? null : loadModels()]);
    if (turn !== navigation) return; // the user has moved on
    fill(view);
    leave = (await module.show(view, app, link.join("/"))) ?? (() => {});
    if (turn !== navigation) leave();
  } catch (error) {
    if (turn !== navigation) return;
    // A browser does not retry a module that failed to load, so an unreachable service needs a full reload.
    const retry = error.status === 0 ? () => location.reload() : show;
    fill(view, notice(error instanceof ServiceError ? error.message : `This view failed: ${error.message}`), h("button", { type: "button", onclick: retry }, "Try again"));
    if (!(error instanceof ServiceError)) throw error;
  }
}

/** Import a view's module; a failed download means that the service is unreachable. */
async function loadView(name) {
  try {
    return await VIEWS[name]();
  } catch (error) {
    if (error instanceof TypeError) throw new ServiceError(0, "Cannot reach the service. Is it running, and are you online?");
    throw error;
  }
}

/** Refresh the list of models; an older list will do if the service does not answer. */
async function loadModels() {
  try {
    await app.refresh();
  } catch (error) {
    if (!app.models.length) throw error;
  }
}

select.addEventListener("change", () => {
  app.choose(select.value);
  if (location.hash.split("/").length > 2) location.hash = `#/${location.hash.split("/")[1]}`;
  else show();
});
// Otherwise the browser would open a file that is dropped next to its target, and the page would be lost.
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => event.preventDefault());
addEventListener("hashchange", show);
show();
