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
NOT_OURS = f"{SIGNATURE}: no signature of this version by a trusted key"


@pytest.fixture
def key():
    return Ed25519PrivateKey.generate()


@pytest.fixture
def trusting(store, key):
    for name, version in (("m", "1"), ("m", "2"), ("n", "1")):
        assert store.publish(name, tiny_description(), tiny_files()).version == version
        store.sign(name, version, key)
    return ModelStore(store.root, TrustedKeys((key.public_key(),)))


def get_signature(store, name, version):
    return store.root / name / version / SIGNATURE


def assert_refused(store, name, version, reason):
    for read in (store.manifest, store.open):
        with pytest.raises(BrokenArtifact) as raised:
            read(name, version)
        assert str(raised.value) == f"model {name} version {version}: {reason}"


def test_the_signature_is_that_of_the_format(trusting, key):
    digest = json.loads((trusting.root / "m" / "2" / "manifest.json").read_text())["digest"]
    text = f"dubito version 1\nm\n2\n{digest}\n".encode()
    key.public_key().verify(get_signature(trusting, "m", "2").read_bytes(), text)


def test_every_changed_byte_of_a_signature_is_found(trusting):
    path = get_signature(trusting, "m", "1")
    full = path.read_bytes()
    assert len(full) == 64
    for position in range(64):
        changed = bytearray(full)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        assert_refused(trusting, "m", "1", NOT_OURS)
    for changed in (full[:-1], full + b"\0", b""):
        path.write_bytes(changed)
        assert_refused(trusting, "m", "1", NOT_OURS)


def test_changed_files_with_a_manifest_made_right_are_refused(trusting):
    shutil.rmtree(trusting.root / "m" / "1")
    other = ModelStore(trusting.root.parent / "other")
    other.publish("m", tiny_description(), tiny_files() | {"network.onnx": b"another"})
    shutil.copytree(other.root / "m" / "1", trusting.root / "m" / "1")
    assert_refused(trusting, "m", "1", UNSIGNED)
    shutil.copy(get_signature(trusting, "m", "2"), get_signature(trusting, "m", "1"))
    assert_refused(trusting, "m", "1", NOT_OURS)


def test_signatures_of_other_versions_and_names_are_refused(trusting):
    """Also where name and version are all that differ: manifests that were rewritten to say the
    same."""
    places = [("m", "1"), ("m", "2"), ("n", "1")]
    signatures = {place: get_signature(trusting, *place).read_bytes() for place in places}
    for place in places:
        for other in places:
            get_signature(trusting, *place).write_bytes(signatures[other])
            if place == other:
                assert trusting.open(*place).files == tiny_files()
            else:
                assert_refused(trusting, *place, NOT_OURS)


def test_a_version_may_have_signatures_by_several_keys(trusting, key):
    other = Ed25519PrivateKey.generate()
    trusting.sign("m", "1", other)
    assert trusting.open("m", "1").files == tiny_files()
    assert_refused(
        ModelStore(trusting.root, TrustedKeys((other.public_key(),))), "m", "2", NOT_OURS
    )
    assert (
        ModelStore(trusting.root, TrustedKeys((other.public_key(),))).open("m", "1").files
        == tiny_files()
    )
    before = get_signature(trusting, "m", "1").read_bytes()
    trusting.sign("m", "1", key)  # again
    assert sorted(split_signatures(get_signature(trusting, "m", "1").read_bytes())) == sorted(
        split_signatures(before)
    )
    for _ in range(8):
        trusting.sign("m", "1", Ed25519PrivateKey.generate())
    assert_refused(trusting, "m", "1", NOT_OURS)  # the oldest signatures were dropped
    trusting.sign("m", "1", key)
    assert trusting.open("m", "1").files == tiny_files()
    assert not [*(trusting.root / "m").glob(".draft-*")]


def test_what_is_broken_or_not_there_is_not_signed(trusting, key):
    (trusting.root / "m" / "1" / "network.onnx").write_bytes(b"")
    with pytest.raises(BrokenArtifact, match=r"network\.onnx"):
        trusting.sign("m", "1", key)
    with pytest.raises(NotFound):
        trusting.sign("m", "9", key)
    with pytest.raises(NotFound):
        trusting.sign("nothing", "1", key)
    assert not (trusting.root / "nothing").exists()


