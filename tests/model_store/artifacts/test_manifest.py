"""The manifest: what does not go together is refused."""

import pytest
from pydantic import ValidationError

from model_store.artifacts.manifest import DetectorSpec
from tests.support.stores import tiny_description

DETECTORS = tiny_description().detectors.model_dump()


@pytest.mark.parametrize("two_sided", [(), ("b",), ("b", "c")])
def test_any_densities_may_be_two_sided(two_sided):
    spec = DetectorSpec.model_validate({**DETECTORS, "density": ("b", "c"), "two_sided": two_sided})
    assert spec.names.two_sided == two_sided


@pytest.mark.parametrize("two_sided", [("bald",), ("b", "bald"), ("b", "c", "d")])
def test_a_two_sided_detector_that_is_no_density_is_refused(two_sided):
    with pytest.raises(ValidationError, match=r"two_sided: expected some of \['b', 'c'\]"):
        DetectorSpec.model_validate({**DETECTORS, "density": ("b", "c"), "two_sided": two_sided})
