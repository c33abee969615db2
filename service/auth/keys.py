"""Keys: who may call the API, what each of them may do, and until when.

Keys come from the settings, as lists of keys that may do everything but administer and one that may
do that alone, or from a file that gives each a name, scopes and an expiry: `service.auth.key_file`.
Only SHA-256 digests of them are held. A key is looked up by its digest, so the time that takes says
nothing of how much of a key was right. A fast hash is enough: a key is long and random, so nobody
can try all that there are, as one can with passwords.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic import SecretStr
from starlette.types import Scope as AsgiScope

from model_store.errors import InvalidInput
from service.server.shares import KEY_NAME
from service.settings import PREFIX, Settings

KEY_PATTERN = re.compile(r"[!-+\--~]{16,256}")  # printable ASCII without space and comma
WHAT_KEYS_ARE = "16 to 256 printable ASCII characters, without spaces and commas"
MAX_FILE_BYTES = 1 << 20

Scope = Literal["read", "predict", "acquire", "label", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
OF_API_KEYS: Final = frozenset(SCOPES) - {"admin"}  # of a list
OF_ADMIN_KEY: Final = frozenset[Scope]({"admin", "metrics"})

SCOPE_OF_PATH: Final[dict[str, Scope]] = {
    "/predict": "predict",
    "/predict/jobs": "predict",
    "/acquire": "acquire",
    "/acquire/jobs": "acquire",
    "/acquire/preview": "acquire",
    "/labels": "label",
    "/metrics": "metrics",
    "/invocations": "predict",
}
OTHER_PATHS: Final[Scope] = "read"
ADMIN_PREFIX = "/admin/"
LABEL_STUDIO_PREFIX = "/label-studio/"
OPEN_INFERENCE_PREFIX = "/v2/models/"
OF_HEALTH = {"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/ping"}
OPEN_PATHS = OF_HEALTH | {"/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/version"}
OPEN_PREFIXES = ("/static-offline-docs/", "/page/")  # the scripts of /docs and of the page


@dataclass(frozen=True)
class Key:
    """A key: what the log calls it, its SHA-256, what it may do, and until when."""

    name: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope]
    expires: datetime | None = None

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and datetime.now(UTC) >= self.expires


class Keys:
    """All keys, by their digests; without any the API is open."""

    def __init__(self, keys: Iterable[Key], api_is_open: bool, has_administration: bool) -> None:
        self.api_is_open = api_is_open
        self.has_administration = has_administration
        self._by_digest = {key.digest: key for key in keys}

    @property
    def names(self) -> list[str]:
        """Names of all keys, in their order."""
        return [key.name for key in self._by_digest.values()]

    def find(self, key: bytes) -> Key | None:
        """Return the key that reads so, if there is one; it may have expired."""
        return self._by_digest.get(sha256(key).digest())

    def needed(self, path: str) -> Scope | None:
        """Return the scope that a key needs for a path; None where the path is open.

        A route's pattern also matches a path with a new line at its end (%0A), so that is not
        looked at here either.
        """
        path = path.removesuffix("\n")
        if path.startswith(ADMIN_PREFIX) and self.has_administration:
            return "admin"
        if self.api_is_open or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return None
        if path.startswith(LABEL_STUDIO_PREFIX) and not path.endswith("/health"):
            return "label" if path.endswith("/webhook") else "predict"
        if path.startswith(OPEN_INFERENCE_PREFIX) and path.endswith("/infer"):
            return "predict"
        return SCOPE_OF_PATH.get(path, OTHER_PATHS)


def key_name(scope: AsgiScope) -> str | None:
    """Return the name of the valid key that a request came with, if it did."""
    return scope.get(KEY_NAME)


def listed_keys(settings: Settings) -> Keys:
    """Read the keys from the settings, or the files of lists that they name.

    Raises:
        InvalidInput: naming the variable, and nothing of a key.
    """
    api = _digests("API_KEYS", settings.api_keys, settings.api_keys_file)
    admin = _digests("ADMIN_KEY", settings.admin_key, settings.admin_key_file)
    if len(admin) > 1:
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", "one key", f"{len(admin)}")
    if set(api) & set(admin):
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", "a key that is no API key", "one that is")
    keys = [Key(f"api-{i}", digest, OF_API_KEYS) for i, digest in enumerate(api, start=1)]
    keys += [Key("admin", digest, OF_ADMIN_KEY) for digest in admin]
    return Keys(keys, api_is_open=not api, has_administration=bool(admin))


def _digests(name: str, given: SecretStr | None, file: Path | None) -> list[bytes]:
    """Return the digests of a setting's keys."""
    variable = PREFIX + name
    if given is not None and file is not None:
        raise InvalidInput(f"{variable}_FILE", f"none beside {variable}", "both")
    if given is not None:
        text = given.get_secret_value()
    elif file is not None:
        variable, text = f"{variable}_FILE", key_file_text(f"{variable}_FILE", file)
    else:
        return []
    keys = [key.strip() for key in re.split(r"[,\n]", text.strip())]
    if not all(KEY_PATTERN.fullmatch(key) for key in keys):
        expected = f"keys of {WHAT_KEYS_ARE}, with commas or new lines between"
        raise InvalidInput(variable, expected, "something else, which is not shown")
    return [sha256(key.encode()).digest() for key in keys]


def key_file_text(variable: str, file: Path) -> str:
    """Return what a file of keys holds.

    Raises:
        InvalidInput: if it cannot be read, or is too large for one.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            variable, "a file that can be read", error.strerror or "an error"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidInput(variable, f"at most {MAX_FILE_BYTES} bytes", "more")
    return content.decode("utf-8", "replace")
