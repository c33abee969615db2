"""A client for the Label Studio API and its settings."""

import json
import os
import ssl
from collections.abc import Iterator
from itertools import count
from typing import Any
from urllib.parse import urljoin, urlsplit

from model_store.errors import DubitoError, InvalidInput

URL_VARIABLE = "DUBITO_LABEL_STUDIO_URL"
TOKEN_VARIABLE = "DUBITO_LABEL_STUDIO_TOKEN"
PAGE_TASKS = 100  # per request
TIMEOUT_S = 20.0
FILES = "data/"  # uploads, and files of local storage
MAX_FILE_BYTES = 32 << 20
MAX_JSON_BYTES = 256 << 20


class LabelStudioError(DubitoError):
    pass


class LabelStudio:
    """A client for the Label Studio API. It only sends requests to the configured origin.

    It ignores redirects and the environment's proxies, which could lead to other hosts.

    Args:
        token: a personal access token or a legacy token.
    """

    def __init__(self, url: str, token: str | None) -> None:
        import httpx

        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname
        if not is_http or parts.query or parts.fragment:
            expected = "an http or https URL without a query"
            raise InvalidInput(URL_VARIABLE, expected, "another value")
        self._base = url.rstrip("/") + "/"
        self._origin = _origin(self._base)
        self._token = token
        self._access: str | None = None
        self._http = httpx.Client(
            trust_env=False,
            verify=ssl.create_default_context(),
            timeout=TIMEOUT_S,
            headers={"Accept-Encoding": "identity"},
        )

    def fetch(self, url: str) -> bytes:
        """Download a file from the configured origin. `url` may be relative."""
        expected = "images as data URIs, or files below DUBITO_LABEL_STUDIO_URL/data/"
        try:
            full_url = urljoin(self._base, url)
            path = urlsplit(full_url).path
        except ValueError:
            raise InvalidInput("tasks", expected, "an invalid URL") from None
        is_below = path.startswith(urlsplit(self._base).path + FILES)
        is_file = is_below and ".." not in path and "%" not in path
        if _origin(full_url) != self._origin or not is_file:  # The token also opens the API.
            raise InvalidInput("tasks", expected, "another URL")
        try:
            return self._request("GET", full_url, None, MAX_FILE_BYTES)
        except LabelStudioError:  # Its message would repeat Label Studio's answer to the caller.
            expected = "images that Label Studio can serve"
            raise InvalidInput("tasks", expected, "an error or no answer") from None

    def tasks(self, project: int) -> Iterator[list[dict[str, Any]]]:
        """Yield all tasks in a project, fetching one page at a time."""
        for page in count(1):
            query = f"project={project}&page={page}&page_size={PAGE_TASKS}&fields=all"
            answer = self.json("GET", f"api/tasks/?{query}")
            if answer["tasks"]:
                yield answer["tasks"]
            if not answer["tasks"] or page * PAGE_TASKS >= answer["total"]:
                return

    def json(self, method: str, path: str, content: Any = None) -> Any:
        url = urljoin(self._base, path.lstrip("/"))
        answer = self._request(method, url, content, MAX_JSON_BYTES)
        try:
            return json.loads(answer) if answer else None
        except ValueError:
            raise LabelStudioError(f"Label Studio: {method} {path} returned invalid JSON") from None

    def _request(self, method: str, url: str, content: Any, max_bytes: int) -> bytes:
        status, answer = self._send(method, url, content, max_bytes, self._authorization())
        if status == 401 and self._access is not None:  # The access token has expired.
            self._access = None
            status, answer = self._send(method, url, content, max_bytes, self._authorization())
        if not 200 <= status < 300:
            text = answer[:500].decode("utf-8", "replace")
            path = urlsplit(url).path
            raise LabelStudioError(f"Label Studio: {method} {path} returned {status}: {text}")
        if len(answer) > max_bytes:
            raise LabelStudioError(f"Label Studio: the answer exceeds {max_bytes} bytes")
        return answer

    def _send(
        self, method: str, url: str, content: Any, max_bytes: int, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Send a request and return its status and up to about `max_bytes` of the body."""
        import httpx

        answer = b""
        json_content = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", **headers}
        try:
            with self._http.stream(method, url, content=json_content, headers=headers) as response:
                for part in response.iter_bytes():
                    answer += part
                    if len(answer) > max_bytes:
                        break
                return response.status_code, answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LabelStudioError(f"Label Studio: {type(error).__name__}: {error}") from None

    def _authorization(self) -> dict[str, str]:
        """Return the authorization header.

        A personal access token is first exchanged for a short-lived one.
        """
        if self._token is None:
            return {}
        if self._token.count(".") != 2:
            return {"Authorization": f"Token {self._token}"}
        if self._access is None:
            url, refresh = urljoin(self._base, "api/token/refresh"), {"refresh": self._token}
            status, answer = self._send("POST", url, refresh, MAX_FILE_BYTES, {})
            try:
                self._access = str(json.loads(answer)["access"])
            except (ValueError, KeyError, TypeError):
                raise LabelStudioError(f"Label Studio refused the token: {status}") from None
        return {"Authorization": f"Bearer {self._access}"}


def label_studio_from_environment(url: str | None = None) -> LabelStudio:
    """Create a client from environment variables. `url` overrides the configured URL."""
    url = url or os.environ.get(URL_VARIABLE)
    if not url:
        raise InvalidInput(URL_VARIABLE, "the URL of Label Studio", "none")
    return LabelStudio(url, os.environ.get(TOKEN_VARIABLE, "").strip() or None)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    if "@" in parts.netloc or "\\" in url:
        return ("", "", 0)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return ("", "", 0)
    return (parts.scheme, (parts.hostname or "").lower(), port)
