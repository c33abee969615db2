"""A client of Label Studio's API at the one origin that the operator names. It follows no
redirects."""

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin, urlsplit

from model_store.errors import DubitoError, InvalidInput

TIMEOUT_S = 20.0
FILES = "data/"  # uploads, and files of local storage
MAX_FILE_BYTES = 32 << 20
MAX_JSON_BYTES = 256 << 20


class LabelStudioError(DubitoError):
    """Label Studio did not answer, or not as expected."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: it could lead anywhere."""


class LabelStudio:
    """Label Studio at an origin, with a token: a personal access token, or a legacy one."""

    def __init__(self, url: str, token: str | None) -> None:
        """Take the base URL, such as https://labels.example.com, and the token.

        Raises:
            InvalidInput: if it is no HTTP URL.
        """
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
        ):
            raise InvalidInput(
                "DUBITO_LABEL_STUDIO_URL", "an http or https URL without query", "another"
            )
        self._base = url.rstrip("/") + "/"
        self._origin = _origin(self._base)
        self._token = token
        self._access: str | None = None
        # Of proxies that the environment names none is asked: they could reach what we cannot.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def fetch(self, url: str) -> bytes:
        """Return a file of this origin, such as one that was uploaded to a project; `url` may be
        relative to it.

        Raises:
            InvalidInput: if it is of another origin, no such file, or too large.
        """
        expected = "images as data URIs, or files of DUBITO_LABEL_STUDIO_URL below /data/"
        try:
            whole = urljoin(self._base, url)
            path = urlsplit(whole).path
        except ValueError:
            raise InvalidInput("tasks", expected, "no URL") from None
        is_file = (
            path.startswith(urlsplit(self._base).path + FILES)
            and ".." not in path
            and "%" not in path
        )
        if _origin(whole) != self._origin or not is_file:  # not its API, which the token would open
            raise InvalidInput("tasks", expected, "another URL")
        try:
            return self._asked("GET", whole, None, MAX_FILE_BYTES)
        except LabelStudioError:  # which repeats what Label Studio says
            raise InvalidInput(
                "tasks", "images that Label Studio has", "none, or no answer"
            ) from None

    def json(self, method: str, path: str, content: Any = None) -> Any:
        """Ask a path of its API, and return the answer.

        Raises:
            LabelStudioError: if it does not answer, or refuses.
        """
        body = None if content is None else json.dumps(content).encode()
        answer = self._asked(method, urljoin(self._base, path.lstrip("/")), body, MAX_JSON_BYTES)
        try:
            return json.loads(answer) if answer else None
        except ValueError:
            raise LabelStudioError(
                f"Label Studio: expected JSON of {method} {path}, got something else"
            ) from None

    def _asked(self, method: str, url: str, body: bytes | None, limit: int) -> bytes:
        for attempt in range(2):
            headers = {"Content-Type": "application/json", **self._authorization()}
            request = urllib.request.Request(url, data=body, method=method, headers=headers)
            try:
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    content: bytes = answer.read(limit + 1)
            except urllib.error.HTTPError as error:
                said = error.read(500).decode("utf-8", "replace")
                if error.code == 401 and self._access is not None and attempt == 0:
                    self._access = None  # it has expired
                    continue
                path = urlsplit(url).path
                raise LabelStudioError(
                    f"Label Studio: {method} {path} was answered {error.code}: {said}"
                ) from None
            except (OSError, HTTPException, ValueError) as error:
                raise LabelStudioError(f"Label Studio: {type(error).__name__}: {error}") from None
            if len(content) > limit:
                raise LabelStudioError(f"Label Studio: expected at most {limit} bytes, got more")
            return content
        raise LabelStudioError("Label Studio: the token is refused")

    def _authorization(self) -> dict[str, str]:
        """Return the header that the token needs; a personal access token is exchanged for one of
        some minutes."""
        if self._token is None:
            return {}
        if self._token.count(".") != 2:
            return {"Authorization": f"Token {self._token}"}
        if self._access is None:
            request = urllib.request.Request(
                urljoin(self._base, "api/token/refresh"),
                data=json.dumps({"refresh": self._token}).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    self._access = str(json.loads(answer.read(MAX_FILE_BYTES))["access"])
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                raise LabelStudioError(f"Label Studio: the token is refused: {error}") from None
        return {"Authorization": f"Bearer {self._access}"}


def _origin(url: str) -> tuple[str, str, int]:
    """Return what of a URL must be the same, whatever it says of users."""
    parts = urlsplit(url)
    if "@" in parts.netloc or "\\" in url:
        return ("", "", 0)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return ("", "", 0)
    return (parts.scheme, (parts.hostname or "").lower(), port)
