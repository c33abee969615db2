"""Fifty kills of `fit` while it publishes, half of them aimed at the writing of files (some
minutes)."""

import pytest

from tests.training.publishing.test_publish_kill import kill_publications

pytestmark = pytest.mark.slow


def test_fifty_killed_publications_leave_no_partial_version(tmp_path):
    killed, published = kill_publications(tmp_path, attempts=50)
    print(f"{killed} of 50 were killed before their end; {published} attempts published")
    assert killed >= 25
