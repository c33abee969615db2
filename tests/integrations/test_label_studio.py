import base64

import httpx
import pytest

from integrations.label_studio.projects import INPUT
from integrations.label_studio.sync import Backend, synchronise

CONFIG = (
    '<View><Image name="picture" value="$image"/><Choices name="digit" toName="picture">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)
KEY = "the-key-of-the-labellers"


@pytest.fixture
def service(serve, digits_store, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[keys]]\nname = "studio"\nkey = "{KEY}"\nscopes = ["read", "predict", "acquire", '
        '"label"]\n'
        f'[[keys]]\nname = "reader"\nkey = "{KEY[::-1]}"\nscopes = ["read", "predict"]\n'
    )
    with (
        serve(digits_store, DUBITO_KEYS_FILE=str(keys), DUBITO_STATE=str(tmp_path / "state")) as (
            url,
            _,
        ),
        httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=60) as client,
    ):
        yield client


def webhook(digit, task=1, row=None, action="ANNOTATION_CREATED", **annotation):
    result = [
        {
            "from_name": "digit",
            "to_name": "picture",
            "type": "choices",
            "value": {"choices": [digit]},
        }
    ]
    return {
        "action": action,
        "annotation": {"id": 5, "result": result, **annotation},
        "task": {
            "id": task,
            "data": {"image": "/data/a.png", **({} if row is None else {INPUT: row})},
        },
        "project": {"id": 2, "label_config": CONFIG},
    }


def test_predictions_have_label_studio_format_and_uncertainty_score(service, digits_rows):
    setup = service.post("/label-studio/digits/setup", json={"project": "1", "schema": CONFIG})
    assert setup.json() == {"model_version": "digits:1"}
    assert service.get("/label-studio/digits/health").json()["status"] == "UP"
    rows = digits_rows[:20].tolist()
    tasks = [{"id": i, "data": {INPUT: row}} for i, row in enumerate(rows)]
    answer = service.post(
        "/label-studio/digits/predict", json={"tasks": tasks, "label_config": CONFIG, "params": {}}
    )
    results = answer.json()["results"]
    predictions = service.post("/predict", json={"inputs": rows, "num_samples": 1000}).json()[
        "predictions"
    ]
    assert [len(result["result"]) for result in results] == [1] * 20
    matches = [
        r["result"][0]["value"]["choices"] == [p["label"]]
        for r, p in zip(results, predictions, strict=True)
    ]
    assert sum(matches) >= 18  # the draws differ
    by_score = sorted(range(20), key=lambda i: results[i]["score"])
    by_entropy = sorted(range(20), key=lambda i: -predictions[i]["entropy"])
    assert set(by_score[:3]) & set(by_entropy[:5])
    assert all(
        0.0 <= result["score"] <= 1.0 and result["model_version"] == "digits:1"
        for result in results
    )


def test_unsuitable_requests_get_specific_errors(service, digits_rows):
    row = digits_rows[0].tolist()
    for content, message in (
        (
            {"tasks": [{"data": {INPUT: row}}], "label_config": "<View/>"},
            "label_config: expected <Choices",
        ),
        ({"tasks": [], "label_config": CONFIG}, "tasks: expected an array of tasks"),
        ({"tasks": [{"data": {}}], "label_config": CONFIG}, "tasks.0.data: expected the field"),
        (
            {"tasks": [{"data": {INPUT: row[:-1]}}], "label_config": CONFIG},
            "tasks.0: expected an array of 64",
        ),
        (
            {"tasks": [{"data": {INPUT: [3e38] * 64}}], "label_config": CONFIG},
            "tasks.0: expected numbers that the",
        ),
    ):
        answer = service.post("/label-studio/digits/predict", json=content)
        assert (answer.status_code, answer.json()["detail"][: len(message)]) == (422, message)
    assert service.post("/label-studio/nothing/setup", json={"schema": CONFIG}).status_code == 404


