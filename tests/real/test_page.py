"""Test the view Ask, links and keys in Chromium."""

import json
import time

import httpx
import numpy as np
import pytest

from tests.support.browser import (
    AXE,
    MISSING,
    chromium,
    console_errors,
    draw,
    get_text,
    open_page,
    press,
    send_files,
    until,
)
from tests.support.images import png_bytes
from tests.support.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
THREE = [
    [
        (0.3, 0.2),
        (0.5, 0.12),
        (0.7, 0.2),
        (0.7, 0.38),
        (0.5, 0.48),
        (0.72, 0.6),
        (0.72, 0.78),
        (0.5, 0.88),
        (0.28, 0.8),
    ]
]
ONE = [[(0.5, 0.1), (0.5, 0.9)]]
KEY = "the-key-of-the-people"
SELECT_ALL = ("\ue009", "a", "\ue009")  # control and A
RECORD_REQUESTS = "const f = fetch; window.bodies = []; window.fetch = (u, o) => { bodies.push(o.body); return f(u, o); }"
MAX_PAGE_BYTES = 300_000


@pytest.fixture(scope="module")
def service(digits_store, tmp_path_factory):
    with serving(digits_store) as (url, _):
        yield url


@pytest.fixture(scope="module")
def driver():
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def every_kind(kinds):
    with serving(kinds) as (url, _):
        yield url


def select_model(driver, model):
    script = "const s = document.getElementById('model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    driver.execute_script(script, model)
    until(driver, lambda: model in get_text(driver, "main h1"))


def plot_label(driver, number):
    """Return the description of a plot for screen readers."""
    script = "return document.querySelectorAll('.answer figure > svg')[arguments[0]].getAttribute('aria-label')"
    return driver.execute_script(script, number)


def test_drawing_a_digit_predicts_it(driver, service):
    open_page(driver, service)
    draw(driver, driver.find_element("id", "board"), THREE)
    until(driver, lambda: get_text(driver, ".answer h2").startswith("3"))
    assert get_text(driver, ".word") in ("Looks reliable", "Check this")
    assert "3" in get_text(driver, ".says")
    plain = get_text(driver, ".answers") + get_text(driver, ".about")
    assert not any(name in plain for name in ("mahalanobis", "residual", "bhn-realnvp", "p = "))
    count = "return document.querySelector('.answer figure > svg').querySelectorAll('[data-mark=dot] circle').length"
    assert driver.execute_script(count) == 10 * 100, "a dot per draw and class"
    assert plot_label(driver, 0).startswith("3: ")
    assert console_errors(driver) == []


def test_the_page_shows_the_numbers_of_the_api(driver, service):
    open_page(driver, service)
    draw(driver, driver.find_element("id", "board"), ONE)
    until(driver, lambda: get_text(driver, ".answer h2"))
    driver.execute_script(RECORD_REQUESTS)
    driver.execute_script("document.querySelector('.deeper').open = true")
    before = get_text(driver, ".meta")
    press(driver, "Ask")
    until(driver, lambda: get_text(driver, ".meta") not in ("", before))
    request = json.loads(driver.execute_script("return window.bodies.at(-1)"))
    row = np.array(request["inputs"][0]).reshape(8, 8)
    assert row.min() == 0
    assert row[0].max() > 4, "the drawing must fill the frame, as the digits do"
    assert row[-1].max() > 4
    seed = int(get_text(driver, ".meta").partition("draws, seed ")[2].split(".")[0])
    answer = httpx.post(f"{service}/predict", json={**request, "seed": seed}).json()["predictions"][
        0
    ]
    assert get_text(driver, ".answer h2").split()[0] == answer["label"]
    assert f"p = {answer['p_value']:.3g}." in plot_label(driver, 1)


def test_noise_is_flagged_and_explained(driver, service):
    open_page(driver, service)
    press(driver, "Noise")
    until(driver, lambda: get_text(driver, ".word") in ("Unfamiliar input", "Check this"))
    assert "no guarantee" in get_text(driver, ".promise")
    reason = until(driver, lambda: get_text(driver, ".why"))
    assert "Nearest training rows: " in reason
    painted = "const c = document.querySelector('.heat canvas:last-child'); return [...c.getContext('2d').getImageData(0, 0, 8, 8).data].filter((x, i) => i % 4 === 3 && x > 0).length"
    assert driver.execute_script(painted) > 8, "pixels are marked"
    assert console_errors(driver) == []


def test_example_rows_are_not_flagged(driver, service):
    open_page(driver, service)
    until(driver, lambda: len(driver.find_elements("css selector", ".examples button")) > 5)
    names = [button.text for button in driver.find_elements("css selector", ".examples button")]
    for name in names[:3]:
        press(driver, name)
        until(driver, lambda name=name: get_text(driver, ".answer h2").startswith(name))
        assert get_text(driver, ".word") in ("Looks reliable", "Check this")
        assert "no guarantee" not in get_text(driver, ".promise")
    press(driver, names[-1])
    until(driver, lambda: get_text(driver, ".why"))


