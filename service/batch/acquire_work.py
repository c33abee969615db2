"""A job that ranks a pool, as /acquire does: by scores of all rows, a race, or a choice among the
best candidates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from model_store.acquisition.choice import (
    RANDOM,
    Raced,
    Scored,
    candidates_of,
    check_scores_of,
    copies_among,
    joint_ranking,
    power_ranking,
    race,
    race_stages,
    ranking,
    row_digests,
)
from model_store.acquisition.scoring import pool_candidates, pool_scores, race_scores
from model_store.inference.model import Model
from model_store.inference.prediction import check_computed
from model_store.scores.joint import Candidates
from model_store.sources.columns import count_unknown
from model_store.state.labels import AcquiredRow, Acquisition, row_format
from service.api.responses import acquire_answer
from service.batch.asked import Asked
from service.batch.column_files import ColumnFiles
from service.batch.work import UNKNOWN_CATEGORIES, Work
from service.engine.keeping import acquired_rows, control_said, set_aside

SELECTED_FILE = "selected.npz"
ANSWER_FILE = "answer.json"
TIMES_FIRST_LAP = (
    1.5  # times the first lap of a race is all of it, of pools of which few rows are uncertain
)


def rows_answered(folder: Path, asked: Asked) -> tuple[int, int]:
    """Return how many rows the answer of a job in a folder has, and how many of them are set
    aside."""
    if not asked.selected:
        return min(asked.k, asked.rows), 0
    with np.load(folder / SELECTED_FILE, allow_pickle=False) as selected:
        ranked, control = len(selected["ranked"]), len(selected["control"])
    return control + min(asked.k - control, ranked), control


class AcquireWork(Work):
    """The work of `POST /acquire/jobs`."""

    def __init__(
        self,
        folder: Path,
        asked: Asked,
        model: Model,
        report: Callable[[int, int], bool],
        keep: Callable[[Acquisition, list[AcquiredRow]], None],
    ) -> None:
        """Prepare; `keep` keeps the rows of a ranking that is to be kept. Otherwise as `Work`."""
        super().__init__(folder, asked, model, report)
        self._keep = keep
        self._k = asked.k
        self._unknown: dict[str, int] = {}  # categories of the rows that are scored

    def run(self) -> Path:
        """Rank the pool, and return the file of the answer; as `Work.run`."""
        asked, model = self.asked, self.model
        ids = self._ids()
        kept, control = np.arange(asked.rows), np.empty(0, dtype=np.int64)
        if asked.selected:
            with np.load(self.folder / SELECTED_FILE, allow_pickle=False) as selected:
                kept, control = selected["ranked"], selected["control"]
        self._k = asked.k - len(control)
        kept_ids = [ids[i] for i in kept.tolist()] if asked.selected else ids
        stages = race_stages(asked.race, asked.acquisition, model.manifest.task, asked.num_samples)
        finalists: int | None = None
        ranked: list[dict[str, Any]]
        if self._k == 0 or len(kept) == 0:
            ranked = []
        elif asked.acquisition == RANDOM:
            ranked = ranking(None, kept_ids, asked.seed, self._k)
        elif stages and asked.race is not None:
            raced = self._race(kept, stages, asked.race)
            finalists, ranked = (
                raced.finalists,
                ranking(raced.scores, kept_ids, asked.seed, self._k),
            )
        elif asked.acquisition in model.predictive.batches:
            ranked = self._batch(kept, kept_ids)
        else:
            scores = self._scores(kept)[0]
            ranked = ranking(scores, kept_ids, asked.seed, self._k)
        for row in ranked:
            row |= {"index": int(kept[row["index"]]), "control": False}
        ranked += set_aside(control.tolist(), ids, len(ranked))
        if asked.keep:
            self._keep_rows(ranked)
        answer = acquire_answer(
            model.manifest,
            acquisition=asked.acquisition,
            num_samples=asked.num_samples,
            seed=asked.seed,
            pool_size=asked.rows,
            excluded=asked.excluded,
            priors=asked.priors,
            race=asked.race,
            beta=asked.beta,
            finalists=finalists,
            unknown_categories=self._unknown,
            ranking=ranked,
        )
        return self._written(ANSWER_FILE, lambda path: path.write_text(json.dumps(answer)))

    def _race(
        self, kept: Int64[np.ndarray, "M"], stages: tuple[int, ...], probability: float
    ) -> Raced:
        """Return what comes of a race, each lap of which is kept."""
        asked = self.asked
        laps = race(len(kept), self._k, stages, asked.num_samples, probability, asked.field)
        least = int(
            TIMES_FIRST_LAP * len(kept) * stages[0]
        )  # about what it comes to, so that progress does not fall
        wanted, number, lap = 0, 0, next(laps)
        while True:
            wanted += len(lap.rows) * lap.num_draws
            self._work = max(wanted, least)
            scored = self._lap(f"lap {number}", kept[lap.rows], lap.num_draws)
            try:
                number, lap = number + 1, laps.send(scored)
            except StopIteration as ended:
                raced: Raced = ended.value
                return raced

    def _lap(self, name: str, rows: Int64[np.ndarray, "n"], num_draws: int) -> Scored:
        """Return the scores of some rows, in ascending order, under the first draws, and their
        standard errors."""
        asked, draws, columns = self.asked, self._draws(num_draws), ColumnFiles(self.folder / name)
        self._done += columns.rows * num_draws
        is_last, unknown = (
            num_draws == asked.num_samples,
            columns.note.setdefault(UNKNOWN_CATEGORIES, {}),
        )
        for _, x in self._in_runs(self._some(rows[columns.rows :]), num_draws):
            request = self.model, x, draws, asked.acquisition, asked.priors
            if is_last:
                of_rows = {"score": pool_scores(*request)}
            else:
                of_rows = dict(zip(("score", "error"), race_scores(*request), strict=True))
            check_scores_of(
                of_rows["score"], rows[columns.rows : columns.rows + len(x)], asked.field
            )
            columns.append(of_rows)
            count_unknown(unknown, x, self.model.manifest.input.columns)
            self._advance(len(x) * num_draws, columns)
        columns.sync()
        self._unknown = self._unknown or unknown  # of the first lap, in which all rows are
        found = (
            np.array(columns.column("score")),
            None if is_last else np.array(columns.column("error")),
        )
        columns.close()
        return found

    def _batch(self, kept: Int64[np.ndarray, "M"], ids: list[str]) -> list[dict[str, Any]]:
        """Return the ranking of a pool of which a batch is chosen."""
        asked, model = self.asked, self.model
        scores, digests = self._scores(kept)
        copies = copies_among(digests)
        if asked.acquisition not in model.predictive.joint_scores:
            return power_ranking(scores, copies, ids, asked.seed, self._k, asked.beta)
        most = candidates_of(
            asked.acquisition, model, len(copies.first), self._k, asked.num_samples
        )
        assert most is not None
        rows = np.lexsort((np.arange(len(copies.first)), -scores[copies.first]))[:most]
        self._work += len(rows) * asked.num_samples
        joint = model.predictive.joint_scores[asked.acquisition](
            self._candidates(kept[copies.first[rows]]), asked.num_samples, asked.seed
        )
        return joint_ranking(joint, rows, copies, ids, self._k)

    def _keep_rows(self, ranked: list[dict[str, Any]]) -> None:
        """Keep the rows of a ranking, and what the version says of those that are set aside."""
        asked, model, draws = self.asked, self.model, self._draws(self.asked.num_samples)
        places = sorted(row["index"] for row in ranked)
        if not places:
            return
        x = np.concatenate([part for _, part in self._some(np.array(places))])
        pool = dict(zip(places, x, strict=True))
        said: list[dict[str, Any]] = []
        aside = np.array([pool[row["index"]] for row in ranked if row["control"]]).reshape(
            -1, x.shape[1]
        )
        for _, part in self._in_runs(iter([(0, aside)]), asked.num_samples):
            said += control_said(
                model.manifest, model.prediction(*model.runtime.run_set(part, draws), None)
            )
        spec = row_format(model.manifest)
        how = Acquisition(
            asked.model, asked.version, spec, asked.acquisition, asked.seed, asked.num_samples
        )
        self._keep(how, acquired_rows(pool, ranked, said))

    def _candidates(self, rows: Int64[np.ndarray, "C"]) -> Candidates:
        """Return what the draws say of some rows of the pool, in their order."""
        asked, draws = self.asked, self._draws(self.asked.num_samples)
        parts = []
        for _, x in self._in_runs(self._some(np.sort(rows)), asked.num_samples):
            parts.append(pool_candidates(self.model, x, draws, asked.acquisition, asked.priors))
            self._advance(len(x) * asked.num_samples)
        place = np.argsort(np.argsort(rows))
        return Candidates(
            np.concatenate([part.gain for part in parts])[place],
            np.concatenate([part.own for part in parts])[place],
            np.concatenate([part.said for part in parts])[place],
        )

    def _scores(
        self, rows: Int64[np.ndarray, "M"]
    ) -> tuple[Float64[np.ndarray, "M"], UInt64[np.ndarray, "M 2"]]:
        """Return the scores of some rows, once those of all were computed, and their digests."""
        asked, draws = self.asked, self._draws(self.asked.num_samples)
        columns = ColumnFiles(self.folder / "scores")
        self._done += columns.rows * asked.num_samples
        unknown, is_kept = (
            columns.note.setdefault(UNKNOWN_CATEGORIES, {}),
            np.zeros(asked.rows, dtype=bool),
        )
        is_kept[rows] = True
        for first, x in self._in_runs(self._all(columns.rows), asked.num_samples):
            scores = pool_scores(self.model, x, draws, asked.acquisition, asked.priors)
            check_computed(scores, asked.field, first)
            columns.append({"score": scores, "digest": row_digests(x)})
            count_unknown(
                unknown, x[is_kept[first : first + len(x)]], self.model.manifest.input.columns
            )
            self._advance(len(x) * asked.num_samples, columns)
        columns.sync()
        self._unknown = unknown
        found = np.array(columns.column("score"))[rows], np.array(columns.column("digest"))[rows]
        columns.close()
        return found
