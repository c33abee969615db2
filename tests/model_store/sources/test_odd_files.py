import warnings

import numpy as np
import orjson
import pytest

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, TooLarge
from model_store.sources.files import check_ids, open_rows
from model_store.sources.rows import RowReader
from model_store.sources.text import TextEncoder
from service.api.acquire import preview_rows
from tests.support.files import CSV, ENDINGS, npz_bytes, parquet_bytes, zip_bytes
from tests.support.kinds import PICTURES, TEXTS
from tests.support.odd_files import bad_utf8, damage_files, odd_files
from tests.support.texts import tokenizer

AGE = {"kind": "numeric", "name": "age", "mean": 50.0, "std": 20.0, "indicator": False}
CITY = {"kind": "categorical", "name": "city", "categories": ["Rome"]}
TIME = {"kind": "time", "name": "when", "mean": 0.0, "std": 1e8, "indicator": False}
SPECS = [
    InputSpec.model_validate({"minimum": 0, "maximum": 255, **spec})
    for spec in (
        {"shape": [64]},
        {"shape": [1]},
        {"shape": [64], "dtype": "int32"},
        {"shape": [3], "columns": [AGE, CITY]},
        {"shape": [4], "columns": [AGE, CITY, TIME]},
        PICTURES,
        TEXTS,
    )
]
FLAT, PEOPLE = SPECS[0], SPECS[4]
X = np.zeros((4, 64), dtype=np.float32)
COLUMNS = {"age": [1.0] * 4, "city": ["Rome"] * 4, "when": ["2024-05-01"] * 4}


@pytest.fixture(scope="module")
def encoder():
    assert SPECS[-1].text is not None
    return TextEncoder(tokenizer().to_str().encode(), SPECS[-1].text)


def read(media_type, content, spec, encoder=None):
    try:
        file = open_rows(content, spec, "pool", ENDINGS[media_type])
        preview = [file.read_as, file.ignored, preview_rows(file, [0, 1, 9])]
        ids = file.ids()
        if ids is not None:
            check_ids(ids, file.rows)
        orjson.dumps([preview, ids], option=orjson.OPT_SERIALIZE_NUMPY)
        assert len(RowReader(spec, "pool", encoder=encoder).read_all(file)) == file.rows
    except (InvalidInput, TooLarge) as error:
        orjson.dumps(str(error))
        assert len(str(error)) < 2000


def test_odd_files_are_read_or_refused(encoder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, (kind, media_type, content) in enumerate(odd_files()[::2]):
            try:
                read(media_type, content, SPECS[i % len(SPECS)], encoder)
            except Exception as error:
                raise AssertionError(kind) from error


@pytest.mark.slow
@pytest.mark.parametrize("spec", range(len(SPECS)))
def test_odd_and_damaged_files_are_read_or_refused_for_every_spec(spec, encoder):
    files = odd_files()
    for kind, media_type, content in [*files, *damage_files(files, 3000, spec)]:
        try:
            read(media_type, content, SPECS[spec], encoder)
        except Exception as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("city", bad_utf8("string"), "pool.city: expected UTF-8 text"),
        ("when", np.array([2**60] * 4, "<M8[us]"), "pool.when: expected UTF-8 text, times up"),
        ("id", bad_utf8("string"), "id: expected UTF-8 text"),
        ("id", np.array([2**60] * 4, "<M8[us]"), "id: expected UTF-8 text, times up"),
    ],
)
def test_values_without_a_python_type_are_refused_by_column(column, values, message):
    content = parquet_bytes({**COLUMNS, column: values})
    with pytest.raises(InvalidInput, match=f"^{message}"):
        file = open_rows(content, PEOPLE, "pool", ".parquet")
        file.ids()
        next(iter(file.parts()))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array(["a", "b\udc80", "c", "d"]), "got another type in row 1"),
        (np.array([b"a", b"b", b"\xff", b"d"]), "got another type in row 2"),
        (np.array([0x110000] * 4, "<u4").view("<U1"), "expected Unicode text"),
    ],
)
def test_ids_that_are_not_unicode_are_refused(ids, message):
    file = open_rows(npz_bytes(x=X, ids=ids), FLAT, "pool", ".npz")
    with pytest.raises(InvalidInput, match=f"^ids: .*{message}"):
        file.ids()


def test_zip_with_file_names_that_are_not_utf_8_is_refused():
    content = bytearray(zip_bytes({"aaa.txt": b"a"}).replace(b"aaa", b"\xed\xa0\x80"))
    content[content.find(b"PK\x01\x02") + 9] |= 0x08
    with pytest.raises(InvalidInput, match="pool: expected a whole zip file"):
        open_rows(bytes(content), SPECS[-1], "pool", ".zip")


def test_list_of_ignored_columns_is_limited():
    names = ",".join(f"{i}{'a' * 100}" for i in range(3000))
    row = ",".join(["1"] * 3000)
    content = f"age,city,{names}\n1,Rome,{row}\n".encode()
    file = open_rows(content, SPECS[3], "pool", ENDINGS[CSV])
    assert len(file.ignored) == 1000
    assert {len(name) for name in file.ignored} == {80}
