"""Metrics for loaded models."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from model_store.conformal.drift import EDGES
from service.models.watcher import Watcher
from service.telemetry.metrics import VERSION_LABELS

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


class LoadedCollector(Collector):
    def __init__(self, watcher: Watcher) -> None:
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
