"""Call the service with a generated openapi-python-client. Prints JSON."""

import json
import sys
from pathlib import Path

from generated.api.acquire import post_acquire
from generated.api.jobs import get_jobs
from generated.api.models import get_model
from generated.api.predict import post_predict
from generated.client import Client
from generated.models import (
    AcquireRequest,
    PredictAnswer,
    PredictForm,
    PredictionAnswer,
    PredictRequest,
    Problem,
)
from generated.types import File

ROW = [8.0] * 64

client = Client(base_url=sys.argv[1])
answer = post_predict.sync(client=client, body=PredictRequest(inputs=[ROW], seed=7))
assert isinstance(answer, PredictAnswer)
row = answer.predictions[0]
assert isinstance(row, PredictionAnswer)
with Path(sys.argv[2]).open("rb") as file:
    npy = File(payload=file, mime_type="application/x-npy")
    as_npy = post_predict._get_kwargs(body=npy, seed=7)
with Path(sys.argv[2]).open("rb") as file:
    form = PredictForm(inputs=[File(payload=file, file_name="a.png", mime_type="image/png")])
    refused = post_predict.sync(client=client, body=form)
assert isinstance(refused, Problem)
ranked = post_acquire.sync(client=client, body=AcquireRequest(pool=[ROW], k=1))
summary = {
    "label": row.label,
    "entropy": row.entropy,
    "ranked": ranked.ranking[0].index,
    "refused": refused.detail,
    "missing": get_model.sync("nothing", client=client).status,
    "classes": get_model.sync("digits", client=client).classes,
    "jobs": get_jobs.sync(client=client).jobs,
    "query": as_npy["params"],
}
print(json.dumps(summary))
