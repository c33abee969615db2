"""Whether a port can be listened on, asked before anything is loaded."""

import errno
import socket


def cannot_listen(host: str, port: int) -> str | None:
    """Return why nothing can listen on a port, None where something can."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"DUBITO_PORT: expected a free port of {host}, got {port}, which is in use (--port N takes another)"
        return f"cannot listen on {host} port {port}: {error.strerror}"
    return None
