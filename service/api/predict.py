"""`POST /predict` and the `predict` function that all protocols use.

A route parses its request into `PredictWork` and passes an `Encoder` for the response. `predict`
handles admission, memory limits, batching, decisions, drift and metrics.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Bool, Float32, Float64, Int64

from model_store.errors import InvalidInput
from model_store.inference.explanation import Explanation, explain, replace_each_column
from model_store.inference.prediction import DecisionOptions, Prediction, check_computed, decide
from model_store.sources.columns import check_complete, fill_missing, unknown_categories
from model_store.sources.files import open_rows
from model_store.sources.row_file import RowFile, Source
from model_store.sources.rows import MAX_FAST_BYTES, RowReader, Rows
from model_store.types import Pause
from service.api.explanations import explanation_bytes
from service.api.media_types import ENDINGS, FORM, JSON, NPZ
from service.api.openapi import BINARY, PURPOSE_PARAMETER, request_body
from service.api.options import (
    check_answer_size,
    decision_options,
    resolve_groups,
    resolve_num_samples,
)
from service.api.predictions import PredictAnswer, Results
from service.api.requests import (
    AnyEnvelope,
    check_row_count,
    is_test,
    parse_rows,
    prefers_npz,
    read_body,
    request_media_type,
    run_parser,
)
from service.api.responses import (
    NUMBERS_AT_ONCE,
    Answer,
    answer_bytes,
    predict_json,
    predict_npz,
    response,
)
from service.api.schemas import PredictRequest
from service.auth.scopes import POOLS_KEY, SCOPES_KEY, needs
from service.context import Context, get_context
from service.engine.batching import EngineWork, Predicted
from service.engine.threads import SLICE_BYTES
from service.models.models import ServedModel
from service.request_context import RequestContext

Encoder = Callable[[Answer, Pause], list[bytes]]

BODY = request_body(PredictRequest)
FEW_NUMBERS = 2_500  # encoded on the event loop in less than a millisecond

router = APIRouter(tags=["Predict"])


@dataclass(eq=False)
class RowWork(Generic[AnyEnvelope]):
    """A parsed request. To save memory, `rows` is cleared once it is converted to numbers."""

    call: RequestContext
    envelope: AnyEnvelope
    loaded: ServedModel
    rows: Rows
    field: str = "inputs"  # name of the rows in errors
    is_live: bool = True  # counted in drift and metrics
    is_encoded: bool = False  # rows of a table are already numbers


PredictWork = RowWork[PredictRequest]


@dataclass(eq=False)
class DecisionInputs:
    """A request's inputs to the decisions about its rows, in addition to their prediction."""

    options: DecisionOptions
    groups: Int64[np.ndarray, "N"] | None
    missing: Bool[np.ndarray, "N C"] | None = None
    usual: Prediction | None = None  # of each row with each column's usual value; to explain


@router.post(
    "/predict",
    response_model=PredictAnswer,
    responses={200: {"content": {NPZ: {"schema": BINARY}}}},
    openapi_extra={**BODY, "parameters": [*BODY["parameters"], PURPOSE_PARAMETER]},
    dependencies=[needs("predict")],
)
async def post_predict(request: Request) -> Response:
    """Predict labels or targets with uncertainty and flag unusual rows."""
    context = get_context(request)
    call = context.begin(request, has_rows=True)
    as_arrays = prefers_npz(request)
    work = await read_work(context, call, PredictRequest, "inputs", context.settings.max_rows)
    parts = await predict(context, work, predict_npz if as_arrays else predict_json, as_arrays)
    return response(parts, NPZ if as_arrays else JSON)


async def read_work(
    context: Context,
    call: RequestContext,
    kind: type[AnyEnvelope],
    field: str,
    max_rows: int,
    is_job: bool = False,
) -> RowWork[AnyEnvelope]:
    """Parse a request's envelope and rows, and find its model.

    An npy body or a file holds only rows, so the other fields are query parameters. A form has one
    part per row, and the other fields in further parts or the query. The deadline of a job
    excludes the upload.
    """
    settings = context.settings
    body = await read_body(call, settings.max_body_bytes)
    if is_job:
        call.started = time.monotonic()
        call.deadline = call.started + settings.deadline_s
    parse = partial(parse_rows, call, body, kind, field, max_rows, is_job)
    size = len(body) if request_media_type(call.request) in (JSON, FORM) else 0
    envelope, inline = await run_parser(context, call, size, parse)
    loaded = await context.find_model(call, envelope)
    if inline is not None:
        return RowWork(call, envelope, loaded, inline, field)
    name = getattr(envelope, f"{field}_file", None)
    if name is None:
        ending = ENDINGS[request_media_type(call.request)]
        file = await open_file(context, call, body, loaded, field, ending)
    else:
        allowed, field = call.request.scope.get(POOLS_KEY), f"{field}_file"
        find = partial(resolve_path, settings.pools, name, field, allowed)
        file = await open_file(context, call, await context.threads.state(find), loaded, field)
    if not is_job:
        jobs = f"{call.request.scope['path']}/jobs"
        check_row_count(file.field, len(file), max_rows, f" ({jobs} takes more)")
    return RowWork(call, envelope, loaded, file, file.field)


