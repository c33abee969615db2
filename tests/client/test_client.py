"""The client against a real service: answers are those of HTTP, for both clients."""

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
def ask(request, url, key):
    def by_sync(method, *arguments, **options):
        with Client(url, key=key) as client:
            return getattr(client, method)(*arguments, **options)

    async def by_async(method, *arguments, **options):
        async with AsyncClient(url, key=key) as client:
            return await getattr(client, method)(*arguments, **options)

    if request.param == "sync":
        return by_sync
    return lambda *arguments, **options: asyncio.run(by_async(*arguments, **options))


@pytest.fixture
def client(url, key):
    with Client(url, key=key) as client:
        yield client


def by_http(url, key, path, accept="application/json", **fields):
    """The service's own answer."""
    answer = httpx.post(
        url + path, json=fields, headers={"X-API-Key": key, "Accept": accept}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer


def arrays_by_http(url, key, **fields):
    content = by_http(url, key, "/predict", "application/x-npz", **fields).content
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def assert_same(answer, arrays):
    assert set(answer.arrays) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(answer[name], array), name


def test_the_clients_have_the_same_calls():
    calls = [name for name, call in vars(Endpoints).items() if isinstance(call, Endpoint)]
    assert "predict" in calls
    with Client() as client:
        for name in calls:
            of_both = [inspect.signature(getattr(c, name)) for c in (client, AsyncClient())]
            assert of_both[0] == of_both[1], name
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
def test_the_options_are_those_of_the_service(url, path, field, options):
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    of_method = {field, f"{field}_file", "deadline_s", "k", "format"} | (
        {"ids"} if "predict" in path else set()
    )
    refused = {"return_samples", "explain"} if path == "/predict/jobs" else set()
    assert set(properties) - of_method - refused == set(options.__annotations__)
    if options is AcquireOptions:
        assert set(properties["acquisition"]["enum"]) == set(get_args(Acquisition))


def test_predictions_are_those_of_the_service(ask, url, key, digits_rows):
    options = {"seed": 7, "num_samples": 20, "return_samples": True, "coverage": 0.9}
    answer = ask("predict", digits_rows[:5], **options)
    assert_same(answer, arrays_by_http(url, key, inputs=digits_rows[:5].tolist(), **options))
    by_json = by_http(url, key, "/predict", inputs=digits_rows[:5].tolist(), **options).json()
    assert (answer.model, answer.version, answer.seed) == ("digits", "1", 7)
    rows = by_json["predictions"]
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


def test_parts_are_answered_as_one(ask, url, key, digits_rows):
    in_parts = ask("predict", digits_rows[:50], part_rows=20)
    assert_same(
        in_parts, arrays_by_http(url, key, inputs=digits_rows[:50].tolist(), seed=in_parts.seed)
    )
    assert len(in_parts) == 50


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame], ids=["pandas", "polars"])
def test_a_frame_is_answered_as_objects_are(client, url, key, frame):
    rows = [dict(zip(PEOPLE, values, strict=True)) for values in zip(*PEOPLE.values(), strict=True)]
    answer = client.predict(frame(PEOPLE), model="people", seed=3)
    assert_same(answer, arrays_by_http(url, key, inputs=rows, model="people", seed=3))
    # a column for each number of a row
    table = answer.to_pandas() if frame is pandas.DataFrame else answer.to_polars()
    assert list(table.columns[:3]) == ["label", "p_value", "flag"]
    assert list(table["probabilities.class 1"]) == answer.probabilities[:, 1].tolist()
    assert len(table) == 3
    assert answer.to_pandas(index=["x", "y", "x"]).index.tolist() == ["x", "y", "x"]


def test_images_are_answered_as_their_pixels_are(client, tmp_path):
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


def test_a_regression_is_answered_in_its_own_terms(client):
    answer = client.predict(pandas.DataFrame(PEOPLE), model="rents", seed=3)
    assert np.allclose(answer.std**2, answer.aleatoric_std**2 + answer.epistemic_std**2)
    assert answer.interval.shape == (3, 2)
    assert {"interval.low", "interval.high", "mean"} <= answer.table().keys()
    assert answer.mean.shape == (3,)
    with pytest.raises(Absent, match=r"^label: rents is a regression model$"):
        _ = answer.label
    with pytest.raises(Absent, match=r"^median: only available for"):
        _ = answer.median
    item = client.predict(pandas.DataFrame(PEOPLE), model="rents", num_samples=1)
    with pytest.raises(Absent, match=r"^epistemic_std: requires at least two draws"):
        _ = item.epistemic_std
    assert not hasattr(item, "epistemic_std")


