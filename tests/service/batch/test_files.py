import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from model_store.artifacts.manifest import InputSpec
from model_store.artifacts.objects import Objects
from model_store.errors import InvalidInput
from model_store.sources.parquet import ParquetFile
from service.batch.files import BucketFiles, LocalFiles, Stopped

SPEC = InputSpec(shape=(8,), minimum=-10, maximum=10)
ROWS = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)


@pytest.fixture(params=["folder", "bucket"])
def location(request, tmp_path, monkeypatch):
    if request.param == "folder":

        def put(name, content):
            path = tmp_path / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        (tmp_path / "data").mkdir()
        return LocalFiles(tmp_path / "data", "out"), put
    memory = MemoryStore()
    monkeypatch.setattr(
        Objects, "from_url", classmethod(lambda cls, url, field: Objects(url, memory))
    )
    return BucketFiles("s3://bucket/data", "out"), memory.put


def parquet_bytes(**options):
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"id": [f"r{i}" for i in range(1000)], "x": list(ROWS)}), sink, **options
    )
    return sink.getvalue().to_pybytes()


def test_parquet_files_are_listed_by_name_without_hidden_files(location):
    files, put = location
    for name in (
        "b.parquet",
        "a.parquet",
        "a/c.parquet",
        "_SUCCESS",
        "_tmp/d.parquet",
        ".e.parquet",
        "f.csv",
    ):
        put(name, name.encode())
    assert [file.name for file in files.data()] == ["a.parquet", "a/c.parquet", "b.parquet"]
    assert [file.size for file in files.data()] == [9, 11, 9]


@pytest.mark.parametrize(
    "options", [{}, {"row_group_size": 130}, {"row_group_size": 130, "compression": "zstd"}]
)
def test_any_range_of_rows_can_be_read(location, options):
    files, put = location
    put("rows.parquet", parquet_bytes(**options))
    (data_file,) = files.data()
    pool = ParquetFile(files.open(data_file), SPEC, "source")
    for first, rows in ((0, 1000), (390, 130), (129, 2), (999, 1), (0, 1), (500, 333)):
        batches = list(pool.batches(first, rows))
        assert [position for position, _ in batches] == [
            first + n for n in np.cumsum([0, *(len(b) for _, b in batches)])[:-1]
        ]
        assert np.array_equal(
            np.concatenate([pool.part(batch, position) for position, batch in batches]),
            ROWS[first : first + rows],
        )
        names = [name for _, batch in batches for name in batch.column(1).to_pylist()]
        assert names == [f"r{i}" for i in range(first, first + rows)]


def test_changed_file_is_not_read(location):
    files, put = location
    put("rows.parquet", parquet_bytes())
    (data_file,) = files.data()
    before = files.open(data_file)
    put("rows.parquet", parquet_bytes(row_group_size=10))
    with pytest.raises(
        InvalidInput, match=r"^source: expected rows\.parquet unchanged since the job began"
    ):
        ParquetFile(files.open(data_file), SPEC, "source")
    if isinstance(files, BucketFiles):
        with pytest.raises(InvalidInput, match=r"^source: expected rows\.parquet unchanged"):
            ParquetFile(before, SPEC, "source")


def test_created_files_are_never_overwritten(location):
    files, _ = location
    files.check_output()
    assert files.read("deep/part") is None
    assert files.create("deep/part", b"first")
    assert not files.create("deep/part", b"second")
    assert files.read("deep/part") == b"first"
    assert files.names() == {"deep/part"}


def test_leftover_drafts_are_hidden_and_cleared(tmp_path):
    files = LocalFiles(tmp_path, "out")
    files.create("part", b"first")
    (tmp_path / ".draft-1").write_bytes(b"half")
    assert files.names() == {"part"}
    files.clear()
    assert list(tmp_path.iterdir()) == [tmp_path / "part"]


def test_bucket_without_conditional_writes_is_rejected(monkeypatch):
    class UnconditionalStore:
        def __init__(self):
            self.memory = MemoryStore()

        def put(self, path, content, mode="overwrite"):
            return self.memory.put(path, content)

        def __getattr__(self, name):
            return getattr(self.memory, name)

    monkeypatch.setattr(
        Objects, "from_url", classmethod(lambda cls, url, field: Objects(url, UnconditionalStore()))
    )
    with pytest.raises(
        InvalidInput, match=r"^out: expected a bucket with conditional writes, got one that"
    ):
        BucketFiles("s3://bucket/out", "out").check_output()


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"^out: expected a writable folder"):
        LocalFiles(tmp_path / "file" / "out", "out").check_output()
    with pytest.raises(Stopped, match=r"^out: cannot create part in .*: File exists$"):
        LocalFiles(tmp_path / "file", "out").create("part", b"")
