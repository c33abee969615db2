import json
import os
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from model_store.artifacts.signature import (
    SIGNATURE,
    TrustedKeys,
    read_private_key,
    read_trusted_keys,
    split_signatures,
    write_key_pair,
)
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, InvalidInput, NotFound
from tests.support.environment import run_store
from tests.support.stores import tiny_description, tiny_files

UNSIGNED = f"{SIGNATURE}: there is none: the version is not signed"
UNTRUSTED = f"{SIGNATURE}: no signature of this version by a trusted key"


@pytest.fixture
def key():
    return Ed25519PrivateKey.generate()


@pytest.fixture
def signed_store(store, key):
    for name, version in (("m", "1"), ("m", "2"), ("n", "1")):
        assert store.publish(name, tiny_description(), tiny_files()).version == version
        store.sign(name, version, key)
    return ModelStore(store.root, TrustedKeys((key.public_key(),)))


def get_signature_path(store, name, version):
    return store.root / name / version / SIGNATURE


def assert_refused(store, name, version, reason):
    for read in (store.manifest, store.open):
        with pytest.raises(BrokenArtifact) as exc_info:
            read(name, version)
        assert str(exc_info.value) == f"model {name} version {version}: {reason}"


def test_signature_covers_name_version_and_digest(signed_store, key):
    digest = json.loads((signed_store.root / "m" / "2" / "manifest.json").read_text())["digest"]
    text = f"dubito version 1\nm\n2\n{digest}\n".encode()
    key.public_key().verify(get_signature_path(signed_store, "m", "2").read_bytes(), text)


def test_any_changed_byte_of_signature_is_refused(signed_store):
    path = get_signature_path(signed_store, "m", "1")
    signature = path.read_bytes()
    assert len(signature) == 64
    for position in range(64):
        variant = bytearray(signature)
        variant[position] ^= 1 << position % 8
        path.write_bytes(variant)
        assert_refused(signed_store, "m", "1", UNTRUSTED)
    for variant in (signature[:-1], signature + b"\0", b""):
        path.write_bytes(variant)
        assert_refused(signed_store, "m", "1", UNTRUSTED)


def test_changed_files_with_matching_manifest_are_refused(signed_store):
    shutil.rmtree(signed_store.root / "m" / "1")
    forged_store = ModelStore(signed_store.root.parent / "other")
    forged_store.publish("m", tiny_description(), tiny_files() | {"network.onnx": b"another"})
    shutil.copytree(forged_store.root / "m" / "1", signed_store.root / "m" / "1")
    assert_refused(signed_store, "m", "1", UNSIGNED)
    shutil.copy(
        get_signature_path(signed_store, "m", "2"), get_signature_path(signed_store, "m", "1")
    )
    assert_refused(signed_store, "m", "1", UNTRUSTED)


def test_signature_of_another_version_or_model_is_refused(signed_store):
    """The manifests differ only in name and version."""
    versions = [("m", "1"), ("m", "2"), ("n", "1")]
    signatures = {
        target: get_signature_path(signed_store, *target).read_bytes() for target in versions
    }
    for target in versions:
        for source in versions:
            get_signature_path(signed_store, *target).write_bytes(signatures[source])
            if target == source:
                assert signed_store.open(*target).files == tiny_files()
            else:
                assert_refused(signed_store, *target, UNTRUSTED)


def test_version_can_have_signatures_by_several_keys(signed_store, key):
    other_key = Ed25519PrivateKey.generate()
    signed_store.sign("m", "1", other_key)
    assert signed_store.open("m", "1").files == tiny_files()
    assert_refused(
        ModelStore(signed_store.root, TrustedKeys((other_key.public_key(),))), "m", "2", UNTRUSTED
    )
    assert (
        ModelStore(signed_store.root, TrustedKeys((other_key.public_key(),))).open("m", "1").files
        == tiny_files()
    )
    before = get_signature_path(signed_store, "m", "1").read_bytes()
    signed_store.sign("m", "1", key)  # repeated
    assert sorted(
        split_signatures(get_signature_path(signed_store, "m", "1").read_bytes())
    ) == sorted(split_signatures(before))
    for _ in range(8):
        signed_store.sign("m", "1", Ed25519PrivateKey.generate())
    assert_refused(signed_store, "m", "1", UNTRUSTED)  # the oldest signatures were dropped
    signed_store.sign("m", "1", key)
    assert signed_store.open("m", "1").files == tiny_files()
    assert not [*(signed_store.root / "m").glob(".draft-*")]


