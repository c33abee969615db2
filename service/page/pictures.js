// Pictures of rows of pixels.

const MAX_SIDE = 256; // pixels; larger pictures are thinned out

/** Return the layout of a row's pixels, {height, width, channels, index(y, x, channel)}; null if it is no picture. */
export function pixelLayout({ shape, dtype, columns, text }) {
  if (columns.length || text || dtype !== "float32" || shape.length < 2 || shape.length > 3) return null;
  const [channels, height, width] = shape.length === 2 ? [1, ...shape] : shape[2] <= 3 && shape[0] > 3 ? [shape[2], shape[0], shape[1]] : shape;
  if (![1, 3].includes(channels) || Math.min(height, width) < 2) return null;
  const isLast = shape.length === 3 && shape[2] <= 3 && shape[0] > 3;
  return { channels, height, width, index: (y, x, c) => (isLast ? (y * width + x) * channels + c : (c * height + y) * width + x) };
}

/** Draw a row on a canvas: photographs unchanged, other grey values with large ones as ink. Without a name it is decoration. */
export function drawRow(row, layout, { image, minimum, maximum }, name) {
  const { channels, height, width } = layout;
  const step = Math.ceil(Math.max(height, width) / MAX_SIDE);
  const [tall, wide] = [height, width].map((side) => Math.ceil(side / step));
  const canvas = Object.assign(document.createElement("canvas"), { width: wide, height: tall, className: "thumbnail" });
  if (name) canvas.setAttribute("role", "img");
  canvas.setAttribute(name ? "aria-label" : "aria-hidden", name || "true");
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(wide, tall);
  const [low, high] = image ? [0, 255] : [minimum, maximum];
  const scaled = (value) => Math.min(255, Math.max(0, (255 * (value - low)) / (high - low || 1)));
  for (let y = 0; y < tall; y++) {
    for (let x = 0; x < wide; x++) {
      const i = 4 * (y * wide + x);
      for (let c = 0; c < 3; c++) {
        const value = scaled(row[layout.index(y * step, x * step, channels === 3 ? c : 0)]);
        pixels.data[i + c] = channels === 1 && !image ? 255 - value : value;
      }
      pixels.data[i + 3] = 255;
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}
