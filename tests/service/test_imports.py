"""What a service whose store is a folder does not import: what only clusters and buckets need."""

import subprocess
import sys

from tests.support.environment import ROOT, environment_with

IMPORTED = "import sys, service.__main__, service.app; print(*sorted({'obstore', 'ray', 'torch'} & {*sys.modules}))"


def test_a_service_of_one_process_imports_nothing_of_buckets_or_clusters():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env=environment_with(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == []
