"""Errors of the service. They know nothing of HTTP; `service.api.problems` maps each to a status.

DubitoError
├── RequestError
│   ├── InUse, NotDone, TooLarge, Unsupported, NotAcceptable, NotReady
│   └── Overloaded, PastDeadline
└── StoreError
    └── TooLargeToLoad
"""

from model_store.errors import DubitoError, StoreError


class RequestError(DubitoError):
    """A request that cannot be answered."""


class InUse(RequestError):
    """A version that is served cannot be unloaded or deleted."""


class NotDone(RequestError):
    """A job has no result, or not yet."""


class TooLarge(RequestError):
    """A body, or rows x draws, are beyond a limit."""


class Unsupported(RequestError):
    """The service does not read this media type or encoding."""


class NotAcceptable(RequestError):
    """The client takes no media type that the service could answer with."""

    def __init__(self, *media_types: str) -> None:
        super().__init__(f"Accept: expected {' or '.join(media_types)} among them, got others")


class NotReady(RequestError):
    """There is no model to predict with yet."""


class Overloaded(RequestError):
    """More work is waiting than the service accepts."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the service is overloaded; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class PastDeadline(RequestError):
    """The answer took longer than the request or the service allows."""

    def __init__(self) -> None:
        super().__init__("the answer did not come before the request's deadline")


class TooLargeToLoad(StoreError):
    """A version alone takes more memory than all models may."""

    def __init__(self, name: str, version: str, needed: int, most: int) -> None:
        super().__init__(
            f"model {name} version {version}: expected at most {most} bytes in memory "
            f"(DUBITO_MAX_MODEL_BYTES), got about {needed}"
        )
