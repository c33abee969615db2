"""List the benchmarks, each with the first line of its docstring.

`make bench` runs the short ones; `docs/results/README.md` describes all of them.
"""

import importlib
import pkgutil

import benchmarks

SHARED = ("__main__", "common")


def main() -> None:
    for found in pkgutil.iter_modules(benchmarks.__path__):
        if found.name not in SHARED:
            module = importlib.import_module(f"benchmarks.{found.name}")
            summary = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
            print(f"python -m benchmarks.{found.name:12} {summary}")


if __name__ == "__main__":
    main()
