"""Take the pictures of the documentation from a service with the model `digits`.

    python docs/pictures/take.py http://127.0.0.1:8000

Requires Chromium and the environment `page` of tests/real/environments.sh.
"""

import io
import json
import sys
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

THREE = [(0.3, 0.2), (0.5, 0.12), (0.68, 0.25), (0.5, 0.46), (0.7, 0.66), (0.5, 0.88), (0.28, 0.78)]
SCRIBBLE = [(0.1, 0.2), (0.9, 0.3), (0.1, 0.5), (0.9, 0.6), (0.2, 0.9), (0.5, 0.1), (0.8, 0.9)]
SIZE = (1000, 720)
STEPS = 3  # frames between two points of a stroke
FRAME_MS, HOLD_MS = 60, 2500
SEED, DRAWS = 7, 100
SHARES = np.linspace(0.0, 1.0, 11)


def grab(driver: Any) -> Image.Image:
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def draw_slowly(driver: Any, points: list[tuple[float, float]], frames: list[Image.Image]) -> None:
    """Draw a stroke with the pointer, and take a frame after each part."""
    from selenium.webdriver import ActionChains

    board = driver.find_element("id", "board")
    box = board.rect
    path = [
        np.add(start, np.subtract(end, start) * step / STEPS)
        for start, end in pairwise(points)
        for step in range(STEPS)
    ]
    offsets = [(round((x - 0.5) * box["width"]), round((y - 0.5) * box["height"])) for x, y in path]
    chain = ActionChains(driver, duration=10)
    chain.move_to_element_with_offset(board, *offsets[0]).click_and_hold().perform()
    for offset in offsets[1:]:
        ActionChains(driver, duration=10).move_to_element_with_offset(board, *offset).perform()
        frames.append(grab(driver))
    ActionChains(driver, duration=10).release().perform()
    time.sleep(2)  # until the answer has been drawn
    frames.append(grab(driver))


def animate(driver: Any, url: str) -> None:
    """Record a drawn 3 and a scribble as an animated PNG."""
    open_page(driver, f"{url}/#/try/digits")
    until(driver, lambda: driver.find_elements("id", "board"))
    frames = [grab(driver)]
    holds = []
    for points in (THREE, SCRIBBLE):
        draw_slowly(driver, points, frames)
        holds.append(len(frames) - 1)
        if points is THREE:
            press(driver, "Clear")
    palette = frames[holds[1]].quantize(96)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [HOLD_MS if i in holds else FRAME_MS for i in range(len(frames))]
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
    figure.suptitle(
        "A 3 turns into a chessboard: it is flagged before the draws disagree"
    )
    figure.savefig(FOLDER / "drag.png", dpi=100)


def main() -> None:
    url = sys.argv[1].rstrip("/")
    plt.switch_backend("Agg")
    drag(url)
    with chromium(*SIZE) as driver:
        animate(driver, url)
        for name, address in (("models", "#/models/digits"), ("label", "#/label/digits")):
            open_page(driver, f"{url}/{address}")
            time.sleep(3)
            grab(driver).quantize(96).save(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
