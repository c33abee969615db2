"""Data sets of digits."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_digits(folder: Path, rows: np.ndarray, files: int, each: int) -> None:
    """Write noisy copies of rows to several files."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for i in range(files):
        x = rows[random.integers(0, len(rows), each)] + random.uniform(0, 1, (each, rows.shape[1]))
        table = pa.table(
            {"id": [f"{i}-{j}" for j in range(each)], "x": pa.array(list(x.astype(np.float32)))}
        )
        pq.write_table(table, folder / f"{i}.parquet")


def get_content(out: Path) -> dict[str, bytes]:
    """Read all files of an output folder."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
