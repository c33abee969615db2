"""Chromium, driven by selenium, which has an environment of its own: `.venv-page`, made by `make
test-real`."""

import base64
import shutil
import site
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.environment import ROOT

WAIT_S = 20.0  # for what a page shows
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PACKAGES = (
    ROOT
    / ".venv-page"
    / "lib"
    / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    / "site-packages"
)
AXE = ROOT / ".venv-page" / "package" / "axe.min.js"
GIVE = """
const [kind, selector, files] = arguments, given = new DataTransfer();
const content = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
for (const [name, type, base64] of files) given.items.add(new File([content(base64)], name, { type }));
const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: given, bubbles: true, cancelable: true })
  : new DragEvent(kind, { dataTransfer: given, bubbles: true, cancelable: true });
document.querySelector(selector).dispatchEvent(event);
return event.defaultPrevented;
"""
MISSING = next(
    (
        f"{what} is not there"
        for what, found in (
            ("chromium", CHROMIUM),
            ("chromedriver (Debian's chromium-driver)", DRIVER),
            ("the environment of the page's tests (make test-real)", PACKAGES.exists()),
        )
        if not found
    ),
    None,
)


@contextmanager
def chromium(
    width: int = 1200, height: int = 1400, *, dark: bool = False, downloads: str = ""
) -> Iterator[Any]:
    """Run Chromium without a window; yields selenium's driver, whose log has what the console says.

    `dark`: as where the reader's system is dark. `downloads`: the folder for files that a page
        saves.
    """
    site.addsitedir(str(PACKAGES))
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-device-scale-factor=1",
        "--hide-scrollbars",
    ]
    for flag in [*flags, f"--window-size={width},{height}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if downloads:
        options.add_experimental_option("prefs", {"download.default_directory": downloads})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        yield driver
    finally:
        driver.quit()


def complaints(driver: Any) -> list[str]:
    """What the console complains of since it was last asked: errors, files not found, what the
    policy blocked."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def opened(driver: Any, address: str) -> Any:
    """Open the page at an address, again, and forget what the console said before; return the
    driver."""
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get(address)
    until(driver, lambda: driver.find_elements("css selector", "main h1"))
    return driver


def until(driver: Any, condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Wait for a condition and return what it comes to, or fail with what is shown."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, driver.find_element("tag name", "main").text
        time.sleep(0.05)
    return found


def text_of(driver: Any, selector: str) -> str:
    """The text of the first such element, empty where there is none; in one step, since answers
    change."""
    found: str = driver.execute_script(
        "return document.querySelector(arguments[0])?.innerText ?? ''", selector
    )
    return found.replace("\xa0", " ")


def press(driver: Any, name: str) -> None:
    """Press the button of a name; again where an answer took its place meanwhile."""
    from selenium.common.exceptions import StaleElementReferenceException

    def pressed() -> bool:
        try:
            driver.find_element("xpath", f"//button[normalize-space()='{name}']").click()
        except StaleElementReferenceException:
            return False
        return True

    until(driver, pressed)


def draw(driver: Any, board: Any, strokes: list[list[tuple[float, float]]]) -> None:
    """Draw on a canvas with the pointer; points are shares of its sides."""
    from selenium.webdriver import ActionChains

    box = board.rect
    for stroke in strokes:
        actions = ActionChains(driver, duration=10)
        offsets = [
            (round((x - 0.5) * box["width"]), round((y - 0.5) * box["height"])) for x, y in stroke
        ]
        actions.move_to_element_with_offset(board, *offsets[0]).click_and_hold()
        for offset in offsets[1:]:
            actions.move_to_element_with_offset(board, *offset)
        actions.release().perform()


def give(driver: Any, event: str, selector: str, *files: tuple[str, str, bytes]) -> bool:
    """Drop or paste files, (name, media type, content), on an element; return whether the page took
    them."""
    packed = [(name, kind, base64.b64encode(content).decode()) for name, kind, content in files]
    taken: bool = driver.execute_script(GIVE, event, selector, packed)
    return taken
