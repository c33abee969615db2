import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from scipy import stats

from model_store.artifacts.manifest import CategoricalColumn, NumericColumn
from model_store.conformal.drift import ALARM_EVIDENCE, EDGES, FALSE_ALARM_RATE
from model_store.conformal.rank_tables import conformal_p_value
from service.models.drift import (
    MAX_RECENT_ROWS,
    MAX_REQUEST_ROWS,
    column_shifts,
)
from tests.support.drift import new_drift, watch
from tests.support.serving import metric

ROWS = 5
ROW_METRICS = re.compile(
    r"dubito_(rows|flags|draws|entropy|flag_p_value|drift_evidence_nats)(_|\{)(?!made)"
)


@pytest.fixture(scope="module")
def generator():
    return np.random.default_rng(0)


def get_report(ranking, scores, rows_at_once=16):
    drift = new_drift(ranking)
    for start in range(0, len(scores), rows_at_once):
        watch(drift, conformal_p_value(scores[start : start + rows_at_once], ranking))
    return drift.report()


# Drift test


@pytest.mark.parametrize("has_interim_reports", [False, True])
def test_expected_capital_is_1(has_interim_reports):
    """Average over all sequences of gaps, weighted by the Polya urn's probability."""
    ranking = np.array([1.0, 2.0, 3.0])
    total = mean = 0.0
    probabilities = {1.02: 0.0, 1.1: 0.0, 1.3: 0.0}
    for gaps in product(range(4), repeat=ROWS):
        drift, probability, balls = new_drift(ranking), 1.0, np.ones(4)
        for gap in gaps:
            watch(drift, conformal_p_value(np.array([gap + 0.5]), ranking))
            if has_interim_reports:
                drift.report()
            probability *= balls[gap] / balls.sum()
            balls[gap] += 1
        report = drift.report()
        total += probability
        mean += probability * math.exp(report.evidence)
        for capital in probabilities:
            probabilities[capital] += probability * (report.largest_evidence >= math.log(capital))
    assert total == pytest.approx(1.0, rel=1e-12)
    assert mean == pytest.approx(1.0, rel=1e-12)
    assert all(share <= 1 / capital for capital, share in probabilities.items())
    assert probabilities[1.02] > 0


def test_gaps_between_continuous_scores_follow_the_polya_urn(generator):
    """Two live rows fall into the same gap with probability 2 / (n + 2), not 1 / (n + 1)."""
    pairs = 20_000
    ranking = np.sort(generator.normal(size=(pairs, 9)), axis=1)
    gaps = (ranking[:, :, None] < generator.normal(size=(pairs, 1, 2))).sum(axis=1)
    same = int((gaps[:, 0] == gaps[:, 1]).sum())
    assert stats.binomtest(same, pairs, 2 / 11).pvalue > 1e-7
    assert stats.binomtest(same, pairs, 1 / 10).pvalue < 1e-7


def test_evidence_respects_villes_inequality_over_many_calibrations(generator):
    """The rows suffice to detect a test that ignores the error of the calibration."""
    evidence = np.array(
        [
            get_report(
                np.sort(generator.normal(size=60)), generator.normal(size=2000), 50
            ).largest_evidence
            for _ in range(250)
        ]
    )
    for capital in (4, 10, 40):
        reached = int((evidence >= math.log(capital)).sum())
        assert reached <= stats.binom(250, 1 / capital).ppf(1 - 1e-7)


def test_alarm_is_logged_once_and_again_after_a_reset(generator, caplog):
    ranking = np.sort(generator.normal(size=200))
    drift = new_drift(ranking, "m", "7")
    for times in (1, 2):
        for _ in range(40):
            watch(drift, conformal_p_value(generator.normal(2.0, size=16), ranking))
        report = drift.report()
        assert report.alarm
        assert len(caplog.records) == times
        assert caplog.messages[-1].startswith(
            "drift: live rows of model m version 7 differ from its calibration rows"
        )
        drift.reset()


def test_columns_are_ranked_by_shift_with_few_false_positives(generator):
    columns = (
        NumericColumn(name="a", mean=0.0, std=1.0, indicator=False),
        CategoricalColumn(name="b", categories=("x", "y", "z"), indicator=False),
        NumericColumn(name="c", mean=0.0, std=1.0, indicator=False),
    )

    def rows(count, shift=0.0):
        numbers = generator.normal((0.0, shift), size=(count, 2))
        categories = np.eye(4)[generator.integers(3, size=count)]
        return np.hstack([numbers[:, :1], categories, numbers[:, 1:]]).astype(np.float32)

    training, live = rows(300), rows(MAX_RECENT_ROWS, 2.0)
    shifts, limit = column_shifts(columns, training, live)
    assert next(iter(shifts)) == "c" and shifts["c"] > limit > max(shifts["a"], shifts["b"])
    for i, name in ((0, "a"), (5, "c")):
        assert shifts[name] == pytest.approx(stats.ks_2samp(training[:, i], live[:, i]).statistic)
    shares = [np.bincount(x[:, 1:5].argmax(1), minlength=4) / len(x) for x in (training, live)]
    assert shifts["b"] == pytest.approx(np.abs(shares[0] - shares[1]).max(), abs=1e-6)
    tests = [column_shifts(columns, rows(300), rows(100)) for _ in range(200)]
    assert sum(max(shifts.values()) > limit for shifts, limit in tests) <= 10


