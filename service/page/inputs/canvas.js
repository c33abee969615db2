// A canvas to draw on, for models of one channel of pixels. What is drawn is kept as strokes, and drawn again at the
// size and place that such data have, so that neither the size nor the place of a drawing makes it odd.

import { h, whenGiven } from "../dom.js";

const SIZE = 280; // of the canvas, in its own pixels
const PEN = 0.14; // the pen's width, of the drawing's height: as in MNIST, 3 of 20 pixels
const FINE = 8; // pixels a side that become one of the model's
const LARGEST = 128; // pixels a side that can be drawn
const FEW = 12; // pixels a side below which drawings fill the frame, as scikit-learn's digits do; others leave a margin
const MARGIN = 1 / 7; // of a side, as MNIST's digits have: 4 of 28 pixels
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** The sides of a model's images, if they have one channel: [height, width]. */
function sides({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32") return null;
  if (shape.length === 2) return shape;
  if (shape.length === 3 && shape[0] === 1) return shape.slice(1);
  if (shape.length === 3 && shape[2] === 1) return shape.slice(0, 2);
  return null;
}

/** Whether a model's rows can be drawn. */
export function canBeDrawn(spec) {
  const found = sides(spec);
  return found !== null && Math.min(...found) >= 4 && Math.max(...found) <= LARGEST;
}

/** The input of a model of grey images. Ink has the largest value of the training data, paper the smallest. */
export function canvasInput(spec, changed) {
  const [height, width] = sides(spec);
  const low = spec.minimum, high = spec.maximum;
  let strokes = []; // each a list of [x, y], from 0 to 1
  let picture = null; // a dropped image, in place of strokes
  let exact = null; // a row that came as such: noise, or from a link
  let pen = null; // the stroke that is being drawn with the keyboard
  let cursor = [0.5, 0.5];
  let byKeys = false; // whether the cursor is to be seen

  const board = h("canvas", { width: SIZE, height: (SIZE * height) / width, class: "board", tabindex: 0, role: "img", "aria-label": "Drawing board: draw with the pointer, or move with the arrow keys and press the space bar to put the pen down and to lift it", id: "board" });
  const preview = h("canvas", { width, height, class: "preview", role: "img", "aria-label": `What the model gets: ${width} x ${height} pixels` });
  const fitted = h("input", { type: "checkbox", id: "fitted", checked: true, onchange: redo });
  const inverted = h("input", { type: "checkbox", id: "inverted", onchange: redo });
  const said = h("p", { role: "status" });
  const element = h(
    "div",
    { class: "drawing" },
    board,
    h(
      "div",
      { class: "panel" },
      h("p", {}, h("button", { type: "button", onclick: clear }, "Clear")),
      h("figure", { class: "small" }, preview, h("figcaption", {}, `What the model gets: ${width} × ${height}`)),
    ),
    h(
      "div",
      { class: "fitting" },
      h("p", {}, fitted, " ", h("label", { for: "fitted" }, "Size and centre it as the data")),
      h("p", {}, inverted, " ", h("label", { for: "inverted" }, "Swap ink and paper")),
      h("p", { class: "quiet" }, "An image can be dropped on the board, or pasted."),
      said,
    ),
  );

  board.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    board.setPointerCapture(event.pointerId);
    byKeys = false;
    begin(place(event));
  });
  board.addEventListener("pointermove", (event) => {
    if (!board.hasPointerCapture(event.pointerId)) return;
    for (const each of event.getCoalescedEvents?.() ?? [event]) strokes.at(-1).push(place(each));
    redo();
  });
  board.addEventListener("keydown", (event) => {
    byKeys ||= event.key === " " || event.key in KEYS;
    if (event.key === " ") {
      event.preventDefault();
      pen = pen ? null : begin([...cursor]);
      redo();
    } else if (KEYS[event.key]) {
      event.preventDefault();
      cursor = cursor.map((x, i) => Math.min(1, Math.max(0, x + 0.04 * KEYS[event.key][i])));
      if (pen) pen.push([...cursor]);
      redo();
    }
  });
  board.addEventListener("focus", redraw);
  board.addEventListener("blur", redraw);
  whenGiven(element, (files) => take(files[0]));
  redraw();

  function place(event) {
    const box = board.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  function begin(point) {
    if (picture || exact) clear();
    strokes.push([point]);
    redo();
    return strokes.at(-1);
  }

  function clear() {
    strokes = [];
    picture = exact = pen = null;
    redo();
  }

  async function take(file) {
    said.textContent = "";
    let image;
    try {
      image = await createImageBitmap(file);
    } catch {
      said.textContent = `${file.name} is no image that this browser can read.`;
      return;
    }
    clear();
    picture = image;
    inverted.checked = false;
    const shares = ink();
    inverted.checked = shares.reduce((sum, share) => sum + share, 0) > shares.length / 2; // dark on light, as on paper
    redo();
  }

  function redo() {
    redraw();
    changed();
  }

  /** Whole numbers where the data are pixels or counts. */
  function rounded(value) {
    return high - low >= 8 ? Math.round(value) : Number(value.toFixed(4));
  }

  /** Shares of ink, from 0 to 1, row by row; null where nothing is drawn. */
  function ink() {
    if (exact) return exact.map((value) => (value - low) / (high - low));
    if (!strokes.length && !picture) return null;
    const fine = h("canvas", { width: width * FINE, height: height * FINE });
    const on = fine.getContext("2d", { willReadFrequently: true });
    if (picture) {
      on.fillStyle = "#fff"; // below what is transparent, as most programs show it
      on.fillRect(0, 0, fine.width, fine.height);
      on.drawImage(picture, 0, 0, fine.width, fine.height);
    } else drawStrokes(on, fine.width, fine.height, fitted.checked);
    const pixels = on.getImageData(0, 0, fine.width, fine.height).data;
    const shares = new Array(width * height).fill(0);
    for (let y = 0; y < fine.height; y++) {
      for (let x = 0; x < fine.width; x++) {
        const at = 4 * (y * fine.width + x);
        const value = picture ? (0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2]) / 255 : pixels[at + 3] / 255;
        shares[Math.floor(y / FINE) * width + Math.floor(x / FINE)] += value / (FINE * FINE);
      }
    }
    return inverted.checked ? shares.map((share) => 1 - share) : shares;
  }

  /** Draw the strokes; `asData` at the size of the data, their centre of mass in the middle. */
  function drawStrokes(on, wide, high, asData) {
    const points = strokes.flat();
    const [left, top] = [0, 1].map((i) => Math.min(...points.map((p) => p[i])));
    const [right, bottom] = [0, 1].map((i) => Math.max(...points.map((p) => p[i])));
    on.lineCap = on.lineJoin = "round";
    let move = ([x, y]) => [x * wide, y * high];
    on.lineWidth = PEN * high;
    if (asData) {
      const margin = Math.min(width, height) < FEW ? 0 : MARGIN;
      const box = [wide * (1 - 2 * margin), high * (1 - 2 * margin)];
      on.lineWidth = PEN * box[1];
      const span = [(right - left) * wide, (bottom - top) * high].map((s) => Math.max(s, 1e-6));
      const scale = Math.min(...box.map((b, i) => (b - on.lineWidth) / span[i]), 4 * FINE);
      const middle = margin === 0 ? [(left + right) / 2, (top + bottom) / 2] : centreOfMass(wide, high);
      move = ([x, y]) => [wide / 2 + (x - middle[0]) * wide * scale, high / 2 + (y - middle[1]) * high * scale];
    }
    for (const stroke of strokes) {
      on.beginPath();
      on.moveTo(...move(stroke[0]));
      for (const point of stroke.length > 1 ? stroke.slice(1) : stroke) on.lineTo(...move(point));
      on.stroke();
    }
  }

  /** The middle of the strokes, by their length. */
  function centreOfMass(wide, high) {
    let all = 1e-9, x = 0, y = 0;
    for (const stroke of strokes) {
      stroke.forEach(([px, py], i) => {
        const [qx, qy] = stroke[Math.max(0, i - 1)];
        const length = Math.hypot((px - qx) * wide, (py - qy) * high) + 1e-9;
        all += length;
        x += (length * (px + qx)) / 2;
        y += (length * (py + qy)) / 2;
      });
    }
    return [x / all, y / all];
  }

  function redraw() {
    const style = getComputedStyle(document.documentElement);
    const on = board.getContext("2d");
    on.clearRect(0, 0, board.width, board.height);
    on.strokeStyle = on.fillStyle = style.getPropertyValue("--ink");
    const shares = ink();
    if (picture || exact) paint(on, shares, board.width, board.height, style.getPropertyValue("--ink"));
    else if (strokes.length) drawStrokes(on, board.width, board.height, false);
    else {
      on.fillStyle = style.getPropertyValue("--quiet");
      on.font = "18px system-ui, sans-serif";
      on.textAlign = "center";
      on.fillText("Draw here", board.width / 2, board.height / 2);
    }
    if (byKeys && document.activeElement === board) {
      const [x, y] = [cursor[0] * board.width, cursor[1] * board.height];
      on.fillStyle = style.getPropertyValue(pen ? "--bad" : "--accent");
      on.beginPath();
      on.arc(x, y, 6, 0, 2 * Math.PI);
      on.fill();
    }
    const small = preview.getContext("2d");
    small.clearRect(0, 0, width, height);
    if (shares) paint(small, shares, width, height, style.getPropertyValue("--ink"));
  }

  function paint(on, shares, wide, high, colour) {
    on.fillStyle = colour;
    shares.forEach((share, i) => {
      on.globalAlpha = Math.min(1, Math.max(0, share));
      on.fillRect(((i % width) * wide) / width, (Math.floor(i / width) * high) / height, wide / width, high / height);
    });
    on.globalAlpha = 1;
  }

  function row() {
    if (exact) return exact;
    const shares = ink();
    return shares && shares.map((share) => rounded(low + share * (high - low)));
  }

  return {
    element,
    rows() {
      const found = row();
      return found && [found];
    },
    saved: row,
    restore(saved) {
      strokes = [];
      picture = pen = null;
      exact = saved;
      redraw();
    },
    example: (row) => row.flat(Infinity),
    others: [["Noise", () => Array.from({ length: width * height }, () => rounded(low + Math.random() * (high - low)))]],
  };
}
