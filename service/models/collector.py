"""Metrics of what is loaded, looked up when they are asked for."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from model_store.conformal.drift import EDGES
from service.models.watcher import Watcher
from service.telemetry.metrics import VERSION_LABELS


class LoadedCollector(Collector):
    """What is served, what is in memory and its drift, and what is broken."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.models = watcher.models

    def collect(self) -> Iterator[Metric]:
        models, watcher = self.models, self.watcher
        loaded = {served.key: served.drift for served in models.loaded()}
        reports = {key: drift.report() for key, drift in loaded.items()}

        def of_loaded(name: str, text: str, field: str) -> Metric:
            values = ((key, getattr(report, field)) for key, report in reports.items())
            return _gauge(name, text, VERSION_LABELS, values)

        ones = ((key, 1.0) for key in loaded)
        yield _gauge("dubito_loaded_version", "1 for each version in memory", VERSION_LABELS, ones)
        text = "1 for each version that cannot be served"
        broken = ((key, 1.0) for key in models.all_broken())
        yield _gauge("dubito_broken_version", text, VERSION_LABELS, broken)
        text, labels = "1 for each alias that is served", ("model", "alias", "version")
        yield _gauge("dubito_alias", text, labels, ((a, 1.0) for a in models.all_aliases()))
        text = "1 for each alias that does not serve what it names"
        troubles = ((alias, 1.0) for alias in [*watcher.troubles])
        yield _gauge("dubito_degraded_alias", text, ("model", "alias"), troubles)
        text = "When the whole store was last read, in seconds since 1970"
        yield _gauge("dubito_store_seen_timestamp_seconds", text, (), [((), watcher.seen)])
        text = "1 while the store can be reached, else 0"
        yield _gauge("dubito_store_reachable", text, (), [((), watcher.reachable)])
        text = "Share of p-values of .05 and less among the latest rows watched"
        yield of_loaded("dubito_flag_rate", text, "flag_rate")
        text = "Share of p-values of .05 and less on rows like the calibration data"
        yield of_loaded("dubito_expected_flag_rate", text, "expected_flag_rate")
        text = "Calibration rows that the flag's p-values are ranks among"
        yield of_loaded("dubito_calibration_rows", text, "calibration_rows")
        text = "The flag's p-values of rows watched"
        p_values = HistogramMetricFamily("dubito_flag_p_value", text, labels=VERSION_LABELS)
        for key, drift in loaded.items():
            own = drift.own_report()
            counts = np.cumsum(own.binned_rows).tolist()
            buckets = [*zip(map(str, EDGES.tolist()), counts, strict=True), ("+Inf", own.rows)]
            p_values.add_metric(key, buckets, own.p_value_sum)
        yield p_values
        yield of_loaded("dubito_drift_evidence_nats", "Evidence of drift", "evidence")
        yield of_loaded("dubito_drift_alarm", "1 once there was evidence enough", "alarm")


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float | None]],
) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for of_value, value in values:
        if value is not None:
            gauge.add_metric(of_value, float(value))
    return gauge
