// Render drawn strokes as the training data are: the same size, centre and amount of ink. Sides are in model pixels.

const MAX_FINE_SIDE = 128; // points of the bitmap whose blocks are counted
const MAX_BLOCK = 4; // as in the digits of scikit-learn: 32 x 32 bitmaps, counted in blocks of 4 x 4
const HALVINGS = 8; // of the pen's width
const MAX_PEN = 0.5; // of the height
const MAX_INK_SPREAD = 0.2; // relative; handwriting has more unless its ink is normalised, as in the digits of scikit-learn

/** Measure how the training images are drawn: {box: [width, height], centre, statistic, target}; `rows` are flat, with values from 0 (paper) to 1. */
export function measureStyle(rows, width, height) {
  const marks = rows.filter((row) => row.some((share) => share > 0)).map((row) => measure(row, width, height));
  if (!marks.length) return { box: [0.8 * width, 0.8 * height], centre: "box", statistic: "ink", target: 0.2 };
  const inks = marks.map(({ ink }) => ink);
  const statistic = deviation(inks) < MAX_INK_SPREAD * mean(inks) ? "ink" : "thickness";
  const jitter = (name) => mean([0, 1].map((axis) => deviation(marks.map((mark) => mark[name][axis]))));
  const centre = jitter("box") <= jitter("mass") ? "box" : "mass";
  // Images are usually scaled until one side is full, which then varies least.
  const sides = [0, 1].map((axis) => marks.map((mark) => mark.size[axis]));
  const full = deviation(sides[0]) < deviation(sides[1]) ? 0 : 1;
  return { box: sides.map((sizes, axis) => quantile(sizes, axis === full ? 0.5 : 0.95)), centre, statistic, target: quantile(marks.map((mark) => mark[statistic]), 0.5) };
}

/** Render strokes, lists of [x, y] from 0 to 1 of the board, as a flat row of shares of ink. With `isFitted` they get the style's size and position. */
export function renderStrokes(strokes, width, height, style, isFitted = true) {
  let low = 0, high = MAX_PEN * height, row;
  for (let i = 0; i < HALVINGS; i++) {
    const pen = (low + high) / 2;
    row = paint(place(strokes, width, height, style, pen, isFitted), width, height, pen);
    if (measure(row, width, height)[style.statistic] < style.target) low = pen;
    else high = pen;
  }
  return row;
}

/** Scale the strokes to the style's box, and centre them as the style does. */
function place(strokes, width, height, { box, centre }, pen, isFitted) {
  const inPixels = strokes.map((stroke) => stroke.map(([x, y]) => [x * width, y * height]));
  if (!isFitted) return inPixels;
  const points = inPixels.flat();
  const ends = [0, 1].map((axis) => [Math.min(...points.map((point) => point[axis])), Math.max(...points.map((point) => point[axis]))]);
  const scale = Math.min(...ends.map(([from, to], axis) => Math.max(box[axis] - pen, 1) / Math.max(to - from, 1e-6)));
  const middle = centre === "box" ? ends.map(([from, to]) => (from + to) / 2) : centreOfLength(inPixels);
  return inPixels.map((stroke) => stroke.map((point) => point.map((x, axis) => [width, height][axis] / 2 + (x - middle[axis]) * Math.min(scale, height))));
}

function centreOfLength(strokes) {
  let total = 1e-9;
  const sum = [0, 0];
  for (const stroke of strokes) {
    stroke.forEach(([x, y], i) => {
      const [fromX, fromY] = stroke[Math.max(0, i - 1)];
      const length = Math.hypot(x - fromX, y - fromY) + 1e-9;
      total += length;
      sum[0] += (length * (x + fromX)) / 2;
      sum[1] += (length * (y + fromY)) / 2;
    });
  }
  return sum.map((value) => value / total);
}

/** Mark the points of a fine bitmap that the pen touches, and count them in blocks. */
function paint(strokes, width, height, pen) {
  const block = Math.max(1, Math.min(MAX_BLOCK, Math.floor(MAX_FINE_SIDE / Math.max(width, height))));
  const [wide, tall, radius] = [width * block, height * block, (pen * block) / 2];
  const bitmap = new Uint8Array(wide * tall);
  for (const stroke of strokes) {
    stroke.forEach((to, i) => {
      const [ax, ay] = stroke[Math.max(0, i - 1)].map((x) => x * block), [bx, by] = to.map((x) => x * block);
      const squared = (bx - ax) ** 2 + (by - ay) ** 2 || 1;
      const range = (a, b, max) => [Math.max(0, Math.floor(Math.min(a, b) - radius)), Math.min(max, Math.ceil(Math.max(a, b) + radius))];
      const [left, right] = range(ax, bx, wide), [top, bottom] = range(ay, by, tall);
      for (let y = top; y < bottom; y++) {
        for (let x = left; x < right; x++) {
          const dx = x + 0.5 - ax, dy = y + 0.5 - ay;
          const t = Math.min(1, Math.max(0, (dx * (bx - ax) + dy * (by - ay)) / squared));
          if (Math.hypot(dx - t * (bx - ax), dy - t * (by - ay)) <= radius) bitmap[y * wide + x] = 1;
        }
      }
    });
  }
  const row = new Array(width * height).fill(0);
  bitmap.forEach((isInk, i) => (row[Math.floor(i / wide / block) * width + Math.floor((i % wide) / block)] += isInk / block ** 2));
  return row;
}

/** Measure an image: the mean share of `ink`, the strokes' `thickness`, its `size`, and the centres of its `box` and `mass`. */
function measure(row, width, height) {
  let ink = 0, edges = 0;
  const mass = [0, 0], profiles = [new Array(width).fill(0), new Array(height).fill(0)];
  row.forEach((share, i) => {
    const place = [i % width, Math.floor(i / width)];
    ink += share;
    place.forEach((x, axis) => {
      mass[axis] += share * (x + 0.5);
      profiles[axis][x] = Math.max(profiles[axis][x], share);
      edges += Math.abs(share - (x ? row[i - (axis ? width : 1)] : 0)) + (x === (axis ? height : width) - 1 ? share : 0);
    });
  });
  // A pixel at the edge counts as far as it is covered.
  const ends = profiles.map((shares) => {
    const first = shares.findIndex((share) => share > 0), last = shares.findLastIndex((share) => share > 0);
    return [first + 1 - shares[first], last + shares[last]];
  });
  return { ink: ink / row.length, thickness: (2 * ink) / Math.max(edges, 1e-9), size: ends.map(([from, to]) => to - from), box: ends.map(([from, to]) => (from + to) / 2), mass: mass.map((sum) => sum / Math.max(ink, 1e-9)) };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function deviation(values) {
  const centre = mean(values);
  return Math.sqrt(mean(values.map((value) => (value - centre) ** 2)));
}

/** Interpolate a quantile linearly. */
function quantile(values, q) {
  const sorted = [...values].sort((a, b) => a - b), position = q * (sorted.length - 1), i = Math.floor(position);
  return sorted[i] + (position - i) * ((sorted[i + 1] ?? sorted[i]) - sorted[i]);
}
