"""A thousand bad requests over every route, sent as bytes; tests/resilience/slow has a hundred
thousand."""

import os
import shutil
from urllib.parse import urlsplit

import pytest

from model_store.artifacts.store import ModelStore
from tests.support.bad_inference import BadInference
from tests.support.bad_requests import BadRequests
from tests.support.fuzz import fuzz
from tests.support.process import pss_bytes
from tests.support.stores import publish_again

ADMIN_KEY = "an-administrators-key"
LARGEST_GROWTH = 64 << 20


def store_to_fuzz(digits_store, folder):
    """A store with a good version 1 and a version 2 whose network is no graph, with the alias
    `broken`."""
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    publish_again(store, digits_store)
    store.set_alias("digits", "latest", "1")
    store.set_alias("digits", "broken", "2")
    (store.root / "digits" / "2" / "network.onnx").write_bytes(b"no graph")
    return store.root


def fuzz_service(serve, root, count, seed=0, requests=BadRequests):
    """What comes of bad requests to a service of its own; its log is read and shows no unexpected
    error."""
    with serve(
        root, DUBITO_ADMIN_KEY=ADMIN_KEY, DUBITO_LOG_LEVEL="error", DUBITO_DEFAULT_MODEL="digits"
    ) as (
        url,
        process,
    ):
        port = urlsplit(url).port
        first = fuzz(port, count // 10, f"{seed}.warm", ADMIN_KEY, requests=requests)
        before = pss_bytes(process.pid)
        outcome = fuzz(port, count - count // 10, seed, ADMIN_KEY, requests=requests)
        growth = pss_bytes(process.pid) - before
        process.terminate()
        log = process.communicate(timeout=60)[1]
    wrong = first.wrong + outcome.wrong
    assert wrong == [], f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20]) + "\n" + log[-3000:]
    assert "Traceback" not in log, log[-3000:]
    assert "unexpected" not in log, log[-3000:]
    assert growth < LARGEST_GROWTH
    return first, outcome, growth


def test_a_thousand_bad_requests_are_each_refused_and_a_good_one_between_them_is_right(
    serve, digits_store, tmp_path
):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    _, outcome, _ = fuzz_service(serve, store_to_fuzz(digits_store, tmp_path), 1000, seed)
    assert outcome.past_parsing >= outcome.sent / 3
    assert outcome.good > 0


@pytest.mark.slow
def test_a_thousand_bad_requests_of_other_protocols_are_each_refused(serve, kinds):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    _, outcome, _ = fuzz_service(serve, kinds, 1000, seed, BadInference)
    assert outcome.past_parsing >= outcome.sent / 3
    assert outcome.statuses[200] >= outcome.sent / 20
    assert outcome.good > 0
