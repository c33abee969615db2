"""Evaluation reports of published versions.

A report is stored in `<name>/reports/<version>/`, as `report.json` and the page `report.html`.
`report.json` is deleted first and written last, so that a report is complete if it exists.
"""

import json
from dataclasses import dataclass
from typing import Any

from model_store.artifacts.storage import REPORT, reports_path
from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact, NotFound, list_choices

PAGE = "report.html"
FILES = (REPORT, PAGE)
MAX_FILE_BYTES = 1 << 24


@dataclass(frozen=True)
class EvaluationReport:
    name: str
    version: str
    report: dict[str, Any]
    store: ModelStore

    @property
    def path(self) -> str:
        return reports_path(self.name, self.version)

    def locate(self, file: str) -> str:
        return self.store.storage.locate(f"{self.path}/{file}")

    def read(self, file: str) -> bytes:
        if file not in FILES:
            raise NotFound("file", list_choices(FILES), "another")
        return _read(self.store, self.path, file)


def publish_report(
    store: ModelStore, name: str, version: str, report: dict[str, Any], page: bytes
) -> EvaluationReport:
    """Publish an evaluation report for a version, replacing any earlier one."""
    store.resolve(name, version)
    seal = json.dumps(report, indent=1, allow_nan=False).encode()
    with store.storage.writing(name):
        _check_version(store, name, version)
        store.storage.delete_report(name, version)
        for file, part in ((PAGE, page), (REPORT, seal)):
            store.storage.overwrite(f"{reports_path(name, version)}/{file}", part)
    return EvaluationReport(name, version, report, store)


def evaluation_report(store: ModelStore, name: str, version: str) -> EvaluationReport | None:
    _check_version(store, name, version)
    path = reports_path(name, version)
    if not store.storage.has_file(f"{path}/{REPORT}"):
        return None
    try:
        content = json.loads(_read(store, path, REPORT))
    except (ValueError, RecursionError, NotFound):
        content = None
    if not isinstance(content, dict):
        reason = "is no evaluation report: run `dubito evaluate` again"
        raise BrokenArtifact(name, version, REPORT, reason)
    return EvaluationReport(name, version, content, store)


def _check_version(store: ModelStore, name: str, version: str) -> None:
    versions = store.versions(name)
    if version not in versions:
        raise NotFound("version", f"{list_choices(versions)} of model {name}", repr(version)[:80])


def _read(store: ModelStore, path: str, file: str) -> bytes:
    try:
        content = store.storage.read(f"{path}/{file}", MAX_FILE_BYTES)
    except OSError:
        raise NotFound("file", f"{file} of an evaluation report", "none that can be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise NotFound("file", f"at most {MAX_FILE_BYTES} bytes in {file}", "more")
    return content
