"""Test the views Models, Live and Choose in Chromium."""

import csv
import io
import json
import re
import shutil
import time

import httpx
import numpy as np
import pytest
from scipy import stats

from model_store.acquisition.choice import ACQUISITIONS
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from model_store.conformal.drift import ALARM_EVIDENCE
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
from tests.support.serving import metric, serving

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
ADMIN = "the-key-of-the-administrator"
KEY = "a-key-that-reads-and-does-nothing-else"
MODULE = """
const [path, ...given] = arguments, done = given.pop();
import(new URL(`page/${path}`, document.baseURI))
  .then(async (module) => done({ is: await (WORK)(module, ...given) }))
  .catch((error) => done({ failed: String(error) }));
"""

TABLE = """
const cells = (row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\u00a0', ' '));
const tables = [...document.querySelectorAll('table')];
const found = tables.find((table) => table.caption?.innerText.startsWith(arguments[0]));
return found ? [...found.tBodies].flatMap((body) => [...body.rows].map(cells)) : null;
"""
ROWS = """
const rows = document.querySelectorAll(`#live-${arguments[0]} tbody tr`);
return [...rows].map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\u00a0', ' ')));
"""
LOADED = "const i = arguments[0].querySelector('img'); return i.complete && i.naturalWidth > 100 && i.alt"
HISTORY = """({ History, parseMetrics }, ...pages) => {
  const name = 'n_bucket', counters = ['n_total', name];
  const history = new History({ names: [...counters, 'q'], counters, maxAgeMs: 1e9 });
  pages.forEach((page, i) => history.add(1000 * i, parseMetrics(page)));
  const spans = history.snapshots.slice(1).map((to, i) => [history.snapshots[i], to]);
  return {
    increases: spans.map(([from, to]) => history.increase(from, to, history.find('n_total'))),
    bins: spans.map(([from, to]) => history.bins(from, to, 'n').map((bin) => bin.count)),
    gauge: history.gauges(history.snapshots.at(-1), 'q').map(({ value }) => value),
  };
}"""


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
    other = description.model_copy(
        update={
            "quality": {
                **description.quality,
                "test_accuracy": description.quality["test_accuracy"] - 0.01,
            },
            "baselines": {"constant": {"test_accuracy": 0.1}, "linear": {"test_accuracy": 0.995}},
            "warnings": ("worse than linear",),
        }
    )
    assert store.publish("digits", other, files).version == "2"
    assert store.publish("digits", description, files).version == "3"
    damaged = folder / "digits" / "3" / "weights.safetensors"
    damaged.chmod(0o644)
    damaged.write_bytes(b"damaged")
    store.set_alias("digits", "latest", "2")
    return folder


@pytest.fixture(scope="module")
def service(store, pool):
    settings = {"DUBITO_POOLS": str(pool[0].parent), "DUBITO_ADMIN_KEY": ADMIN}
    with serving(store, DUBITO_POLL_INTERVAL_S="0.2", **settings) as (url, _):
        httpx.post(
            f"{url}/predict", json={"version": "3", "inputs": [[0.0] * 64]}
        )  # the service notices that it is broken
        yield url


@pytest.fixture(scope="module")
def every_kind(kinds):
    with serving(kinds) as (url, _):
        yield url


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def driver(saved):
    with chromium(downloads=str(saved)) as driver:
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


def get_rows(driver, name):
    """Return the cells of the table of a live plot by row."""
    return driver.execute_script(ROWS, name)


def field(driver, label):
    """Find the control with a label."""
    actual = driver.find_element("xpath", f"//label[starts-with(normalize-space(.), '{label}')]")
    return driver.find_element("id", actual.get_attribute("for"))


def set_field(driver, label, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
    driver.execute_script(script, field(driver, label), value)


def visible(driver, name):
    """Return the element with an ID if it is displayed."""
    return next((e for e in driver.find_elements("id", name) if e.is_displayed()), None)


def work(driver, path, source, *given):
    """Call a function with one of the page's modules and JSON arguments."""
    answer = driver.execute_async_script(MODULE.replace("WORK", source), path, *given)
    assert "failed" not in answer, answer
    return answer["is"]


def file_saved(folder, ending):
    """Return and delete the file that the browser saved."""
    end = time.monotonic() + WAIT_S
    while not (actual := list(folder.glob(f"*{ending}"))):
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.05)
    content = actual[0].read_bytes()
    actual[0].unlink()
    return content.decode()


