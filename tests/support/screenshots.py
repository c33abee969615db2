"""The pictures of the page in README.md and docs/: `python -m tests.support.screenshots` makes them, with the digits
model.

It fits the model of `make serve` twice, evaluates it, sends it digits and noise, and looks at each
view in Chromium.
"""

import io
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.browser import MISSING, chromium, complaints, draw
from tests.support.environment import ROOT, run_training
from tests.support.serving import serving

PICTURES = ROOT / "docs" / "pictures"
COLOURS = 128  # of a picture: a third of the bytes, and nobody sees it
HIGHEST = 1900  # pixels of a picture
WATCHED_S = 60  # of traffic before the view `live` is taken
THREE = [
    [(0.3, 0.2), (0.4, 0.13), (0.52, 0.11), (0.66, 0.16), (0.71, 0.28), (0.66, 0.4), (0.5, 0.47)],
    [(0.5, 0.47), (0.68, 0.53), (0.75, 0.66), (0.7, 0.8), (0.55, 0.89), (0.4, 0.88), (0.28, 0.8)],
]


def main() -> int:
    """Make all pictures; return 1 where Chromium is missing."""
    if MISSING is not None:
        print(f"error: {MISSING}", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for seed in (0, 1):
            recipe = (
                (ROOT / "recipes" / "digits.toml")
                .read_text()
                .replace("seed = 0", f"seed = {seed}", 1)
            )
            (folder / "digits.toml").write_text(recipe)
            run_training(folder, "fit", str(folder / "digits.toml"))
            run_training(folder, "evaluate", f"digits:{seed + 1}", "--data", "digits")
        np.save(folder / "pool.npy", load_digits().images.astype(np.float32))
        with serving(folder / "models", DUBITO_PREFLIGHT_TIMEOUT_S="30") as (url, _):
            sending = threading.Thread(
                target=send, args=(url, time.monotonic() + WATCHED_S), daemon=True
            )
            take(url, folder / "pool.npy", sending)
    return 0


def send(url: str, end: float) -> None:
    """Send digits, and some noise, until a time."""
    rows, rng = load_digits().data, np.random.default_rng(0)
    with httpx.Client(base_url=url) as client:
        while time.monotonic() < end:
            few = int(rng.integers(1, 8))
            sent = (
                rows[rng.integers(0, len(rows), few)]
                if rng.random() > 0.02
                else rng.integers(0, 17, (few, 64))
            )
            client.post("/predict", json={"inputs": sent.tolist()}).raise_for_status()
            time.sleep(rng.exponential(0.1))


def take(url: str, pool: Path, sending: threading.Thread) -> None:
    """Take a picture of each view."""
    with chromium(1200, 1000) as driver:
        driver.get(f"{url}/#/live")
        sending.start()
        sending.join()
        time.sleep(6)
        picture(driver, "live")
        driver.get(f"{url}/#/ask")
        time.sleep(2)
        draw(driver, driver.find_element("id", "board"), THREE)
        time.sleep(2)
        picture(driver, "ask")
        driver.get(f"{url}/#/models")
        time.sleep(3)
        picture(driver, "models")
        driver.get(f"{url}/#/choose")
        time.sleep(2)
        driver.find_element("css selector", "input[type=file]").send_keys(str(pool))
        time.sleep(1)
        driver.find_element("css selector", "button.main").click()
        time.sleep(4)
        picture(driver, "choose")
        assert complaints(driver) == []
    with chromium(390, 844, dark=True) as driver:
        driver.get(url)
        time.sleep(2)
        driver.find_element("xpath", "//button[.='Noise']").click()
        time.sleep(2)
        picture(driver, "phone")


def picture(driver: Any, name: str) -> None:
    """Save all of what is shown, or the first of it."""
    width = driver.execute_script("return document.documentElement.clientWidth")
    resize(driver, width, 400)
    resize(
        driver,
        width,
        min(HIGHEST, driver.execute_script("return document.documentElement.scrollHeight")),
    )
    taken = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    file = PICTURES / f"{name}.png"
    taken.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(
        f"{file.relative_to(ROOT)}: {taken.width} x {taken.height}, "
        f"{file.stat().st_size / 1000:.0f} kB"
    )


def resize(driver: Any, width: int, height: int) -> None:
    """Give what is shown another size, in pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
