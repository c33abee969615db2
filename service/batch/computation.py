"""Computations shared by jobs and data sets.

All rows use the draws of the request's seed, so results do not depend on other rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int64

from model_store.acquisition.choice import Choice, check_acquisition, check_beta
from model_store.acquisition.ranking import PoolScorer
from model_store.artifacts.manifest import InputSpec, Manifest
from model_store.inference.model import Model
from model_store.inference.noise import fresh_seed
from model_store.inference.prediction import DecisionOptions, decide
from model_store.inference.runtime import DrawSet
from model_store.scores.tasks import PREDICTIVES
from model_store.sources.columns import check_complete, fill_missing
from model_store.sources.row_file import Part
from model_store.sources.rows import RowReader
from model_store.types import JsonObject
from service.api.options import decision_options, resolve_priors
from service.api.predictions import Results
from service.api.responses import metadata_arrays, priors_by_class
from service.api.schemas import AcquireRequest, PredictRequest
from service.engine.batching import part_rows

Inputs = Float32[np.ndarray, "n I"]
Kind = Literal["score", "rank"]
UNKNOWN_CATEGORIES = "unknown_categories"


@dataclass(frozen=True, kw_only=True)
class ComputationRequest:
    """A request without its rows."""

    model: str
    version: str
    num_samples: int
    seed: int
    options: DecisionOptions | Choice
    missing: Literal["flag", "reject"] = "flag"

    @property
    def decisions(self) -> DecisionOptions:
        assert isinstance(self.options, DecisionOptions)
        return self.options

    @property
    def choice(self) -> Choice:
        assert isinstance(self.options, Choice)
        return self.options


def request_fields(
    envelope: AcquireRequest | PredictRequest, model: Model, num_samples: int
) -> JsonObject:
    """Convert a request to /acquire or /predict to fields of a `ComputationRequest`."""
    options: DecisionOptions | Choice
    if isinstance(envelope, AcquireRequest):
        options = choice_options(envelope, model, num_samples)
    else:
        options = decision_options(envelope, model, num_samples)
    return {
        "model": model.manifest.name,
        "version": model.manifest.version,
        "num_samples": num_samples,
        "seed": fresh_seed() if envelope.seed is None else envelope.seed,
        "options": options,
        "missing": envelope.missing,
    }


def choice_options(envelope: AcquireRequest, model: Model, num_samples: int) -> Choice:
    task = model.manifest.task
    acquisition_name = envelope.acquisition if "acquisition" in envelope.model_fields_set else None
    acquisition = check_acquisition(acquisition_name, task)
    beta = check_beta(envelope.beta, acquisition, task)
    priors = resolve_priors(envelope, model)
    return Choice(task, acquisition, envelope.k, num_samples, envelope.race, beta, priors)


def acquire_answer(
    manifest: Manifest,
    choice: Choice,
    seed: int,
    ranking: list[JsonObject],
    pool_size: int,
    excluded: int | None,
    unknown: dict[str, int],
    finalists: int | None = None,
) -> JsonObject:
    is_sampled = choice.acquisition in PREDICTIVES[manifest.task].sampling_acquisitions
    return {
        "model": manifest.name,
        "version": manifest.version,
        "acquisition": choice.acquisition,
        "num_samples": choice.num_samples,
        "seed": seed,
        "pool_size": pool_size,
        "excluded": excluded,
        "race": choice.race,
        "finalists": finalists,
        "unknown_categories": unknown,
        "beta": choice.beta if is_sampled else None,
        "priors": priors_by_class(manifest, choice.priors),
        "ranking": ranking,
    }


class Computation:
    """A model and a request, with draws from the request's seed."""

    def __init__(self, model: Model, request: ComputationRequest) -> None:
        self.model, self.request = model, request
        self.manifest = model.manifest
        options = request.options
        self.acquisition = options.acquisition if isinstance(options, Choice) else ""
        self.scorer = PoolScorer(model, self.acquisition, options.priors)

    def draws(self, num_samples: int | None = None) -> DrawSet:
        number = num_samples or self.request.num_samples
        return self.model.runtime.draw_set(self.request.seed, number)

    def batch_rows(self, num_samples: int | None = None) -> int:
        number = num_samples or self.request.num_samples
        return part_rows(self.model, number, self.acquisition)

    def batches(self, parts: Iterable[Inputs], num_samples: int | None = None) -> Iterator[Inputs]:
        size = self.batch_rows(num_samples)
        for x in parts:
            for start in range(0, len(x), size):
                yield x[start : start + size]

    def numbers(self, part: Part, spec: InputSpec, field: str, first: int) -> Inputs:
        """Convert part of a file to numbers. `first` is the index of its first row."""
        x = RowReader(spec, field, encoder=self.model.text_encoder).read(part, first)
        return self.complete(x, field, first)

    def complete(self, x: Inputs, field: str, first: int) -> Inputs:
        """Fill missing cells, or raise InvalidInput if the request rejects them.

        Predictions leave cells missing, because `predict` fills and flags them.
        """
        if self.request.missing == "reject":
            check_complete(x, self.manifest.input.columns, field, first)
        elif isinstance(self.request.options, Choice):
            fill_missing(x, self.manifest.input.columns)
        return x

    def predict(
        self, x: Inputs, draws: DrawSet, groups: Int64[np.ndarray, "n"] | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Predict rows and mark those with finite scores. Fill missing cells of `x` in place."""
        options = self.request.decisions
        groups = self.model.find_groups(x) if groups is None else groups
        missing = fill_missing(x, self.manifest.input.columns)
        prediction = self.model.prediction(*self.model.runtime.run_set(x, draws), options.priors)
        prediction = replace(prediction, missing=missing)
        computed = np.isfinite(prediction.scores.by_name()[prediction.scores.overall])
        if groups is not None:
            prediction = prediction.with_groups(groups)
        decision = decide(prediction, options)
        arrays = Results(self.manifest, self.request.num_samples, prediction, decision).arrays
        return dict(arrays), computed

    def metadata(self, unknown: dict[str, int]) -> dict[str, np.ndarray]:
        metadata = metadata_arrays(self.manifest, self.request.seed, self.request.decisions)
        if columns := self.manifest.input.columns:
            metadata[UNKNOWN_CATEGORIES] = np.array([unknown.get(c.name, 0) for c in columns])
        return metadata
