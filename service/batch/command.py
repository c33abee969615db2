"""The `dubito score` and `dubito rank` commands for data sets of Parquet files.

Each shard of the data set is written to its own part. An interrupted command resumes after the
finished parts when it is repeated.
"""

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing
from datetime import timedelta
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from model_store.acquisition.choice import Choice
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.storage import is_url, resolve_location
from model_store.artifacts.store import open_store
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.processes import processors
from model_store.sources.files import check_ids
from model_store.sources.parquet import read_table, to_parquet
from model_store.sources.row_file import ID
from model_store.types import JsonObject
from service.api.options import resolve_num_samples
from service.api.requests import validate
from service.api.schemas import AcquireRequest, PredictRequest
from service.batch.computation import acquire_answer, request_fields
from service.batch.data_set import (
    OUT,
    REJECTS,
    SOURCE,
    DataSetRequest,
    Plan,
    begin,
    default_shard_rows,
)
from service.batch.files import Files, Stopped, open_files
from service.batch.shards import UNKNOWN_KEY, ShardResult, WorkerOptions, run_local
from service.integrations import installed_integrations
from service.settings import Settings, read_settings

DONE = "done.json"
RANKING = "ranking"  # .json, the answer of /acquire, and .parquet
RANKING_SCHEMA = pa.schema(
    {"rank": pa.int64(), ID: pa.string(), "index": pa.int64(), "score": pa.float64()}
)
PRINT_INTERVAL_S = 5.0  # between lines of progress


def run(options: argparse.Namespace) -> int:
    """Run a command and return its exit code, which is 130 if the command is interrupted."""
    try:
        process_data_set(options, read_settings())
    except KeyboardInterrupt:
        print("\ninterrupted; repeat the command to continue", file=sys.stderr)
        return 130
    return 0


