// A drawing board for models with one channel of pixels. The value has strokes, or a whole row instead.

import { html, useEffect, useFiles, useRef, useState } from "../components.js";
import { renderStrokes } from "../strokes.js";

const BOARD_SIZE = 280; // canvas pixels per side
const PEN = 0.1; // of the board
const MAX_SIDE = 128; // model pixels
const OVERSAMPLING = 8; // canvas pixels per model pixel and side, for image files
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const EMPTY = { strokes: [], row: null, isFitted: true };

/** Return the size of one-channel images, [height, width], or null for other inputs. */
export function imageSize({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32") return null;
  if (shape.length === 2) return shape;
  if (shape.length === 3 && shape[0] === 1) return shape.slice(1);
  return shape.length === 3 && shape[2] === 1 ? shape.slice(0, 2) : null;
}

/** Return the share of ink in each pixel, or null if the board is empty. */
function getInk(value, spec, style) {
  const [height, width] = imageSize(spec);
  if (value.row) return value.row.map((x) => (x - spec.minimum) / (spec.maximum - spec.minimum));
  return value.strokes.length ? renderStrokes(value.strokes, width, height, style, value.isFitted) : null;
}

/** Convert shares of ink to a row; pixels and counts are whole numbers. */
function toRow(shares, { minimum, maximum }) {
  const values = shares.map((share) => minimum + share * (maximum - minimum));
  return values.map((value) => (maximum - minimum >= 8 ? Math.round(value) : Number(value.toFixed(4))));
}

/** Read an image file as a row; dark ink on light paper is inverted. */
async function readImage(file, spec) {
  const [height, width] = imageSize(spec);
  const picture = await createImageBitmap(file);
  const canvas = Object.assign(document.createElement("canvas"), { width: width * OVERSAMPLING, height: height * OVERSAMPLING });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff"; // most programs show transparent pixels on white
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const shares = new Array(width * height).fill(0);
  for (let i = 0; i < data.length / 4; i++) {
    const x = Math.floor((i % canvas.width) / OVERSAMPLING), y = Math.floor(i / canvas.width / OVERSAMPLING);
    shares[y * width + x] += (0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2]) / 255 / OVERSAMPLING ** 2;
  }
  const isDarkOnLight = shares.reduce((sum, share) => sum + share, 0) > shares.length / 2;
  return toRow(isDarkOnLight ? shares.map((share) => 1 - share) : shares, spec);
}

