"""The process of one job: `python -m service.batch.run`, started by `service.batch.runner`, which
tells it what to do.

It runs when no other process wants the processors, so that requests keep their latency; it ends
with whoever started it. Ended by SIGTERM it has what it did last first.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from model_store.artifacts.place import open_store
from model_store.artifacts.signature import read_public_key
from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError, InvalidInput, NoSpace, StateUnusable, StoreError
from model_store.inference.model import NEEDED, Model
from model_store.processes import be_idle, be_killed_first, end_with_parent
from model_store.state.database import Database, of_disk
from model_store.state.jobs import Job, Jobs
from model_store.state.labels import AcquiredRow, Acquisition, keep_acquired
from service.batch.acquire_work import AcquireWork
from service.batch.asked import Asked
from service.batch.predict_work import PredictWork
from service.batch.work import Cancelled, Work
from service.settings import VERIFY_KEY_VARIABLE

OVER = 0  # the job has ended, or is to end
PUT_BACK = 3  # it is to be taken up again later


def main() -> int:
    """Run a job; return the exit code."""
    end_with_parent()
    be_killed_first()
    be_idle()
    told = json.loads(sys.stdin.readline())
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's reaches the service too, which ends this one
    database = Database(Path(told["state"]))
    jobs = Jobs(database)
    key = told["verify_key_file"]
    trusted = None if key is None else read_public_key(Path(key), VERIFY_KEY_VARIABLE)
    store = open_store(told["store"], trusted, Path(told["cache"]), told["cache_bytes"])
    try:
        job = jobs.get(told["job"])
        return run(jobs, job, store, told["threads"], ending, partial(keep_acquired, database))
    finally:
        database.close()


def run(
    jobs: Jobs,
    job: Job,
    store: ModelStore,
    threads: int,
    ending: threading.Event,
    keep: Callable[[Acquisition, list[AcquiredRow]], None],
) -> int:
    """Run a job that was claimed, and note how it ended."""
    asked = Asked.from_json(job.request)
    begun = time.monotonic()

    def report(work: int, done: int) -> bool:
        return (
            jobs.progress(job.id, work, done, job.worked_s + time.monotonic() - begun)
            and not ending.is_set()
        )

    try:
        model = Model.load(store.open(asked.model, asked.version, wanted=NEEDED), threads)
        of_job = jobs.folder / job.id, asked, model, report
        work: Work = PredictWork(*of_job) if job.kind == "predict" else AcquireWork(*of_job, keep)
        try:
            answer = work.run()
        except InvalidInput as error:
            jobs.finish(job.id, "failed", work.told(error))
            return OVER
    except Cancelled:
        if not jobs.get(job.id).cancel:
            return PUT_BACK
        jobs.finish(job.id, "cancelled", None)
    except (NoSpace, StateUnusable):
        raise
    except (StoreError, DubitoError) as error:
        jobs.finish(job.id, "failed", str(error))
    except OSError as error:
        jobs.finish(job.id, "failed", str(of_disk(error)))
    else:
        jobs.finish(job.id, "done", answer.name)
    return OVER


if __name__ == "__main__":
    sys.exit(main())