def test_the_welcome_ends_with_the_first_answer_or_got_it(driver, service):
    open_page(driver, service)
    assert len(driver.find_elements("css selector", ".welcome li")) == 3
    press(driver, "Noise")
    until(driver, lambda: get_text(driver, ".answer h2"))
    press(driver, "Clear")
    until(driver, lambda: "pick an example" in get_text(driver, ".answers"))
    open_page(driver, service)  # a reload forgets it
    press(driver, "Got it")
    until(driver, lambda: "pick an example" in get_text(driver, ".answers"))


def test_the_verdict_is_visible_while_drawing_on_a_phone(service):
    with chromium(390, 844) as driver:
        open_page(driver, service)
        board = driver.find_element("id", "board")
        assert board.rect["y"] + board.rect["height"] < 844
        draw(driver, board, THREE)
        until(driver, lambda: get_text(driver, ".answer h2").startswith("3"))
        verdict = driver.find_element("css selector", ".verdict").rect
        assert verdict["y"] + verdict["height"] <= board.rect["y"] < 844 - board.rect["height"]


def test_a_form_starts_with_a_training_row_and_predicts_while_typing(driver, every_kind):
    rows = httpx.get(f"{every_kind}/predict/examples", params={"model": "rents"}).json()["inputs"]
    open_page(driver, f"{every_kind}/#/try")
    select_model(driver, "rents")
    until(driver, lambda: len(driver.find_elements("css selector", ".examples button")) > 1)
    field = driver.find_element("css selector", ".columns input[type=number]")
    assert float(field.get_attribute("value")) in {row["age"] for row in rows}
    field.send_keys(*SELECT_ALL, "41")
    until(driver, lambda: get_text(driver, ".answer h2"))
    assert console_errors(driver) == []


def test_a_link_replays_an_answer_exactly(driver, service):
    open_page(driver, service)
    press(driver, "Noise")
    until(driver, lambda: get_text(driver, ".answer h2"))
    press(driver, "Copy link to this answer")
    until(driver, lambda: "no key" in get_text(driver, "#link-said"))
    address = driver.current_url
    assert "#/try/" in address
    driver.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    before = get_text(driver, ".answer"), get_text(driver, ".more")
    with chromium() as another:
        open_page(another, address)
        until(another, lambda: get_text(another, ".answer h2"))
        another.execute_script(
            "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
        )
        assert (get_text(another, ".answer"), get_text(another, ".more")) == before
        open_page(another, address[:-20])
        assert "link is damaged" in until(another, lambda: get_text(another, ".notice"))


def test_drawing_with_the_keyboard(driver, service):
    open_page(driver, service)
    board = driver.find_element("id", "board")
    board.send_keys("\ue013" * 9, " ", "\ue015" * 18, " ")  # up, pen down, down, pen up
    until(driver, lambda: get_text(driver, ".answer h2"))
    assert console_errors(driver) == []


def test_an_image_on_the_board_may_be_dark_on_light(driver, service, digits_rows):
    answers = httpx.post(
        f"{service}/predict", json={"inputs": digits_rows[:20].tolist(), "seed": 7}
    ).json()
    n = int(np.argmax([max(row["probabilities"]) for row in answers["predictions"]]))
    ink = np.kron(digits_rows[n].reshape(8, 8) / 16, np.ones((8, 8)))
    light, dark = np.uint8(255 * (1 - ink)), np.uint8(255 * ink)
    transparent = np.stack([np.zeros_like(dark)] * 3 + [dark], axis=2)
    for event, place, pixels in (
        ("drop", "#board", light),
        ("drop", "#board", dark),
        ("paste", "body", light),
        ("drop", "#board", transparent),
    ):
        open_page(driver, service)
        send_files(driver, event, place, ("a.png", "image/png", png_bytes(pixels)))
        until(
            driver,
            lambda: get_text(driver, ".answer h2").startswith(answers["predictions"][n]["label"]),
        )
        assert driver.find_element("id", "inverted").is_selected() == (pixels is not dark)
    send_files(driver, "drop", "#board", ("a.png", "image/png", b"no image"))
    until(driver, lambda: "is not an image" in get_text(driver, ".drawing"))
    assert get_text(driver, ".answer h2").startswith(answers["predictions"][n]["label"]), (
        "the previous answer must stay"
    )


def test_images_can_be_pasted_and_dropped_and_invalid_ones_are_named(driver, every_kind):
    open_page(driver, f"{every_kind}/#/try")
    select_model(driver, "pictures")
    image = png_bytes(np.zeros((1, 1, 3), dtype=np.uint8))
    press(driver, "Image files")
    assert send_files(driver, "paste", "body", ("pasted.png", "image/png", image))
    until(driver, lambda: get_text(driver, ".answer h2"))
    driver.execute_script(RECORD_REQUESTS)
    assert send_files(
        driver, "drop", ".drop", ("a.png", "image/png", image), ("b.heic", "", b"ftypheic")
    )
    message = until(driver, lambda: get_text(driver, ".answers .notice"))
    assert message.startswith("b.heic: expected a PNG")
    assert get_text(driver, ".answer h2"), "the valid image must be answered"
    assert send_files(driver, "drop", "h1", ("c.png", "image/png", image)), (
        "the browser must not open a file dropped elsewhere"
    )
    assert not send_files(driver, "paste", "body"), "pasting text must still work"
    press(driver, "Numbers")
    assert not send_files(driver, "paste", "body", ("pasted.png", "image/png", image)), (
        "another input type must ignore images"
    )
    assert len(console_errors(driver)) == 1  # the 422


