"""Metrics of loaded models."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from model_store.conformal.drift import EDGES
from service.models.watcher import Watcher
from service.telemetry.metrics import VERSION_LABELS


class LoadedCollector(Collector):
    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.models = watcher.models

    def collect(self) -> Iterator[Metric]:
        models, watcher = self.models, self.watcher
        drifts = {loaded.key: loaded.drift for loaded in models.loaded()}
        reports = {key: drift.report() for key, drift in drifts.items()}

        def drift_gauge(name: str, text: str, field: str) -> Metric:
            values = ((key, getattr(report, field)) for key, report in reports.items())
            return _gauge(name, text, VERSION_LABELS, values)

        versions = ((key, 1.0) for key in drifts)
        yield _gauge(
            "dubito_loaded_version", "1 for each version in memory", VERSION_LABELS, versions
        )
        text = "1 for each version that cannot be served"
        broken = ((key, 1.0) for key in models.broken_versions())
        yield _gauge("dubito_broken_version", text, VERSION_LABELS, broken)
        text, labels = "1 for each alias that is served", ("model", "alias", "version")
        yield _gauge("dubito_alias", text, labels, ((a, 1.0) for a in models.all_aliases()))
        text = "1 for each alias that does not serve its version"
        problems = ((alias, 1.0) for alias in [*watcher.problems])
        yield _gauge("dubito_degraded_alias", text, ("model", "alias"), problems)
        text = "Time of the last complete read of the store, in seconds since 1970"
        yield _gauge("dubito_store_seen_timestamp_seconds", text, (), [((), watcher.last_read)])
        text = "1 while the store is reachable, otherwise 0"
        yield _gauge("dubito_store_reachable", text, (), [((), watcher.is_reachable)])
        text = "Share of p-values up to .05 among the latest live rows"
        yield drift_gauge("dubito_flag_rate", text, "flag_rate")
        text = "Share of p-values up to .05 expected without drift"
        yield drift_gauge("dubito_expected_flag_rate", text, "expected_flag_rate")
        text = "Calibration rows behind the flag's p-values"
        yield drift_gauge("dubito_calibration_rows", text, "calibration_rows")
        text = "The flag's p-values of live rows"
        p_values = HistogramMetricFamily("dubito_flag_p_value", text, labels=VERSION_LABELS)
        for key, drift in drifts.items():
            report = drift.local_report()
            counts = np.cumsum(report.binned_rows).tolist()
            buckets = [*zip(map(str, EDGES.tolist()), counts, strict=True), ("+Inf", report.rows)]
            p_values.add_metric(key, buckets, report.p_value_sum)
        yield p_values
        yield drift_gauge("dubito_drift_evidence_nats", "Evidence of drift", "evidence")
        yield drift_gauge("dubito_drift_alarm", "1 after the evidence reached the alarm", "alarm")


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float | None]],
) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        if value is not None:
            gauge.add_metric(label_values, float(value))
    return gauge