def test_a_result_is_frozen_and_says_why_it_lacks_something(client, digits_rows):
    answer = client.predict(digits_rows[:2], seed=1)
    with pytest.raises(FrozenInstanceError):
        answer.arrays = {}
    with pytest.raises(TypeError):
        answer.arrays["flag"] = 1
    with pytest.raises(ValueError, match="read-only"):
        answer.flag[0] = True
    again = copy.deepcopy(answer)
    assert_same(again, answer.arrays)
    assert not again.flag.flags.writeable
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


def test_a_pool_is_ranked_as_the_service_does(ask, url, key, digits_rows):
    ids = [f"row {i}" for i in range(30)]
    ranking = ask("acquire", digits_rows[:30], k=4, ids=ids, seed=2)
    expected = by_http(
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


def test_ids_that_repeat_are_refused_by_name(client, digits_rows):
    for options in ({"ids": ["a", "a"]}, {"ids": ["a"]}):
        with pytest.raises(InvalidInput) as raised:
            client.acquire(digits_rows[:2], **options)
        assert raised.value.field.startswith("ids")


def test_labels_go_back_by_id_or_with_their_rows(client, digits_rows):
    ids = [f"scan {i}" for i in range(20)]
    ranking = client.acquire(digits_rows[:20], k=4, ids=ids, keep=True, control=0.5, seed=2)
    assert ranking.control.tolist() == [False, False, True, True]
    assert np.isnan(ranking.score[2:]).all()
    before = client.labels("digits")
    labels = {str(name): "3" for name in ranking.id} | {"mine": "5"}
    retained = client.add_labels(labels, model="digits", inputs={"mine": digits_rows[30]})
    assert (retained.accepted, retained.labels) == (5, before.labels + 5)
    assert client.add_labels({"mine": "5"}).known == 1
    assert client.labels("digits").waiting == before.waiting - 4
    with pytest.raises(dubito.Conflict, match="expected the same label as before"):
        client.add_labels({"mine": "6"})
    assert client.add_labels({"mine": "6"}, replace=True).replaced == 1
    again = client.acquire(digits_rows[:20], k=20, ids=ids, seed=2)
    assert again.excluded == 4
    with pytest.raises(InvalidInput, match=r"^inputs: "):
        client.add_labels({"a": "3"}, inputs={"b": digits_rows[0]})
    with pytest.raises(InvalidInput, match=r"^labels\.0\.target: expected no target"):
        client.add_labels({"a": 3.0})
    with pytest.raises(InvalidInput, match="a new class needs a new fit"):
        client.add_labels({"a": "ten"})
    for nothing in (None, float("nan"), pandas.NA):
        with pytest.raises(InvalidInput, match=r"^ids\.1: expected a name, got none"):
            client.acquire(digits_rows[:2], ids=["a", nothing])
        with pytest.raises(InvalidInput, match=r"^labels: expected a name, got none"):
            client.add_labels({nothing: "3"}, inputs={nothing: digits_rows[0]})
    with pytest.raises(InvalidInput, match=r"^labels: expected a mapping"):
        client.add_labels([("a", "3")])


def test_targets_are_labels_of_a_regression(client):
    retained = client.add_labels(
        {"r": np.float64(700.5)}, model="rents", inputs={"r": {"age": np.nan, "city": "Rome"}}
    )
    assert (retained.model, retained.accepted) == ("rents", 1)
    of_frame = pandas.DataFrame({"age": [31], "city": ["Rome"]}, index=[17]).iloc[0]
    assert (
        client.add_labels(pandas.Series({17: 700.5}), model="rents", inputs={17: of_frame}).accepted
        == 1
    )
    with pytest.raises(InvalidInput, match=r"^inputs\.m: expected an array without masked values"):
        client.add_labels(
            {"m": 1.0}, model="rents", inputs={"m": np.ma.masked_array([1.0, 2.0], mask=[0, 1])}
        )


def test_jobs_give_what_requests_give(client, digits_rows, tmp_path):
    ids = [f"row {i}" for i in range(40)]
    np.savez(tmp_path / "rows.npz", x=digits_rows[:40], ids=np.array(ids))
    ranked = client.acquire_job(tmp_path / "rows.npz", k=5, seed=4)
    predicted = client.predict_job(inputs_file="digits.npy", seed=4)
    assert [job.id for job in client.jobs()][:2] == [predicted.id, ranked.id]  # latest first
    shares = []
    ranking = client.ranking(ranked, deadline_s=60, on_progress=shares.append)
    assert shares[-1] == 1.0
    assert ranking.id.tolist() == client.acquire(digits_rows[:40], ids=ids, k=5, seed=4).id.tolist()
    assert_same(client.predictions(predicted.id), client.predict(digits_rows, seed=4).arrays)
    completed = client.wait(ranked)
    assert (completed.state, completed.rows, completed.read_as, completed.is_over) == (
        "done",
        40,
        "the array x",
        True,
    )
    with pytest.raises(InvalidInput, match="job: expected a job of kind predict, got kind acquire"):
        client.predictions(ranked)
    assert client.cancel(ranked).state == "done"
    assert client.delete(ranked).id == ranked.id
    with pytest.raises(NotFound):
        client.job(ranked)


def test_a_job_whose_rows_are_wrong_says_why(url, key, tmp_path):
    (tmp_path / "people.csv").write_text("age,city\n31,Rome\nold,Oslo\n")

    async def ask():
        async with AsyncClient(url, key=key) as client:
            job = await client.predict_job(tmp_path / "people.csv", model="people")
            with pytest.raises(
                dubito.JobFailed, match=f"^job {job.id} is failed: .*1.age"
            ) as raised:
                await client.predictions(job)
            return job, raised.value

    job, error = asyncio.run(ask())
    assert error.id == job.id


def test_rows_of_a_job_keep_their_names(url, key):
    frame, options = pandas.DataFrame(PEOPLE), {"model": "people", "seed": 3}

    async def ask():
        async with AsyncClient(url, key=key) as client:
            job = await client.predict_job(frame, ids=["a", "b", "c"], **options)
            return await asyncio.gather(client.predictions(job), client.predict(frame, **options))

    by_job, at_once = asyncio.run(ask())
    assert by_job.ids.tolist() == by_job.table()["id"].tolist() == ["a", "b", "c"]
    assert by_job.p_value.tolist() == at_once.p_value.tolist()


def test_models_are_described(ask):
    models = {model.name: model for model in ask("models")}
    assert set(models) == {"digits", "people", "rents", "pictures"}
    assert models["digits"].classes == [str(i) for i in range(10)]
    assert [column["name"] for column in models["people"].columns] == ["age", "city"]
    assert (models["rents"].task, models["rents"].target) == ("regression", "rent")
    assert ask("model", "digits").raw["manifest"]["name"] == "digits"


def test_errors_are_exceptions_with_the_field(ask, digits_rows):
    with pytest.raises(InvalidInput) as raised:
        ask("predict", digits_rows[:2, :63])
    assert raised.value.field == "inputs"
    assert raised.value.received == "shape (2, 63)"
    with pytest.raises(InvalidInput) as raised:
        ask("predict", digits_rows[:1], rubbish=3)
    assert raised.value.field == "rubbish"
    with pytest.raises(NotFound) as raised:
        ask("predict", digits_rows[:1], model="a/b?c")
    assert (raised.value.status, bool(raised.value.request_id)) == (404, True)
    with pytest.raises(NotFound):
        ask("model", "a/../b?c")
    with pytest.raises(TooLarge):
        ask("add_labels", {str(i): "3" for i in range(5000)})


def test_a_key_is_needed_and_is_never_shown(url, key):
    with Client(url) as client, pytest.raises(Unauthorized) as raised:
        client.models()
    assert raised.value.status == 401
    assert key not in repr(Client(url, key=key)) + repr(vars(Client(url, key=key)))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_url_or_key_that_cannot_be_sent_is_refused_at_once(kind):
    for wrong in ("127.0.0.1:8000", "ftp://x", "http://[::"):
        with pytest.raises(InvalidInput, match=r"^url: expected an http:// or https:// URL"):
            kind(wrong)
    for wrong in ("sec\nret", "sécret", "", "\n"):
        with pytest.raises(InvalidInput, match=r"^key: expected printable ASCII"):
            kind(key=wrong)


def test_a_redirect_is_not_followed_with_the_key(url, key):
    def redirected(request):
        assert request.url.host != "elsewhere"
        return httpx.Response(307, headers={"Location": "https://elsewhere/models"})

    with (
        httpx.Client(transport=httpx.MockTransport(redirected), follow_redirects=True) as http,
        Client(url, key=key, http=http) as client,
        pytest.raises(dubito.AnswerError, match="HTTP status 307"),
    ):
        client.models()


def test_a_deadline_is_the_service_s_too(ask, digits_rows):
    large = np.tile(digits_rows, (12, 1))[:4000]
    start = time.monotonic()
    with pytest.raises(dubito.DeadlineExceeded):
        ask("predict", large, num_samples=1000, part_rows=4000, deadline_s=0.02)
    assert time.monotonic() - start < 30
    assert len(ask("predict", digits_rows[:2], deadline_s=60)) == 2


def test_a_service_that_is_not_there_is_said(unused_port="http://127.0.0.1:9"):
    with (
        Client(unused_port, retries=0) as client,
        pytest.raises(dubito.NoAnswer, match="ConnectError"),
    ):
        client.models()


def test_an_httpx_client_of_one_s_own_is_used_and_left_open(url, key):
    observed = []
    with httpx.Client(event_hooks={"request": [observed.append]}) as http:
        with Client(url + "/", key=key, http=http) as client:
            client.models()
        assert not http.is_closed
    assert str(observed[0].url) == f"{url}/models"


def test_neither_pandas_nor_polars_nor_pillow_is_imported_for_other_rows():
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
