"""Prometheus metrics."""

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, get_args

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
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from model_store.conformal.drift import EDGES
from model_store.state.jobs import ENDED, Kind
from model_store.state.labels import Accepted
from model_store.version import VERSION
from service.telemetry.logs import DROPPED

if TYPE_CHECKING:
    from service.models.watcher import Watcher

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
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "queue_seconds": ("Seconds that a request waited in the queue", SECONDS),
    "compute_seconds": ("Seconds to compute a micro-batch", SECONDS),
    "batch_rows": ("Rows per micro-batch", POWERS_OF_2),
    "batch_requests": ("Requests per micro-batch", POWERS_OF_2[:9]),
    "entropy": ("Entropy of predicted rows, in nats", NATS),
    "std": ("Predictive standard deviation of rows, in target units", TARGET_UNITS),
}
# Description and field of `DriftReport`
DRIFT_GAUGES = {
    "dubito_flag_rate": ("Share of p-values up to .05 among recent live rows", "flag_rate"),
    "dubito_expected_flag_rate": (
        "Share of p-values up to .05 expected without drift",
        "expected_flag_rate",
    ),
    "dubito_calibration_rows": ("Calibration rows of the flag", "calibration_rows"),
    "dubito_drift_evidence_nats": ("Evidence of drift", "evidence"),
    "dubito_drift_alarm": ("1 after the evidence reached the alarm level", "alarm"),
}
VERSION_LABELS = ("model", "version")
VersionKey = tuple[str, str]  # model and version


class Metrics:
    """The service's metrics. Thread-safe."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, registry=registry, namespace="dubito")
        gauge = partial(Gauge, registry=registry, namespace="dubito")
        histogram = partial(Histogram, registry=registry, namespace="dubito")
        self.requests = counter("requests", "Requests by route and status", ("route", "status"))
        self.failures = counter("failures", "Failed requests, by reason", ("route", "reason"))
        self.request_seconds = histogram(
            "request_seconds", "Seconds to answer", ("route",), buckets=SECONDS
        )
        self.queued_row_draws = gauge("queued_row_draws", "Queued or running rows x draws")
        self.queued_requests = gauge("queued_requests", "Queued or running requests")
        text = "Limit of queued or running rows x draws"
        self.max_queued_row_draws = gauge("max_queued_row_draws", text)
        self.ready = gauge("ready", "1 if the service can predict, otherwise 0")
        self.labels = counter("labels", "Labels received, by outcome", ("model", "outcome"))
        self.jobs = counter("jobs", "Finished jobs", ("kind", "state"))
        for kind, state in product(get_args(Kind), ENDED):  # so that rates count the first job
            self.jobs.labels(kind, state)
        self.jobs_running = gauge("jobs_running", "Running jobs")
        self.jobs_queued = gauge("jobs_queued", "Queued jobs")
        text = "1 if jobs and labels can be read and written, otherwise 0"
        self.state_usable = gauge("state_usable", text)
        self.state_usable.set(1)
        text = "Free share of the disk that holds the state"
        self.state_free_ratio = gauge("state_free_ratio", text)
        self.state_free_ratio.set(1)  # without state
        labels, text = ("version", "python", "onnxruntime"), "1, labelled with software versions"
        build = gauge("build_info", text, labels)
        build.labels(VERSION, platform.python_version(), onnxruntime.__version__).set(1)
        texts = COUNTERS.items()
        self._counters = {name: counter(name, text, VERSION_LABELS) for name, text in texts}
        self._histograms = {
            name: histogram(name, text, VERSION_LABELS, buckets=buckets)
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


class LoadedCollector(Collector):
    """Metrics of the store and of loaded models."""

    def __init__(self, watcher: "Watcher") -> None:
        self.watcher = watcher

    def collect(self) -> Iterator[Metric]:
        watcher, models = self.watcher, self.watcher.models
        drifts = {loaded.key: loaded.drift for loaded in models.loaded()}
        reports = {key: drift.report() for key, drift in drifts.items()}
        yield _gauge("dubito_loaded_version", "1 for each loaded version", VERSION_LABELS, drifts)
        broken = [(name, version) for name in models.names() for version in models.errors(name)]
        text = "1 for each version that cannot be served"
        yield _gauge("dubito_broken_version", text, VERSION_LABELS, broken)
        aliases = [(name, *a) for name in models.names() for a in models.aliases(name).items()]
        text = "1 for each served alias"
        yield _gauge("dubito_alias", text, ("model", "alias", "version"), aliases)
        text = "1 for each alias that does not serve its version"
        yield _gauge("dubito_degraded_alias", text, ("model", "alias"), [*watcher.problems])
        text = "Time of the last complete read of the store, in seconds since 1970"
        yield GaugeMetricFamily("dubito_store_seen_timestamp_seconds", text, watcher.last_read)
        text = "1 if the store is reachable, otherwise 0"
        yield GaugeMetricFamily("dubito_store_reachable", text, float(watcher.is_reachable))
        for name, (text, field) in DRIFT_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=VERSION_LABELS)
            for key, report in reports.items():
                value = getattr(report, field)
                if value is not None:
                    gauge.add_metric(key, float(value))
            yield gauge
        text = "P-values of the flag for live rows"
        p_values = HistogramMetricFamily("dubito_flag_p_value", text, labels=VERSION_LABELS)
        for key, report in reports.items():
            counts = np.cumsum(report.binned_rows).tolist()
            buckets = [*zip(map(str, EDGES.tolist()), counts, strict=True), ("+Inf", report.rows)]
            p_values.add_metric(key, buckets, report.p_value_sum)
        yield p_values


def _gauge(name: str, text: str, labels: Sequence[str], members: Iterable[Sequence[str]]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for member in members:
        gauge.add_metric(member, 1.0)
    return gauge