async def open_file(
    context: Context,
    call: RequestContext,
    source: Source,
    loaded: ServedModel,
    field: str,
    ending: str | None = None,
) -> RowFile:
    """Open a row file and reserve memory for it."""
    spec = loaded.model.manifest.input
    if ending == ".parquet" and not isinstance(source, Path):
        check = partial(context.file_preflights.reserve, source, spec, field, call)
        await context.threads.preflights.run(call, len(source), check)
    work = partial(open_rows, source, spec, field, ending, call)
    return await context.threads.requests.run(call, SLICE_BYTES, work)


def resolve_path(
    folder: Path | None, name: str, field: str, allowed: frozenset[str] | None = None
) -> Path:
    """Return the path of a file in the pools folder. The key can use only the `allowed` paths."""
    if folder is None:
        raise InvalidInput(field, "none, because DUBITO_POOLS is not set", "a name")
    root, expected = folder.resolve(), "the name of a file in the folder of pools"
    roots = [root] if allowed is None else [(root / pool).resolve() for pool in allowed]
    try:
        path = (root / name).resolve()
        if Path(name).is_absolute() or not path.is_relative_to(root):
            raise InvalidInput(field, expected, "a path outside the folder")
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError):
        is_file = False
    if not is_file or not any(path.is_relative_to(each) for each in roots):
        raise InvalidInput(field, expected, "a missing file")
    return path


async def to_numbers(context: Context, work: RowWork[Any]) -> Float32[np.ndarray, "N I"]:
    """Convert rows to numbers, in a thread if this is slow. Missing cells are NaN or rejected."""
    call, rows, field, model = work.call, work.rows, work.field, work.loaded.model
    size, spec = 4 * len(rows) * model.row_size, model.manifest.input
    spec = spec.encoded if work.is_encoded else spec
    call.reservation.reserve(size, field)
    convert = partial(RowReader(spec, field, call, model.text_encoder).read_all, rows)
    is_slow = size > MAX_FAST_BYTES or not isinstance(rows, list | np.ndarray)
    is_slow = is_slow or (isinstance(rows, list) and isinstance(rows[0], str | bytes | dict))
    x = await context.threads.requests.run(call, size, convert) if is_slow else convert()
    if work.envelope.missing == "reject":
        check_complete(x, spec.columns, field)
    return x


async def predict(
    context: Context, work: PredictWork, encode: Encoder, as_arrays: bool = False
) -> list[bytes]:
    """Predict rows and return the encoded response in parts.

    `as_arrays` is True if the encoder writes arrays, which need less memory than JSON.
    """
    call, envelope, loaded, model = work.call, work.envelope, work.loaded, work.loaded.model
    reservation, manifest, num_rows = call.reservation, model.manifest, len(work.rows)
    num_samples = resolve_num_samples(envelope, model, context.settings)
    options = decision_options(envelope, model, num_samples)
    inputs = DecisionInputs(options, resolve_groups(envelope, num_rows, model))
    check_answer_size(envelope, num_rows, num_samples, model)
    columns, extra = manifest.input.columns, 0
    if envelope.explain and columns:  # predicts each row also with each column's usual value
        extra = 1 + len(columns)
    all_rows, encoding = num_rows * (1 + extra), model.encoding_draws
    with context.admission.admit(all_rows, num_samples, call.client, encoding, call.length):
        work.is_live = work.is_live and not is_test(call.request)
        x = await to_numbers(context, work)
        if columns:
            if inputs.groups is None:
                inputs.groups = model.find_groups(x)
            inputs.missing = fill_missing(x, columns)
        work.rows = []
        keep, priors = envelope.return_samples, options.priors
        computed = EngineWork(loaded, x, num_samples, envelope.seed, call, keep, priors=priors)
        size = answer_bytes(manifest, num_rows, num_samples if keep else 0, as_arrays)
        size += computed.memory_bytes()
        reservation.shrink(x.nbytes)
        reservation.reserve(size, "answer")
        if envelope.explain:
            size = explanation_bytes(manifest, num_rows, as_arrays) + extra * x.nbytes
            reservation.reserve(size + computed.memory_bytes(extra * num_rows), "explain")
        await context.engine.compute(computed)
        if extra:
            inputs.usual = await _predict_usual_rows(context, computed)
        write = partial(_write, context, work, computed, inputs, encode)
        is_plain = not keep and not envelope.explain
        if is_plain and _answer_numbers(computed) <= FEW_NUMBERS:
            parts, flags = write()
        else:
            parts, flags = await context.threads.answers.run(call, reservation.used_bytes, write)
    call.record.add_phases(computed.phases)
    call.record.set_usage(loaded.name, loaded.version, num_rows, num_samples, flags)
    del x, computed, write  # before the client reads the response slowly
    reservation.shrink(sum(map(len, parts)))
    return parts


