"""The text summary of a version, as printed by `dubito store show`."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from model_store.artifacts.report import evaluation_report
from model_store.artifacts.signature import MAX_SIGNATURES_BYTES, SIGNATURE
from model_store.artifacts.store import ModelStore

MAX_SHOWN = 12  # items of a list
HIDDEN = {"name", "version", "format_version", "format_minor", "files", "parity"}


def summary(store: ModelStore, name: str, version: str) -> list[str]:
    """Summarize a version's manifest, signature and report, without verifying its files.

    The lines are named after the manifest's fields.
    """
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
    """Yield the path and the text of each field."""
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
    return "there is one; --key checks it"


def _report(store: ModelStore, name: str, version: str) -> str:
    latest = evaluation_report(store, name, version)
    if latest is None:
        return f"none; create it by `dubito evaluate {name}:{version}`"
    return f"created {latest.report.get('created', 'on an unknown day')}"
