import asyncio
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from service.engine import batching
from service.engine.admission import Admission
from service.engine.batching import Engine, EngineWork, part_rows
from service.engine.pool_ranking import PoolWork
from service.models.models import Reservoir, ServedModel
from service.telemetry.metrics import Metrics
from tests.support import tiny
from tests.support.drift import new_drift

PART_ROW_DRAWS = 200
ROWS = tiny.rows(np.random.default_rng(0), 64)


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "BATCH_ROW_DRAWS", PART_ROW_DRAWS)
        for paired in (True, False):
            MODELS[paired] = tiny.load_model(tmp_path_factory.mktemp("tiny"), paired)
        yield


MODELS = {}


class BlockedReservoir(Reservoir):
    def __init__(self, model):
        super().__init__(model, 0, threading.Event())
        self.entered, self.release = threading.Event(), threading.Event()

    def take(self, num_draws):
        self.entered.set()
        self.release.wait()
        return super().take(num_draws)


class Requests:
    def __init__(self, paired):
        self.model = MODELS[paired]
        self.loop = asyncio.new_event_loop()
        self.admission = Admission(threading.Event())
        self.admission.active_requests = 1000
        self.engine = Engine(self.admission, Metrics())
        self.loaded = self._load(Reservoir(self.model, 0, threading.Event()))
        self.pending, self.blocked = [], None

    def _load(self, reservoir):
        return ServedModel(
            self.model,
            reservoir,
            new_drift(self.model.calibration.rank_tables[tiny.DRAWS].statistic),
        )

    def submit(self, first, count, seed=None, num_samples=tiny.DRAWS, acquisition=None):
        x = ROWS[first : first + count]
        kind = EngineWork if acquisition is None else PoolWork
        work = kind(self.loaded, x, num_samples, seed, acquisition=acquisition)
        self.pending.append((work, self._begin(work)))

    def block(self):
        reservoir = BlockedReservoir(self.model)
        self.blocked = reservoir, self._begin(EngineWork(self._load(reservoir), ROWS[:1], 1, None))
        while not reservoir.entered.wait(0.001):
            self.loop.run_until_complete(asyncio.sleep(0))

    def release(self):
        if self.blocked is not None:
            reservoir, task = self.blocked
            reservoir.release.set()
            self.loop.run_until_complete(task)
            self.blocked = None

    def cancel(self, i):
        self.pending.pop(i)[1].cancel()
        self.loop.run_until_complete(asyncio.sleep(0))

    def check_results(self):
        self.release()
        for work, task in self.pending:
            result = self.loop.run_until_complete(asyncio.wait_for(task, 60))
            assert work.seed in (None, work.draw_seed)
            if work.acquisition is not None:
                outputs, _ = self.model.runtime.run_set(work.x, self._draws(work))
                scores = self.model.predictive.scores(self.model.predictive.sums(outputs))
                assert result.scores.tobytes() == getattr(scores, work.acquisition).tobytes()
                continue
            actual, expected = result.predicted.prediction, self._run_separately(work)
            assert actual.scores.num_draws.tolist() == expected.scores.num_draws.tolist()
            assert actual.scores.probabilities.tobytes() == expected.scores.probabilities.tobytes()
            assert actual.scores.bald.tobytes() == expected.scores.bald.tobytes()
            assert actual.p_values.p_value.tobytes() == expected.p_values.p_value.tobytes()
        fresh = [work.draw_seed for work, task in self.pending if work.seed is None]
        self.pending.clear()
        return fresh

    def _draws(self, work):
        return self.model.runtime.draw_set(work.draw_seed, work.num_samples)

    def _run_separately(self, work):
        return self.model.prediction(*self.model.runtime.run_set(work.x, self._draws(work)))

    async def _compute(self, work):
        await self.engine.compute(work)
        return work

    def _begin(self, work):
        task = self.loop.create_task(self._compute(work))
        for _ in range(2):
            self.loop.run_until_complete(asyncio.sleep(0))
        return task

    def close(self):
        if self.blocked is not None:
            self.blocked[0].release.set()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.engine.close()
        self.loop.close()


@pytest.fixture(params=[True, False], ids=["paired", "unpaired"])
def requests(request):
    requests = Requests(request.param)
    yield requests
    requests.close()


def test_queued_seeded_and_unseeded_requests_match_separate_runs(requests):
    requests.block()
    for i, seed in enumerate([5, None, 6, 5, None]):
        requests.submit(i, 2, seed)
    requests.check_results()


def test_rest_of_a_large_request_does_not_share_draws_with_others(requests):
    large = 2 * part_rows(requests.loaded.model, tiny.DRAWS) + 1
    for sizes in ([large, 2, 3], [2, large, 3], [large, large, 1]):
        requests.block()
        for i, size in enumerate(sizes):
            requests.submit(i, size)
        fresh = requests.check_results()
        assert len(set(fresh)) > 1


class AnyInterleaving(RuleBasedStateMachine):
    paired: bool

    def __init__(self):
        super().__init__()
        self.requests = Requests(self.paired)

    @rule(
        first=st.integers(0, 30),
        count=st.integers(1, 25),
        seed=st.none() | st.integers(0, 2),
        num_samples=st.sampled_from([7, tiny.DRAWS, 30]),
    )
    def predict(self, first, count, seed, num_samples):
        self.requests.submit(first, count, seed, num_samples)

    @rule(first=st.integers(0, 30), count=st.integers(1, 25), seed=st.none() | st.integers(0, 2))
    def acquire(self, first, count, seed):
        self.requests.submit(first, count, seed, acquisition="bald")

    @precondition(lambda self: self.requests.blocked is None)
    @rule()
    def block(self):
        self.requests.block()

    @rule()
    def release(self):
        self.requests.release()

    @precondition(lambda self: self.requests.pending)
    @rule(data=st.data())
    def cancel(self, data):
        self.requests.cancel(data.draw(st.integers(0, len(self.requests.pending) - 1)))

    @rule()
    def check_results(self):
        self.requests.check_results()

    def teardown(self):
        try:
            self.requests.check_results()
        finally:
            self.requests.close()


class PairedInterleaving(AnyInterleaving):
    paired = True


class UnpairedInterleaving(AnyInterleaving):
    paired = False


BUDGET = settings(max_examples=15, stateful_step_count=12)
TestPaired = PairedInterleaving.TestCase
TestUnpaired = UnpairedInterleaving.TestCase
TestPaired.settings = TestUnpaired.settings = BUDGET
