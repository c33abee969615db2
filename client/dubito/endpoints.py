"""The endpoints of the service, written as generators that both clients execute."""

import functools
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from urllib.parse import quote

import httpx

from dubito.errors import DeadlineExceeded, InvalidInput, JobFailed
from dubito.options import AcquireOptions, PredictJobOptions, PredictOptions
from dubito.predictions import Predictions, concatenate, read_predictions
from dubito.results import (
    Job,
    KeptLabel,
    LabelFigures,
    LabelsDeleted,
    LabelsKept,
    Model,
    Ranking,
    Record,
    read_ranking,
    record,
)
from dubito.retries import NPZ, Limits, Pause, Request, Steps, send
from dubito.rows import (
    RowsLike,
    encode_id,
    encode_row,
    encode_rows,
    json_request,
    make_request,
    rows_request,
    split_rows,
    texts,
    to_json,
)

if TYPE_CHECKING:
    from dubito.client import AsyncClient, Client

PART_ROWS = 1000
MAX_LABELS = 10_000
EXPLAINED_ROWS = 100  # per request with `explain`
FIRST_POLL_S = 0.1  # grows by a factor of 1.5
LAST_POLL_S = 2.0

Progress = Callable[[float], object]
P = ParamSpec("P")
Result = TypeVar("Result")


