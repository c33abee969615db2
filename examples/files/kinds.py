"""Build a data set of local files by type. A row is a file's first and last 1,024 bytes."""

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
    """Return the first and last 1,024 bytes of a file, without outer whitespace, padded."""
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
        usable = sorted(content for content in contents if len(content) >= 64)
        for i in generator.permutation(len(usable))[:EACH]:
            rows.append(row(usable[i]))
            labels.append(kind)
    np.savez_compressed("data/files.npz", x=np.array(rows, dtype=np.int32), y=np.array(labels))
