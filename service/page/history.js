// Earlier answers of this session, two of which can be compared.

import { html, Table, useEffect, useState } from "./components.js";
import { number, percent } from "./format.js";
import { judge } from "./verdict.js";

const SETTLED_MS = 1000; // without a change
const MAX_ENTRIES = 12;
const histories = new Map(); // entries by model, newest first

/** Record answers that stay for a second: {entries, setEntries}. */
export function useHistory(model, result, manifest) {
  const [entries, setState] = useState(histories.get(model) ?? []);
  const setEntries = (next) => {
    histories.set(model, next);
    setState(next);
  };
  useEffect(() => {
    if (!result || result.query.rows.length > 1) return undefined;
    const timer = setTimeout(() => {
      const [row] = result.answer.predictions, before = histories.get(model) ?? [];
      const key = JSON.stringify(result.query.input);
      const entry = { key, input: result.query.input, row, version: result.answer.version, isPinned: before.find((each) => each.key === key)?.isPinned ?? false, ...judge(row, result.answer, manifest, result.query.rows[0]) };
      const others = before.filter((each) => each.key !== key);
      setEntries([entry, ...others.filter((each, i) => each.isPinned || i < MAX_ENTRIES - 1)]);
    }, SETTLED_MS);
    return () => clearTimeout(timer);
  }, [result]);
  return { entries, setEntries };
}

/** List earlier answers, and compare up to two pinned ones. */
export function History({ entries, setEntries, restore }) {
  if (entries.length < 2) return null;
  const pin = (entry) => {
    const pinned = entries.filter((each) => each.isPinned && each !== entry);
    setEntries(entries.map((each) => ({ ...each, isPinned: each === entry ? !entry.isPinned : each.isPinned && (entry.isPinned || each === pinned[0]) })));
  };
  const pinned = entries.filter(({ isPinned }) => isPinned);
  const isRegression = entries[0].row.mean !== undefined;
  const lines = [
    ["Verdict", (entry) => entry.word],
    isRegression ? ["Interval", ({ row }) => row.interval.map((end) => number(end, 4)).join(" to ")] : ["Probability", ({ row }) => percent(Math.max(...row.probabilities))],
    ["Model uncertainty", ({ row }) => (isRegression ? number(row.epistemic_std) : `${number(row.bald)} nats`)],
    ["p-value", ({ row }) => number(row.p_value, 2)],
  ];
  return html`<details class="history"><summary>History (${entries.length})</summary>
    <ul>${entries.map((entry) => html`<li key=${entry.key}>
      <button type="button" class="plain" onclick=${() => restore(entry)}><span class=${`badge ${entry.kind}`}>${entry.word}</span> <bdi>${entry.answer}</bdi></button>
      <button type="button" class="small" aria-pressed=${entry.isPinned} onclick=${() => pin(entry)}>${entry.isPinned ? "Unpin" : "Pin"}</button></li>`)}</ul>
    ${pinned.length === 2 && html`<${Table} caption="Pinned answers" heads=${["", ...pinned.map(({ answer }) => answer)]} rows=${lines.map(([name, write]) => [name, ...pinned.map(write)])} />`}
  </details>`;
}