def _answer_numbers(work: EngineWork) -> int:
    """Estimate how many numbers the response has, excluding samples and explanations."""
    return len(work.x) * (20 + 2 * work.served_model.model.manifest.output_size)


async def _predict_usual_rows(context: Context, work: EngineWork) -> Prediction:
    columns = work.served_model.model.manifest.input.columns
    make = partial(replace_each_column, columns, work.x, work.context.pause)
    x = await context.threads.requests.run(work.context, work.x.nbytes, make)
    usual_work = replace(work, x=x, seed=work.draw_seed, keep_samples=False)
    await context.engine.compute(usual_work)
    return usual_work.predicted.prediction


def _write(
    context: Context,
    row_work: PredictWork,
    work: EngineWork,
    inputs: DecisionInputs,
    encode: Encoder,
) -> tuple[list[bytes], int]:
    """Encode the response in parts and return them with the number of flagged rows.

    Live requests update the metrics and, unless they have a seed, the drift test.
    """
    loaded, predicted, seed = work.served_model, work.predicted, work.draw_seed
    scores = predicted.batch.scores
    overall: Float64[np.ndarray, "N"] = getattr(scores, scores.overall)[predicted.rows]
    check_computed(overall, row_work.field)
    results, rows = _decide(row_work, work, predicted, inputs)
    columns = loaded.model.manifest.input.columns
    unknown = unknown_categories(work.x, columns) if columns else {}
    answer = Answer(results, rows, seed, inputs.options, unknown)
    num_flags = int(np.count_nonzero(answer.flags))
    parts = encode(answer, work.context.pause)
    if row_work.is_live:
        if work.seed is None:
            loaded.watch(predicted.batch, predicted.rows, work.x)
        context.metrics.count_prediction(
            loaded.key, scores.overall, overall, work.num_samples, num_flags
        )
    return parts, num_flags


def _decide(
    row_work: PredictWork, work: EngineWork, predicted: Predicted, inputs: DecisionInputs
) -> tuple[Results, slice]:
    """Compute the results and return them with this request's slice.

    Small requests with the same options share the results of their micro-batch. With `fdr` they
    cannot, because decisions then depend on the other rows.
    """
    model, options = row_work.loaded.model, inputs.options
    needs_explanation = row_work.envelope.explain

    def results(prediction: Prediction, explanation: Explanation | None = None) -> Results:
        decision, samples = decide(prediction, options), predicted.samples
        manifest = model.manifest
        return Results(manifest, work.num_samples, prediction, decision, samples, explanation)

    is_small = _answer_numbers(work) <= NUMBERS_AT_ONCE and not needs_explanation
    is_plain = predicted.samples is None and inputs.groups is None and inputs.missing is None
    if is_small and is_plain and options.fdr is None:
        if options not in predicted.shared:
            predicted.shared[options] = results(predicted.batch)
        return predicted.shared[options], predicted.rows
    prediction = replace(predicted.prediction, missing=inputs.missing)
    if inputs.groups is not None:
        prediction = prediction.with_groups(inputs.groups)
    if not needs_explanation:
        return results(prediction), slice(None)
    has_scope = "rows" in row_work.call.request.scope[SCOPES_KEY]
    explanation = explain(model, prediction, work.x, inputs.usual, row_work.call.pause, has_scope)
    return results(prediction, explanation), slice(None)
