"""Take the pictures of the documentation from a service with the model `digits`.

    python docs/pictures/take.py http://127.0.0.1:8000

Requires Chromium and the environment `page` of tests/real/environments.sh.
"""

import io
import json
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from tests.support.browser import chromium, open_page, press, until  # noqa: E402

THREE = [(0.3, 0.2), (0.5, 0.12), (0.7, 0.2), (0.7, 0.38), (0.5, 0.48), (0.72, 0.6), (0.72, 0.78)]
THREE += [(0.5, 0.88), (0.28, 0.8)]
SCRIBBLE = [(0.1, 0.2), (0.9, 0.3), (0.1, 0.5), (0.9, 0.6), (0.2, 0.9), (0.5, 0.1), (0.8, 0.9)]
SIZE = (1000, 720)
STEPS = 5  # pointer moves between two points of a stroke
ANSWER_S = 3.0
FRAME_MS, HOLD_MS = 150, 3000
SEED, DRAWS = 7, 100
SHARES = np.linspace(0.0, 1.0, 11)


def grab(driver: Any) -> Image.Image:
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def draw_slowly(driver: Any, points: list[tuple[float, float]], frames: list[Image.Image]) -> None:
    """Draw a stroke with the pointer, and take a frame after each part."""
    board = driver.find_element("id", "board").rect

    def move(kind: str, point: np.ndarray) -> None:
        x, y = board["x"] + point[0] * board["width"], board["y"] + point[1] * board["height"]
        event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    move("mousePressed", np.array(points[0]))
    for start, end in pairwise(points):
        for step in range(1, STEPS + 1):
            move("mouseMoved", np.add(start, np.subtract(end, start) * step / STEPS))
        frames.append(grab(driver))
    move("mouseReleased", np.array(points[-1]))
    time.sleep(ANSWER_S)
    frames.append(grab(driver))


def animate(driver: Any, url: str) -> None:
    """Record a drawn 3 and a scribble as an animated PNG."""
    open_page(driver, f"{url}/#/try/digits")
    until(driver, lambda: driver.find_elements("id", "board"))
    frames: list[Image.Image] = []
    holds = []
    for points in (THREE, SCRIBBLE):
        draw_slowly(driver, points, frames)
        holds.append(len(frames) - 1)
        if points is THREE:
            press(driver, "Clear")
    colours = Image.new("RGB", (SIZE[0] * len(holds), SIZE[1]))
    for i, hold in enumerate(holds):
        colours.paste(frames[hold], (SIZE[0] * i, 0))
    palette = colours.quantize(128)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [HOLD_MS if i in holds else FRAME_MS for i in range(len(frames))]
    first = holds[0]  # shown by viewers without animation
    images, durations = images[first:] + images[:first], durations[first:] + durations[:first]
    images[0].save(
        FOLDER / "try.png", save_all=True, append_images=images[1:], duration=durations, loop=0
    )


def predict(url: str, rows: np.ndarray) -> list[dict[str, Any]]:
    body = {"model": "digits", "seed": SEED, "num_samples": DRAWS, "return_samples": True}
    data = json.dumps({**body, "inputs": rows.tolist()}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/predict", data, headers)) as answer:
        predictions: list[dict[str, Any]] = json.load(answer)["predictions"]
    return predictions


def drag(url: str) -> None:
    """Plot each draw's probability of 3 while a 3 is blended into a chessboard."""
    three, board = load_digits().data[3], 16.0 * (np.indices((8, 8)).sum(0) % 2).ravel()
    rows = np.array([(1 - share) * three + share * board for share in SHARES])
    figure, axes = plt.subplot_mosaic(
        [[f"{i}" for i in range(len(rows))], ["draws"] * len(rows)],
        figsize=(9, 4.2),
        height_ratios=[1, 3],
        layout="constrained",
    )
    axis = axes["draws"]
    for i, (row, prediction) in enumerate(zip(rows, predict(url, rows), strict=True)):
        axes[f"{i}"].imshow(row.reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
        axes[f"{i}"].axis("off")
        colour = "#c92a2a" if prediction["flag"] else "#2b8a3e"
        draws = np.array(prediction["samples"])[:, 3]
        jitter = np.random.default_rng(i).uniform(-0.3, 0.3, DRAWS)
        axis.plot(i + jitter, draws, ".", color=colour, alpha=0.5)
    axis.plot([], [], "o", color="#2b8a3e", label="not flagged")
    axis.plot([], [], "o", color="#c92a2a", label="flagged")
    axis.set(
        xlim=(-0.5, len(rows) - 0.5),
        xticks=range(len(rows)),
        xticklabels=[f"{share:.0%}" for share in SHARES],
        xlabel="share of the chessboard in the picture",
        ylabel="probability of 3, one dot per draw",
    )
    axis.legend(loc="lower left")
    figure.suptitle("A 3 turns into a chessboard: it is flagged before the draws disagree")
    figure.savefig(FOLDER / "drag.png", dpi=100)


def label(driver: Any, url: str) -> None:
    """Rank a pool of digits, and take the picture of the first row to label."""
    open_page(driver, f"{url}/#/label/digits")
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.npy"
        np.save(pool, load_digits().data[1000:1200].astype(np.float32))
        driver.find_element("css selector", "input[type=file]").send_keys(str(pool))
        press(driver, "Select rows")
        event = {"type": "mouseMoved", "x": 0, "y": 0}  # away from the buttons
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
        time.sleep(3 * ANSWER_S)
    grab(driver).quantize(96).save(FOLDER / "label.png")


def main() -> None:
    url = sys.argv[1].rstrip("/")
    plt.switch_backend("Agg")
    drag(url)
    with chromium(*SIZE) as driver:
        animate(driver, url)
        open_page(driver, f"{url}/#/models/digits")
        time.sleep(ANSWER_S)
        grab(driver).quantize(96).save(FOLDER / "models.png")
        label(driver, url)


if __name__ == "__main__":
    main()
