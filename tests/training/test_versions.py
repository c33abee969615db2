import pytest

from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from training.versions import Provenance, read_recipe


def test_provenance_round_trip_keeps_content_and_order(digits_store):
    manifest = ModelStore(digits_store).manifest("digits", "1")
    facts = Provenance.of(manifest).content()
    assert facts == manifest.training
    assert list(facts) == list(manifest.training)


def test_provenance_omits_defaults_and_keeps_unknown_keys():
    content = {"recipe": {"alpha": None}, "data_digest": "d", "of_another_day": [1, None]}
    assert Provenance.model_validate(content).content() == content


def test_recipe_with_removed_key_is_rejected(digits_store):
    manifest = ModelStore(digits_store).manifest("digits", "1")
    recipe = manifest.training["recipe"]
    recipe = {**recipe, "data": {**recipe["data"], "validation_rows": 120}}
    old = manifest.model_copy(update={"training": {**manifest.training, "recipe": recipe}})
    with pytest.raises(InvalidInput, match=r"only current keys, got .*: data\.validation_rows$"):
        read_recipe(old, "model")
    assert read_recipe(manifest, "model").name == "digits"
