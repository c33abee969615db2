"""`Client` and `AsyncClient`: the same calls, with httpx doing what they ask for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from dubito import calls
from dubito.calls import Progress
from dubito.errors import InvalidInput
from dubito.options import AcquireOptions, PredictJobOptions, PredictOptions
from dubito.predictions import Predictions
from dubito.results import Job, LabelFigures, LabelsKept, Model, Ranking
from dubito.rows import RowsLike
from dubito.sending import Came, Limits, Pause, Request, Result, Steps

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 90.0  # longer than the service's own deadline, which then is the one that is heard of
CONNECT_S = 10.0
RETRIES = 4

try:
    AGENT = f"dubito-client/{version('dubito-client')}"
except PackageNotFoundError:  # not installed, but found
    AGENT = "dubito-client"


@dataclass(frozen=True)
class _Address:
    """Where requests go, and as whom."""

    url: str
    key: str | None = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be sent; a key with a line's end would be shown by the error of
        sending it."""
        try:
            is_url = httpx.URL(self.url).scheme in ("http", "https")
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise InvalidInput("url", "one that begins with http:// or https://", repr(self.url))
        if self.key is not None and not (
            self.key.isascii() and self.key.isprintable() and self.key.strip()
        ):
            raise InvalidInput("key", "printable ASCII characters", "none, or others")

    def arguments(self, request: Request) -> dict[str, Any]:
        """Return what httpx is told of a request."""
        headers = {"User-Agent": AGENT, **request.headers}
        if self.key is not None:
            headers["X-API-Key"] = self.key
        return {
            "method": request.method,
            "url": self.url.rstrip("/") + request.path,
            "params": request.query or None,
            "headers": headers,
            "content": request.content,
            "data": request.form or None,
            "files": request.files or None,
            "follow_redirects": False,  # a key is not for others
            "timeout": httpx.Timeout(request.timeout_s, connect=min(CONNECT_S, request.timeout_s)),
        }


