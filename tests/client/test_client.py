"""Compare both clients with plain HTTP requests to a running service."""

import asyncio
import copy
import inspect
import io
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from typing import get_args

import httpx
import numpy as np
import pandas
import polars
import pytest
from PIL import Image

import dubito
from dubito import Absent, AsyncClient, Client, InvalidInput, NotFound, TooLarge, Unauthorized
from dubito.endpoints import Endpoint, Endpoints
from dubito.options import AcquireOptions, Acquisition, PredictJobOptions, PredictOptions
from tests.support.environment import ROOT, environment_with

CLIENTS = {"sync": Client, "async": AsyncClient}
PEOPLE = {"age": [31.0, None, 70.0], "city": ["Rome", "Oslo", "Bern"]}


@pytest.fixture(params=CLIENTS)
def call(request, url, key):
    def call_sync(method, *arguments, **options):
        with Client(url, key=key) as client:
            return getattr(client, method)(*arguments, **options)

    async def call_async(method, *arguments, **options):
        async with AsyncClient(url, key=key) as client:
            return await getattr(client, method)(*arguments, **options)

    if request.param == "sync":
        return call_sync
    return lambda *arguments, **options: asyncio.run(call_async(*arguments, **options))


@pytest.fixture
def client(url, key):
    with Client(url, key=key) as client:
        yield client


def post(url, key, path, accept="application/json", **fields):
    answer = httpx.post(
        url + path, json=fields, headers={"X-API-Key": key, "Accept": accept}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer


def post_rows(url, key, **fields):
    content = post(url, key, "/predict", "application/x-npz", **fields).content
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def assert_same(answer, arrays):
    assert set(answer.arrays) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(answer[name], array), name


def test_both_clients_have_the_same_calls():
    calls = [name for name, endpoint in vars(Endpoints).items() if isinstance(endpoint, Endpoint)]
    assert "predict" in calls
    with Client() as client:
        for name in calls:
            signatures = [inspect.signature(getattr(c, name)) for c in (client, AsyncClient())]
            assert signatures[0] == signatures[1], name
            assert getattr(client, name).__doc__, name


@pytest.mark.parametrize(
    ("path", "field", "options"),
    [
        ("/predict", "inputs", PredictOptions),
        ("/predict/jobs", "inputs", PredictJobOptions),
        ("/acquire", "pool", AcquireOptions),
        ("/acquire/jobs", "pool", AcquireOptions),
    ],
)
def test_options_match_the_openapi_document(url, path, field, options):
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    arguments = {field, f"{field}_file", "deadline_s", "k", "format"} | (
        {"ids"} if "predict" in path else set()
    )
    unsupported = {"return_samples", "explain"} if path == "/predict/jobs" else set()
    assert set(properties) - arguments - unsupported == set(options.__annotations__)
    if options is AcquireOptions:
        assert set(properties["acquisition"]["enum"]) == set(get_args(Acquisition))


def test_predictions_match_the_service(call, url, key, digits_rows):
    options = {"seed": 7, "num_samples": 20, "return_samples": True, "coverage": 0.9}
    answer = call("predict", digits_rows[:5], **options)
    assert_same(answer, post_rows(url, key, inputs=digits_rows[:5].tolist(), **options))
    document = post(url, key, "/predict", inputs=digits_rows[:5].tolist(), **options).json()
    assert (answer.model, answer.version, answer.seed) == ("digits", "1", 7)
    rows = document["predictions"]
    assert answer.sets() == [row["prediction_set"] for row in rows]
    assert answer.standard_error["bald"].tolist() == [row["standard_error"]["bald"] for row in rows]
    assert answer.detectors["residual"].p_value.tolist() == [
        row["detectors"]["residual"]["p_value"] for row in rows
    ]
    for name in (
        "label",
        "probabilities",
        "entropy",
        "expected_entropy",
        "bald",
        "bald_corrected",
        "mean_std",
    ):
        assert getattr(answer, name).tolist() == [row[name] for row in rows]
    for name in ("variation_ratio", "flag", "p_value", "num_samples"):
        assert getattr(answer, name).tolist() == [row[name] for row in rows]


def test_request_in_parts_returns_one_answer(call, url, key, digits_rows):
    answer = call("predict", digits_rows[:50], part_rows=20)
    assert_same(answer, post_rows(url, key, inputs=digits_rows[:50].tolist(), seed=answer.seed))
    assert len(answer) == 50


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame], ids=["pandas", "polars"])
def test_predictions_of_a_data_frame_match_those_of_objects(client, url, key, frame):
    rows = [dict(zip(PEOPLE, values, strict=True)) for values in zip(*PEOPLE.values(), strict=True)]
    answer = client.predict(frame(PEOPLE), model="people", seed=3)
    assert_same(answer, post_rows(url, key, inputs=rows, model="people", seed=3))
    # The table has one column per number.
    table = answer.to_pandas() if frame is pandas.DataFrame else answer.to_polars()
    assert list(table.columns[:3]) == ["label", "p_value", "flag"]
    assert list(table["probabilities.class 1"]) == answer.probabilities[:, 1].tolist()
    assert len(table) == 3
    assert answer.to_pandas(index=["x", "y", "x"]).index.tolist() == ["x", "y", "x"]


