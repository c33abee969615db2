"""Evaluation reports: what was measured of a published version, beside it in the store.

`<root>/<name>/evidence/<version>/<number>/` holds a report, `evidence.json`, and the files that it lists. A report is
written to a hidden folder and renamed, whole or not at all; a later one takes the next number, and then the earlier
one is deleted. The report that counts is that of the highest number.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from model_store.artifacts.store import (
    EVIDENCE,
    ModelStore,
    is_name,
    is_version,
    read_regular,
    sync_folder,
    write_synced,
)
from model_store.errors import BrokenArtifact, InvalidInput, NotFound

REPORT = "evidence.json"
MAX_FILE_BYTES = 1 << 24


@dataclass(frozen=True)
class EvaluationReport:
    """A report: its content, and the folder that holds it and the files of its list."""

    name: str
    version: str
    report: dict[str, Any]
    folder: Path

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the report's files, the report's own first."""
        return (REPORT, *self.report["files"])

    def read(self, file: str) -> bytes:
        """Return a file's content.

        Raises:
            NotFound: if the report does not list it, or a newer report has just taken this one's place.
        """
        if file not in self.files:
            raise NotFound(f"file: expected one of {list(self.files)}, got another")
        return _read(self.folder, file)


def publish_report(
    store: ModelStore, name: str, version: str, report: dict[str, Any], files: dict[str, bytes]
) -> EvaluationReport:
    """Write the report of a version (a number) and its files, in place of an earlier one, as a whole.

    Raises:
        NotFound: if there is no such version.
        InvalidInput: if a file's name is not one.
    """
    for file in files:
        if not is_name(file) or file == REPORT:
            raise InvalidInput("files", "names of files", repr(file)[:80])
    store.resolve(name, version)
    with store.writing(name) as folder:
        if version not in store.versions(name):
            raise NotFound(f"version: expected one of {store.versions(name)} of model {name}, got {version!r}")
        reports = folder / EVIDENCE / version
        reports.mkdir(parents=True, exist_ok=True)
        earlier = _numbers(reports)
        draft = Path(mkdtemp(prefix=".draft-", dir=folder))
        content = {**report, "files": sorted(files)}
        for file, data in {**files, REPORT: json.dumps(content, indent=1, allow_nan=False).encode()}.items():
            write_synced(draft / file, data)
        draft.chmod(0o755)
        sync_folder(draft)
        target = reports / str(max(earlier, default=0) + 1)
        draft.rename(target)
        sync_folder(reports)
        for number in earlier:
            shutil.rmtree(reports / str(number))
    return EvaluationReport(name, version, content, target)


def evaluation_report(store: ModelStore, name: str, version: str) -> EvaluationReport | None:
    """Return the report of a version (a number), or None where there is none.

    Raises:
        NotFound: if there is no such version.
        BrokenArtifact: if the report is damaged.
    """
    if version not in store.versions(name):
        raise NotFound(f"version: expected one of {store.versions(name)} of model {name}, got another")
    reports = store.folder(name) / EVIDENCE / version
    if reports.is_symlink() or reports.parent.is_symlink():
        return None
    while numbers := _numbers(reports):
        folder = reports / str(numbers[-1])
        try:
            content = json.loads(_read(folder, REPORT))
        except (ValueError, RecursionError, NotFound):
            content = None
        if _is_report(content):
            return EvaluationReport(name, version, content, folder)
        if numbers == _numbers(reports):  # else a newer report has taken its place meanwhile
            raise BrokenArtifact(
                name, version, REPORT, "is no evaluation report: run `python -m training evaluate` again"
            )
    return None


def _is_report(content: Any) -> bool:
    files = content.get("files") if isinstance(content, dict) else None
    return isinstance(files, list) and all(isinstance(file, str) and is_name(file) for file in files)


def _numbers(reports: Path) -> list[int]:
    if not reports.is_dir():
        return []
    found = [entry for entry in os.scandir(reports) if entry.is_dir(follow_symlinks=False) and is_version(entry.name)]
    return sorted(int(entry.name) for entry in found)


def _read(folder: Path, file: str) -> bytes:
    try:
        content = read_regular(folder / file, MAX_FILE_BYTES)
    except OSError:
        raise NotFound(f"file: expected {file} of an evaluation report, which is gone or cannot be read") from None
    if len(content) > MAX_FILE_BYTES:
        raise NotFound(f"file: expected at most {MAX_FILE_BYTES} bytes in {file}, got more")
    return content
