"""Implementation of the `dubito store` commands."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from model_store.artifacts.folder import Folder
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.signature import (
    MAX_SIGNATURES_BYTES,
    SIGNATURE,
    read_private_key,
    read_trusted_keys,
    write_key_pair,
)
from model_store.artifacts.storage import is_version
from model_store.artifacts.store import LATEST, ModelStore, store_from_environment
from model_store.errors import InvalidInput, StoreError

MAX_SHOWN = 12  # items of a list
HIDDEN = {"name", "version", "format_version", "format_minor", "files", "parity"}


def list_versions(options: argparse.Namespace) -> None:
    store = _open(options)
    for name in store.names():
        aliases = ", ".join(f"{a} -> {v}" for a, v in sorted(store.aliases(name).items()))
        print(f"{name}: versions {', '.join(store.versions(name))} ({aliases})")


def show(options: argparse.Namespace) -> None:
    store = _store_with_key(options)
    print("\n".join(_summary(store, *_version(store, options.version))))


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
                print(f"{name} version {version}: intact{signed}")
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
        expected = "NAME, or NAME:VERSION with a number"
        raise InvalidInput("version", expected, repr(options.version[:80]))
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


def _summary(store: ModelStore, name: str, version: str) -> list[str]:
    manifest = store.manifest(name, version)
    aliases = sorted(alias for alias, number in store.aliases(name).items() if number == version)
    fields = manifest.model_dump(mode="json", exclude=HIDDEN, exclude_none=True)
    training = fields["training"]
    with suppress(KeyError, TypeError):
        training["data"] = training.pop("recipe")["data"]["source"]
    with suppress(KeyError, TypeError):
        training["convergence"] = training.pop("convergence")["summary"]
    sizes = [file.size for file in manifest.files.values()]
    lines = dict(_lines(fields))
    lines["size"] = f"{sum(sizes):,} bytes in {len(sizes)} files"
    lines["signature"] = _signature(store, name, version)
    lines["report"] = _report(store, name, version)
    width = max(map(len, lines))
    title = f"{name} version {version}" + (f" ({', '.join(aliases)})" if aliases else "")
    return [title, *(f"  {key:{width}}  {text}" for key, text in lines.items())]


def _lines(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in fields.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _lines(value, f"{path}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            named = {str(part.get("name", n)): part.get("kind", "") for n, part in enumerate(value)}
            yield from _lines(named, f"{path}.")
        elif isinstance(value, list) and value:
            rest = f", ... ({len(value)} in all)" if len(value) > MAX_SHOWN else ""
            yield path, ", ".join(map(_text, value[:MAX_SHOWN])) + rest
        elif value not in (None, [], ""):
            yield path, _text(value)


def _text(value: Any) -> str:
    return " ".join((f"{value:.6g}" if isinstance(value, float) else str(value)).split())


def _signature(store: ModelStore, name: str, version: str) -> str:
    if store.trusted is not None:  # otherwise the manifest is rejected
        return "by a trusted key"
    try:
        store.storage.read(f"{name}/{version}/{SIGNATURE}", MAX_SIGNATURES_BYTES)
    except OSError:
        return "none"
    return "signed, not verified (use --key)"


def _report(store: ModelStore, name: str, version: str) -> str:
    latest = evaluation_report(store, name, version)
    if latest is None:
        return f"none; create it by `dubito evaluate {name}:{version}`"
    return f"created {latest.report.get('created', 'on an unknown day')}"
