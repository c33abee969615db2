"""Answers as bytes: JSON, or npz arrays. What they say is in the prediction and the decision."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import Response
from jaxtyping import Float32
from starlette.types import Receive, Scope, Send

from model_store.artifacts.manifest import Manifest
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.tasks import PREDICTIVES, AnyScores
from model_store.sources.columns import unknown_categories
from service.api.explanations import Explained
from service.api.fields import named_arrays
from service.api.predictions import Results, given_fields, row_objects
from service.engine.decision import Decision, DecisionOptions
from service.engine.jobs import Job, Predicted
from service.models.models import Served

NUMBERS_AT_ONCE = 20_000  # of an answer that are written at once: some milliseconds
CLASS_BYTES = 200  # of a class's name in an array
PART_BYTES = 512 << 10  # of an answer that are sent at once


class PartsResponse(Response):
    """An answer in parts: the next is sent when the client has read the one before, so none is
    copied with others."""

    def __init__(self, parts: Sequence[bytes], media_type: str, headers: dict[str, str]) -> None:
        length = sum(map(len, parts))
        super().__init__(
            b"", media_type=media_type, headers={"content-length": str(length), **headers}
        )
        views = [memoryview(part) for part in parts]
        self.parts = [
            view[at : at + PART_BYTES] for view in views for at in range(0, len(view), PART_BYTES)
        ]

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for i, part in enumerate(self.parts, start=1):
            await send(
                {"type": "http.response.body", "body": part, "more_body": i < len(self.parts)}
            )


def response(
    parts: Sequence[bytes], media_type: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an answer of 200, given its body in parts."""
    if len(parts) == 1 and len(parts[0]) <= PART_BYTES:
        return Response(parts[0], media_type=media_type, headers=headers)
    return PartsResponse(parts, media_type, headers or {})


def predict_json(
    served: Served,
    num_samples: int,
    seed: int,
    options: DecisionOptions,
    x: Float32[np.ndarray, "N I"],
    rows: list[dict[str, Any]],
) -> bytes:
    """Return the JSON answer of /predict, given the rows and what it says of each."""
    return orjson.dumps(
        {**_answer_head(served, num_samples, seed, options, x), "predictions": rows}
    )


