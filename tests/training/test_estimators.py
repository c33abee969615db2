import copy
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from torch import nn

from dubito import Classifier, Client, Regressor
from model_store.artifacts.store import ModelStore
from tests.support.environment import environment_with
from tests.support.texts import MeanEmbeddingNetwork, texts, tokenizer
from training.estimators.recipes import _seed, make_recipe, write_rows
from training.versions import fitted_data, open_parent

pytestmark = pytest.mark.usefixtures("fits")

SMALL = {"network": {"hidden": [8]}, "device": "cpu"}
QUICK = {**SMALL, "method": "mle", "training": {"epochs": 20, "learning_rate": 0.05}}
BAYESIAN = {**SMALL, "method": "bhn-realnvp", "training": {"epochs": 2}}
FEW_CLASSES = {"serving": {"draws": 5, "combined": ["entropy", "residual"]}}
FEW_TARGETS = {"serving": {"draws": 5, "combined": ["epistemic_std", "residual"]}}
TWO_DRAWS = {"serving": {"draws": 2, "combined": ["residual"]}}

# Known deviations from scikit-learn (docs/python.md)
TOO_FEW = "a fit needs at least 20 rows"
EXPECTED = {
    "check_n_features_in_after_fitting": TOO_FEW,
    "check_classifier_data_not_an_array": TOO_FEW,
    "check_regressors_no_decision_function": TOO_FEW,
    "check_fit2d_1feature": TOO_FEW,
}
WITHOUT_FITS = (
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_estimators_unfitted",
    "check_mixin_order",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
    "check_complex_data",
    "check_estimators_empty_data_messages",
    "check_estimator_sparse_tag",
    "check_estimator_sparse_array",
    "check_fit1d",
    "check_fit2d_1sample",
    "check_requires_y_none",
    "check_supervised_y_no_nan",
)


def create_frame(count=240):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(generator.normal(size=(count, 2)), columns=["height", "weight"])
    frame["city"] = generator.choice(["Rome", "Oslo"], count)
    frame["since"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(count) * 37 % 211, "D")
    frame.loc[::7, "weight"] = np.nan
    return frame


X = create_frame()
Y = pd.Series(np.where(X.height > 0, "tall", "small"), name="size")


@pytest.fixture(scope="module")
def classifier(fits):
    return Classifier(**BAYESIAN, **FEW_CLASSES, random_state=3).fit(X, Y)


@pytest.fixture(scope="module")
def regressor(fits):
    return Regressor(**BAYESIAN, **FEW_TARGETS).fit(X, 3 * X.height)


@pytest.fixture(scope="module")
def service(classifier, regressor, tmp_path_factory):
    """Create a client of a service with both published models."""
    from tests.support.serving import serving

    store = tmp_path_factory.mktemp("published")
    classifier.publish("sizes", store, anyway=True)
    regressor.publish("heights", store, anyway=True)
    with serving(store) as (url, _), Client(url) as client:
        yield client


def test_predictions_equal_service_predictions_bit_for_bit(classifier, regressor, service):
    request = X.head(40)
    for model, name, seed in ((classifier, "sizes", None), (regressor, "heights", 11)):
        options = {"seed": 3 if seed is None else seed, "fpr": 0.1}
        result = service.predict(request, model=name, **options)
        output = model.uncertainty(request, seed=seed, fpr=0.1)
        pd.testing.assert_frame_equal(
            output, result.to_pandas(index=request.index), check_exact=True, check_like=True
        )
        if name == "sizes":
            class_probs = dict(zip(result.classes, result.probabilities.T, strict=True))
            probs = model.predict_proba(request)
            assert (probs == np.stack([class_probs[c] for c in model.classes_], 1)).all()
            assert (model.predict(request) == result.label).all()
        else:
            assert (model.predict(request, seed=seed) == result.mean).all()


def test_missing_value_is_filled_and_flagged(classifier, service):
    columns = {column.name: column for column in classifier._model.manifest.input.columns}
    usual = columns["city"].usual
    request = X.head(2).assign(city=[None, usual])
    output = classifier.uncertainty(request, fpr=0.1)
    filled = classifier.uncertainty(X.head(2).assign(city=usual), fpr=0.1)
    assert output.missing.tolist() == ["city", ""]
    assert output.flag.iloc[0]
    assert output.drop(columns=["missing", "flag"]).equals(filled.drop(columns=["missing", "flag"]))
    response = service.predict(request.assign(size="tall"), model="sizes", seed=3, fpr=0.1)
    assert response.missing_columns() == [["city"], []]
    assert response.to_pandas().missing.tolist() == ["city", ""]
    log_proba = classifier.predict_log_proba(request)
    assert np.array_equal(log_proba, np.log(classifier.predict_proba(request)))


