"""Check that every benchmark can still be imported."""

import importlib

import pytest

from tests.support.environment import ROOT

MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_can_be_imported(module):
    assert importlib.import_module(f"benchmarks.{module}").__doc__