def test_models_match_the_api(driver, service):
    model = httpx.get(f"{service}/models/digits").json()
    open_page(driver, f"{service}/#/models")
    until(driver, lambda: get_table(driver, "Quality of version 2"))
    ((name, _, serves, _, count, *_),) = get_table(driver, "Published models")
    assert (name, serves, count) == ("digits", model["serving"], "3")
    versions = get_table(driver, "Versions")
    assert [row[0] for row in versions] == ["3", "2", "1"]
    assert [row[1] for row in versions] == ["broken", "served", "Roll back"]
    assert versions[1][3] == "latest"
    assert [row[-1] for row in versions] == ["no", "no", "yes"]
    assert model["broken"]["3"] in get_text(driver, "main .notice.bad")
    assert get_text(driver, "main .notice.told") == "worse than linear"
    ours, *plain = get_table(driver, "Baselines")
    assert ours == ["this model", f"{100 * model['quality']['test_accuracy']:.2f} %"]
    assert plain == [["linear", "99.50 %"], ["constant (most frequent class)", "10.00 %"]]
    quality = {row[0]: row[1] for row in get_table(driver, "Quality of version 2")}
    assert quality["Accuracy"] == f"{100 * model['quality']['test_accuracy']:.2f} %"
    assert len(quality) == len(model["quality"])
    assert console_errors(driver) == []


def test_a_report_shows_intervals_and_plots(driver, service):
    report = httpx.get(f"{service}/models/digits/versions/1/report").json()
    open_page(driver, f"{service}/#/models/digits/1")
    until(driver, lambda: get_table(driver, "Quality of version 1"))
    quality = {row[0]: row for row in get_table(driver, "Quality of version 1")}
    low, high = report["summary_intervals"]["test_accuracy"]
    assert quality["Accuracy"][2] == f"{100 * report['summary']['test_accuracy']:.2f} %"
    assert quality["Accuracy"][3] == f"{100 * low:.2f} % to {100 * high:.2f} %"
    pictures = [file for file in report["files"] if file.endswith(".png")]
    driver.execute_script(
        "for (const d of document.querySelectorAll('.version details')) d.open = true"
    )
    figures = driver.find_elements("css selector", ".version details figure")
    assert len(figures) == len(pictures) > 3
    for figure in figures:
        driver.execute_script("arguments[0].scrollIntoView()", figure)
        until(driver, lambda figure=figure: driver.execute_script(LOADED, figure))
    driver.find_element("css selector", "button.large").click()
    until(driver, lambda: driver.find_element("css selector", "dialog.large img").is_displayed())
    press(driver, "Close")
    until(driver, lambda: not driver.find_elements("css selector", "dialog.large"))
    assert console_errors(driver) == []


def test_an_admin_key_rolls_back_and_promotes(service):
    with chromium() as driver:
        open_page(driver, f"{service}/#/models")
        until(driver, lambda: get_table(driver, "Versions"))
        press(driver, "Roll back")
        options = until(driver, lambda: visible(driver, "key-given"))
        options.send_keys("a wrong key, of course", "\ue007")
        until(driver, lambda: "not allowed" in get_text(driver, "#key-why"))
        press(driver, "Not now")
        until(driver, lambda: "none was entered" in get_text(driver, "main .actions"))
        press(driver, "Roll back")
        until(driver, lambda: visible(driver, "key-given")).send_keys(ADMIN, "\ue007")
        until(driver, lambda: "Now serving version 1" in get_text(driver, "main .actions"))
        assert httpx.get(f"{service}/models/digits").json()["serving"] == "1"
        driver.find_element("xpath", "//tr[td[1]='2']//button[.='Promote']").click()
        until(driver, lambda: "Now serving version 2" in get_text(driver, "main .actions"))
        assert httpx.get(f"{service}/models/digits").json()["serving"] == "2"


