"""Test the view Try, links and keys in Chromium."""

import csv
import io
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
from tests.support.environment import ROOT
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
PLOTS = ".about figure:not(.split, .what-if-plot) svg"
DRAWINGS = ROOT / "tests" / "support" / "drawings.json"
MODULE = """
const [path, ...args] = arguments, done = args.pop();
import(new URL(`page/${path}`, document.baseURI))
  .then((module) => done({ value: (FUNCTION)(module, ...args) }))
  .catch((error) => done({ error: String(error) }));
"""
RENDER = """({ measureStyle, renderStrokes }, images, drawings) => {
  const style = measureStyle(images, 8, 8);
  return drawings.map((strokes) => renderStrokes(strokes, 8, 8, style));
}"""
JUDGE = "({ judge }, ...args) => judge(...args)"


def make_answers():
    """Return an unflagged answer of a classifier and of a regression, with their manifests."""
    columns = [
        {"name": name, "kind": "numeric", "mean": 50.0, "std": 10.0, "mostly": [30.0, 70.0]}
        for name in ("age", "income", "debt", "rooms", "rate")
    ]
    spec = {"shape": [5], "dtype": "float32", "columns": columns, "text": None, "image": None}
    usual = {"p_value": 0.5, "fired": False, "score": 1.0}
    shared = {
        "input": dict.fromkeys(("age", "income", "debt", "rooms", "rate"), 50.0),
        "manifest": {"input": spec, "output": {"classes": ["stays", "leaves"], "target": "rent"}},
    }
    row = {"flag": False, "abstain": None, "p_value": 0.5, "missing": []}
    names = ["bald", "residual", "mahalanobis"]
    classification = {
        **shared,
        "manifest": {
            **shared["manifest"],
            "task": "classification",
            "detectors": {"combined": names},
        },
        "row": {
            **row,
            "label": "stays",
            "probabilities": [0.98, 0.02],
            "prediction_set": ["stays"],
            "entropy": 0.05,
            "bald": 0.01,
            "detectors": dict.fromkeys(names, usual),
        },
    }
    names = ["epistemic_std", "residual", "mahalanobis"]
    regression = {
        **shared,
        "manifest": {**shared["manifest"], "task": "regression", "detectors": {"combined": names}},
        "row": {
            **row,
            "mean": 900.0,
            "std": 50.0,
            "epistemic_std": 10.0,
            "interval": [800.0, 1000.0],
            "detectors": dict.fromkeys(names, usual),
        },
    }
    return classification, regression


def flag_row(posterior=0.5, data=0.5, *, low=False, distance=1.0, falls=(), name="bald"):
    """Return the p-values and the explanation of a flagged row."""
    p_values = {name: posterior, "residual": data, "mahalanobis": data}
    shares = {key: 0.8 if key == "residual" else 0.1 for key in p_values}
    return {
        "flag": True,
        "p_value": 0.01,
        "detectors": {key: {"p_value": p, "fired": p < 0.05} for key, p in p_values.items()},
        "explanation": {
            "detectors": {key: {"share": share, "low": low} for key, share in shares.items()},
            "columns": [{"column": column, "fall": fall} for column, fall in falls],
            "unseen": [],
            "nearest": [{"id": "7", "distance": distance}],
        },
    }