def test_a_link_or_a_pipe_in_place_of_a_signature_is_refused_without_waiting(trusting):
    path = get_signature(trusting, "m", "1")
    path.rename(trusting.root / "elsewhere")
    path.symlink_to(trusting.root / "elsewhere")
    with pytest.raises(BrokenArtifact, match=SIGNATURE):
        trusting.manifest("m", "1")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BrokenArtifact, match=SIGNATURE):
        trusting.manifest("m", "1")


# Keys


def test_a_pair_of_keys_is_written_once_and_read_back(tmp_path, store):
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


def pem_files(folder):
    key, other = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
    form = (Encoding.PEM, PrivateFormat.PKCS8)
    contents = {
        "private": key.private_bytes(*form, NoEncryption()),
        "locked": key.private_bytes(*form, BestAvailableEncryption(b"passphrase")),
        "public": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "other": other.private_bytes(*form, NoEncryption()),
        "other public": other.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        ),
        "empty": b"",
        "text": b"not a key",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {*contents, "missing", "."}


def test_files_that_hold_no_such_key_are_refused_by_field(tmp_path):
    for read, good in ((read_private_key, "private"), (read_trusted_keys, "public")):
        for name in pem_files(tmp_path) - {good}:
            with pytest.raises(
                InvalidInput,
                match=r"^--key: expected (a file that can be read|a private|public )",
            ):
                read(tmp_path / name, "--key")


def write_public(path, *keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(b"\n".join(key.public_key().public_bytes(*form) for key in keys))
    return path


def test_keys_rotate_with_several_trusted_keys_in_a_file_or_a_folder(trusting, key, tmp_path):
    new = Ed25519PrivateKey.generate()
    trusting.sign("m", "2", new)
    file = write_public(tmp_path / "both.pub", new, key)
    folder = write_public(tmp_path / "keys" / "old.pub", key).parent
    write_public(folder / "new.pub", new)
    for place in (file, folder):
        trusted = read_trusted_keys(place, "--key")
        assert len(trusted.keys) == 2
        store = ModelStore(trusting.root, trusted)
        assert {v: store.manifest("m", v).version for v in "12"} == {"1": "1", "2": "2"}
    file.write_bytes(file.read_bytes() + b"-----BEGIN PUBLIC KEY-----\n!\n-----END PUBLIC KEY-----")
    with pytest.raises(InvalidInput, match="--key: expected public Ed25519 keys in PEM"):
        read_trusted_keys(file, "--key")


def test_a_key_in_the_folder_of_a_model_counts_only_for_this_model(trusting, key, tmp_path):
    write_public(tmp_path / "keys" / "n" / "publisher.pub", key)
    store = ModelStore(trusting.root, read_trusted_keys(tmp_path / "keys", "--key"))
    assert store.open("n", "1").files == tiny_files()
    assert_refused(store, "m", "1", NOT_OURS)


# The commands


def test_the_commands_make_a_key_sign_and_verify(store, tmp_path):
    for _ in range(2):
        store.publish("m", tiny_description(), tiny_files())
    key, public = tmp_path / "key", tmp_path / "key.pub"
    assert run_store(store, "keygen", key).stdout == f"private key: {key}, public key: {public}\n"
    assert run_store(store, "sign", "m", "--key", key).stdout == "signed: m version 2\n"
    completed = run_store(store, "verify", "--key", public)
    assert completed.returncode == 1
    assert completed.stdout.splitlines() == [
        f"error: model m version 1: {UNSIGNED}",
        "m version 2: whole, signed",
    ]
    assert run_store(store, "sign", "m:1", "--key", key).returncode == 0
    assert run_store(store, "verify", "--key", public).returncode == 0
    assert run_store(store, "verify").stdout.splitlines() == [
        "m version 1: whole",
        "m version 2: whole",
    ]
    wrong = run_store(store, "sign", "m", "--key", public)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --key: expected a private Ed25519 key")
