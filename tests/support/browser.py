"""Drive Chromium with selenium from the environment `.venv-page` (see `make test-real`)."""

import base64
import shutil
import site
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.environment import ROOT

WAIT_S = 20.0  # timeout of `until`
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
DISPATCH = """
const [kind, selector, files] = arguments, transfer = new DataTransfer();
const content = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
for (const [name, type, base64] of files) transfer.items.add(new File([content(base64)], name, { type }));
const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: transfer, bubbles: true, cancelable: true })
  : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
document.querySelector(selector).dispatchEvent(event);
return event.defaultPrevented;
"""
MISSING = next(
    (
        f"missing: {name}"
        for name, is_present in (
            ("chromium", CHROMIUM),
            ("chromedriver (Debian's chromium-driver)", DRIVER),
            ("the environment of the page tests (make test-real)", PACKAGES.exists()),
        )
        if not is_present
    ),
    None,
)


@contextmanager
def chromium(
    width: int = 1200, height: int = 1400, *, dark: bool = False, downloads: str = ""
) -> Iterator[Any]:
    """Run headless Chromium and yield selenium's driver, which records the console.

    `dark` emulates a dark colour scheme. `downloads` is the folder for files that the page saves.
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


def console_errors(driver: Any) -> list[str]:
    """Return and clear the console's errors and warnings, including blocked and missing files."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def open_page(driver: Any, address: str) -> Any:
    """Load an address afresh, with an empty console log, and wait for its heading."""
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get(address)
    until(driver, lambda: driver.find_elements("css selector", "main h1"))
    return driver


def until(driver: Any, condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Wait for a condition and return its value, or fail with the page's text."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, driver.find_element("tag name", "main").text
        time.sleep(0.05)
    return value


def get_text(driver: Any, selector: str) -> str:
    """Return the text of the first matching element, or "". One script prevents stale elements."""
    text: str = driver.execute_script(
        "return document.querySelector(arguments[0])?.innerText ?? ''", selector
    )
    return text.replace("\xa0", " ")


def press(driver: Any, name: str) -> None:
    """Click the button with a name. Retry if the page replaces it."""
    from selenium.common.exceptions import StaleElementReferenceException

    def try_click() -> bool:
        try:
            driver.find_element("xpath", f"//button[normalize-space()='{name}']").click()
        except StaleElementReferenceException:
            return False
        return True

    until(driver, try_click)


def draw(driver: Any, board: Any, strokes: list[list[tuple[float, float]]]) -> None:
    """Draw on a canvas with the pointer; coordinates are relative to its sides."""
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


def send_files(driver: Any, event: str, selector: str, *files: tuple[str, str, bytes]) -> bool:
    """Drop or paste files, (name, media type, content); return whether the page handled them."""
    packed = [(name, kind, base64.b64encode(content).decode()) for name, kind, content in files]
    is_handled: bool = driver.execute_script(DISPATCH, event, selector, packed)
    return is_handled
