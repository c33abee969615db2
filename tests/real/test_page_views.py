"""Test the views Label, Models and Monitor in Chromium."""

import csv
import io
import json
import shutil
import time

import httpx
import numpy as np
import pytest

from model_store.acquisition.choice import ACQUISITIONS
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from model_store.scores.tasks import PREDICTIVES
from tests.support.browser import (
    MISSING,
    WAIT_S,
    chromium,
    console_errors,
    get_text,
    open_page,
    press,
    until,
)
from tests.support.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
ADMIN = "the-key-of-the-administrator"
KEY = "a-key-that-reads-and-does-nothing-else"
MODULE = """
const [path, ...args] = arguments, done = args.pop();
import(new URL(`page/${path}`, document.baseURI))
  .then(async (module) => done({ is: await (WORK)(module, ...args) }))
  .catch((error) => done({ failed: String(error) }));
"""

TABLE = """
const cells = (row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\u00a0', ' '));
const tables = [...document.querySelectorAll('table')];
const match = tables.find((table) => table.caption?.textContent.startsWith(arguments[0]));
return match ? [...match.tBodies].flatMap((body) => [...body.rows].map(cells)) : null;
"""


@pytest.fixture(scope="module")
def store(evaluated_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views") / "models"
    shutil.copytree(evaluated_store, folder)
    store = ModelStore(folder)
    artifact = store.open("digits", "1")
    description = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    files = {file: artifact.files[file] for file in FILES}
    weaker = description.model_copy(
        update={
            "quality": {
                **description.quality,
                "test_accuracy": description.quality["test_accuracy"] - 0.01,
            },
            "baselines": {"constant": {"test_accuracy": 0.1}, "linear": {"test_accuracy": 0.995}},
            "warnings": ("worse than linear",),
        }
    )
    assert store.publish("digits", weaker, files).version == "2"
    assert store.publish("digits", description, files).version == "3"
    weights = folder / "digits" / "3" / "weights.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"damaged")
    store.set_alias("digits", "latest", "2")
    return folder


@pytest.fixture(scope="module")
def service(store, pool):
    settings = {"DUBITO_POOLS": str(pool[0].parent), "DUBITO_ADMIN_KEY": ADMIN}
    with serving(store, DUBITO_POLL_INTERVAL_S="0.2", **settings) as (url, _):
        # The service discovers that version 3 is broken.
        httpx.post(f"{url}/predict", json={"version": "3", "inputs": [[0.0] * 64]})
        yield url


@pytest.fixture(scope="module")
def every_kind(kinds):
    with serving(kinds) as (url, _):
        yield url


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def driver(downloads):
    with chromium(downloads=str(downloads)) as driver:
        yield driver


@pytest.fixture(scope="module")
def pool(digits_rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pools")
    rows = digits_rows[:40]
    np.savez_compressed(
        folder / "pool.npz",
        pool=rows.reshape(-1, 8, 8),
        ids=np.array([f"row, {i}" for i in range(40)]),
    )
    return folder / "pool.npz", rows


def get_table(driver, caption):
    return driver.execute_script(TABLE, caption)


def find_field(driver, label):
    """Find the control that has a label."""
    match = driver.find_element("xpath", f"//label[starts-with(normalize-space(.), '{label}')]")
    return driver.find_element("id", match.get_attribute("for"))


def set_field(driver, label, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
    driver.execute_script(script, find_field(driver, label), value)


def find_visible(driver, name):
    """Return the element with an ID if it is displayed."""
    return next((e for e in driver.find_elements("id", name) if e.is_displayed()), None)


def call_module(driver, path, source, *args):
    """Call a function with one of the page's modules and JSON arguments."""
    answer = driver.execute_async_script(MODULE.replace("WORK", source), path, *args)
    assert "failed" not in answer, answer
    return answer["is"]


def read_saved_file(folder, ending):
    """Return and delete the file that the browser saved."""
    end = time.monotonic() + WAIT_S
    while not (paths := list(folder.glob(f"*{ending}"))):
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.05)
    content = paths[0].read_bytes()
    paths[0].unlink()
    return content.decode()


def test_models_view_matches_api(driver, service):
    model = httpx.get(f"{service}/models/digits").json()
    open_page(driver, f"{service}/#/models")
    until(driver, lambda: get_table(driver, "Quality of version 2"))
    versions = get_table(driver, "Versions")
    assert [row[0] for row in versions] == ["3", "2", "1"]
    states = [row[1] for row in versions]
    assert states == ["broken", "served", "Roll back to version 1"]
    accuracy = f"{100 * model['quality']['test_accuracy']:.1f} %"
    assert versions[1][2:4] == [f"Accuracy {accuracy}; linear 99.5, constant 10.0", "latest"]
    assert model["broken"]["3"] in get_text(driver, "main .notice.bad")
    assert get_text(driver, "main .notice.told") == "Warning: worse than linear"
    assert get_table(driver, "Compared with baselines") == [
        ["linear", "99.5 %"],
        ["this model", accuracy],
        ["constant", "10.0 %"],
    ]
    quality = {row[0]: row[1] for row in get_table(driver, "Quality of version 2")}
    assert quality["Accuracy"] == accuracy
    assert len(quality) == len(model["quality"])
    assert console_errors(driver) == []


def test_report_shows_intervals(driver, service):
    report = httpx.get(f"{service}/models/digits/versions/1/report").json()
    open_page(driver, f"{service}/#/models/digits/1")
    until(driver, lambda: get_table(driver, "Accuracy per class"))
    quality = {row[0]: row for row in get_table(driver, "Quality of version 1")}
    low, high = report["summary_intervals"]["test_accuracy"]
    assert quality["Accuracy"][2] == f"{100 * report['summary']['test_accuracy']:.1f} %"
    assert quality["Accuracy"][3] == f"{100 * low:.1f} % to {100 * high:.1f} %"
    assert console_errors(driver) == []


def test_admin_can_roll_back_and_approve_after_confirmation(service):
    with chromium() as driver:
        open_page(driver, f"{service}/#/models")
        until(driver, lambda: get_table(driver, "Versions"))
        press(driver, "Roll back to version 1")
        press(driver, "Cancel")
        press(driver, "Roll back to version 1")
        press(driver, "Yes, roll back")
        key_input = until(driver, lambda: find_visible(driver, "key-given"))
        key_input.send_keys("a wrong key, of course", "\ue007")
        until(driver, lambda: "not allowed" in get_text(driver, "#key-why"))
        press(driver, "Not now")
        until(driver, lambda: "none was entered" in get_text(driver, "main"))
        assert httpx.get(f"{service}/models/digits").json()["serving"] == "2"
        press(driver, "Yes, roll back")
        until(driver, lambda: find_visible(driver, "key-given")).send_keys(ADMIN, "\ue007")
        until(driver, lambda: get_table(driver, "Versions")[2][1] == "served")
        assert httpx.get(f"{service}/models/digits").json()["serving"] == "1"
        press(driver, "Approve version 2")
        press(driver, "Yes, approve")
        until(driver, lambda: get_table(driver, "Versions")[1][1] == "served")
        assert httpx.get(f"{service}/models/digits").json()["serving"] == "2"
        driver.execute_script(
            "const f = fetch; window.fetch = async (url, o) => String(url).endsWith('promote') ? "
            "new Response(JSON.stringify({detail: 'read-only'}), {status: 409}) : f(url, o)"
        )
        press(driver, "Roll back to version 1")
        press(driver, "Yes, roll back")
        until(driver, lambda: "dubito store alias digits latest 1" in get_text(driver, "main"))


def select_rows(driver, service, pool, count, **fields):
    open_page(driver, f"{service}/#/label/digits/pool")
    until(driver, lambda: find_visible(driver, "pool-files")).send_keys(str(pool))
    driver.execute_script("document.querySelector('details.options').open = true")
    for name, value in {"Rows to label": str(count), **fields}.items():
        set_field(driver, name, value)
    press(driver, "Select rows")


def test_keys_and_buttons_label_rows_undo_and_mark_unsure(driver, service, pool):
    def get_labels():
        labels = httpx.get(f"{service}/labels", params={"model": "digits"}).json()["labels"]
        return {label["id"]: label["label"] for label in labels}

    def is_at_row(row):
        return lambda: get_text(driver, ".labelling-head").startswith(f"Row {row} of 3")

    def is_stored():
        return "saving" not in get_text(driver, ".labelling-head")

    select_rows(driver, service, pool[0], 3)
    until(driver, is_at_row(1))
    ids = [row[4] for row in get_table(driver, "Selected rows")]
    from selenium.webdriver import ActionChains

    keyboard = ActionChains(driver)
    find_visible(driver, "comment").send_keys("a 1 or a 7", "\ue007")
    keyboard.send_keys("7").perform()
    until(driver, is_at_row(2))
    until(driver, is_stored)
    assert get_labels() == {ids[0]: "7"}
    (label,) = httpx.get(f"{service}/labels", params={"model": "digits"}).json()["labels"]
    assert label["comment"] == "a 1 or a 7"
    assert get_table(driver, "Selected rows")[0][-1] == "a 1 or a 7"
    assert "1 labelled" in get_text(driver, ".labelling-head")
    keyboard.send_keys("\ue012").perform()  # left: undo
    until(driver, is_at_row(1))
    until(driver, is_stored)
    assert get_labels() == {}
    driver.find_element("xpath", "//div[@class='classes']/button[.='0']").click()
    until(driver, is_at_row(2))
    press(driver, "Unsure →")
    until(driver, is_at_row(3))
    keyboard.send_keys("9").perform()
    until(driver, lambda: "Only unsure rows are left" in get_text(driver, ".labelling-head"))
    until(driver, is_stored)
    assert get_labels() == {ids[0]: "0", ids[2]: "9"}
    driver.refresh()
    until(driver, lambda: "2 labelled, 1 unsure" in get_text(driver, ".labelling-head"))
    press(driver, "Show unsure rows")
    until(driver, is_at_row(2))
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    driver.find_element("xpath", "//button[@aria-label='Label row 1']").click()
    until(driver, is_at_row(1))
    keyboard.send_keys("4").perform()
    until(driver, lambda: get_labels().get(ids[0]) == "4")
    last = until(driver, lambda: (get_table(driver, "Rows with conflicting labels") or [[]])[-1])
    assert last[0] == ids[0]
    until(
        driver, lambda: get_table(driver, "Rows with conflicting labels")[-1][1:4:2] == ["4", "0"]
    )
    driver.find_element("xpath", "//button[@aria-label='Remove the label of row 3']").click()
    until(driver, lambda: ids[2] not in get_labels())
    until(driver, lambda: "Votes of" in get_text(driver, ".labelling details p"))
    assert console_errors(driver) == []
    httpx.post(f"{service}/labels/delete", json={"model": "digits", "ids": ids})


def test_labels_are_kept_while_offline_and_stored_on_retry(driver, service, pool):
    select_rows(driver, service, pool[0], 3)
    until(driver, lambda: get_text(driver, ".labelling-head").startswith("Row 1"))
    ids = [row[4] for row in get_table(driver, "Selected rows")]
    script = "const f = fetch; window.fetch = async (url, o) => { if (window.isOffline && String(url).endsWith('labels')) throw new TypeError('offline'); return f(url, o); }; window.isOffline = true"
    driver.execute_script(script)
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys("123").perform()
    until(driver, lambda: "3 labels are not stored yet" in get_text(driver, ".labelling .notice"))
    driver.execute_script("window.isOffline = false")
    press(driver, "Try again")
    until(driver, lambda: "saving" not in get_text(driver, ".labelling-head"))
    labels = httpx.get(f"{service}/labels", params={"model": "digits"}).json()["labels"]
    assert {(label["id"], label["label"]) for label in labels} == set(zip(ids, "123", strict=True))
    assert "Next: fit a candidate" in get_text(driver, ".labelling")
    httpx.post(f"{service}/labels/delete", json={"model": "digits", "ids": ids})


def test_regression_row_is_labelled_with_a_number(driver, every_kind, tmp_path):
    file = tmp_path / "rents.csv"
    spec = httpx.get(f"{every_kind}/models/rents").json()["manifest"]["input"]
    usual = {c["name"]: c.get("mean") or c["categories"][0] for c in spec["columns"]}
    file.write_text(",".join(usual) + "\n" + ",".join(map(str, usual.values())) + "\n")
    open_page(driver, f"{every_kind}/#/label/rents")
    until(driver, lambda: find_visible(driver, "pool-files")).send_keys(str(file))
    set_field(driver, "Rows to label", "1")
    press(driver, "Select rows")
    until(driver, lambda: find_visible(driver, "label-value")).send_keys("812.5", "\ue007")
    until(driver, lambda: "All rows are labelled" in get_text(driver, ".labelling-head"))
    until(driver, lambda: "saving" not in get_text(driver, ".labelling-head"))
    (label,) = httpx.get(f"{every_kind}/labels", params={"model": "rents"}).json()["labels"]
    assert label["target"] == 812.5
    assert label["id"].startswith("row-")


def test_comparison_marks_differences_between_versions(driver, service):
    first, second = (
        httpx.get(f"{service}/models/digits/versions/{v}").json()["manifest"] for v in ("1", "2")
    )
    open_page(driver, f"{service}/#/models/digits/1/2")
    until(driver, lambda: get_table(driver, "Differences are marked"))
    rows = {
        row[0].removeprefix("≠ "): row
        for row in get_table(driver, "Differences are marked")
        if len(row) == 4
    }
    accuracy = next(row for name, row in rows.items() if name == "Accuracy (higher is better)")
    assert accuracy[1:3] == [
        f"{100 * v['quality']['test_accuracy']:.1f} %" for v in (first, second)
    ]
    assert accuracy[3] == "−1.0 points"
    differences = {name for name, row in rows.items() if row[0].startswith("≠ ")}
    assert {"Accuracy (higher is better)"} <= differences
    assert not {"Method", "Draws", "Classes", "Parameters", "Temperature"} & differences
    assert {"Method", "Draws", "Classes", "Parameters", "Temperature"} <= set(rows)
    driver.find_element("id", "only-differences").click()
    script = "return [...document.querySelectorAll('.versions tbody tr:not(.group)')].filter((r) => r.checkVisibility())"
    assert len(driver.execute_script(script)) == len(differences)


def test_monitor_view_reports_drift_with_unusual_rows(driver, service):
    open_page(driver, f"{service}/#/monitor/digits")
    until(driver, lambda: get_text(driver, ".word") == "No live rows yet")
    noise = np.random.default_rng(0).integers(0, 17, (12, 16, 64)).astype(float)
    with httpx.Client(base_url=service, timeout=60) as client:
        for rows in noise:
            assert client.post("/predict", json={"inputs": rows.tolist()}).status_code == 200
        drift = client.get("/models/digits").json()["drift"]
        details = client.get("/models/digits/drift").json()
    assert drift["alarm"] and drift["rows"] == 192
    until(driver, lambda: get_text(driver, ".word").startswith("Drift detected"))
    until(driver, lambda: "192 rows" in get_text(driver, ".verdict"))
    pictures = driver.find_elements("css selector", ".thumbnails canvas")
    assert len(pictures) == len(details["unusual"]) == 5
    assert console_errors(driver) == []
    press(driver, "Reset the alarm")
    until(driver, lambda: find_visible(driver, "key-given"))
    press(driver, "Not now")
    until(driver, lambda: "admin key, but none was entered" in get_text(driver, "main"))


def test_admin_key_resets_alarm_and_lost_service_can_be_retried(store, tmp_path):
    names = {"reader": ["read", "metrics"], "admin": ["read", "metrics", "predict", "admin"]}
    entries = [
        f'[[keys]]\nname = "{name}"\nkey = "{KEY}-{name}"\nscopes = {json.dumps(scopes)}\n'
        for name, scopes in names.items()
    ]
    (tmp_path / "keys.toml").write_text("\n".join(entries))

    def enter_key(name):
        until(driver, lambda: driver.find_element("id", "key-given").is_displayed())
        driver.find_element("id", "key-given").send_keys(f"{KEY}-{name}", "\ue007")

    with chromium() as driver:
        with serving(store, DUBITO_KEYS_FILE=str(tmp_path / "keys.toml")) as (url, _):
            headers = {"Authorization": f"Bearer {KEY}-admin"}
            rows = np.random.default_rng(0).integers(0, 17, (12, 16, 64)).astype(float)
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                for batch in rows:
                    client.post("/predict", json={"inputs": batch.tolist()}).raise_for_status()
                driver.get(f"{url}/#/monitor")
                enter_key("reader")
                until(driver, lambda: "Drift detected" in get_text(driver, "main"))
                press(driver, "Reset the alarm")
                enter_key("admin")
                until(driver, lambda: "Drift detected" not in get_text(driver, "main"))
                assert not client.get("/models/digits").json()["drift"]["alarm"]
        until(driver, lambda: "Cannot reach the service" in get_text(driver, "main"))
        press(driver, "Try again")


def test_page_offers_all_acquisitions_of_task(driver, service):
    open_page(driver, service)
    for task, expected in ACQUISITIONS.items():
        source = "({ ACQUISITIONS }, task) => ACQUISITIONS[task].map(([name]) => name)"
        names = call_module(driver, "label.js", source, task)
        assert names[0] == PREDICTIVES[task].default_acquisition
        assert set(names) == set(expected)
        assert set(
            call_module(driver, "label.js", "({ RACED }, task) => RACED[task]", task)
        ) == set(PREDICTIVES[task].race_acquisitions)


def test_ranking_matches_api_and_shows_rows(driver, service, downloads, pool):
    path, rows = pool
    select_rows(driver, service, path, 4, Seed="7", **{"Random rows, in %": "0"})
    until(driver, lambda: get_text(driver, ".labelling-head").startswith("Row 1 of 4"))
    query = {"k": "4", "seed": "7"}
    headers = {"Content-Type": "application/x-npz"}
    expected = httpx.post(
        f"{service}/acquire", params=query, content=path.read_bytes(), headers=headers
    ).json()["ranking"]
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    press(driver, "Save row IDs (CSV)")
    lines = list(csv.DictReader(io.StringIO(read_saved_file(downloads, ".csv"))))
    assert [(row["id"], int(row["index"])) for row in lines] == [
        (row["id"], row["index"]) for row in expected
    ]
    assert [float(row["score"]) for row in lines] == [row["score"] for row in expected]
    pixels = driver.execute_script("""return [...document.querySelector('.labelling-row canvas')
        .getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)""")
    low, high = (
        json.loads(httpx.get(f"{service}/models/digits").text)["manifest"]["input"][end]
        for end in ("minimum", "maximum")
    )
    ink = 255 - 255 * (rows[expected[0]["index"]] - low) / (high - low)
    np.testing.assert_allclose(pixels, ink, atol=1)
    assert console_errors(driver) == []


def test_large_pool_becomes_a_job_that_survives_reload(driver, service, downloads, tmp_path):
    rows = np.random.default_rng(0).integers(0, 17, (1100, 8, 8)).astype(np.float32)
    np.savez_compressed(
        tmp_path / "large.npz", pool=rows, ids=np.array([f"row {i}" for i in range(1100)])
    )
    select_rows(driver, service, tmp_path / "large.npz", 3, Seed="7", Draws="1000")
    until(driver, lambda: "a job ranks it" in get_text(driver, "main .notice"))
    driver.refresh()
    until(driver, lambda: get_text(driver, ".labelling-head").startswith("Row 1 of 3"), 120)
    assert driver.find_elements("css selector", ".labelling-row canvas")
    (job,) = httpx.get(f"{service}/jobs").json()["jobs"]
    driver.execute_script("location.hash = '#/label/digits/pool'")
    state, _, kind, count, *_ = until(driver, lambda: get_table(driver, "Jobs"))[0]
    assert (state, count) == ("done", "1,100")
    assert kind.endswith(job["id"][:8])
    press(driver, "Save")
    assert (
        json.loads(read_saved_file(downloads, ".json"))
        == httpx.get(f"{service}{job['result']}").json()
    )
    press(driver, "Delete")
    until(driver, lambda: not get_table(driver, "Jobs"))
    assert httpx.get(f"{service}/jobs").json()["jobs"] == []


@pytest.mark.parametrize("has_ids", [True, False])
def test_tenth_of_selected_rows_is_random(driver, service, pool, tmp_path, has_ids):
    np.save(tmp_path / "pool.npy", pool[1])
    select_rows(driver, service, pool[0] if has_ids else tmp_path / "pool.npy", 10)
    until(driver, lambda: get_text(driver, ".labelling-head").startswith("Row 1 of 10"))
    table = get_table(driver, "Selected rows")
    states = [row[3].strip() for row in table]
    assert states.count("random") == 1 and states[-1] in ("", "random")
    assert all(row[4].startswith("row, " if has_ids else "row-") for row in table)
    assert httpx.get(f"{service}/models/digits/labels").json()["acquired"] >= 10


def test_invalid_pool_shows_error_from_api(driver, service, tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((3, 65), dtype=np.float32))
    driver.execute_script("indexedDB.deleteDatabase('dubito')")
    select_rows(driver, service, tmp_path / "wide.npy", 3)
    message = until(driver, lambda: get_text(driver, "main .notice.bad"))
    body = (tmp_path / "wide.npy").read_bytes()
    answer = httpx.post(
        f"{service}/acquire", content=body, headers={"Content-Type": "application/x-npy"}
    )
    assert message == answer.json()["detail"]


def test_open_page_notices_new_and_changed_models(driver, service, store):
    open_page(driver, f"{service}/#/try")
    artifact = ModelStore(store).open("digits", "1")
    description = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    files = {file: artifact.files[file] for file in FILES}

    def is_serving(version):
        models = {m["name"]: m["serving"] for m in httpx.get(f"{service}/models").json()["models"]}
        return models.get("late") == version

    def open_view(view):
        driver.execute_script(f"location.hash = '#/{view}'")
        until(driver, lambda: "Loading" not in get_text(driver, "main"))
        return [
            o.get_attribute("value") for o in driver.find_elements("css selector", "#model option")
        ]

    for version, name in (("1", "<img src=x onerror=alert(1)>"), ("2", "\u05e9\u05dc\u05d5\u05dd")):
        names = tuple(f"{name} {i}" for i in range(10))
        renamed = description.output.model_copy(update={"classes": names})
        ModelStore(store).publish("late", description.model_copy(update={"output": renamed}), files)
        until(driver, lambda version=version: is_serving(version))
        assert open_view("monitor") == ["digits", "late"]
        open_view("try")
        if version == "1":
            script = "const s = document.getElementById('model'); s.value = 'late'; s.dispatchEvent(new Event('change'))"
            driver.execute_script(script)
            until(driver, lambda: get_text(driver, "main h1") == "Try late")
        press(driver, "Noise")
        until(driver, lambda name=name: get_text(driver, ".verdict h2").startswith(name))
        options = driver.find_elements("css selector", "details.options option")
        assert [o.get_attribute("value") for o in options] == ["latest", *"12"[: int(version)]]
