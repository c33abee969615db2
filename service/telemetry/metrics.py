"""Prometheus metrics."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import get_args

import numpy as np
import onnxruntime
from jaxtyping import Float64
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics import MetricWrapperBase

from model_store.state.jobs import ENDED, Kind
from model_store.state.labels import Accepted
from model_store.version import read_version
from service.telemetry.logs import DROPPED

disable_created_metrics()  # type: ignore[no-untyped-call]

# Upper ends of buckets, inclusive.
# fmt: off
SECONDS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
)
# fmt: on
NATS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 7)
TARGET_UNITS = tuple(float(f"{10.0 ** (i / 2):.2g}") for i in range(-8, 9))  # 1e-4 to 1e4
POWERS_OF_2 = tuple(2**i for i in range(13))

COUNTERS = {
    "rows": "Rows predicted",
    "flags": "Rows flagged",
    "pool_rows": "Rows ranked",
    "acquired_rows": "Rows acquired for labelling",
    "control_rows": "Control rows among the acquired rows",
    "draws": "Posterior draws used; rows of a request share their draws",
    "draws_made": "Posterior draws computed",
    "draws_reused": "Posterior draws shared with another request",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "queue_seconds": ("Seconds that a request waited in the queue", SECONDS),
    "compute_seconds": ("Seconds to compute a micro-batch", SECONDS),
    "batch_rows": ("Rows per micro-batch", POWERS_OF_2),
    "batch_requests": ("Requests per micro-batch", POWERS_OF_2[:9]),
    "entropy": ("Entropy of predicted rows, in nats", NATS),
    "std": ("Predictive standard deviation of rows, in target units", TARGET_UNITS),
}
KINDS = get_args(Kind)
BUILD = ("version", "python", "onnxruntime")
VERSION_LABELS = ("model", "version")
VersionKey = tuple[str, str]  # model and version


class Metrics:
    """The service's metrics. Thread-safe."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "dubito_requests", "Requests by route and status", ("route", "status")
        )
        self.failures = counter(
            "dubito_failures", "Failed requests, by reason", ("route", "reason")
        )
        self.request_seconds = histogram(
            "dubito_request_seconds", "Seconds to answer", ("route",), buckets=SECONDS
        )
        self.queued_row_draws = gauge("dubito_queued_row_draws", "Queued or running rows x draws")
        self.queued_requests = gauge("dubito_queued_requests", "Queued or running requests")
        self.max_queued_row_draws = gauge(
            "dubito_max_queued_row_draws", "Limit of queued or running rows x draws"
        )
        self.ready = gauge("dubito_ready", "1 if the service can predict, otherwise 0")
        self.labels = counter("dubito_labels", "Labels received, by outcome", ("model", "outcome"))
        self.jobs = counter("dubito_jobs", "Finished jobs", ("kind", "state"))
        for kind, state in product(KINDS, ENDED):  # so that rates count the first job
            self.jobs.labels(kind, state)
        self.jobs_running = gauge("dubito_jobs_running", "Running jobs")
        self.jobs_queued = gauge("dubito_jobs_queued", "Queued jobs")
        self.state_usable = gauge(
            "dubito_state_usable", "1 if jobs and labels can be read and written, otherwise 0"
        )
        self.state_usable.set(1)
        self.state_free_ratio = gauge(
            "dubito_state_free_ratio", "Free share of the disk that holds the state"
        )
        self.state_free_ratio.set(1)  # without state
        build = gauge("dubito_build_info", "1, labelled with versions of the software", BUILD)
        build.labels(read_version(), platform.python_version(), onnxruntime.__version__).set(1)
        self._counters = {
            name: counter(f"dubito_{name}", text, VERSION_LABELS) for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: histogram(f"dubito_{name}", text, VERSION_LABELS, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        registry.register(DROPPED)
        ProcessCollector(registry=registry)

    def count_request(
        self, route: str, status: int | None, reason: str | None, seconds: float
    ) -> None:
        """Count a request. The status is None if the client disconnected."""
        self.requests.labels(route, "none" if status is None else str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)
        if reason is not None:
            self.failures.labels(route, reason).inc()

    def count_prediction(
        self, key: VersionKey, name: str, values: Float64[np.ndarray, "N"], draws: int, flags: int
    ) -> None:
        self.count(key, rows=len(values), draws=draws, flags=flags)
        self._observe(key, name, *values[np.isfinite(values)].tolist())

    def count_labels(self, model: str, accepted: Accepted) -> None:
        for outcome, count in asdict(accepted).items():
            self.labels.labels(model, outcome).inc(count)

    def count_batch(
        self, key: VersionKey, rows: int, queue_s: Sequence[float], compute_s: float
    ) -> None:
        self._observe(key, "queue_seconds", *queue_s)
        self._observe(key, "compute_seconds", compute_s)
        self._observe(key, "batch_rows", rows)
        self._observe(key, "batch_requests", len(queue_s))

    def count(self, key: VersionKey, **counts: int) -> None:
        """Increase a version's counters."""
        for name, count in counts.items():
            self._counters[name].labels(*key).inc(count)

    def _observe(self, key: VersionKey, name: str, *values: float) -> None:
        histogram = self._histograms[name].labels(*key)
        for value in values:
            histogram.observe(value)

    def retain(self, keys: set[VersionKey]) -> None:
        """Remove all series except those of the given versions and their models."""
        models = {model for model, _ in keys}
        for metric in (*self._counters.values(), *self._histograms.values()):
            for key in _label_values(metric, VERSION_LABELS) - keys:
                metric.remove(*key)
        for model, outcome in _label_values(self.labels, ("model", "outcome")):
            if model not in models:
                self.labels.remove(model, outcome)


def _label_values(metric: MetricWrapperBase, names: Sequence[str]) -> set[tuple[str, ...]]:
    samples = (sample for family in metric.collect() for sample in family.samples)
    return {tuple(sample.labels[name] for name in names) for sample in samples}