def test_an_invalid_number_is_not_treated_as_missing(driver, every_kind):
    open_page(driver, f"{every_kind}/#/try")
    select_model(driver, "rents")
    press(driver, "Ask")
    until(driver, lambda: get_text(driver, ".answer h2"))
    age = driver.find_element("css selector", ".columns input[type=number]")
    for content in ("1e999", "1-2"):
        age.send_keys(*SELECT_ALL, content)
        assert "age: not a number" in until(driver, lambda: get_text(driver, ".answers .notice"))
    age.send_keys(*SELECT_ALL, "\ue003")
    until(driver, lambda: get_text(driver, ".answer h2"))
    assert "missing: the field is empty" in get_text(driver, ".column")
    age.send_keys("31.5")
    until(driver, lambda: "field is empty" not in get_text(driver, ".column"))


def test_options_are_sent(driver, service):
    open_page(driver, service)
    draw(driver, driver.find_element("id", "board"), THREE)
    until(driver, lambda: get_text(driver, ".answer h2"))
    driver.execute_script(RECORD_REQUESTS)
    driver.execute_script("document.querySelector('details.options').open = true")
    driver.find_element(
        "xpath", "//label[starts-with(., 'Use the same draws')]/following-sibling::input"
    ).click()
    driver.find_element(
        "xpath", "//label[starts-with(., 'Abstain to keep')]/following-sibling::input"
    ).click()
    driver.execute_script("document.querySelector('.deeper').open = true")
    until(driver, lambda: "seed 7." in get_text(driver, ".meta"))
    until(driver, lambda: "risk" in (driver.execute_script("return window.bodies.at(-1)") or ""))
    request = json.loads(driver.execute_script("return window.bodies.at(-1)"))
    assert (request["seed"], request["num_samples"], request["fpr"], request["coverage"]) == (
        7,
        100,
        0.05,
        0.95,
    )
    assert 0.03 < request["risk"] < 0.5


def test_an_error_shows_the_detail_of_the_api(driver, service):
    open_page(driver, service)
    press(driver, "Numbers")
    driver.find_element("css selector", "textarea").send_keys("1 2 three")
    press(driver, "Ask")
    message = until(driver, lambda: get_text(driver, ".answers .notice"))
    assert (
        message
        == httpx.post(f"{service}/predict", json={"inputs": [[1, 2, "three"]]}).json()["detail"]
    )


def test_a_key_is_requested_and_never_stored(digits_store):
    with serving(digits_store, DUBITO_API_KEYS=KEY) as (url, _), chromium() as driver:
        driver.get(url)
        options = until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )[0]
        options.send_keys("a wrong key, of course", "\ue007")
        until(driver, lambda: "not valid" in get_text(driver, "#key-why"))
        options.send_keys(KEY, "\ue007")
        until(driver, lambda: driver.find_elements("id", "board"))
        draw(driver, driver.find_element("id", "board"), THREE)
        until(driver, lambda: get_text(driver, ".answer h2").startswith("3"))
        retained = "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert KEY not in driver.execute_script(retained)
        press(driver, "Copy link to this answer")
        until(driver, lambda: get_text(driver, "#link-said"))
        assert KEY not in driver.execute_script(retained)
        driver.refresh()
        until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )


@pytest.mark.skipif(not AXE.exists(), reason="axe is missing: it needs npm")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_no_violation(service, dark, width):
    with chromium(width, dark=dark) as driver:
        open_page(driver, service)
        press(driver, "Noise")
        until(driver, lambda: get_text(driver, ".answer h2"))
        for view in ("try", "models", "monitor", "label"):
            if view != "try":
                open_page(driver, f"{service}/#/{view}")
                time.sleep(1)
            driver.execute_script(
                "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
            )
            driver.execute_script(AXE.read_text())
            actual = driver.execute_async_script(
                "axe.run().then((r) => arguments[0](r.violations))"
            )
            output = [
                (each["id"], each["impact"], [node["html"][:200] for node in each["nodes"]])
                for each in actual
            ]
            assert output == [], view
            overflow = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert driver.execute_script(overflow) <= 0, f"{view} is wider than the screen"


def test_the_page_is_small_and_loads_only_from_the_service(driver, service):
    driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    open_page(driver, service)
    loaded = driver.execute_script(
        "return performance.getEntriesByType('resource').map((e) => [e.name, e.transferSize])"
    )
    loaded += driver.execute_script(
        "return performance.getEntriesByType('navigation').map((e) => [e.name, e.transferSize])"
    )
    assert all(name.startswith(service) for name, _ in loaded)
    assert len(loaded) > 10
    assert 100_000 < sum(size for _, size in loaded) < MAX_PAGE_BYTES
