import os

import pytest

from model_store.errors import InvalidInput
from tests.support.recipes import write_recipe
from training.detectors import COMBINED
from training.recipe import load, override

RECIPE = """
name = "a"
method = "bhn-realnvp"
seed = 3
[data]
source = "digits"
validation = 10
reference = 20
ranking = 30
[network]
hidden = [8, 8]
[posterior]
couplings = 2
[training]
epochs = 5
learning_rate = 1e-2
[serving]
draws = 50
"""


def write(folder, content=RECIPE):
    path = folder / "recipe.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def recipe(tmp_path):
    return load(write(tmp_path))


def test_recipe_is_loaded_with_defaults(recipe):
    assert (recipe.name, recipe.method, recipe.seed) == ("a", "bhn-realnvp", 3)
    assert recipe.network.hidden == [8, 8]
    assert recipe.posterior.couplings == 2
    assert recipe.posterior.prior_std == 1.0
    assert recipe.training.batch_rows == 128
    assert recipe.combined == ["entropy", *COMBINED]


def test_default_detectors_depend_on_images_and_encoder(recipe):
    assert override(recipe, source="images:pets").combined == [
        "entropy",
        *COMBINED,
        "roughness",
    ]
    encoded = recipe.model_copy(
        update={"network": recipe.network.model_copy(update={"encoder": "nets:encoder"})}
    )
    assert encoded.combined == ["entropy", "residual", "mahalanobis", "cosine_neighbours"]


def test_every_recipe_in_repository_is_valid(request):
    root = request.config.rootpath
    paths = [
        path
        for folder in ("recipes", "experiments/recipes")
        for path in (root / folder).glob("*.toml")
    ]
    assert [load(path).name for path in paths] == [path.stem for path in paths]
    assert paths


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("seed = 3", "sead = 3", "sead"),
        ("couplings = 2", "couplings = 2\nlayers = 3", "posterior.layers"),
        ("epochs = 5", 'epochs = "5"', "training.epochs"),
        ("epochs = 5", "epochs = 5.0", "training.epochs"),
        ("epochs = 5", "epochs = true", "training.epochs"),
        ("epochs = 5", "epochs = 0", "training.epochs"),
        ("epochs = 5", "patience = 0", "training.patience"),
        ("seed = 3", "seed = true", "seed"),
        ("seed = 3", "seed = -1", "seed"),
        ("seed = 3", f"seed = {2**53}", "seed"),
        ("1e-2", "0.0", "training.learning_rate"),
        ("1e-2", "nan", "training.learning_rate"),
        ("1e-2", "inf", "training.learning_rate"),
        ("1e-2", "true", "training.learning_rate"),
        ("1e-2", '1e-2\nkl_ramp_epochs = "1"', "training.kl_ramp_epochs"),
        ("1e-2", "1e-2\nkl_ramp_epochs = inf", "training.kl_ramp_epochs"),
        ("couplings = 2", "couplings = -1", "posterior.couplings"),
        ("couplings = 2", "initial_log_std = 3.0", "posterior.initial_log_std"),
        ("couplings = 2", "prior_std = -1.0", "posterior.prior_std"),
        ("[8, 8]", "[8, 0]", "network.hidden.1"),
        ("[8, 8]", "8", "network.hidden"),
        ("[network]\nhidden = [8, 8]\n", "", "network"),
        ("draws = 50", "draws = 1", "serving.draws"),
        ("draws = 50", "draws = 1001", "serving.draws"),
        ("draws = 50", 'combined = ["entropy", "energy"]', "serving.combined.1"),
        ("draws = 50", "combined = []", "serving.combined"),
        ("draws = 50", 'calibration = "colour"', "serving.calibration"),
        ("draws = 50", 'calibration = "group"', "serving.calibration"),
        ("bhn-realnvp", "bhn", "method"),
        ('"a"', '"../a"', "name"),
        ('"a"', '"a\\n"', "name"),
        ('"a"', '""', "name"),
        ("validation = 10", "validation = 0", "data.validation"),
        ("validation = 10", "validation = 0.5", "data.validation"),
        ("validation = 10", "validation = true", "data.validation"),
        ("ranking = 30", "vocabulary = 1", "data.vocabulary"),
        ("ranking = 30", "class_weights = { a = 0.0 }", "data.class_weights.a"),
        ("ranking = 30", 'group = "a"\ntime = "b"', "data.time"),
        ("ranking = 30", "max_tokens = 5", "data.max_tokens"),
        ("[8, 8]", '[8, 8]\nkind = "lenet"', "network.kind"),
        ("[8, 8]", "[8, 8]\nstandardise = { mean = [0.5] }", "network.standardise.std"),
        ("epochs = 5", "early_stopping = true", "training.early_stopping"),
        ("draws = 50", 'precision = "int4"', "serving.precision"),
    ],
)
def test_invalid_field_is_named(tmp_path, old, new, field):
    assert old in RECIPE
    path = write(tmp_path, RECIPE.replace(old, new))
    with pytest.raises(InvalidInput) as error:
        load(path)
    assert error.value.field == f"{path}: {field}"
    assert "\n" not in str(error.value)


