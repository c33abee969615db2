"""A training step of the papers' CNN with and without memory that is kept when it is freed, each in
its own process.

    python -m benchmarks.freed_memory [--steps 5]

128 rows of 32x32 in colour, maximum likelihood, Adam, one thread. Prints a Markdown table:
    processor time of a step
(the lowest), page faults of a step, and the largest resident memory.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch

from training.fitting.run import keep_freed_memory
from training.networks.architectures import papers_cnn

ROWS = 128


def measure(steps: int) -> str:
    """Return one row's figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = papers_cnn((3, 32, 32), 10)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    x, y = torch.rand(ROWS, 3, 32, 32), torch.randint(10, (ROWS,))
    times = []
    faults = 0
    for _ in range(steps + 1):
        begun, faults_before = (
            time.process_time(),
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        )
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        times.append(time.process_time() - begun)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{1000 * min(times[1:]):.0f} | {faults:,} | {peak:.0f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=["given back", "kept"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        if options.only == "kept":
            keep_freed_memory()
        print(f"| {options.only} | {measure(options.steps)} |")
        return
    print(
        "| freed memory is | processor ms a step | page faults a step | peak, MiB "
        "|\n|---|---|---|---|",
        flush=True,
    )
    for only in ("given back", "kept"):
        command = [
            sys.executable,
            "-m",
            "benchmarks.freed_memory",
            "--steps",
            str(options.steps),
            "--only",
            only,
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
