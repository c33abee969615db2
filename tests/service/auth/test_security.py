import json
import re
import shutil

from model_store.artifacts.store import ModelStore
from tests.support.stores import publish_again

ROW = [0.0] * 64
MARK = "Zx9Qmark"
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def read_tree(root):
    return {
        path.relative_to(root): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
    }


def send_bad_requests(client):
    fields = [
        *(
            {"model": MARK},
            {"version": MARK},
            {"version": f"../../{MARK}"},
            {"seed": MARK},
            {"num_samples": MARK},
        ),
        *(
            {"fpr": MARK},
            {"coverage": [MARK]},
            {"inputs": MARK},
            {"inputs": [MARK]},
            {"inputs": [[MARK] * 64]},
        ),
        *({"inputs": [{MARK: 1.0}]}, {"inputs": [f"http://127.0.0.1:1/{MARK}"]}),
    ]
    for content in fields:
        yield client.post(
            "/predict", content=json.dumps({"inputs": [ROW], **content}), headers=JSON
        )
    for content in ({"acquisition": MARK}, {"k": MARK}, {"ids": [MARK, MARK]}):
        yield client.post("/acquire", json={"pool": [ROW], **content})
    yield client.post("/predict", content=MARK, headers={"Content-Type": "application/json"})
    yield client.post(
        "/predict",
        content=b"\x93NUMPY" + MARK.encode(),
        headers={"Content-Type": "application/x-npy"},
    )
    yield client.post("/predict", content=b"", headers={"Content-Type": f"application/{MARK}"})
    yield client.post("/predict", content=b"", headers={"Content-Encoding": MARK})
    yield client.post(
        "/predict",
        content=f"--b\r\nContent-Disposition: {MARK}\r\n\r\n--b--".encode(),
        headers=FORM,
    )
    for path in (f"/{MARK}", f"/models/{MARK}", f"/models/digits/versions/{MARK}/report"):
        yield client.get(path)
    yield client.get(f"/models/digits/versions/1/report/{MARK}")
    yield client.put("/predict", content=MARK)


def test_errors_do_not_echo_input_or_show_paths_or_addresses(client, digits_store):
    for answer in send_bad_requests(client):
        assert 400 <= answer.status_code < 500, answer.text
        assert MARK not in answer.text
        assert str(digits_store) not in answer.text
        assert not re.search(r"0x[0-9a-f]{6}|Traceback|site-packages|\.py\b", answer.text)


def test_requests_do_not_write_to_the_store(open_client, digits_store, tmp_path):
    shutil.copytree(digits_store, tmp_path / "models")
    publish_again(ModelStore(tmp_path / "models"), digits_store)
    before = read_tree(tmp_path / "models")
    with open_client(tmp_path / "models") as client:
        assert client.post("/predict", json={"inputs": [ROW], "version": "1"}).status_code == 200
        assert client.post("/acquire", json={"pool": [ROW], "k": 1}).status_code == 200
        for path in ("/models", "/models/digits", "/models/digits/versions/1/report", "/metrics"):
            client.get(path)
            for method in ("PUT", "POST", "PATCH", "DELETE"):
                assert client.request(method, path, content=b"{}").status_code == 405
        for _ in send_bad_requests(client):
            pass
    assert read_tree(tmp_path / "models") == before
