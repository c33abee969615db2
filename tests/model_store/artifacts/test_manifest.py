import pytest
from pydantic import ValidationError

from model_store.artifacts import manifest
from model_store.artifacts.manifest import LARGEST_ID, InputSpec

GREY = {"shape": (4, 6), "minimum": 0, "maximum": 255}
IDS = {"shape": (5,), "dtype": "int32", "minimum": 2, "maximum": 9}
TEXT = {"column": "text", "max_tokens": 5, "pad_id": 2}
CROP = {"mode": "L", "resize": True, "fit": "crop"}


@pytest.mark.parametrize(
    "spec",
    [
        {**GREY, "image": {"mode": "L"}},
        {**GREY, "shape": (3, 4, 6), "image": {"mode": "RGB"}},
        {**GREY, "image": {**CROP, "shorter": 6}},
        {
            **GREY,
            "shape": (3,),
            "columns": [{"name": "a", "kind": "categorical", "categories": ["x", "y"]}],
        },
        IDS,
        {**IDS, "minimum": 0, "maximum": LARGEST_ID},
        {**IDS, "minimum": 9},
        {**IDS, "text": TEXT},
        {**IDS, "text": {**TEXT, "pad_id": 9}},
    ],
)
def test_rows_that_are_described_alike_in_all_parts_are_accepted(spec):
    assert InputSpec.model_validate(spec).shape == spec["shape"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({**GREY, "shape": (24,), "image": {"mode": "L"}}, "image: expected a shape"),
        ({**GREY, "shape": (4, 4, 6), "image": {"mode": "RGB"}}, "image: expected a shape"),
        ({**GREY, "shape": (3, 4, 6), "image": {"mode": "L"}}, "image.mode: expected L"),
        ({**GREY, "image": {"mode": "RGB"}}, "image.mode: expected L"),
        ({**GREY, "image": {**CROP, "shorter": 5}}, "image.shorter: expected at least the longer"),
        ({**GREY, "image": CROP}, "shorter: expected a number of pixels with"),
        ({**GREY, "image": {**CROP, "shorter": 6, "resize": False}}, "shorter: expected a number"),
        ({**GREY, "image": {"mode": "L", "resize": True, "shorter": 6}}, "shorter: expected"),
        (
            {
                **GREY,
                "shape": (2,),
                "columns": [{"name": "a", "kind": "categorical", "categories": ["x", "y"]}],
            },
            "columns",
        ),
        ({**IDS, "minimum": -1}, "minimum, maximum: expected whole numbers"),
        ({**IDS, "minimum": 0.5}, "minimum, maximum: expected whole numbers"),
        ({**IDS, "maximum": LARGEST_ID + 1}, "minimum, maximum: expected whole numbers"),
        ({**IDS, "minimum": 10}, "minimum, maximum: expected whole numbers"),
        ({**IDS, "shape": (4, 6), "image": {"mode": "L"}}, "dtype: expected float32 of images"),
        ({**IDS, "text": {**TEXT, "max_tokens": 6}}, "text: expected int32 and a shape"),
        ({**IDS, "dtype": "float32", "text": TEXT}, "text: expected int32 and a shape"),
        ({**IDS, "text": {**TEXT, "pad_id": 1}}, "text.pad_id: expected 2 to 9"),
        ({**IDS, "text": {**TEXT, "pad_id": 10}}, "text.pad_id: expected 2 to 9"),
    ],
)
def test_rows_that_are_described_in_parts_that_do_not_go_together_are_refused(spec, says):
    with pytest.raises(ValidationError, match=says):
        InputSpec.model_validate(spec)


# What a reader takes where a manifest does not say it, as model_store/README.md has it: versions
# stay as they were.
UNSAID = {
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
    "DetectorSpec.tail": "predictive",
    "DetectorSpec.scores_version": 3,
    "Description.precision": "float32",
}


def test_what_a_manifest_does_not_say_means_what_it_meant_before_it_could_be_said():
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
    message = {name: value for name, value in optional.items() if value not in (None, (), {})}
    assert message == UNSAID