def test_broken_or_missing_versions_are_not_signed(signed_store, key):
    (signed_store.root / "m" / "1" / "network.onnx").write_bytes(b"")
    with pytest.raises(BrokenArtifact, match=r"network\.onnx"):
        signed_store.sign("m", "1", key)
    with pytest.raises(NotFound):
        signed_store.sign("m", "9", key)
    with pytest.raises(NotFound):
        signed_store.sign("nothing", "1", key)
    assert not (signed_store.root / "nothing").exists()


def test_symlink_or_pipe_as_signature_is_refused_without_blocking(signed_store):
    path = get_signature_path(signed_store, "m", "1")
    path.rename(signed_store.root / "elsewhere")
    path.symlink_to(signed_store.root / "elsewhere")
    with pytest.raises(BrokenArtifact, match=SIGNATURE):
        signed_store.manifest("m", "1")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BrokenArtifact, match=SIGNATURE):
        signed_store.manifest("m", "1")


# Keys


def test_key_pair_is_written_once_and_read_back(tmp_path, store):
    private, public = tmp_path / "signing.pem", tmp_path / "signing.pem.pub"
    assert write_key_pair(private) == public
    assert (private.stat().st_mode & 0o777, public.stat().st_mode & 0o077) == (0o600, 0o044)
    content = private.read_bytes(), public.read_bytes()
    store.publish("m", tiny_description(), tiny_files())
    store.sign("m", "1", read_private_key(private, "key"))
    assert (
        ModelStore(store.root, read_trusted_keys(public, "key")).open("m", "1").files
        == tiny_files()
    )
    with pytest.raises(InvalidInput, match="a file that can be made, got File exists"):
        write_key_pair(private)
    assert (private.read_bytes(), public.read_bytes()) == content


def write_pem_files(folder):
    key, x25519_key = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
    encoding = (Encoding.PEM, PrivateFormat.PKCS8)
    contents = {
        "private": key.private_bytes(*encoding, NoEncryption()),
        "locked": key.private_bytes(*encoding, BestAvailableEncryption(b"passphrase")),
        "public": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "other": x25519_key.private_bytes(*encoding, NoEncryption()),
        "other public": x25519_key.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        ),
        "empty": b"",
        "text": b"not a key",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {*contents, "missing", "."}


def test_files_without_the_expected_key_are_refused(tmp_path):
    for read_key, valid_name in ((read_private_key, "private"), (read_trusted_keys, "public")):
        for name in write_pem_files(tmp_path) - {valid_name}:
            with pytest.raises(
                InvalidInput,
                match=r"^--key: expected (a file that can be read|a private|public )",
            ):
                read_key(tmp_path / name, "--key")


def write_public_keys(path, *keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(b"\n".join(key.public_key().public_bytes(*encoding) for key in keys))
    return path


def test_keys_rotate_with_several_trusted_keys_in_file_or_folder(signed_store, key, tmp_path):
    new_key = Ed25519PrivateKey.generate()
    signed_store.sign("m", "2", new_key)
    file = write_public_keys(tmp_path / "both.pub", new_key, key)
    folder = write_public_keys(tmp_path / "keys" / "old.pub", key).parent
    write_public_keys(folder / "new.pub", new_key)
    for path in (file, folder):
        trusted = read_trusted_keys(path, "--key")
        assert len(trusted.keys) == 2
        store = ModelStore(signed_store.root, trusted)
        assert {v: store.manifest("m", v).version for v in "12"} == {"1": "1", "2": "2"}
    file.write_bytes(file.read_bytes() + b"-----BEGIN PUBLIC KEY-----\n!\n-----END PUBLIC KEY-----")
    with pytest.raises(InvalidInput, match="--key: expected public Ed25519 keys in PEM"):
        read_trusted_keys(file, "--key")


# Commands


def test_commands_create_key_sign_and_verify(store, tmp_path):
    for _ in range(2):
        store.publish("m", tiny_description(), tiny_files())
    key, public = tmp_path / "key", tmp_path / "key.pub"
    assert run_store(store, "keygen", key).stdout == f"private key: {key}, public key: {public}\n"
    assert run_store(store, "sign", "m", "--key", key).stdout == "signed: m version 2\n"
    completed = run_store(store, "verify", "--key", public)
    assert completed.returncode == 1
    assert completed.stdout.splitlines() == [
        f"error: model m version 1: {UNSIGNED}",
        "m version 2: intact, signed",
    ]
    assert run_store(store, "sign", "m:1", "--key", key).returncode == 0
    assert run_store(store, "verify", "--key", public).returncode == 0
    assert run_store(store, "verify").stdout.splitlines() == [
        "m version 1: intact",
        "m version 2: intact",
    ]
    failure = run_store(store, "sign", "m", "--key", public)
    assert failure.returncode == 2
    assert failure.stderr.startswith("error: --key: expected a private Ed25519 key")
