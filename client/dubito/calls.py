"""Each call as steps: what is sent, and what is made of the answers. Both clients do these and
nothing more."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dubito.errors import DeadlineExceeded, InvalidInput, JobFailed
from dubito.predictions import Predictions, joined, predictions_of
from dubito.results import (
    Job,
    LabelFigures,
    LabelsKept,
    Model,
    Ranking,
    job_of,
    label_figures_of,
    labels_kept_of,
    model_of,
    ranking_of,
)
from dubito.rows import (
    MEDIA_TYPES,
    NPZ,
    RowsLike,
    body_request,
    json_request,
    name_of,
    parts_of,
    plain,
    request_of,
    row_of,
    rows_of,
    with_deadline,
)
from dubito.sending import Limits, Pause, Request, Steps, send

PART_ROWS = 1000
EXPLAINED_ROWS = 100  # that a request may have by default
FIRST_LOOK_S = 0.1  # at a job; each look is half as late again
LAST_LOOK_S = 2.0

Progress = Callable[[float], object]


def predict(
    limits: Limits,
    inputs: RowsLike,
    deadline_s: float | None,
    part_rows: int | None,
    on_progress: Progress | None,
    options: Mapping[str, Any],
) -> Steps[Predictions]:
    """Predict rows, in parts where there are many, all under the same draws of one version.

    The first part's answer says the seed and the version of the others. With `fdr` there is one
    part: it decides the flags of all rows together.
    """
    limits, rows, asked = limits.within(deadline_s), rows_of(inputs, "inputs"), _options(options)
    groups = asked.pop("groups", None)
    if groups is not None and len(groups) != len(rows):
        raise InvalidInput("groups", f"{len(rows)}, one for each row", str(len(groups)))
    most = part_rows or (EXPLAINED_ROWS if asked.get("explain") else PART_ROWS)
    parts = [slice(0, len(rows))] if "fdr" in asked else list(parts_of(rows, most))
    answered: list[Predictions] = []
    for part in parts:
        of_part = asked if groups is None else {**asked, "groups": groups[part]}
        made = request_of("/predict", "inputs", rows.take(part), of_part, {"Accept": NPZ})
        try:
            answer = yield from send(made, limits)
        except InvalidInput as error:
            raise _counted_from(part.start, error) from None
        answered.append(predictions_of(answer.content))
        asked |= {
            "model": answered[0].model,
            "version": answered[0].version,
            "seed": answered[0].seed,
        }
        if on_progress is not None:
            on_progress(part.stop / len(rows))
    return joined(answered)


def acquire(
    limits: Limits,
    pool: RowsLike | Path | None,
    k: int,
    deadline_s: float | None,
    options: Mapping[str, Any],
) -> Steps[Ranking]:
    """Rank a pool in one request.

    An answer that was lost is asked for again, but not with `keep`: other rows might be set aside
        the second time.
    """
    asked = {"k": k, **_options(options)}
    made = _posted("/acquire", "pool", pool, asked)
    answer = yield from send(made, limits.within(deadline_s), is_repeatable=not asked.get("keep"))
    return ranking_of(answer.json())


def predict_job(
    limits: Limits, inputs: RowsLike | Path | None, options: Mapping[str, Any]
) -> Steps[Job]:
    """Have a job predict rows, a file, or the operator's `inputs_file`."""
    return (yield from _job(limits, _posted("/predict/jobs", "inputs", inputs, _options(options))))


def acquire_job(
    limits: Limits, pool: RowsLike | Path | None, k: int, options: Mapping[str, Any]
) -> Steps[Job]:
    """Have a job rank a pool, a file, or the operator's `pool_file`."""
    return (
        yield from _job(
            limits, _posted("/acquire/jobs", "pool", pool, {"k": k, **_options(options)})
        )
    )


def jobs(limits: Limits) -> Steps[list[Job]]:
    """List the jobs that the key asked for."""
    answer = yield from _get(limits, "/jobs")
    return [job_of(content) for content in answer["jobs"]]


def job(limits: Limits, name: str) -> Steps[Job]:
    """Say how far a job is."""
    return job_of((yield from _get(limits, f"/jobs/{quote(name, safe='')}")))


def cancel(limits: Limits, name: str) -> Steps[Job]:
    """Cancel a job; one that is over stays as it is."""
    request = Request("POST", f"/jobs/{quote(name, safe='')}/cancel")
    return job_of((yield from send(lambda _: request, limits, is_repeatable=True)).json())


def delete(limits: Limits, name: str) -> Steps[Job]:
    """Delete a job that is over, with its result."""
    request = Request("DELETE", f"/jobs/{quote(name, safe='')}")
    return job_of((yield from send(lambda _: request, limits, is_repeatable=False)).json())


def wait(
    limits: Limits, name: str, deadline_s: float | None, on_progress: Progress | None
) -> Steps[Job]:
    """Wait until a job is done.

    Raises:
        JobFailed: if it fails or is cancelled.
        DeadlineExceeded: if it is not over in time; it goes on.
    """
    limits, look = limits.within(deadline_s), FIRST_LOOK_S
    while True:
        found = yield from job(limits, name)
        if on_progress is not None:
            on_progress(found.progress)
        if found.state == "done":
            return found
        if found.is_over:
            raise JobFailed(
                found.id,
                f"job {found.id} is {found.state}" + (f": {found.error}" if found.error else ""),
            )
        if limits.ends - time.monotonic() <= look:
            raise DeadlineExceeded(
                f"job {found.id} is {found.state}, and goes on: {found.progress:.0%} done"
            )
        yield Pause(look)
        look = min(LAST_LOOK_S, 1.5 * look)


