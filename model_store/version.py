"""The version of Dubito."""

import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "0.1.0"
DESCRIBE = ["git", "describe", "--tags", "--match=v[0-9]*", "--long", "--always", "--abbrev=8"]


@cache
def read_version() -> str:
    """Return the version of this checkout, source archive or installed package.

    At the git tag v1.2.0 the version is 1.2.0, and three commits later 1.2.0.post3+g1a2b3c4d. If
    there is no tag, it is 0.1.0.dev0+g1a2b3c4d.
    """
    with suppress(OSError, subprocess.CalledProcessError):
        if (ROOT / ".git").exists():
            return _parse(subprocess.check_output(DESCRIBE, cwd=ROOT, text=True, stderr=-3))
    if (ROOT / "PKG-INFO").exists():
        return metadata.Distribution.at(ROOT).version
    try:
        return metadata.version("dubito")
    except metadata.PackageNotFoundError:
        return f"{FIRST}.dev0"


def _parse(description: str) -> str:
    match = re.fullmatch(r"(?:v(.+)-(\d+)-g)?([0-9a-f]+)", description.strip())
    assert match is not None
    tag, commits, revision = match.groups()
    if tag is None:
        return f"{FIRST}.dev0+g{revision}"
    return tag if commits == "0" else f"{tag}.post{commits}+g{revision}"
