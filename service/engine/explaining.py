"""Predicting rows once more, as they would be with one column after the other as usual: `explain`
asks for it."""

from functools import partial

from model_store.artifacts.manifest import InputSpec
from model_store.inference.explanation import rows_as_usual
from model_store.inference.prediction import Prediction
from model_store.sources.columns import usual_row
from service.engine.batching import Engine
from service.engine.jobs import Job, Predicted
from service.engine.threads import Threads


def more_rows(spec: InputSpec) -> int:
    """Return how many rows are predicted beside each that is explained: itself, and once for each
    column."""
    return 1 + len(spec.columns) if spec.columns and usual_row(spec.columns) is not None else 0


async def predicted_as_usual(
    engine: Engine, threads: Threads, job: Job, predicted: Predicted
) -> Prediction | None:
    """Return the prediction of a job's `rows_as_usual` under its own draws; None where there are no
    such rows.

    Raises:
        PastDeadline, ClientDisconnect: as `Engine.predict` does.
    """
    spec = job.served.model.manifest.input
    if more_rows(spec) == 0:
        return None
    work = partial(rows_as_usual, spec.columns, job.x, job.call.pause)
    x = await threads.requests.run(job.call, job.x.nbytes, work)
    again = Job(job.served, x, job.num_samples, predicted.seed, job.call, priors=job.priors)
    return (await engine.predict(again)).prediction
