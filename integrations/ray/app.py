"""A replica: the whole application, as a single process has it, behind Ray Serve's proxy.

`build` is what a configuration file of Ray Serve names, as
`import_path: integrations.ray.app:build`.
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
from service.settings import SECRETS, SWITCH_S, settings_of
from service.telemetry.logs import configure

APP = "dubito"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
ROUTING_PERIOD_S = 2.0  # between looks at which replica has which version


def uses_haproxy() -> bool:
    """Whether Ray Serve's proxy is HAProxy, for which Ray has no public name."""
    from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY

    return bool(RAY_SERVE_ENABLE_HA_PROXY)


def router() -> RequestRouterConfig:
    """Return how requests are sent to replicas; HAProxy is faster, and knows nothing of models."""
    if uses_haproxy():
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="integrations.ray.scaling:ByModel",
        request_routing_stats_period_s=ROUTING_PERIOD_S,
    )


def listen_where_ray_does() -> None:
    """Have a replica's port for other replicas, which takes no token and runs what it is sent,
    listen on loopback where all of Ray does: Ray Serve has no setting for that."""
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() == "127.0.0.1":
        replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")


class BehindProxy:
    """Middleware that does what the service's own connections do elsewhere: each request reserves
    memory of one budget of the process.

    An answer may travel on as a message between processes, in which bytes are bytes.
    """

    def __init__(self, app: ASGIApp, budget: ByteBudget) -> None:
        self.app = app
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = scope[SCOPE_KEY] = Reservation(
            self.budget, address_client(scope.get("client"))
        )

        async def send_bytes(message: Message) -> None:
            if "body" in message:
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
    """One replica. It is given settings by name; the others are the environment's, as ever."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._context: Context | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, made here, since its parts do not travel."""
        listen_where_ray_does()
        keep_heaps_whole()
        sys.setswitchinterval(SWITCH_S)
        if not self._given.get("threads"):
            processors = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
            self._given["threads"] = max(1, int(processors))
        settings = settings_of(self._given)
        configure(settings)
        name = serve.get_replica_context().replica_id.unique_id
        app: FastAPI = create_app(settings, RayBackend(name))
        self._context = app.state.context
        # outermost
        app.add_middleware(BehindProxy, budget=ByteBudget(settings.memory_budget_bytes))
        return app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how much work waits or is done, which the number of replicas follows."""
        return {WORK: float(self._context.admission.row_draws) if self._context else 0.0}

    def record_routing_stats(self) -> dict[str, Any]:
        """Return which versions are in memory, by which requests are routed."""
        loaded = self._context.models.loaded() if self._context else []
        names = {served.name for served in loaded}
        return {MODELS: sorted(names | {f"{one.name}/{one.version}" for one in loaded})}


def build(args: dict[str, Any]) -> Application:
    """Return the application that a configuration file of Ray Serve names.

    Args:
        args: settings by the names of `Settings`, numbers or strings.

    Raises:
        InvalidInput: naming the setting that is wrong, not known, or a secret: arguments are shown
            on dashboards.
    """
    return application(args)


def application(args: Mapping[str, Any], **options: Any) -> Application:
    given = {name.lower().removeprefix("dubito_"): value for name, value in args.items()}
    for name in given:
        if name in SECRETS:
            expected = f"a file of secrets, as {name}_file, on each node"
            raise InvalidInput(f"args.{name}", expected, "the secret itself")
    # on the disk of one machine, unless a setting says that there is one
    given.setdefault("state", "")
    settings = settings_of(given, "args.")
    if settings.workers != 1:
        expected = "1, since replicas are the processes (num_replicas)"
        raise InvalidInput("args.workers", expected, f"{settings.workers}")
    limits = {  # Ray's own, of 5 requests, would leave nothing to make micro-batches of
        "max_ongoing_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_s,
    }
    return Replica.options(**limits, **options).bind(given)  # type: ignore[attr-defined]


def replicas(processors: int, least: int, most: int) -> dict[str, Any]:
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": processors}}
    if most == least:
        return options | {"num_replicas": least}
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        metrics_interval_s=1.0,
        look_back_period_s=10.0,
        upscale_delay_s=5.0,
        downscale_delay_s=300.0,
        policy=AutoscalingPolicy(policy_function="integrations.ray.scaling:ByWork"),
    )
    return options | {"num_replicas": "auto", "autoscaling_config": scaling}
