"""Predictions: the way from rows to scores. One worker thread runs the models; arithmetic within it is threaded."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Float32, Float64

from model_store.model import Prediction
from model_store.outputs import samples_of, scores_of, sums_of
from model_store.runtime import DrawSet
from service.acquisition import acquisition_scores
from service.models import Served
from service.problems import Overloaded, TooLarge
from service.schemas import Envelope
from service.settings import Settings

T = TypeVar("T")

REST_S = 0.002  # after an answer, so that idle work does not begin before the answer is sent
SMALL_ROW_DRAWS = 200  # a millisecond of arithmetic
CHUNK_ROW_DRAWS = 100_000  # rows x draws that are scored at once
POOL_CHUNK_ROWS = 512  # rows of a pool between which other requests get their turn


@dataclass(frozen=True)
class Predicted:
    """A prediction, the draws behind it, and, where asked for, what each draw says: `outputs.samples_of`."""

    prediction: Prediction
    seed: int
    num_samples: int
    samples: Float32[np.ndarray, "K N C"] | None


class Predictor:
    """Runs models for requests, within a budget of work that may wait."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.row_draws = 0  # waiting or in work
        self.in_work = 0  # requests
        self.idle = threading.Event()  # set while nothing is
        self.idle.set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")

    def close(self) -> None:
        """End the threads, after what they are at."""
        self._worker.shutdown()
        self._loader.shutdown()

    async def load(self, work: Callable[[], T]) -> T:
        """Run work that reads files, away from the event loop and from predictions."""
        return await asyncio.get_running_loop().run_in_executor(self._loader, work)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run work on the worker thread, in its turn."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def is_at_once(self, served: Served, envelope: Envelope) -> bool:
        """Whether an admitted request takes less time than handing it to the worker thread and back is worth.

        It does when it is small, alone, and its draws are made.
        """
        alone = self.in_work == 1 and self.row_draws <= SMALL_ROW_DRAWS
        small = served.model.manifest.noise.paired  # else a draw holds every weight
        return alone and small and envelope.seed is None and served.reservoir.has_ready

    @contextmanager
    def admitted(self, rows: int, draws: int, rows_at_once: int | None = None) -> Iterator[None]:
        """Hold a place for a request's work, of which `rows_at_once` rows wait or are in work at a time.

        Raises:
            TooLarge: if the request alone is more than one may be.
            Overloaded: if too much is waiting already; a lone request is always let in.
        """
        if rows * draws > self.settings.max_row_draws:
            raise TooLarge(f"rows x num_samples: expected at most {self.settings.max_row_draws}, got {rows * draws}")
        work = min(rows, rows_at_once or rows) * draws
        if self.row_draws > 0 and self.row_draws + work > self.settings.max_queued_row_draws:
            raise Overloaded(retry_after_s=1)
        self.row_draws += work
        self.in_work += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.row_draws -= work
            self.in_work -= 1
            asyncio.get_running_loop().call_later(REST_S, self._rest)

    def _rest(self) -> None:
        if self.row_draws == 0:
            self.idle.set()


def take_draws(served: Served, num_samples: int, seed: int | None) -> DrawSet:
    """Return the draws of a request: exactly those of its seed, or fresh ones."""
    return served.reservoir.take(num_samples) if seed is None else served.model.runtime.draw_set(seed, num_samples)


def predict(
    served: Served, x: Float32[np.ndarray, "N I"], num_samples: int, seed: int | None, keep_samples: bool
) -> Predicted:
    """Predict rows under one draw set, in chunks of rows, so that memory is bounded by the answer's size."""
    draws = take_draws(served, num_samples, seed)
    rows = max(1, CHUNK_ROW_DRAWS // num_samples)
    predictions, samples = [], []
    for start in range(0, len(x), rows):
        outputs, density = served.model.runtime.run_set(x[start : start + rows], draws)
        predictions.append(served.model.judge(outputs, density))
        if keep_samples:
            samples.append(samples_of(served.model.manifest.task, outputs))
    return Predicted(
        Prediction.concatenate(predictions),
        draws.seed,
        num_samples,
        np.concatenate(samples, axis=1) if keep_samples else None,
    )


def pool_scores(
    served: Served, x: Float32[np.ndarray, "N I"], draws: DrawSet, score: str
) -> Float64[np.ndarray, "N"]:
    """Return one acquisition score of pool rows, all under the same draws; variances are in squared target units."""
    outputs, _ = served.model.runtime.run_set(x, draws)
    task = served.model.manifest.task
    return acquisition_scores(scores_of(task, sums_of(task, outputs), standard_errors=False), score)
