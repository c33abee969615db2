"""Zips of images or texts."""

import zipfile
from collections.abc import Iterator

from model_store.artifacts.manifest import InputSpec
from service.pools.pool_file import Part, PoolFile, Source, zip_of

MOST_MEMBER_BYTES = 64 << 20  # of a file, once inflated
BYTES_AT_ONCE = 32 << 20  # of a part, about


class ZipOfFiles(PoolFile):
    """A zip of image files, or of texts; each is a row, its name the id."""

    ENDING = ".zip"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        if spec.image is None and spec.text is None:
            raise self._rows_error(
                "a zip for a model of images or text alone", "one for another model"
            )
        with zip_of(source, "a whole zip file", field) as archive:
            listed = [info for info in archive.infolist() if not info.is_dir()]
        # Windows may write folders with \\.
        named = [
            (info.filename if "/" in info.filename else info.filename.replace("\\", "/"), info)
            for info in listed
        ]
        members = [
            (name, info)
            for name, info in named
            if not name.endswith("/") and not _is_of_system(name)
        ]
        if any(info.flag_bits & 1 for _, info in members):
            raise self._rows_error("a zip of files without passwords", "one with")
        self._members, self.has_ids = sorted(members, key=lambda member: member[0]), True
        self.rows = len(self._members)
        self.read_as = "its files, in the order of their names"

    @property
    def _is_files(self) -> bool:
        return True

    def ids(self) -> list[str] | None:
        """Return the files' names."""
        return [name for name, _ in self._members]

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the bytes of files."""
        with zip_of(self.source, "a whole zip file", self.field) as archive:
            part, held = [], 0
            for name, info in self._members[first:]:
                part.append(self._content(archive, name, info))
                held += len(part[-1])
                if len(part) == self.at_once or held > BYTES_AT_ONCE:
                    yield part
                    part, held = [], 0
            if part:
                yield part

    def _content(self, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> bytes:
        with archive.open(info) as file:
            content = file.read(MOST_MEMBER_BYTES + 1)
        if len(content) > MOST_MEMBER_BYTES:
            raise self._rows_error(
                f"files of at most {MOST_MEMBER_BYTES} bytes", f"a larger one, {name[:200]}"
            )
        return content


def _is_of_system(name: str) -> bool:
    """Whether a member of a zip is no file of the user's, but one that macOS or Windows put
    there."""
    parts = name.split("/")
    return (
        parts[0] == "__MACOSX"
        or parts[-1].startswith(".")
        or parts[-1] in ("Thumbs.db", "desktop.ini")
    )
