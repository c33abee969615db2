"""The engine: the way from rows to predictions and pool scores.

Jobs wait in a queue, in which clients have equal shares of rows x draws. A worker thread takes the
job whose turn it is, and with it others of the same model and number of draws that fit into a
*micro-batch*: one product of rows and draws, under one fresh draw set, so that draws are made once
for many requests. An idle server has no queue, and nobody waits for company; a busy one waits a
moment, since each micro-batch needs draws of its own. A job that is larger than a micro-batch, a
pool among them, is computed in parts, between which others get their turn.
"""

import asyncio
import math
import threading
import time

import numpy as np
from jaxtyping import Float32

from model_store.acquisition.choice import MOST_JOINTLY
from model_store.acquisition.scoring import pool_candidates, pool_scores, race_scores
from model_store.inference.model import Model
from model_store.inference.runtime import HELD_BYTES, DrawSet
from model_store.scores.sums import GROUPS
from service.engine.admission import Admission
from service.engine.jobs import Job, MicroBatch, Part, PoolScores, Predicted, Progress, finish
from service.errors import PastDeadline
from service.server.shares import Shares
from service.telemetry.metrics import Metrics

SMALL_ROW_DRAWS = 200  # a millisecond of arithmetic
BATCH_ROW_DRAWS = 6_400  # rows x draws of a micro-batch
PARTS_FOR_OTHERS = 4  # that such a part of a large job is divided in where others wait or may come
# The same where draws are too large to hold, and made again for each part of a job
REMADE_ROW_DRAWS = 100_000
SUMMED_NUMBERS = 4_000_000  # that the draws of a micro-batch or part are summed in: 32 MB
ENCODED_S = 0.25  # that the encoder takes for the rows of a micro-batch or part, at most
LEAST_AT_ONCE = 16  # requests that a micro-batch may take, however few are about


