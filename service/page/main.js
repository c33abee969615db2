// The frame of the page: which view is shown, and of which model.

import { askJson, Refused } from "./api.js";
import { fill, h, notice } from "./dom.js";

const VIEWS = {
  ask: () => import("./ask.js"),
  models: () => import("./models.js"),
  live: () => import("./live.js"),
  choose: () => import("./choose.js"),
};
const FIRST = "ask";

/** What the views share. `models` are as GET /models lists them, `model` is the name of the one that is looked at. */
const app = {
  models: [],
  model: null,
  descriptions: new Map(),
  replayed: null, // a question that a link brought: the view `ask` takes it
  /** What GET /models/{name} says, or of another version than `latest` what it says of that one. */
  async describe(name, { fresh = false } = {}) {
    if (fresh || !this.descriptions.has(name)) {
      this.descriptions.set(name, await askJson(`models/${encodeURIComponent(name)}`));
    }
    return this.descriptions.get(name);
  },
  /** Ask again which models there are; what was known of those that have changed is forgotten. */
  async refresh() {
    const before = new Map(this.models.map((model) => [model.name, stateOf(model)]));
    this.models = (await askJson("models")).models;
    for (const name of [...this.descriptions.keys()]) {
      const now = this.models.find((model) => model.name === name);
      if (!now || stateOf(now) !== before.get(name)) this.descriptions.delete(name);
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

const stateOf = ({ serving, versions, aliases }) => JSON.stringify([serving, versions, aliases]);
const view = document.getElementById("view");
const select = document.getElementById("model");
let leave = () => {};
let shown = 0;

/** Show the view that the address names: `#/ask`, and after a further slash what is for the view. */
async function show() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const wanted = VIEWS[name] ? name : FIRST;
  const turn = ++shown;
  leave();
  leave = () => {};
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `Dubito: ${wanted}`;
  fill(view, h("p", { class: "quiet" }, "One moment."));
  try {
    const [module] = await Promise.all([loaded(wanted), wanted === "models" && app.models.length ? null : known()]);
    if (turn !== shown) return; // somebody went on meanwhile
    fill(view);
    leave = (await module.show(view, app, rest.join("/"))) ?? (() => {});
    if (turn !== shown) leave();
  } catch (error) {
    if (turn !== shown) return;
    fill(view, notice(error instanceof Refused ? error.message : `This view failed: ${error.message}`), h("button", { type: "button", onclick: error.status === 0 ? () => location.reload() : show }, "Try again")); // what a browser could not fetch it may not ask for again
    if (!(error instanceof Refused)) throw error;
  }
}

/** A view's module; what of it cannot be fetched is no fault of the view's. */
async function loaded(name) {
  try {
    return await VIEWS[name]();
  } catch (error) {
    if (error instanceof TypeError) throw new Refused(0, "The service cannot be reached: is it running, and are you online?");
    throw error;
  }
}

/** Know which models there are now; where that cannot be asked, those that were there will do. */
async function known() {
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
// A file that misses its place would otherwise be opened in place of the page, and what was asked would be lost.
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => event.preventDefault());
addEventListener("hashchange", show);
show();
