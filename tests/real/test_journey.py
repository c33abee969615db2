"""Test the path from a CSV file to a promoted candidate in the browser. Requires Chromium."""

import csv
import subprocess
import sys

import httpx
import pytest
from sklearn.datasets import load_iris

from tests.support.browser import MISSING, chromium, get_text, open_page, press, until
from tests.support.environment import ROOT, environment_in
from tests.support.ports import free_port
from tests.support.serving import answers, wait_until

pytestmark = [pytest.mark.real, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
DUBITO = """
import sys
from dubito import command
sys.exit(command.main())
"""
ADMIN = "a-key-of-my-own-choice"
COLUMNS = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
FIT_S = 900
TO_LABEL = 12


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    flowers = load_iris()
    names = [str(flowers.target_names[c]) for c in flowers.target]
    with (folder / "flowers.csv").open("w") as table, (folder / "pool.csv").open("w") as pool:
        mine, rest = csv.writer(table), csv.writer(pool)
        mine.writerow([*COLUMNS, "species"])
        rest.writerow(["id", *COLUMNS])
        for i, row in enumerate(flowers.data.tolist()):
            if i % 10 > 6:
                rest.writerow([f"flower {i}", *row])
            else:
                mine.writerow([*row, names[i]])
    return folder, {f"flower {i}": name for i, name in enumerate(names)}


def dubito(folder, *arguments, **settings):
    environment = environment_in(folder) | settings | {"DUBITO_STATE": str(folder / "state")}
    del environment["DUBITO_DATA"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    command = [sys.executable, "-c", DUBITO, *arguments]
    return subprocess.Popen(command, env=environment | path, cwd=folder)


def test_two_commands_and_the_browser_lead_from_a_csv_to_a_promoted_candidate(work):
    folder, truth = work
    fit = dubito(folder, "fit", "--data", "csv:flowers.csv", "--target", "species")
    assert fit.wait(FIT_S) == 0
    port = free_port()
    serve = dubito(folder, "serve", DUBITO_PORT=str(port), DUBITO_ADMIN_KEY=ADMIN)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/health/ready"), 60)
        with chromium() as driver:
            ask(driver, url)
            rank(driver, url, folder / "pool.csv")
            label(driver, truth)
            fit_candidate(driver)
            assert serving(url) == "1"
            promote(driver)
        assert serving(url) == "2"
        (created,) = httpx.get(f"{url}/models/flowers/labels").json()["candidates"]
        assert (created["version"], created["labels"]) == ("2", TO_LABEL)
    finally:
        serve.terminate()
        serve.wait(30)


def serving(url):
    return httpx.get(f"{url}/models/flowers").json()["serving"]


def ask(driver, url):
    open_page(driver, f"{url}/#/try")
    press(driver, "Ask")
    until(driver, lambda: get_text(driver, ".answer"))


def rank(driver, url, pool):
    open_page(driver, f"{url}/#/label")
    driver.find_element("id", "pool-files").send_keys(str(pool))
    k = driver.find_element("xpath", "//label[starts-with(., 'Rows to label')]/../input")
    k.clear()
    k.send_keys(str(TO_LABEL))
    press(driver, "Choose")
    until(driver, lambda: f"Label these {TO_LABEL} rows of 45" in get_text(driver, ".chosen h2"))


def label(driver, truth):
    for n in range(1, TO_LABEL + 1):
        until(driver, lambda n=n: get_text(driver, ".labelling-head").startswith(f"Row {n} of"))
        name = truth[get_text(driver, ".labelling-row > p")]
        driver.find_element("xpath", f"//div[@class='classes']/button[span='{name}']").click()
    until(driver, lambda: "All rows are labelled" in get_text(driver, ".labelling-head"))
    until(driver, lambda: get_text(driver, ".learning .tiles dd") == str(TO_LABEL))


def fit_candidate(driver):
    press(driver, "Fit a candidate")
    keys = until(
        driver, lambda: [e for e in driver.find_elements("id", "key-given") if e.is_displayed()]
    )
    keys[0].send_keys(ADMIN, "\ue007")
    until(driver, lambda: "The candidate: version 2" in get_text(driver, ".learning"), FIT_S)
    assert "flowers version 2" in get_text(driver, ".learning pre")


def promote(driver):
    press(driver, "Promote version 2")
    until(driver, lambda: "Roll back to version 1" in get_text(driver, ".learning"))