def process_data_set(options: argparse.Namespace, settings: Settings) -> None:
    """Score or rank a data set. Raise Stopped if the work cannot continue."""
    if not 0 <= options.max_rejects <= 1:
        raise InvalidInput("max-rejects", "a share from 0 to 1", f"{options.max_rejects}")
    for name in ("workers", "shard_rows"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InvalidInput(name.replace("_", "-"), "at least 1", f"{getattr(options, name)}")
    model = _load(options, settings)
    request = _request(options, settings, model)
    with ExitStack() as stack:
        if options.out is None and options.ray not in (None, "local"):
            raise InvalidInput(OUT, "a location that all nodes of the cluster can access", "none")
        place = options.out or stack.enter_context(
            TemporaryDirectory(prefix="dubito-", ignore_cleanup_errors=True)
        )
        source, out = open_files(options.source, SOURCE), open_files(place, OUT)
        _refuse_overlap(options.source, place)
        out.check_output()
        plan = begin(out, source, request, options.seed is not None, model.manifest.input)
        worker_options = WorkerOptions(
            resolve_location(options.source), resolve_location(place), settings.store_options()
        )
        progress = _work(plan, out, worker_options, options)
        if options.kind == "rank":
            answer = _rank_parts(plan, out, model.manifest)
            if options.out is None:
                print(json.dumps(answer))
            else:
                _write_ranking(out, answer)
        summary = {"rows": plan.rows, "rejected": progress.rejected, "parts": len(plan.shards)}
        out.create(DONE, json.dumps(summary).encode() + b"\n")
        out.clear()
    progress.print_summary()


def _load(options: argparse.Namespace, settings: Settings) -> Model:
    store = open_store(**settings.store_options())
    name = options.model or settings.default_model
    if name is None:
        names = store.names()
        if len(names) != 1:
            received = f"none, and there are {len(names)}"
            raise InvalidInput("model", "one of the published models", received)
        (name,) = names
    version = store.resolve(name, options.version)
    return Model.load(store.open(name, version, files=NEEDED))


def _request(options: argparse.Namespace, settings: Settings, model: Model) -> DataSetRequest:
    kind: type[AcquireRequest | PredictRequest]
    kind = PredictRequest if options.kind == "score" else AcquireRequest
    content: JsonObject = {"inputs": []} if kind is PredictRequest else {}
    for name in kind.model_fields.keys() - {"model", "version"}:
        if getattr(options, name, None) is not None:
            content[name] = getattr(options, name)
    if options.priors is not None:
        try:
            content["priors"] = json.loads(options.priors)
        except ValueError:
            raise InvalidInput("priors", "a JSON object", "something else") from None
    envelope = validate(kind, content)
    num_samples = resolve_num_samples(envelope, model, settings)
    fields: JsonObject = {
        "manifest": model.manifest.digest,
        "shard_rows": options.shard_rows
        or default_shard_rows(model.row_size, model.manifest.output_size),
        **request_fields(envelope, model, num_samples),
    }
    request = DataSetRequest(kind=options.kind, **fields)
    if isinstance(request.options, Choice):
        acquisition = request.options.acquisition
        if acquisition in model.predictive.joint_acquisitions:
            expected = "a score of single rows; use /acquire or a job to rank the best rows jointly"
            raise InvalidInput("acquisition", expected, repr(acquisition))
    return request


def _refuse_overlap(source: str, out: str) -> None:
    if is_url(source) != is_url(out):
        return
    inner, outer = (resolve_location(place).rstrip("/") + "/" for place in (out, source))
    if inner.startswith(outer):
        raise InvalidInput(OUT, "a location outside the data set", out)


def _work(
    plan: Plan, out: Files, worker_options: WorkerOptions, options: argparse.Namespace
) -> "Progress":
    names, progress = out.names(), Progress(plan, options)
    todo = [shard.number for shard in plan.shards if plan.part(shard.number) not in names]
    for number in {shard.number for shard in plan.shards} - {*todo}:
        lines = (out.read(plan.rejects(number)) or b"").splitlines()
        reasons = tuple(json.loads(line)["reason"] for line in lines[:1])
        progress.add(ShardResult(number, len(lines), reasons))
    progress.start()
    if not todo:
        return progress
    if options.ray is None:
        running = run_local(worker_options, todo, options.workers or processors())
    else:
        ray = installed_integrations().get("ray")
        if ray is None or ray.run_shards is None:
            raise InvalidInput("ray", "the Ray integration to be installed", "none")
        running = resolve_name(ray.run_shards)(worker_options, todo, options.ray, options.workers)
    with closing(running):
        for result in running:
            if result.error is not None:
                raise Stopped(result.error)
            progress.add(result)
    return progress


class Progress:
    """The progress of the shards, printed to standard error at intervals."""

    def __init__(self, plan: Plan, options: argparse.Namespace) -> None:
        self._plan, self._options = plan, options
        self._parts = self._rows = 0
        self._reasons: list[str] = []
        self.rejected = 0
        self.start()

    def start(self) -> None:
        self._rows_before = self._rows
        self._start = self._printed = time.monotonic()

    def add(self, result: ShardResult) -> None:
        """Add a finished shard, or raise Stopped if too many rows are unreadable."""
        self._parts += 1
        self._rows += self._plan.shards[result.shard].rows
        self.rejected += result.rejected
        self._reasons += result.reasons
        share, rows = self._options.max_rejects, self._plan.rows
        if self.rejected > share * rows:
            expected = f"at most {share:g} of {rows} rows that cannot be read"
            received = f"{self.rejected} so far ({'; '.join(self._reasons[:3])})"
            raise Stopped(f"{SOURCE}: expected {expected}, got {received}")
        if not self._options.quiet and time.monotonic() - self._printed > PRINT_INTERVAL_S:
            self._printed = time.monotonic()
            print(self.line(), file=sys.stderr)

    def line(self) -> str:
        plan, rate = self._plan, (self._rows - self._rows_before) / self._elapsed_s
        left_s = timedelta(seconds=round((plan.rows - self._rows) / rate)) if rate else None
        left = f", {rate:,.0f} rows/s, {left_s} left" if rate else ""
        rejected = f"; {self.rejected:,} rejected" if self.rejected else ""
        return (
            f"{100 * self._rows / plan.rows:3.0f} %  {self._rows:,} of {plan.rows:,} rows, "
            f"{self._parts} of {len(plan.shards)} parts{left}{rejected}"
        )

    def print_summary(self) -> None:
        out, request = self._options.out, self._plan.request
        if self._options.quiet or out is None:
            return
        is_score = request.kind == "score"
        files = out if is_score else f"{out}, {RANKING}.json"
        rejected = f", {self.rejected:,} rejected ({out}/{REJECTS})" if self.rejected else ""
        print(
            f"{self._plan.rows:,} rows {'scored' if is_score else 'ranked'} by {request.model} "
            f"version {request.version}, seed {request.seed}{rejected}: {files}; "
            f"{self._elapsed_s:,.0f} s"
        )

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


def _rank_parts(plan: Plan, out: Files, manifest: Manifest) -> JsonObject:
    request, unknown = plan.request, Counter[str]()
    best: Any = None
    for shard in plan.shards:
        name = plan.part(shard.number)
        part = read_table(out.read(name) or b"", OUT, name)
        unknown.update(json.loads(part.schema.metadata[UNKNOWN_KEY.encode()]))
        part = part.replace_schema_metadata()
        best = part if best is None else pa.concat_tables([best, part])
        place, score, hashes = (best[name].to_numpy() for name in ("place", "score", "hash"))
        best = best.take(np.lexsort((place, hashes, -score))[: request.choice.k])
    ids = best[ID].to_pylist()
    check_ids(ids, len(ids))
    columns = zip(best["place"].to_pylist(), ids, best["score"].to_pylist(), strict=True)
    rows = [
        {"rank": rank, "index": place, "id": name, "score": score, "control": False}
        for rank, (place, name, score) in enumerate(columns, start=1)
    ]
    return acquire_answer(manifest, request.choice, request.seed, rows, plan.rows, 0, dict(unknown))


def _write_ranking(out: Files, answer: JsonObject) -> None:
    table = pa.Table.from_pylist(answer["ranking"], RANKING_SCHEMA)
    out.create(f"{RANKING}.parquet", to_parquet(table))
    out.create(f"{RANKING}.json", json.dumps(answer).encode() + b"\n")
