import shutil
from collections import Counter

import httpx
import pytest

from tests.support import tiny
from tests.support.damage import OF_FILES, OF_GRAPHS, damage
from tests.support.serving import WITH_TRIALS, WITHOUT_TRIALS, serving

ADMIN = {"X-API-Key": "the-key-of-the-administrator"}
ROW = {"inputs": [[0.5] * tiny.INPUTS], "seed": 1, "num_samples": 5}
DAMAGED = "2"
BY_DESIGN = {200, 404, 503}
OF_ONE_SERVICE = 100


def ask_of_damaged_versions(folder, seeds, kinds, trials):
    """Damage version 2 by each seed, and request it and `latest`; count the answers by status."""
    store = tiny.published(folder / "models", versions=2)
    store.set_alias("tiny", "latest", "1")
    of_model, full = store.root / "tiny", folder / "whole"
    shutil.copytree(of_model / DAMAGED, full)
    answered = Counter()
    settings = {"DUBITO_ADMIN_KEY": ADMIN["X-API-Key"], "DUBITO_POLL_INTERVAL_S": "3600"}
    with (
        serving(store.root, **settings, **trials) as (url, process),
        httpx.Client(base_url=url, headers=ADMIN, timeout=60) as client,
    ):
        expected = client.post("/predict", json={**ROW, "version": "1"}).json()["predictions"]
        for seed in seeds:
            version = of_model / DAMAGED
            _remove(version)
            assert client.post("/admin/refresh").status_code == 200
            shutil.copytree(full, version)
            kind = f"{damage(version, seed, kinds)} of seed {seed}"
            assert client.post("/admin/refresh").status_code == 200, kind
            latest = client.post("/predict", json=ROW)
            assert latest.status_code == 200, f"{kind}: {latest.text}"
            assert latest.json()["version"] == "1", kind
            assert latest.json()["predictions"] == expected, kind
            of_version = client.post("/predict", json={**ROW, "version": DAMAGED})
            described = client.get(f"/models/tiny/versions/{DAMAGED}")
            for answer in (of_version, described):
                assert answer.status_code in BY_DESIGN, f"{kind}: {answer.text}"
                assert str(folder) not in answer.text, kind
            assert client.get("/health/ready").json()["models"] == {"tiny": "1"}, kind
            assert client.get("/models").status_code == 200, kind
            answered[of_version.status_code] += 1
        assert process.poll() is None
    return answered


def _remove(path):
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def test_damaged_versions_are_refused_while_a_whole_one_is_served(tmp_path):
    answered = ask_of_damaged_versions(tmp_path, range(40), OF_FILES, WITHOUT_TRIALS)
    assert answered[503] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "kinds", "trials"),
    [(range(700), OF_FILES, WITHOUT_TRIALS), (range(300), OF_GRAPHS, WITH_TRIALS)],
    ids=["files", "graphs"],
)
def test_1000_damaged_versions_end_nothing(tmp_path, seeds, kinds, trials):
    answered = Counter()
    for first in range(0, len(seeds), OF_ONE_SERVICE):
        part = seeds[first : first + OF_ONE_SERVICE]
        answered += ask_of_damaged_versions(tmp_path / str(first), part, kinds, trials)
    assert answered[503] > len(seeds) / 2
