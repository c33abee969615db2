import shutil
from collections import Counter

import httpx
import pytest

from tests.support import tiny
from tests.support.damage import FILE_DAMAGE, GRAPH_DAMAGE, damage
from tests.support.serving import WITH_PREFLIGHTS, WITHOUT_PREFLIGHTS, serving

ADMIN = {"X-API-Key": "the-key-of-the-administrator"}
ROW = {"inputs": [[0.5] * tiny.INPUTS], "seed": 1, "num_samples": 5}
DAMAGED = "2"
EXPECTED_STATUSES = {200, 404, 503}
SEEDS_PER_SERVICE = 100


def request_damaged_versions(folder, seeds, kinds, trials):
    """Damage version 2 by each seed, request it and `latest`, and count its statuses."""
    store = tiny.create_store(folder / "models", versions=2)
    store.set_alias("tiny", "latest", "1")
    model_folder, intact = store.root / "tiny", folder / "whole"
    shutil.copytree(model_folder / DAMAGED, intact)
    statuses = Counter()
    settings = {"DUBITO_ADMIN_KEY": ADMIN["X-API-Key"], "DUBITO_POLL_INTERVAL_S": "3600"}
    with (
        serving(store.root, **settings, **trials) as (url, process),
        httpx.Client(base_url=url, headers=ADMIN, timeout=60) as client,
    ):
        expected = client.post("/predict", json={**ROW, "version": "1"}).json()["predictions"]
        for seed in seeds:
            version = model_folder / DAMAGED
            _remove(version)
            assert client.post("/admin/refresh").status_code == 200
            shutil.copytree(intact, version)
            kind = f"{damage(version, seed, kinds)} of seed {seed}"
            assert client.post("/admin/refresh").status_code == 200, kind
            latest = client.post("/predict", json=ROW)
            assert latest.status_code == 200, f"{kind}: {latest.text}"
            assert latest.json()["version"] == "1", kind
            assert latest.json()["predictions"] == expected, kind
            prediction = client.post("/predict", json={**ROW, "version": DAMAGED})
            description = client.get(f"/models/tiny/versions/{DAMAGED}")
            for response in (prediction, description):
                assert response.status_code in EXPECTED_STATUSES, f"{kind}: {response.text}"
                assert str(folder) not in response.text, kind
            assert client.get("/health/ready").json()["models"] == {"tiny": "1"}, kind
            assert client.get("/models").status_code == 200, kind
            statuses[prediction.status_code] += 1
        assert process.poll() is None
    return statuses


def _remove(path):
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def test_damaged_versions_are_rejected_while_intact_version_is_served(tmp_path):
    statuses = request_damaged_versions(tmp_path, range(40), FILE_DAMAGE, WITHOUT_PREFLIGHTS)
    assert statuses[503] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "kinds", "trials"),
    [(range(700), FILE_DAMAGE, WITHOUT_PREFLIGHTS), (range(300), GRAPH_DAMAGE, WITH_PREFLIGHTS)],
    ids=["files", "graphs"],
)
def test_service_survives_1000_damaged_versions(tmp_path, seeds, kinds, trials):
    statuses = Counter()
    for first in range(0, len(seeds), SEEDS_PER_SERVICE):
        part = seeds[first : first + SEEDS_PER_SERVICE]
        statuses += request_damaged_versions(tmp_path / str(first), part, kinds, trials)
    assert statuses[503] > len(seeds) / 2
