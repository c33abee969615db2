"""The project's entry points, as its metadata have them where it is installed."""

import tomllib
from importlib.metadata import EntryPoint, EntryPoints

from tests.support.environment import ROOT


def entry_points(group: str) -> EntryPoints:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_group = project["entry-points"].get(group, {})
    return EntryPoints(EntryPoint(name, value, group) for name, value in of_group.items())
