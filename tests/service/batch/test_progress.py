import re
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from model_store.acquisition.choice import Choice
from model_store.inference.prediction import DecisionOptions
from service.batch.candidate import Cancelled
from service.batch.command import Progress
from service.batch.data_set import DataSetRequest, Plan, Shard
from service.batch.files import DataFile
from service.batch.job_process import JobPool
from service.batch.shards import ShardResult


def test_progress_line_shows_rows_rate_and_remaining_time():
    request = DataSetRequest(
        kind="score",
        model="digits",
        version="1",
        manifest="",
        num_samples=10,
        seed=5,
        options=DecisionOptions(0.05, None, 0.95, None),
        shard_rows=100,
    )
    shards = tuple(Shard(i, 0, 100 * i, 100, 100 * i) for i in range(4))
    options = Namespace(max_rejects=0.1, quiet=True)
    progress = Progress(Plan(request, (DataFile("a.parquet", 9, "-"),), shards), options)
    progress.add(ShardResult(0, rejected=2))
    progress.start()
    assert progress.line() == " 25 %  100 of 400 rows, 1 of 4 parts; 2 rejected"
    progress.add(ShardResult(1, rejected=1))
    message = re.fullmatch(
        r" 50 %  200 of 400 rows, 2 of 4 parts, [\d,]+ rows/s, 0:00:00 left; 3 rejected",
        progress.line(),
    )
    assert message, progress.line()


def test_batch_selection_can_be_cancelled():
    def advance(row_draws):
        assert row_draws == 0
        raise Cancelled

    job = SimpleNamespace(request=SimpleNamespace(seed=1), advance=advance)
    pool = JobPool(job, np.arange(2), ["a", "b"], Choice("classification", "batchbald", 1, 10))
    with pytest.raises(Cancelled):
        pool.pause()
