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


def limited_admission(monkeypatch, burst, lasting):
    """Admission with other limits of rows x draws that wait."""
    monkeypatch.setattr(limits, "MAX_QUEUED_ROW_DRAWS", burst)
    monkeypatch.setattr(limits, "OVERLOAD_ROW_DRAWS", lasting)
    return Admission(threading.Event())


@pytest.fixture
def engine():
    engine = Engine(Admission(threading.Event()), Metrics())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(digits_store):
    model = Model.load(ModelStore(digits_store).open("digits", "1", files=NEEDED))
    return ServedModel(
        model,
        Reservoir(model, 0, threading.Event()),
        new_drift(model.calibration.rank_tables[100].statistic),
    )


async def compute(engine, work):
    await engine.compute(work)
    return work


def job(served, x, seed=None, draws=DRAWS, deadline=math.inf):
    """A job whose draws' samples are kept."""
    return EngineWork(served, x, draws, seed, RequestContext(deadline=deadline), keep_samples=True)


class HeldReservoir(Reservoir):
    def __init__(self, model):
        super().__init__(model, 0, threading.Event())
        self.begin = threading.Event()

    def take(self, num_draws):
        self.begin.wait()
        return super().take(num_draws)


def batches(engine, served, kind="count"):
    """The number of micro-batches, or the sum of their rows."""
    labels = {"model": served.name, "version": served.version}
    return engine.metrics.registry.get_sample_value(f"dubito_batch_rows_{kind}", labels)


def hold(served):
    reservoir = HeldReservoir(served.model)
    return job(
        ServedModel(served.model, reservoir, served.drift), np.zeros((1, 64), np.float32)
    ), reservoir.begin


def together(engine, jobs, order=None):
    result = jobs[0].served_model

    async def submit(job):
        predicted = await compute(engine, job)
        if order is not None:
            order.append(job)
        return predicted

    async def ask():
        first, begin = hold(result)
        busy = asyncio.create_task(compute(engine, first))
        await asyncio.sleep(0.02)
        waiting = [asyncio.create_task(submit(job)) for job in jobs]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begin.set()
        await busy
        return await asyncio.gather(*waiting, return_exceptions=True)

    engine.admission.active_requests = len(jobs) + 1
    return asyncio.run(ask())


def test_what_waits_together_shares_fresh_draws_and_each_row_is_answered_as_alone(
    engine, served, digits_rows
):
    sizes = [1, 3, 1, 7, 2]
    parts = np.split(digits_rows[: sum(sizes)], np.cumsum(sizes)[:-1])
    answers = together(engine, [job(served, x) for x in parts])
    assert len({answer.draw_seed for answer in answers}) == 1
    for x, answer in zip(parts, answers, strict=True):
        assert_as_alone(served, x, answer)


def test_a_micro_batch_takes_three_quarters_of_those_about(engine, served, digits_rows):
    def batches(waiting):
        actual = together(engine, [job(served, digits_rows[:1]) for _ in range(waiting)])
        return list(Counter(work.draw_seed for work in actual).values())

    waiting = 2 * MIN_BATCH_REQUESTS + 8
    largest = 3 * (waiting + 1) // 4
    assert batches(waiting) == [largest, waiting - largest]
    assert batches(MIN_BATCH_REQUESTS) == [MIN_BATCH_REQUESTS]


def test_a_large_request_is_one_answer_and_others_are_answered_before_its_end(
    engine, served, digits_rows
):
    order = []
    rows = np.repeat(digits_rows, 1 + 4 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)
    large, small = job(served, rows), job(served, digits_rows[:1])
    full, alone = together(engine, [large, small], order)
    assert order == [small, large]
    assert len(full.phases) > 4
    assert_as_alone(served, rows, full)
    assert_as_alone(served, digits_rows[:1], alone)


def test_what_is_past_its_deadline_is_not_computed(engine, served, digits_rows):
    past = time.monotonic() - 1.0
    late, good = together(
        engine, [job(served, digits_rows[:1], deadline=past), job(served, digits_rows[:1])]
    )
    assert isinstance(late, PastDeadline)
    assert_as_alone(served, digits_rows[:1], good)


