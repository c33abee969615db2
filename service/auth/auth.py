"""The guard at the door: requests without a key for their path are refused; where there are no
keys, requests that pages of other origins make."""

import re
from base64 import b64decode
from contextlib import suppress

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.auth.keys import LABEL_STUDIO_PREFIX, OWNER, KeyRing, Keys, key_name
from service.call import record_of
from service.error_forms import problem
from service.server.shares import KEY_NAME

EXPECTED = "key: expected one that is valid here, as Authorization: Bearer KEY or X-API-Key: KEY"
REALM = 'Bearer realm="dubito"'
READING = {"GET", "HEAD", "OPTIONS"}  # methods of requests that change nothing
OF_OWN_PAGES = {b"same-origin", b"none"}  # values of Sec-Fetch-Site
_OF_NO_PAGE = re.compile(r"[0-9.]*|[^.]*")  # addresses, and names without dots


class Door:
    """Middleware that answers 401 to requests without a valid key where one is needed and 403 where
    its scopes do not suffice; where the API is open, 403 and 421 to other origins' pages. What
    counts and logs requests is above it."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, hosts: frozenset[str] | None, origins: frozenset[str]
    ) -> None:
        self.app = app
        self.ring = ring
        self.hosts = hosts
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        keys = self.ring.keys
        refusal = _page_refusal(scope, self.hosts, self.origins) if keys.api_is_open else None
        return refusal or (_key_refusal(scope, keys) if keys.names else None)


def _page_refusal(
    scope: Scope, hosts: frozenset[str] | None, origins: frozenset[str]
) -> Response | None:
    """Return why a request may be that of a page of an origin that has no business here, if it may.

    A browser sends what a page asks of an address here. Where a name of the page's own leads here
    (DNS rebinding), Host tells: such a name has dots. Otherwise Sec-Fetch-Site does, which browsers
    send by TLS and on loopback, or Origin.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] or host
    if hosts is not None and _OF_NO_PAGE.fullmatch(name) is None and name not in hosts:
        record_of(scope).reason = "forbidden"
        expected = "an address, a name without dots or one of DUBITO_HOSTS"
        return problem(scope, 421, "forbidden", f"Host: expected {expected}, got another")
    if scope["method"] in READING:
        return None
    if origins & {"*", headers.get(b"origin", b"").decode("latin-1").lower()}:
        return None
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
    is_own = site in OF_OWN_PAGES if site else origin.partition("://")[2].lower() in ("", host)
    if is_own and origin != "null":
        return None
    record_of(scope).reason = "forbidden"
    detail = "Origin: expected none, or that of the service's own page, got another page's"
    return problem(scope, 403, "forbidden", detail)


def _key_refusal(scope: Scope, keys: Keys) -> Response | None:
    """Record a request's key, and return why the request is refused, if it is.

    One answer for keys that are unknown and that have expired: only the log tells them apart.
    """
    record = record_of(scope)
    given = _read_key(scope)
    key = keys.find(given) if given else None
    if key is not None:
        record.key = key.name
    valid = None if key is None or key.has_expired else key
    if valid is not None:
        scope[KEY_NAME], scope[OWNER] = valid.name, valid.digest.hex()
    needed = keys.scope_of(scope["path"])
    if needed is None:
        return None
    if valid is None:
        record.reason = "unauthorized" if key is None else "expired_key"
        detail = f"{EXPECTED}, got none, an unknown one or one that has expired"
        return problem(scope, 401, "unauthorized", detail, {"WWW-Authenticate": REALM})
    if needed not in valid.scopes:
        record.reason = "forbidden"
        headers = {"WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{needed}"'}
        detail = f"key: expected one with the scope {needed}, got one without"
        return problem(scope, 403, "forbidden", detail, headers)
    return None


def may_see_names(scope: Scope, keys: Keys) -> bool:
    """Whether a request to an open path may be told models' names: with a key, if there are any."""
    return keys.api_is_open or key_name(scope) is not None


def _read_key(scope: Scope) -> bytes:
    """Return the key that a request gives: X-API-Key, else a bearer's token; empty without one.

    Label Studio can give one to a backend only as the password of basic authentication.
    """
    is_of_label_studio = scope["path"].startswith(LABEL_STUDIO_PREFIX)
    key = b""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return bytes(value)
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            key = value[7:].strip()
        if name == b"authorization" and value[:6].lower() == b"basic " and is_of_label_studio:
            with suppress(ValueError):
                key = b64decode(value[6:].strip(), validate=True).partition(b":")[2]
    return key