def test_parameters_and_inputs_follow_scikit_learn():
    model = Classifier(training={"epochs": 3, "batch_rows": 8}).set_params(training__epochs=5)
    assert clone(model).training == {"epochs": 5, "batch_rows": 8}
    with pytest.raises(ValueError, match="steps__a: expected a key of data, network"):
        model.set_params(steps__a=1)
    assert _seed(7) == 7 and _seed(None) != _seed(None)
    matrix = sparse.csr_array(np.eye(4))
    y = pd.Series([True, False] * 2, dtype="boolean")
    rows, classes = model._validate(matrix, y, reset=True)
    assert np.array_equal(rows, np.eye(4))
    assert classes.dtype == bool


def test_json_rows_get_same_predictions_from_service(classifier, service):
    row = {"height": 0.25, "weight": None, "city": "Rome", "since": "2024-03-05"}
    response = service.predict([row], model="sizes", seed=3, fpr=0.1)
    request = pd.DataFrame([row]).astype({"since": "datetime64[ns]", "weight": float})
    assert (classifier.predict_proba(request) == response.probabilities).all()
    assert response.classes == tuple(classifier.classes_)


def test_polars_frames_are_accepted(classifier):
    assert (classifier.predict_proba(pl.from_pandas(X)) == classifier.predict_proba(X)).all()


def test_arrays_become_numeric_columns_and_callback_gets_each_epoch(tmp_path):
    numbers, history = X[["height", "weight"]].to_numpy(), []
    model = Regressor(**QUICK, **TWO_DRAWS, callback=history.append, runs=tmp_path)
    model.set_params(data={"validation": 30})
    target = 1e9 + 3 * numbers[:, 0]  # The differences are too small for float32.
    assert model.fit(numbers, target).score(numbers, target) > 0.5
    assert [metrics["epoch"] for metrics in history] == [*range(1, 21)]
    assert history == model.history_
    model.publish("kept", tmp_path / "models", anyway=True)
    version = open_parent(ModelStore(tmp_path / "models"), "kept", "kept")
    assert len(fitted_data(version, tmp_path).rows) == len(numbers)
    data = model.recipe_.data
    assert data.columns == {"x0": "numeric", "x1": "numeric"}
    assert data.validation == 30


def test_recipe_is_completed_with_defaults_for_rows(classifier):
    recipe = classifier.recipe_
    assert (recipe.method, recipe.training.epochs, recipe.seed) == ("bhn-realnvp", 2, 3)
    assert (recipe.network.hidden, recipe.training.batch_rows) == ([8], 32)
    assert (recipe.data.test_fraction, recipe.data.target) == (0.2, "size")


def test_fit_to_noise_causes_only_this_warning(caplog):
    generator = np.random.default_rng(1)
    model = Classifier(**QUICK, **TWO_DRAWS)
    unnamed_target = pl.Series(generator.integers(0, 2, 200))
    with caplog.at_level("INFO"):
        model.fit(generator.normal(size=(200, 9)), unnamed_target)
    assert "than always '" in caplog.text
    assert "column y" not in caplog.text
    assert {record.name.partition(".")[0] for record in caplog.records} == {"dubito"}
    assert "than always &#39;" in model._repr_html_()


def test_max_inputs_limits_network_to_most_important_columns():
    network = {"hidden": [8], "bins": 4, "max_inputs": 1}
    model = Classifier(**{**QUICK, "network": network}, **TWO_DRAWS).fit(X, Y)
    assert model.score(X, Y) > 0.9
    changed = X.assign(city="Oslo", weight=1.0)
    np.testing.assert_array_equal(model.predict_proba(changed), model.predict_proba(X))


@pytest.mark.slow
def test_image_arrays_are_accepted():
    images = np.random.default_rng(0).normal(size=(60, 4, 4))
    model = Classifier(**QUICK, **TWO_DRAWS).fit(images, images[:, 0, 0] > 0)
    assert model.recipe_.data.source.startswith("npz:rows-")
    assert model.predict(images).dtype == bool


def train(network, x, y):
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()


