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
            MODELS[paired] = tiny.loaded(tmp_path_factory.mktemp("tiny"), paired)
        yield


MODELS = {}


class HeldReservoir(Reservoir):
    def __init__(self, model):
        super().__init__(model, 0, threading.Event())
        self.waits, self.go_on = threading.Event(), threading.Event()

    def take(self, num_draws):
        self.waits.set()
        self.go_on.wait()
        return super().take(num_draws)


class Requests:
    def __init__(self, paired):
        self.model = MODELS[paired]
        self.loop = asyncio.new_event_loop()
        self.admission = Admission(threading.Event())
        self.admission.active_requests = 1000
        self.engine = Engine(self.admission, Metrics())
        self.served = self._served(Reservoir(self.model, 0, threading.Event()))
        self.asked, self.held = [], None

    def _served(self, reservoir):
        return ServedModel(
            self.model,
            reservoir,
            new_drift(self.model.calibration.rank_tables[tiny.DRAWS].statistic),
        )

    def ask(self, first, count, seed=None, num_samples=tiny.DRAWS, acquisition=None):
        x = ROWS[first : first + count]
        kind = EngineWork if acquisition is None else PoolWork
        job = kind(self.served, x, num_samples, seed, acquisition=acquisition)
        self.asked.append((job, self._begin(job)))

    def hold(self):
        reservoir = HeldReservoir(self.model)
        self.held = reservoir, self._begin(EngineWork(self._served(reservoir), ROWS[:1], 1, None))
        while not reservoir.waits.wait(0.001):
            self.loop.run_until_complete(asyncio.sleep(0))

    def let_go(self):
        if self.held is not None:
            reservoir, task = self.held
            reservoir.go_on.set()
            self.loop.run_until_complete(task)
            self.held = None

    def hang_up(self, i):
        """Give up waiting for a request."""
        self.asked.pop(i)[1].cancel()
        self.loop.run_until_complete(asyncio.sleep(0))

    def answers(self):
        self.let_go()
        for job, task in self.asked:
            answer = self.loop.run_until_complete(asyncio.wait_for(task, 60))
            assert job.seed in (None, job.draw_seed)
            if job.acquisition is not None:
                outputs, _ = self.model.runtime.run_set(job.x, self._draws(job, answer))
                scores = self.model.predictive.scores(self.model.predictive.sums(outputs))
                assert answer.scores.tobytes() == getattr(scores, job.acquisition).tobytes()
                continue
            received, alone = answer.predicted.prediction, self._alone(job, answer)
            assert received.scores.num_draws.tolist() == alone.scores.num_draws.tolist()
            assert received.scores.probabilities.tobytes() == alone.scores.probabilities.tobytes()
            assert received.scores.bald.tobytes() == alone.scores.bald.tobytes()
            assert received.p_values.p_value.tobytes() == alone.p_values.p_value.tobytes()
        fresh = [job.draw_seed for job, task in self.asked if job.seed is None]
        self.asked.clear()
        return fresh

    def _draws(self, job, answer):
        return self.model.runtime.draw_set(job.draw_seed, job.num_samples)

    def _alone(self, job, answer):
        return self.model.prediction(*self.model.runtime.run_set(job.x, self._draws(job, answer)))

    async def _compute(self, job):
        await self.engine.compute(job)
        return job

    def _begin(self, job):
        task = self.loop.create_task(self._compute(job))
        for _ in range(2):
            self.loop.run_until_complete(asyncio.sleep(0))
        return task

    def close(self):
        if self.held is not None:
            self.held[0].go_on.set()
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


def test_seeded_and_fresh_requests_that_wait_together_are_answered_as_alone(requests):
    requests.hold()
    for i, seed in enumerate([5, None, 6, 5, None]):
        requests.ask(i, 2, seed)
    requests.answers()


def test_the_rest_of_a_large_request_is_not_computed_under_the_draws_of_others(requests):
    large = 2 * part_rows(requests.served.model, tiny.DRAWS) + 1
    for sizes in ([large, 2, 3], [2, large, 3], [large, large, 1]):
        requests.hold()
        for i, size in enumerate(sizes):
            requests.ask(i, size)
        fresh = requests.answers()
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
        self.requests.ask(first, count, seed, num_samples)

    @rule(first=st.integers(0, 30), count=st.integers(1, 25), seed=st.none() | st.integers(0, 2))
    def acquire(self, first, count, seed):
        self.requests.ask(first, count, seed, acquisition="bald")

    @precondition(lambda self: self.requests.held is None)
    @rule()
    def hold(self):
        self.requests.hold()

    @rule()
    def let_go(self):
        self.requests.let_go()

    @precondition(lambda self: self.requests.asked)
    @rule(data=st.data())
    def hang_up(self, data):
        self.requests.hang_up(data.draw(st.integers(0, len(self.requests.asked) - 1)))

    @rule()
    def answers(self):
        self.requests.answers()

    def teardown(self):
        try:
            self.requests.answers()
        finally:
            self.requests.close()


class AnyInterleavingOfPaired(AnyInterleaving):
    paired = True


class AnyInterleavingOfUnpaired(AnyInterleaving):
    paired = False


BUDGET = settings(max_examples=15, stateful_step_count=12)
TestPaired = AnyInterleavingOfPaired.TestCase
TestUnpaired = AnyInterleavingOfUnpaired.TestCase
TestPaired.settings = TestUnpaired.settings = BUDGET
