"""Errors of the service. They know nothing of HTTP; `service.api.problems` maps each to a status.

DubitoError
└── RequestError
    ├── InUse         a version that is served
    ├── NotDone       a job whose result is asked for too early
    ├── TooLarge      a body, or rows x draws, beyond a limit
    ├── Unsupported   a media type or encoding
    ├── Overloaded    more work than may wait
    ├── NotReady      no model published yet
    └── PastDeadline  not answered in the time that the request or the service allows

TooLargeToLoad    a StoreError: a version larger than the memory for models
"""

from model_store.errors import DubitoError, StoreError


class RequestError(DubitoError):
    """A request that cannot be answered."""


class InUse(RequestError):
    """Something that cannot be taken away now."""


class NotDone(RequestError):
    """The result of a job that has none, or not yet."""


class TooLarge(RequestError):
    """More than a limit allows."""


class Unsupported(RequestError):
    """A media type or encoding that the service does not read."""


class Overloaded(RequestError):
    """More work is waiting than the service accepts."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the service is overloaded; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotReady(RequestError):
    """Nothing to predict with yet."""


class PastDeadline(RequestError):
    """Not answered in time."""

    def __init__(self) -> None:
        super().__init__("the answer did not come before the request's deadline")


class TooLargeToLoad(StoreError):
    """A version that alone takes more memory than all models may."""

    def __init__(self, name: str, version: str, needed: int, most: int) -> None:
        super().__init__(
            f"model {name} version {version}: expected at most {most} bytes in memory "
            "(DUBITO_MAX_MODEL_BYTES), "
            f"got about {needed}"
        )
