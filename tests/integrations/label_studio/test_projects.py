import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from integrations.label_studio.client import LabelStudio, LabelStudioError
from integrations.label_studio.projects import (
    image_bytes,
    label_id,
    make_result,
    parse_config,
    read_annotation,
    read_row,
)
from model_store.artifacts.manifest import ClassSpec
from model_store.errors import InvalidInput

CHOICES = """<View><!-- what is it? --><Image name="img" value="$image"/>
<Choices name="digit" toName="img"><Choice value="no"/><Choice value="Yes!" alias="yes"/></Choices></View>"""
NUMBER = '<View><Text name="t" value="$text"/><Number name="price" toName="t"/></View>'


def manifest(task="classification", image=True, columns=()):
    output = ClassSpec(classes=("no", "yes")) if task == "classification" else None
    spec = SimpleNamespace(image=object() if image else None, columns=columns, text=None)
    return SimpleNamespace(
        task=task, output=output, classes=("no", "yes") if output else None, input=spec
    )


def reject_fetch(url):
    raise AssertionError(url)


def test_parse_config_finds_control_and_field():
    config = parse_config(CHOICES, manifest())
    assert (config.control, config.object_name, config.kind, config.field) == (
        "digit",
        "img",
        "choices",
        "image",
    )
    assert config.choices == ("no", "yes")
    assert make_result(config, "yes")[0]["value"] == {"choices": ["yes"]}
    number = parse_config(NUMBER, manifest("regression"))
    assert make_result(number, 1.5)[0] == {
        "from_name": "price",
        "to_name": "t",
        "type": "number",
        "value": {"number": 1.5},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "label_config: expected XML of up to"),
        ("<View", "label_config: expected XML, got"),
        ('<!DOCTYPE v [<!ENTITY a "aaaa">]><View>&a;</View>', "label_config: expected XML"),
        ("<View>" + " " * 100_000 + "</View>", "label_config: expected XML of up to"),
        (NUMBER, "label_config: expected <Choices name=... toName=...>"),
        (CHOICES.replace('value="$image"', 'value="fixed"'), "label_config: expected an object"),
        (CHOICES.replace('<Choice value="no"/>', ""), "label_config: expected a <Choice>"),
    ],
)
def test_unsuitable_config_is_rejected_with_reason(text, message):
    with pytest.raises(InvalidInput, match=message):
        parse_config(text, manifest())


def test_tasks_are_read_as_images_arrays_or_columns():
    config = parse_config(CHOICES, manifest())
    uri = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
    assert (
        base64.b64decode(read_row(manifest(), config, {"image": uri}, "d", reject_fetch))
        == b"a picture"
    )
    assert read_row(
        manifest(), config, {"image": uri, "dubito_input": [1, 2]}, "d", reject_fetch
    ) == [
        1,
        2,
    ]
    assert read_row(manifest(image=False), config, {"image": [3]}, "d", reject_fetch) == [3]
    columns = (SimpleNamespace(name="age"),)
    data = {"age": 3, "other": 4}
    assert read_row(manifest(image=False, columns=columns), config, data, "d", reject_fetch) == {
        "age": 3
    }
    for invalid in (
        {},
        [],
        {"image": None},
        {"image": "data:text/html,x"},
        {"image": "data:image/png;base64,!"},
    ):
        with pytest.raises(InvalidInput):
            read_row(manifest(), config, invalid, "d", reject_fetch)
    with pytest.raises(InvalidInput, match="all of the model's columns"):
        read_row(manifest(image=False, columns=columns), config, {"image": "x"}, "d", reject_fetch)


def test_annotations_are_read_as_labels_with_ids():
    config = parse_config(CHOICES, manifest())

    def make_annotation(*choices, **fields):
        return {"result": [{"from_name": "digit", "value": {"choices": list(choices)}}], **fields}

    assert read_annotation(config, make_annotation("yes")) == "yes"
    assert read_annotation(config, make_annotation("yes", was_cancelled=True)) is None
    assert read_annotation(config, {"result": []}) is None
    assert (
        read_annotation(config, {"result": [{"from_name": "other", "value": {"choices": ["yes"]}}]})
        is None
    )
    with pytest.raises(InvalidInput, match="one choice"):
        read_annotation(config, make_annotation("yes", "no"))
    number = parse_config(NUMBER, manifest("regression"))
    assert (
        read_annotation(number, {"result": [{"from_name": "price", "value": {"number": 3}}]}) == 3.0
    )
    with pytest.raises(InvalidInput, match="a number"):
        read_annotation(number, {"result": [{"from_name": "price", "value": {"number": True}}]})
    assert label_id({"id": 3}, {"id": 7, "data": {}}) == "label-studio-3-7"
    assert label_id(None, {"id": 7, "project": 4}) == "label-studio-4-7"
    assert label_id({"id": 3}, {"id": 7, "data": {"dubito_id": "row 9"}}) == "row 9"
    for invalid in (None, {}, {"id": "7", "project": 4}):
        with pytest.raises(InvalidInput):
            label_id(None, invalid)


@pytest.fixture
def studio():
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            if self.path == "/data/elsewhere":
                self.send_response(302)
                self.send_header("Location", "/data/a.png")
                self.end_headers()
                return
            stale = self.path == "/api/x" and self.headers["Authorization"] == "Bearer access 1"
            self.send_response(401 if stale else 200)
            self.end_headers()
            self.wfile.write(b"{}" if self.path == "/api/x" else b"a picture")

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, content))
            refreshed = sum(path == "/api/token/refresh" for path, _ in requests)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"access": f"access {refreshed}"}).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_images_are_fetched_only_from_allowed_origin(studio):
    url, requests = studio
    client = LabelStudio(url, "a token")
    assert client.fetch("/data/a.png") == client.fetch(f"{url}/data/a.png") == b"a picture"
    assert image_bytes("/data/a.png", "f", client.fetch) == b"a picture"
    assert {auth for _, auth in requests} == {"Token a token"}
    request_count = len(requests)
    for address in (
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:1/data/a.png",
        url.replace("http", "https") + "/data/a.png",
        "//example.com/a.png",
        "file:///etc/passwd",
        "s3://bucket/a.png",
        url.replace("127.0.0.1", "127.0.0.1@example.com"),
        url.replace("127.0.0.1", "user@127.0.0.1"),
        f"{url}\\@example.com/",
        "/api/users",
        "/data/../api/users",
        "/data/%2e%2e/api/users",
        "http://[",
    ):
        with pytest.raises(
            InvalidInput, match=r"^tasks: expected images as data URIs, or files below DUBITO"
        ):
            client.fetch(address)
    assert len(requests) == request_count
    with pytest.raises(InvalidInput, match="images that Label Studio can serve"):
        client.fetch("/data/elsewhere")
    assert requests[request_count:] == [("/data/elsewhere", "Token a token")]


def test_personal_access_token_is_exchanged_again_after_expiry(studio):
    url, requests = studio
    client = LabelStudio(url, "a.personal.token")
    assert client.json("GET", "api/x") == {}
    assert [path for path, _ in requests] == [
        "/api/token/refresh",
        "/api/x",
        "/api/token/refresh",
        "/api/x",
    ]
    assert requests[0][1] == {"refresh": "a.personal.token"}
    assert requests[-1][1] == "Bearer access 2"
    with pytest.raises(LabelStudioError, match="invalid JSON"):
        client.json("GET", "data/a.png")
    for invalid_url in ("ftp://a", "no url", "http://a?b=c"):
        with pytest.raises(InvalidInput, match="DUBITO_LABEL_STUDIO_URL"):
            LabelStudio(invalid_url, None)
