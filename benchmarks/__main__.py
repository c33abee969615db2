"""The short form: the kernel, one row over HTTP and what detectors cost, on an untrained model of
MNIST's size.

`python -m benchmarks` prints three tables in a few minutes; `docs/results/README.md` says how to
run the long forms.
"""

from argparse import Namespace

from benchmarks import detector_cost, kernel, predict
from benchmarks.common import NAME, store_of

ROUNDS, CALLS = 3, 50


def main() -> None:
    with store_of(Namespace(store=None)) as store:
        print(kernel.table(kernel.measure(store, NAME, ROUNDS), ROUNDS), flush=True)
        print(predict.table(predict.measure(store, ROUNDS, CALLS)), flush=True)
        print(detector_cost.measure(store, NAME))


if __name__ == "__main__":
    main()
