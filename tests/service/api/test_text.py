import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.inference.noise import noise
from tests.support.environment import working_in
from tests.support.files import npy_bytes
from tests.support.recipes import write_recipe
from tests.support.serving import open_client
from tests.support.texts import VOCABULARY, MeanEmbedding, texts, tokenizer, write_reviews
from training.__main__ import main
from training.versions import open_parent

TOKENS = 7  # fewer than in the longest texts
DATA = {
    "source": "csv:reviews.csv",
    "target": "label",
    "text": "text",
    "tokenizer": "tokenizer.json",
}
SIZES = {"validation": 30, "reference": 30, "ranking": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fits):
    """A folder with a fitted text model."""
    folder = tmp_path_factory.mktemp("texts")
    write_reviews(folder)
    network = {"factory": "tests.support.texts:MeanEmbeddingNetwork", "bayesian": ["head"]}
    data = {**DATA, **SIZES, "max_tokens": TOKENS}
    settings = {
        "training": {"epochs": 20, "learning_rate": 3e-2, "batch_rows": 16},
        "serving": {"draws": 10},
    }
    recipe = write_recipe(folder, name="reviews", data=data, network=network, **settings)
    with working_in(folder):
        assert main(["fit", str(recipe), "--quiet"]) == 0
        yield folder


@pytest.fixture(scope="module")
def client(folder):
    with open_client(folder / "models", DUBITO_PREFLIGHT_TIMEOUT_S="30") as client:
        yield client


@pytest.fixture(scope="module")
def parent(folder):
    return open_parent(ModelStore(folder / "models"), "reviews", "model")


def predict(client, inputs, **fields):
    return client.post("/predict", json={"inputs": inputs, "seed": 3, **fields})


def get_ids(rows):
    encoder = tokenizer()
    encoder.enable_truncation(TOKENS)
    encoder.enable_padding(length=TOKENS, pad_id=0)
    return np.array([encoder.encode(row).ids for row in rows])


def test_answers_to_strings_match_torch_and_replay_bit_for_bit(client, parent):
    rows, labels = texts(40, seed=1)
    request = {"num_samples": 4, "return_samples": True}
    answer = predict(client, rows, **request)
    assert answer.status_code == 200, answer.text
    assert predict(client, rows, **request).content == answer.content
    actual = answer.json()["predictions"]
    samples = np.array([row["samples"] for row in actual]).swapaxes(0, 1)
    spec = parent.manifest.noise
    eps = torch.from_numpy(noise(spec.algorithm, 3, 0, 4, spec.dimension))
    expected = parent.model().eval().predict(torch.from_numpy(get_ids(rows)).float(), eps).exp()
    np.testing.assert_allclose(samples, expected.numpy(), atol=2e-3)
    assert np.mean([row["label"] == label for row, label in zip(actual, labels, strict=True)]) > 0.9
    single = predict(client, rows[7:8], **request).json()["predictions"][0]
    assert single["samples"] == actual[7]["samples"]


def test_texts_are_accepted_as_strings_objects_files_and_ids(client):
    rows = ["the film was good", "", "an unknown word, " + "very " * 50]
    expected = predict(client, rows).json()
    assert predict(client, [{"text": row} for row in rows]).json() == expected
    assert predict(client, get_ids(rows).tolist()).json() == expected
    files = [("inputs", (f"{n}.txt", row.encode())) for n, row in enumerate(rows)]
    assert client.post("/predict?seed=3", files=files).json() == expected
    for dtype in (np.int64, np.uint8, np.float64):
        body = npy_bytes(get_ids(rows).astype(dtype))
        headers = {"Content-Type": "application/x-npy"}
        assert client.post("/predict?seed=3", content=body, headers=headers).json() == expected
    large = rows * 1000  # long bodies are read in blocks
    assert predict(client, large).json()["predictions"][:3] == expected["predictions"]


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ("x" * (1 << 18) + "x", ": expected text of at most 262144 bytes in UTF-8, got 262145"),
        (5, ": expected a string, like the first row, got 5"),
        ({"text": None}, ".text: expected a string, like the first row, got null"),
        ({"body": "good"}, ".text: expected a string, got no such column"),
        (
            {"text": "good", "stars": 1},
            ".stars: expected only the column text, got an unknown column",
        ),
    ],
)
def test_error_names_row_without_text(client, row, detail):
    for path, field in (("/predict", "inputs"), ("/acquire", "pool")):
        answer = client.post(path, json={field: ["good", row]})
        assert (answer.status_code, answer.json()["detail"]) == (422, f"{field}.1{detail}")


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (
            [0] * 6 + [VOCABULARY],
            f"inputs.1.6: expected an integer id from 0 to {VOCABULARY - 1}, got ",
        ),
        ([0] * 6 + [-1], "inputs.1.6: expected an integer id"),
        ([1.5] + [0] * 6, "inputs.1.0: expected an integer id"),
        ([0] * 6, "inputs.1: expected an array of 7 (rows have shape (7,), or are"),
    ],
)
def test_error_names_position_of_invalid_id(client, row, detail):
    answer = predict(client, [[0] * 7, row])
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)
    if len(row) == 7:
        body = npy_bytes(np.array([[0.0] * 7, row]))
        answer = client.post(
            "/predict", content=body, headers={"Content-Type": "application/x-npy"}
        )
        assert answer.json()["detail"].startswith(detail)