def test_predictions_of_images_match_those_of_their_pixels(client, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 1, 1), dtype=np.uint8)
    images = [Image.new("RGB", (1, 1), tuple(pixel.ravel().tolist())) for pixel in pixels]
    paths = []
    for n, image in enumerate(images):
        paths.append(tmp_path / f"{n}.png")
        image.save(paths[-1])
    options = {"model": "pictures", "seed": 3}
    expected = client.predict(pixels, **options)
    for rows in (images, paths, [path.read_bytes() for path in paths]):
        assert_same(client.predict(rows, **options, part_rows=2), expected.arrays)


def test_regression_predictions_have_regression_fields(client):
    answer = client.predict(pandas.DataFrame(PEOPLE), model="rents", seed=3)
    assert np.allclose(answer.std**2, answer.aleatoric_std**2 + answer.epistemic_std**2)
    assert answer.interval.shape == (3, 2)
    assert {"interval.low", "interval.high", "mean"} <= answer.table().keys()
    assert answer.mean.shape == (3,)
    with pytest.raises(Absent, match=r"^label: rents is a regression model$"):
        _ = answer.label
    with pytest.raises(Absent, match=r"^median: only available for"):
        _ = answer.median
    single = client.predict(pandas.DataFrame(PEOPLE), model="rents", num_samples=1)
    with pytest.raises(Absent, match=r"^epistemic_std: requires at least two draws"):
        _ = single.epistemic_std
    assert not hasattr(single, "epistemic_std")


def test_predictions_are_frozen_and_explain_absent_fields(client, digits_rows):
    answer = client.predict(digits_rows[:2], seed=1)
    with pytest.raises(FrozenInstanceError):
        answer.arrays = {}
    with pytest.raises(TypeError):
        answer.arrays["flag"] = 1
    with pytest.raises(ValueError, match="read-only"):
        answer.flag[0] = True
    duplicate = copy.deepcopy(answer)
    assert_same(duplicate, answer.arrays)
    assert not duplicate.flag.flags.writeable
    with pytest.raises(TypeError, match="expected the name of an array, such as 'label', got 0"):
        answer[0]
    with pytest.raises(TypeError, match="not iterable"):
        iter(answer)
    for name, reason in {
        "abstain": "no `risk` applies",
        "mean": "digits is a classification model",
        "category": "calibrated by class or group",
        "samples": "return_samples=True",
        "ids": "only available for jobs",
        "rubbish": "expected one of",
    }.items():
        with pytest.raises(Absent, match=reason):
            _ = answer[name]
    assert (
        repr(answer)
        == f"<Predictions of 2 rows by digits version 1, seed 1: {answer.flag.sum()} flagged>"
    )


def test_ranking_matches_the_service(call, url, key, digits_rows):
    ids = [f"row {i}" for i in range(30)]
    ranking = call("acquire", digits_rows[:30], k=4, ids=ids, seed=2)
    expected = post(
        url, key, "/acquire", pool=digits_rows[:30].tolist(), k=4, ids=ids, seed=2
    ).json()
    for name in (
        "model",
        "version",
        "acquisition",
        "num_samples",
        "seed",
        "pool_size",
        "excluded",
        "race",
    ):
        assert getattr(ranking, name) == expected[name]
    rows = expected["ranking"]
    assert ranking.to_pandas().to_dict("records") == ranking.to_polars().to_dicts() == rows
    assert len(ranking) == 4


def test_duplicate_or_missing_ids_are_refused_by_field(client, digits_rows):
    for options in ({"ids": ["a", "a"]}, {"ids": ["a"]}):
        with pytest.raises(InvalidInput) as raised:
            client.acquire(digits_rows[:2], **options)
        assert raised.value.field.startswith("ids")