def predict_json_parts(
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    decision: Decision,
    explained: Explained | None = None,
) -> list[bytes]:
    """Return the same in parts, of many rows or with more of each than is decided.

    As one list of objects it would keep every thread waiting while it is written, and looked
    through for garbage.
    """
    served, prediction, samples = job.served, predicted.prediction, predicted.samples
    numbers = numbers_a_row(served, samples) + (0 if explained is None else served.model.row_size)
    at_once = max(1, NUMBERS_AT_ONCE // numbers)
    about = _answer_head(served, predicted.num_samples, predicted.seed, options, job.x)
    head = orjson.dumps({**about, "predictions": []})
    parts, between = [head.removesuffix(b"]}")], b""
    for first in range(0, len(decision.flag), at_once):
        here = slice(first, first + at_once)
        results = results_of(
            served.model.manifest,
            prediction.take(here),
            decision.take(here),
            predicted.num_samples,
            None if samples is None else samples[:, here],
            None if explained is None else explained.take(here),
        )
        parts.append(between + orjson.dumps(row_objects(results))[1:-1])
        between = b","
        job.call.pause()
    return [*parts, b"]}"]


def numbers_a_row(served: Served, samples: Float32[np.ndarray, "K N C"] | None) -> int:
    """Return about how many values an answer has for each row."""
    return 20 + served.model.manifest.output_size * (2 if samples is None else 2 + len(samples))


def answer_bytes(served: Served, rows: int, kept_draws: int, as_arrays: bool) -> int:
    """Return about how many bytes an answer takes while it is made and sent, `kept_draws` of them
    for each row."""
    outputs = served.model.manifest.output_size
    if as_arrays:
        return CLASS_BYTES * outputs + rows * (400 + outputs * (32 + 8 * kept_draws))
    return rows * (1500 + outputs * (48 + 24 * kept_draws))


def _answer_head(
    served: Served,
    num_samples: int,
    seed: int,
    options: DecisionOptions,
    x: Float32[np.ndarray, "N I"],
) -> dict[str, Any]:
    return {
        "model": served.name,
        "version": served.version,
        "num_samples": num_samples,
        "seed": seed,
        **judged_by(options),
        "priors": _stated_priors(served.model.manifest, options.priors),
        "unknown_categories": unknown_categories(x, served.model.manifest.input.columns),
    }


def acquire_answer(
    manifest: Manifest,
    *,
    acquisition: str,
    beta: float,
    priors: tuple[float, ...] | None,
    ranking: list[dict[str, Any]],
    **about: Any,
) -> dict[str, Any]:
    """Return the answer of /acquire, and of a job that ranks; `about` are its other fields."""
    is_sampled = acquisition in PREDICTIVES[manifest.task].sampled
    head = {
        "model": manifest.name,
        "version": manifest.version,
        "acquisition": acquisition,
        **about,
    }
    head["beta"] = beta if is_sampled else None
    return {**head, "priors": _stated_priors(manifest, priors), "ranking": ranking}


def _stated_priors(manifest: Manifest, priors: tuple[float, ...] | None) -> dict[str, float] | None:
    """Return the shares of the classes that an answer is for, by class, None if those of the
    training data."""
    return None if priors is None else dict(zip(manifest.classes or (), priors, strict=True))


def judged_by(options: DecisionOptions) -> dict[str, float | None]:
    """Return the rates that rows were judged by."""
    names = ("fpr", "fdr", "coverage", "confidence", "risk")
    return {name: getattr(options, name) for name in names}


def json_rows(
    served: Served, num_samples: int, prediction: Prediction, decision: Decision
) -> list[dict[str, Any]]:
    """Return what JSON says of each row. Infinite bounds become null in it."""
    return row_objects(results_of(served.model.manifest, prediction, decision, num_samples))


def results_of(
    manifest: Manifest,
    prediction: Prediction,
    decision: Decision,
    num_samples: int,
    samples: Float32[np.ndarray, "K N C"] | None = None,
    explained: Explained | None = None,
) -> Results:
    """Return what the fields of rows are taken from."""
    by_row = None if samples is None else samples.transpose(1, 0, 2)
    scores = reported(prediction.scores)
    return Results(manifest, num_samples, scores, prediction, decision, by_row, explained)


def reported(scores: AnyScores) -> AnyScores:
    """Return the scores as they are answered: of a regression, of the target in its own units."""
    return scores if isinstance(scores, Scores) else scores.in_units


def with_samples(
    rows: list[dict[str, Any]], samples: Float32[np.ndarray, "K N C"], scores: AnyScores
) -> list[dict[str, Any]]:
    """Return rows with what each draw says of them."""
    by_row = samples.transpose(1, 0, 2).tolist()
    if not isinstance(scores, Scores):
        by_row = [[{"mean": mean, "std": std} for mean, std in row] for row in by_row]
    return [{**row, "samples": draws} for row, draws in zip(rows, by_row, strict=True)]


def _standard_errors(scores: AnyScores, num_rows: int) -> list[dict[str, float | None]]:
    """Return each row's standard errors by score, null where so few draws give none."""
    errors = scores.standard_error or {}
    unknown = [None] * num_rows
    columns = {
        name: errors[name].tolist() if name in errors else unknown for name in scores.error_names
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _detectors(
    prediction: Prediction, decision: Decision, num_rows: int
) -> list[dict[str, dict[str, Any]]]:
    """Return what each detector says of each row."""
    rows: list[dict[str, dict[str, Any]]] = [{} for _ in range(num_rows)]
    p_values = decision.p_values.detector_p_values
    for name, detected in prediction.detected.items():
        values = zip(
            detected.tolist(), p_values[name].tolist(), decision.fired[name].tolist(), strict=True
        )
        for row, (score, p_value, fired) in zip(rows, values, strict=True):
            row[name] = {"score": score, "p_value": p_value, "fired": fired}
    return rows


def predict_npz(
    served: Served,
    predicted: Predicted,
    options: DecisionOptions,
    x: Float32[np.ndarray, "N I"],
    decision: Decision,
    explained: Explained | None = None,
) -> bytes:
    """Return the same as arrays, a row each: `probabilities`, `entropy`, `standard_error.bald`, ...

    What is null in JSON for all rows is left out; infinite bounds are infinite.
    """
    packed = io.BytesIO()
    manifest, prediction = served.model.manifest, predicted.prediction
    arrays = dict(about_arrays(manifest, predicted.seed, options))
    if manifest.input.columns:
        unknown = unknown_categories(x, manifest.input.columns)
        arrays["unknown_categories"] = np.array(
            [unknown.get(column.name, 0) for column in manifest.input.columns]
        )
    of_rows = (manifest, prediction, decision, predicted.num_samples, predicted.samples, explained)
    arrays |= dict(row_arrays(*of_rows))
    np.savez(packed, allow_pickle=False, **arrays)
    return packed.getvalue()


def about_arrays(
    manifest: Manifest, seed: int, options: DecisionOptions
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what an answer in arrays says of all rows."""
    yield "model", np.array(manifest.name)
    yield "version", np.array(manifest.version)
    yield "seed", np.array(seed)
    for name, rate in judged_by(options).items():
        if rate is not None:
            yield name, np.array(rate)
    if options.priors is not None:
        yield "priors", np.array(options.priors)
    if manifest.classes is not None:
        yield "classes", np.array(manifest.classes)


def row_arrays(
    manifest: Manifest,
    prediction: Prediction,
    decision: Decision,
    num_samples: int,
    samples: Float32[np.ndarray, "K N C"] | None = None,
    explained: Explained | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what an answer in arrays says of each row."""
    results = results_of(manifest, prediction, decision, num_samples, samples, explained)
    return named_arrays(given_fields(results), results)