def test_error_lists_valid_types_of_key(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"data\.vocabulary: expected a valid integer or 'auto', got"
    ):
        load(write(tmp_path, RECIPE.replace("ranking = 30", 'vocabulary = "all"')))


def test_missing_field_and_unknown_key_have_different_errors(tmp_path):
    with pytest.raises(InvalidInput, match="name: expected a value, got nothing"):
        load(write(tmp_path, RECIPE.replace('name = "a"\n', "")))
    with pytest.raises(InvalidInput, match="sead: expected no such key, got 3"):
        load(write(tmp_path, RECIPE.replace("seed = 3", "sead = 3")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECIPE.replace("seed = 3", "seed = = 3"), "line 4"),
        (RECIPE + "[data]\n", "line 19"),
        (
            RECIPE.encode() + b"# caf\xe9\n",
            f"TOML in UTF-8, got .* byte 0xe9 in position {len(RECIPE) + 5}",
        ),
    ],
)
def test_invalid_toml_is_rejected_with_position(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(InvalidInput, match=message) as error:
        load(path)
    assert error.value.field == str(path)


def test_missing_file_and_folder_are_rejected(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(InvalidInput, match="Is a directory"):
        load(tmp_path)


def test_digest_depends_on_values_not_layout(tmp_path, recipe):
    reordered = (
        RECIPE.replace("[network]\nhidden = [8, 8]\n", "")
        + "# a remark\n[network]\nhidden = [\n 8, 8]\n"
    )
    assert load(write(tmp_path, reordered)).digest() == recipe.digest()
    assert (
        load(write(tmp_path, RECIPE.replace("epochs = 5", "epochs = 6"))).digest()
        != recipe.digest()
    )


def test_command_line_overrides_file(recipe):
    changed = override(recipe, name="b", seed=0, source="idx:x")
    assert (changed.name, changed.seed, changed.data.source) == ("b", 0, "idx:x")
    assert override(recipe) == recipe


@pytest.mark.parametrize("options", [{"name": "a" + os.sep + "b"}, {"seed": -1}])
def test_invalid_option_is_named(recipe, options):
    (field,) = options
    with pytest.raises(InvalidInput) as error:
        override(recipe, **options)
    assert error.value.field == f"command line: {field}"


REGRESSION = [("bhn-realnvp", 'bhn-realnvp"\ntask = "regression')]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            [("draws = 50", 'draws = 50\n[likelihood]\nnoise = "heteroscedastic"')],
            "likelihood.noise",
        ),
        (
            [*REGRESSION, ("draws = 50", 'draws = 50\n[likelihood]\nnoise = "none"')],
            "likelihood.noise",
        ),
        ([("draws = 50", 'combined = ["residual", "std"]')], "serving.combined.1"),
        ([*REGRESSION, ("draws = 50", 'combined = ["bald"]')], "serving.combined.0"),
        ([*REGRESSION, ("draws = 50", 'calibration = "class"')], "serving.calibration"),
        ([*REGRESSION, ("draws = 50", 'precision = "int8"')], "serving.precision"),
        ([*REGRESSION, ("draws = 50", "risk = 0.01")], "serving.risk"),
    ],
)
def test_option_of_another_task_is_named(tmp_path, changes, field):
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(InvalidInput) as error:
        load(write(tmp_path, text))
    assert str(error.value.field).endswith(f": {field}")


def test_regression_has_default_detectors_and_noise(tmp_path):
    ((old, new),) = REGRESSION
    recipe = load(write(tmp_path, RECIPE.replace(old, new)))
    assert recipe.combined == ["epistemic_std", *COMBINED]
    assert recipe.likelihood.noise == "homoscedastic"


def test_paths_resolve_in_recipe_folder_then_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes, data, elsewhere = (tmp_path / name for name in ("near", "data", "elsewhere"))
    for folder in (recipes, data, elsewhere):
        folder.mkdir()
    network = {"factory": "mynets:net", "weights": "w.safetensors", "trained": ["0"]}
    path = write_recipe(recipes, data={"source": "csv:rows.csv", "target": "y"}, network=network)

    def get_paths():
        recipe = load(path, data)
        return recipe.data.source, recipe.network.weights

    assert get_paths() == ("csv:rows.csv", "w.safetensors")
    (tmp_path / "w.safetensors").touch()
    (data / "rows.csv").touch()
    digest = load(path, data).digest()
    assert get_paths() == ("csv:rows.csv", "w.safetensors")
    (data / "w.safetensors").touch()
    assert get_paths() == ("csv:rows.csv", str(data / "w.safetensors"))
    for name in ("rows.csv", "w.safetensors"):
        (recipes / name).touch()
    assert get_paths() == (f"csv:{recipes / 'rows.csv'}", str(recipes / "w.safetensors"))
    assert load(path, data).digest() != digest
    monkeypatch.chdir(recipes)
    assert load(path, recipes).digest() == digest