def test_alarm_time_and_recent_rows_persist_until_a_reset(generator):
    ranking = np.sort(generator.normal(size=200))
    drift = new_drift(ranking)
    for i in range(60):
        p_values = conformal_p_value(generator.normal(3.0, size=16), ranking)
        drift.watch(p_values, np.array([[i, n] for n in range(16)], dtype=np.float32))
    alarm_time = drift.report().alarm_time
    assert abs(alarm_time - time.time()) < 60
    p_values, x = zip(*drift.recent_rows(), strict=True)
    assert len(x) == MAX_RECENT_ROWS and list(p_values) == sorted(p_values)
    assert {row[0] for row in x} == set(range(47, 60))
    drift.reset()
    assert not drift.recent_rows() and drift.report().alarm_time is None


def test_tied_scores_raise_no_alarm(generator):
    ranking = np.sort(np.round(generator.normal(size=200), 1))
    actual = get_report(ranking, np.round(generator.normal(size=3000), 1))
    assert actual.largest_evidence < -math.log(1e-6)


@pytest.mark.parametrize(("common", "share"), [(5, 0.1), (1, 0.5)])
def test_streams_with_repeated_rows_raise_no_alarm(generator, common, share):
    """Common rows make up a share of all rows and have lower scores."""

    def rows(count):
        ids = np.where(
            generator.uniform(size=count) < share,
            generator.integers(common, size=count),
            generator.integers(common, 2**60, size=count),
        )
        return ids.astype(np.uint64), np.where(ids < common, -2.0, generator.normal(size=count))

    alarms = 0
    for _ in range(200):
        ids, ranking = rows(500)
        has_copies = len(np.unique(ids)) < len(ids)
        drift = new_drift(np.sort(ranking), has_copies=has_copies)
        ids, scores = rows(1500)
        drift.take(conformal_p_value(scores, np.sort(ranking)), ids)
        alarms += drift.report().alarm
    assert alarms <= stats.binom(200, FALSE_ALARM_RATE).ppf(1 - 1e-3)


@pytest.mark.parametrize("rows_before", [0, 5000])
@pytest.mark.parametrize(
    "sample_drifted",
    [
        lambda generator: generator.normal(size=1000) + 1.2,
        lambda generator: generator.normal(size=1000) - 1.2,
        lambda generator: 0.2 * generator.normal(size=1000),
        lambda generator: np.where(
            generator.uniform(size=1000) < 0.3, 9.0, generator.normal(size=1000)
        ),
    ],
    ids=["higher", "lower", "narrower", "some outliers"],
)
def test_drift_is_detected_whenever_it_begins(generator, sample_drifted, rows_before):
    ranking = np.sort(generator.normal(size=300))
    actual = get_report(
        ranking, np.concatenate([generator.normal(size=rows_before), sample_drifted(generator)]), 50
    )
    assert actual.alarm


def test_alarm_persists_after_drift_ends(generator):
    ranking = np.sort(generator.normal(size=300))
    actual = get_report(ranking, np.concatenate([np.full(300, 9.0), generator.normal(size=20_000)]))
    assert actual.alarm
    assert actual.evidence < actual.largest_evidence
    assert actual.flag_rate < 0.2


def test_alarm_evidence_follows_from_the_false_alarm_rate():
    assert ALARM_EVIDENCE == -math.log(FALSE_ALARM_RATE) == pytest.approx(6.908, abs=1e-3)


# Row counts


def test_rows_are_counted_by_p_value_with_a_maximum_per_request(generator):
    ranking = np.sort(generator.normal(size=99))
    drift = new_drift(ranking)
    single, batch = np.arange(1, 101) / 100, np.arange(1, 1601) / 1600
    for p_value in single:
        watch(drift, np.array([p_value]))
    report = drift.report()
    assert report.rows == 100
    assert report.binned_rows == np.diff(np.append(0, np.round(100 * EDGES))).tolist()
    assert report.p_value_sum == pytest.approx(single.sum())
    assert (report.flag_rate, report.expected_flag_rate) == (pytest.approx(0.05, abs=0.005), 0.05)
    watch(drift, batch)
    report = drift.report()
    assert report.rows == 100 + MAX_REQUEST_ROWS
    assert report.p_value_sum == pytest.approx(single.sum() + batch[::100].sum())


