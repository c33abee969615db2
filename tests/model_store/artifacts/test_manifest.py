import pytest
from pydantic import ValidationError

from model_store.artifacts import manifest
from model_store.artifacts.manifest import InputSpec


def test_columns_that_do_not_fill_a_row_are_refused():
    column = {"name": "a", "kind": "categorical", "categories": ["x", "y"]}
    spec = {"minimum": 0, "maximum": 255, "columns": [column]}
    assert InputSpec.model_validate({**spec, "shape": [3]}).shape == (3,)
    with pytest.raises(ValidationError, match="columns: expected columns that fill"):
        InputSpec.model_validate({**spec, "shape": [2]})


# Defaults of fields that a manifest can omit (model_store/README.md). They must not change, because
# published versions rely on them.
DEFAULTS = {
    "ImageSpec.resize": False,
    "ImageSpec.fit": "stretch",
    "ImageSpec.interpolation": "bilinear",
    "TextSpec.truncation": "right",
    "TextSpec.padding": "right",
    "NumberStyle.sign": "",
    "NumberStyle.is_share": False,
    "NumberStyle.decimal": ".",
    "InputSpec.dtype": "float32",
    "CategoricalColumn.indicator": False,
    "DetectorSpec.ranking_copies": 0,
    "DetectorSpec.rows_per_draw_set": 1,
    "Description.precision": "float32",
}


def test_defaults_of_omitted_fields_do_not_change():
    records = [
        item
        for item in vars(manifest).values()
        if isinstance(item, type) and issubclass(item, manifest.Record)
    ]
    optional = {
        f"{record.__name__}.{name}": field.default
        for record in records
        for name, field in record.model_fields.items()
        if name != "kind" and not field.is_required() and record is not manifest.Manifest
    }
    defaults = {name: value for name, value in optional.items() if value not in (None, (), {})}
    assert defaults == DEFAULTS