@pytest.mark.slow
def test_trained_network_gets_laplace_posterior():
    numbers = np.random.default_rng(0).normal(size=(240, 2))
    classes = torch.tensor(numbers[:, 0] > 0).long()
    x = torch.tensor(numbers, dtype=torch.float32)
    network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    train(network, x, classes)
    model = Classifier(start=network, device="cpu", **FEW_CLASSES).fit(numbers, classes.numpy())
    assert (model.recipe_.method, model.history_) == ("laplace", [])
    assert (network(x).argmax(1).numpy() == model.predict(numbers)).mean() > 0.95
    assert model.uncertainty(numbers, fpr=0.1).bald.max() > 0


@pytest.mark.slow
def test_texts_are_accepted_with_network_and_tokenizer(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    reviews, labels = texts(80)
    torch.manual_seed(0)
    network = MeanEmbeddingNetwork((12,), 2)
    ids = torch.tensor([[*tokens, *[0] * (12 - len(tokens))] for tokens in map(get_ids, reviews)])
    train(network, ids, torch.tensor([label == "good" for label in labels]).long())
    data = {"text": "review", "tokenizer": tmp_path / "tokenizer.json", "max_tokens": 12}
    small = {"serving": {"draws": 5, "combined": ["entropy"]}}
    model = Classifier(start=network, data=data, device="cpu", **small)
    frame = pd.DataFrame({"review": reviews})
    model.fit(frame, np.array(labels) == "good")
    network_labels = network(ids).argmax(1).bool().numpy()
    assert (model.predict(frame) == network_labels).mean() > 0.9
    with pytest.raises(ValueError, match=r"X\.1: expected a value in column review"):
        model.predict(pd.DataFrame({"review": ["a day", None]}))


def get_ids(text):
    return tokenizer().encode(text).ids


def test_copied_estimator_gives_same_predictions_and_publishes(regressor, tmp_path):
    duplicate = copy.deepcopy(regressor)
    assert (duplicate.predict(X) == regressor.predict(X)).all()
    manifest = duplicate.publish("again", tmp_path, anyway=True)
    assert ModelStore(tmp_path).versions("again") == [manifest.version]


def test_notebook_repr_shows_table(classifier):
    html = classifier._repr_html_()
    assert "test_accuracy" in html
    assert "test_accuracy" not in clone(classifier)._repr_html_()
    assert "<pre>on test rows" in classifier.report()


@pytest.mark.parametrize(
    ("parameters", "options", "message"),
    [
        ({"method": "magic"}, {}, "Classifier: method: "),
        ({"network": {"hidden": [8], "deep": True}}, {}, "network.deep: expected no such key"),
        ({"data": {"depth": 3}}, {}, "depth"),
        ({"data": {"target": "city"}}, {}, "data.target: expected no value, because X and y"),
        ({"random_state": "7"}, {}, "cannot be used to seed"),
        ({"start": "hf:minilm"}, {}, "start: expected a torch.nn.Module, got 'hf:minilm'"),
        ({}, {"num_samples": 0}, "num_samples: expected 1"),
        ({}, {"fpr": 1e-4}, "fpr: expected at least 0.0"),
        ({}, {"coverage": 1.0}, "coverage: expected a number between 0 and 1"),
        ({}, {"seed": -1}, "seed: expected 0 to"),
    ],
)
def test_invalid_parameters_and_options_are_named(classifier, parameters, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        if parameters:
            clone(classifier).set_params(**parameters).fit(X, Y)
        else:
            classifier.uncertainty(X, **options)


def test_unicode_forms_of_label_are_one_class():
    with pytest.raises(ValueError, match="expected two classes or more, got 1 class"):
        Classifier().fit(np.arange(60).reshape(30, 2), ["caf\u00e9", "cafe\u0301"] * 15)


def test_constant_columns_are_rejected(classifier):
    with pytest.raises(ValueError, match="X: expected a column with different values"):
        clone(classifier).fit(np.ones((60, 2)), np.arange(60) % 2)


def test_sample_weights_affect_fit_and_are_validated(classifier):
    numbers = X[["height", "weight"]].to_numpy()
    wrong = np.random.default_rng(0).random(len(Y)) < 0.6
    labels = np.where(wrong, "small", Y)
    model = Classifier(**QUICK, **TWO_DRAWS)
    weighted = model.fit(numbers, labels, sample_weight=1.0 - wrong).score(numbers, Y)
    assert weighted > model.fit(numbers, labels).score(numbers, Y) + 0.1
    with pytest.raises(ValueError, match=r"data\.weight: expected numbers of at least 0"):
        clone(classifier).fit(X, Y, np.full(len(Y), -1.0))
    with pytest.raises(ValueError, match="sample_weight: expected none"):
        clone(classifier).fit(np.zeros((60, 4, 4)), np.arange(60) % 2, np.ones(60))


def test_large_data_uses_smaller_test_fraction(classifier):
    rows = X.iloc[np.arange(2_000) % len(X)].reset_index(drop=True)
    targets = Y.iloc[np.arange(2_000) % len(X)].reset_index(drop=True)
    model = clone(classifier).set_params(training={"epochs": 1}).fit(rows, targets)
    assert model.recipe_.data.test_fraction == 0.05
    assert len(model._result.splits.test) == 100


def test_grouped_rows_keep_default_test_share(classifier):
    index = np.arange(1_998) % len(X)
    rows = X.iloc[index].reset_index(drop=True).assign(site=np.arange(1_998) % 18)
    model = clone(classifier).set_params(training={"epochs": 1}, data={"group": "site"})
    model.fit(rows, Y.iloc[index].reset_index(drop=True))
    assert len(model._result.splits.test) == 333


def test_invalid_rows_are_named(classifier):
    with pytest.raises(ValueError, match=r"X\.0\.since: expected a date or time"):
        classifier.predict(X.head(3).assign(since="soon"))
    with pytest.raises(ValueError, match="Feature names"):
        classifier.predict(X[["height"]])
    with pytest.raises(ValueError, match="at least 20 rows, got 12"):
        clone(classifier).fit(X.head(12), Y.head(12))


@pytest.mark.slow
def test_pipelines_can_be_cross_validated():
    numbers = X[["height", "weight"]].to_numpy()
    steps = make_pipeline(StandardScaler(), Regressor(**QUICK, **TWO_DRAWS))
    assert np.isfinite(cross_val_score(steps, numbers, 3 * numbers[:, 0], cv=2)).all()


@pytest.mark.slow
def test_grid_search_selects_best_training_parameters():
    steps = make_pipeline(StandardScaler(), Regressor(**QUICK, **TWO_DRAWS))
    grid = {"regressor__training": [{"epochs": 1}, QUICK["training"]]}
    numbers = X[["height"]].to_numpy()
    actual = GridSearchCV(steps, grid, cv=2).fit(numbers, 3 * numbers[:, 0])
    assert actual.best_params_ == {"regressor__training": QUICK["training"]}


CHECKED = [Classifier(**QUICK, **TWO_DRAWS), Regressor(**QUICK, **TWO_DRAWS)]


@pytest.mark.slow
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda _: EXPECTED)
def test_estimator_passes_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(CHECKED[0], id="Classifier"),
        pytest.param(CHECKED[1], id="Regressor", marks=pytest.mark.slow),
    ],
)
def test_estimator_passes_scikit_learn_parameter_checks(estimator):
    generated = [check for _, check in estimator_checks_generator(estimator)]
    checks = {getattr(check, "func", check).__name__: check for check in generated}
    for name in WITHOUT_FITS:
        checks[name](clone(estimator))


def test_import_is_light_and_missing_training_names_extras():
    code = (
        "import sys\n"
        "import dubito\n"
        "assert not {'httpx', 'numpy', 'sklearn'} & {*sys.modules}\n"
        "from dubito import Classifier\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'pydantic', 'PIL'} & {*sys.modules}\n"
        "sys.modules['training.estimators'] = None\n"
        "try: from dubito import Regressor\n"
        "except ImportError as error: print(error)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment_with()
    )
    assert "pip install 'dubito[cpu,training]'" in output.stdout, output.stderr
    with pytest.raises(AttributeError):
        __import__("dubito").Nothing  # noqa: B018


def test_explicit_epochs_disable_early_stopping(tmp_path):
    X = np.random.default_rng(0).normal(size=(300, 3))
    parameters = Classifier(training={"epochs": 2}).get_params(deep=False)
    section = write_rows(X, (X[:, 0] > 0).astype(str), "y", None, parameters, tmp_path)
    recipe = make_recipe("classification", parameters, section, tmp_path)
    assert (recipe.training.epochs, recipe.training.early_stopping) == (2, False)