def test_rows_are_labelled_undone_and_skipped_with_keys_and_buttons(driver, service, pool):
    def labels():
        actual = httpx.get(f"{service}/labels", params={"model": "digits"}).json()["labels"]
        return {label["id"]: label["label"] for label in actual}

    def at(row):
        return lambda: get_text(driver, ".labelling-head").startswith(f"Row {row} of 3")

    open_page(driver, f"{service}/#/label")
    driver.find_element("id", "pool-files").send_keys(str(pool[0]))
    set_field(driver, "Rows to label", "3")
    press(driver, "Choose")
    ids = re.findall(r"row, \d+", until(driver, lambda: get_text(driver, ".chosen-rows")))
    from selenium.webdriver import ActionChains

    keyboard = ActionChains(driver)
    until(driver, at(1))
    keyboard.send_keys("7").perform()
    until(driver, at(2))
    assert labels() == {ids[0]: "7"}
    assert "1 labelled" in get_text(driver, ".labelling-head")
    keyboard.send_keys("\ue012").perform()  # left: undo
    until(driver, at(1))
    assert labels() == {}
    driver.find_element("xpath", "//div[@class='classes']/button[.='0']").click()
    until(driver, at(2))
    press(driver, "Skip →")
    until(driver, at(3))
    keyboard.send_keys("9").perform()
    until(driver, lambda: "No more rows" in get_text(driver, ".labelling-head"))
    assert labels() == {ids[0]: "0", ids[2]: "9"}
    until(driver, lambda: get_text(driver, ".learning .tiles dd") == "2")
    press(driver, "Show skipped rows")
    until(driver, at(2))
    assert console_errors(driver) == []
    httpx.post(f"{service}/labels/delete", json={"model": "digits", "ids": ids})


def test_a_regression_row_is_labelled_with_a_number(driver, every_kind, tmp_path):
    file = tmp_path / "rents.csv"
    spec = httpx.get(f"{every_kind}/models/rents").json()["manifest"]["input"]
    usual = {c["name"]: c.get("mean") or c["categories"][0] for c in spec["columns"]}
    file.write_text(",".join(usual) + "\n" + ",".join(map(str, usual.values())) + "\n")
    open_page(driver, f"{every_kind}/#/label")
    script = "const s = document.getElementById('model'); s.value = 'rents'; s.dispatchEvent(new Event('change'))"
    driver.execute_script(script)
    until(driver, lambda: "rents" in get_text(driver, "main h1"))
    driver.find_element("id", "pool-files").send_keys(str(file))
    set_field(driver, "Rows to label", "1")
    press(driver, "Choose")
    until(driver, lambda: visible(driver, "label-value")).send_keys("812.5", "\ue007")
    until(driver, lambda: "All rows are labelled" in get_text(driver, ".labelling-head"))
    (label,) = httpx.get(f"{every_kind}/labels", params={"model": "rents"}).json()["labels"]
    assert label["target"] == 812.5
    assert label["id"].startswith("row-")
    assert console_errors(driver) == []


