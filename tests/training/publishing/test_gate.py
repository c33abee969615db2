import re
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from model_store.artifacts.manifest import FileSpec, InputSpec, TextSpec
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from tests.support.recipes import get_recipe, recipe_with, write_recipe
from tests.support.refusals import assert_invalid
from training.__main__ import main
from training.data import load as load_data
from training.data.arrays import digits
from training.data.rows import Rows
from training.evaluation.pairs import describe_loss
from training.evaluation.quality import measure
from training.publishing.draft import Draft, GateError
from training.publishing.publish import check_gate, encode_rows_for
from training.recipe import load

POSTERIOR = {"couplings": 2, "hidden": 8}


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys, fits):
    monkeypatch.setenv("DUBITO_STORE", str(tmp_path / "models"))
    monkeypatch.setenv("DUBITO_RUNS", str(tmp_path / "runs"))

    def run(epochs, rate, max_loss):
        training = {
            "epochs": epochs,
            "batch_rows": 32,
            "learning_rate": rate,
            "final_learning_rate": rate,
        }
        gate = {"metrics": {"test_accuracy": max_loss, "uniform_noise_flagged_at_05": 1.0}}
        path = write_recipe(
            tmp_path, name="gated", posterior=POSTERIOR, training=training, gate=gate
        )
        code = main(["fit", str(path), "--quiet", "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


def test_worse_version_is_published_only_with_laxer_gate(fit, tmp_path):
    store = ModelStore(tmp_path / "models")
    code, _, message = fit(4, 1e-2, 0.0)
    assert code == 0
    assert "no alias champion yet" in message
    store.set_alias("gated", "champion", "1")
    code, _, errors = fit(1, 1e-9, 0.05)
    assert code == 1
    best = store.manifest("gated", "1").quality["test_accuracy"]
    lines = errors[errors.index("error: ") :].splitlines()
    assert len(lines) == 2, errors
    assert "champion (version 1)" in lines[0]
    assert "test_accuracy" in lines[1]
    assert f"against {best:.6g} of champion (version 1) on the same 359 rows" in lines[1]
    assert re.search(
        r"worse by 0\.\d+ \(95 % interval 0\.\d+ to 0\.\d+\), allowed 0.05",
        lines[1],
    )
    assert store.versions("gated") == ["1"]
    assert len(list(tmp_path.glob("runs/*/checkpoint.safetensors"))) == 1
    code, _, message = fit(1, 1e-9, 1.0)
    assert code == 0
    assert "resuming from step" in message
    assert "no clear loss in test_accuracy: " in message
    assert (
        "no worse than champion (version 1) in test_accuracy, uniform_noise_flagged_at_05"
        in message
    )
    assert store.versions("gated") == ["1", "2"]


def test_negative_loss_is_described_as_improvement():
    assert describe_loss(0.0115, (-0.02, 0.05)) == "worse by 0.0115 (95 % interval -0.02 to 0.05)"
    assert describe_loss(-0.0115, (-0.05, 0.02)) == "better by 0.0115 (95 % interval -0.02 to 0.05)"


def test_measuring_matches_classes_by_name(writable_store, digits_rows):
    model = Model.load(writable_store.open("digits", "1", files=NEEDED))
    rows = digits().test.take(np.arange(40))
    classes = model.manifest.classes
    expected = measure(model, rows, digits(), 3).figures
    reliable = expected["test_reliable_accuracy"]
    assert 20 < len(reliable.row_values) < 40
    assert reliable.value >= expected["test_accuracy"].value
    order = np.random.default_rng(0).permutation(10)
    renamed = replace(digits(), classes=(*(classes[c] for c in order), "ten"))
    actual = measure(model, Rows(rows.x, np.argsort(order)[rows.y]), renamed, 3).figures
    for name, figure in expected.items():
        if "calibration_error" not in name:
            assert actual[name].value == pytest.approx(figure.value), name


def test_rows_of_classes_unknown_to_version_count_as_wrong(writable_store):
    model = Model.load(writable_store.open("digits", "1", files=NEEDED))
    data = replace(digits(), classes=(*model.manifest.classes, "ten"))
    figures = measure(model, Rows(data.test.x[:40], np.full(40, 10)), data, 3).figures
    assert figures["test_accuracy"].value == figures["test_reliable_accuracy"].value == 0.0


def test_table_rows_are_encoded_for_columns_of_another_version(writable_store, tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.normal(3, 2, 80), generator.integers(0, 2, 80)
    lines = [f"{value:.6f},{'ab'[label]}" for value, label in zip(x, y, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["value,label", *lines]))
    recipe = get_recipe("csv:table.csv", target="label")
    data = load_data(recipe, tmp_path)
    draft = Draft(
        writable_store.manifest("digits", "1").model_copy(update={"input": data.input}), {}
    )
    column = data.columns[0].model_copy(update={"mean": 1.0, "std": 0.5})
    for columns, expected in (
        ((column,), "encoded"),
        (data.columns, "as they are"),
        ((), "not at all"),
    ):
        input_spec = data.input.model_copy(update={"columns": columns})
        manifest = writable_store.manifest("digits", "1").model_copy(update={"input": input_spec})
        actual = encode_rows_for(manifest, recipe, draft, data.test, tmp_path)
        if expected == "encoded":
            raw = data.test.x * data.columns[0].std + data.columns[0].mean
            np.testing.assert_allclose(actual.x, (raw - 1.0) / 0.5, rtol=1e-5)
            assert np.array_equal(actual.y, data.test.y)
        else:
            assert actual is (data.test if expected == "as they are" else None)
    unknown = data.input.model_copy(
        update={"columns": (column.model_copy(update={"name": "another"}),)}
    )
    manifest = writable_store.manifest("digits", "1").model_copy(update={"input": unknown})
    assert encode_rows_for(manifest, recipe, draft, data.test, tmp_path) is None


def test_text_rows_are_reused_only_with_same_tokenizer_and_settings(published, tmp_path):
    text = TextSpec(column="text", max_tokens=4, pad_id=0)
    input_spec = InputSpec(shape=(4,), dtype="int32", minimum=0, maximum=9, text=text)
    test = Rows(np.zeros((3, 4), dtype=np.float32), np.zeros(3, dtype=np.int64))
    published = published.manifest("m", "1")
    draft = Draft(published.model_copy(update={"input": input_spec}), {"tokenizer.json": b"one"})
    longer = input_spec.model_copy(update={"text": text.model_copy(update={"truncation": "left"})})
    for candidate_spec, content, expected in (
        (input_spec, b"one", test),
        (input_spec, b"another", None),
        (longer, b"one", None),
        (input_spec.model_copy(update={"text": None}), b"one", None),
    ):
        files = {"tokenizer.json": FileSpec(sha256=sha256(content).hexdigest(), size=len(content))}
        manifest = published.model_copy(update={"input": candidate_spec, "files": files})
        assert encode_rows_for(manifest, get_recipe("digits"), draft, test, tmp_path) is expected


def test_gate_rejects_versions_with_another_input_format(writable_store):
    manifest = writable_store.manifest("digits", "1")
    writable_store.set_alias("digits", "champion", "1")
    wider = manifest.input.model_copy(update={"shape": (9, 9)})
    draft = Draft(manifest.model_copy(update={"input": wider}), {})
    recipe = recipe_with(gate={"metrics": {"test_accuracy": 0.01}})
    with pytest.raises(GateError, match="takes rows of another format"):
        check_gate(recipe, digits(), writable_store, "digits", draft)


@pytest.mark.parametrize(
    "gate",
    [
        {},
        {"metrics": {}},
        {"metrics": {"accuracy": 0.0}},
        {"metrics": {"test_accuracy": -0.1}},
        {"against": "a b", "metrics": {"test_accuracy": 0.0}},
        {"worse": 1, "metrics": {"test_accuracy": 0.0}},
    ],
)
def test_invalid_gate_is_named_in_error(tmp_path, gate):
    path = write_recipe(tmp_path, gate=gate)
    assert_invalid(lambda: load(path), "gate")
