"""Ed25519 signatures (RFC 8032) for versions, using `cryptography` from the `sign` extra."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_store.artifacts.manifest import Manifest
from model_store.errors import InvalidInput, refuse_unreadable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = "manifest.sig"
SIGNATURE_BYTES = 64
MAX_SIGNATURES_BYTES = 8 * SIGNATURE_BYTES  # of one version
PEM_BLOCK = re.compile(rb"-----BEGIN [^-]+-----.*?-----END [^-]+-----", re.DOTALL)
CONTEXT = "dubito version 1"  # prevents the reuse of other signatures
MAX_KEY_BYTES = 1 << 14


def signed_bytes(manifest: Manifest) -> bytes:
    """Return the bytes to sign. They contain the model's name, version and digest."""
    return "\n".join([CONTEXT, manifest.name, manifest.version, manifest.digest, ""]).encode()


def signature(manifest: Manifest, key: "Ed25519PrivateKey") -> bytes:
    return key.sign(signed_bytes(manifest))


@dataclass(frozen=True)
class TrustedKeys:
    keys: tuple["Ed25519PublicKey", ...]

    def verify(self, content: bytes, manifest: Manifest) -> bool:
        """Check whether a signature was made with a trusted key."""
        from cryptography.exceptions import InvalidSignature

        for key, signature in product(self.keys, split_signatures(content)):
            with suppress(InvalidSignature):
                key.verify(signature, signed_bytes(manifest))
                return True
        return False


def split_signatures(content: bytes) -> list[bytes]:
    """Split a signature file into signatures. Return an empty list if its length is invalid."""
    if len(content) % SIGNATURE_BYTES or len(content) > MAX_SIGNATURES_BYTES:
        return []
    return [content[n : n + SIGNATURE_BYTES] for n in range(0, len(content), SIGNATURE_BYTES)]


def add_signature(content: bytes, signature: bytes) -> bytes:
    """Add a signature to a signature file, dropping the oldest ones if there are too many."""
    signatures = [old for old in split_signatures(content) if old != signature]
    return b"".join([*signatures, signature])[-MAX_SIGNATURES_BYTES:]


def write_key_pair(path: Path) -> Path:
    """Write a new private key to `path` (mode 600) and return the public key's path.

    Both are PEM files. The public key's name ends in `.pub`.
    """
    ed25519, pem = _import_cryptography("keygen")
    key = ed25519.Ed25519PrivateKey.generate()
    public = path.with_name(f"{path.name}.pub")
    private_pem = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    public_format = pem.PublicFormat.SubjectPublicKeyInfo
    public_pem = key.public_key().public_bytes(pem.Encoding.PEM, public_format)
    for file, content, mode in ((path, private_pem, 0o600), (public, public_pem, 0o644)):
        with refuse_unreadable(str(file), "a file that can be made"):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
    return public


def read_private_key(path: Path, field: str) -> "Ed25519PrivateKey":
    ed25519, pem = _import_cryptography(field)
    key = _load_key(_read_file(path, field), partial(pem.load_pem_private_key, password=None))
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        expected = "a private Ed25519 key in PEM, without a passphrase"
        raise InvalidInput(field, expected, "another file")
    return key


def read_trusted_keys(path: Path, field: str) -> TrustedKeys:
    """Read the trusted public keys from a file or from the files `*.pub` of a folder."""
    files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
    if not files:
        raise InvalidInput(field, "public keys in files *.pub", "a folder without them")
    return TrustedKeys(tuple(key for file in files for key in _read_public_keys(file, field)))


def _read_public_keys(path: Path, field: str) -> tuple["Ed25519PublicKey", ...]:
    ed25519, pem = _import_cryptography(field)
    blocks = PEM_BLOCK.findall(_read_file(path, field))
    keys = tuple(_load_key(block, pem.load_pem_public_key) for block in blocks)
    if not keys or not all(isinstance(key, ed25519.Ed25519PublicKey) for key in keys):
        raise InvalidInput(field, "public Ed25519 keys in PEM", "another file")
    return keys


def _read_file(path: Path, field: str) -> bytes:
    with refuse_unreadable(field), path.open("rb") as file:
        return file.read(MAX_KEY_BYTES)


def _load_key(content: bytes, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # their messages may repeat the key
        return None


def _import_cryptography(field: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        expected = "the package of the extra `sign` installed with it"
        raise InvalidInput(field, expected, "no such package") from None
    return ed25519, serialization
