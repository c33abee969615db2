"""Whose request it is: what fair shares go by."""

import ipaddress
from collections.abc import Hashable
from functools import lru_cache

from starlette.types import Scope

KEY_NAME = "dubito.key"  # in a request's scope: the name of the valid key that it came with
IPV6_NETWORK_BITS = 64  # that a customer has: who can choose among its addresses is one client


def client_of(scope: Scope) -> Hashable:
    """Return the client of a request: its valid key, else the address it came from, else a client
    of its own."""
    key = scope.get(KEY_NAME)
    return ("key", key) if key is not None else address_client(scope.get("client"))


def address_client(peer: tuple[str, int] | None) -> Hashable:
    """Return the client of a connection without a key, given its other end."""
    return object() if not peer else _network(peer[0])


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Return the part of an address that its owner cannot choose."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return address
