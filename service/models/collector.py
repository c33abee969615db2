"""Metrics of what is loaded, looked up when they are asked for."""

from collections.abc import Iterator

import numpy as np
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from model_store.conformal.drift import EDGES
from service.models.watcher import Watcher
from service.telemetry.metrics import OF_MODEL


class LoadedCollector(Collector):
    """What is served, what is in memory and its drift, and what is broken."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.models = watcher.models

    def collect(self) -> Iterator[Metric]:
        """Yield what is served, loaded and broken; the flag's rate and p-values; evidence and alarm
        of drift."""
        loaded = GaugeMetricFamily(
            "dubito_loaded_version", "1 for each version in memory", labels=OF_MODEL
        )
        broken = GaugeMetricFamily(
            "dubito_broken_version", "1 for each version that cannot be served", labels=OF_MODEL
        )
        aliases = GaugeMetricFamily(
            "dubito_alias", "1 for each alias that is served", labels=("model", "alias", "version")
        )
        seen = GaugeMetricFamily(
            "dubito_store_seen_timestamp_seconds",
            "When the whole store was last read, in seconds since 1970",
        )
        reachable = GaugeMetricFamily(
            "dubito_store_reachable", "1 while the store can be reached, else 0"
        )
        expected = GaugeMetricFamily(
            "dubito_expected_flag_rate",
            "Share of p-values of .05 and less on rows like the calibration data",
            labels=OF_MODEL,
        )
        calibration = GaugeMetricFamily(
            "dubito_calibration_rows",
            "Calibration rows that the flag's p-values are ranks among",
            labels=OF_MODEL,
        )
        flag_rate = GaugeMetricFamily(
            "dubito_flag_rate",
            "Share of p-values of .05 and less among the latest rows watched",
            labels=OF_MODEL,
        )
        p_values = HistogramMetricFamily(
            "dubito_flag_p_value", "The flag's p-values of rows watched", labels=OF_MODEL
        )
        evidence = GaugeMetricFamily(
            "dubito_drift_evidence_nats", "Evidence of drift", labels=OF_MODEL
        )
        alarm = GaugeMetricFamily(
            "dubito_drift_alarm", "1 once there was evidence enough", labels=OF_MODEL
        )
        for served in self.models.loaded():
            of_version, report, own = (
                (served.name, served.version),
                served.drift.report(),
                served.drift.own_report(),
            )
            loaded.add_metric(of_version, 1.0)
            if report.flag_rate is not None:
                flag_rate.add_metric(of_version, report.flag_rate)
            counts = np.cumsum(own.binned_rows).tolist()
            buckets = [*zip(map(str, EDGES.tolist()), counts, strict=True), ("+Inf", own.rows)]
            p_values.add_metric(of_version, buckets, own.p_value_sum)
            expected.add_metric(of_version, report.expected_flag_rate)
            calibration.add_metric(of_version, report.calibration_rows)
            evidence.add_metric(of_version, report.evidence)
            alarm.add_metric(of_version, float(report.alarm))
        for version in self.models.all_broken():
            broken.add_metric(version, 1.0)
        for alias in self.models.all_aliases():
            aliases.add_metric(alias, 1.0)
        seen.add_metric((), self.watcher.seen)
        reachable.add_metric((), float(self.watcher.reachable))
        yield from (
            loaded,
            broken,
            aliases,
            seen,
            reachable,
            flag_rate,
            expected,
            calibration,
            p_values,
            evidence,
            alarm,
        )
