"""List the benchmarks.

`make bench` runs the short ones. `docs/results/README.md` describes all of them.
"""

import importlib
import pkgutil

import benchmarks

SHARED = ("__main__", "common")


def main() -> None:
    for info in pkgutil.iter_modules(benchmarks.__path__):
        if info.name not in SHARED:
            module = importlib.import_module(f"benchmarks.{info.name}")
            summary = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
            print(f"python -m benchmarks.{info.name:12} {summary}")


if __name__ == "__main__":
    main()
