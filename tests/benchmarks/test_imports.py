"""Every benchmark can be begun: names that are changed elsewhere are changed in it."""

import importlib

import pytest

from tests.support.environment import ROOT

MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_has_all_that_it_imports(module):
    assert importlib.import_module(f"benchmarks.{module}").__doc__