FAR_ROW = dict.fromkeys(("age", "income", "debt", "rooms", "rate"), 250.0)
UNSURE = {"probabilities": [0.6, 0.4], "prediction_set": ["stays", "leaves"], "entropy": 0.67}
CASES = [
    ("usual row", {}, "good", "Looks reliable", "Nothing unusual"),
    ("ambiguous", {**UNSURE, "bald": 0.01}, "check", "Check this answer", "Truly ambiguous"),
    ("new kind of row", {**UNSURE, "bald": 0.5}, "check", "Check this answer", "draws disagree"),
    ("abstention", {"abstain": True}, "check", "Too uncertain to answer", "More than 10 %"),
    (
        "uncertain",
        {**UNSURE, "bald": 0.5, **flag_row(0.01, 0.4)},
        "check",
        "Less certain than usual",
        "draws disagree",
    ),
    (
        "every column at 20 sigma",
        {**flag_row(0.01, 0.01), "input": FAR_ROW},
        "bad",
        "Unfamiliar input",
        "All 5 numeric columns are far outside the training data, for example age 250",
    ),
    (
        "one far column",
        {**flag_row(0.5, 0.01, falls=[("age", 3.0)]), "input": {"age": 250.0}},
        "bad",
        "Unfamiliar input",
        "Far outside the training data: age 250 (usually 30 to 70)",
    ),
    (
        "combination",
        flag_row(0.5, 0.01, falls=[("age", 0.0)]),
        "bad",
        "Unfamiliar input",
        "the combination is unusual",
    ),
    ("noise, equal p-values", flag_row(0.01, 0.01), "bad", "Unfamiliar input", "Do not rely"),
    ("low side", flag_row(0.5, 0.01, low=True), "check", "Unusually ordinary input", "smoother"),
    (
        "training row",
        flag_row(0.5, 0.01, distance=0.0),
        "check",
        "Known training row",
        "trained on",
    ),
    (
        "missing value",
        {**flag_row(0.5, 0.4), "missing": ["age"]},
        "bad",
        "Unfamiliar input",
        "age is missing",
    ),
    ("usual target", {"task": "regression"}, "good", "Looks reliable", "95 % interval: 800 to"),
    (
        "uncertain target",
        {"task": "regression", "epistemic_std": 45.0},
        "check",
        "Check this answer",
        "Mostly model uncertainty",
    ),
    (
        "far target",
        {"task": "regression", **flag_row(0.01, 0.01, name="epistemic_std"), "input": FAR_ROW},
        "bad",
        "Unfamiliar input",
        "far outside",
    ),
]


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


def plot_label(driver, number):
    """Return the description of a plot for screen readers."""
    script = f"return document.querySelectorAll('{PLOTS}')[arguments[0]].getAttribute('aria-label')"
    return driver.execute_script(script, number)


def call(driver, path, function, *arguments):
    """Call a function with one of the page's modules and JSON arguments."""
    answer = driver.execute_async_script(MODULE.replace("FUNCTION", function), path, *arguments)
    assert "error" not in answer, answer
    return answer["value"]


def find(driver, selector):
    return driver.find_element("css selector", selector)


def type_into(driver, selector, text):
    find(driver, selector).send_keys(*SELECT_ALL, text)


def open_details(driver):
    driver.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")


def test_drawing_a_digit_predicts_it(driver, service):
    open_page(driver, service)
    draw(driver, find(driver, "#board"), THREE)
    until(driver, lambda: get_text(driver, ".verdict h2").startswith("3"))
    assert get_text(driver, ".word") in ("Looks reliable", "Check this answer")
    assert "3" in get_text(driver, ".says")
    plain = get_text(driver, ".answers") + get_text(driver, ".about")
    assert not any(name in plain for name in ("mahalanobis", "residual", "bhn-realnvp", "p = "))
    count = f"return document.querySelector('{PLOTS}').querySelectorAll('[data-mark=dot] circle').length"
    assert driver.execute_script(count) == 10 * 100, "one dot per draw and class"
    assert plot_label(driver, 0).startswith("3: ")
    assert console_errors(driver) == []


def test_scripted_drawings_look_like_the_training_data(driver, service):
    """With a fixed stroke width, 13 of the 20 mouse drawings were right and unflagged."""
    drawings = json.loads(DRAWINGS.read_text())
    examples = httpx.get(f"{service}/predict/examples").json()["inputs"]
    open_page(driver, service)
    strokes = [
        [[[x / 100, y / 100] for x, y in stroke] for stroke in drawing["strokes"]]
        for drawing in drawings
    ]
    images = (np.array(examples) / 16).reshape(len(examples), 64).tolist()
    rows = call(driver, "strokes.js", RENDER, images, strokes)
    assert 0.25 < np.mean(rows) < 0.35, "the mean ink of digits is .31"
    inputs = np.round(16 * np.array(rows)).tolist()
    answer = httpx.post(f"{service}/predict", json={"inputs": inputs, "seed": 7}).json()
    results = [
        row["label"] == drawing["label"] and not row["flag"]
        for row, drawing in zip(answer["predictions"], drawings, strict=True)
    ]
    assert sum(results) >= 16, results


