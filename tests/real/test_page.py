"""The page in Chromium: what is drawn is answered, noise is flagged, links replay, keys are asked
for.

Where Chromium, its driver or selenium are missing it is skipped.
"""

import io
import json
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.browser import (
    AXE,
    MISSING,
    chromium,
    complaints,
    draw,
    give,
    opened,
    press,
    text_of,
    until,
)
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
ALL_OF_IT = ("\ue009", "a", "\ue009")  # control and A, to be typed over
LISTEN = "const f = fetch; window.asked = []; window.fetch = (u, o) => { asked.push(o.body); return f(u, o); }"
MOST_BYTES = 300_000  # of all that the page loads


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


def look_at(driver, model):
    """Choose a model, as people do."""
    script = "const s = document.getElementById('model'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    driver.execute_script(script, model)
    until(driver, lambda: model in text_of(driver, "main h1"))


def png(pixels):
    """A PNG file of pixels, (H, W) or (H, W, channels)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def plot_says(driver, number):
    """What a plot of the answer says to those who do not see it."""
    script = "return document.querySelectorAll('.answer figure > svg')[arguments[0]].getAttribute('aria-label')"
    return driver.execute_script(script, number)


def test_a_digit_that_is_drawn_is_answered_while_it_is_drawn(driver, service):
    opened(driver, service)
    draw(driver, driver.find_element("id", "board"), THREE)
    until(driver, lambda: text_of(driver, ".answer h2").startswith("3"))
    assert text_of(driver, ".word") in ("Looks reliable", "Check this")
    assert "3" in text_of(driver, ".says")
    plain = text_of(driver, ".answers") + text_of(driver, ".about")
    assert not any(name in plain for name in ("mahalanobis", "residual", "bhn-realnvp", "p = "))
    count = "return document.querySelector('.answer figure > svg').querySelectorAll('[data-mark=dot] circle').length"
    assert driver.execute_script(count) == 10 * 100, "each draw is a dot of each class"
    assert plot_says(driver, 0).startswith("3: ")
    assert complaints(driver) == []


def test_what_is_sent_is_what_the_service_answers_again(driver, service):
    """The numbers that the page shows are those of the API, for the row that it says it sent."""
    opened(driver, service)
    draw(driver, driver.find_element("id", "board"), ONE)
    until(driver, lambda: text_of(driver, ".answer h2"))
    driver.execute_script(LISTEN)
    driver.execute_script("document.querySelector('.deeper').open = true")
    before = text_of(driver, ".meta")
    press(driver, "Ask")
    until(driver, lambda: text_of(driver, ".meta") not in ("", before))
    asked = json.loads(driver.execute_script("return window.asked.at(-1)"))
    row = np.array(asked["inputs"][0]).reshape(8, 8)
    assert row.min() == 0
    assert row[0].max() > 4, "the drawing fills the frame, as such data do"
    assert row[-1].max() > 4
    seed = int(text_of(driver, ".meta").partition("draws, seed ")[2].split(".")[0])
    answer = httpx.post(f"{service}/predict", json={**asked, "seed": seed}).json()["predictions"][0]
    assert text_of(driver, ".answer h2").split()[0] == answer["label"]
    assert f"p = {answer['p_value']:.3g}." in plot_says(driver, 1)


def test_noise_is_flagged_and_the_page_says_by_what(driver, service):
    opened(driver, service)
    press(driver, "Noise")
    until(driver, lambda: text_of(driver, ".word") in ("Unfamiliar input", "Check this"))
    assert "no guarantee" in text_of(driver, ".promise")
    why = until(driver, lambda: text_of(driver, ".why"))
    assert "Nearest training rows: " in why
    painted = "const c = document.querySelector('.heat canvas:last-child'); return [...c.getContext('2d').getImageData(0, 0, 8, 8).data].filter((x, i) => i % 4 === 3 && x > 0).length"
    assert driver.execute_script(painted) > 8, "pixels are marked"
    assert complaints(driver) == []


def test_examples_are_offered_which_the_model_does_not_flag(driver, service):
    opened(driver, service)
    until(driver, lambda: len(driver.find_elements("css selector", ".examples button")) > 5)
    named = [button.text for button in driver.find_elements("css selector", ".examples button")]
    for name in named[:3]:
        press(driver, name)
        until(driver, lambda name=name: text_of(driver, ".answer h2").startswith(name))
        assert text_of(driver, ".word") in ("Looks reliable", "Check this")
        assert "no guarantee" not in text_of(driver, ".promise")
    press(driver, named[-1])
    until(driver, lambda: text_of(driver, ".why"))


def test_a_visitor_is_told_what_doubt_is_until_there_was_an_answer(driver, service):
    opened(driver, service)
    assert len(driver.find_elements("css selector", ".welcome li")) == 3
    press(driver, "Noise")
    until(driver, lambda: text_of(driver, ".answer h2"))
    press(driver, "Clear")
    until(driver, lambda: "pick an example" in text_of(driver, ".answers"))
    opened(driver, service)  # nothing is stored
    press(driver, "Got it")
    until(driver, lambda: "pick an example" in text_of(driver, ".answers"))


def test_on_a_phone_the_answer_is_seen_while_one_draws(service):
    with chromium(390, 844) as driver:
        opened(driver, service)
        board = driver.find_element("id", "board")
        assert board.rect["y"] + board.rect["height"] < 844
        draw(driver, board, THREE)
        until(driver, lambda: text_of(driver, ".answer h2").startswith("3"))
        verdict = driver.find_element("css selector", ".verdict").rect
        assert verdict["y"] + verdict["height"] <= board.rect["y"] < 844 - board.rect["height"]


def test_a_table_begins_with_a_training_row_and_is_answered_while_one_types(driver, every_kind):
    rows = httpx.get(f"{every_kind}/predict/examples", params={"model": "rents"}).json()["inputs"]
    opened(driver, f"{every_kind}/#/ask")
    look_at(driver, "rents")
    until(driver, lambda: len(driver.find_elements("css selector", ".examples button")) > 1)
    field = driver.find_element("css selector", ".columns input[type=number]")
    assert float(field.get_attribute("value")) in {row["age"] for row in rows}
    field.send_keys(*ALL_OF_IT, "41")
    until(driver, lambda: text_of(driver, ".answer h2"))
    assert complaints(driver) == []


def test_a_link_replays_an_answer_to_the_last_digit(driver, service):
    opened(driver, service)
    press(driver, "Noise")
    until(driver, lambda: text_of(driver, ".answer h2"))
    press(driver, "Copy link to this answer")
    until(driver, lambda: "no key" in text_of(driver, "#link-said"))
    address = driver.current_url
    assert "#/ask/" in address
    driver.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    before = text_of(driver, ".answer"), text_of(driver, ".more")
    with chromium() as another:
        opened(another, address)
        until(another, lambda: text_of(another, ".answer h2"))
        another.execute_script(
            "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
        )
        assert (text_of(another, ".answer"), text_of(another, ".more")) == before
        opened(another, address[:-20])
        assert "link is damaged" in until(another, lambda: text_of(another, ".notice"))


def test_one_can_draw_with_the_keyboard(driver, service):
    opened(driver, service)
    board = driver.find_element("id", "board")
    board.send_keys("\ue013" * 9, " ", "\ue015" * 18, " ")  # up, pen down, down, pen up
    until(driver, lambda: text_of(driver, ".answer h2"))
    assert complaints(driver) == []


def test_an_image_that_is_dropped_on_the_board_is_read_dark_on_light_too(
    driver, service, digits_rows
):
    answers = httpx.post(
        f"{service}/predict", json={"inputs": digits_rows[:20].tolist(), "seed": 7}
    ).json()
    n = int(np.argmax([max(row["probabilities"]) for row in answers["predictions"]]))
    ink = np.kron(digits_rows[n].reshape(8, 8) / 16, np.ones((8, 8)))
    light, dark = np.uint8(255 * (1 - ink)), np.uint8(255 * ink)
    transparent = np.stack([np.zeros_like(dark)] * 3 + [dark], axis=2)  # black ink on nothing
    for event, place, pixels in (
        ("drop", "#board", light),
        ("drop", "#board", dark),
        ("paste", "body", light),  # whatever has the focus
        ("drop", "#board", transparent),
    ):
        opened(driver, service)
        give(driver, event, place, ("a.png", "image/png", png(pixels)))
        until(
            driver,
            lambda: text_of(driver, ".answer h2").startswith(answers["predictions"][n]["label"]),
        )
        assert driver.find_element("id", "inverted").is_selected() == (pixels is not dark)
    give(driver, "drop", "#board", ("a.png", "image/png", b"no image"))
    until(driver, lambda: "is not an image" in text_of(driver, ".drawing"))
    assert text_of(driver, ".answer h2").startswith(answers["predictions"][n]["label"]), (
        "what was there is kept"
    )


def test_images_are_pasted_and_dropped_and_one_that_is_none_is_named(driver, every_kind):
    opened(driver, f"{every_kind}/#/ask")
    look_at(driver, "pictures")
    image = png(np.zeros((1, 1, 3), dtype=np.uint8))
    press(driver, "Image files")
    assert give(driver, "paste", "body", ("pasted.png", "image/png", image))
    until(driver, lambda: text_of(driver, ".answer h2"))
    driver.execute_script(LISTEN)
    assert give(driver, "drop", ".drop", ("a.png", "image/png", image), ("b.heic", "", b"ftypheic"))
    said = until(driver, lambda: text_of(driver, ".answers .notice"))
    assert said.startswith("b.heic: expected a PNG")
    assert text_of(driver, ".answer h2"), "the other one is answered"
    assert give(driver, "drop", "h1", ("c.png", "image/png", image)), (
        "next to its place it is not opened either"
    )
    assert not give(driver, "paste", "body"), "text is pasted as ever"
    press(driver, "Numbers")
    assert not give(driver, "paste", "body", ("pasted.png", "image/png", image)), (
        "where no images are asked about"
    )
    assert len(complaints(driver)) == 1  # of the 422


def test_what_is_no_number_is_not_taken_for_a_missing_one(driver, every_kind):
    opened(driver, f"{every_kind}/#/ask")
    look_at(driver, "rents")
    press(driver, "Ask")
    until(driver, lambda: text_of(driver, ".answer h2"))
    age = driver.find_element("css selector", ".columns input[type=number]")
    for written in ("1e999", "1-2"):
        age.send_keys(*ALL_OF_IT, written)
        assert "age: not a number" in until(driver, lambda: text_of(driver, ".answers .notice"))
    age.send_keys(*ALL_OF_IT, "\ue003")
    until(driver, lambda: text_of(driver, ".answer h2"))
    assert "missing: the field is empty" in text_of(driver, ".column")
    age.send_keys("31.5")
    until(driver, lambda: "field is empty" not in text_of(driver, ".column"))


def test_options_are_asked_for_as_they_stand(driver, service):
    opened(driver, service)
    draw(driver, driver.find_element("id", "board"), THREE)
    until(driver, lambda: text_of(driver, ".answer h2"))
    driver.execute_script(LISTEN)
    driver.execute_script("document.querySelector('details.options').open = true")
    driver.find_element(
        "xpath", "//label[starts-with(., 'Use the same draws')]/following-sibling::input"
    ).click()
    driver.find_element(
        "xpath", "//label[starts-with(., 'Abstain to keep')]/following-sibling::input"
    ).click()
    driver.execute_script("document.querySelector('.deeper').open = true")
    until(driver, lambda: "seed 7." in text_of(driver, ".meta"))
    until(driver, lambda: "risk" in (driver.execute_script("return window.asked.at(-1)") or ""))
    asked = json.loads(driver.execute_script("return window.asked.at(-1)"))
    assert (asked["seed"], asked["num_samples"], asked["fpr"], asked["coverage"]) == (
        7,
        100,
        0.05,
        0.95,
    )
    assert 0.03 < asked["risk"] < 0.5


def test_what_the_service_refuses_is_said_in_its_own_words(driver, service):
    opened(driver, service)
    press(driver, "Numbers")
    driver.find_element("css selector", "textarea").send_keys("1 2 three")
    press(driver, "Ask")
    said = until(driver, lambda: text_of(driver, ".answers .notice"))
    assert (
        said
        == httpx.post(f"{service}/predict", json={"inputs": [[1, 2, "three"]]}).json()["detail"]
    )


def test_a_key_is_asked_for_and_kept_nowhere(digits_store):
    with serving(digits_store, DUBITO_API_KEYS=KEY) as (url, _), chromium() as driver:
        driver.get(url)
        given = until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )[0]
        given.send_keys("a wrong key, of course", "\ue007")
        until(driver, lambda: "not valid" in text_of(driver, "#key-why"))
        given.send_keys(KEY, "\ue007")
        until(driver, lambda: driver.find_elements("id", "board"))
        draw(driver, driver.find_element("id", "board"), THREE)
        until(driver, lambda: text_of(driver, ".answer h2").startswith("3"))
        kept = "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert KEY not in driver.execute_script(kept)
        press(driver, "Copy link to this answer")
        until(driver, lambda: text_of(driver, "#link-said"))
        assert KEY not in driver.execute_script(kept)
        driver.refresh()
        until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )


@pytest.mark.skipif(not AXE.exists(), reason="axe is not there: it needs npm")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing_against_the_page(service, dark, width):
    with chromium(width, dark=dark) as driver:
        opened(driver, service)
        press(driver, "Noise")
        until(driver, lambda: text_of(driver, ".answer h2"))
        for view in ("ask", "models", "live", "choose"):
            if view != "ask":
                opened(driver, f"{service}/#/{view}")
                time.sleep(1)
            driver.execute_script(
                "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
            )
            driver.execute_script(AXE.read_text())
            found = driver.execute_async_script("axe.run().then((r) => arguments[0](r.violations))")
            told = [
                (each["id"], each["impact"], [node["html"][:200] for node in each["nodes"]])
                for each in found
            ]
            assert told == [], view
            overflow = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert driver.execute_script(overflow) <= 0, f"{view} is wider than the screen"


def test_the_page_is_small_and_asks_no_other_host(driver, service):
    driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    opened(driver, service)
    loaded = driver.execute_script(
        "return performance.getEntriesByType('resource').map((e) => [e.name, e.transferSize])"
    )
    loaded += driver.execute_script(
        "return performance.getEntriesByType('navigation').map((e) => [e.name, e.transferSize])"
    )
    assert all(name.startswith(service) for name, _ in loaded)
    assert len(loaded) > 10
    assert 100_000 < sum(size for _, size in loaded) < MOST_BYTES
