"""The guard at the door: requests without a key for their path are refused; where there are no
keys, requests that pages of other origins make."""

import re
from base64 import b64decode
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import error_response
from service.auth.keys import LABEL_STUDIO_PREFIX, OWNER, KeyRing, Keys, key_name
from service.call import record_of
from service.errors import Forbidden, RequestError, Unauthorized, WrongHost
from service.server.shares import KEY_NAME

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
        try:
            if scope["type"] == "http":
                self._check(scope)
        except RequestError as error:
            await error_response(scope, error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        keys = self.ring.keys
        if keys.api_is_open:
            _refuse_other_pages(scope, self.hosts, self.origins)
        if keys.names:
            _check_key(scope, keys)


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


def _check_key(scope: Scope, keys: Keys) -> None:
    """Record a request's key.

    Raises:
        Unauthorized: if it is not valid. Only the log tells unknown keys from expired ones.
        Forbidden: if it lacks the scope of the path.
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
        return
    if valid is None:
        record.reason = "unauthorized" if key is None else "expired_key"
        raise Unauthorized(REALM)
    if needed not in valid.scopes:
        error = Forbidden("key", f"one with the scope {needed}", "one without")
        challenge = f'{REALM}, error="insufficient_scope", scope="{needed}"'
        error.headers = {"WWW-Authenticate": challenge}
        raise error


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
