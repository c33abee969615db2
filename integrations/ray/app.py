"""The service as a Ray Serve application with several replicas.

Configuration files of Ray Serve have `import_path: integrations.ray.app:build`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integrations.ray.scaling import MODELS, WORK
from integrations.ray.shared_state import RayBackend
from model_store.errors import InvalidInput
from service.app import create_app
from service.context import Context
from service.server.budget import SCOPE_KEY, ByteBudget, Reservation
from service.server.process import keep_heaps_whole
from service.server.shares import address_client
from service.settings import SECRETS, SWITCH_S, build_settings
from service.telemetry.logs import configure

APP = "dubito"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
ROUTING_PERIOD_S = 2.0  # between polls of the loaded versions


def uses_haproxy() -> bool:
    """Check whether Ray Serve uses HAProxy as its proxy."""
    # Ray has no public API for this.
    from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY

    return bool(RAY_SERVE_ENABLE_HA_PROXY)


def router() -> RequestRouterConfig:
    """Configure routing by model, which HAProxy does not support."""
    if uses_haproxy():
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="integrations.ray.scaling:ByModel",
        request_routing_stats_period_s=ROUTING_PERIOD_S,
    )


def listen_on_loopback() -> None:
    """Restrict a replica's internal port to loopback if the Ray node uses loopback.

    The port executes what it receives without a token, and Ray Serve has no setting for its
    address.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() == "127.0.0.1":
        replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")


class ReservationMiddleware:
    """Middleware that opens a memory reservation for each request."""

    def __init__(self, app: ASGIApp, budget: ByteBudget) -> None:
        self.app = app
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = scope[SCOPE_KEY] = Reservation(
            self.budget, address_client(scope.get("client"))
        )

        async def send_bytes(message: Message) -> None:
            if "body" in message:  # Ray may pass it to another process as plain bytes.
                message["body"] = bytes(message["body"])
            await send(message)

        try:
            await self.app(scope, receive, send_bytes)
        finally:
            reservation.release()


@serve.deployment(
    name="Replica",
    health_check_period_s=HEALTH_PERIOD_S,
    health_check_timeout_s=HEALTH_TIMEOUT_S,
    graceful_shutdown_wait_loop_s=0.5,
    request_router_config=router(),
)
@serve.ingress()
class Replica:
    """A replica of the service, configured by `values` and the environment."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._context: Context | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Create the application in the replica's process, because it cannot be pickled."""
        listen_on_loopback()
        keep_heaps_whole()
        sys.setswitchinterval(SWITCH_S)
        if not self._values.get("threads"):
            processors = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
            self._values["threads"] = max(1, int(processors))
        settings = build_settings(self._values)
        configure(settings)
        name = serve.get_replica_context().replica_id.unique_id
        app: FastAPI = create_app(settings, RayBackend(name))
        self._context = app.state.context
        app.add_middleware(ReservationMiddleware, budget=ByteBudget(settings.memory_budget_bytes))
        return app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the number of queued and running row-draws for autoscaling."""
        return {WORK: float(self._context.admission.row_draws) if self._context else 0.0}

    def record_routing_stats(self) -> dict[str, Any]:
        """Report the loaded models and versions for request routing."""
        versions = self._context.models.loaded() if self._context else []
        names = {version.name for version in versions}
        return {MODELS: sorted(names | {f"{v.name}/{v.version}" for v in versions})}


def build(args: dict[str, Any]) -> Application:
    """Build the application from the arguments in a Ray Serve configuration file.

    Args:
        args: settings by their names in `Settings`, as numbers or strings.

    Raises:
        InvalidInput: if a setting is invalid, unknown, or a secret. Ray's dashboard shows the
            arguments.
    """
    return application(args)


def application(args: Mapping[str, Any], **options: Any) -> Application:
    values = {name.lower().removeprefix("dubito_"): value for name, value in args.items()}
    for name in values:
        if name in SECRETS:
            expected = f"{name}_file, the path of a file on each node"
            raise InvalidInput(f"args.{name}", expected, "the secret itself")
    values.setdefault("state", "")  # Jobs and labels need a folder that all nodes share.
    settings = build_settings(values, "args.")
    if settings.workers != 1:
        expected = "1; set num_replicas instead"
        raise InvalidInput("args.workers", expected, f"{settings.workers}")
    limits = {  # Ray's default of 5 requests is too low for micro-batches.
        "max_ongoing_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_s,
    }
    return Replica.options(**limits, **options).bind(values)  # type: ignore[attr-defined]


def replica_options(processors: int, min_replicas: int, max_replicas: int) -> dict[str, Any]:
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": processors}}
    if max_replicas == min_replicas:
        return options | {"num_replicas": min_replicas}
    scaling = AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        metrics_interval_s=1.0,
        look_back_period_s=10.0,
        upscale_delay_s=5.0,
        downscale_delay_s=300.0,
        policy=AutoscalingPolicy(policy_function="integrations.ray.scaling:ByWork"),
    )
    return options | {"num_replicas": "auto", "autoscaling_config": scaling}