def test_a_comparison_marks_the_differences_of_two_versions(driver, service):
    item, two = (
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
    assert accuracy[1:3] == [f"{100 * v['quality']['test_accuracy']:.2f} %" for v in (item, two)]
    assert accuracy[3] == "−1.00 points"
    marked = {name for name, row in rows.items() if row[0].startswith("≠ ")}
    assert {"Accuracy (higher is better)"} <= marked
    assert not {"Method", "Draws", "Classes", "Parameters", "Temperature"} & marked
    assert {"Method", "Draws", "Classes", "Parameters", "Temperature"} <= set(rows)
    driver.find_element("id", "only-differences").click()
    script = "return [...document.querySelectorAll('.versions tbody tr:not(.group)')].filter((r) => r.checkVisibility())"
    assert len(driver.execute_script(script)) == len(marked)


def test_live_shows_the_metrics_and_the_drift_alarm(driver, service):
    open_page(driver, f"{service}/#/monitor")
    until(driver, lambda: "last at" in get_text(driver, "#live-state"))
    until(driver, lambda: "No requests in this period" in get_text(driver, "main"))
    noise = np.random.default_rng(0).integers(0, 17, (12, 16, 64)).astype(float)
    with httpx.Client(base_url=service, timeout=60) as client:
        before = client.get("/models/digits").json()["drift"]
        assert client.post("/predict", json={"inputs": [[1.0]]}).status_code == 422
        for rows in noise:
            assert client.post("/predict", json={"inputs": rows.tolist()}).status_code == 200
        drift = client.get("/models/digits").json()["drift"]
        page = client.get("/metrics").text
    assert drift["alarm"]
    assert drift["rows"] == before["rows"] + 192
    assert f"{ALARM_EVIDENCE:.2g}" in until(driver, lambda: get_text(driver, "main .notice.bad"))
    until(driver, lambda: "192 rows in this period" in get_text(driver, ".band"))
    assert "more than expected" in get_text(driver, ".band")
    p_values = get_rows(driver, "pValues")
    assert sum(int(row[2]) for row in p_values) == 192
    flagged = metric(page, "dubito_flag_p_value_bucket", model="digits", version="2", le="0.05")
    assert sum(int(row[2]) for row in p_values if float(row[1]) <= 0.05) == flagged
    requests = get_rows(driver, "requests")
    assert (sum(int(row[2]) for row in requests), sum(int(row[3]) for row in requests)) == (12, 1)
    assert float(get_rows(driver, "evidence")[-1][-1]) > ALARM_EVIDENCE
    assert sum(int(row[2]) for row in get_rows(driver, "doubt")) == 192
    driver.execute_script("location.hash = '#/models'")  # the history must survive a change of view
    until(driver, lambda: get_table(driver, "Versions"))
    driver.execute_script("location.hash = '#/monitor'")
    until(driver, lambda: "192 rows in this period" in get_text(driver, ".band"))
    assert console_errors(driver) == []
    press(driver, "Reset the alarm")
    press(driver, "Not now")
    until(driver, lambda: "admin key, but none was entered" in get_text(driver, "main"))


def test_an_admin_key_resets_the_alarm_and_a_lost_service_is_retried(store, tmp_path):
    names = {"reader": ["read", "metrics"], "admin": ["read", "metrics", "predict", "admin"]}
    entries = [
        f'[[keys]]\nname = "{name}"\nkey = "{KEY}-{name}"\nscopes = {json.dumps(scopes)}\n'
        for name, scopes in names.items()
    ]
    (tmp_path / "keys.toml").write_text("\n".join(entries))

    def give_key(name):
        until(driver, lambda: driver.find_element("id", "key-given").is_displayed())
        driver.find_element("id", "key-given").send_keys(f"{KEY}-{name}", "\ue007")

    with chromium() as driver:
        with serving(store, DUBITO_KEYS_FILE=str(tmp_path / "keys.toml")) as (url, _):
            headers = {"Authorization": f"Bearer {KEY}-admin"}
            rows = np.random.default_rng(0).integers(0, 17, (12, 16, 64)).astype(float)
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                for small in rows:
                    client.post("/predict", json={"inputs": small.tolist()}).raise_for_status()
                driver.get(f"{url}/#/monitor")
                give_key("reader")
                until(driver, lambda: "Drift detected" in get_text(driver, "main"))
                press(driver, "Reset the alarm")
                give_key("admin")
                until(driver, lambda: "Drift detected" not in get_text(driver, "main"))
                assert not client.get("/models/digits").json()["drift"]["alarm"]
        until(driver, lambda: "Cannot reach the service" in get_text(driver, "main .notice.bad"))
        press(driver, "Try now")


def test_counters_never_count_backwards(driver, service):
    open_page(driver, service)

    def page(started, count, buckets, other=None):
        lines = [f"process_start_time_seconds {started}", f'n_total{{a="x"}} {count}', "q 3"]
        lines += [
            f'n_bucket{{le="{le}"}} {value}'
            for le, value in zip(("0.5", "1.0", "+Inf"), buckets, strict=True)
        ]
        return "\n".join(
            [
                "# HELP n_total text",
                *lines,
                *([] if other is None else [f'n_total{{a="y"}} {other}']),
            ]
        )

    pages = [
        page(1, 5, (1, 2, 3)),
        page(1, 9, (1, 4, 5)),
        page(1, 2, (2, 2, 2)),  # a restart, although one bucket is larger than before
        page(1, 2, (2, 2, 2), other=4),  # a new series
        page(2, 7, (2, 2, 2), other=4),  # a new process with higher counts
        page(2, 7, (3, 4, 6), other=4),
    ]
    actual = work(driver, "metrics.js", HISTORY, *pages)
    assert actual["increases"] == [4, 2, 4, 11, 0]
    assert actual["bins"] == [[0, 2, 0], [2, 0, 0], [0, 0, 0], [2, 0, 0], [1, 1, 2]]
    assert actual["gauge"] == [3]


def test_quantiles_are_in_the_right_bins(driver, service):
    open_page(driver, service)
    values = np.sort(np.random.default_rng(0).gamma(2.0, 0.05, 500))
    ends = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0]
    counts = np.histogram(values, [0, *ends])[0].tolist()
    bins = [
        {"from": a, "to": b, "count": n} for a, b, n in zip([0, *ends], ends, counts, strict=False)
    ]
    for q in (0.01, 0.5, 0.99):
        actual = work(driver, "metrics.js", "({ quantile }, bins, q) => quantile(bins, q)", bins, q)
        true = values[int(np.ceil(q * 500)) - 1]
        assert np.searchsorted(ends, actual) == np.searchsorted(ends, true)
    assert (
        work(driver, "metrics.js", "({ quantile }) => quantile([{from: 0, to: 1, count: 0}], 0.5)")
        is None
    )


