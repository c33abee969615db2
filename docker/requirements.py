"""Print what an image installs, from pyproject.toml: the base dependencies and those of the extras named.

Run on its own in a build, so that the layer of dependencies stays as it is when the code changes.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print one requirement a line."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
    print("\n".join([*project["dependencies"], *(requirement for extra in extras for requirement in extra)]))


if __name__ == "__main__":
    main()
