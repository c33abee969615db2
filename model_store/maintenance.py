"""Implementation of the `dubito store` commands."""

import argparse

from model_store.artifacts.folder import Folder
from model_store.artifacts.signature import read_private_key, read_trusted_keys, write_key_pair
from model_store.artifacts.storage import is_version
from model_store.artifacts.store import LATEST, ModelStore, store_from_environment
from model_store.artifacts.summary import summary
from model_store.errors import InvalidInput, StoreError


def list_versions(options: argparse.Namespace) -> None:
    store = _open(options)
    for name in store.names():
        aliases = ", ".join(f"{a} -> {v}" for a, v in sorted(store.aliases(name).items()))
        print(f"{name}: versions {', '.join(store.versions(name))} ({aliases})")


def show(options: argparse.Namespace) -> None:
    store = _store_with_key(options)
    print("\n".join(summary(store, *_version(store, options.version))))


def verify(options: argparse.Namespace) -> int:
    store = _store_with_key(options)
    broken = 0
    for name in store.names():
        for version in store.versions(name):
            try:
                store.open(name, version, files=())
            except StoreError as error:
                print(f"error: {error}")
                broken += 1
            else:
                signed = "" if store.trusted is None else ", signed"
                print(f"{name} version {version}: whole{signed}")
    return 1 if broken else 0


def alias(options: argparse.Namespace) -> None:
    store = _open(options)
    if options.remove != (options.version is None):
        received = "both" if options.remove else "neither"
        raise InvalidInput("alias", "a version or --remove", received)
    if options.remove:
        store.remove_alias(options.name, options.alias)
        return
    if not options.anyway:
        from model_store.inference.preflight import check_version  # loads onnxruntime

        check_version(store, options.name, options.version)
    store.set_alias(options.name, options.alias, options.version)


def keep(options: argparse.Namespace) -> None:
    store = _open(options)
    print("deleted:", ", ".join(store.keep(options.name, options.newest)) or "nothing")


def delete(options: argparse.Namespace) -> None:
    store = _open(options)
    name, colon, version = options.version.partition(":")
    if colon and not is_version(version):
        raise InvalidInput(
            "version", "NAME, or NAME:VERSION with a number", repr(options.version[:80])
        )
    before = store.aliases(name)
    deleted = store.delete(name, version or None, options.force)
    print(f"deleted: {name} version {', '.join(deleted)}")
    for alias in sorted(before.keys() - store.aliases(name).keys()):
        print(f"{alias}: removed")


def keygen(options: argparse.Namespace) -> None:
    print(f"private key: {options.file}, public key: {write_key_pair(options.file)}")


def sign(options: argparse.Namespace) -> None:
    store = _open(options)
    name, number = _version(store, options.version)
    store.sign(name, number, read_private_key(options.key, "--key"))
    print(f"signed: {name} version {number}")


def _open(options: argparse.Namespace) -> ModelStore:
    store = store_from_environment(options.store)
    if isinstance(store.storage, Folder) and not store.root.is_dir():
        raise InvalidInput("DUBITO_STORE", "an existing folder", str(store.root.absolute()))
    return store


def _store_with_key(options: argparse.Namespace) -> ModelStore:
    store = _open(options)
    if options.key is not None:
        store.trusted = read_trusted_keys(options.key, "--key")
    return store


def _version(store: ModelStore, text: str) -> tuple[str, str]:
    name, _, version = text.partition(":")
    return name, store.resolve(name, version or LATEST)