class Endpoint(Generic[P, Result]):
    """A method of both clients, defined as a generator of steps."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[Result]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, client: None, _: Any) -> Callable[Concatenate[Any, P], Steps[Result]]: ...

    @overload
    def __get__(self, client: "Client", _: Any) -> Callable[P, Result]: ...

    @overload
    def __get__(self, client: "AsyncClient", _: Any) -> Callable[P, Awaitable[Result]]: ...

    def __get__(self, client: Any, _: Any) -> Any:
        if client is None:
            return self.steps
        steps = self.steps.__get__(client)

        @functools.wraps(steps)
        def call(*arguments: P.args, **options: P.kwargs) -> Any:
            return client.run(steps(*arguments, **options))

        return call


class Endpoints:
    """The methods of both clients."""

    limits: Limits

    def _get(self, path: str, query: Mapping[str, Any] = {}) -> Steps[Any]:
        return (yield from send(Request("GET", path, texts(query)), self.limits)).json()

    def _post(
        self, kind: type[Record], request: Request, is_repeatable: bool = True
    ) -> Steps[Record]:
        return record(kind, (yield from send(request, self.limits, is_repeatable)).json())

    def _result(
        self, job: Job | str, kind: str, deadline_s: float | None, on_progress: Progress | None
    ) -> Steps[httpx.Response]:
        limits = self.limits.within(deadline_s)
        wait = Endpoints.wait(self, job, deadline_s=deadline_s, on_progress=on_progress)
        finished = yield from wait
        if finished.kind != kind:
            raise InvalidInput("job", f"a job of kind {kind}", f"kind {finished.kind}")
        return (yield from send(Request("GET", f"{_path(finished)}/result"), limits))

    @Endpoint
    def predict(
        self,
        inputs: RowsLike,
        *,
        deadline_s: float | None = None,
        part_rows: int | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[PredictOptions],
    ) -> Steps[Predictions]:
        """Predict rows with their uncertainty and flag unusual rows.

        Large inputs are split into several requests. All requests use the same version and seed, so
        all rows share draws. With `fdr` the rows are sent in one request, because the flags depend
        on each other; use `predict_job` for larger inputs.

        Args:
            inputs: an array (N, ...) in the units of the training data; a DataFrame, or a list of
                objects keyed by column; a list of strings, of PIL images, or of files as `bytes` or
                paths.
            deadline_s: time limit of the call in seconds, including pauses and retries.
            part_rows: maximum rows per request; by default 1000, or 100 with `explain`.
            on_progress: callback that receives the completed share, from 0 to 1.
            options: see `PredictOptions`.
        """
        limits, fields = self.limits.within(deadline_s), _options(options)
        rows = encode_rows(inputs, "inputs")
        groups = fields.pop("groups", None)
        if groups is not None and len(groups) != len(rows):
            raise InvalidInput("groups", f"{len(rows)}, one for each row", str(len(groups)))
        max_rows = part_rows or (EXPLAINED_ROWS if fields.get("explain") else PART_ROWS)
        parts = [slice(0, len(rows))] if "fdr" in fields else list(split_rows(rows, max_rows))
        answers: list[Predictions] = []
        for part in parts:
            part_fields = fields if groups is None else {**fields, "groups": groups[part]}
            request = make_request("/predict", "inputs", rows.take(part), part_fields)
            request = replace(request, headers={**request.headers, "Accept": NPZ})
            try:
                answer = yield from send(request, limits)
            except InvalidInput as error:
                raise _shift_row(part.start, error) from None
            answers.append(read_predictions(answer.content))
            first = answers[0]
            fields |= {"model": first.model, "version": first.version, "seed": first.seed}
            if on_progress is not None:
                on_progress(part.stop / len(rows))
        return concatenate(answers)

    @Endpoint
    def acquire(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Steps[Ranking]:
        """Return the k rows in a pool that are most useful to label.

        Use `acquire_job` for larger pools. With `keep` the request is not retried if the connection
        is lost, because a second request might select other rows.

        Args:
            pool: rows, as for `predict`, or the path of an npy, npz, Parquet, CSV or zip file.
            k: number of rows to return.
            pool_file: name of a file in the operator's folder, instead of `pool`.
            deadline_s: time limit of the call in seconds, including pauses and retries.
            options: see `AcquireOptions`.
        """
        fields = {"k": k, **_options({**options, "pool_file": pool_file})}
        request = rows_request("/acquire", "pool", pool, fields)
        limits = self.limits.within(deadline_s)
        answer = yield from send(request, limits, is_repeatable=not fields.get("keep"))
        return read_ranking(answer.json())

    @Endpoint
    def predict_job(
        self,
        inputs: RowsLike | Path | None = None,
        *,
        inputs_file: str | None = None,
        ids: Sequence[str] | None = None,
        **options: Unpack[PredictJobOptions],
    ) -> Steps[Job]:
        """Start a job that predicts rows or a file. Use `predictions` to get the result.

        Args:
            inputs: rows, as for `predict`, or the path of an npy, npz, Parquet, CSV or zip file.
            inputs_file: name of a file in the operator's folder, instead of `inputs`.
            ids: a unique name for each row, which the result repeats.
            options: see `PredictJobOptions`.
        """
        fields = _options({**options, "inputs_file": inputs_file, "ids": ids})
        request = rows_request("/predict/jobs", "inputs", inputs, fields)
        return (yield from self._post(Job, request, is_repeatable=False))

    @Endpoint
    def acquire_job(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Steps[Job]:
        """Start a job that ranks a pool, with the arguments of `acquire`. See `ranking`."""
        fields = {"k": k, **_options({**options, "pool_file": pool_file})}
        request = rows_request("/acquire/jobs", "pool", pool, fields)
        return (yield from self._post(Job, request, is_repeatable=False))

    @Endpoint
    def jobs(self) -> Steps[list[Job]]:
        """List the jobs of the client's API key, newest first."""
        return [record(Job, content) for content in (yield from self._get("/jobs"))["jobs"]]

    @Endpoint
    def job(self, job: Job | str) -> Steps[Job]:
        """Return a job's state."""
        return record(Job, (yield from self._get(_path(job))))

    @Endpoint
    def cancel(self, job: Job | str) -> Steps[Job]:
        """Cancel a job. Does nothing if the job has ended."""
        return (yield from self._post(Job, Request("POST", f"{_path(job)}/cancel")))

    @Endpoint
    def delete(self, job: Job | str) -> Steps[Job]:
        """Delete a finished job and its result."""
        return (yield from self._post(Job, Request("DELETE", _path(job)), is_repeatable=False))

    @Endpoint
    def wait(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Steps[Job]:
        """Wait until a job is done and return it.

        Args:
            job: the job or its id.
            deadline_s: maximum wait in seconds. The job continues after this time.
            on_progress: callback that receives the completed share, from 0 to 1.

        Raises:
            JobFailed: if the job fails or is cancelled.
            DeadlineExceeded: if the job is not done in time.
        """
        limits, poll_s = self.limits.within(deadline_s), FIRST_POLL_S
        while True:
            current = record(Job, (yield from send(Request("GET", _path(job)), limits)).json())
            if on_progress is not None:
                on_progress(current.progress)
            if current.state == "done":
                return current
            if current.is_over:
                reason = f": {current.error}" if current.error else ""
                raise JobFailed(current.id, f"job {current.id} is {current.state}{reason}")
            if limits.ends - time.monotonic() <= poll_s:
                raise DeadlineExceeded(
                    f"job {current.id} is still {current.state}: {current.progress:.0%} done"
                )
            yield Pause(poll_s)
            poll_s = min(LAST_POLL_S, 1.5 * poll_s)

    @Endpoint
    def predictions(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Steps[Predictions]:
        """Wait for a job started by `predict_job` and return its result. See `wait`."""
        answer = yield from self._result(job, "predict", deadline_s, on_progress)
        return read_predictions(answer.content)

    @Endpoint
    def ranking(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Steps[Ranking]:
        """Wait for a job started by `acquire_job` and return its result. See `wait`."""
        answer = yield from self._result(job, "acquire", deadline_s, on_progress)
        return read_ranking(answer.json())

    @Endpoint
    def models(self) -> Steps[list[Model]]:
        """List all published models."""
        return [record(Model, content) for content in (yield from self._get("/models"))["models"]]

    @Endpoint
    def model(self, name: str) -> Steps[Model]:
        """Get a model's description.

        Its attribute `raw` also has the manifest, drift and links to the evaluation report.
        """
        return record(Model, (yield from self._get(f"/models/{quote(name, safe='')}")))

    @Endpoint
    def add_labels(
        self,
        labels: Mapping[str, str | float],
        *,
        model: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Steps[LabelsKept]:
        """Send class labels or regression targets. The service stores all of them or none.

        Labels that the service already has are ignored.

        Args:
            labels: mapping from row ids to classes or targets.
            model: name of the model; optional if the service has only one.
            inputs: mapping from row ids to rows, for rows that the service has not stored.
            replace: whether to replace existing labels.
        """
        inputs = {} if inputs is None else inputs
        for field, values in (("labels", labels), ("inputs", inputs)):
            if not hasattr(values, "items"):
                raise InvalidInput(field, "a mapping keyed by row id", type(values).__name__)
        unknown = [name for name in inputs if name not in labels]
        if unknown:
            raise InvalidInput("inputs", "ids that have a label", repr(unknown[0]))
        entries = []
        for name, value in labels.items():
            field = "label" if isinstance(value, str) else "target"
            entry = {"id": encode_id(name, "labels"), field: to_json(value, f"labels.{name}")}
            row = {"input": encode_row(inputs[name], f"inputs.{name}")} if name in inputs else {}
            entries.append({**entry, **row})
        content = {"model": model, "labels": entries, "replace": replace}
        return (yield from self._post(LabelsKept, json_request("/labels", _options(content))))

    @Endpoint
    def labels(self, model: str) -> Steps[LabelFigures]:
        """Get a model's label counts and its quality on labelled rows."""
        content = yield from self._get(f"/models/{quote(model, safe='')}/labels")
        return record(LabelFigures, content)

    @Endpoint
    def kept_labels(
        self, model: str | None = None, *, annotator: str | None = None, former: bool = False
    ) -> Steps[list[KeptLabel]]:
        """List a model's labels, oldest first.

        Args:
            model: name of the model; optional if the service has only one.
            annotator: return only labels from the API key with this name.
            former: list replaced and deleted labels instead.
        """
        query = {"model": model, "annotator": annotator, "former": former}
        fields = {**query, "limit": MAX_LABELS, "after": 0}
        labels: list[KeptLabel] = []
        while fields["after"] is not None:
            content = yield from self._get("/labels", _options(fields))
            labels += [record(KeptLabel, label) for label in content["labels"]]
            fields["after"] = content["next"]
        return labels

    @Endpoint
    def delete_labels(
        self, ids: Sequence[str], *, model: str | None = None
    ) -> Steps[LabelsDeleted]:
        """Delete labels by row id. Acquired rows can then be labelled again."""
        request = json_request("/labels/delete", _options({"model": model, "ids": ids}))
        return (yield from self._post(LabelsDeleted, request))


def _path(job: Job | str) -> str:
    return f"/jobs/{quote(job if isinstance(job, str) else job.id, safe='')}"


def _shift_row(first: int, error: InvalidInput) -> InvalidInput:
    """Convert row numbers within a part to row numbers within the whole input."""

    def shift(text: str) -> str:
        return re.sub(r"^inputs\.(\d+)", lambda row: f"inputs.{first + int(row[1])}", text)

    shifted = InvalidInput(shift(error.field), error.expected, error.received, shift(error.message))
    shifted.code = error.code
    shifted.errors = [{key: shift(text) for key, text in e.items()} for e in error.errors]
    return shifted


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: v for name, v in options.items() if v is not None}
    for name in fields.keys() & {"ids", "groups"}:
        if isinstance(fields[name], str):
            raise InvalidInput(name, "a list of strings", "a single string")
    if "ids" in fields:
        fields["ids"] = [encode_id(value, f"ids.{n}") for n, value in enumerate(fields["ids"])]
    if "groups" in fields:  # The service treats missing groups as unknown groups.
        fields["groups"] = list(map(str, fields["groups"]))
    return fields
