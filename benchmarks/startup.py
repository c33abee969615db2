"""Start-up and memory of the service: time until it is ready, what it then takes, and what a
version adds.

    python -m benchmarks.startup [--store DIR --model NAME] [--repeats 5] [--requests 1000]
    [--write]

Starts `python -m service` as users do, in one process, and asks `/health/ready` every 10 ms until
it answers 200. Then come requests of one row under fresh draws, one after the other. Resident
memory (VmRSS) counts pages shared with other processes in full, PSS by their share. Then further
versions of the same files are asked for, to compare what each adds with the estimate that the
memory bound works with, and to see what a bound gives back. With `--write` the page goes to
docs/results/startup.md. Times depend on what else the machine does; processor seconds less so.
"""

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import NAME, report, serve, size_parser, store_of
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from model_store.processes import processors

VERSIONS = 4  # besides the first, loaded to see what each adds


def row_of(store: ModelStore, model: str) -> str:
    size = 1
    for length in store.manifest(model, store.resolve(model)).input.shape:
        size *= length
    return json.dumps({"model": model, "inputs": [[0.0] * size]})


def starts(store: ModelStore, model: str, repeats: int, requests: int) -> str:
    """Return a table of start-up times and memory, a row for each figure."""
    request = row_of(store, model)
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        with serve(store.root) as service:
            measured = {
                "seconds until ready": service.seconds,
                "processor seconds": service.processor_seconds(),
            }
            time.sleep(3)  # until the first draws are made
            measured["VmRSS after the start, MB"], measured["PSS after the start, MB"] = (
                service.memory()
            )
            for _ in range(requests):
                service.ask("POST", "/predict", request)
            after = f"after {requests:,} requests, MB"
            measured[f"VmRSS {after}"], measured[f"PSS {after}"] = service.memory()
        for name, value in measured.items():
            figures.setdefault(name, []).append(value)
    lines = ["| | median | lowest | highest |", "|---|---|---|---|"]
    for name, values in figures.items():
        numbers = (statistics.median(values), min(values), max(values))
        lines.append(
            f"| {name} | "
            + " | ".join(f"{n:.2f}" if "seconds" in name else f"{n:.0f}" for n in numbers)
            + " |"
        )
    return "\n".join(lines)


def versions(store: ModelStore, model: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = ModelStore(Path(folder) / "models")
        first = store.open(model, store.resolve(model))
        description = Description(
            **{name: getattr(first.manifest, name) for name in Description.model_fields}
        )
        for number in range(VERSIONS + 1):
            copy.publish(model, description, {file: first.files[file] for file in FILES})
            copy.set_alias(
                model, f"a{number}", str(number + 1)
            )  # so that draws are kept ready for each
        copy.set_alias(model, "latest", "1")
        with serve(copy.root) as service:
            estimate = (
                next(iter(json.loads(service.ask("GET", f"/models/{model}"))["in_memory"].values()))
                / 1e6
            )
        request = json.loads(row_of(copy, model))
        bound = str(int(1.5e6 * estimate))
        grown = _memory_by_version(copy, request, DUBITO_MAX_MODEL_BYTES=str(1 << 40))
        bounded = _memory_by_version(copy, request, DUBITO_MAX_MODEL_BYTES=bound)
        shutil.rmtree(copy.root)
    lines = [
        f"Estimate of a version: {estimate:.0f} MB; the bound of the last column holds one.\n",
        "| versions asked for | VmRSS, MB | added | VmRSS under the bound, MB |",
        "|---|---|---|---|",
    ]
    for number, (all_kept, one_kept) in enumerate(zip(grown, bounded, strict=True), start=1):
        added = "" if number == 1 else f"{all_kept - grown[number - 2]:.0f}"
        lines.append(f"| {number} | {all_kept:.0f} | {added} | {one_kept:.0f} |")
    each = (grown[-1] - grown[0]) / VERSIONS
    lines.append(f"\nA further version adds {each / estimate:.2f} times its estimate.")
    return "\n".join(lines)


def _memory_by_version(
    store: ModelStore, request: dict[str, object], **settings: str
) -> list[float]:
    """Return resident memory after each further version was asked for, in MB."""
    found = []
    with serve(store.root, **settings) as service:
        for number in range(VERSIONS + 1):
            service.ask("POST", "/predict", json.dumps({**request, "version": f"a{number}"}))
            time.sleep(4)  # draws are made, and what was freed goes back
            found.append(service.memory()[0])
    return found


def main() -> None:
    parser = size_parser(__doc__, "startup.md")
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    with store_of(options) as store:
        manifest = store.manifest(options.model, store.resolve(options.model))
        text = (
            "# Start-up and memory\n\n`python -m benchmarks.startup --write --store DIR --model "
            f"{options.model}`, {options.repeats} repeats, one process, {processors()} "
            f"processors shared with others.\nThe model's method is {manifest.method}, its "
            "precision "
            f"{manifest.precision}.\n\n{starts(store, options.model, options.repeats, options.requests)}\n\n## "
            f"What a version adds\n\n{versions(store, options.model)}\n"
        )
    report(options, "startup", text)


if __name__ == "__main__":
    main()
