"""`python -m service score` and `python -m service acquire`: whole data sets of Parquet files.

`score` predicts all rows as /predict does; `acquire` ranks them as /acquire does. The output is
divided as the data set is, in parts that are written once: a job that was killed anywhere goes on
where it is started again.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from model_store.acquisition.choice import candidates_of, checked_acquisition, checked_beta
from model_store.artifacts.place import is_url
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from service.api.options import decision_options, num_samples_of, priors_of
from service.api.schemas import AcquireRequest, PredictRequest, validate
from service.batch.files import Files, Stopped, files_at
from service.batch.here import At, run_here
from service.batch.job import OUT, REJECTS, SOURCE, Asked, Job, begun, shard_rows_of
from service.batch.progress import Progress
from service.batch.ranking import RANKING, RankedParts
from service.batch.shard_work import Said, Told, digest_of, store_of
from service.models.reservoir import fresh_seed
from service.settings import Settings, processors

DONE = "done.json"
MAX_REJECTS = 0.01


@dataclass(frozen=True)
class Loaded:
    """A model, as options name it."""

    model: Model

    @property
    def name(self) -> str:
        """Its name."""
        return self.model.manifest.name

    @property
    def version(self) -> str:
        """Its version."""
        return self.model.manifest.version


def run(command: str, arguments: list[str], settings: Settings) -> int:
    """Do what the arguments ask for, and return the exit code; 130 where a terminal ended it.

    Raises:
        InvalidInput: naming the option that is wrong, or what is wrong with the data set or the
            output.
        Stopped: if the job cannot go on; what is done is kept.
    """
    options = _parser(command).parse_args(arguments)
    try:
        _run(command, options, settings)
    except KeyboardInterrupt:
        print("\nended; the same command goes on with what is left", file=sys.stderr)
        return 130
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    about = {"score": "Predict", "acquire": "Rank"}[command]
    parser = argparse.ArgumentParser(
        prog=f"python -m service {command}",
        description=f"{about} a data set of Parquet files: see docs/data-sets.md. Started again, it goes on.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="a .parquet file, a folder of them, or s3://, gs:// or az://bucket/prefix",
    )
    add(
        "--out",
        metavar="DST",
        required=command == "score",
        help="a folder or a bucket's URL, empty or of this job",
    )
    add("--model", metavar="NAME", help="a published model; may be left out where there is one")
    add("--version", default="latest", metavar="V", help="a number or an alias (latest)")
    add(
        "--num-samples",
        type=int,
        metavar="N",
        help="posterior draws; by default the model's own number",
    )
    add(
        "--seed",
        type=int,
        metavar="S",
        help="of the draws; by default one that nobody can foresee, kept in DST",
    )
    add("--priors", metavar="JSON", help="shares of all classes, an object keyed by class")
    if command == "score":
        add("--fpr", type=float, metavar="P", help="false-positive rate of the flag (0.05)")
        add("--fdr", type=float, metavar="P", help=argparse.SUPPRESS)
        add("--coverage", type=float, metavar="P", help="of prediction sets and intervals (0.95)")
        add(
            "--confidence",
            type=float,
            metavar="P",
            help="with which coverage is kept; by default on average",
        )
        add(
            "--risk",
            type=float,
            metavar="P",
            help="abstain where a label is wrong with a larger probability",
        )
        add("--settle", type=float, metavar="T", help="tolerance at which a row stops drawing")
    else:
        add("-k", "--k", type=int, default=1000, metavar="N", help="how many rows to rank (1000)")
        add(
            "--acquisition",
            metavar="NAME",
            help="what to choose rows by: as /acquire has it (bald)",
        )
        add(
            "--beta",
            type=float,
            metavar="B",
            help="of power_bald: rows are taken by chance, BALD^B their weights (1)",
        )
        add("--exclude", type=Path, metavar="FILE", help="ids that are left out, one a line")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="processes, one thread each; by default one for each processor",
    )
    add(
        "--ray",
        metavar="ADDRESS",
        help="run on Ray: `local` starts it here, `auto` or host:port join a cluster",
    )
    add(
        "--max-rejects",
        type=float,
        default=MAX_REJECTS,
        metavar="SHARE",
        help="of all rows, that may be unreadable",
    )
    add(
        "--shard-rows",
        type=int,
        metavar="N",
        help="most rows of a part; by default 32768, fewer of wide rows",
    )
    add("--quiet", action="store_true", help="say nothing of progress")
    return parser


def _run(command: str, options: argparse.Namespace, settings: Settings) -> None:
    if not 0 <= options.max_rejects <= 1:
        raise InvalidInput("max-rejects", "a share from 0 to 1", f"{options.max_rejects}")
    for name in ("workers", "shard_rows"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InvalidInput(name.replace("_", "-"), "at least 1", f"{getattr(options, name)}")
    excluded = _excluded(getattr(options, "exclude", None))
    loaded = _loaded(options, settings)
    asked = _asked(command, options, settings, loaded, excluded)
    with _output(options) as place:
        source, out = files_at(options.source, SOURCE), files_at(place, OUT)
        _refuse_overlap(options.source, place)
        out.check_output()
        check_rows = partial(_check_rows, asked, loaded.model)
        job = begun(
            out, source, asked, options.seed is not None, loaded.model.manifest.input, check_rows
        )
        told = Told(
            *(_whole(options.source), _whole(place), _whole(str(settings.store))),
            *(str(settings.cache.resolve()), settings.cache_bytes),
            None if settings.verify_key_file is None else str(settings.verify_key_file.resolve()),
            tuple(excluded),
        )
        progress = _worked(job, out, told, options)
        if command == "acquire":
            parts = RankedParts(job, out, source, loaded.model)
            ranked = parts.ranking()
            if options.out is None:
                print(json.dumps(parts.answer(ranked)))
            else:
                parts.write(ranked)
        done = {"rows": job.rows, "rejected": progress.rejected, "parts": len(job.shards)}
        out.create(DONE, json.dumps(done).encode() + b"\n")
        out.clear()
    _tell(options, job, progress)


def _loaded(options: argparse.Namespace, settings: Settings) -> Loaded:
    """Return the model that the options mean."""
    store = store_of(settings)
    name = options.model or settings.default_model
    if name is None:
        names = store.names()
        if len(names) != 1:
            raise InvalidInput(
                "model", "one of the published models", f"none, and there are {len(names)}"
            )
        (name,) = names
    return Loaded(Model.load(store.open(name, store.resolve(name, options.version), wanted=NEEDED)))


def _asked(
    command: str,
    options: argparse.Namespace,
    settings: Settings,
    loaded: Loaded,
    excluded: list[str],
) -> Asked:
    """Return what is asked, checked as a request is."""
    kind = PredictRequest if command == "score" else AcquireRequest
    names = (
        "num_samples",
        "seed",
        "priors",
        "fpr",
        "fdr",
        "coverage",
        "confidence",
        "risk",
        "settle",
    )
    given = {name: getattr(options, name, None) for name in (*names, "k", "acquisition", "beta")}
    if given["priors"] is not None:
        given["priors"] = _json(given["priors"])
    rows: dict[str, Any] = {"inputs": []} if command == "score" else {}
    envelope = validate(
        kind, {name: value for name, value in given.items() if value is not None} | rows
    )
    model = loaded.model
    num_samples = num_samples_of(envelope, loaded, settings)
    basics: dict[str, Any] = {
        "model": loaded.name,
        "version": loaded.version,
        "manifest": digest_of(model.manifest),
        "num_samples": num_samples,
        "seed": fresh_seed() if envelope.seed is None else envelope.seed,
        "shard_rows": options.shard_rows
        or shard_rows_of(model.row_size, model.manifest.output_size),
        "priors": priors_of(envelope, loaded),
    }
    if isinstance(envelope, PredictRequest):
        if envelope.fdr is not None:
            expected = (
                "none of a data set, whose rows are not decided together (p_value is in the parts)"
            )
            raise InvalidInput("fdr", expected, "one")
        decided = decision_options(envelope, loaded, num_samples, settings.settle)
        return Asked("score", **basics, options=decided)
    assert isinstance(envelope, AcquireRequest)
    task = model.manifest.task
    acquisition = checked_acquisition(options.acquisition, task)
    beta = checked_beta(envelope.beta, acquisition, task)
    digest = hashlib.sha256("\n".join(excluded).encode()).hexdigest() if excluded else ""
    return Asked(
        "acquire", **basics, acquisition=acquisition, k=envelope.k, beta=beta, exclude=digest
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidInput("priors", "a JSON object", "something else") from None


def _check_rows(asked: Asked, model: Model, rows: int) -> None:
    candidates_of(asked.acquisition, model, rows, asked.k, asked.num_samples)


def _excluded(file: Path | None) -> list[str]:
    """Return the ids of a file, one a line, each once."""
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(
            "exclude", "a file of ids in UTF-8, one a line", f"{file}, which is none"
        ) from None
    return sorted({line.removesuffix("\r") for line in lines} - {""})


def _refuse_overlap(source: str, out: str) -> None:
    """Raise InvalidInput if the output would be among the data."""
    if is_url(source) != is_url(out):
        return
    inner, outer = _whole(out).rstrip("/") + "/", _whole(source).rstrip("/") + "/"
    if inner.startswith(outer):
        raise InvalidInput(OUT, "a place outside the data set", out)


def _whole(place: str) -> str:
    """Return a place as every process finds it."""
    return place if is_url(place) else str(Path(place).resolve())


@contextmanager
def _output(options: argparse.Namespace) -> Iterator[str]:
    """Yield where the output goes: a folder for the time being where nobody names one."""
    if options.out is not None:
        yield options.out
        return
    if options.ray not in (None, "local"):
        raise InvalidInput(OUT, "a place that all nodes of the cluster see", "none")
    folder = tempfile.mkdtemp(prefix="dubito-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _worked(job: Job, out: Files, told: Told, options: argparse.Namespace) -> Progress:
    """Have all shards done that are not, and return what it took.

    Raises:
        Stopped: if more rows cannot be read than may be.
        InvalidInput: as a shard's worker says it.
    """
    names = out.names()
    done = {shard.number for shard in job.shards if job.part(shard.number) in names}
    todo = [shard.number for shard in job.shards if shard.number not in done]
    rejected, reasons = 0, list[str]()
    for number in sorted(done):
        if job.rejects(number) in names:
            lines = (out.read(job.rejects(number)) or b"").splitlines()
            rejected += len(lines)
            reasons += [json.loads(line)["reason"] for line in lines[:1]]
    progress = Progress(job, done, rejected, options.quiet)
    _check_rejects(job, progress, reasons, options)
    if not todo:
        return progress
    if options.ray is None:
        running: Generator[At | Said, None, None] = run_here(
            told, todo, options.workers or processors()
        )
    else:
        from service.batch.on_ray import run_on_ray

        running = run_on_ray(told, todo, options.ray, options.workers)
    with closing(running):
        for said in running:
            if isinstance(said, At):
                progress.at(said.shard, said.rows)
                continue
            if said.error is not None:
                raise Stopped(said.error)
            progress.done(said.shard, said.rejected, said.row_draws, said.cpu_s)
            reasons += said.reasons
            _check_rejects(job, progress, reasons, options)
        progress.end()
    return progress


def _check_rejects(
    job: Job, progress: Progress, reasons: list[str], options: argparse.Namespace
) -> None:
    if progress.rejected > options.max_rejects * job.rows:
        got = f"{progress.rejected} so far ({'; '.join(reasons[:3])})"
        raise Stopped(
            f"source: expected at most {options.max_rejects:g} of {job.rows} rows that cannot be "
            f"read, got {got}"
        )


def _tell(options: argparse.Namespace, job: Job, progress: Progress) -> None:
    """Say what was done."""
    if options.quiet or options.out is None:
        return
    what = "scored" if job.asked.kind == "score" else "ranked"
    rejected = (
        f", {progress.rejected:,} rejected ({options.out}/{REJECTS})" if progress.rejected else ""
    )
    where = "" if what == "scored" else f", {RANKING}.json"
    print(
        f"{job.rows:,} rows {what} by {job.asked.model} version {job.asked.version}, seed "
        f"{job.asked.seed}{rejected}"
        f": {options.out}{where}; {progress.cost}, {progress.elapsed_s:,.0f} s"
    )
