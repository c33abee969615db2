import asyncio
import math
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.requests import ClientDisconnect, Request

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.scores.sums import GROUPS
from service import limits
from service.engine.admission import BATCH_ROW_DRAWS, OVERLOAD_HOLD_S, Admission
from service.engine.batching import (
    MAX_SUMMED_NUMBERS,
    MIN_BATCH_REQUESTS,
    RESOLVE_BATCH,
    Engine,
    EngineWork,
    finish,
    part_rows,
)
from service.engine.pool_ranking import PoolWork
from service.errors import Overloaded, PastDeadline
from service.models.models import Reservoir, ServedModel
from service.request_context import RequestContext
from service.telemetry.metrics import Metrics
from tests.support.drift import new_drift

DRAWS = 20


def limited_admission(monkeypatch, burst, overload):
    """Return an admission with the given limits on queued rows x draws."""
    monkeypatch.setattr(limits, "MAX_QUEUED_ROW_DRAWS", burst)
    monkeypatch.setattr(limits, "OVERLOAD_ROW_DRAWS", overload)
    return Admission(threading.Event())


@pytest.fixture
def engine():
    engine = Engine(Admission(threading.Event()), Metrics())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def loaded(digits_store):
    model = Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))
    return ServedModel(
        model,
        Reservoir(model, 0, threading.Event()),
        new_drift(model.calibration.rank_tables[100].statistic),
    )


async def compute(engine, work):
    await engine.compute(work)
    return work


def new_work(loaded, x, seed=None, draws=DRAWS, deadline=math.inf):
    """Return work that keeps per-draw samples."""
    return EngineWork(loaded, x, draws, seed, RequestContext(deadline=deadline), keep_samples=True)


class BlockedReservoir(Reservoir):
    def __init__(self, model):
        super().__init__(model, 0, threading.Event())
        self.release = threading.Event()

    def take(self, num_draws):
        self.release.wait()
        return super().take(num_draws)


def batches(engine, loaded, kind="count"):
    """Return the number of micro-batches, or with kind="sum" their number of rows."""
    labels = {"model": loaded.name, "version": loaded.version}
    return engine.metrics.registry.get_sample_value(f"dubito_batch_rows_{kind}", labels)


def block(loaded):
    reservoir = BlockedReservoir(loaded.model)
    return new_work(
        ServedModel(loaded.model, reservoir, loaded.drift), np.zeros((1, 64), np.float32)
    ), reservoir.release


def compute_together(engine, requests, order=None):
    loaded = requests[0].served_model

    async def submit(work):
        result = await compute(engine, work)
        if order is not None:
            order.append(work)
        return result

    async def run():
        first, release = block(loaded)
        blocker = asyncio.create_task(compute(engine, first))
        await asyncio.sleep(0.02)
        waiting = [asyncio.create_task(submit(work)) for work in requests]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        release.set()
        await blocker
        return await asyncio.gather(*waiting, return_exceptions=True)

    engine.admission.active_requests = len(requests) + 1
    return asyncio.run(run())


def test_queued_requests_share_draws_and_match_separate_runs(engine, loaded, digits_rows):
    sizes = [1, 3, 1, 7, 2]
    parts = np.split(digits_rows[: sum(sizes)], np.cumsum(sizes)[:-1])
    results = compute_together(engine, [new_work(loaded, x) for x in parts])
    assert len({result.draw_seed for result in results}) == 1
    for x, result in zip(parts, results, strict=True):
        assert_matches_separate_run(loaded, x, result)


def test_micro_batch_takes_three_quarters_of_active_requests(engine, loaded, digits_rows):
    def batch_sizes(waiting):
        results = compute_together(
            engine, [new_work(loaded, digits_rows[:1]) for _ in range(waiting)]
        )
        return list(Counter(work.draw_seed for work in results).values())

    waiting = 2 * MIN_BATCH_REQUESTS + 8
    largest = 3 * (waiting + 1) // 4
    assert batch_sizes(waiting) == [largest, waiting - largest]
    assert batch_sizes(MIN_BATCH_REQUESTS) == [MIN_BATCH_REQUESTS]


