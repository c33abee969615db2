"""A job that predicts the rows of a file, as /predict does, into a table."""

import json
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.conformal.mondrian import UNKNOWN
from model_store.inference.draws import SharedDraws
from model_store.inference.model import Model
from model_store.inference.prediction import DecisionOptions, Prediction, check_computed, decide
from model_store.inference.runtime import DrawSet
from model_store.sources.columns import count_unknown
from service.api.responses import about_arrays, row_arrays
from service.batch.column_files import ColumnFiles, write_npz
from service.batch.table import table_columns, table_metadata
from service.batch.work import UNKNOWN_CATEGORIES, Work

GROUPS_FILE = "groups.json"
TABLE_ROWS = 1 << 16  # of a row group of parquet


class PredictWork(Work):
    """The work of `POST /predict/jobs`."""

    def run(self) -> Path:
        """Predict the rows, and return the file of the predictions; as `Work.run`."""
        asked, model, options = self.asked, self.model, self.asked.options
        assert options is not None
        ids = self._ids() if self.has_ids else None
        groups = self._groups()
        draws = self._draws(asked.num_samples)
        columns = ColumnFiles(self.folder / "columns")
        self._done = columns.rows * asked.num_samples
        inputs = model.manifest.input.columns
        unknown = columns.note.setdefault(UNKNOWN_CATEGORIES, {})
        for first, x in self._in_runs(self._all(columns.rows), asked.num_samples):
            prediction = prediction_of(model, x, draws, options)
            check_computed(
                prediction.scores.by_name()[prediction.scores.overall], asked.field, first
            )
            if groups is not None:
                prediction = prediction.of_groups(groups[first : first + len(x)])
            arrays = row_arrays(
                model.manifest, prediction, decide(prediction, options), asked.num_samples
            )
            columns.append(dict(arrays))
            count_unknown(unknown, x, inputs)
            self._advance(len(x) * asked.num_samples, columns)
        columns.sync()
        about = dict(about_arrays(model.manifest, asked.seed, options))
        if inputs:
            about[UNKNOWN_CATEGORIES] = np.array([unknown.get(column.name, 0) for column in inputs])
        of_rows = {name: columns.column(name) for name in columns.names}
        if options.fdr is not None:  # which all rows decide together
            of_rows["flag"] = benjamini_hochberg(np.array(of_rows["p_value"]), options.fdr)
        write = _write_parquet if asked.format == "parquet" else _write_npz
        answer = self._written(
            f"predictions.{asked.format}", lambda path: write(path, about, ids, of_rows, model)
        )
        columns.close()
        return answer

    def _groups(self) -> Int64[np.ndarray, "N"] | None:
        """Return the number of each row's group, where the model is calibrated by group."""
        spec = self.model.manifest.categories
        if spec is None or spec.kind != "group":
            return None
        path = self.folder / GROUPS_FILE
        if not path.exists():
            return np.full(self.asked.rows, UNKNOWN)
        numbers = {name: number for number, name in enumerate(spec.names)}
        return np.array(
            [numbers.get(group, UNKNOWN) for group in json.loads(path.read_bytes())], dtype=np.int64
        )


def prediction_of(
    model: Model, x: Float32[np.ndarray, "N I"], draws: DrawSet, options: DecisionOptions
) -> Prediction:
    """Return what a model says of rows under a draw set, each stopping where the options say so."""
    if options.rule is None:
        return model.prediction(*model.runtime.run_set(x, draws), options.priors)
    known, density = model.runtime.before_draws(x)
    rows = SharedDraws(model.runtime, known, draws)
    return model.prediction_with_stopping(rows, density, draws.num_draws, options.rule)


def _write_npz(
    path: Path,
    about: dict[str, np.ndarray],
    ids: list[str] | None,
    of_rows: dict[str, np.ndarray],
    _: Model,
) -> None:
    named = {} if ids is None else {"ids": np.array(ids)}
    write_npz(path, iter({**about, **named, **of_rows}.items()))


def _write_parquet(
    path: Path,
    about: dict[str, np.ndarray],
    ids: list[str] | None,
    of_rows: dict[str, np.ndarray],
    model: Model,
) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = len(next(iter(of_rows.values())))
    metadata = table_metadata(about)
    writer = None
    for first in range(0, rows, TABLE_ROWS):
        here = slice(first, first + TABLE_ROWS)
        columns = ((name, np.asarray(column[here])) for name, column in of_rows.items())
        named = {} if ids is None else {"id": ids[here]}
        batch = pyarrow.table({**named, **table_columns(model.manifest, columns)})
        if writer is None:
            writer = pyarrow.parquet.ParquetWriter(path, batch.schema.with_metadata(metadata))
        writer.write_table(batch.replace_schema_metadata(metadata))
    if writer is not None:
        writer.close()
