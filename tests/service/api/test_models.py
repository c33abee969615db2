import shutil

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from model_store.artifacts.signature import read_private_key, write_key_pair
from model_store.artifacts.store import ModelStore
from tests.support.serving import FAST_POLLING, metric, predict_blank, wait_until
from tests.support.stores import publish_again


def get_serving_versions(client):
    return {model["name"]: model["serving"] for model in client.get("/models").json()["models"]}


def damage(folder, file, kind):
    """Damage a file of a version."""
    path = folder / file
    content = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-1])
        case "longer":
            path.write_bytes(content + b"\0")
        case "changed":
            path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "other format":
            path.write_bytes(content.replace(b'"format_version": 1', b'"format_version": 2'))


def test_service_with_empty_store_suggests_fit_and_becomes_ready(
    open_client, digits_store, tmp_path
):
    with open_client(tmp_path / "none yet", **FAST_POLLING) as client:
        assert client.get("/health/live").json() == {"status": "live"}
        assert client.get("/models").json() == {"models": []}
        for answer in (
            client.get("/health/ready"),
            predict_blank(client),
            predict_blank(client, model="digits"),
        ):
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert "dubito fit" in answer.json()["detail"]
        publish_again(ModelStore(tmp_path / "none yet"), digits_store)
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        assert client.get("/health/ready").json() == {"status": "ready", "models": {"digits": "1"}}
        assert predict_blank(client).status_code == 200


def test_latest_follows_publication_and_rollback(open_client, digits_store, writable_store):
    with open_client(writable_store.root, **FAST_POLLING) as client:
        assert predict_blank(client).json()["version"] == "1"
        assert publish_again(writable_store, digits_store) == "2"
        wait_until(lambda: predict_blank(client).json()["version"] == "2")
        writable_store.set_alias("digits", "latest", "1")
        wait_until(lambda: predict_blank(client).json()["version"] == "1")
        writable_store.set_alias("digits", "champion", "2")
        wait_until(lambda: predict_blank(client, version="champion").status_code == 200)
        versions = {"1": "1", "2": "2", "latest": "1", "champion": "2"}
        assert {
            name: predict_blank(client, version=name).json()["version"] for name in versions
        } == versions
        writable_store.set_alias("digits", "champion", "1")
        wait_until(lambda: predict_blank(client, version="champion").json()["version"] == "1")
        writable_store.keep("digits", 1)
        assert client.get("/models/digits").json()["versions"] == ["1", "2"]


BROKEN = (
    ("manifest.json", "missing"),
    ("manifest.json", "truncated"),
    ("manifest.json", "other format"),
    ("network.onnx", "missing"),
    ("sampler.onnx", "truncated"),
    ("calibration.safetensors", "changed"),
    ("weights.safetensors", "longer"),
)


def test_broken_versions_name_their_damaged_file_while_others_are_served(
    open_client, digits_store, writable_store
):
    broken = {f"broken-{n}": item for n, item in enumerate(BROKEN)}
    for name in broken:
        for _ in range(2):
            publish_again(writable_store, digits_store, name)
        writable_store.set_alias(name, "latest", "1")
    with open_client(writable_store.root, **FAST_POLLING) as client:
        for name, (file, kind) in broken.items():
            damage(writable_store.root / name / "2", file, kind)
            writable_store.set_alias(name, "latest", "2")
        wait_until(
            lambda: len(client.get("/health/ready").json().get("degraded", [])) == len(BROKEN)
        )
        for name, (file, _) in broken.items():
            answer = predict_blank(client, model=name, version="2")
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"].startswith(f"model {name} version 2: {file}: ")
            assert str(writable_store.root) not in answer.text
            assert predict_blank(client, model=name, version="1").json()["version"] == "1"
            assert predict_blank(client, model=name).json()["version"] == "1"
            model = client.get(f"/models/{name}").json()
            assert (model["serving"], model["manifest"]["version"]) == ("1", "1")
            assert (model["versions"], model["aliases"]) == (["1", "2"], {"latest": "2"})
            assert list(model["broken"]) == ["2"]
            assert file in model["broken"]["2"]
        assert predict_blank(client, model="digits").status_code == 200
        ready = client.get("/health/ready")
        assert ready.status_code == 200
        assert ready.json()["status"] == "degraded"
        assert ready.json()["models"] == dict.fromkeys(["digits", *broken], "1")
        assert len(ready.json()["degraded"]) == len(broken)
        for name, (file, _) in broken.items():
            messages = [text for text in ready.json()["degraded"] if name in text]
            assert messages[0].startswith(f"cannot serve model {name} version 2: {file}: ")
            assert messages[0].endswith("; latest keeps serving version 1")
            text = client.get("/metrics").text
            assert metric(text, "dubito_degraded_alias", model=name, alias="latest") == 1
            assert metric(text, "dubito_alias", model=name, alias="latest", version="1") == 1
        for name in broken:
            writable_store.set_alias(name, "latest", "1")
            shutil.rmtree(writable_store.root / name / "2")
        wait_until(
            lambda: all(predict_blank(client, model=name).status_code == 200 for name in broken)
        )
        wait_until(
            lambda: all(client.get(f"/models/{name}").json()["broken"] == {} for name in broken)
        )
        wait_until(lambda: client.get("/health/ready").json()["status"] == "ready")


