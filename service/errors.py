"""The service's exceptions. `service/api/problems.py` converts them to responses.

DubitoError
├── RequestError
│   ├── NotReady (ShuttingDown), Overloaded, PastDeadline
│   └── (also a FieldError) Unauthorized, Forbidden (WrongHost), MethodNotAllowed, Unsupported,
│       NotDone
└── StoreError
    └── TooLargeToLoad
"""

from collections.abc import Mapping

from model_store.errors import DubitoError, FieldError, StoreError


def to_utf8(text: str) -> str:
    """Replace lone surrogates, which paths and queries can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RequestError(DubitoError):
    """Raised when the service cannot answer a request."""

    headers: Mapping[str, str] = {}  # of the response


class Unauthorized(RequestError, FieldError):
    """The route needs a valid key."""

    status, code, remedy = 401, "unauthorized", "send one"

    def __init__(self, realm: str) -> None:
        expected = "a valid key, as Authorization: Bearer KEY or X-API-Key: KEY"
        super().__init__("key", expected, "a missing, unknown or expired key")
        self.headers = {"WWW-Authenticate": realm}


class Forbidden(RequestError, FieldError):
    """The key lacks the scope in `detail`, or a web page from another origin sent the request (421:
    the host name is not in `DUBITO_ALLOWED_HOSTS`)."""

    status, code, remedy = 403, "forbidden", "use a key with that scope"


class WrongHost(Forbidden):
    status = 421


class MethodNotAllowed(RequestError, FieldError):
    """The path does not support the method."""

    status, code, remedy = 405, "method_not_allowed", "use a method listed in `Allow`"

    def __init__(self, allowed: str, method: str) -> None:
        super().__init__("method", allowed, method)
        self.headers = {"Allow": allowed}


class NotDone(RequestError, FieldError):
    """The job has not finished, or the service cannot perform the request."""

    status, code, remedy = 409, "not_done", "see `detail`"


class Unsupported(RequestError, FieldError):
    """The service does not support the media type or encoding."""

    status, code, remedy = 415, "unsupported", "send JSON, npy or a form"


class Overloaded(RequestError):
    """The queue is full, and the client has used its share of it."""

    status, code, remedy = 429, "overloaded", "try again after `Retry-After` seconds"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the service is overloaded; try again in {retry_after_s} s")
        self.headers = {"Retry-After": str(retry_after_s)}


class NotReady(RequestError):
    """The service is not ready to predict."""

    status, code, remedy = 503, "not_ready", "publish a model, or wait"


class ShuttingDown(NotReady):
    """The service is shutting down."""

    code, remedy = "shutting_down", "try again after `Retry-After` seconds"

    def __init__(self) -> None:
        super().__init__("the service is shutting down; try again in 1 s")
        self.headers = {"Retry-After": "1"}


class TooLargeToLoad(StoreError):
    """The version needs more memory than `DUBITO_MAX_MODEL_BYTES`."""

    status, code, remedy = 503, "too_large_to_load", "raise the limit"

    def __init__(self, name: str, version: str, needed: int, max_bytes: int) -> None:
        super().__init__(
            f"model {name} version {version}: expected at most {max_bytes} bytes in memory "
            f"(DUBITO_MAX_MODEL_BYTES), got about {needed}"
        )


class PastDeadline(RequestError):
    """The deadline passed before the answer was ready."""

    status, code, remedy = 504, "past_deadline", "send fewer rows, or a later deadline"

    def __init__(self) -> None:
        super().__init__("the request's deadline passed before the answer was ready")
