"""Ed25519 signatures (RFC 8032) of versions, with `cryptography` from the extra `sign`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from model_store.artifacts.manifest import Manifest
from model_store.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = "manifest.sig"
SIGNATURE_BYTES = 64
CONTEXT = "dubito version 1"  # prevents the reuse of other signatures
MAX_KEY_BYTES = 1 << 14


def signed_bytes(manifest: Manifest) -> bytes:
    """Return the signed content: four lines with the name, version and digest."""
    return "\n".join([CONTEXT, manifest.name, manifest.version, manifest.digest, ""]).encode()


def signature(manifest: Manifest, key: "Ed25519PrivateKey") -> bytes:
    return key.sign(signed_bytes(manifest))


def is_signature(content: bytes, manifest: Manifest, key: "Ed25519PublicKey") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(content, signed_bytes(manifest))
    except InvalidSignature:
        return False
    return True


def write_key_pair(path: Path) -> Path:
    """Write a private key to `path` (mode 600), and return the path of the public key.

    Both are PEM files. The public key's name ends in `.pub`.
    """
    _need_cryptography("keygen")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    public = path.with_name(f"{path.name}.pub")
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, private_pem, 0o600), (public, public_pem, 0o644)):
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            raise InvalidInput(
                str(file), "a file that can be made", error.strerror or "an error"
            ) from None
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
    return public


def read_private_key(path: Path, field: str) -> "Ed25519PrivateKey":
    """Read a private key without a passphrase."""
    _need_cryptography(field)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _read_key(path, field, partial(load_pem_private_key, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(
            field, "a private Ed25519 key in PEM, without a passphrase", "another file"
        )
    return key


def read_public_key(path: Path, field: str) -> "Ed25519PublicKey":
    """Read a public key. `field` is the option, for errors."""
    _need_cryptography(field)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _read_key(path, field, load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput(field, "a public Ed25519 key in PEM", "another file")
    return key


def _read_key(path: Path, field: str, load: Callable[[bytes], object]) -> object:
    """Read a key, or return None if the file does not contain one."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        with path.open("rb") as file:
            return load(file.read(MAX_KEY_BYTES))
    except OSError as error:
        raise InvalidInput(field, "a file that can be read", error.strerror or "an error") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # their messages may repeat the key
        return None


def _need_cryptography(field: str) -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise InvalidInput(
            field, "the package of the extra `sign` installed with it", "none of it"
        ) from None
