"""Prometheus metrics, and the middleware that counts requests."""

import time
from collections.abc import Iterator
from functools import cache

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.drift import EDGES
from service.models import Models

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The service's metrics, in a registry of its own."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(DriftCollector(models))
        of_request, of_model = ("route", "status"), ("model", "version")
        self.requests = self._counter("dubito_requests", "Requests by route and status", of_request)
        self.request_seconds = Histogram(
            "dubito_request_seconds", "Time to answer", ("route",), buckets=SECONDS, registry=self.registry
        )
        self.rows = self._counter("dubito_rows", "Rows predicted or ranked", of_model)
        self.draws = self._counter("dubito_draws", "Posterior draws used", of_model)
        self.flags = self._counter("dubito_flags", "Rows flagged", of_model)
        self.queued_row_draws = Gauge(
            "dubito_queued_row_draws", "Rows x draws waiting or in work", registry=self.registry
        )

        self.of_model = cache(self._of_model)  # looking labels up takes longer than counting
        self.of_route = cache(self._of_route)

    def _of_model(self, name: str, version: str) -> tuple[Counter, Counter, Counter]:
        """Return a version's counters of rows, draws and flags."""
        return self.rows.labels(name, version), self.draws.labels(name, version), self.flags.labels(name, version)

    def _of_route(self, route: str, status: str) -> tuple[Counter, Histogram]:
        """Return a route's counter of requests with a status, and its histogram of seconds."""
        return self.requests.labels(route, status), self.request_seconds.labels(route)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


class DriftCollector(Collector):
    """The drift of every version in memory, looked up when metrics are asked for."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the p-values' histogram, the evidence of drift and whether it is an alarm."""
        labels = ("model", "version")
        p_values = HistogramMetricFamily("dubito_flag_p_value", "The flag's p-values of rows watched", labels=labels)
        evidence = GaugeMetricFamily("dubito_drift_evidence_nats", "Evidence of drift", labels=labels)
        alarm = GaugeMetricFamily("dubito_drift_alarm", "1 once there was evidence enough", labels=labels)
        for served in self.models.loaded():
            report, of_version = served.drift.report(), (served.name, served.version)
            counts = np.cumsum(report.binned_rows).tolist()
            buckets = [*zip(map(str, EDGES.tolist()), counts, strict=True), ("+Inf", report.rows)]
            p_values.add_metric(of_version, buckets, report.p_value_sum)
            evidence.add_metric(of_version, report.evidence)
            alarm.add_metric(of_version, float(report.alarm))
        yield from (p_values, evidence, alarm)


class CountRequests:
    """Middleware that counts requests and times them, by route (never by path: those are without bound)."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = "none"  # the client went away before an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except ClientDisconnect:  # nobody is left to answer
            pass
        except Exception:
            status = "500"  # what the server answers further out
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            requests, seconds = self.metrics.of_route(route, status)
            requests.inc()
            seconds.observe(time.perf_counter() - begun)