def test_labels_are_added_by_id_or_with_their_rows(client, digits_rows):
    ids = [f"scan {i}" for i in range(20)]
    ranking = client.acquire(digits_rows[:20], k=4, ids=ids, keep=True, control=0.5, seed=2)
    assert ranking.control.tolist() == [False, False, True, True]
    assert np.isnan(ranking.score[2:]).all()
    initial = client.labels("digits")
    labels = {str(name): "3" for name in ranking.id} | {"mine": "5"}
    result = client.add_labels(labels, model="digits", inputs={"mine": digits_rows[30]})
    assert (result.accepted, result.labels) == (5, initial.labels + 5)
    assert client.add_labels({"mine": "5"}).known == 1
    assert client.labels("digits").waiting == initial.waiting - 4
    with pytest.raises(dubito.Conflict, match="expected the same label as before"):
        client.add_labels({"mine": "6"})
    assert client.add_labels({"mine": "6"}, replace=True).replaced == 1
    repeated = client.acquire(digits_rows[:20], k=20, ids=ids, seed=2)
    assert repeated.excluded == 4
    with pytest.raises(InvalidInput, match=r"^inputs: "):
        client.add_labels({"a": "3"}, inputs={"b": digits_rows[0]})
    with pytest.raises(InvalidInput, match=r"^labels\.0\.target: expected no target"):
        client.add_labels({"a": 3.0})
    with pytest.raises(InvalidInput, match="a new class needs a new fit"):
        client.add_labels({"a": "ten"})
    for missing in (None, float("nan"), pandas.NA):
        with pytest.raises(InvalidInput, match=r"^ids\.1: expected a name, got none"):
            client.acquire(digits_rows[:2], ids=["a", missing])
        with pytest.raises(InvalidInput, match=r"^labels: expected a name, got none"):
            client.add_labels({missing: "3"}, inputs={missing: digits_rows[0]})
    with pytest.raises(InvalidInput, match=r"^labels: expected a mapping"):
        client.add_labels([("a", "3")])


def test_regression_targets_are_added_as_labels(client):
    result = client.add_labels(
        {"r": np.float64(700.5)}, model="rents", inputs={"r": {"age": np.nan, "city": "Rome"}}
    )
    assert (result.model, result.accepted) == ("rents", 1)
    row = pandas.DataFrame({"age": [31], "city": ["Rome"]}, index=[17]).iloc[0]
    assert (
        client.add_labels(pandas.Series({17: 700.5}), model="rents", inputs={17: row}).accepted == 1
    )
    with pytest.raises(InvalidInput, match=r"^inputs\.m: expected an array without masked values"):
        client.add_labels(
            {"m": 1.0}, model="rents", inputs={"m": np.ma.masked_array([1.0, 2.0], mask=[0, 1])}
        )


def test_jobs_return_the_same_results_as_requests(client, digits_rows, tmp_path):
    ids = [f"row {i}" for i in range(40)]
    np.savez(tmp_path / "rows.npz", x=digits_rows[:40], ids=np.array(ids))
    acquire_job = client.acquire_job(tmp_path / "rows.npz", k=5, seed=4)
    predict_job = client.predict_job(inputs_file="digits.npy", seed=4)
    assert [job.id for job in client.jobs()][:2] == [predict_job.id, acquire_job.id]  # latest first
    shares = []
    ranking = client.ranking(acquire_job, deadline_s=60, on_progress=shares.append)
    assert shares[-1] == 1.0
    assert ranking.id.tolist() == client.acquire(digits_rows[:40], ids=ids, k=5, seed=4).id.tolist()
    assert_same(client.predictions(predict_job.id), client.predict(digits_rows, seed=4).arrays)
    completed = client.wait(acquire_job)
    assert (completed.state, completed.rows, completed.read_as, completed.is_over) == (
        "done",
        40,
        "the array x",
        True,
    )
    with pytest.raises(InvalidInput, match="job: expected a job of kind predict, got kind acquire"):
        client.predictions(acquire_job)
    assert client.cancel(acquire_job).state == "done"
    assert client.delete(acquire_job).id == acquire_job.id
    with pytest.raises(NotFound):
        client.job(acquire_job)


def test_failed_job_reports_the_invalid_row(url, key, tmp_path):
    (tmp_path / "people.csv").write_text("age,city\n31,Rome\nold,Oslo\n")

    async def call():
        async with AsyncClient(url, key=key) as client:
            job = await client.predict_job(tmp_path / "people.csv", model="people")
            with pytest.raises(
                dubito.JobFailed, match=f"^job {job.id} is failed: .*1.age"
            ) as raised:
                await client.predictions(job)
            return job, raised.value

    job, error = asyncio.run(call())
    assert error.id == job.id