def test_service_never_starts_with_a_version_other_than_latest(
    open_client, digits_store, writable_store
):
    publish_again(writable_store, digits_store)
    content = (writable_store.root / "digits" / "2" / "network.onnx").read_bytes()
    damage(writable_store.root / "digits" / "2", "network.onnx", "truncated")
    with open_client(writable_store.root, **FAST_POLLING) as client:
        ready = client.get("/health/ready")
        assert ready.status_code == 503
        assert "model digits version 2: network.onnx: " in ready.json()["detail"]
        assert predict_blank(client).status_code == 503
        assert predict_blank(client, version="1").json()["version"] == "1"
        (writable_store.root / "digits" / "2" / "network.onnx").write_bytes(content)
        writable_store.set_alias("digits", "latest", "1")
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        assert predict_blank(client).json()["version"] == "1"


def test_service_keeps_its_version_if_latest_becomes_unreadable(
    open_client, digits_store, writable_store
):
    alias = writable_store.root / "digits" / "aliases" / "latest"
    publish_again(writable_store, digits_store)
    with open_client(writable_store.root, **FAST_POLLING) as client:
        for content in (b"", b"v1", b"1.0", b"\xef\xbb\xbf1", b"999", None):
            alias.unlink() if content is None else alias.write_bytes(content)
            wait_until(lambda: client.get("/health/ready").json()["status"] == "degraded")
            (problem,) = client.get("/health/ready").json()["degraded"]
            assert "alias latest" in problem
            assert problem.endswith("latest keeps serving version 2")
            assert predict_blank(client).json()["version"] == "2"
            text = client.get("/metrics").text
            assert metric(text, "dubito_degraded_alias", model="digits", alias="latest") == 1
            writable_store.set_alias("digits", "latest", "2")
            wait_until(lambda: client.get("/health/ready").json()["status"] == "ready")


def test_service_starts_without_a_model_if_its_latest_is_unreadable(open_client, writable_store):
    (writable_store.root / "digits" / "aliases" / "latest").write_bytes(b"v1")
    with open_client(writable_store.root, **FAST_POLLING) as client:
        answer = predict_blank(client)
        assert (answer.status_code, answer.json()["code"]) == (503, "broken_alias")
        assert "alias latest" in answer.json()["detail"]
        assert client.get("/health/ready").status_code == 503
        assert "alias latest" in client.get("/health/ready").json()["detail"]
        writable_store.set_alias("digits", "latest", "1")
        wait_until(lambda: predict_blank(client).status_code == 200)