class Client:
    """A client of the service at a URL. Use it in a `with` block, or `close` it.

    Args:
        url: of the service.
        key: an API key, where the service wants one.
        timeout_s: seconds that a request may wait for the service where the call has no
            `deadline_s`.
        retries: how often a request is sent again where that is safe: after a refusal that says
            `Retry-After`, and where a connection failed.
        http: an httpx client to use, such as one with a proxy or certificates of your own. You
            close it.

    Every call may raise what `dubito.errors` lists.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        http: httpx.Client | None = None,
    ) -> None:
        self._address = _Address(url, key)
        self._limits = Limits(timeout_s, retries)
        self._http = httpx.Client() if http is None else http
        self._is_own = http is None

    def __enter__(self) -> Self:
        """Begin to use it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self.close()

    def __repr__(self) -> str:
        """Say where it asks; the key is left out."""
        return f"Client({self._address.url!r})"

    def close(self) -> None:
        """Close the connections."""
        if self._is_own:
            self._http.close()

    def predict(
        self,
        inputs: RowsLike,
        *,
        deadline_s: float | None = None,
        part_rows: int | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[PredictOptions],
    ) -> Predictions:
        """Predict rows: how uncertain, why, and whether each is unlike the data.

        Many rows go in parts, all under the same draws of one version: the seed and version that
            the first part was
        answered with, which the result states. With `fdr` they go in one request, since it decides
        all flags together; `predict_job` takes more.

        Args:
            inputs: an array (N, ...) in the units of the training data; a DataFrame, or a list of
                objects keyed by column; a list of strings, of PIL images, or of files as `bytes` or
                paths.
            deadline_s: seconds that the whole call may take, all parts, pauses and tries together;
                the service is told what is left.
            part_rows: most rows of a part: 1000, or 100 with `explain`.
            on_progress: called with the share of the rows that are predicted.
            options: see `PredictOptions`.
        """
        return self._done(
            calls.predict(self._limits, inputs, deadline_s, part_rows, on_progress, options)
        )

    def acquire(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Ranking:
        """Rank a pool in one request: which k rows' labels would teach the model most.
        `acquire_job` takes more rows.

        Args:
            pool: rows, as for `predict`, or the path of a file: npy, npz, Parquet, CSV, or a zip of
                files.
            k: how many rows to return.
            pool_file: in place of `pool`: the name of a file in the operator's folder.
            deadline_s: as for `predict`.
            options: see `AcquireOptions`.
        """
        return self._done(
            calls.acquire(self._limits, pool, k, deadline_s, {**options, "pool_file": pool_file})
        )

    def predict_job(
        self,
        inputs: RowsLike | Path | None = None,
        *,
        inputs_file: str | None = None,
        ids: Sequence[str] | None = None,
        **options: Unpack[PredictJobOptions],
    ) -> Job:
        """Have the service predict rows, or a file of them, in its own time; `predictions` waits
        for the result.

        Args:
            inputs: rows, as for `predict`, or the path of a file: npy, npz, Parquet, CSV, or a zip
                of files.
            inputs_file: in its place: the name of a file in the operator's folder.
            ids: a different name for each row, which the result repeats.
            options: see `PredictJobOptions`.
        """
        asked = {**options, "inputs_file": inputs_file, "ids": ids}
        return self._done(calls.predict_job(self._limits, inputs, asked))

    def acquire_job(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Job:
        """Have the service rank a pool in its own time, with the arguments of `acquire`; `ranking`
        waits for it."""
        return self._done(
            calls.acquire_job(self._limits, pool, k, {**options, "pool_file": pool_file})
        )

    def predictions(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Predictions:
        """Wait for a job of `predict_job`, given it or its id, and return its result; see
        `wait`."""
        return self._done(calls.predictions(self._limits, _id(job), deadline_s, on_progress))

    def ranking(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Ranking:
        """Wait for a job of `acquire_job`, given it or its id, and return its result; see
        `wait`."""
        return self._done(calls.ranking(self._limits, _id(job), deadline_s, on_progress))

    def wait(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Job:
        """Wait until a job is done, and return it.

        Args:
            job: the job, or its id.
            deadline_s: seconds to wait at most; the job goes on.
            on_progress: called now and then with the share that is done, from 0 to 1.
        """
        return self._done(calls.wait(self._limits, _id(job), deadline_s, on_progress))

    def job(self, job: Job | str) -> Job:
        """Say how far a job is."""
        return self._done(calls.job(self._limits, _id(job)))

    def jobs(self) -> list[Job]:
        """List the jobs that this key asked for, the latest first."""
        return self._done(calls.jobs(self._limits))

    def cancel(self, job: Job | str) -> Job:
        """Cancel a job; one that is over stays as it is."""
        return self._done(calls.cancel(self._limits, _id(job)))

    def delete(self, job: Job | str) -> Job:
        """Delete a job that is over, with its result."""
        return self._done(calls.delete(self._limits, _id(job)))

    def models(self) -> list[Model]:
        """List the published models."""
        return self._done(calls.models(self._limits))

    def model(self, name: str) -> Model:
        """Describe a model; `raw` also has its manifest, the drift of its rows and links to its
        evaluation report."""
        return self._done(calls.model(self._limits, name))

    def add_labels(
        self,
        labels: Mapping[str, str | float],
        *,
        model: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> LabelsKept:
        """Send labels, or of a regression targets, all in one request: all are kept, or none.

        Args:
            labels: by the rows' ids: a class as a string, or a target as a number.
            model: may be left out where the service has one.
            inputs: by the same ids, the rows that were not kept when they were acquired.
            replace: whether a label may take the place of another.
        """
        return self._done(calls.add_labels(self._limits, labels, model, inputs, replace))

    def labels(self, model: str) -> LabelFigures:
        """Say how many rows of a model were acquired and labelled, and what the labels say of
        it."""
        return self._done(calls.labels(self._limits, model))

    def _done(self, steps: Steps[Result]) -> Result:
        came: Came = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                result: Result = end.value
                return result
            came = self._do(step)

    def _do(self, step: Request | Pause) -> Came:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(**self._address.arguments(step))
        except httpx.RequestError as error:
            return error


class AsyncClient:
    """The same for asyncio: each call of `Client` as a coroutine. Use it in an `async with` block,
    or `aclose` it.

    Args:
        url: of the service.
        key: an API key, where the service wants one.
        timeout_s: as for `Client`.
        retries: as for `Client`.
        http: an httpx client to use. You close it.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._address = _Address(url, key)
        self._limits = Limits(timeout_s, retries)
        self._http = httpx.AsyncClient() if http is None else http
        self._is_own = http is None

    async def __aenter__(self) -> Self:
        """Begin to use it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self.aclose()

    def __repr__(self) -> str:
        """Say where it asks; the key is left out."""
        return f"AsyncClient({self._address.url!r})"

    async def aclose(self) -> None:
        """Close the connections."""
        if self._is_own:
            await self._http.aclose()

    async def predict(
        self,
        inputs: RowsLike,
        *,
        deadline_s: float | None = None,
        part_rows: int | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[PredictOptions],
    ) -> Predictions:
        """Do as `Client.predict` does."""
        return await self._done(
            calls.predict(self._limits, inputs, deadline_s, part_rows, on_progress, options)
        )

    async def acquire(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Ranking:
        """Do as `Client.acquire` does."""
        asked = {**options, "pool_file": pool_file}
        return await self._done(calls.acquire(self._limits, pool, k, deadline_s, asked))

    async def predict_job(
        self,
        inputs: RowsLike | Path | None = None,
        *,
        inputs_file: str | None = None,
        ids: Sequence[str] | None = None,
        **options: Unpack[PredictJobOptions],
    ) -> Job:
        """Do as `Client.predict_job` does."""
        asked = {**options, "inputs_file": inputs_file, "ids": ids}
        return await self._done(calls.predict_job(self._limits, inputs, asked))

    async def acquire_job(
        self,
        pool: RowsLike | Path | None = None,
        *,
        k: int = 10,
        pool_file: str | None = None,
        **options: Unpack[AcquireOptions],
    ) -> Job:
        """Do as `Client.acquire_job` does."""
        return await self._done(
            calls.acquire_job(self._limits, pool, k, {**options, "pool_file": pool_file})
        )

    async def predictions(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Predictions:
        """Do as `Client.predictions` does."""
        return await self._done(calls.predictions(self._limits, _id(job), deadline_s, on_progress))

    async def ranking(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Ranking:
        """Do as `Client.ranking` does."""
        return await self._done(calls.ranking(self._limits, _id(job), deadline_s, on_progress))

    async def wait(
        self,
        job: Job | str,
        *,
        deadline_s: float | None = None,
        on_progress: Progress | None = None,
    ) -> Job:
        """Do as `Client.wait` does."""
        return await self._done(calls.wait(self._limits, _id(job), deadline_s, on_progress))

    async def job(self, job: Job | str) -> Job:
        """Do as `Client.job` does."""
        return await self._done(calls.job(self._limits, _id(job)))

    async def jobs(self) -> list[Job]:
        """Do as `Client.jobs` does."""
        return await self._done(calls.jobs(self._limits))

    async def cancel(self, job: Job | str) -> Job:
        """Do as `Client.cancel` does."""
        return await self._done(calls.cancel(self._limits, _id(job)))

    async def delete(self, job: Job | str) -> Job:
        """Do as `Client.delete` does."""
        return await self._done(calls.delete(self._limits, _id(job)))

    async def models(self) -> list[Model]:
        """Do as `Client.models` does."""
        return await self._done(calls.models(self._limits))

    async def model(self, name: str) -> Model:
        """Do as `Client.model` does."""
        return await self._done(calls.model(self._limits, name))

    async def add_labels(
        self,
        labels: Mapping[str, str | float],
        *,
        model: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> LabelsKept:
        """Do as `Client.add_labels` does."""
        return await self._done(calls.add_labels(self._limits, labels, model, inputs, replace))

    async def labels(self, model: str) -> LabelFigures:
        """Do as `Client.labels` does."""
        return await self._done(calls.labels(self._limits, model))

    async def _done(self, steps: Steps[Result]) -> Result:
        came: Came = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                result: Result = end.value
                return result
            came = await self._do(step)

    async def _do(self, step: Request | Pause) -> Came:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(**self._address.arguments(step))
        except httpx.RequestError as error:
            return error


def _id(job: Job | str) -> str:
    return job if isinstance(job, str) else job.id