def test_page_shows_numbers_of_api(driver, service):
    open_page(driver, service)
    draw(driver, find(driver, "#board"), ONE)
    until(driver, lambda: get_text(driver, ".verdict h2"))
    driver.execute_script(RECORD_REQUESTS)
    driver.execute_script("document.querySelector('.deeper').open = true")
    press(driver, "Ask again")
    last = "return window.bodies.findLast((body) => body?.includes('inputs')) ?? null"

    def find_answered_request():
        request = json.loads(driver.execute_script(last) or "{}")
        return request if f"seed {request.get('seed')}." in get_text(driver, ".meta") else None

    request = until(driver, find_answered_request)
    answer = httpx.post(f"{service}/predict", json=request).json()["predictions"][0]
    assert get_text(driver, ".verdict h2").split()[0] == answer["label"]
    assert f"p = {answer['p_value']:.3g}." in plot_label(driver, 1)


def test_noise_is_unfamiliar_with_every_seed_and_explained(driver, service):
    open_page(driver, service)
    press(driver, "Noise")
    for _ in range(3):
        until(driver, lambda: get_text(driver, ".word") == "Unfamiliar input")
        press(driver, "Ask again")
        time.sleep(0.5)
    assert "no guarantee" in get_text(driver, ".promise")
    assert "unfamiliar" in get_text(driver, ".split")
    assert until(driver, lambda: driver.find_elements("css selector", ".nearest canvas"))
    painted = "const c = document.querySelector('.heat > div:last-child canvas'); return [...c.getContext('2d').getImageData(0, 0, 8, 8).data].filter((x, i) => i % 4 === 3 && x > 0).length"
    assert driver.execute_script(painted) > 8, "pixels are marked"
    assert console_errors(driver) == []


@pytest.mark.parametrize(("name", "changes", "kind", "word", "reason"), CASES)
def test_verdict_agrees_with_its_reasons(driver, service, name, changes, kind, word, reason):
    if not driver.current_url.startswith(service):
        open_page(driver, service)
    changes = dict(changes)
    classification, regression = make_answers()
    answer = regression if changes.pop("task", None) == "regression" else classification
    manifest, input_row = answer["manifest"], {**answer["input"], **changes.pop("input", {})}
    row = {**answer["row"], **changes}
    envelope = {"num_samples": 100, "coverage": 0.95, "risk": 0.1, "fpr": 0.05}
    verdict = call(driver, "verdict.js", JUDGE, row, envelope, manifest, input_row)
    text = " ".join(verdict["reasons"])
    assert (verdict["kind"], verdict["word"]) == (kind, word), text
    assert reason in text, name
    if kind != "bad":
        assert "far outside" not in text
    if kind != "good":
        assert "Nothing unusual" not in text


def test_page_offers_an_example_of_each_class(driver, service):
    open_page(driver, service)
    until(driver, lambda: len(driver.find_elements("css selector", ".examples canvas")) == 10)
    for button in driver.find_elements("css selector", ".examples button")[:3]:
        button.click()
        until(driver, lambda name=button.text: get_text(driver, ".verdict h2").startswith(name))
        assert get_text(driver, ".word") != "Unfamiliar input"


def test_verdict_is_visible_while_drawing_on_a_phone(service):
    with chromium(390, 844) as driver:
        open_page(driver, service)
        board = find(driver, "#board")
        assert board.rect["y"] + board.rect["height"] < 844
        draw(driver, board, THREE)
        until(driver, lambda: get_text(driver, ".verdict h2").startswith("3"))
        verdict = find(driver, ".verdict").rect
        assert verdict["y"] + verdict["height"] <= board.rect["y"] < 844 - board.rect["height"]