def test_an_error_in_one_micro_batch_is_its_own_and_the_next_is_computed(
    engine, served, digits_rows
):
    wrong = job(served, digits_rows[:1, :5], draws=10)
    failed, good = together(engine, [wrong, job(served, digits_rows[:1])])
    assert isinstance(failed, Exception)
    assert_as_alone(served, digits_rows[:1], good)


def test_a_faulty_request_of_a_micro_batch_fails_alone(engine, served, digits_rows, monkeypatch):
    compute, sizes = EngineWork.compute, []

    def fail_for_negative(work, batch, x, sets):
        sizes.append(len(batch))
        if (x < 0).any():
            raise RuntimeError("faulty row")
        return compute(work, batch, x, sets)

    monkeypatch.setattr(EngineWork, "compute", fail_for_negative)
    jobs = [job(served, digits_rows[n : n + 1]) for n in range(3)]
    faulty = job(served, -digits_rows[:1] - 1)
    *good, failed = together(engine, [*jobs, faulty])
    assert str(failed) == "faulty row"
    assert sizes == [1, 4, 1, 1, 1, 1]
    assert len({work.draw_seed for work in good}) == 1
    for n, work in enumerate(good):
        assert_as_alone(served, digits_rows[n : n + 1], work)


def test_clients_that_have_gone_are_not_computed_for(engine, served, digits_rows):
    async def receive():
        return {"type": "http.disconnect"}

    call = RequestContext(request=Request({"type": "http"}, receive))
    gone = replace(job(served, digits_rows[:1], seed=1), context=call)

    async def ask():
        first, begin = hold(served)
        busy = asyncio.create_task(compute(engine, first))
        await asyncio.sleep(0.02)
        try:
            with pytest.raises(ClientDisconnect):
                await compute(engine, gone)
        finally:
            begin.set()
        await busy
        await compute(engine, job(served, digits_rows[:1]))

    engine.admission.active_requests = 2
    asyncio.run(ask())
    assert batches(engine, served) == batches(engine, served, "sum") == 2  # the first and the last


def test_a_pool_is_scored_in_parts_under_one_draw_set_as_its_rows_are_predicted(
    engine, served, digits_rows
):
    rows = np.repeat(digits_rows, 1 + 2 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)

    async def ask():
        return await compute(engine, PoolWork(served, rows, DRAWS, None, acquisition="bald"))

    scored = asyncio.run(ask())
    assert len(scored.phases) > 2
    predicted = served.model.prediction(
        *served.model.runtime.run_set(rows, served.model.runtime.draw_set(scored.draw_seed, DRAWS))
    )
    assert np.array_equal(scored.scores, predicted.scores.bald)


def test_parts_are_bounded_by_classes_as_by_draws(served):
    assert part_rows(served.model, 100) == BATCH_ROW_DRAWS // 100
    assert part_rows(served.model, 1) == MAX_SUMMED_NUMBERS // (10 * GROUPS)
    thousand = SimpleNamespace(
        model=SimpleNamespace(
            runtime=served.model.runtime, manifest=SimpleNamespace(output_size=1000), encoder=None
        )
    )
    assert part_rows(thousand.model, 1) * 1000 * GROUPS <= MAX_SUMMED_NUMBERS