@pytest.mark.parametrize(
    ("rate", "rows", "calibration"),
    [(0.05, 40, 220), (11 / 221, 5000, 220), (0.02, 7, 60), (0.05, 300, None)],
)
def test_the_expected_range_of_flags_is_beta_binomial(driver, service, rate, rows, calibration):
    open_page(driver, service)
    low, high = work(
        driver,
        "metrics.js",
        "({ expectedBand }, ...given) => expectedBand(...given)",
        rate,
        rows,
        calibration,
    )
    balls = None if calibration is None else calibration + 1
    counts = (
        stats.binom(rows, rate)
        if balls is None
        else stats.betabinom(rows, rate * balls, (1 - rate) * balls)
    )
    assert (round(low * rows), round(high * rows)) == (counts.ppf(0.025), counts.ppf(0.975))


def test_the_page_offers_all_acquisitions_of_a_task(driver, service):
    open_page(driver, service)
    for task, expected in ACQUISITIONS.items():
        source = "({ ACQUISITIONS }, task) => ACQUISITIONS[task].map(([name]) => name)"
        actual = work(driver, "choose.js", source, task)
        assert actual[0] == PREDICTIVES[task].default_acquisition
        assert set(actual) == set(expected)
        assert set(work(driver, "choose.js", "({ RACED }, task) => RACED[task]", task)) == set(
            PREDICTIVES[task].race_acquisitions
        )


def test_the_ranking_matches_the_api_and_shows_its_rows(driver, service, saved, pool):
    path, rows = pool
    open_page(driver, f"{service}/#/label")
    driver.find_element("id", "pool-files").send_keys(str(path))
    driver.execute_script("document.querySelector('details.options').open = true")
    set_field(driver, "Rows to label", "4")
    set_field(driver, "Seed", "7")
    press(driver, "Choose")
    until(driver, lambda: "Label these 4 rows of 40" in get_text(driver, ".chosen h2"))
    query = {"k": "4", "seed": "7"}
    headers = {"Content-Type": "application/x-npz"}
    expected = httpx.post(
        f"{service}/acquire", params=query, content=path.read_bytes(), headers=headers
    ).json()
    press(driver, "Save IDs (CSV)")
    lines = list(csv.DictReader(io.StringIO(file_saved(saved, ".csv"))))
    assert [(row["id"], int(row["index"])) for row in lines] == [
        (row["id"], row["index"]) for row in expected["ranking"]
    ]
    assert [float(row["score"]) for row in lines] == [row["score"] for row in expected["ranking"]]
    press(driver, "Save IDs (JSON)")
    assert json.loads(file_saved(saved, ".json")) == expected
    pixels = driver.execute_script("""return [...document.querySelectorAll('.chosen-rows canvas')].map((c) =>
        [...c.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0))""")
    low, high = (
        json.loads(httpx.get(f"{service}/models/digits").text)["manifest"]["input"][end]
        for end in ("minimum", "maximum")
    )
    for displayed, row in zip(pixels, expected["ranking"], strict=True):
        ink = 255 - 255 * (rows[row["index"]] - low) / (high - low)
        np.testing.assert_allclose(displayed, ink, atol=1)
    assert console_errors(driver) == []


def test_a_job_finishes_and_its_ids_can_be_saved(driver, service, saved, pool):
    path, _ = pool
    open_page(driver, f"{service}/#/label")
    driver.find_element("id", "pool-files").send_keys(str(path))
    driver.execute_script("document.querySelector('details.options').open = true")
    set_field(driver, "Run", "job")
    set_field(driver, "Seed", "7")
    set_field(driver, "Rows to label", "3")
    press(driver, "Choose")
    until(driver, lambda: "Label these 3 rows of 40" in get_text(driver, ".chosen h2"), 60)
    (job,) = httpx.get(f"{service}/jobs").json()["jobs"]
    state, _, kind, rows, progress, _, _ = get_table(driver, "Jobs")[0]
    assert (state, rows, progress.strip()) == ("done", "40", "100 %")
    assert kind.endswith(job["id"][:8])
    press(driver, "Save IDs (JSON)")
    assert json.loads(file_saved(saved, ".json")) == httpx.get(f"{service}{job['result']}").json()
    assert len(driver.find_elements("css selector", ".chosen-rows canvas")) == 3
    open_page(driver, f"{service}/#/label")  # after a reload the page no longer has the pool
    until(driver, lambda: get_table(driver, "Jobs"))
    press(driver, "Show")
    until(driver, lambda: "no longer has the pool" in get_text(driver, ".chosen"))
    assert len(get_table(driver, "Rows to label")) == 3
    press(driver, "Delete")
    until(driver, lambda: "No jobs yet" in get_text(driver, ".job-list"))
    assert httpx.get(f"{service}/jobs").json()["jobs"] == []


