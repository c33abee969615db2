"""Keys: who may call the API, and who may administer it.

Keys are compared as SHA-256 digests, always with all that are configured, so that the time a comparison takes says
nothing of how much of a key was right.
"""

import hmac
import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pydantic import SecretStr

from model_store.errors import InvalidInput
from service.settings import PREFIX, Settings

KEY_PATTERN = re.compile(r"[!-+\--~]{16,256}")  # printable ASCII without space and comma
MAX_FILE_BYTES = 1 << 16
ADMIN_PREFIX = "/admin/"
METRICS_PATH = "/metrics"
OPEN_PATHS = {"/health/live", "/health/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
OPEN_PREFIX = "/static-offline-docs/"  # the scripts of /docs


@dataclass(frozen=True)
class Keys:
    """Digests of the keys. Without API keys the API is open; without an admin key there is no administration."""

    api: tuple[bytes, ...] = field(repr=False)
    admin: tuple[bytes, ...] = field(repr=False)

    def needed(self, path: str) -> tuple[bytes, ...]:
        """Return the digests one of which opens a path; none where it is open."""
        if path.startswith(ADMIN_PREFIX):
            return self.admin or self.api  # without administration there is nothing there, for those who may ask
        if not self.api or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return ()
        return self.api + self.admin if path == METRICS_PATH else self.api


def read_keys(settings: Settings) -> Keys:
    """Read the keys from the settings, or the files that they name.

    Raises:
        InvalidInput: naming the variable, and nothing of a key.
    """
    api = _keys("API_KEYS", settings.api_keys, settings.api_keys_file)
    admin = _keys("ADMIN_KEY", settings.admin_key, settings.admin_key_file)
    if len(admin) > 1:
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", "one key", f"{len(admin)}")
    if set(api) & set(admin):
        raise InvalidInput(f"{PREFIX}ADMIN_KEY", "a key that is no API key", "one that is")
    return Keys(tuple(api), tuple(admin))


def _keys(name: str, given: SecretStr | None, file: Path | None) -> list[bytes]:
    """Return the digests of a setting's keys."""
    variable = PREFIX + name
    if given is not None and file is not None:
        raise InvalidInput(f"{variable}_FILE", f"none beside {variable}", "both")
    if given is not None:
        text = given.get_secret_value()
    elif file is not None:
        variable, text = f"{variable}_FILE", _text(f"{variable}_FILE", file)
    else:
        return []
    keys = [key.strip() for key in re.split(r"[,\n]", text.strip())]
    if not all(KEY_PATTERN.fullmatch(key) for key in keys):
        expected = "keys of 16 to 256 printable ASCII characters, without spaces, with commas or new lines between"
        raise InvalidInput(variable, expected, "something else, which is not shown")
    return [sha256(key.encode()).digest() for key in keys]


def _text(variable: str, file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise InvalidInput(variable, "a file that can be read", error.strerror or "an error") from None


def is_one_of(key: bytes, digests: tuple[bytes, ...]) -> bool:
    """Whether a key is one of those of these digests, in a time that does not depend on which."""
    digest = sha256(key).digest()
    found = False
    for expected in digests:
        found |= hmac.compare_digest(digest, expected)
    return found
