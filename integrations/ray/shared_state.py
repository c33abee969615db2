"""The state that a cluster's replicas share through a named Ray actor.

The state is in memory. If its node is lost, Ray restarts the actor without it, and metrics return
after a few seconds.
"""

import time
from typing import Any

import ray
from ray.exceptions import RayError

NAME, NAMESPACE = "dubito-shared-state", "dubito"
TIMEOUT_S = 5.0  # per call to the actor
MAX_AGE_S = 20.0  # of a replica's metrics


class StateActor:
    def __init__(self) -> None:
        self._metrics: dict[str, tuple[float, bytes]] = {}
        self._resets: list[list[str]] = []

    def put_metrics(self, name: str, page: bytes) -> None:
        self._metrics[name] = time.monotonic(), page

    def metrics(self) -> dict[str, bytes]:
        oldest = time.monotonic() - MAX_AGE_S
        self._metrics = {name: page for name, page in self._metrics.items() if page[0] > oldest}
        return {name: page for name, (_, page) in self._metrics.items()}

    def add_reset(self, name: str, version: str) -> None:
        self._resets.append([name, version])

    def resets(self) -> list[list[str]]:
        return self._resets


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

    def put_metrics(self, page: bytes) -> None:
        self._call("put_metrics", self.name, page)

    def metrics(self) -> dict[str, bytes]:
        return dict(self._call("metrics"))

    def add_reset(self, name: str, version: str) -> None:
        self._call("add_reset", name, version)

    def resets(self) -> list[list[str]]:
        return list(self._call("resets"))

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=TIMEOUT_S)
        except RayError as error:
            raise OSError(
                f"the cluster's shared state is unavailable: {type(error).__name__}"
            ) from None