def test_selected_rows_are_stored_with_control_rows_on_request(driver, service, pool):
    open_page(driver, f"{service}/#/label")
    driver.find_element("id", "pool-files").send_keys(str(pool[0]))
    driver.execute_script("document.querySelector('details.options').open = true")
    set_field(driver, "Rows to label", "4")
    field(driver, "Store the selected rows").click()
    set_field(driver, "Share of control rows", "0.5")
    press(driver, "Choose")
    until(driver, lambda: "Label these 4 rows" in get_text(driver, ".chosen h2"))
    badges = [e.text for e in driver.find_elements("css selector", ".chosen-rows .badge")]
    assert badges == ["control", "control"]
    assert httpx.get(f"{service}/models/digits/labels").json()["acquired"] == 4


def test_an_invalid_pool_shows_the_error_of_the_api(driver, service, tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((3, 65), dtype=np.float32))
    open_page(driver, f"{service}/#/label")
    press(driver, "Choose")
    assert "Choose a pool file" in until(driver, lambda: get_text(driver, ".chosen .notice"))
    driver.find_element("id", "pool-files").send_keys(str(tmp_path / "wide.npy"))
    until(driver, lambda: "wide.npy" in get_text(driver, ".drop"))
    press(driver, "Choose")
    message = until(
        driver,
        lambda: (
            get_text(driver, ".chosen .notice")
            if "65" in get_text(driver, ".chosen .notice")
            else ""
        ),
    )
    body = (tmp_path / "wide.npy").read_bytes()
    answer = httpx.post(
        f"{service}/acquire", content=body, headers={"Content-Type": "application/x-npy"}
    )
    assert message == answer.json()["detail"]


def test_an_open_page_notices_new_changed_and_removed_models(driver, service, store):
    open_page(driver, f"{service}/#/try")
    artifact = ModelStore(store).open("digits", "1")
    described = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    files = {file: artifact.files[file] for file in FILES}

    def serving(version):
        models = {m["name"]: m["serving"] for m in httpx.get(f"{service}/models").json()["models"]}
        return models.get("late") == version

    def seen(view):
        driver.execute_script(f"location.hash = '#/{view}'")
        until(driver, lambda: "Loading" not in get_text(driver, "main"))
        return [
            o.get_attribute("value") for o in driver.find_elements("css selector", "#model option")
        ]

    for version, name in (("1", "<img src=x onerror=alert(1)>"), ("2", "\u05e9\u05dc\u05d5\u05dd")):
        names = tuple(f"{name} {i}" for i in range(10))
        renamed = described.output.model_copy(update={"classes": names})
        ModelStore(store).publish("late", described.model_copy(update={"output": renamed}), files)
        until(driver, lambda version=version: serving(version))
        assert seen("live") == ["digits", "late"]
        seen("ask")
        if version == "1":
            script = "const s = document.getElementById('model'); s.value = 'late'; s.dispatchEvent(new Event('change'))"
            driver.execute_script(script)
            until(driver, lambda: get_text(driver, "main h1") == "Ask late")
        press(driver, "Noise")
        until(driver, lambda name=name: get_text(driver, ".answer h2").startswith(name))
        options = driver.find_elements("css selector", "details.options option")
        assert [o.get_attribute("value") for o in options] == ["latest", *"12"[: int(version)]]
    shutil.rmtree(store / "late")
    until(driver, lambda: serving(None))
    press(driver, "Noise")
    until(
        driver, lambda: "model: expected one of ['digits']" in get_text(driver, ".answers .notice")
    )
    seen("live")
    assert seen("ask") == ["digits"]
    assert get_text(driver, "main h1") == "Ask digits"