def test_webhook_stores_label_once_and_replaces_it_on_update(service, digits_rows):
    path, row = "/label-studio/digits/webhook", digits_rows[0].tolist()
    assert service.post(path, json=webhook("3", row=row)).status_code == 201
    assert service.post(path, json=webhook("3")).status_code == 201  # a known row
    assert service.get("/models/digits/labels").json()["labels"] == 1
    assert service.post(path, json=webhook("8", action="ANNOTATION_UPDATED")).status_code == 201
    assert (
        service.post(path, json=webhook("3", task=2, row=row, was_cancelled=True)).status_code
        == 200
    )
    assert service.post(path, json={"action": "TASKS_CREATED", "tasks": []}).status_code == 200
    for choice in ("11", "a" * 10_000):
        assert service.post(path, json=webhook(choice, task=3, row=row)).status_code == 422
    assert (
        service.post(path, json=webhook("3", task=4)).status_code == 422
    )  # the image does not exist
    page = service.get("/models/digits/labels").json()
    assert page["labels"] == 1
    reference = {"labels": [{"id": "label-studio-2-1", "label": "8"}]}
    assert service.post("/labels", json=reference).json()["known"] == 1
    acquire = {"pool": digits_rows[:5].tolist(), "ids": list("abcde"), "k": 1, "keep": True}
    (selected,) = service.post("/acquire", json=acquire).json()["ranking"]
    acquired_webhook = webhook("5", task=9)
    acquired_webhook["task"]["data"]["dubito_id"] = selected["id"]
    assert service.post(path, json=acquired_webhook).status_code == 201
    reference = {"labels": [{"id": selected["id"], "label": "5"}]}
    assert service.post("/labels", json=reference).json() == {
        "model": "digits",
        "accepted": 0,
        "known": 1,
        "replaced": 0,
        "labels": 2,
    }


def test_webhook_requires_key_with_label_scope(service, digits_rows):
    content = webhook("3", row=digits_rows[0].tolist())
    path = "/label-studio/digits/webhook"
    anonymous = httpx.Client(base_url=service.base_url)
    basic = base64.b64encode(f"dubito:{KEY}".encode()).decode()
    for headers, status in (
        ({}, 401),
        ({"X-API-Key": KEY[::-1]}, 403),
        ({"Authorization": "Basic !!"}, 401),
        (
            {
                "Authorization": f"Basic {base64.b64encode(b'dubito:' + KEY[::-1].encode()).decode()}"
            },
            403,
        ),
        ({"Authorization": f"Basic {basic}"}, 201),
    ):
        assert anonymous.post(path, json=content, headers=headers).status_code == status
    # only Label Studio routes accept basic authentication
    assert anonymous.get("/models", headers={"Authorization": f"Basic {basic}"}).status_code == 401
    anonymous.close()


class Studio:
    """A Label Studio project with one task per row of data."""

    def __init__(self, rows):
        self.page = [{"id": i, "data": data} for i, data in enumerate(rows)]
        self.predicted_tasks = []

    def tasks(self, _):
        yield self.page

    def json(self, method, path, content=None):
        if method == "POST":
            self.predicted_tasks.append(content["task"])
        return {"label_config": CONFIG}


def test_unreadable_task_does_not_block_others(service, digits_rows):
    valid = {INPUT: digits_rows[0].tolist()}
    rows = [{"image": "/data/lost.png"}, valid, valid, {INPUT: [1]}]
    tasks = [{"id": i, "data": data} for i, data in enumerate(rows)]
    content = {"tasks": tasks, "label_config": CONFIG}
    answer = service.post("/label-studio/digits/predict", json=content)
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [len(result["result"]) for result in results] == [0, 1, 1, 0]
    assert [result["score"] is None for result in results] == [True, False, False, True]
    assert results[3]["reason"].startswith("tasks.3: expected an array of 64")
    assert "reason" not in results[1]

    rows[2] = {INPUT: [3e38] * 64}  # readable, but without a finite result
    studio = Studio([*rows, valid])
    backend = Backend(str(service.base_url.join("/label-studio/digits")), KEY)
    summary = synchronise(studio, backend, 1)
    backend._http.close()
    assert sorted(studio.predicted_tasks) == [1, 4]
    assert "2 tasks predicted, 3 tasks failed (last: " in summary
