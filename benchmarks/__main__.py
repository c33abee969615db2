"""The short form: the kernel, one row over HTTP and what detectors cost, on an untrained model of
MNIST's size.

`python -m benchmarks` prints three tables in a few minutes; `docs/results/README.md` says how to
run the long forms.
"""

import tempfile
from pathlib import Path

from benchmarks import detector_cost, kernel, predict
from benchmarks.common import NAME, publish_untrained
from model_store.artifacts.store import ModelStore

ROUNDS, CALLS = 3, 50


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(Path(folder))
        publish_untrained(store)
        print(kernel.table(kernel.measure(store, NAME, ROUNDS), ROUNDS), flush=True)
        print(predict.table(predict.measure(store, ROUNDS, CALLS)), flush=True)
        print(detector_cost.measure(store, NAME))


if __name__ == "__main__":
    main()