def predictions(
    limits: Limits, name: str, deadline_s: float | None, on_progress: Progress | None
) -> Steps[Predictions]:
    """Wait for a job of predictions, and return its result."""
    return predictions_of((yield from _result(limits, name, "predict", deadline_s, on_progress)))


def ranking(
    limits: Limits, name: str, deadline_s: float | None, on_progress: Progress | None
) -> Steps[Ranking]:
    """Wait for a job that ranks, and return its result."""
    return ranking_of(
        json.loads((yield from _result(limits, name, "acquire", deadline_s, on_progress)))
    )


def models(limits: Limits) -> Steps[list[Model]]:
    """List the models."""
    return [model_of(content) for content in (yield from _get(limits, "/models"))["models"]]


def model(limits: Limits, name: str) -> Steps[Model]:
    """Describe a model, with its manifest."""
    return model_of((yield from _get(limits, f"/models/{quote(name, safe='')}")))


def add_labels(
    limits: Limits,
    labels: Mapping[str, str | float],
    model: str | None,
    inputs: Mapping[str, Any] | None,
    replace: bool,
) -> Steps[LabelsKept]:
    """Send labels by the rows' ids, all in one request; the same again change nothing."""
    inputs = {} if inputs is None else inputs
    for field, given in (("labels", labels), ("inputs", inputs)):
        if not hasattr(given, "items"):
            raise InvalidInput(field, "a mapping by the rows' ids", type(given).__name__)
    strange = [name for name in inputs if name not in labels]
    if strange:
        raise InvalidInput("inputs", "rows of ids that have a label", f"one of {strange[0]!r}")
    entries = []
    for name, value in labels.items():
        field = "label" if isinstance(value, str) else "target"
        entry = {"id": name_of(name, "labels"), field: plain(value, f"labels.{name}")}
        entries.append(
            {**entry, "input": row_of(inputs[name], f"inputs.{name}")} if name in inputs else entry
        )
    content = {**({} if model is None else {"model": model}), "labels": entries, "replace": replace}
    request = json_request("POST", "/labels", content)
    return labels_kept_of((yield from send(lambda _: request, limits)).json())


def labels(limits: Limits, model: str) -> Steps[LabelFigures]:
    """Say how many rows of a model are labelled, and what the labels say."""
    return label_figures_of((yield from _get(limits, f"/models/{quote(model, safe='')}/labels")))


def _get(limits: Limits, path: str) -> Steps[Any]:
    """Return what a path answers."""
    return (yield from send(lambda _: Request("GET", path), limits)).json()


def _job(limits: Limits, made: Callable[[float | None], Request]) -> Steps[Job]:
    """Ask for a job, not twice: each time would begin another."""
    return job_of((yield from send(made, limits, is_repeatable=False)).json())


def _result(
    limits: Limits, name: str, kind: str, deadline_s: float | None, on_progress: Progress | None
) -> Steps[bytes]:
    limits = limits.within(deadline_s)
    found = yield from wait(limits, name, None, on_progress)
    if found.kind != kind:
        raise InvalidInput("job", f"one of kind {kind}", f"one of kind {found.kind}")
    request = Request("GET", f"/jobs/{quote(found.id, safe='')}/result")
    return (yield from send(lambda _: request, limits)).content


def _posted(
    path: str, field: str, rows: RowsLike | Path | None, options: Mapping[str, Any]
) -> Callable[[float | None], Request]:
    """Return what makes a request of rows, of a file, or of the name of one in the operator's
    folder."""
    named = f"{field}_file"
    if rows is None:
        if options.get(named) is None:
            raise InvalidInput(field, f"rows, or a {named}", "none")
        return lambda left_s: json_request("POST", path, with_deadline(options, left_s))
    if options.get(named) is not None:
        raise InvalidInput(named, f"none beside {field}", "both")
    if isinstance(rows, Path):
        media_type = MEDIA_TYPES.get(rows.suffix.lower())
        if media_type is None:
            raise InvalidInput(
                field, f"a file that ends in {', '.join(MEDIA_TYPES)}", f"one in {rows.suffix!r}"
            )
        return body_request(path, rows.read_bytes(), media_type, options, {})
    return request_of(path, field, rows_of(rows, field), options, {})


def _counted_from(first: int, error: InvalidInput) -> InvalidInput:
    """Return an error of a part's row with the row's number among all."""
    row = re.fullmatch(r"inputs\.(\d+)(.*)", error.field, re.DOTALL)
    if row is None:
        return error
    return InvalidInput(f"inputs.{first + int(row[1])}{row[2]}", error.expected, error.got)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are sent: those that are None are left out, but for `settle`, which it
    turns off."""
    asked = {
        name: value for name, value in options.items() if value is not None or name == "settle"
    }
    for name in ("ids", "groups"):
        if name in asked:
            asked[name] = _strings(asked[name], name)
    return asked


def _strings(values: Sequence[Any], name: str) -> list[str]:
    if isinstance(values, str):
        raise InvalidInput(name, "a list of strings", "a single string")
    if name == "groups":  # of which one that is missing is an unknown one
        return [str(value) for value in values]
    return [name_of(value, f"{name}.{n}") for n, value in enumerate(values)]
