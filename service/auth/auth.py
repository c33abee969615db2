"""Authentication: who sends a request. Routes declare what it needs (`scopes.py`).

Without API keys, requests that a browser sends for pages of other origins are refused.
"""

import re
from base64 import b64decode
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import error_response
from service.auth.keys import KeyRing, Keys
from service.auth.scopes import API_SCOPES, GRANTED, OWNER
from service.call import record_of
from service.errors import Forbidden, RequestError, WrongHost
from service.server.shares import KEY_NAME

LABEL_STUDIO_PREFIX = "/label-studio/"
READING = {"GET", "HEAD", "OPTIONS"}  # methods of requests that change nothing
OF_OWN_PAGES = {b"same-origin", b"none"}  # values of Sec-Fetch-Site
_OF_NO_PAGE = re.compile(r"[0-9.]*|[^.]*")  # addresses, and names without dots


class AuthMiddleware:
    """Records a request's key and scopes. Refuses other origins' pages if the API is open: 403, and
    421 for a host name that is not ours."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, hosts: frozenset[str] | None, origins: frozenset[str]
    ) -> None:
        self.app = app
        self.ring = ring
        self.hosts = hosts
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        keys = self.ring.keys
        _authenticate(scope, keys)
        try:
            if keys.api_is_open:
                _refuse_other_pages(scope, self.hosts, self.origins)
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _authenticate(scope: Scope, keys: Keys) -> None:
    granted = API_SCOPES if keys.api_is_open else frozenset()
    text = _read_key(scope) if keys.names else b""
    key = keys.find(text) if text else None
    if key is not None:
        record_of(scope).key = key.name
        if not key.has_expired:
            scope[KEY_NAME], scope[OWNER] = key.name, key.digest.hex()
            granted |= key.scopes
    scope[GRANTED] = granted


def _refuse_other_pages(
    scope: Scope, hosts: frozenset[str] | None, origins: frozenset[str]
) -> None:
    """Raise Forbidden if a request may come from a page of an origin that has no business here.

    A browser sends what a page asks of an address here. Where a name of the page's own leads here
    (DNS rebinding), Host tells: such a name has dots. Otherwise Sec-Fetch-Site does, which browsers
    send by TLS and on loopback, or Origin.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] or host
    if hosts is not None and _OF_NO_PAGE.fullmatch(name) is None and name not in hosts:
        raise WrongHost(
            "Host", "an address, a name without dots or one of DUBITO_ALLOWED_HOSTS", "another"
        )
    if scope["method"] in READING:
        return
    if origins & {"*", headers.get(b"origin", b"").decode("latin-1").lower()}:
        return
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
    is_own = site in OF_OWN_PAGES if site else origin.partition("://")[2].lower() in ("", host)
    if not is_own or origin == "null":
        raise Forbidden("Origin", "none, or that of the service's own page", "another page's")


def _read_key(scope: Scope) -> bytes:
    """Return the key in X-API-Key or else the bearer's token; empty without one.

    Label Studio can send a key to a backend only as the password of basic authentication.
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