def test_sticky_elements_never_cover_focused_control(every_kind):
    covered = """return [...document.querySelectorAll('.columns input, .columns select')].filter((control) => {
      if (control.disabled) return false;
      control.focus();
      const top = control.getBoundingClientRect().top, bottom = control.getBoundingClientRect().bottom;
      return top < document.querySelector('.verdict').getBoundingClientRect().bottom
        || bottom > document.querySelector('.sticky').getBoundingClientRect().top;
    }).length"""
    with chromium(390, 500) as driver:
        open_page(driver, f"{every_kind}/#/try/rents")
        until(driver, lambda: get_text(driver, ".verdict h2"))
        assert driver.execute_script(covered) == 0


def test_form_updates_answer_on_load_typing_and_dragging(driver, every_kind):
    rows = httpx.get(f"{every_kind}/predict/examples", params={"model": "rents"}).json()["inputs"]
    open_page(driver, f"{every_kind}/#/try/rents")
    before = until(driver, lambda: get_text(driver, ".verdict h2"))
    age = find(driver, ".columns input[type=text]").get_attribute("value")
    assert float(age) in {row["age"] for row in rows}
    type_into(driver, ".columns input[type=text]", "41")
    after = until(driver, lambda: get_text(driver, ".verdict h2") not in ("", before))
    assert after
    until(driver, lambda: len(driver.find_elements("css selector", ".what-if-plot circle")) == 21)
    find(driver, ".what-if").send_keys(*["\ue014"] * 5)  # right
    new_age = find(driver, ".columns input[type=text]").get_attribute("value")
    assert float(new_age) > 41
    assert console_errors(driver) == []


def test_decimal_commas_and_invalid_numbers_are_rejected(driver, every_kind):
    open_page(driver, f"{every_kind}/#/try/rents")
    until(driver, lambda: get_text(driver, ".verdict h2"))
    for content, message in (
        ("12,5", "has a comma"),
        ("1e999", "not a number"),
        ("1-2", "not a number"),
    ):
        type_into(driver, ".columns input[type=text]", content)
        until(driver, lambda message=message: message in get_text(driver, ".answers .notice"))
        assert message in get_text(driver, ".column .error")
    type_into(driver, ".columns input[type=text]", "\ue003")
    until(driver, lambda: get_text(driver, ".verdict h2"))
    assert "missing: the field is empty" in get_text(driver, ".column")
    find(driver, ".columns input[type=text]").send_keys("31.5")
    until(driver, lambda: "field is empty" not in get_text(driver, ".column"))


def test_csv_row_can_be_pasted_and_csv_file_predicted(driver, every_kind, tmp_path):
    open_page(driver, f"{every_kind}/#/try/rents")
    until(driver, lambda: get_text(driver, ".verdict h2"))
    paste = """const data = new DataTransfer(); data.setData('text', arguments[0]);
    document.querySelector('.columns input').dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }));"""
    driver.execute_script(paste, "33,Oslo")
    until(driver, lambda: find(driver, ".columns select").get_attribute("value") == "Oslo")
    assert find(driver, ".columns input").get_attribute("value") == "33"
    rows = [{"age": age, "city": "Rome"} for age in range(20, 80)]
    (tmp_path / "rows.csv").write_text(
        "id,city,age\n" + "".join(f"r{row['age']},Rome,{row['age']}\n" for row in rows)
    )
    open_details(driver)
    driver.execute_script(
        "window.saved = []; URL.createObjectURL = (blob) => { blob.text().then((t) => window.saved.push(t)); return 'about:blank'; }; HTMLAnchorElement.prototype.click = () => {};"
    )
    find(driver, "#batch-file").send_keys(str(tmp_path / "rows.csv"))
    until(driver, lambda: "60 of 60 rows;" in get_text(driver, ".batch"))
    press(driver, "Save predictions (CSV)")
    table = list(
        csv.DictReader(
            io.StringIO(until(driver, lambda: driver.execute_script("return window.saved[0]")))
        )
    )
    assert [row["id"] for row in table] == [f"r{row['age']}" for row in rows]
    answer = httpx.post(f"{every_kind}/predict", json={"model": "rents", "inputs": rows}).json()
    expected = [row["mean"] for row in answer["predictions"]]
    assert [float(row["prediction"]) for row in table] == pytest.approx(expected, rel=0.2)
    (tmp_path / "bad.csv").write_text('age,city\n20,Rome\n"12,5",Rome\n')
    find(driver, "#batch-file").send_keys(str(tmp_path / "bad.csv"))
    until(driver, lambda: "Row 2: age" in get_text(driver, ".batch .notice"))