def test_large_request_gets_one_result_and_does_not_delay_small_requests(
    engine, loaded, digits_rows
):
    order = []
    rows = np.repeat(digits_rows, 1 + 4 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)
    large, small = new_work(loaded, rows), new_work(loaded, digits_rows[:1])
    large_result, small_result = compute_together(engine, [large, small], order)
    assert order == [small, large]
    assert len(large_result.phases) > 4
    assert_matches_separate_run(loaded, rows, large_result)
    assert_matches_separate_run(loaded, digits_rows[:1], small_result)


def test_queued_request_past_its_deadline_is_not_computed(engine, loaded, digits_rows):
    past = time.monotonic() - 1.0
    late, good = compute_together(
        engine,
        [new_work(loaded, digits_rows[:1], deadline=past), new_work(loaded, digits_rows[:1])],
    )
    assert isinstance(late, PastDeadline)
    assert_matches_separate_run(loaded, digits_rows[:1], good)


def test_error_in_one_micro_batch_does_not_affect_the_next(engine, loaded, digits_rows):
    wrong = new_work(loaded, digits_rows[:1, :5], draws=10)
    failed, good = compute_together(engine, [wrong, new_work(loaded, digits_rows[:1])])
    assert isinstance(failed, Exception)
    assert_matches_separate_run(loaded, digits_rows[:1], good)


def test_faulty_request_does_not_fail_others_in_its_micro_batch(
    engine, loaded, digits_rows, monkeypatch
):
    compute, sizes = EngineWork.compute, []

    def fail_for_negative(work, batch, x, sets):
        sizes.append(len(batch))
        if (x < 0).any():
            raise RuntimeError("faulty row")
        return compute(work, batch, x, sets)

    monkeypatch.setattr(EngineWork, "compute", fail_for_negative)
    requests = [new_work(loaded, digits_rows[n : n + 1]) for n in range(3)]
    faulty = new_work(loaded, -digits_rows[:1] - 1)
    *good, failed = compute_together(engine, [*requests, faulty])
    assert str(failed) == "faulty row"
    assert sizes == [1, 4, 1, 1, 1, 1]
    assert len({work.draw_seed for work in good}) == 1
    for n, work in enumerate(good):
        assert_matches_separate_run(loaded, digits_rows[n : n + 1], work)


def test_requests_of_disconnected_clients_are_not_computed(engine, loaded, digits_rows):
    async def receive():
        return {"type": "http.disconnect"}

    context = RequestContext(request=Request({"type": "http"}, receive))
    disconnected = replace(new_work(loaded, digits_rows[:1], seed=1), context=context)

    async def run():
        first, release = block(loaded)
        blocker = asyncio.create_task(compute(engine, first))
        await asyncio.sleep(0.02)
        try:
            with pytest.raises(ClientDisconnect):
                await compute(engine, disconnected)
        finally:
            release.set()
        await blocker
        await compute(engine, new_work(loaded, digits_rows[:1]))

    engine.admission.active_requests = 2
    asyncio.run(run())
    assert batches(engine, loaded) == batches(engine, loaded, "sum") == 2  # first and last


def test_pool_scored_in_parts_uses_one_draw_set(engine, loaded, digits_rows):
    rows = np.repeat(digits_rows, 1 + 2 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)

    async def run():
        return await compute(engine, PoolWork(loaded, rows, DRAWS, None, acquisition="bald"))

    result = asyncio.run(run())
    assert len(result.phases) > 2
    expected = loaded.model.prediction(
        *loaded.model.runtime.run_set(rows, loaded.model.runtime.draw_set(result.draw_seed, DRAWS))
    )
    assert np.array_equal(result.scores, expected.scores.bald)


def test_part_size_is_bounded_by_draws_and_classes(loaded):
    assert part_rows(loaded.model, 100) == BATCH_ROW_DRAWS // 100
    assert part_rows(loaded.model, 1) == MAX_SUMMED_NUMBERS // (10 * GROUPS)
    many_classes = SimpleNamespace(
        model=SimpleNamespace(
            runtime=loaded.model.runtime, manifest=SimpleNamespace(output_size=1000), encoder=None
        )
    )
    assert part_rows(many_classes.model, 1) * 1000 * GROUPS <= MAX_SUMMED_NUMBERS


