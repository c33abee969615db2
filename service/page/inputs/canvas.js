// A drawing board for models with one channel of pixels. Strokes are stored and redrawn at the size and position that
// the training data have, so that neither makes a drawing unusual.

import { h, onFiles } from "../dom.js";

const BOARD_SIZE = 280; // canvas pixels per side
const PEN_WIDTH = 0.14; // relative to the drawing's height, as in MNIST: 3 of 20 pixels
const OVERSAMPLING = 8; // canvas pixels per model pixel and side
const MAX_SIDE = 128; // model pixels
const MIN_SIDE_WITH_MARGIN = 12; // smaller images have none, as in scikit-learn's digits
const MARGIN = 1 / 7; // of a side, as in MNIST: 4 of 28 pixels
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Return the size of one-channel images, [height, width], or null for other inputs. */
function imageSize({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32") return null;
  if (shape.length === 2) return shape;
  if (shape.length === 3 && shape[0] === 1) return shape.slice(1);
  if (shape.length === 3 && shape[2] === 1) return shape.slice(0, 2);
  return null;
}

/** Tell whether rows of a model can be drawn. */
export function canBeDrawn(spec) {
  const size = imageSize(spec);
  return size !== null && Math.min(...size) >= 4 && Math.max(...size) <= MAX_SIDE;
}

/** Create the input of a grey-image model; ink has the largest value of the training data, paper the smallest. */
export function canvasInput(spec, changed) {
  const [height, width] = imageSize(spec);
  const low = spec.minimum, high = spec.maximum;
  let strokes = []; // lists of [x, y], from 0 to 1
  let picture = null; // an image file instead of strokes
  let exactRow = null; // an example, noise, or a row from a link
  let keyboardStroke = null; // while the pen is down
  let cursor = [0.5, 0.5];
  let showsCursor = false;

  const board = h("canvas", { width: BOARD_SIZE, height: (BOARD_SIZE * height) / width, class: "board", tabindex: 0, role: "img", "aria-label": "Drawing board. Draw with the pointer, or use the arrow keys to move and the space bar to lower or lift the pen", id: "board" });
  const preview = h("canvas", { width, height, class: "preview", role: "img", "aria-label": `Model input: ${width} × ${height} pixels` });
  const fitted = h("input", { type: "checkbox", id: "fitted", checked: true, onchange: update });
  const inverted = h("input", { type: "checkbox", id: "inverted", onchange: update });
  const status = h("p", { role: "status" });
  const element = h(
    "div",
    { class: "drawing" },
    board,
    h(
      "div",
      { class: "panel" },
      h("p", {}, h("button", { type: "button", onclick: clear }, "Clear")),
      h("figure", { class: "small" }, preview, h("figcaption", {}, `Model input: ${width} × ${height}`)),
    ),
    h(
      "div",
      { class: "fitting" },
      h("p", {}, fitted, " ", h("label", { for: "fitted" }, "Auto-fit drawing")),
      h("p", {}, inverted, " ", h("label", { for: "inverted" }, "Invert colours")),
      h("p", { class: "quiet" }, "You can also drop or paste an image."),
      status,
    ),
  );

  board.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    board.setPointerCapture(event.pointerId);
    showsCursor = false;
    beginStroke(position(event));
  });
  board.addEventListener("pointermove", (event) => {
    if (!board.hasPointerCapture(event.pointerId)) return;
    for (const each of event.getCoalescedEvents?.() ?? [event]) strokes.at(-1).push(position(each));
    update();
  });
  board.addEventListener("keydown", (event) => {
    showsCursor ||= event.key === " " || event.key in KEYS;
    if (event.key === " ") {
      event.preventDefault();
      keyboardStroke = keyboardStroke ? null : beginStroke([...cursor]);
      update();
    } else if (KEYS[event.key]) {
      event.preventDefault();
      cursor = cursor.map((x, i) => Math.min(1, Math.max(0, x + 0.04 * KEYS[event.key][i])));
      if (keyboardStroke) keyboardStroke.push([...cursor]);
      update();
    }
  });
  board.addEventListener("focus", redraw);
  board.addEventListener("blur", redraw);
  onFiles(element, (files) => loadPicture(files[0]));
  redraw();

  function position(event) {
    const box = board.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  function beginStroke(point) {
    if (picture || exactRow) clear();
    strokes.push([point]);
    update();
    return strokes.at(-1);
  }

  function clear() {
    strokes = [];
    picture = exactRow = keyboardStroke = null;
    update();
  }

  async function loadPicture(file) {
    status.textContent = "";
    let image;
    try {
      image = await createImageBitmap(file);
    } catch {
      status.textContent = `${file.name} is not an image that this browser can read.`;
      return;
    }
    clear();
    picture = image;
    inverted.checked = false;
    const shares = ink();
    inverted.checked = shares.reduce((sum, share) => sum + share, 0) > shares.length / 2; // dark on light, as on paper
    update();
  }

  function update() {
    redraw();
    changed();
  }

  /** Round to whole numbers if the data are pixels or counts. */
  function rounded(value) {
    return high - low >= 8 ? Math.round(value) : Number(value.toFixed(4));
  }

  /** Compute the share of ink in each pixel, from 0 to 1, row by row; null if the board is empty. */
  function ink() {
    if (exactRow) return exactRow.map((value) => (value - low) / (high - low));
    if (!strokes.length && !picture) return null;
    const fine = h("canvas", { width: width * OVERSAMPLING, height: height * OVERSAMPLING });
    const context = fine.getContext("2d", { willReadFrequently: true });
    if (picture) {
      context.fillStyle = "#fff"; // most programs show transparent pixels on white
      context.fillRect(0, 0, fine.width, fine.height);
      context.drawImage(picture, 0, 0, fine.width, fine.height);
    } else drawStrokes(context, fine.width, fine.height, fitted.checked);
    const pixels = context.getImageData(0, 0, fine.width, fine.height).data;
    const shares = new Array(width * height).fill(0);
    for (let y = 0; y < fine.height; y++) {
      for (let x = 0; x < fine.width; x++) {
        const i = 4 * (y * fine.width + x);
        const value = picture ? (0.299 * pixels[i] + 0.587 * pixels[i + 1] + 0.114 * pixels[i + 2]) / 255 : pixels[i + 3] / 255;
        shares[Math.floor(y / OVERSAMPLING) * width + Math.floor(x / OVERSAMPLING)] += value / OVERSAMPLING ** 2;
      }
    }
    return inverted.checked ? shares.map((share) => 1 - share) : shares;
  }

  /** Draw the strokes; `isFitted` scales them to the size of the training data and centres their mass. */
  function drawStrokes(context, wide, high, isFitted) {
    const points = strokes.flat();
    const [left, top] = [0, 1].map((i) => Math.min(...points.map((p) => p[i])));
    const [right, bottom] = [0, 1].map((i) => Math.max(...points.map((p) => p[i])));
    context.lineCap = context.lineJoin = "round";
    let move = ([x, y]) => [x * wide, y * high];
    context.lineWidth = PEN_WIDTH * high;
    if (isFitted) {
      const margin = Math.min(width, height) < MIN_SIDE_WITH_MARGIN ? 0 : MARGIN;
      const box = [wide * (1 - 2 * margin), high * (1 - 2 * margin)];
      context.lineWidth = PEN_WIDTH * box[1];
      const span = [(right - left) * wide, (bottom - top) * high].map((s) => Math.max(s, 1e-6));
      const scale = Math.min(...box.map((b, i) => (b - context.lineWidth) / span[i]), 4 * OVERSAMPLING);
      const middle = margin === 0 ? [(left + right) / 2, (top + bottom) / 2] : centreOfMass(wide, high);
      move = ([x, y]) => [wide / 2 + (x - middle[0]) * wide * scale, high / 2 + (y - middle[1]) * high * scale];
    }
    for (const stroke of strokes) {
      context.beginPath();
      context.moveTo(...move(stroke[0]));
      for (const point of stroke.length > 1 ? stroke.slice(1) : stroke) context.lineTo(...move(point));
      context.stroke();
    }
  }

  /** Compute the centre of the strokes, weighted by length. */
  function centreOfMass(wide, high) {
    let total = 1e-9, x = 0, y = 0;
    for (const stroke of strokes) {
      stroke.forEach(([px, py], i) => {
        const [qx, qy] = stroke[Math.max(0, i - 1)];
        const length = Math.hypot((px - qx) * wide, (py - qy) * high) + 1e-9;
        total += length;
        x += (length * (px + qx)) / 2;
        y += (length * (py + qy)) / 2;
      });
    }
    return [x / total, y / total];
  }

  function redraw() {
    const style = getComputedStyle(document.documentElement);
    const context = board.getContext("2d");
    context.clearRect(0, 0, board.width, board.height);
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--ink");
    const shares = ink();
    if (picture || exactRow) paint(context, shares, board.width, board.height, style.getPropertyValue("--ink"));
    else if (strokes.length) drawStrokes(context, board.width, board.height, false);
    else {
      context.fillStyle = style.getPropertyValue("--quiet");
      context.font = "18px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText("Draw here", board.width / 2, board.height / 2);
    }
    if (showsCursor && document.activeElement === board) {
      const [x, y] = [cursor[0] * board.width, cursor[1] * board.height];
      context.fillStyle = style.getPropertyValue(keyboardStroke ? "--bad" : "--accent");
      context.beginPath();
      context.arc(x, y, 6, 0, 2 * Math.PI);
      context.fill();
    }
    const small = preview.getContext("2d");
    small.clearRect(0, 0, width, height);
    if (shares) paint(small, shares, width, height, style.getPropertyValue("--ink"));
  }

  function paint(context, shares, wide, high, colour) {
    context.fillStyle = colour;
    shares.forEach((share, i) => {
      context.globalAlpha = Math.min(1, Math.max(0, share));
      context.fillRect(((i % width) * wide) / width, (Math.floor(i / width) * high) / height, wide / width, high / height);
    });
    context.globalAlpha = 1;
  }

  function row() {
    if (exactRow) return exactRow;
    const shares = ink();
    return shares && shares.map((share) => rounded(low + share * (high - low)));
  }

  return {
    element,
    rows() {
      const values = row();
      return values && [values];
    },
    saved: row,
    restore(saved) {
      strokes = [];
      picture = keyboardStroke = null;
      exactRow = saved;
      redraw();
    },
    example: (row) => row.flat(Infinity),
    others: [["Noise", () => Array.from({ length: width * height }, () => rounded(low + Math.random() * (high - low)))]],
  };
}
