// The shell of the page: addresses, navigation, the model in use, and the view.

import { requestJson, ServiceError } from "./api.js";
import { address, Button, Card, Failure, html, Notice, render, useEffect, useErrorBoundary, useFetch, useRef, useState } from "./components.js";

const VIEWS = {
  try: { title: "Try", load: () => import("./try.js") },
  label: { title: "Label", load: () => import("./label.js") },
  models: { title: "Models", load: () => import("./models.js") },
  monitor: { title: "Monitor", load: () => import("./monitor.js") },
};

/** State of the service that the views share. */
const app = {
  models: [],
  descriptions: new Map(),
  /** Return GET /models/{name}, cached unless `fresh`. */
  async describe(name, { fresh = false } = {}) {
    if (fresh || !this.descriptions.has(name)) this.descriptions.set(name, await requestJson(`models/${encodeURIComponent(name)}`));
    return this.descriptions.get(name);
  },
  /** Reload the list of models and drop the cached descriptions of those that changed. */
  async refresh() {
    const before = new Map(this.models.map((model) => [model.name, JSON.stringify(model)]));
    this.models = (await requestJson("models")).models;
    const current = new Map(this.models.map((model) => [model.name, JSON.stringify(model)]));
    for (const name of this.descriptions.keys()) if (current.get(name) !== before.get(name)) this.descriptions.delete(name);
    return this.models;
  },
};

/** Parse the address `#/VIEW/MODEL/...`. */
function parseAddress() {
  const [view, ...path] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return { view: VIEWS[view] ? view : "try", path: path.map(decodeURIComponent) };
  } catch {
    return { view: "try", path: [] };
  }
}

function Page() {
  const [{ view, path }, setRoute] = useState(parseAddress);
  const models = useFetch(() => app.refresh(), [view]);
  const [model, setModel] = useState(path[0]);
  const main = useRef(null);
  useEffect(() => {
    const follow = () => setRoute(parseAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const served = app.models.filter(({ serving }) => serving !== null).map(({ name }) => name);
  const name = path[0] || (served.includes(model) ? model : served[0]) || (view === "models" ? app.models[0]?.name : null);
  useEffect(() => {
    document.title = name ? `${VIEWS[view].title}: ${name} – Dubito` : "Dubito";
    if (!name) return;
    setModel(name);
    if (!path[0]) history.replaceState(null, "", address(view, name));
  }, [view, name, path[0]]);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  return html`
    <a class="skip" href="#view" onclick=${skip}>Skip to the content</a>
    <header>
      <p class="name"><img src="page/icon.svg" alt="" width="24" height="24" /> Dubito</p>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([key, { title }]) => html`<a href=${name ? address(key, name) : `#/${key}`} aria-current=${key === view ? "page" : null}>${title}</a>`)}</nav>
      ${served.length > 1 && html`<p class="pick"><label for="model">Model</label> <select id="model" value=${name} onchange=${(event) => (location.hash = address(view, event.target.value))}>${served.map((each) => html`<option value=${each}>${each}</option>`)}</select></p>`}
    </header>
    <main id="view" tabindex="-1" ref=${main}><${Content} key=${`${view}/${path.length > 1 ? path.join("/") : name}`} ...${{ view, path, name, models }} /></main>
    <footer><a href="docs">API</a> <a href="metrics">Metrics</a></footer>`;
}

/** Show a view, or why it cannot be shown. */
function Content({ view, path, name, models }) {
  const [error] = useErrorBoundary();
  const { title, load } = VIEWS[view];
  const code = useFetch(async () => {
    try {
      return await load();
    } catch (failure) {
      throw failure instanceof TypeError ? new ServiceError(0, "Cannot reach the service. Is it running, and are you online?") : failure;
    }
  }, []);
  if (error) return html`<h1>${title}</h1><${Notice}>This view failed: ${error.message}<//>`;
  if (!app.models.length && models.error) return html`<h1>${title}</h1><${Failure} ...${models} />`;
  // A browser does not retry a module that failed to load.
  if (code.error) return html`<h1>${title}</h1><${Failure} error=${code.error} reload=${() => location.reload()} />`;
  if (!code.data || !(models.data || app.models.length)) return html`<p class="quiet">Loading …</p>`;
  if (!app.models.length) return html`<h1>${title}</h1><${NoModel} reload=${models.reload} />`;
  const model = app.models.find((each) => each.name === name);
  if (!model) return html`<h1>${title}</h1><${Notice}>There is no model called ${name}.<//><p class="actions">${app.models.map((each) => html`<a href=${address(view, each.name)}>${each.name}</a>`)}</p>`;
  if (view !== "models" && model.serving === null) return html`<h1>${title}</h1><${Notice}><bdi>${name}</bdi> cannot be served. <a href=${address("models", name)}>Models</a> explains why.<//>`;
  return html`<${code.data.default} app=${app} model=${name} path=${path.slice(1)} />`;
}

const NoModel = ({ reload }) => html`
  <${Card} title="No model is published yet">
    <p>Fit one on your own table, or on the bundled handwritten digits:</p>
    <pre>${"dubito fit --data csv:FILE --target COLUMN\ndubito fit recipes/digits.toml"}</pre>
    <p class="actions"><${Button} main onclick=${reload}>Check again<//></p>
  <//>`;

// Otherwise the browser would open a file that is dropped next to its target.
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => event.preventDefault());
render(html`<${Page} />`, document.getElementById("page"));