class Engine:
    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission = admission
        self.metrics = metrics
        self._queue: Shares[Progress] = Shares()
        self._something = threading.Condition()
        self._closed = False
        self._at_once = LEAST_AT_ONCE  # requests that a micro-batch may take, of those about
        self._gathered = 0  # requests in the queue that are waited for, until `_gathering_until`
        self._gathering_until = -math.inf
        self._worker = threading.Thread(target=self._work, name="model", daemon=True)
        self._worker.start()

    def close(self) -> None:
        with self._something:
            self._closed = True
            self._something.notify()
        self._worker.join()

    async def predict(self, job: Job) -> Predicted:
        """Return the prediction of a job without an acquisition.

        Raises:
            PastDeadline: if it is not computed by its deadline.
            ClientDisconnect: if the client hangs up before.
        """
        return (await self._computed(job)).predicted()

    async def score(self, job: Job) -> PoolScores:
        """Return what a pool is ranked by, given a job with an acquisition; otherwise as
        `predict`."""
        return (await self._computed(job)).pool_scores()

    async def _computed(self, job: Job) -> Progress:
        """Compute a job: here where that is quicker than the way to the worker and back."""
        progress = Progress(job)
        is_paired = job.served.model.manifest.noise.paired  # else a draw holds every weight
        is_small = self.admission.row_draws <= SMALL_ROW_DRAWS and job.served.model.encoder is None
        if is_small and job.seed is None and is_paired:
            progress.queued = time.perf_counter()
            await asyncio.sleep(0)  # requests that come together are computed together
            if self.admission.in_work == 1 and job.served.reservoir.has_ready:
                if time.monotonic() > job.call.deadline:
                    raise PastDeadline
                self._compute([progress])
                return progress
        progress.future = asyncio.get_running_loop().create_future()
        self._put(progress)
        await job.call.wait(progress.future)
        return progress

    def _put(self, progress: Progress) -> None:
        progress.queued = time.perf_counter()
        cost = min(progress.rows_left, self._most_rows(progress)) * progress.job.row_draws
        with self._something:
            self._queue.put(progress, progress.job.call.client, cost)
            if len(self._queue) >= self._gathered:
                self._something.notify()

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Compute what is next, and hold nothing of it; False once closed and empty."""
        with self._something:
            self._await_work()
            if self._closed and not self._queue:
                return False
            batch = self._next()
        if batch:
            begun = time.monotonic()
            self._run(batch)
            ended = time.monotonic()
            # A draw set takes as long as several rows, so most of those about share the next one,
            # while the others are read. Nobody waits for them longer than the last one took.
            most = 3 * (len(batch) + len(self._queue)) // 4
            self._gathered, self._at_once = most, max(LEAST_AT_ONCE, most)
            self._gathering_until = 2 * ended - begun
        return True

    def _await_work(self) -> None:
        """Wait for work; right after a micro-batch for a moment also for company."""
        while len(self._queue) < self._gathered and not self._closed:
            left = self._gathering_until - time.monotonic()
            if left <= 0:
                break
            self._something.wait(left)
        self._gathered = 0
        while not self._queue and not self._closed:
            self._something.wait()

    def _next(self) -> list[Progress]:
        """Take what is computed next: a part of a large job, or a micro-batch.

        A micro-batch takes no client's account further beyond the smallest than one part does.
        """
        turns, over = self._queue.turns(), []
        while turns and turns[0].work.is_over():
            over.append(turns.pop(0))
        if not turns:
            self._queue.take([], over)
            return []
        first = turns[0].work
        taken, rows, seeded = turns[:1], first.rows_left, first.job.seed is not None
        most = part_rows(first.job.served.model, first.job.num_samples)
        most_seeded = min(most, _own_rows(first.job))
        furthest = self._queue.min_account + most * first.job.row_draws
        used = {turns[0].client: turns[0].after}
        for piece in turns[1:]:
            if rows >= most or len(taken) >= self._at_once:
                break
            other = piece.work
            if not first.job.goes_with(other.job) or first.rows_done or other.rows_done:
                continue
            after = used.get(piece.client, self._queue.used(piece.client)) + piece.cost
            if after > furthest:
                continue
            any_seeded = seeded or other.job.seed is not None
            if rows + other.rows_left > (most_seeded if any_seeded else most):
                continue
            if other.is_over():
                over.append(piece)
            else:
                taken.append(piece)
                used[piece.client] = after
                rows, seeded = rows + other.rows_left, any_seeded
        self._queue.take(taken, over)
        return [piece.work for piece in taken]

    def _run(self, batch: list[Progress]) -> None:
        try:
            self._compute(batch)
            done = [progress for progress in batch if not progress.rows_left]
            for progress in done:
                if len(progress.parts) > 1:
                    progress.gather()
        except Exception as error:
            finish(batch, error)
            return
        for progress in batch:
            if progress.rows_left:
                self._put(progress)
        finish(done)

    def _compute(self, batch: list[Progress]) -> None:
        begun = time.perf_counter()
        job = batch[0].job
        sets = _drawn(batch)
        most = self._most_rows(batch[0])
        parts = [
            progress.job.x[progress.rows_done : progress.rows_done + most] for progress in batch
        ]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        is_pool = job.acquisition is not None
        computed = _pool_part(job, x, sets[0]) if is_pool else _predicted(batch, parts, x, sets)
        ended = time.perf_counter()
        for progress, rows, part in zip(batch, parts, computed, strict=True):
            progress.take(part, len(rows), begun, ended)
        self._count(batch, len(x), begun, ended)

    def _most_rows(self, progress: Progress) -> int:
        """Return how many rows of a job are computed at once: fewer where others wait."""
        job = progress.job
        most = part_rows(job.served.model, job.num_samples)
        is_held = job.num_samples * job.served.model.runtime.draw_bytes <= HELD_BYTES
        if len(job.x) > most and self.admission.in_work > 1 and is_held:
            return -(-most // PARTS_FOR_OTHERS)
        return most

    def _count(self, batch: list[Progress], rows: int, begun: float, ended: float) -> None:
        served, draws = batch[0].job.served, batch[0].job.num_samples
        self.admission.note(rows * batch[0].job.row_draws, ended - begun)
        queue_s = [begun - progress.phases[-1].queued for progress in batch]
        new = [progress for progress in batch if len(progress.phases) == 1]
        made = len({id(progress.draws) for progress in new}) * draws
        self.metrics.count_batch(served.key, rows, queue_s, ended - begun)
        if new:
            self.metrics.count_draws(served.key, made, len(new) * draws - made)


def part_rows(model: Model, num_samples: int) -> int:
    """Return how many rows a micro-batch, or a part of a large job, has."""
    is_held = num_samples * model.runtime.draw_bytes <= HELD_BYTES
    summed = SUMMED_NUMBERS // (GROUPS * model.manifest.output_size)
    rows = min((BATCH_ROW_DRAWS if is_held else REMADE_ROW_DRAWS) // num_samples, summed)
    encoder = model.encoder
    return max(1, rows if encoder is None else min(rows, int(ENCODED_S / encoder.row_s)))


def kept_bytes(job: Job, rows: int | None = None) -> int:
    """Return about how many bytes are kept of a job, or of one like it of `rows`, until it is
    answered: results in parts and then whole, and of a job in several parts the draws."""
    model, rows = job.served.model, len(job.x) if rows is None else rows
    set_bytes = job.num_samples * model.runtime.draw_bytes
    is_kept = rows > part_rows(model, job.num_samples) and set_bytes <= HELD_BYTES
    draws = set_bytes if is_kept else 0
    if job.acquisition is not None:
        return draws + (0 if job.candidates is None else joint_bytes(job)) + 32 * rows
    samples = 8 * job.num_samples if job.keep_samples else 0
    return draws + rows * (400 + model.manifest.output_size * (96 + samples))


def joint_bytes(job: Job) -> int:
    """Return about how many bytes the candidates of a joint score, and the search, take."""
    assert job.acquisition is not None
    assert job.candidates is not None
    model, draws = job.served.model, job.num_samples
    joint, outputs = model.predictive.joint_scores[job.acquisition], model.manifest.output_size
    kept = job.candidates * (48 + 4 * joint.numbers(draws, outputs))
    return kept + joint.work_bytes(draws, outputs, min(job.candidates, MOST_JOINTLY))


def _own_rows(job: Job) -> int:
    """Return how many rows fit in one product, each under draws of its own; 0 if none can."""
    runtime = job.served.model.runtime
    return HELD_BYTES // (job.num_samples * runtime.draw_bytes) if runtime.paired else 0


def _drawn(batch: list[Progress]) -> list[DrawSet]:
    """Return each job's draws: those of its seed, or a fresh set that all new jobs share."""
    fresh: DrawSet | None = None
    sets = []
    for progress in batch:
        job = progress.job
        if progress.draws is None:
            if job.seed is None:
                progress.draws = fresh = fresh or job.served.reservoir.take(job.num_samples)
            else:
                progress.draws = job.served.model.runtime.draw_set(job.seed, job.num_samples)
        sets.append(progress.draws)
    return sets


