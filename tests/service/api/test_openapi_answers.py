import shutil
import time

import jsonschema
import numpy as np
import pytest

from integrations.label_studio.projects import INPUT
from model_store.artifacts.report import publish_report
from model_store.artifacts.store import ModelStore
from tests.support.files import npy_bytes
from tests.support.serving import open_client

KEY = "the-key-of-the-administrator"
ROW = [0.0] * 64
STUDIO = (
    '<View><Image name="i" value="$image"/><Choices name="c" toName="i">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)


@pytest.fixture(scope="module")
def client(digits_store, tmp_path_factory):
    root = tmp_path_factory.mktemp("answers") / "models"
    shutil.copytree(digits_store, root)
    report = {"created": "2026-01-01T00:00:00Z", "summary": {"accuracy": 0.9}}
    publish_report(ModelStore(root), "digits", "1", report, b"<p>A report</p>")
    headers = {"X-API-Key": KEY}
    with open_client(root, DUBITO_ADMIN_KEY=KEY, headers=headers) as client:
        yield client


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def get_operations(document):
    return {
        (method, path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def find_references(part):
    """Yield every `$ref` in a part of the document."""
    if isinstance(part, dict):
        yield from ([part["$ref"]] if "$ref" in part else [])
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from find_references(inner)


def test_references_resolve_and_operation_ids_are_unique(document):
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(find_references(document)) <= schemas
    ids = [operation["operationId"] for operation in get_operations(document).values()]
    assert len(set(ids)) == len(ids)
    assert all(operation["tags"] for operation in get_operations(document).values())
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_forms_are_named_schemas(document):
    for path, name in (("/predict", "PredictForm"), ("/acquire", "AcquireForm")):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = content["multipart/form-data"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert document["components"]["schemas"][name]["title"] == name


def test_errors_are_documented_as_problem_json(document):
    for operation in get_operations(document).values():
        for status, answer in operation["responses"].items():
            is_error = status == "default" or int(status) >= 400
            assert (set(answer["content"]) == {"application/problem+json"}) == is_error
            assert all("schema" in media for media in answer["content"].values())


def assert_matches_document(document, method, path, answer):
    documented = get_operations(document)[method, path]["responses"]
    content = documented.get(str(answer.status_code), documented["default"])["content"]
    media_type = answer.headers["content-type"]
    schema = content[media_type if media_type in content else media_type.partition(";")[0]]
    if "json" not in media_type:
        return
    schemas = document["components"]["schemas"]
    closed = {
        name: {"additionalProperties": False, **item} if "properties" in item else item
        for name, item in schemas.items()
    }
    full = {**schema["schema"], "components": {"schemas": closed}}
    jsonschema.validate(answer.json(), full, jsonschema.Draft202012Validator)


def send_valid_requests(client):
    """Yield the method, route and answer of a valid request for every operation."""

    def send(method, path, route=None, **options):
        answer = client.request(method, path, **options)
        return method.lower(), route or path, answer

    npy = {
        "content": npy_bytes(np.zeros((2, 64))),
        "headers": {"Content-Type": "application/x-npy"},
    }
    for path in ("/health/live", "/health/ready", "/metrics", "/models"):
        yield send("GET", path)
    yield send("POST", "/predict", json={"inputs": [ROW], "return_samples": True, "explain": True})
    yield send("GET", "/predict/examples")
    yield send("GET", "/models/digits/drift", "/models/{name}/drift")
    yield send("POST", "/predict", params={"seed": 7, "fpr": 0.1}, **npy)
    yield send("POST", "/acquire", json={"pool": [ROW, ROW]})
    yield send("POST", "/acquire/preview", params={"rows": [0, 1]}, **npy)
    label = {"id": "a row", "label": "3", "input": ROW}
    yield send("POST", "/labels", json={"labels": [label]})
    yield send("GET", "/labels", params={"limit": 1})
    yield send("POST", "/labels/delete", json={"ids": ["a row"]})
    acquire_job = send("POST", "/acquire/jobs", json={"pool": [ROW]})
    yield acquire_job
    predict_job = send("POST", "/predict/jobs", json={"inputs": [ROW]})
    yield predict_job
    predict_job_id = predict_job[2].json()["id"]
    job, route = f"/jobs/{acquire_job[2].json()['id']}", "/jobs/{job}"
    yield send("POST", f"/jobs/{predict_job_id}/cancel", f"{route}/cancel")
    yield send("GET", "/jobs")
    while (state := client.get(job).json()["state"]) != "done":
        assert state in ("queued", "running")
        time.sleep(0.1)
    yield send("GET", job, route)
    yield send("GET", f"{job}/result", f"{route}/result")
    yield send("DELETE", job, route)
    name, version = "/models/{name}", "/models/{name}/versions/{version}"
    yield send("GET", "/models/digits", name)
    yield send("GET", "/models/digits/labels", f"{name}/labels")
    yield send("GET", "/models/digits/versions/1", version)
    yield send("GET", "/models/digits/versions/1/report", f"{version}/report")
    for file in client.get("/models/digits").json()["report"]["files"].values():
        yield send("GET", file, f"{version}/report/{{file}}")
    studio, route = "/label-studio/digits", "/label-studio/{name}"
    yield send("GET", f"{studio}/health", f"{route}/health")
    yield send("POST", f"{studio}/setup", f"{route}/setup", json={"schema": STUDIO})
    tasks = {"label_config": STUDIO, "tasks": [{"data": {INPUT: ROW}}]}
    yield send("POST", f"{studio}/predict", f"{route}/predict", json=tasks)
    yield send("POST", f"{studio}/webhook", f"{route}/webhook", json={"action": "PROJECT_UPDATED"})
    yield send("POST", "/admin/refresh")
    admin, route = "/admin/models/digits/versions/1", "/admin/models/{name}/versions/{version}"
    yield send("POST", f"{admin}/promote", f"{route}/promote")
    candidate, candidate_route = "/admin/models/digits/candidate", "/admin/models/{name}/candidate"
    for method in ("GET", "POST", "DELETE"):
        yield send(method, candidate, candidate_route)
    yield send("POST", f"{admin}/drift/reset", f"{route}/drift/reset")


def test_answers_of_every_operation_match_the_document(client, document):
    observed = set()
    for method, path, answer in send_valid_requests(client):
        assert answer.status_code < 300, answer.text
        assert_matches_document(document, method, path, answer)
        observed.add((method, path))
    assert observed == set(get_operations(document))


def test_refusals_of_every_operation_match_the_document(client, document):
    for method, path in get_operations(document):
        unknown_path = path.format(name="nothing", version="nothing", job="nothing", file="nothing")
        answer = client.request(method, unknown_path, content=b"{", params={"nothing": "1"})
        if path not in ("/health/live", "/health/ready", "/metrics", "/models", "/jobs"):
            assert 400 <= answer.status_code < 500 or path == "/admin/refresh", (path, answer.text)
        assert_matches_document(document, method, path, answer)