def test_earlier_answers_can_be_restored_and_compared(driver, every_kind):
    open_page(driver, f"{every_kind}/#/try/rents")
    for age in ("30", "60"):
        type_into(driver, ".columns input", age)
        until(driver, lambda: get_text(driver, ".verdict h2"))
        time.sleep(2.5)
    until(driver, lambda: driver.find_elements("css selector", ".history"))
    open_details(driver)
    pins = driver.find_elements("css selector", ".history li button:last-child")
    for pin in pins[:2]:
        pin.click()
    assert "Pinned answers" in get_text(driver, ".history")
    driver.find_elements("css selector", ".history li .plain")[1].click()
    until(driver, lambda: find(driver, ".columns input").get_attribute("value") == "30")


def test_link_and_reload_reproduce_answer_exactly(driver, service):
    open_page(driver, service)
    press(driver, "Noise")
    until(driver, lambda: get_text(driver, ".verdict h2"))
    press(driver, "Copy link to this answer")
    until(driver, lambda: "no key" in get_text(driver, "#link-said"))
    address = until(driver, lambda: "#/try/digits/" in driver.current_url and driver.current_url)
    state = "return [...document.querySelectorAll('.verdict, .promise, .split')].map((e) => e.innerText)"
    before = driver.execute_script(state)
    driver.refresh()
    until(driver, lambda: driver.execute_script(state) == before)
    driver.execute_script("location.hash = '#/models'")
    until(driver, lambda: get_text(driver, "h1") == "Models")
    driver.back()
    until(driver, lambda: driver.execute_script(state) == before)
    with chromium() as second_driver:
        open_page(second_driver, address)
        until(second_driver, lambda: second_driver.execute_script(state) == before)
        open_page(second_driver, address[:-20])
        assert "link is damaged" in until(second_driver, lambda: get_text(second_driver, ".notice"))


def test_digit_can_be_drawn_with_keyboard(driver, service):
    open_page(driver, service)
    board = find(driver, "#board")
    board.send_keys("\ue013" * 9, " ", "\ue015" * 18, " ")  # up, pen down, down, pen up
    until(driver, lambda: get_text(driver, ".verdict h2"))
    assert console_errors(driver) == []


def test_board_accepts_light_dark_and_transparent_images(driver, service, digits_rows):
    answers = httpx.post(
        f"{service}/predict", json={"inputs": digits_rows[:20].tolist(), "seed": 7}
    ).json()
    index = int(np.argmax([max(row["probabilities"]) for row in answers["predictions"]]))
    label = answers["predictions"][index]["label"]
    ink = np.kron(digits_rows[index].reshape(8, 8) / 16, np.ones((8, 8)))
    light, dark = np.uint8(255 * (1 - ink)), np.uint8(255 * ink)
    transparent = np.stack([np.zeros_like(dark)] * 3 + [dark], axis=2)
    for event, selector, pixels in (
        ("drop", "#board", light),
        ("drop", "#board", dark),
        ("paste", "body", light),
        ("drop", "#board", transparent),
    ):
        open_page(driver, service)
        send_files(driver, event, selector, ("a.png", "image/png", png_bytes(pixels)))
        until(driver, lambda: get_text(driver, ".verdict h2").startswith(label))
    send_files(driver, "drop", "#board", ("a.png", "image/png", b"no image"))
    until(driver, lambda: "is not an image" in get_text(driver, ".drawing"))
    assert get_text(driver, ".verdict h2").startswith(label), "the previous answer must stay"