def _predicted(
    batch: list[Progress],
    parts: list[Float32[np.ndarray, "n I"]],
    x: Float32[np.ndarray, "N I"],
    sets: list[DrawSet],
) -> list[Part]:
    job = batch[0].job
    model = job.served.model
    known, density = model.runtime.before_draws(x)
    if all(draws is sets[0] for draws in sets):
        outputs = model.runtime.after_draw_set(known, sets[0])
    else:
        theta = _theta_of_rows(sets, [len(part) for part in parts])
        outputs = model.runtime.after_draws(known, theta)
    micro_batch = MicroBatch(model.prediction(outputs, density, job.priors))
    computed, start = [], 0
    for progress, part in zip(batch, parts, strict=True):
        here = slice(start, start + len(part))
        samples = None
        if progress.job.keep_samples:
            said = outputs[:, here]
            said = (
                said if job.priors is None else model.shifted(said, job.priors).astype(np.float32)
            )
            samples = model.predictive.samples(said)
        computed.append(Part(micro_batch, here, samples))
        start = here.stop
    return computed


def _pool_part(job: Job, x: Float32[np.ndarray, "N I"], draws: DrawSet) -> list[Part]:
    assert job.acquisition is not None
    asked = job.served.model, x, draws, job.acquisition, job.priors
    if job.candidates is not None:
        candidates = pool_candidates(*asked)
        return [Part(scores=candidates.gain, candidates=candidates)]
    if job.is_race:
        scores, errors = race_scores(*asked)
        return [Part(scores=scores, errors=errors)]
    return [Part(scores=pool_scores(*asked))]


def _theta_of_rows(sets: list[DrawSet], rows: list[int]) -> Float32[np.ndarray, "K N D"]:
    # A set whose theta is too large to hold is alone in its micro-batch.
    thetas = [draws.theta for draws in sets if draws.theta is not None]
    repeated = [np.repeat(theta[:, None], n, axis=1) for theta, n in zip(thetas, rows, strict=True)]
    return np.concatenate(repeated, axis=1)
