"""State that a cluster's replicas share through a named Ray actor.

The state is in memory. If its node is lost, Ray restarts the actor without it: drift detection
starts over, which is logged, and metrics return after a few seconds.
"""

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from service.models.drift import Drift, DriftReport, DriftTarget, LiveRows

logger = logging.getLogger("dubito")

NAME, NAMESPACE = "dubito-shared-state", "dubito"
TIMEOUT_S = 5.0  # per call to the actor
MAX_AGE_S = 20.0  # of a replica's metrics


class StateActor:
    def __init__(self) -> None:
        self._start_ns = time.time_ns()  # identifies this start of the actor
        self._metrics: dict[str, tuple[float, bytes]] = {}
        self._drifts: dict[DriftTarget, Drift] = {}

    def put_metrics(self, name: str, page: bytes) -> int:
        self._metrics[name] = time.monotonic(), page
        return self._start_ns

    def metrics(self) -> dict[str, bytes]:
        oldest = time.monotonic() - MAX_AGE_S
        self._metrics = {name: page for name, page in self._metrics.items() if page[0] > oldest}
        return {name: page for name, (_, page) in self._metrics.items()}

    def take(self, target: DriftTarget, rows: LiveRows) -> None:
        self._drift(target).take(rows)

    def report(self, target: DriftTarget) -> DriftReport:
        return self._drift(target).report()

    def reset(self, target: DriftTarget) -> None:
        self._drift(target).reset()

    def _drift(self, target: DriftTarget) -> Drift:
        drift = self._drifts.get(target)
        # A new version may have the number of a deleted one.
        if drift is None or (drift.target.gaps != target.gaps).any():
            drift = self._drifts[target] = Drift(target)
        return drift


class RayBackend:
    update_s = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor = (
            ray.remote(StateActor)
            .options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
            )
            .remote()
        )
        self._start_ns: int | None = None  # of the actor

    def put_metrics(self, page: bytes) -> None:
        start_ns: int = self._call("put_metrics", self.name, page)
        if self._start_ns not in (None, start_ns):
            logger.warning("the cluster's shared state was lost: drift detection starts over")
        self._start_ns = start_ns

    def metrics(self) -> dict[str, bytes]:
        return dict(self._call("metrics"))

    def take(self, target: DriftTarget, rows: LiveRows) -> None:
        self._call("take", target, rows)

    def report(self, target: DriftTarget) -> DriftReport:
        report: DriftReport = self._call("report", target)
        return report

    def reset(self, target: DriftTarget) -> None:
        self._call("reset", target)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=TIMEOUT_S)
        except RayError as error:
            raise OSError(
                f"the cluster's shared state is unavailable: {type(error).__name__}"
            ) from None