@pytest.mark.parametrize(("row_s", "rows"), [(0.05, 5), (1.0, 1), (1e-9, BATCH_ROW_DRAWS // 100)])
def test_part_size_is_bounded_by_encoder_time(loaded, row_s, rows):
    manifest = SimpleNamespace(output_size=10)
    model = SimpleNamespace(
        runtime=loaded.model.runtime, manifest=manifest, encoder=SimpleNamespace(row_s=row_s)
    )
    assert part_rows(model, 100) == rows


def test_single_request_past_its_deadline_is_refused(engine, loaded, digits_rows):
    async def run(seed):
        await compute(
            engine,
            new_work(loaded, digits_rows[:1], seed, draws=5, deadline=time.monotonic() - 1.0),
        )

    for seed in (None, 3):
        with pytest.raises(PastDeadline):
            asyncio.run(run(seed))


def test_missed_deadline_returns_504(client, digits_rows):
    response = client.post(
        "/predict", json={"inputs": digits_rows.tolist(), "num_samples": 1000, "deadline_s": 1e-9}
    )
    assert response.status_code == 504
    assert "deadline" in response.json()["detail"]
    response = client.post("/acquire", json={"pool": digits_rows.tolist(), "deadline_s": 1e-9})
    assert response.status_code == 504


def test_queue_limit_drops_after_a_refusal_until_a_second_without_refusals(
    monkeypatch,
):
    admission = limited_admission(monkeypatch, 10_000, 2_000)

    def fits(rows):
        try:
            with admission.admit(rows, 1):
                return True
        except Overloaded as error:
            assert int(error.headers["Retry-After"]) >= 1
            return False

    async def run():
        with admission.admit(1_000, 1):
            assert fits(6_000)  # a burst
            with admission.admit(50_000, 1):
                assert admission.row_draws == 1_000 + BATCH_ROW_DRAWS
                assert fits(2_600)
                assert fits(4_500)  # fits if the pool is reduced to its size
                assert not fits(4_501)
            assert not fits(1_001)
            assert fits(1_000)
            await asyncio.sleep(1.1 * OVERLOAD_HOLD_S)
            assert fits(6_000)
        assert admission.row_draws == admission.active_requests == 0

    asyncio.run(run())


def test_clients_within_their_share_are_admitted_despite_a_greedy_client(monkeypatch):
    """The client that fills the queue is also refused, except for small requests."""
    admission = limited_admission(monkeypatch, 10_000, 4_000)

    def fits(rows, client):
        try:
            with admission.admit(rows, 1, client):
                return True
        except Overloaded:
            return False

    async def run():
        with ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(admission.admit(1_000, 1, "greedy"))
            assert not fits(1_000, "greedy")  # the limit drops to 4,000
            assert fits(2_000, "other")
            assert not fits(2_001, "other")
            assert fits(4_000 // 11, "greedy")
            assert not fits(4_000 // 11 + 1, "greedy")
            with admission.admit(1_000, 1, "other"):
                assert fits(1_000, "other")
                assert not fits(1_001, "other")
                assert fits(4_000 // 3, "third")
        assert fits(10_000, "greedy")

    asyncio.run(run())


def test_small_request_overtakes_large_requests_of_another_client(engine, loaded, digits_rows):
    order = []
    rows = np.repeat(digits_rows, 1 + 2 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)
    large = [
        replace(new_work(loaded, rows), context=RequestContext(client="greedy")) for _ in range(5)
    ]
    small = replace(new_work(loaded, digits_rows[:1]), context=RequestContext(client="other"))
    compute_together(engine, [*large, small], order)
    assert order[0] is small
    assert batches(engine, loaded) > 10


def test_micro_batch_excludes_a_client_that_is_ahead_of_its_share(engine, loaded, digits_rows):
    def waiting(client):
        work = replace(new_work(loaded, digits_rows[:1]), context=RequestContext(client=client))
        work.future = asyncio.get_running_loop().create_future()
        return work

    async def run():
        ahead, behind, part = (waiting(client) for client in ("greedy", "other", "greedy"))
        with engine._condition:
            engine._queue.put(part, "greedy", part_rows(loaded.model, DRAWS) * DRAWS)
            engine._queue.put(ahead, "greedy", DRAWS)
            engine._queue.put(behind, "other", DRAWS)
            engine._queue.take([p for p in engine._queue.turns() if p.work is part])
            assert engine._next_batch() == [behind]
            assert engine._next_batch() == [ahead]

    asyncio.run(run())


def test_memory_of_large_requests_includes_draws_and_retained_results(loaded, digits_rows):
    small, large = new_work(loaded, digits_rows[:1]), np.repeat(digits_rows, 10, axis=0)
    assert small.memory_bytes() < 10_000
    model = loaded.model
    retained = 2 * 4 * DRAWS * len(large) * model.manifest.output_size
    assert new_work(loaded, large).memory_bytes() > retained + DRAWS * model.runtime.draw_bytes
    assert PoolWork(loaded, large, DRAWS, None, acquisition="bald").memory_bytes() > 8 * len(large)
    joint = PoolWork(loaded, large, DRAWS, None, acquisition="batchbald", max_candidates=50)
    assert joint.memory_bytes() > 50 * 4 * DRAWS * model.manifest.output_size


def assert_matches_separate_run(loaded, x, result):
    """Check that a result equals a separate run with its seed, bit for bit."""
    draws = loaded.model.runtime.draw_set(result.draw_seed, result.num_samples)
    expected = loaded.model.prediction(*loaded.model.runtime.run_set(x, draws))
    for name, values in expected.scores.by_name().items():
        assert np.array_equal(result.predicted.prediction.scores.by_name()[name], values), name
    assert np.array_equal(
        result.predicted.prediction.scores.probabilities, expected.scores.probabilities
    )
    assert np.array_equal(result.predicted.prediction.p_values.p_value, expected.p_values.p_value)
    for name, values in expected.p_values.detector_p_values.items():
        assert np.array_equal(
            result.predicted.prediction.p_values.detector_p_values[name], values
        ), name
    assert result.predicted.samples.shape == (
        result.num_samples,
        *expected.scores.probabilities.shape,
    )
    assert np.allclose(
        result.predicted.samples.mean(axis=0), expected.scores.probabilities, atol=1e-5
    )


def test_event_loop_can_run_between_batches_of_results(loaded):
    async def count_turns():
        loop, count, turn = asyncio.get_running_loop(), 3 * RESOLVE_BATCH + 1, 0
        works = [new_work(loaded, None) for _ in range(count)]
        for work in works:
            work.future = loop.create_future()
        turns = {}
        for n, work in enumerate(works):
            work.future.add_done_callback(lambda _, n=n: turns.setdefault(n, turn))
        threading.Thread(target=finish, args=(works,)).start()
        while len(turns) < count:
            await asyncio.sleep(0)
            turn += 1
        return turns

    turns = asyncio.run(count_turns())
    assert max(Counter(turns.values()).values()) == RESOLVE_BATCH
    assert [turns[n] for n in range(len(turns))] == sorted(turns.values())


def test_overload_refuses_unread_bodies_by_their_estimated_row_draws(
    monkeypatch,
):
    admission = limited_admission(monkeypatch, 4_000, 4_000)

    def is_accepted(length, client="one"):
        try:
            admission.refuse_unread(length, client)
        except Overloaded:
            return False
        return True

    async def run():
        assert is_accepted(10**9)
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(admission.admit(1_000, 1, "one", body_bytes=50_000))
            assert not is_accepted(50_000)
            assert is_accepted(40_000)  # about 800 rows x draws, its share of 4,000 among five
            assert not is_accepted(40_100)
            assert is_accepted(10**9, "other")  # capped at the largest active request
            assert is_accepted(0)
        with ExitStack() as stack:
            for length in (0, 50, 100_000):  # a chunked body, a file name, and rows
                stack.enter_context(admission.admit(1_200, 1, "one", body_bytes=length))
            assert is_accepted(83_000)  # 996 rows x draws, its share of 4,000 among four
            assert not is_accepted(84_000)
            assert is_accepted(84_000, "other")
        assert is_accepted(10**9)

    asyncio.run(run())
