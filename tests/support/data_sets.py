"""Data sets of digits for tests, and what lies in an output."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_digits(folder: Path, rows: np.ndarray, files: int, each: int) -> None:
    """Write rows like these, with a little noise so that none is another's copy, to that many
    files."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for i in range(files):
        x = rows[random.integers(0, len(rows), each)] + random.uniform(0, 1, (each, rows.shape[1]))
        table = pa.table(
            {"id": [f"{i}-{j}" for j in range(each)], "x": pa.array(list(x.astype(np.float32)))}
        )
        pq.write_table(table, folder / f"{i}.parquet")


def get_content(out: Path) -> dict[str, bytes]:
    """Each file of an output."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