def test_no_rows_means_no_drift():
    report = new_drift(np.array([1.0])).report()
    assert (report.rows, report.flag_rate, report.evidence, report.alarm) == (0, None, 0.0, False)


def test_no_row_is_lost_between_threads(generator):
    ranking = np.sort(generator.normal(size=99))
    drift = new_drift(ranking)

    def watch_all(scores):
        for score in scores:
            watch(drift, conformal_p_value(score[None], ranking))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(watch_all, generator.normal(size=(8, 400))))
    assert drift.report().rows == sum(drift.report().binned_rows) == 3200


class Interrupted(list):
    """Digests that start another thread when they are read."""

    def __init__(self, digests, thread):
        super().__init__(digests)
        self.thread, self.has_finished = thread, None

    def __iter__(self):
        self.thread.start()
        self.thread.join(0.3)
        self.has_finished = not self.thread.is_alive()
        return super().__iter__()


def test_concurrent_requests_are_counted_one_at_a_time(generator):
    """Rows shared by two requests count once, so lookup and insertion must be atomic."""
    ranking = np.sort(generator.normal(size=99))
    drift, p_values = new_drift(ranking), np.array([0.5, 0.6, 0.7])
    thread = threading.Thread(
        target=lambda: drift.take(p_values, np.array([1, 2, 4], dtype=np.uint64))
    )
    digests = Interrupted([1, 2, 3], thread)
    drift.take(p_values, digests)
    thread.join()
    assert digests.has_finished is False
    assert drift.report().rows == 4


# Over HTTP


def test_service_reports_drift_of_live_rows(open_client, digits_store, digits_rows):
    labels = {"model": "digits", "version": "1"}
    noise = np.random.default_rng(0).uniform(0, 16, (40, 64))

    def drift():
        return client.get("/models/digits").json()["drift"]

    with open_client(digits_store) as client:
        empty = drift()
        assert (empty["rows"], empty["flag_rate"], empty["alarm"]) == (0, None, False)
        assert empty["alarm_at"] == ALARM_EVIDENCE
        for start in range(0, 359, 10):
            answer = client.post(
                "/predict", json={"inputs": digits_rows[start : start + 10].tolist()}
            )
            assert answer.status_code == 200
        before = drift()
        assert before["rows"] == 359
        assert before["largest_evidence"] < -math.log(1e-6)
        assert before["expected_flag_rate"] == 11 / 221
        for fields in ({"seed": 1}, {"num_samples": 20}):  # a replay, another draw count
            client.post("/predict", json={"inputs": noise.tolist(), **fields})
        client.post("/acquire", json={"pool": noise.tolist()})
        assert drift() == before
        client.post("/predict", json={"inputs": noise[:10].tolist(), "num_samples": 200})
        client.post("/predict", json={"inputs": noise[10:].tolist()})
        after = drift()
        assert after["rows"] == 359 + 10 + MAX_REQUEST_ROWS
        assert after["alarm"]
        assert after["flag_rate"] > before["flag_rate"]
        page = client.get("/metrics").text
    assert metric(page, "dubito_drift_alarm", **labels) == 1
    assert metric(page, "dubito_drift_evidence_nats", **labels) == pytest.approx(after["evidence"])
    assert metric(page, "dubito_flag_p_value_count", **labels) == after["rows"]
    assert metric(page, "dubito_flag_p_value_bucket", le="0.05", **labels) >= 26
    assert metric(page, "dubito_flag_p_value_bucket", le="+Inf", **labels) == after["rows"]


def test_requests_marked_as_tests_do_not_affect_drift_or_row_metrics(client):
    def get_counts():
        page = client.get("/metrics").text
        rows = [line for line in page.splitlines() if ROW_METRICS.match(line)]
        return client.get("/models/digits").json()["drift"], sorted(rows)

    noise = np.random.default_rng(1).uniform(0, 16, (20, 64))
    request, headers = {"inputs": noise.tolist()}, {"Dubito-Purpose": "test"}
    client.post("/predict", json={"inputs": noise[:1].tolist()})
    before = get_counts()
    answer = client.post("/predict", json=request, headers=headers)
    assert sum(row["flag"] for row in answer.json()["predictions"]) > 10
    tensor = {
        "name": "inputs",
        "shape": [20, 64],
        "datatype": "FP32",
        "data": noise.ravel().tolist(),
    }
    path = "/v2/models/digits/infer"
    assert client.post(path, json={"inputs": [tensor]}, headers=headers).status_code == 200
    assert get_counts() == before
    invalid = client.post("/predict", json=request, headers={"Dubito-Purpose": "tset"})
    assert (invalid.status_code, get_counts()) == (422, before)
    assert invalid.json()["detail"].startswith("Dubito-Purpose: expected 'test'")
    client.post("/predict", json=request)
    assert get_counts()[0]["rows"] > before[0]["rows"]