@pytest.mark.parametrize(("row_s", "rows"), [(0.05, 5), (1.0, 1), (1e-9, BATCH_ROW_DRAWS // 100)])
def test_parts_are_bounded_by_the_time_of_the_encoder(served, row_s, rows):
    manifest = SimpleNamespace(output_size=10)
    model = SimpleNamespace(
        runtime=served.model.runtime, manifest=manifest, encoder=SimpleNamespace(row_s=row_s)
    )
    assert part_rows(model, 100) == rows


def test_a_lone_request_past_its_deadline_is_refused_too(engine, served, digits_rows):
    async def ask(seed):
        await compute(
            engine, job(served, digits_rows[:1], seed, draws=5, deadline=time.monotonic() - 1.0)
        )

    for seed in (None, 3):
        with pytest.raises(PastDeadline):
            asyncio.run(ask(seed))


def test_a_deadline_is_answered_504_over_http(client, digits_rows):
    answer = client.post(
        "/predict", json={"inputs": digits_rows.tolist(), "num_samples": 1000, "deadline_s": 1e-9}
    )
    assert answer.status_code == 504
    assert "deadline" in answer.json()["detail"]
    answer = client.post("/acquire", json={"pool": digits_rows.tolist(), "deadline_s": 1e-9})
    assert answer.status_code == 504


def test_a_burst_may_queue_and_after_a_refusal_little_waits_until_none_was_needed_for_a_second(
    monkeypatch,
):
    admission = limited_admission(monkeypatch, 10_000, 2_000)

    def fits(rows):
        try:
            with admission.admit(rows, 1):
                return True
        except Overloaded as refused:
            assert int(refused.headers["Retry-After"]) >= 1
            return False

    async def ask():
        with admission.admit(1_000, 1):
            assert fits(6_000)  # a burst
            with admission.admit(50_000, 1):
                assert admission.row_draws == 1_000 + BATCH_ROW_DRAWS
                assert fits(2_600)
                assert fits(4_500)  # there were room, had the pool brought no more
                assert not fits(4_501)
            assert not fits(1_001)
            assert fits(1_000)
            await asyncio.sleep(1.1 * OVERLOAD_HOLD_S)
            assert fits(6_000)
        assert admission.row_draws == admission.active_requests == 0

    asyncio.run(ask())


def test_nobody_is_refused_for_what_others_have_brought_beyond_their_share(monkeypatch):
    """A client that fills the queue is refused; others, and smaller requests of its own, are let
    in."""
    admission = limited_admission(monkeypatch, 10_000, 4_000)

    def fits(rows, client):
        try:
            with admission.admit(rows, 1, client):
                return True
        except Overloaded:
            return False

    async def ask():
        with ExitStack() as stack:
            for _ in range(10):
                stack.enter_context(admission.admit(1_000, 1, "greedy"))
            assert not fits(1_000, "greedy")  # from now on 4,000 are let in
            assert fits(2_000, "other")
            assert not fits(2_001, "other")
            assert fits(4_000 // 11, "greedy")
            assert not fits(4_000 // 11 + 1, "greedy")
            with admission.admit(1_000, 1, "other"):
                assert fits(1_000, "other")
                assert not fits(1_001, "other")
                assert fits(4_000 // 3, "third")
        assert fits(10_000, "greedy")

    asyncio.run(ask())


def test_another_clients_small_request_is_computed_before_the_next_part_of_many_large_ones(
    engine, served, digits_rows
):
    order = []
    rows = np.repeat(digits_rows, 1 + 2 * BATCH_ROW_DRAWS // DRAWS // len(digits_rows), axis=0)
    large = [replace(job(served, rows), context=RequestContext(client="greedy")) for _ in range(5)]
    small = replace(job(served, digits_rows[:1]), context=RequestContext(client="other"))
    together(engine, [*large, small], order)
    assert order[0] is small
    assert batches(engine, served) > 10


def test_a_micro_batch_takes_no_client_further_ahead_than_one_part_does(
    engine, served, digits_rows
):
    def waiting(client):
        work = replace(job(served, digits_rows[:1]), context=RequestContext(client=client))
        work.future = asyncio.get_running_loop().create_future()
        return work

    async def ask():
        ahead, behind, part = (waiting(client) for client in ("greedy", "other", "greedy"))
        with engine._condition:
            engine._queue.put(part, "greedy", part_rows(served.model, DRAWS) * DRAWS)
            engine._queue.put(ahead, "greedy", DRAWS)
            engine._queue.put(behind, "other", DRAWS)
            engine._queue.take([p for p in engine._queue.turns() if p.work is part])
            assert engine._next_batch() == [behind]
            assert engine._next_batch() == [ahead]

    asyncio.run(ask())


def test_a_job_in_several_parts_counts_with_its_draws_and_what_is_kept_of_it(served, digits_rows):
    small, large = job(served, digits_rows[:1]), np.repeat(digits_rows, 10, axis=0)
    assert small.memory_bytes() < 10_000
    model = served.model
    retained = 2 * 4 * DRAWS * len(large) * model.manifest.output_size
    assert job(served, large).memory_bytes() > retained + DRAWS * model.runtime.draw_bytes
    assert PoolWork(served, large, DRAWS, None, acquisition="bald").memory_bytes() > 8 * len(large)
    joint = PoolWork(served, large, DRAWS, None, acquisition="batchbald", max_candidates=50)
    assert joint.memory_bytes() > 50 * 4 * DRAWS * model.manifest.output_size


def assert_as_alone(served, x, answer):
    """An answer is, bit for bit, what its seed gives for these rows alone."""
    draws = served.model.runtime.draw_set(answer.draw_seed, answer.num_samples)
    expected = served.model.prediction(*served.model.runtime.run_set(x, draws))
    for name, values in expected.scores.by_name().items():
        assert np.array_equal(answer.predicted.prediction.scores.by_name()[name], values), name
    assert np.array_equal(
        answer.predicted.prediction.scores.probabilities, expected.scores.probabilities
    )
    assert np.array_equal(answer.predicted.prediction.p_values.p_value, expected.p_values.p_value)
    for name, values in expected.p_values.detector_p_values.items():
        assert np.array_equal(
            answer.predicted.prediction.p_values.detector_p_values[name], values
        ), name
    assert answer.predicted.samples.shape == (
        answer.num_samples,
        *expected.scores.probabilities.shape,
    )
    assert np.allclose(
        answer.predicted.samples.mean(axis=0), expected.scores.probabilities, atol=1e-5
    )


def test_an_event_loop_that_is_told_of_many_answers_has_turns_between_them(served):
    async def get_message():
        loop, jobs, turn = asyncio.get_running_loop(), 3 * RESOLVE_BATCH + 1, 0
        completed = [job(served, None) for _ in range(jobs)]
        for work in completed:
            work.future = loop.create_future()
        turns = {}
        for n, work in enumerate(completed):
            work.future.add_done_callback(lambda _, n=n: turns.setdefault(n, turn))
        threading.Thread(target=finish, args=(completed,)).start()
        while len(turns) < jobs:
            await asyncio.sleep(0)
            turn += 1
        return turns

    turns = asyncio.run(get_message())
    assert max(Counter(turns.values()).values()) == RESOLVE_BATCH
    assert [turns[n] for n in range(len(turns))] == sorted(turns.values())


def test_an_overload_refuses_a_body_before_it_is_read_by_what_those_in_work_brought_for_their_bytes(
    monkeypatch,
):
    admission = limited_admission(monkeypatch, 4_000, 4_000)

    def is_read(length, client="one"):
        try:
            admission.refuse_unread(length, client)
        except Overloaded:
            return False
        return True

    async def ask():
        assert is_read(10**9)
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(admission.admit(1_000, 1, "one", body_bytes=50_000))
            assert not is_read(50_000)
            assert is_read(40_000)  # about 800 rows x draws: its share of 4,000 among five
            assert not is_read(40_100)
            assert is_read(10**9, "other")  # no more than the largest in work is expected of it
            assert is_read(0)
        with ExitStack() as stack:
            for length in (0, 50, 100_000):  # a chunked body, a name of a file, and rows
                stack.enter_context(admission.admit(1_200, 1, "one", body_bytes=length))
            assert is_read(83_000)  # 996 rows x draws: its share of 4,000 among four
            assert not is_read(84_000)
            assert is_read(84_000, "other")
        assert is_read(10**9)

    asyncio.run(ask())
