"""What every route that predicts does: from a request that was read to its answer, in whatever
form.

Admission, the client's share, memory, the deadline, the micro-batch, the decision, drift and
metrics are the same for all. A route reads a request, `Asked`, and says how an answer is written,
`Form`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.inference.prediction import Prediction, check_computed
from model_store.sources.columns import OddCells
from model_store.sources.row_file import RowFile
from service.api.explanations import explanation_bytes
from service.api.options import (
    decision_options,
    groups_of,
    num_samples_of,
    refuse_too_many_explained,
    refuse_too_many_samples,
)
from service.api.requests import SMALL_JSON_BYTES, Rows
from service.api.responses import answer_bytes
from service.api.schemas import PredictRequest
from service.call import Call
from service.context import Context
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.decision import DecisionOptions
from service.engine.explaining import more_rows, predicted_as_usual
from service.engine.jobs import Job, Predicted
from service.models.models import Served

T = TypeVar("T")

INPUTS = "inputs"  # the field that errors name rows by


@dataclass(eq=False)
class Asked:
    """A request to predict rows, as it was read. `rows` are let go of once they are numbers."""

    call: Call
    envelope: PredictRequest
    served: Served
    rows: Rows | RowFile | None

    @property
    def num_rows(self) -> int:
        """How many rows it has, before they are let go of."""
        assert self.rows is not None
        return self.rows.rows if isinstance(self.rows, RowFile) else len(self.rows)


@dataclass(frozen=True, eq=False)
class ToExplain:
    """What explanations are made of: odd cells of rows that came as objects, and rows with each
    column as usual."""

    cells: list[OddCells] | None
    as_usual: Prediction | None


class Form(Protocol):
    """How an answer is written."""

    as_arrays: bool  # which take less memory than JSON

    def write(
        self,
        job: Job,
        predicted: Predicted,
        options: DecisionOptions,
        groups: Int64[np.ndarray, "N"] | None,
        to_explain: ToExplain | None,
    ) -> tuple[list[bytes], Bool[np.ndarray, "N"]]:
        """Return the answer in parts, and which rows are flagged"""


async def read_rows(context: Context, call: Call, size: int, work: Callable[[], T]) -> T:
    """Return the result of work that reads so many bytes: few at once, many away from the event
    loop."""
    if size <= SMALL_JSON_BYTES:
        return work()
    return await context.threads.requests.run(call, size, work)


async def predict(context: Context, asked: Asked, form: Form) -> list[bytes]:
    """Predict a request's rows and return the answer in parts.

    Raises:
        InvalidInput, TooLarge, Overloaded, PastDeadline: as `service.api.problems` has them.
        ClientDisconnect: if the client hangs up.
    """
    settings, call, envelope, served = context.settings, asked.call, asked.envelope, asked.served
    num_rows = asked.num_rows
    num_samples = num_samples_of(envelope, served, settings)
    options = decision_options(envelope, served, num_samples, settings.settle)
    groups = groups_of(envelope, num_rows, served)
    refuse_too_many_samples(envelope, num_rows, num_samples, served, settings.max_answer_numbers)
    refuse_too_many_explained(envelope, num_rows, served, settings)
    more = more_rows(served.model.manifest.input) if envelope.explain else 0
    encoding = served.model.encoding_draws
    with context.admission.admitted(
        num_rows * (1 + more), num_samples, BATCH_ROW_DRAWS, call.client, encoding
    ):
        cells = None
        if isinstance(asked.rows, RowFile):
            x = await context.pool_rows(call, asked.rows, served)
        else:
            assert asked.rows is not None
            x = await context.rows(call, asked.rows, served, INPUTS)
            if envelope.explain and served.model.manifest.input.columns:
                cells = await context.odd_cells(call, asked.rows, served)
        asked.rows = None  # which may be many times as large
        call.reservation.shrink(x.nbytes)
        keep = envelope.return_samples
        job = Job(
            served,
            x,
            num_samples,
            envelope.seed,
            call,
            options.rule,
            keep,
            priors=options.priors,
        )
        kept = kept_bytes(job) + answer_bytes(
            served, len(x), num_samples if keep else 0, form.as_arrays
        )
        call.reservation.reserve(kept, "answer")
        if envelope.explain:
            explained = explanation_bytes(served.model.manifest, len(x), form.as_arrays)
            call.reservation.reserve(
                explained + more * x.nbytes + kept_bytes(job, more * len(x)), "explain"
            )
        predicted = await context.engine.predict(job)
        to_explain = None
        if envelope.explain:
            as_usual = await predicted_as_usual(context.engine, context.threads, job, predicted)
            to_explain = ToExplain(cells, as_usual)
        write = partial(_answer, context, job, predicted, options, groups, form, to_explain)
        if job.has_short_answer and not envelope.explain:
            answer, flags = write()
        else:
            size = call.reservation.held
            answer, flags = await context.threads.answers.run(call, size, write)
    call.record.add_phases(predicted.phases)
    call.record.add_usage(served.name, served.version, len(x), num_samples, flags)
    del x, job, predicted, write  # an answer may take long to be read
    call.reservation.shrink(sum(map(len, answer)))
    return answer


def _answer(
    context: Context,
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    groups: Int64[np.ndarray, "N"] | None,
    form: Form,
    to_explain: ToExplain | None,
) -> tuple[list[bytes], int]:
    """Return the answer in parts and how many rows are flagged, and note both where rows are
    watched and counted.

    Raises:
        InvalidInput: naming a row that the model cannot predict.
    """
    scores = predicted.batch.prediction.scores
    overall: Float64[np.ndarray, "N"] = scores.by_name()[scores.overall][predicted.rows]
    check_computed(overall, INPUTS)
    answer, flags = form.write(job, predicted, options, groups, to_explain)
    if job.seed is None:  # else a replay
        job.served.watch(predicted.batch.prediction, predicted.rows, job.x, job.call.client)
    num_flags = int(np.count_nonzero(flags))
    context.metrics.predicted(job.served.key, scores.overall, overall, job.num_samples, num_flags)
    return answer, num_flags
