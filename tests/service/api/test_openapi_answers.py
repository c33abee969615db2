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


def operations(document):
    return {
        (method, path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def references(part):
    """All `$ref` of a document's part."""
    if isinstance(part, dict):
        yield from ([part["$ref"]] if "$ref" in part else [])
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from references(inner)


def test_every_reference_leads_somewhere_and_operations_have_ids_of_their_own(document):
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= schemas
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(ids)) == len(ids)
    assert all(operation["tags"] for operation in operations(document).values())
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_error_is_a_problem(document):
    for operation in operations(document).values():
        for status, answer in operation["responses"].items():
            is_error = status == "default" or int(status) >= 400
            assert (set(answer["content"]) == {"application/problem+json"}) == is_error
            assert all("schema" in media for media in answer["content"].values())


def assert_as_documented(document, method, path, answer):
    documented = operations(document)[method, path]["responses"]
    content = documented.get(str(answer.status_code), documented["default"])["content"]
    media_type = answer.headers["content-type"]
    schema = content[media_type if media_type in content else media_type.partition(";")[0]]
    if "json" not in media_type:
        return
    schemas = document["components"]["schemas"]
    closed = {
        name: {"additionalProperties": False, **each} if "properties" in each else each
        for name, each in schemas.items()
    }
    full = {**schema["schema"], "components": {"schemas": closed}}
    jsonschema.validate(answer.json(), full, jsonschema.Draft202012Validator)


def good_requests(client):
    """The method, the route and the answer of a good request of every operation."""

    def ask(method, path, route=None, **given):
        answer = client.request(method, path, **given)
        return method.lower(), route or path, answer

    npy = {
        "content": npy_bytes(np.zeros((2, 64))),
        "headers": {"Content-Type": "application/x-npy"},
    }
    for path in ("/health/live", "/health/ready", "/metrics", "/models"):
        yield ask("GET", path)
    yield ask("POST", "/predict", json={"inputs": [ROW], "return_samples": True, "explain": True})
    yield ask("GET", "/predict/examples")
    yield ask("GET", "/models/digits/drift", "/models/{name}/drift")
    yield ask("POST", "/predict", params={"seed": 7, "fpr": 0.1}, **npy)
    yield ask("POST", "/acquire", json={"pool": [ROW, ROW]})
    yield ask("POST", "/acquire/preview", params={"rows": [0, 1]}, **npy)
    label = {"id": "a row", "label": "3", "input": ROW}
    yield ask("POST", "/labels", json={"labels": [label]})
    yield ask("GET", "/labels", params={"limit": 1})
    yield ask("POST", "/labels/delete", json={"ids": ["a row"]})
    body = ask("POST", "/acquire/jobs", json={"pool": [ROW]})
    yield body
    other = ask("POST", "/predict/jobs", json={"inputs": [ROW]})
    yield other
    other_job = other[2].json()["id"]
    job, route = f"/jobs/{body[2].json()['id']}", "/jobs/{job}"
    yield ask("POST", f"/jobs/{other_job}/cancel", f"{route}/cancel")
    yield ask("GET", "/jobs")
    while (state := client.get(job).json()["state"]) != "done":
        assert state in ("queued", "running")
        time.sleep(0.1)
    yield ask("GET", job, route)
    yield ask("GET", f"{job}/result", f"{route}/result")
    yield ask("DELETE", job, route)
    name, version = "/models/{name}", "/models/{name}/versions/{version}"
    yield ask("GET", "/models/digits", name)
    yield ask("GET", "/models/digits/labels", f"{name}/labels")
    yield ask("GET", "/models/digits/versions/1", version)
    yield ask("GET", "/models/digits/versions/1/report", f"{version}/report")
    for file in client.get("/models/digits").json()["report"]["files"].values():
        yield ask("GET", file, f"{version}/report/{{file}}")
    studio, route = "/label-studio/digits", "/label-studio/{name}"
    yield ask("GET", f"{studio}/health", f"{route}/health")
    yield ask("POST", f"{studio}/setup", f"{route}/setup", json={"schema": STUDIO})
    tasks = {"label_config": STUDIO, "tasks": [{"data": {INPUT: ROW}}]}
    yield ask("POST", f"{studio}/predict", f"{route}/predict", json=tasks)
    yield ask("POST", f"{studio}/webhook", f"{route}/webhook", json={"action": "PROJECT_UPDATED"})
    yield ask("POST", "/admin/refresh")
    admin, route = "/admin/models/digits/versions/1", "/admin/models/{name}/versions/{version}"
    yield ask("POST", f"{admin}/promote", f"{route}/promote")
    candidate, route_of = "/admin/models/digits/candidate", "/admin/models/{name}/candidate"
    for method in ("GET", "POST", "DELETE"):
        yield ask(method, candidate, route_of)
    yield ask("POST", f"{admin}/drift/reset", f"{route}/drift/reset")


def test_answers_of_every_operation_are_as_the_document_says(client, document):
    observed = set()
    for method, path, answer in good_requests(client):
        assert answer.status_code < 300, answer.text
        assert_as_documented(document, method, path, answer)
        observed.add((method, path))
    assert observed == set(operations(document))


def test_refusals_of_every_operation_are_as_the_document_says(client, document):
    for method, path in operations(document):
        wrong = path.format(name="nothing", version="nothing", job="nothing", file="nothing")
        answer = client.request(method, wrong, content=b"{", params={"nothing": "1"})
        if path not in ("/health/live", "/health/ready", "/metrics", "/models", "/jobs"):
            assert 400 <= answer.status_code < 500 or path == "/admin/refresh", (path, answer.text)
        assert_as_documented(document, method, path, answer)
