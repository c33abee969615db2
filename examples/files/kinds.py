"""Kinds of files on this machine, as the rows that magika's encoder takes: the first and the last
1,024 bytes."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

KINDS = [
    "py",
    "h",
    "js",
    "html",
    "css",
    "json",
    "xml",
    "rst",
    "txt",
    "pyc",
    "so",
    "png",
    "svg",
    "c",
]
FOLDERS = [Path(sys.prefix), Path("/usr/share"), Path("/usr/lib"), Path("/usr/include")]
SIZE, BLOCK, PADDING, EACH = 1024, 4096, 256, 300


def row(content):
    """Return a file's bytes from both ends, stripped, each filled up to 1,024 numbers."""
    first, last = content[:BLOCK].lstrip()[:SIZE], content[-BLOCK:].rstrip()[-SIZE:]
    return [*first, *[PADDING] * (2 * SIZE - len(first) - len(last)), *last]


if __name__ == "__main__":
    magika = Path(find_spec("magika").origin).parent
    shutil.copy(magika / "models" / "standard_v3_3" / "model.onnx", "data/magika.onnx")
    rows, labels = [], []
    generator = np.random.default_rng(0)
    for kind in KINDS:
        files = sorted(
            path for folder in FOLDERS for path in folder.rglob(f"*.{kind}") if path.is_file()
        )
        contents = {path.read_bytes() for path in generator.permutation(files)[: 3 * EACH]}
        kept = sorted(content for content in contents if len(content) >= 64)
        for i in generator.permutation(len(kept))[:EACH]:
            rows.append(row(kept[i]))
            labels.append(kind)
    np.savez_compressed("data/files.npz", x=np.array(rows, dtype=np.int32), y=np.array(labels))
