"""The service is killed 50 times while labels come: no accepted label is lost or doubled, and none
is half kept.

What came of it stands in `docs/results/label-kills.md`.
"""

import random
import threading
from contextlib import closing

import httpx
import numpy as np
import pytest

from model_store.artifacts.store import ModelStore
from model_store.state.database import Database
from model_store.state.labels import labelled_rows, row_format

KILLS = 50

pytestmark = pytest.mark.slow


def test_no_accepted_label_is_lost_or_doubled(serve, digits_store, tmp_path):
    chance, state = random.SystemRandom(), tmp_path / "state"
    written = row_format(ModelStore(digits_store).manifest("digits", "1"))
    accepted, unanswered, next_id = {}, {}, 0
    requests = in_flight = on_disk = 0
    for _ in range(KILLS):
        with (
            serve(digits_store, DUBITO_STATE=str(state)) as (url, process),
            httpx.Client(base_url=url) as client,
        ):
            threading.Timer(chance.uniform(0.0, 0.5), process.kill).start()
            while True:
                batch = unanswered  # again, as a client does that got no answer
                if not batch:
                    count = chance.randrange(1, 50)
                    batch = {f"row {next_id + i}": str(chance.randrange(10)) for i in range(count)}
                    next_id += count
                rows = {name: [float(int(name.split()[1]) % 17)] * 64 for name in batch}
                labels = [
                    {"id": name, "label": label, "input": rows[name]}
                    for name, label in batch.items()
                ]
                unanswered = batch
                try:
                    answer = client.post("/labels", json={"labels": labels})
                except httpx.TransportError:
                    break
                assert answer.status_code == 200, answer.text
                assert answer.json()["accepted"] + answer.json()["known"] == len(batch)
                accepted |= batch
                unanswered = {}
                requests += 1
                assert answer.json()["labels"] == len(accepted)
            process.wait(30)
        with closing(Database(state)) as database:
            found = labelled_rows(database, "digits", written, 64)
        kept = dict(zip(found.ids, found.values, strict=True))
        assert len(kept) == len(found.ids)
        assert {name: kept.get(name) for name in accepted} == accepted
        half = {name: label for name, label in kept.items() if name not in accepted}
        assert half in ({}, unanswered)
        in_flight += bool(unanswered)
        on_disk += bool(half)
        np.testing.assert_array_equal(
            found.x[:, 0], [int(name.split()[1]) % 17 for name in found.ids]
        )
    print(
        f"{KILLS} kills, {requests} requests answered with {len(accepted)} labels, {in_flight} "
        "killed before their "
        f"answer, of which {on_disk} were on the disk"
    )
