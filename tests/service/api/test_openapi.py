import importlib
import json
import pkgutil
import re

import numpy as np

import integrations
import service.api
from service.api.openapi import query_schema
from service.app import create_app
from service.settings import Settings
from tests.support.environment import ROOT
from tests.support.extremes import assert_extremes_are_answered_or_refused
from tests.support.files import npy_bytes


def routes():
    paths = {"admin": set(), "others": set(), "hidden": set()}
    for package in (service.api, integrations):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.startswith("integrations.ray"):
                continue
            router = getattr(importlib.import_module(module.name), "router", None)
            if router is None:
                continue
            kind = "admin" if module.name.endswith(".admin") else "others"
            for route in router.routes:
                paths[kind if route.include_in_schema else "hidden"].add(route.path)
    return paths


def test_every_route_is_in_the_openapi_document(client):
    assert set(client.get("/openapi.json").json()["paths"]) == routes()["others"]
    admin_document = create_app(Settings(admin_key="the-key-of-the-administrator")).openapi()
    assert set(admin_document["paths"]) == routes()["others"] | routes()["admin"]


def test_schemas_preserve_key_order():
    """All processes must return the same document and ETag."""
    keys = ["type", "minimum", "maximum", "title", "description"]
    assert list(query_schema({key: key for key in [*keys, "default"]})) == keys


def test_query_parameters_have_no_null_and_no_default(client):
    paths = client.get("/openapi.json").json()["paths"]
    parameters = [
        parameter
        for operations in paths.values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query"
    ]
    assert {"annotator", "rows", "seed"} <= {parameter["name"] for parameter in parameters}
    for parameter in parameters:
        assert not {"anyOf", "default"} & parameter["schema"].keys(), parameter


def test_every_route_is_documented():
    guide = (ROOT / "docs" / "api.md").read_text()
    paths = set().union(*routes().values())
    assert any(path.startswith("/admin/") for path in paths)
    assert {path for path in paths if f"{path}`" not in guide} == set()


def test_every_documented_example_succeeds(client):
    num_examples = 0
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            for example in content.get("application/json", {}).get("examples", {}).values():
                answer = client.post(path, json=example["value"])
                assert answer.status_code == (202 if path.endswith("/jobs") else 200), answer.text
                num_examples += 1
    assert num_examples >= 3


def test_extreme_rows_are_answered_or_refused_as_documented(client):
    assert_extremes_are_answered_or_refused(client, "digits", 64)


def test_every_operation_has_a_description_and_an_error_response(client):
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            if method == "post":
                success = "202" if path.endswith("/jobs") else "200"
                assert {success, "default"} <= set(operation["responses"])


def test_docs_page_loads_all_files_from_the_service(client):
    page = client.get("/docs").text
    urls = re.findall(r"<(?:script|link|img)[^>]*\b(?:src|href)=[\"']([^\"']+)", page)
    assert len(urls) >= 2
    for url in urls:
        assert re.match(r"/[^/]", url), url
        assert client.get(url).status_code == 200
    assert "http://" not in page
    assert "https://" not in page


def test_answers_in_guide_have_fields_of_real_answers(client):
    guide = (ROOT / "docs" / "api.md").read_text()
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", guide, re.DOTALL)]
    row = {"inputs": [[0] * 64], "return_samples": True}
    blank, headers = npy_bytes(np.zeros((1, 64))), {"Content-Type": "application/x-npy"}
    answers = [
        client.post("/predict", json=row).json(),
        client.post("/acquire", json={"pool": [[0] * 64]}).json(),
        client.post(
            "/labels", json={"labels": [{"id": "blank", "label": "0", "input": [0] * 64}]}
        ).json(),
        client.post("/acquire/preview", content=blank, headers=headers).json(),
        client.get("/models").json(),
        client.get("/models/digits").json(),
        client.get("/health/ready").json(),
        client.get("/health/live").json(),
        client.get("/nothing").json(),
    ]
    assert blocks
    for block in blocks:
        assert any(set(block) <= set(answer) for answer in answers), block