def test_service_is_ready_once_all_expected_models_are_served(serve, digits_store, writable_store):
    settings = {"DUBITO_MODELS": "digits, other", "DUBITO_DEFAULT_MODEL": "another"}
    pools = {"DUBITO_POOLS": str(writable_store.root / "pools")}
    with (
        serve(writable_store.root, **FAST_POLLING, **settings, **pools) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        wait_until(lambda: predict_blank(client, model="digits").status_code == 200)
        ready = client.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["detail"] == "models of DUBITO_MODELS are not served yet: other"
        publish_again(writable_store, digits_store, "other")
        wait_until(lambda: client.get("/health/ready").status_code == 200)
        process.terminate()
        log = process.communicate(timeout=60)[1]
    assert "DUBITO_MODELS: model other is not in the store" in log
    assert "DUBITO_DEFAULT_MODEL: model another is not in the store" in log
    assert "DUBITO_POOLS: there is no folder" in log


def test_model_missing_from_store_is_served_until_deleted(
    open_client, digits_store, writable_store
):
    publish_again(writable_store, digits_store, "other")
    folder = writable_store.root / "digits"
    with open_client(writable_store.root, **FAST_POLLING) as client:
        folder.rename(writable_store.root / ".away")
        message = "model digits is missing from the store; latest keeps serving version 1"
        # A poll that has listed the version before may report a missing file first.
        wait_until(lambda: client.get("/health/ready").json().get("degraded") == [message])
        assert predict_blank(client, model="digits").status_code == 200
        assert client.get("/models/digits").status_code == 200
        assert {m["name"] for m in client.get("/models").json()["models"]} == {"digits", "other"}
        (writable_store.root / ".away").rename(folder)
        wait_until(lambda: client.get("/health/ready").json()["status"] == "ready")
        writable_store.delete("digits", force=True)
        wait_until(lambda: predict_blank(client, model="digits").status_code == 404)
        wait_until(lambda: client.get("/health/ready").json()["status"] == "ready")


def test_replaced_version_with_same_number_is_reported_and_not_served(
    open_client, digits_store, writable_store, tmp_path
):
    replacement = ModelStore(tmp_path / "replacement")
    publish_again(replacement, digits_store)  # same files, different publication time
    with open_client(writable_store.root, **FAST_POLLING) as client:
        before = predict_blank(client, seed=1).content
        (writable_store.root / "digits").rename(writable_store.root / ".away")
        (replacement.root / "digits").rename(writable_store.root / "digits")
        message = (
            "model digits version 1 in the store differs from the loaded one; "
            "latest keeps serving version 1"
        )
        wait_until(lambda: client.get("/health/ready").json().get("degraded") == [message])
        assert predict_blank(client, seed=1).content == before


def test_service_with_a_verify_key_serves_only_signed_versions(
    open_client, digits_store, writable_store, tmp_path
):
    public = write_key_pair(tmp_path / "key")
    key = read_private_key(tmp_path / "key", "key")
    admin = {"X-API-Key": "the-key-of-the-administrator"}
    settings = {"DUBITO_VERIFY_KEY_FILE": str(public), "DUBITO_ADMIN_KEY": admin["X-API-Key"]}
    with open_client(writable_store.root, **FAST_POLLING, **settings) as client:
        expected = "model digits version 1: manifest.sig: there is none: the version is not signed"
        assert client.get("/health/ready").json()["detail"] == f"cannot serve {expected}"
        assert client.get("/models/digits").json()["broken"] == {"1": expected}
        assert predict_blank(client).json()["detail"] == expected
        writable_store.sign("digits", "1", key)
        assert (
            client.post("/admin/refresh", headers=admin).json()["models"]["digits"]["serving"]
            == "1"
        )
        publish_again(writable_store, digits_store)
        writable_store.sign("digits", "2", Ed25519PrivateKey.generate())
        client.post("/admin/refresh", headers=admin)
        assert predict_blank(client).json()["version"] == "1"
        refusal = predict_blank(client, version="2")
        assert refusal.status_code == 503
        assert (
            "manifest.sig: no signature of this version by a trusted key"
            in refusal.json()["detail"]
        )
        writable_store.sign("digits", "2", key)
        client.post("/admin/refresh", headers=admin)
        assert predict_blank(client).json()["version"] == "2"


def test_request_must_name_one_of_several_models_without_a_default(
    open_client, digits_store, writable_store
):
    publish_again(writable_store, digits_store, "other")
    with open_client(writable_store.root, **FAST_POLLING) as client:
        answer = predict_blank(client)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("model: expected one of digits, other")
        assert predict_blank(client, model="other").json()["model"] == "other"
        writable_store.delete("other", force=True)
        wait_until(lambda: get_serving_versions(client) == {"digits": "1"})
        assert predict_blank(client).json()["model"] == "digits"
        assert predict_blank(client, model="other").status_code == 404
        assert client.get("/models/other").status_code == 404
    publish_again(writable_store, digits_store, "other")
    settings = {**FAST_POLLING, "DUBITO_DEFAULT_MODEL": "other"}
    with open_client(writable_store.root, **settings) as client:
        assert predict_blank(client).json()["model"] == "other"
        assert predict_blank(client, model="digits").json()["model"] == "digits"
        assert predict_blank(client, model="").status_code == 404


def test_folders_without_models_are_ignored(open_client, writable_store):
    (writable_store.root / "empty").mkdir()
    (writable_store.root / ".hidden").mkdir()
    (writable_store.root / "file").write_text("no model")
    (writable_store.root / "linked").symlink_to(
        writable_store.root / "digits", target_is_directory=True
    )
    (writable_store.root / "digits" / "7").write_text("no version")
    (writable_store.root / "digits" / "aliases" / "dangling").write_text("9")
    with open_client(writable_store.root, **FAST_POLLING) as client:
        assert get_serving_versions(client) == {"digits": "1"}
        assert predict_blank(client, model="linked").status_code == 404
        assert predict_blank(client, version="7").status_code == 404
        assert predict_blank(client, version="dangling").status_code == 503


def test_models_are_described(client, digits_store):
    manifest = ModelStore(digits_store).manifest("digits", "1")
    expected = {
        "name": "digits",
        "serving": "1",
        "versions": ["1"],
        "aliases": {"latest": "1"},
        "broken": {},
        "method": "bhn-realnvp",
        "task": "classification",
        "input_shape": [8, 8],
        "columns": [],
        "classes": [str(i) for i in range(10)],
        "target": None,
        "quality": manifest.quality,
        "baselines": manifest.baselines,
        "smallest_fpr": manifest.detectors.smallest_fpr,
        "warnings": list(manifest.warnings),
        "too_few_rows": None,
        "categories": None,
        "encoder": None,
        "smallest_risk": manifest.abstention.smallest_risk,
    }
    (items,) = client.get("/models").json()["models"]
    assert list(items.pop("in_memory")) == ["1"]
    assert items == expected
    model = client.get("/models/digits").json()
    assert set(model.pop("drift")) >= {"rows", "flag_rate", "evidence", "alarm"}
    assert list(model.pop("in_memory")) == ["1"]
    assert model.pop("report") is None  # no report exists yet
    assert model == {**expected, "manifest": manifest.model_dump(mode="json")}


@pytest.mark.parametrize("name", ["nothing", "digits%00", "..%2f", "%ff", "x" * 1000])
def test_unknown_model_is_not_found(client, name):
    assert client.get(f"/models/{name}").status_code == 404
