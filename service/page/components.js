// Preact, and the components and hooks that the views share.

import { h, html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1.min.js";
import { ServiceError } from "./api.js";
import { percent } from "./format.js";

export { h, html, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-3.1.1.min.js";

/** Return the address of a view; the path starts with the model's name. */
export const address = (view, ...path) => `#/${[view, ...path].map(encodeURIComponent).join("/")}`;

/** Show content in a frame with an optional heading. */
export const Card = ({ title, children, ...attributes }) =>
  html`<section class="card" aria-label=${title} ...${attributes}>${title && html`<h2>${title}</h2>`}${children}</section>`;

/** Show a name, which can break after underscores. */
export const Name = ({ children }) => html`<bdi>${children.split(/(?<=_)/).map((part) => html`${part}<wbr />`)}</bdi>`;

/** Show a button; it is disabled until the promise of its handler settles. */
export function Button({ onclick, main = false, children, ...attributes }) {
  const [isBusy, setIsBusy] = useState(false);
  const isMounted = useRef(true);
  useEffect(() => () => (isMounted.current = false), []);
  const click = async (event) => {
    const result = onclick(event);
    if (!(result instanceof Promise)) return;
    setIsBusy(true);
    try {
      await result;
    } finally {
      if (isMounted.current) setIsBusy(false);
    }
  };
  return html`<button type="button" class=${main ? "main" : null} disabled=${isBusy} onclick=${click} ...${attributes}>${children}</button>`;
}

let idCount = 0;

/** Show one control with its label and an optional hint. */
export function Field({ label, hint, children, ...attributes }) {
  const id = useRef(null);
  id.current ??= `field-${++idCount}`;
  const { type, props, key, ref } = children;
  const control = h(type, { id: id.current, "aria-describedby": hint ? `${id.current}-hint` : null, ...props, key, ref });
  return html`<p class="field" ...${attributes}><label for=${props.id ?? id.current}>${label}</label>${control}${hint && html`<span class="quiet" id=${`${id.current}-hint`}>${hint}</span>`}</p>`;
}

/** Show shares of a whole as one bar with a legend; `parts` are {label, share, kind}. */
export const Bar = ({ label, parts }) => html`
  <figure class="split">
    <figcaption>${label}</figcaption>
    <svg viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label=${parts.map((part) => `${part.label}: ${percent(part.share)}`).join(", ")}>
      ${parts.map(({ share, kind }, i) => html`<rect class=${kind} x=${100 * parts.slice(0, i).reduce((sum, part) => sum + part.share, 0)} width=${100 * share} height="4" />`)}
    </svg>
    <ul>${parts.map((part) => html`<li class=${part.kind}>${part.label} <strong>${percent(part.share)}</strong></li>`)}</ul>
  </figure>`;

/** Show a verdict: `kind` is good, check or bad, `word` its name, and `answer` the prediction. */
export const Verdict = ({ kind, word, answer, children }) => html`
  <article class=${`answer verdict ${kind}`}>
    <p class="word">${word}</p>
    <h2 class=${answer.length > 30 ? "long" : null}><bdi>${answer}</bdi></h2>
    ${children}
  </article>`;

/** Show a notice, which screen readers announce; `kind` is bad, told or good. */
export const Notice = ({ kind = "bad", children }) => html`<p class=${`notice ${kind}`} role=${kind === "bad" ? "alert" : "status"}>${children}</p>`;

/** Show an error of `useFetch` with a button that tries again. */
export const Failure = ({ error, reload }) => html`<div><${Notice}>${error.message}<//><p class="actions"><${Button} onclick=${reload}>Try again<//></p></div>`;

/** Show a table; cells are text or elements, and `numeric` lists the columns to align as numbers. */
export function Table({ caption, heads, rows, numeric = [] }) {
  const alignment = (i) => (numeric.includes(i) ? "number" : null);
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption>${caption}</caption>
    <thead><tr>${heads.map((head, i) => html`<th scope="col" class=${alignment(i)}>${head}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => html`<td class=${alignment(i)}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** Show a DOM element that was created without Preact, such as a plot or a canvas. */
export function Element({ element }) {
  const place = useRef(null);
  useLayoutEffect(() => place.current.replaceChildren(element), [element]);
  return html`<div ref=${place} />`;
}

/**
 * Load data when `dependencies` change: {data, error, isPending, reload}. `load` gets an AbortSignal. With `everyMs`,
 * load again at this interval while the page is visible. After an error, `data` keeps the last value.
 */
export function useFetch(load, dependencies, { everyMs = null } = {}) {
  const [state, setState] = useState({ data: null, error: null, isPending: true });
  const reload = useRef(null);
  useEffect(() => {
    let timer, controller;
    setState({ data: null, error: null, isPending: true });
    reload.current = async () => {
      clearTimeout(timer);
      controller?.abort();
      const { signal } = (controller = new AbortController());
      setState((before) => ({ ...before, isPending: true }));
      try {
        const data = await load(signal);
        if (!signal.aborted) setState({ data, error: null, isPending: false });
      } catch (error) {
        if (!signal.aborted) setState(({ data }) => ({ data, error, isPending: false }));
        if (!(error instanceof ServiceError) && error.name !== "AbortError") reportError(error);
      }
      if (everyMs && !signal.aborted && !document.hidden) timer = setTimeout(reload.current, everyMs);
    };
    const update = () => (document.hidden ? clearTimeout(timer) : reload.current());
    if (everyMs) document.addEventListener("visibilitychange", update);
    addEventListener("online", update);
    reload.current();
    return () => {
      clearTimeout(timer);
      controller.abort();
      document.removeEventListener("visibilitychange", update);
      removeEventListener("online", update);
    };
  }, dependencies);
  return { ...state, reload: () => reload.current() };
}

/** Load data every `everyMs` milliseconds while the page is visible; see `useFetch`. */
export const usePolling = (load, everyMs, dependencies) => useFetch(load, dependencies, { everyMs });

/** Return a ref of an element that takes files: dropped on it, or pasted anywhere while it is visible. */
export function useFiles(handle) {
  const place = useRef(null), latest = useRef(handle);
  latest.current = handle;
  useEffect(() => {
    const element = place.current;
    const take = (event, files) => {
      if (!files.length) return;
      event.preventDefault();
      latest.current(files);
    };
    const drop = (event) => take(event, event.dataTransfer.files);
    const paste = (event) => element.checkVisibility() && take(event, event.clipboardData.files);
    element.addEventListener("drop", drop);
    document.addEventListener("paste", paste);
    return () => {
      element.removeEventListener("drop", drop);
      document.removeEventListener("paste", paste);
    };
  }, []);
  return place;
}

/** Save bytes or text as a file. */
export function download(name, content, type) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
