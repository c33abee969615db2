"""What a core gives, measured; a simulation of replicas, checked against 1, 2 and 4 of them; what
it says of many.

    python -m benchmarks.scaling --measure      measures for some minutes, and keeps
    docs/results/scaling.json python -m benchmarks.scaling [--write]      simulates for some
    minutes; --write keeps scaling.{md,png} there

Measure on a machine that is as quiet as can be: a load that other programs disturb is tried again a
    few times, and
then left out.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import common
from benchmarks.common import RESULTS, bare_parser, publish_untrained
from benchmarks.scaling import measure, report
from benchmarks.scaling.fitting import fit_costs, undisturbed
from benchmarks.scaling.simulation import Costs
from model_store.artifacts.store import ModelStore

MEASURED = RESULTS / "scaling.json"
PARTS = ("calibration", "replica", "1", "2", "4")


def main() -> None:
    parser = bare_parser(__doc__, "scaling.{md,png}")
    parser.add_argument(
        "--measure",
        nargs="*",
        choices=PARTS,
        metavar="PART",
        help=f"measure all or some of {PARTS}",
    )
    parser.add_argument("--rounds", type=int, default=measure.ROUNDS, help="of each load")
    options = parser.parse_args()
    if options.measure is not None:
        measure_parts(options.measure or PARTS, options.rounds)
        return
    kept = json.loads(MEASURED.read_text())
    costs, found = Costs(**kept["costs"]), kept["found"]
    measured = [measure.Measured(**one) for one in kept["measured"]]
    text, plan = report.page(measure.Replica(**kept["replica"]), costs, found, measured, log)
    fit, _ = fit_costs(costs, undisturbed(measured))
    common.report(options, "scaling", text, lambda: report.plot(fit, measured, plan))


def measure_parts(parts: Sequence[str], rounds: int) -> None:
    kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"measured": []}
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(Path(folder))
        publish_untrained(store)
        for part in parts:
            if part == "calibration":
                costs, kept["found"] = measure.calibrate(store)
                kept["costs"] = asdict(costs)
            elif part == "replica":
                kept["replica"] = asdict(measure.describe(store))
            else:
                kept["measured"] = [one for one in kept["measured"] if one["replicas"] != int(part)]
                for one in measure.measure(store, int(part), rounds):
                    log(str(one))
                    kept["measured"].append(asdict(one))
                    MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
            MEASURED.write_text(json.dumps(kept, indent=1) + "\n")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
