"""The file of keys, in TOML: an entry for each, with its name, scopes and expiry, and the key or
its SHA-256.

    [[keys]]
    name = "shop"
    sha256 = "..."                      # or key = "..."
    scopes = ["predict", "acquire"]
    expires = 2027-03-01T00:00:00Z      # may be left out

The file is looked at again and again, so keys come and go without a restart. Where it has become
unusable the keys before stay, and the log says why.
"""

import logging
import re
import threading
import tomllib
from hashlib import sha256
from typing import Annotated

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from model_store.artifacts.manifest import Name, Sha256
from model_store.errors import InvalidInput
from service.auth.keys import (
    KEY_PATTERN,
    WHAT_KEYS_ARE,
    Key,
    Keys,
    Scope,
    key_file_text,
    listed_keys,
)
from service.settings import PREFIX, Settings

logger = logging.getLogger("dubito")

VARIABLE = f"{PREFIX}KEYS_FILE"
LISTS = (
    "api_keys",
    "api_keys_file",
    "admin_key",
    "admin_key_file",
)  # settings that the file takes the place of
NOT_SHOWN = "something else, which is not shown"


class KeyEntry(BaseModel):
    """A key as the file has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    scopes: Annotated[list[Scope], Field(min_length=1)]
    key: Annotated[str, StringConstraints(pattern=f"^{KEY_PATTERN.pattern}$")] | None = None
    sha256: Sha256 | None = None
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> "KeyEntry":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("expected one of key and sha256")
        return self

    def as_key(self) -> Key:
        """Return the key, without its text."""
        digest = (
            bytes.fromhex(self.sha256)
            if self.sha256
            else sha256((self.key or "").encode()).digest()
        )
        return Key(self.name, digest, frozenset(self.scopes), self.expires)


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[KeyEntry], Field(min_length=1)]


def keys_of(text: str) -> Keys:
    """Return the keys of a file's text.

    Raises:
        InvalidInput: naming the field, and nothing of what it holds.
    """
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # whose text may repeat the file's
        place = re.search(r"\((at [a-z0-9, ]+)\)$", str(error))
        raise InvalidInput(
            VARIABLE, "a TOML file", f"another, {place[1]}" if place else "another"
        ) from None
    try:
        keys = [entry.as_key() for entry in KeyFile.model_validate(content).keys]
    except ValidationError as error:
        raise _wrong(error) from None
    for what, values in (
        ("names", [key.name for key in keys]),
        ("keys", [key.digest for key in keys]),
    ):
        if len(set(values)) < len(values):
            raise InvalidInput(VARIABLE, f"different {what}", "some that are the same")
    return Keys(keys, api_is_open=False, has_administration=True)


def _wrong(error: ValidationError) -> InvalidInput:
    """Say what is wrong with a file, without a word of what it holds."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place, expected = (
        first["loc"],
        first["msg"].removeprefix("Input should be ").removeprefix("Value error, expected "),
    )
    if first["type"] == "extra_forbidden":
        place = place[:-1]
        expected = f"no fields but {', '.join((KeyEntry if place else KeyFile).model_fields)}"
    elif place[-1] == "key":
        expected = WHAT_KEYS_ARE
    return InvalidInput(".".join([VARIABLE, *map(str, place)]), expected, NOT_SHOWN)


class KeyRing:
    """The keys that are valid now: `keys`."""

    def __init__(self, settings: Settings) -> None:
        """Read the keys, from the file of keys or from lists.

        Raises:
            InvalidInput: naming the variable and field, and nothing of a key.
        """
        self._file = settings.keys_file
        if self._file is None:
            self.keys = listed_keys(settings)
        else:
            for name in LISTS:
                if getattr(settings, name) is not None:
                    raise InvalidInput(VARIABLE, f"none beside {PREFIX}{name.upper()}", "both")
            self._text = key_file_text(VARIABLE, self._file)
            self.keys = keys_of(self._text)
        self._interval_s = settings.poll_interval_s
        self._said: str | None = None  # what the log says is wrong
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="key-watcher", daemon=True)

    def start(self) -> None:
        """Begin to look at the file again and again, if there is one."""
        if self._file is not None:
            self._watcher.start()

    def stop(self) -> None:
        """End looking at it."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.look()

    def look(self) -> None:
        """Take the file's keys if they have changed; those before stay while it cannot be used."""
        assert self._file is not None
        try:
            text = key_file_text(VARIABLE, self._file)
            if text == self._text and self._said is None:
                return
            keys = keys_of(text)
        except InvalidInput as error:
            if self._said != str(error):
                self._said = str(error)
                logger.error("%s; the keys before stay", error)
            return
        logger.info("keys: %s", ", ".join(keys.names))
        self.keys, self._text, self._said = keys, text, None
