"""Test the path from a CSV file to an approved candidate in the browser. Requires Chromium."""

import csv
import subprocess
import sys
import time

import httpx
import pytest
from sklearn.datasets import load_iris

from tests.support.browser import MISSING, chromium, get_text, open_page, press, until
from tests.support.environment import ROOT, environment_in
from tests.support.ports import free_port
from tests.support.serving import is_responding, wait_until

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
DUBITO = """
import sys
from dubito import command
sys.exit(command.main())
"""
ADMIN = "a-key-of-my-own-choice"
COLUMNS = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
FIT_S = 900
TO_LABEL = 20
KEY_S = 0.25


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    flowers = load_iris()
    names = [str(flowers.target_names[c]) for c in flowers.target]
    with (folder / "flowers.csv").open("w") as table, (folder / "pool.csv").open("w") as pool:
        table_writer, pool_writer = csv.writer(table), csv.writer(pool)
        table_writer.writerow([*COLUMNS, "species"])
        pool_writer.writerow(["id", *COLUMNS])
        for i, row in enumerate(flowers.data.tolist()):
            if i % 10 > 6:
                pool_writer.writerow([f"flower {i}", *row])
            else:
                table_writer.writerow([*row, names[i]])
    return folder, {f"flower {i}": name for i, name in enumerate(names)}


def dubito(folder, *arguments, **settings):
    environment = environment_in(folder) | settings | {"DUBITO_STATE": str(folder / "state")}
    del environment["DUBITO_DATA"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    command = [sys.executable, "-c", DUBITO, *arguments]
    return subprocess.Popen(command, env=environment | path, cwd=folder)


def test_csv_file_becomes_approved_candidate_in_browser(workspace):
    folder, truth = workspace
    fit = dubito(folder, "fit", "--data", "csv:flowers.csv", "--target", "species")
    assert fit.wait(FIT_S) == 0
    port = free_port()
    serve = dubito(folder, "serve", DUBITO_PORT=str(port), DUBITO_ADMIN_KEY=ADMIN)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_responding(f"{url}/health/ready"), 60)
        with chromium(1280, 900) as driver:
            predict(driver, url)
            select_rows(driver, url, folder / "pool.csv")
            keys = label_rows(driver, truth, TO_LABEL // 2)
            resize(driver, 390)
            driver.refresh()
            keys |= label_rows(driver, truth, TO_LABEL)
            check_labels(url, keys)
            fit_candidate(driver)
            assert get_served_version(url) == "1"
            approve_and_roll_back(driver, url)
        (created,) = httpx.get(f"{url}/models/flowers/labels").json()["candidates"]
        assert (created["version"], created["labels"] + created["control_labels"]) == (
            "2",
            TO_LABEL,
        )
    finally:
        serve.terminate()
        serve.wait(30)


def get_served_version(url):
    return httpx.get(f"{url}/models/flowers").json()["serving"]


def predict(driver, url):
    open_page(driver, url)
    before = until(driver, lambda: get_text(driver, ".verdict"))
    driver.find_element("css selector", ".what-if").send_keys(*["\ue014"] * 20)  # right arrow key
    until(driver, lambda: get_text(driver, ".verdict") not in ("", before))


def resize(driver, width):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def check_width(driver):
    script = "return document.documentElement.scrollWidth - innerWidth"
    assert driver.execute_script(script) <= 0


def select_rows(driver, url, pool):
    open_page(driver, f"{url}/#/label/flowers")
    until(driver, lambda: driver.find_elements("id", "pool-files"))
    driver.find_element("id", "pool-files").send_keys(str(pool))
    k = driver.find_element("xpath", "//label[starts-with(., 'Rows to label')]/../input")
    k.clear()
    k.send_keys(str(TO_LABEL))
    press(driver, "Select rows")


def label_rows(driver, truth, until_row):
    """Label rows with four keys per second and 300 ms latency; return the labels by ID."""
    from selenium.webdriver import ActionChains

    latency = {"offline": False, "latency": 300, "downloadThroughput": -1, "uploadThroughput": -1}
    until(driver, lambda: get_text(driver, ".labelling-head").startswith("Row "))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", latency)
    classes = [e.text.split()[-1] for e in driver.find_elements("css selector", ".classes button")]
    labels = {}
    while not (head := get_text(driver, ".labelling-head")).startswith("All rows"):
        start = time.monotonic()
        row = int(head.split()[1])
        if row > until_row:
            break
        name = get_text(driver, ".labelling-row > p")
        labels[name] = truth[name]
        ActionChains(driver).send_keys(str(classes.index(truth[name]) + 1)).perform()
        time.sleep(max(0.0, start + KEY_S - time.monotonic()))
    check_width(driver)
    return labels


def check_labels(url, expected):
    def stored():
        labels = httpx.get(f"{url}/labels", params={"model": "flowers"}).json()["labels"]
        return {label["id"]: label["label"] for label in labels}

    assert len(expected) == TO_LABEL
    wait_until(lambda: stored() == expected, 30)


def fit_candidate(driver):
    driver.find_element("link text", "Next: fit a candidate").click()
    button = "//button[.='Fit a candidate']"
    until(driver, lambda: driver.find_elements("xpath", button))
    press(driver, "Fit a candidate")
    inputs = until(
        driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
    )
    inputs[0].send_keys(ADMIN, "\ue007")
    check_width(driver)
    next_step = "Next: compare and approve"
    until(driver, lambda: driver.find_elements("link text", next_step), FIT_S)
    driver.find_element("link text", next_step).click()


def approve_and_roll_back(driver, url):
    until(driver, lambda: "On the same 21 test rows" in get_text(driver, "main"))
    check_width(driver)
    press(driver, "Approve version 2")
    assert get_served_version(url) == "1"
    press(driver, "Yes, approve")
    until(driver, lambda: "Audit log" in get_text(driver, "main"))
    until(driver, lambda: "Roll back to version 1" in get_text(driver, "main"))
    assert get_served_version(url) == "2"
    press(driver, "Roll back to version 1")
    press(driver, "Yes, roll back")
    until(driver, lambda: "Approve version 2" in get_text(driver, "main"))
    assert get_served_version(url) == "1"
