"""API keys with scopes and expiry dates.

Keys are configured either by `DUBITO_API_KEYS` and `DUBITO_ADMIN_KEY`, or in a TOML file:

    [[keys]]
    name = "shop"
    sha256 = "..."                      # or key = "..."
    scopes = ["predict", "acquire"]
    expires = 2027-03-01T00:00:00Z      # optional
    models = ["digits"]                 # optional: the only models of this key
    pools = ["shop"]                    # optional: its only files or folders in DUBITO_POOLS

Several keys can have the same name, so that a key can be replaced. Jobs belong to the name.

The service reloads the file when it changes. If the file becomes invalid, the service logs the
error and keeps the previous keys.

Only SHA-256 digests are stored, which also makes lookups safe against timing attacks. A fast hash
is sufficient because keys are long and random, unlike passwords.
"""

import argparse
import json
import logging
import math
import re
import secrets
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from model_store.artifacts.manifest import NAME_PATTERN, Name, Sha256
from model_store.errors import InvalidInput, expected_value, refuse_unreadable
from service.auth.scopes import ADMIN_SCOPES, API_SCOPES, SCOPES, Scope
from service.settings import PREFIX, SECRETS, Settings

logger = logging.getLogger("dubito")

FILE_VARIABLE = f"{PREFIX}KEYS_FILE"
KEY_PATTERN = re.compile(r"[!-+\--~]{16,256}")  # printable ASCII without space and comma
KEY_FORMAT = "16 to 256 printable ASCII characters, without spaces or commas"
HIDDEN_VALUE = "another value (hidden)"
MAX_FILE_BYTES = 1 << 20
NEW_KEY_PREFIX = "dubito_"  # recognised by scanners for secrets
NEW_KEY_BYTES = 32
MAX_DAYS = 36_500  # of a new key
NAME_DIGITS = 12  # digits of the digest in a generated key name

# The service responds to these paths even if there are too many connections.
HEALTH_PATHS = {"/health/live", "/health/ready", "/metrics"}


class Key(BaseModel):
    """An API key, as in an entry of the key file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name  # shown in the log, and the owner of jobs
    scopes: Annotated[frozenset[Scope], Field(strict=False, min_length=1)]
    key: Annotated[str, StringConstraints(pattern=f"^{KEY_PATTERN.pattern}$")] | None = Field(
        default=None, repr=False
    )
    sha256: Sha256 | None = Field(default=None, repr=False)
    expires: AwareDatetime | None = None
    models: Annotated[frozenset[Name], Field(strict=False, min_length=1)] | None = None  # None: all
    pools: Annotated[frozenset[str], Field(strict=False)] | None = None  # paths; None: all

    @model_validator(mode="after")
    def _is_consistent(self) -> "Key":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("expected one of key and sha256")
        if self.models is not None and "metrics" in self.scopes:
            raise ValueError("expected no models, because metrics cover all models")
        return self

    @property
    def digest(self) -> str:
        return self.sha256 or hash_key((self.key or "").encode())

    @property
    def expiry_s(self) -> float:
        """The expiry time in seconds since 1970, or infinity if there is none."""
        return math.inf if self.expires is None else self.expires.timestamp()

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.expiry_s


def hash_key(key: bytes) -> str:
    return sha256(key).hexdigest()


class Keys:
    """A service's API keys, indexed by digest."""

    def __init__(self, keys: Iterable[Key], api_is_open: bool, has_administration: bool) -> None:
        self.api_is_open = api_is_open
        self.has_administration = has_administration
        self._by_digest = {key.digest: key for key in keys}
        self.names = [key.name for key in self._by_digest.values()]
        self.expiries = dict(sorted((key.name, key.expiry_s) for key in self._by_digest.values()))

    def find(self, key: bytes) -> Key | None:
        """Look up a key. The result may have expired."""
        return self._by_digest.get(hash_key(key))


def list_keys(settings: Settings) -> Keys:
    """Read the keys from the settings."""
    api = _read_digests("API_KEYS", settings.api_keys)
    admin = _read_digests("ADMIN_KEY", settings.admin_key)
    if len(admin) > 1:
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", "one key", f"{len(admin)}")
    if set(api) & set(admin):
        expected = "a key that is not in DUBITO_API_KEYS"
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", expected, "a shared key")
    # Unlike a position, the digest does not change when other keys are removed.
    keys = [Key(name=f"api-{d[:NAME_DIGITS]}", sha256=d, scopes=API_SCOPES) for d in api]
    keys += [Key(name="admin", sha256=digest, scopes=ADMIN_SCOPES) for digest in admin]
    return Keys(keys, api_is_open=not api, has_administration=bool(admin))


def _read_digests(name: str, secret: SecretStr | None) -> list[str]:
    if secret is None:
        return []
    keys = [key.strip() for key in secret.get_secret_value().split(",")]
    if not all(KEY_PATTERN.fullmatch(key) for key in keys):
        expected = f"keys of {KEY_FORMAT}, separated by commas"
        raise InvalidInput(PREFIX + name, expected, HIDDEN_VALUE)
    return [hash_key(key.encode()) for key in keys]