function Control({ spec, value, onchange, style }) {
  const [height, width] = imageSize(spec);
  const board = useRef(null), preview = useRef(null);
  const [cursor, setCursor] = useState({ at: [0.5, 0.5], isDown: false, isShown: false });
  const [problem, setProblem] = useState(null);
  const latest = useRef(value); // several points may come between two renderings
  latest.current = value;
  const change = (next) => onchange((latest.current = { ...latest.current, ...next }));
  const place = useFiles(async ([file]) => {
    try {
      setProblem(null);
      change({ strokes: [], row: await readImage(file, spec) });
    } catch {
      setProblem(`${file.name} is not an image that this browser can read.`);
    }
  });
  useEffect(() => {
    const redraw = () => draw(board.current, preview.current, value, spec, style, cursor);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    redraw();
    theme.addEventListener("change", redraw);
    return () => theme.removeEventListener("change", redraw);
  }, [value, style, cursor]);

  const beginStroke = (point) => change({ row: null, strokes: [...(latest.current.row ? [] : latest.current.strokes), [point]] });
  const extendStroke = (points) => change({ strokes: [...latest.current.strokes.slice(0, -1), [...latest.current.strokes.at(-1), ...points]] });
  const position = (event) => {
    const box = board.current.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((x) => Number(x.toFixed(3)));
  };
  const onpointerdown = (event) => {
    if (event.button !== 0) return;
    board.current.setPointerCapture(event.pointerId);
    setCursor((before) => ({ ...before, isDown: false, isShown: false }));
    beginStroke(position(event));
  };
  const onpointermove = (event) => {
    if (board.current.hasPointerCapture(event.pointerId)) extendStroke((event.getCoalescedEvents?.() ?? [event]).map(position));
  };
  const onkeydown = (event) => {
    if (event.key !== " " && !KEYS[event.key]) return;
    event.preventDefault();
    if (event.key === " ") {
      if (!cursor.isDown) beginStroke(cursor.at);
      setCursor({ ...cursor, isDown: !cursor.isDown, isShown: true });
    } else {
      const at = cursor.at.map((x, i) => Math.min(1, Math.max(0, x + 0.04 * KEYS[event.key][i])));
      if (cursor.isDown) extendStroke([at]);
      setCursor({ ...cursor, at, isShown: true });
    }
  };
  return html`<div class="drawing" ref=${place}>
    <canvas ref=${board} id="board" class="board" width=${BOARD_SIZE} height=${(BOARD_SIZE * height) / width} tabindex="0" role="img" aria-label="Drawing board. Draw with the pointer, or use the arrow keys to move and the space bar to lower or lift the pen" ...${{ onpointerdown, onpointermove, onkeydown }} />
    <div class="panel">
      <button type="button" onclick=${() => change(EMPTY)}>Clear</button>
      <figure class="small"><canvas ref=${preview} width=${width} height=${height} class="preview" role="img" aria-label=${`Model input: ${width} × ${height} pixels`} /><figcaption>Model input: <span class="whole">${width} × ${height}</span></figcaption></figure>
    </div>
    <div class="fitting">
      ${value.row ? html`<button type="button" onclick=${() => change({ row: value.row.map((x) => spec.minimum + spec.maximum - x) })}>Invert colours</button>`
        : html`<label><input type="checkbox" checked=${value.isFitted} onchange=${(event) => change({ isFitted: event.target.checked })} /> Auto-fit drawing</label>`}
      <span class="quiet">You can also drop or paste an image.</span>
      ${problem && html`<p role="alert">${problem}</p>`}
    </div>
  </div>`;
}

function draw(board, preview, value, spec, style, cursor) {
  const colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(name);
  const [height, width] = imageSize(spec);
  const context = board.getContext("2d");
  context.clearRect(0, 0, board.width, board.height);
  context.strokeStyle = context.fillStyle = colour("--ink");
  const shares = getInk(value, spec, style);
  const paint = (target, scale) => {
    target.fillStyle = colour("--ink");
    shares.forEach((share, i) => {
      target.globalAlpha = Math.min(1, Math.max(0, share));
      target.fillRect((i % width) * scale, Math.floor(i / width) * scale, scale, scale);
    });
    target.globalAlpha = 1;
  };
  if (value.row) paint(context, board.width / width);
  else if (value.strokes.length) {
    context.lineCap = context.lineJoin = "round";
    context.lineWidth = PEN * board.width;
    for (const stroke of value.strokes) {
      context.beginPath();
      stroke.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](x * board.width, y * board.height));
      context.lineTo(stroke.at(-1)[0] * board.width, stroke.at(-1)[1] * board.height);
      context.stroke();
    }
  } else {
    context.fillStyle = colour("--quiet");
    context.font = "18px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText("Draw here", board.width / 2, board.height / 2);
  }
  if (cursor.isShown) {
    context.fillStyle = colour(cursor.isDown ? "--bad" : "--accent");
    context.beginPath();
    context.arc(cursor.at[0] * board.width, cursor.at[1] * board.height, 6, 0, 2 * Math.PI);
    context.fill();
  }
  const small = preview.getContext("2d");
  small.clearRect(0, 0, width, height);
  if (shares) paint(small, 1);
}

export const drawing = {
  name: "Draw",
  suits: (spec) => imageSize(spec) !== null && Math.min(...imageSize(spec)) >= 4 && Math.max(...imageSize(spec)) <= MAX_SIDE,
  Control,
  empty: () => EMPTY,
  rows(value, spec, style) {
    const shares = value.row ? null : getInk(value, spec, style);
    return value.row ? [value.row] : shares && [toRow(shares, spec)];
  },
  fromRow: (row) => ({ ...EMPTY, row: row.flat(Infinity) }),
  odd: [["Noise", (spec) => ({ ...EMPTY, row: toRow(Array.from({ length: spec.shape.reduce((a, b) => a * b) }, Math.random), spec) })]],
};
