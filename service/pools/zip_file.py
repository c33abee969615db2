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
            raise self._rows_error("a zip for a model of images or text alone", "one for another model")
        with zip_of(source, "a whole zip file", field) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir() and not _is_of_system(info.filename)]
        encrypted = [info for info in infos if info.flag_bits & 1]
        if encrypted:
            raise self._rows_error("a zip of files without passwords", "one with")
        self._names, self.has_ids = sorted(info.filename for info in infos), True
        self.rows = len(self._names)
        self.read_as = "its files, in the order of their names"

    @property
    def _is_files(self) -> bool:
        return True

    def ids(self) -> list[str] | None:
        """Return the files' names."""
        return self._names

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the bytes of files."""
        with zip_of(self.source, "a whole zip file", self.field) as archive:
            part, held = [], 0
            for name in self._names[first:]:
                part.append(self._content(archive, name))
                held += len(part[-1])
                if len(part) == self.at_once or held > BYTES_AT_ONCE:
                    yield part
                    part, held = [], 0
            if part:
                yield part

    def _content(self, archive: zipfile.ZipFile, name: str) -> bytes:
        with archive.open(name) as file:
            content = file.read(MOST_MEMBER_BYTES + 1)
        if len(content) > MOST_MEMBER_BYTES:
            raise self._rows_error(f"files of at most {MOST_MEMBER_BYTES} bytes", f"a larger one, {name[:200]}")
        return content


def _is_of_system(name: str) -> bool:
    """Whether a member of a zip is no file of the user's, but one that macOS or Windows put there."""
    parts = name.split("/")
    return parts[0] == "__MACOSX" or parts[-1].startswith(".") or parts[-1] in ("Thumbs.db", "desktop.ini")