def test_invalid_unicode_is_refused(client):
    answer = client.post("/predict", files=[("inputs", ("a.txt", b"\xff\xfe"))])
    assert answer.json()["detail"] == "inputs.0: expected text in UTF-8, got other bytes"
    answer = client.post(
        "/predict", content=b'{"inputs": ["\\ud800"]}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422


def test_pools_of_strings_are_ranked(client):
    rows = texts(6)[0]
    answer = client.post("/acquire", json={"pool": rows, "ids": list("abcdef"), "k": 3, "seed": 1})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["ranking"]) == 3


def test_texts_are_explained_only_by_detectors(client):
    (actual,) = predict(client, ["the film was good"], explain=True).json()["predictions"]
    explanation = actual["explanation"]
    empty = ("attributed", "map", "nearest", "columns", "unseen", "missing")
    assert {name: explanation[name] for name in empty} == dict.fromkeys(empty)
    assert explanation["detectors"].keys() == {"entropy", "feature_neighbours"}


def test_version_includes_tokenizer_for_evaluation_and_calibration(client, folder, capsys):
    manifest = client.get("/models/reviews").json()["manifest"]
    assert manifest["input"]["text"]["max_tokens"] == TOKENS
    assert (manifest["input"]["dtype"], manifest["input"]["maximum"]) == ("int32", VOCABULARY - 1)
    assert manifest["detectors"]["density"] == ["feature_neighbours"]
    assert {"tokenizer.json"} == manifest["files"].keys() & {
        "tokenizer.json",
        "training-rows.safetensors",
    }
    write_reviews(folder, 200)  # other rows
    (folder / "reviews.csv").rename(folder / "later.csv")
    (folder / "tokenizer.json").unlink()
    (folder / "other.csv").write_text("text\n" + "rain on friday\n" * 30)
    extra = ["--outliers", "weather=csv:other.csv"]
    assert (
        main(["evaluate", "reviews", "--data", "csv:later.csv", "--quiet", "--rows", "40", *extra])
        == 0
    )

    words = set(capsys.readouterr().out.split())
    assert {f"{name}_flag_auroc" for name in ("uniform", "crossed", "weather")} <= words
    calibrate = ["calibrate", "reviews", "--data", "csv:later.csv", "--target", "label"]
    assert main([*calibrate, "--reference-rows", "40", "--ranking-rows", "60"]) == 0


@pytest.mark.slow
def test_module_with_id_inputs_can_be_an_encoder(folder):
    write_reviews(folder)
    network = {"hidden": [], "encoder": "tests.support.texts:MeanEmbedding"}
    data = {**DATA, **SIZES, "max_tokens": TOKENS}
    settings = {"training": {"epochs": 2, "batch_rows": 16}, "serving": {"draws": 10}}
    recipe = write_recipe(folder, name="encoded", data=data, network=network, **settings)
    assert main(["fit", str(recipe), "--quiet"]) == 0
    store = ModelStore(folder / "models")
    model = Model.load(store.open("encoded", "1", NEEDED))
    assert (model.encoder.spec.outputs, model.manifest.input.takes_ids) == (8, True)
    assert "mahalanobis" in model.manifest.detectors.density
    assert model.training_rows is not None
    ids = get_ids(texts(5, seed=2)[0]).astype(np.float32)
    rows, head = model.encoder(ids), open_parent(store, "encoded", "model").model().eval()
    module = MeanEmbedding((TOKENS,))
    module.embedding.weight.data.copy_(
        torch.from_numpy(get_embedding(folder / "models" / "encoded" / "1"))
    )
    expected = module(torch.from_numpy(ids).long())
    np.testing.assert_allclose(rows, expected.detach().numpy(), atol=1e-5)
    theta = model.runtime.draw(3, 0, 4)
    outputs, _ = model.runtime.run(ids, theta[:, None])
    logits, _ = head.network(torch.from_numpy(rows), torch.from_numpy(theta[:, None]))
    np.testing.assert_allclose(outputs, head.likelihood(logits).detach().numpy(), atol=1e-4)


def get_embedding(version):
    """Return the embedding matrix of a version's encoder."""
    graph = onnx.load(version / "encoder.onnx").graph
    (embedding,) = [
        numpy_helper.to_array(t) for t in graph.initializer if tuple(t.dims) == (VOCABULARY, 8)
    ]
    return embedding.copy()
