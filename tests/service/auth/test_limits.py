import json

import numpy as np
import pytest

from service.app import create_app
from service.settings import Settings
from tests.support.serving import open_client
from tests.support.stores import publish_again

SCOPES = ["read", "predict", "acquire", "label", "rows", "admin"]
LIMITED, FREE = ({"X-API-Key": f"the-long-key-of-{name}"} for name in ("limited", "free"))
ROW = [0.0] * 64
LABELS = {"labels": [{"id": "a", "label": "3", "input": ROW}]}
# Requests that name the model outside the path
BODIES = [
    ("POST", "/predict", {"inputs": [ROW]}),
    ("POST", "/acquire", {"pool": [ROW], "k": 1}),
    ("POST", "/predict/jobs", {"inputs": [ROW]}),
    ("POST", "/acquire/jobs", {"pool": [ROW], "k": 1}),
    ("POST", "/labels", LABELS),
    ("POST", "/labels/delete", {"ids": ["a"]}),
]
QUERIES = [("GET", "/labels"), ("GET", "/predict/examples"), ("POST", "/acquire/preview")]


@pytest.fixture(scope="module")
def limited(tmp_path_factory, digits_store):
    """A client with a key for one of the service's two models."""
    from model_store.artifacts.store import ModelStore

    folder = tmp_path_factory.mktemp("limits")
    store = ModelStore(folder / "models")
    for name in ("digits", "hidden"):
        publish_again(store, digits_store, name)
    for name in ("mine", "theirs"):
        (folder / "pools" / name).mkdir(parents=True)
        np.save(folder / "pools" / name / "rows.npy", np.zeros((3, 64)))
    keys = "".join(
        f'[[keys]]\nname = "{name}"\nkey = "the-long-key-of-{name}"\nscopes = {SCOPES}\n{limits}\n'
        for name, limits in (("limited", 'models = ["digits"]\npools = ["mine"]'), ("free", ""))
    )
    (folder / "keys.toml").write_text(keys)
    settings = {
        "DUBITO_KEYS_FILE": str(folder / "keys.toml"),
        "DUBITO_POOLS": str(folder / "pools"),
        "DUBITO_DEFAULT_MODEL": "hidden",
        "DUBITO_JOBS_AT_ONCE": "0",
    }
    with open_client(store.root, headers=LIMITED, **settings) as client:
        yield client


def make_requests(model):
    """Yield a request for each route that takes a model name."""
    app = create_app(Settings(store="unused", admin_key="the-key-of-the-boss"))
    for route in app.state.routes:
        path = route.path.replace("{name}", model).replace("{version}", "1")
        if path != route.path and "{name}" in route.path:
            for method in route.methods:
                body = {
                    "inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": ROW}]
                }
                yield method, path.replace("{file}", "report.html"), {"json": body}
    for method, path, body in BODIES:
        yield method, path, {"json": {**body, "model": model}}
    for method, path in QUERIES:
        headers = {"Content-Type": "text/csv"}
        yield method, path, {"params": {"model": model}, "content": b"a\n1\n", "headers": headers}
    yield "POST", "/invocations", {"json": {"inputs": [ROW], "params": {"model": model}}}


def get_outcome(client, method, path, options):
    answer = client.request(method, path, **options)
    return answer.status_code, answer.content


def test_hidden_models_look_absent_on_every_route(limited):
    hidden, absent = list(make_requests("hidden")), list(make_requests("absent"))
    assert len(hidden) > 25
    for request, absent_request in zip(hidden, absent, strict=True):
        status, content = get_outcome(limited, *request)
        assert (status, content) == get_outcome(limited, *absent_request), request
        assert status == 404 or request[1].startswith("/label-studio"), (request, content)
        assert b"hidden" not in content
    assert limited.get("/models/hidden", headers=FREE).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/models"), ("GET", "/v2/models"), ("POST", "/v2/repository/index")),
        *(("POST", "/admin/refresh"), ("GET", "/health/ready"), ("GET", "/jobs")),
    ],
)
def test_lists_hide_other_models(limited, method, path):
    job = limited.post("/predict/jobs", json={"inputs": [ROW]}, headers=FREE).json()
    assert job["model"] == "hidden"
    assert "hidden" in limited.request(method, path, headers=FREE).text
    answer = limited.request(method, path)
    assert answer.is_success
    assert "hidden" not in answer.text
    assert limited.get(f"/jobs/{job['id']}").status_code == 404


def test_only_model_of_a_key_is_its_default(limited):
    for headers, name in ((LIMITED, "digits"), (FREE, "hidden")):
        answer = limited.post("/predict", json={"inputs": [ROW]}, headers=headers)
        assert json.loads(answer.text)["model"] == name


def test_hidden_pools_look_absent(limited):
    for path, status in (("mine/rows.npy", 200), ("mine/../theirs/rows.npy", 422)):
        answer = limited.post("/acquire", json={"pool_file": path, "k": 1})
        assert answer.status_code == status
    hidden, absent = (
        limited.post("/acquire", json={"pool_file": f"{folder}/rows.npy", "k": 1})
        for folder in ("theirs", "absent")
    )
    assert (hidden.status_code, hidden.content) == (422, absent.content)
    content = {"pool_file": "theirs/rows.npy", "k": 1}
    assert limited.post("/acquire", json=content, headers=FREE).is_success