def test_job_predictions_include_row_ids(url, key):
    frame, options = pandas.DataFrame(PEOPLE), {"model": "people", "seed": 3}

    async def call():
        async with AsyncClient(url, key=key) as client:
            job = await client.predict_job(frame, ids=["a", "b", "c"], **options)
            return await asyncio.gather(client.predictions(job), client.predict(frame, **options))

    job_answer, answer = asyncio.run(call())
    assert job_answer.ids.tolist() == job_answer.table()["id"].tolist() == ["a", "b", "c"]
    assert job_answer.p_value.tolist() == answer.p_value.tolist()


def test_models_are_described(call):
    models = {model.name: model for model in call("models")}
    assert set(models) == {"digits", "people", "rents", "pictures"}
    assert models["digits"].classes == [str(i) for i in range(10)]
    assert [column["name"] for column in models["people"].columns] == ["age", "city"]
    assert (models["rents"].task, models["rents"].target) == ("regression", "rent")
    assert call("model", "digits").raw["manifest"]["name"] == "digits"


def test_exceptions_name_the_invalid_field(call, digits_rows):
    with pytest.raises(InvalidInput) as raised:
        call("predict", digits_rows[:2, :63])
    assert raised.value.field == "inputs"
    assert raised.value.received == "shape (2, 63)"
    with pytest.raises(InvalidInput) as raised:
        call("predict", digits_rows[:1], rubbish=3)
    assert raised.value.field == "rubbish"
    with pytest.raises(NotFound) as raised:
        call("predict", digits_rows[:1], model="a/b?c")
    assert (raised.value.status, bool(raised.value.request_id)) == (404, True)
    with pytest.raises(NotFound):
        call("model", "a/../b?c")
    with pytest.raises(TooLarge):
        call("add_labels", {str(i): "3" for i in range(5000)})


def test_key_is_required_and_never_shown(url, key):
    with Client(url) as client, pytest.raises(Unauthorized) as raised:
        client.models()
    assert raised.value.status == 401
    assert key not in repr(Client(url, key=key)) + repr(vars(Client(url, key=key)))


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_invalid_url_or_key_is_refused_immediately(client_class):
    for value in ("127.0.0.1:8000", "ftp://x", "http://[::"):
        with pytest.raises(InvalidInput, match=r"^url: expected an http:// or https:// URL"):
            client_class(value)
    for value in ("sec\nret", "sécret", "", "\n"):
        with pytest.raises(InvalidInput, match=r"^key: expected printable ASCII"):
            client_class(key=value)


def test_redirect_is_not_followed(url, key):
    def redirect(request):
        assert request.url.host != "elsewhere"
        return httpx.Response(307, headers={"Location": "https://elsewhere/models"})

    with (
        httpx.Client(transport=httpx.MockTransport(redirect), follow_redirects=True) as http,
        Client(url, key=key, http=http) as client,
        pytest.raises(dubito.AnswerError, match="HTTP status 307"),
    ):
        client.models()


def test_deadline_also_applies_in_the_service(call, digits_rows):
    large = np.tile(digits_rows, (12, 1))[:4000]
    start = time.monotonic()
    with pytest.raises(dubito.DeadlineExceeded):
        call("predict", large, num_samples=1000, part_rows=4000, deadline_s=0.02)
    assert time.monotonic() - start < 30
    assert len(call("predict", digits_rows[:2], deadline_s=60)) == 2


def test_unreachable_service_raises_no_answer(unused_port="http://127.0.0.1:9"):
    with (
        Client(unused_port, retries=0) as client,
        pytest.raises(dubito.NoAnswer, match="ConnectError"),
    ):
        client.models()


def test_custom_httpx_client_is_used_and_left_open(url, key):
    requests = []
    with httpx.Client(event_hooks={"request": [requests.append]}) as http:
        with Client(url + "/", key=key, http=http) as client:
            client.models()
        assert not http.is_closed
    assert str(requests[0].url) == f"{url}/models"


def test_optional_packages_are_not_imported_for_arrays():
    code = """
import sys, numpy, dubito.command
from dubito.rows import encode_rows
encode_rows(numpy.ones((1, 2)), "inputs")
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv)))
"""
    unwanted = ["pandas", "polars", "PIL", "pyarrow", "service", "model_store", "training"]
    environment = environment_with(PYTHONPATH=str(ROOT / "client"))
    command = [sys.executable, "-c", code, *unwanted]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (completed.stdout, completed.returncode) == ("[]\n", 0), completed.stderr