def test_images_can_be_pasted_or_dropped_and_invalid_files_are_named(driver, every_kind):
    open_page(driver, f"{every_kind}/#/try/pictures")
    image = png_bytes(np.zeros((1, 1, 3), dtype=np.uint8))
    press(driver, "Image files")
    assert send_files(driver, "paste", "body", ("pasted.png", "image/png", image))
    until(driver, lambda: get_text(driver, ".verdict h2"))
    assert send_files(
        driver, "drop", ".drop", ("a.png", "image/png", image), ("b.heic", "", b"ftypheic")
    )
    message = until(driver, lambda: get_text(driver, ".answers .notice"))
    assert message.startswith("b.heic: expected a PNG")
    assert get_text(driver, ".verdict h2"), "the valid image must be answered"
    assert send_files(driver, "drop", "h1", ("c.png", "image/png", image)), (
        "the browser must not open a file dropped elsewhere"
    )
    assert not send_files(driver, "paste", "body"), "pasting text must still work"
    press(driver, "Numbers")
    assert not send_files(driver, "paste", "body", ("pasted.png", "image/png", image)), (
        "another input type must ignore images"
    )
    assert len(console_errors(driver)) == 1  # the 422


def test_options_are_sent_with_request(driver, service):
    open_page(driver, service)
    draw(driver, find(driver, "#board"), THREE)
    until(driver, lambda: get_text(driver, ".verdict h2"))
    driver.execute_script(RECORD_REQUESTS)
    open_details(driver)
    seed = driver.find_element("xpath", "//label[.='Seed of the draws']/following-sibling::input")
    seed.send_keys(*SELECT_ALL, "7")
    driver.find_element(
        "xpath", "//label[starts-with(., 'Abstain to keep')]/following-sibling::input"
    ).click()
    until(driver, lambda: "seed 7." in get_text(driver, ".meta"))
    last = "return window.bodies.findLast((body) => body?.includes('inputs'))"
    until(driver, lambda: "risk" in (driver.execute_script(last) or ""))
    request = json.loads(driver.execute_script(last))
    values = [request[name] for name in ("seed", "num_samples", "fpr", "coverage")]
    assert values == [7, 100, 0.05, 0.95]
    assert 0.03 < request["risk"] < 0.5


def test_error_shows_detail_from_api(driver, service):
    open_page(driver, service)
    press(driver, "Numbers")
    find(driver, "textarea").send_keys("1 2 three")
    message = until(driver, lambda: get_text(driver, ".answers .notice"))
    assert (
        message
        == httpx.post(f"{service}/predict", json={"inputs": [[1, 2, "three"]]}).json()["detail"]
    )


def test_page_requests_key_and_never_stores_it(digits_store):
    with serving(digits_store, DUBITO_API_KEYS=KEY) as (url, _), chromium() as driver:
        driver.get(url)
        key_input = until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )[0]
        key_input.send_keys("a wrong key, of course", "\ue007")
        until(driver, lambda: "not valid" in get_text(driver, "#key-why"))
        key_input.send_keys(KEY, "\ue007")
        until(driver, lambda: driver.find_elements("id", "board"))
        draw(driver, find(driver, "#board"), THREE)
        until(driver, lambda: get_text(driver, ".verdict h2").startswith("3"))
        stored_values = "return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert KEY not in driver.execute_script(stored_values)
        press(driver, "Copy link to this answer")
        until(driver, lambda: get_text(driver, "#link-said"))
        assert KEY not in driver.execute_script(stored_values)
        driver.refresh()
        until(
            driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
        )


@pytest.mark.skipif(not AXE.exists(), reason="axe is not installed; it needs npm")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_no_violation(every_kind, dark, width):
    with chromium(width, dark=dark) as driver:
        for view in ("try/digits", "try/rents", "models/digits", "monitor/digits", "label/digits"):
            open_page(driver, f"{every_kind}/#/{view}")
            if view == "try/digits":
                press(driver, "Noise")
            if view.startswith("try"):
                until(driver, lambda: get_text(driver, ".verdict h2"))
            time.sleep(1)
            open_details(driver)
            driver.execute_script(AXE.read_text())
            violations = driver.execute_async_script(
                "axe.run().then((r) => arguments[0](r.violations))"
            )
            details = [
                (
                    violation["id"],
                    violation["impact"],
                    [node["html"][:200] for node in violation["nodes"]],
                )
                for violation in violations
            ]
            assert details == [], view
            overflow = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert driver.execute_script(overflow) <= 0, f"{view} is wider than the screen"


def test_page_is_small_and_loads_only_from_service(driver, service):
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
