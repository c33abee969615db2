from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from model_store.conformal.rank_tables import conformal_p_value
from service.models.drift import MAX_WAITING_ROWS, Drift, DriftTarget, row_digests
from service.shared_state import FolderBackend, SharedState
from tests.support.drift import watch


def backends(folder, count):
    return [FolderBackend(str(worker), folder) for worker in range(count)]


@pytest.fixture
def ranking():
    return np.sort(np.random.default_rng(0).normal(size=200))


def requests(ranking, count, shift):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(count, 3, 4)).astype(np.float32)
    x[1::7] = x[::7][: len(x[1::7])]
    p_values = conformal_p_value(generator.normal(shift, size=(count, 3)).ravel(), ranking).reshape(
        count, 3
    )
    return [(p, row_digests(rows)) for p, rows in zip(p_values, x, strict=True)]


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_evidence_of_several_processes_is_that_of_one_with_all_their_rows(
    tmp_path, ranking, shift
):
    target = DriftTarget.from_statistics(ranking, "m", "1")
    alone, together = (
        Drift(target),
        [Drift(target, backend) for backend in backends(tmp_path, 3)],
    )
    for i, request in enumerate(requests(ranking, 300, shift)):
        alone.watch(*request)
        alone.report()
        drift = together[i % 3]
        drift.watch(*request)
        drift.send()
        if i == 150:  # a worker is replaced
            together[2] = Drift(target, backends(tmp_path, 3)[2])
    expected = alone.report()
    for drift in together:
        report = drift.report()
        assert replace(
            report, evidence=0.0, largest_evidence=0.0, flag_rate=0.0, p_value_sum=0.0
        ) == replace(expected, evidence=0.0, largest_evidence=0.0, flag_rate=0.0, p_value_sum=0.0)
        for name in ("evidence", "largest_evidence", "flag_rate", "p_value_sum"):
            assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    assert expected.alarm == (shift > 0)
    assert sum(drift.local_report().rows for drift in together) < 900
    together[0].reset()
    assert together[1].report().rows == 0


def test_rows_brought_at_the_same_time_are_all_taken_in(tmp_path, ranking):
    target = DriftTarget.from_statistics(ranking)
    drifts = [Drift(target, backend) for backend in backends(tmp_path, 4)]

    def bring(drift):
        generator = np.random.default_rng(id(drift) % 1000)
        for _ in range(25):
            watch(drift, conformal_p_value(generator.normal(size=8), ranking))
            drift.send()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(bring, drifts))
    assert drifts[0].report().rows == 4 * 25 * 8


def test_a_martingale_of_one_process_is_none_given_the_rows_of_another():
    """Why rows go to one urn: given others' rows, all of small p-values, its capital is expected to
    grow."""
    target = DriftTarget.from_statistics(np.array([1.0, 2.0, 3.0]))
    p_values = conformal_p_value(np.arange(4) + 0.5, np.array([1.0, 2.0, 3.0]))

    def capital(before, gap):
        drift = Drift(target)
        for item in (*before, gap):
            watch(drift, p_values[[item]])
        return np.exp(drift.report().evidence)

    rest = [3] * 20
    urn = np.array([1.0 + rest.count(gap) for gap in range(4)]) / (4 + len(rest))
    start = np.exp(Drift(target).report().evidence)
    alone = sum(urn[gap] * capital((), gap) for gap in range(4))
    pooled = sum(urn[gap] * capital(rest, gap) for gap in range(4))
    assert alone > start + 0.05
    before = Drift(target)
    for _ in rest:
        watch(before, p_values[[3]])
    assert pooled == pytest.approx(np.exp(before.report().evidence), rel=1e-12)


def test_where_the_others_cannot_be_reached_own_rows_are_reported_and_brought_later(
    tmp_path, ranking
):
    (backend,) = backends(tmp_path, 1)
    drift = Drift(DriftTarget.from_statistics(ranking), backend)
    folder, backend.folder = backend.folder, tmp_path / "gone"
    watch(drift, np.array([0.5, 0.6]))
    report = drift.report()
    assert (report.rows, report.is_global) == (2, False)
    with pytest.raises(OSError):
        drift.send()
    backend.folder = folder
    report = drift.report()
    assert (report.rows, report.is_global) == (2, True)


def test_what_waits_for_others_who_cannot_be_reached_is_bounded(tmp_path, ranking):
    (backend,) = backends(tmp_path, 1)
    drift = Drift(DriftTarget.from_statistics(ranking), backend)
    folder, backend.folder = backend.folder, tmp_path / "gone"
    for _ in range(MAX_WAITING_ROWS // 1000):
        for _ in range(125):
            watch(drift, np.full(16, 0.5))
        with pytest.raises(OSError):
            drift.send()
    backend.folder = folder
    assert 0 < drift.report().rows <= MAX_WAITING_ROWS


def test_metrics_are_merged(tmp_path):
    page = b"# HELP a What.\n# TYPE a gauge\na %d\n"
    item, other = (
        SharedState(backend, partial(page.__mod__, value), lambda: None)
        for value, backend in enumerate(backends(tmp_path, 2), start=1)
    )
    other.metrics()
    expected = b'# HELP a What.\n# TYPE a gauge\na{worker="0"} 1\na{worker="1"} 2\n'
    assert item.metrics() == other.metrics() == expected


def test_no_counter_goes_back_from_one_scrape_to_the_next_whichever_process_answers(tmp_path):
    counted = [0, 0]

    def page(worker):
        return b"# HELP a_total What.\n# TYPE a_total counter\na_total %d\n" % counted[worker]

    states = [
        SharedState(backend, partial(page, worker), lambda: None)
        for worker, backend in enumerate(backends(tmp_path, 2))
    ]
    for state in states:
        state.metrics()
    for request in (0, 1, 0, 0, 1, 1):
        counted[request] += 1
        here, there = (states[worker].metrics() for worker in (request, 1 - request))
        assert here == there
        assert b'a_total{worker="%d"} %d' % (request, counted[request]) in there