def read_key_file(variable: str, file: Path) -> str:
    with refuse_unreadable(variable, "a readable file"), file.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidInput(variable, f"at most {MAX_FILE_BYTES} bytes", "more")
    return content.decode("utf-8", "replace")


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[Key], Field(min_length=1)]


def parse_keys(text: str) -> Keys:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # The error message may contain keys, so only the position is shown.
        place = re.search(r"\((at [a-z0-9, ]+)\)$", str(error))
        received = f"invalid TOML, {place[1]}" if place else "invalid TOML"
        raise InvalidInput(FILE_VARIABLE, "a TOML file", received) from None
    try:
        keys = KeyFile.model_validate(content).keys
    except ValidationError as error:
        raise _describe(error) from None
    if len({key.digest for key in keys}) < len(keys):
        raise InvalidInput(FILE_VARIABLE, "unique keys", "duplicates")
    return Keys(keys, api_is_open=False, has_administration=True)


def _describe(error: ValidationError) -> InvalidInput:
    """Convert an error in the key file to one that reveals no keys."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    expected = expected_value(first["msg"])
    if first["type"] == "extra_forbidden":
        place = place[:-1]
        expected = f"only the fields {', '.join((Key if place else KeyFile).model_fields)}"
    elif place[-1] == "key":
        expected = KEY_FORMAT
    return InvalidInput(".".join([FILE_VARIABLE, *map(str, place)]), expected, HIDDEN_VALUE)


class KeyRing(Collector):
    def __init__(self, settings: Settings) -> None:
        self._file = settings.keys_file
        if self._file is None:
            self.keys = list_keys(settings)
        else:
            for name in SECRETS:
                if getattr(settings, name) is not None:
                    raise InvalidInput(FILE_VARIABLE, f"no {PREFIX}{name.upper()}", "both")
            self._text = read_key_file(FILE_VARIABLE, self._file)
            self.keys = parse_keys(self._text)
        self._interval_s = settings.poll_interval_s
        self._problem: str | None = None  # last logged error
        self._reloading = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="key-watcher", daemon=True)

    def collect(self) -> Iterator[Metric]:
        """Yield a metric with the latest expiry for each key name."""
        text = "When a key expires, in seconds since 1970; +Inf for never"
        gauge = GaugeMetricFamily("dubito_key_expiry_timestamp_seconds", text, labels=("key",))
        for name, expiry in self.keys.expiries.items():
            gauge.add_metric((name,), expiry)
        yield gauge

    def start(self) -> None:
        if self._file is not None:
            self._watcher.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.reload()

    def current_names(self) -> frozenset[str] | None:
        """Reload the keys and return their names, or None if unknown or if the API is open."""
        if self._file is not None:
            self.reload()
        is_known = self._problem is None and not self.keys.api_is_open
        return frozenset(self.keys.names) if is_known else None

    def reload(self) -> None:
        """Reload the key file if it has changed. If it is invalid, keep the previous keys."""
        assert self._file is not None
        with self._reloading:
            try:
                text = read_key_file(FILE_VARIABLE, self._file)
                if text == self._text and self._problem is None:
                    return
                keys = parse_keys(text)
            except InvalidInput as error:
                if self._problem != str(error):
                    self._problem = str(error)
                    logger.error("%s; the previous keys stay", error)
                return
            logger.info("keys: %s", ", ".join(keys.names))
            self.keys, self._text, self._problem = keys, text, None


def print_new_key(options: argparse.Namespace) -> None:
    """Print a new key to standard error and its entry to standard output."""
    key, entry = new_key(options.name, options.scopes.split(","), options.days)
    message = f"New key (shown only once):\n\n    {key}\n\nEntry for the key file:\n"
    print(message, file=sys.stderr, flush=True)
    print(entry)


def new_key(name: str, scopes: list[str], days: float | None = None) -> tuple[str, str]:
    """Create a key and its entry for the key file."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidInput("NAME", f"a name matching {NAME_PATTERN}", repr(name[:80]))
    if not set(scopes) <= set(SCOPES):
        expected = f"some of {','.join(SCOPES)}"
        raise InvalidInput("--scopes", expected, repr(",".join(scopes)[:80]))
    if days is not None and not 0 < days <= MAX_DAYS:
        raise InvalidInput("--days", f"more than 0 and at most {MAX_DAYS}", f"{days:g}")
    key = NEW_KEY_PREFIX + secrets.token_urlsafe(NEW_KEY_BYTES)
    values = {"name": name, "sha256": hash_key(key.encode()), "scopes": scopes}
    lines = ["[[keys]]", *(f"{field} = {json.dumps(value)}" for field, value in values.items())]
    if days is not None:
        lines.append(f"expires = {datetime.now(UTC) + timedelta(days):%Y-%m-%dT%H:%M:%SZ}")
    return key, "\n".join(lines) + "\n"
