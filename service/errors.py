"""Errors of requests. `model_store/errors.py` begins the tree, `service/api/problems.py` answers.

DubitoError
├── RequestError
│   ├── NotReady, Overloaded, PastDeadline
│   └── (also a FieldError) Unauthorized, Forbidden (WrongHost), MethodNotAllowed, NotAcceptable,
│       Unsupported, InUse, NotDone, TooLarge
└── StoreError
    └── TooLargeToLoad
"""

from collections.abc import Mapping

from model_store.errors import DubitoError, FieldError, StoreError


class RequestError(DubitoError):
    """A request that cannot be answered."""

    headers: Mapping[str, str] = {}  # of the answer


class Unauthorized(RequestError, FieldError):
    """A valid key is needed."""

    status, code, remedy = 401, "unauthorized", "send one"

    def __init__(self, realm: str) -> None:
        expected = "a valid key, as Authorization: Bearer KEY or X-API-Key: KEY"
        super().__init__("key", expected, "none, or an unknown or expired key")
        self.headers = {"WWW-Authenticate": realm}


class Forbidden(RequestError, FieldError):
    """The key lacks the scope that `detail` names, or another site's page sent the request (421: it
    came by a name that `DUBITO_ALLOWED_HOSTS` does not have)."""

    status, code, remedy = 403, "forbidden", "use a key with that scope"


class WrongHost(Forbidden):
    status = 421


class MethodNotAllowed(RequestError, FieldError):
    """The path takes another method."""

    status, code, remedy = 405, "method_not_allowed", "use one named in `Allow`"

    def __init__(self, allowed: str, method: str) -> None:
        super().__init__("method", allowed, method)
        self.headers = {"Allow": allowed}


class NotAcceptable(RequestError, FieldError):
    """`Accept` names no media type that the answer could have."""

    status, code, remedy = 406, "not_acceptable", "name `application/json`, or none"

    def __init__(self, *media_types: str) -> None:
        super().__init__("Accept", " or ".join(media_types), "other media types")


class InUse(RequestError, FieldError):
    """A version that is served cannot be unloaded."""

    status, code, remedy = 409, "in_use", "move the alias first"


class NotDone(RequestError, FieldError):
    """A job is not over, or the request cannot be carried out here."""

    status, code, remedy = 409, "not_done", "see `detail`"


class TooLarge(RequestError, FieldError):
    """More than a limit allows."""

    status, code, remedy = 413, "too_large", "send less at once, or raise the limit"


class Unsupported(RequestError, FieldError):
    """A media type or an encoding that the service does not read."""

    status, code, remedy = 415, "unsupported", "send JSON, npy or a form"


class Overloaded(RequestError):
    """Too much work is waiting, and the client has its share of it."""

    status, code, remedy = 429, "overloaded", "try again after `Retry-After` seconds"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the service is overloaded; try again in {retry_after_s} s")
        self.headers = {"Retry-After": str(retry_after_s)}


class NotReady(RequestError):
    """There is nothing to predict with yet."""

    status, code, remedy = 503, "not_ready", "publish a model, or wait"


class TooLargeToLoad(StoreError):
    """A version takes more memory than all models may."""

    status, code, remedy = 503, "too_large_to_load", "raise the limit"

    def __init__(self, name: str, version: str, needed: int, max_bytes: int) -> None:
        super().__init__(
            f"model {name} version {version}: expected at most {max_bytes} bytes in memory "
            f"(DUBITO_MAX_MODEL_BYTES), got about {needed}"
        )


class PastDeadline(RequestError):
    """No answer by the deadline."""

    status, code, remedy = 504, "past_deadline", "send less work, or a later deadline"

    def __init__(self) -> None:
        super().__init__("the request's deadline passed before the answer was ready")
