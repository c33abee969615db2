"""Evidence cards over HTTP: links to a version's card, and its files."""

from typing import Any
from urllib.parse import quote

from model_store.artifacts.evidence import Evidence, evidence
from model_store.errors import NotFound, StoreError
from service.registry.models import Models

MEDIA_TYPES = {"json": "application/json", "md": "text/markdown; charset=utf-8", "png": "image/png"}
OTHER = "application/octet-stream"


def evidence_links(models: Models, name: str, version: str | None) -> dict[str, Any] | None:
    """Return the summary of a version's card and where its files are; None where no card can be read."""
    if version is None:
        return None
    try:
        found = evidence(models.store, name, version)
    except StoreError:  # the route of the card says what is wrong with it
        return None
    if found is None:
        return None
    href = f"/models/{quote(name)}/versions/{version}/evidence"
    return {
        "version": version,
        "created": found.card.get("created"),
        "summary": found.card.get("summary"),
        "href": href,
        "files": {file: f"{href}/{quote(file)}" for file in found.files},
    }


def evidence_file(models: Models, name: str, version: str, file: str) -> tuple[bytes, str]:
    """Return a file of a version's card, and its media type; reads the store.

    Raises:
        NotFound: if there is no such model or version, no card of it, or no such file on the card.
        BrokenArtifact: if the card is damaged.
    """
    name = models.name(name)
    number = models.resolve(name, version)
    found: Evidence | None = evidence(models.store, name, number)
    if found is None:
        how = f"run `python -m training evaluate {name}:{number}`"
        raise NotFound(f"evidence: expected a card of model {name} version {number}, got none: {how}")
    return found.read(file), MEDIA_TYPES.get(file.rpartition(".")[2], OTHER)
