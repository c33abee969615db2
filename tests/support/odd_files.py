"""Unusual, invalid and damaged files of rows."""

import random
import struct
import zipfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tests.support.files import (
    CSV,
    NPY,
    NPZ,
    PARQUET,
    ZIP,
    npy_bytes,
    npy_header,
    npz_bytes,
    parquet_bytes,
    zip_bytes,
)

ROWS = 4
OddFile = tuple[str, str, bytes]
LONE_SURROGATE = "a\udc80b"
FAR = 2**62  # after the year 9999 in any unit except nanoseconds
DTYPES = (
    *("?", "i1", "u1", "<i2", ">i4", "<u8", ">i8", "<f2", ">f4", "<f8", "<f16", "<c8", "<c16"),
    *("S3", "<U3", ">U3", "S0", "<U0", "V4", "<M8[ns]", "<M8[Y]", "<M8", "<m8[s]", "<m8"),
    *("O", [("x", "<f4")], [("x", "<f4", (64,))], [("x", "O")], ("<f4", (3,))),
)
SHAPES = ((), (0,), (4,), (4, 64), (4, 8, 8), (0, 64), (4, 0), (1,) * 33, (4, 1, 64), (64, 4))
FALSE_SHAPES = (
    *((10**9, 64), (2**63, 64), (2**64, 1), (-1, 64), (4, -64), (2**32, 2**32, 64), (1e9, 64)),
    *((True, 64), ("4", 64), (None, 64), 4, [4, 64], (4, (64,)), {}, (10**400,), (0, 2**62)),
)


def arrow_arrays() -> Iterator[tuple[str, pa.Array]]:
    numbers = [1, None, 3, 0]
    for kind in (pa.int8(), pa.uint64(), pa.int64(), pa.float16(), pa.float32(), pa.float64()):
        yield str(kind), pa.array([1, 2, 3, 0]).cast(kind)
        yield f"{kind} with null", pa.array(numbers, pa.int64()).cast(kind)
    yield "largest uint64", pa.array([2**64 - 1] * ROWS, pa.uint64())
    yield "largest int64", pa.array([2**63 - 1, -(2**63), 0, 1])
    yield "not finite", pa.array([float("nan"), float("inf"), -float("inf"), 1e308])
    yield "bool", pa.array([True, None, False, True])
    yield "null", pa.nulls(ROWS)
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        yield str(kind), pa.array(["Rome", None, "", "1,200.50"], kind)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)):
        yield str(kind), pa.array([b"\xff\xfe", None, b"\0\0", b"ab"], kind)
    yield "bad UTF-8", bad_utf8("string")
    yield "bad UTF-8, large", bad_utf8("large_string")
    dictionary = bad_utf8("string")
    yield (
        "bad UTF-8, dictionary",
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3]), dictionary),
    )
    yield "dictionary", pa.array(["Rome", "Oslo", None, "Rome"]).dictionary_encode()
    yield "dictionary of numbers", pa.array([1, 2, None, 1]).dictionary_encode()
    for unit in ("s", "ms", "us", "ns"):
        for zone in (None, "UTC", "Europe/Rome", "+05:30", "Mars/Olympus", "+99:99", "x" * 300):
            yield f"timestamp[{unit}, {zone}]", pa.array([0, 1, None, 2], pa.timestamp(unit, zone))
        times = [FAR, -FAR, 0, 1] if unit == "us" else [FAR // 10**6, -(FAR // 10**6), 0, 1]
        yield f"far timestamp[{unit}]", pa.array(times, pa.timestamp(unit))
        yield f"far timestamp[{unit}, UTC]", pa.array(times, pa.timestamp(unit, "UTC"))
        yield (
            f"far timestamp[{unit}, Asia/Tokyo]",
            pa.array(times, pa.timestamp(unit, "Asia/Tokyo")),
        )
        yield f"duration[{unit}]", pa.array([0, 1, None, FAR], pa.duration(unit))
    yield "near the year 9999", pa.array([253402300799] * 4, pa.timestamp("s", "Asia/Tokyo"))
    yield "date32", pa.array([0, None, 2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32())
    yield "date64", pa.array([0, None, 86_400_000 * 10**8, 0]).cast(pa.date64())
    yield "time32", pa.array([0, None, 1, 2], pa.time32("s"))
    yield "time64 longer than a day", pa.array([86_400 * 10**7, None, -1, 2]).cast(pa.time64("us"))
    yield "time64[ns]", pa.array([1, None, 10**18, 2]).cast(pa.time64("ns"))
    yield "decimal128", pa.array([1, None, 3, 4]).cast(pa.decimal128(38, 10))
    yield "decimal256", pa.array([10**60, None, 3, 4], pa.decimal256(76, 10))
    yield "list", pa.array([[1.0], None, [], [1.0, None]])
    yield "list of 64", pa.array([[0.0] * 64] * ROWS, pa.list_(pa.float32()))
    yield "list of 64 with null", pa.array([[0.0] * 64] * 3 + [[None] * 64])
    yield "list of 64, last missing", pa.array([[0.0] * 64] * 3 + [None], pa.list_(pa.float32()))
    yield (
        "fixed list of 64",
        pa.array([[0] * 64, None, [1] * 64, [2] * 64], pa.list_(pa.int8(), 64)),
    )
    yield "large list", pa.array([[0] * 64] * ROWS, pa.large_list(pa.int64()))
    yield "list of lists", pa.array([[[0.0] * 8] * 8] * ROWS)
    yield "list of ragged lists", pa.array([[[0.0] * 60, [0.0] * 4]] * 3 + [[None]])
    yield "list of missing lists", pa.array([[[0.0] * 64, None]] * ROWS)
    yield "list of booleans", pa.array([[True] * 64] * ROWS)
    yield "list of texts", pa.array([["a"] * 64] * ROWS)
    yield "list of times", pa.array([[FAR] * 64] * ROWS, pa.list_(pa.timestamp("us")))
    yield "map", pa.array([[("a", 1)], None, [], [("b", 2)]], pa.map_(pa.string(), pa.int8()))
    yield "struct", pa.array([{"a": 1}, None, {"a": 2}, {"a": None}])
    yield "struct of bytes", pa.array([{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b""}])
    yield "struct of number bytes", pa.array([{"bytes": 1}] * ROWS)
    yield "struct of far time", pa.array([{"t": FAR}] * ROWS, pa.struct({"t": pa.timestamp("us")}))
    yield "struct of bad UTF-8", pa.StructArray.from_arrays([bad_utf8("string")], names=["a"])
    yield (
        "extension",
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * ROWS, pa.binary(16))),
    )
    yield "json", pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"] * ROWS))
    yield "bool8", pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1] * ROWS, pa.int8()))
    tensor = pa.fixed_shape_tensor(pa.float32(), (8, 8))
    flat = pa.array([[0.0] * 64] * ROWS, pa.list_(pa.float32(), 64))
    yield "tensor", pa.ExtensionArray.from_storage(tensor, flat)


def bad_utf8(name: str) -> pa.Array:
    kind, wide = (pa.large_string(), pa.large_binary())
    if name == "string":
        kind, wide = pa.string(), pa.binary()
    array = pa.array([b"\xff", b"\xed\xa0\x80", b"Rome", b"a\0b"], wide)
    return pa.Array.from_buffers(kind, ROWS, array.buffers())


def odd_parquet() -> Iterator[OddFile]:
    lists = pa.array([[0.0] * 64] * ROWS, pa.list_(pa.float32()))
    ages, cities = pa.array([1.0, 2.0, None, 3.0]), pa.array(["Rome", "Oslo", None, "Bonn"])
    images = pa.array([b"no image"] * ROWS)
    for kind, column in arrow_arrays():
        tables = {
            "only column": {"x": column},
            "as ids": {"id": column, "x": lists},
            "as ids of people": {"id": column, "age": ages, "city": cities},
            "as ids of texts": {"id": column, "text": cities},
            "as numbers": {"age": column, "city": cities, "when": ages},
            "as categories": {"age": ages, "city": column, "when": ages},
            "as times": {"age": ages, "city": cities, "when": column},
            "as texts": {"text": column},
            "as images": {"image": column},
            "ignored": {"id": pa.array(range(ROWS)), "x": lists, "image": images, "other": column},
        }
        for role, columns in tables.items():
            try:
                content = parquet_bytes(columns, compression="none")
            except (pa.ArrowException, OverflowError):
                continue
            yield f"Parquet, {kind} {role}", PARQUET, content
    plain = {"id": pa.array(list("abcd")), "x": lists}
    for name in ("", "\0", "a.b", "x" * 100_000, "\u202e", "é\u0301"):
        yield f"Parquet, a column {name[:9]!r}", PARQUET, parquet_bytes({name: lists, "id": lists})
        yield f"Parquet, other {name[:9]!r}", PARQUET, parquet_bytes({**plain, name: ages})
    duplicate = pa.Table.from_arrays([lists, lists], names=["x", "x"])
    yield "Parquet, duplicate column", PARQUET, parquet_bytes(duplicate)
    ids = pa.Table.from_arrays([cities, cities, lists], names=["id", "id", "x"])
    yield "Parquet, duplicate ids", PARQUET, parquet_bytes(ids)
    yield "Parquet, no columns", PARQUET, parquet_bytes(pa.table({}))
    yield "Parquet, no rows", PARQUET, parquet_bytes(pa.table(plain).slice(0, 0))
    yield "Parquet, 3,000 columns", PARQUET, parquet_bytes({f"c{i}": ages for i in range(3000)})
    full = parquet_bytes(plain)
    yield "Parquet, bad name", PARQUET, full.replace(b"x", b"\xff")
    yield "Parquet, bad schema", PARQUET, full.replace(b"ARROW:schema", b"ARROW:schemb")
    yield "Parquet, footer of 2 GB", PARQUET, full[:-8] + b"\xff\xff\xff\x7fPAR1"
    yield "Parquet, encrypted", PARQUET, full[:-4] + b"PARE"


def odd_arrays() -> Iterator[OddFile]:
    x = np.zeros((ROWS, 64), dtype=np.float32)
    for dtype in DTYPES:
        for shape in SHAPES:
            try:
                content = npy_bytes(np.zeros(shape, dtype=dtype))
            except ValueError:  # objects or too many dimensions
                content = npy_header(shape, dtype) + bytes(64)
            kind = f"{dtype} of shape {shape}"[:80]
            yield f"npy, {kind}", NPY, content
            yield f"npz, {kind}", NPZ, npz_bytes(x=content)
            if len(shape) < 2:
                yield f"npz, ids {kind}", NPZ, npz_bytes(x=x, ids=content)
    for shape in FALSE_SHAPES:
        for dtype in ("<f4", "<U9", "|V0", "<U0"):
            content = npy_header(shape, dtype)
            yield f"npy, false {dtype} {shape}"[:80], NPY, content
            yield f"npz, false {dtype} {shape}"[:80], NPZ, npz_bytes(x=content)
            yield f"npz, false ids {dtype} {shape}"[:80], NPZ, npz_bytes(x=x, ids=content)
    for fortran in (True, 2, "no", None):
        content = npy_header((ROWS, 64), "<f4", fortran) + x.tobytes()
        yield f"npy, order {fortran}", NPY, content
        yield f"npz, order {fortran}", NPZ, npz_bytes(x=content)
    for dtype in ("nonsense", "<f4,<f4", "(64,)f4", "<f99", "", [], {}, None, "<M8[7D]", "V" * 99):
        yield f"npy, dtype {dtype}", NPY, npy_header((ROWS, 64), dtype) + x.tobytes()
        yield f"npz, dtype {dtype}", NPZ, npz_bytes(x=npy_header((ROWS, 64), dtype) + x.tobytes())
    odd_ids = {
        "lone surrogates": np.array([LONE_SURROGATE, "b", "c", "d"]),
        "bad UTF-8": np.array([b"\xff", b"b", b"c", b"d"]),
        "zeros": np.array(["a\0b", "b", "c", "d"]),
        "empty": np.array(["", "b", "c", "d"]),
        "duplicates": np.array(["a", "a", "b", "c"]),
        "big endian": np.array(list("abcd"), dtype=">U1"),
        "control": np.array(["\n\r\x1b[2J", "b", "c", "d"]),
    }
    for kind, ids in odd_ids.items():
        yield f"npz, ids {kind}", NPZ, npz_bytes(x=x, ids=ids)
    no_letters = struct.pack("<4I", 0x110000, 0xFFFFFFFF, 0xD800, 1)
    header = npy_header((4,), "<U1")
    yield "npz, ids beyond Unicode", NPZ, npz_bytes(x=x, ids=header + no_letters)
    yield "npz, NaN", NPZ, npz_bytes(x=np.full((ROWS, 64), np.nan))
    yield "npz, two arrays", NPZ, npz_bytes(a=x, b=x)
    yield (
        "npz, odd names",
        NPZ,
        zip_bytes(
            {"../x.npy": npy_bytes(x), "\udcff.npy".encode("utf-8", "replace").decode(): b""}
        ),
    )
    yield "npz, no arrays", NPZ, zip_bytes({"readme": b""})
    yield "npz, empty", NPZ, zip_bytes({})
    yield "npz, bzip2", NPZ, zip_bytes({"x.npy": npy_bytes(x)}, zipfile.ZIP_BZIP2)
    yield "npz, lzma", NPZ, zip_bytes({"x.npy": npy_bytes(x)}, zipfile.ZIP_LZMA)
    full = npz_bytes(x=x, ids=np.array(list("abcd")))
    for position in range(0, len(full), 4):  # flip one byte
        yield (
            f"npz, byte {position}",
            NPZ,
            full[:position] + bytes([full[position] ^ 0xFF]) + full[position + 1 :],
        )


def odd_texts() -> Iterator[OddFile]:
    contents = {
        "empty": b"",
        "byte order mark": b"\xef\xbb\xbf",
        "zeros": b"age,city\n\0,\0\n",
        "bad UTF-8": b"age,city,text\n1,\xff,\xfe\n",
        "UTF-16": "age,city,text\n1,Rome,a\n".encode("utf-16"),
        "truncated UTF-16": "age,city,text\n1,Rome,a\n".encode("utf-16")[:-1],
        "lone surrogates": "age,city,text,id\n1,\ud800,\udc00,\ud800\n".encode(
            "utf-16", "surrogatepass"
        ),
        "UTF-8 of surrogates": "age,city,text,id\n1,a,\ud800,\ud800\n".encode(
            "utf-8", "surrogatepass"
        ),
        "open quote": b'age,city,text\n1,"Rome,a\n',
        "long line": b"age,city,text\n1,Rome," + b"a" * (1 << 20) + b"\n",
        "cell too long": b"age,city,text\n1,Rome," + b"a" * ((1 << 24) + 1) + b"\n",
        "duplicate columns": b"age,age,city,text,text\n1,1,Rome,a,b\n",
        "numbers with many digits": b"age,city,text\n" + b"9" * 5000 + b",Rome,a\n",
        "infinite and invalid numbers": b"age,city,text\nnan,inf,a\ninf,-inf,b\n1e999,\xc2\xb2,c\n",
        "distant times": b"age,city,when\n1,Rome,9999-12-31T23:59:59-23:59\n1,Rome,0001-01-01T00:00+23:59\n",
        "other digits": "age,city,when,text\n١٢,Rome,٢٠٢٤-٠١-٠١,a\n".encode(),
        "ids": b"id,age,city,text\n\x00,1,Rome,a\n,2,Rome,a\n",
        "carriage returns": b"age,city,text\r1,Rome,a\r",
        "blank lines": b"age,city,text\n\n\n1,Rome,a\n\n",
    }
    for kind, content in contents.items():
        yield f"CSV, {kind}", CSV, content


def odd_zips() -> Iterator[OddFile]:
    members = {
        "odd names": {"/": b"a", "..": b"a", "../../etc/passwd": b"a", "a\0b": b"a"},
        "texts": {"a.txt": b"a", "b.txt": b"\xff", "c.txt": b""},
        "long name": {"a" * 60_000: b"a"},
        "empty": {},
        "folders": {"a/": b"", "b/": b""},
        "system files": {"__MACOSX/a": b"a", ".hidden": b"a"},
    }
    for kind, files in members.items():
        yield f"zip, {kind}", ZIP, zip_bytes(files)
    full = zip_bytes({"a.png": b"\x89PNG\r\n\x1a\n" + bytes(50), "b.txt": b"a" * 50})
    for position in range(0, len(full), 2):
        yield (
            f"zip, byte {position}",
            ZIP,
            full[:position] + bytes([full[position] ^ 0xFF]) + full[position + 1 :],
        )
    for position in range(0, len(full), 3):
        yield f"zip, cut at {position}", ZIP, full[:position]
    end = full.rfind(b"PK\x05\x06")
    for name, position, size in (("entries", 8, 2), ("size", 12, 4), ("place", 16, 4)):
        for value in (0, 1, 2 ** (8 * size) - 1):
            field = value.to_bytes(size, "little")
            content = full[: end + position] + field + full[end + position + size :]
            yield f"zip, {name} {value}", ZIP, content
    surrogate = zip_bytes({"aaa.txt": b"a"}).replace(b"aaa", b"\xed\xa0\x80")
    yield "zip, name that is not UTF-8", ZIP, surrogate
    flagged = bytearray(surrogate)
    for mark, position in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        flagged[flagged.find(mark) + position + 1] |= 0x08
    yield "zip, name flagged as UTF-8", ZIP, bytes(flagged)
    flagged[flagged.find(b"PK\x01\x02") + 8] |= 1
    yield "zip, encrypted", ZIP, bytes(flagged)


def odd_files() -> list[OddFile]:
    """Return all files, in a deterministic order."""
    files = [*odd_parquet(), *odd_arrays(), *odd_texts(), *odd_zips()]
    base = files[:: len(files) // 12]
    kinds = (NPY, NPZ, PARQUET, ZIP, CSV)
    return files + [(f"{name} as {kind}", kind, file) for name, _, file in base for kind in kinds]


def damage_files(files: list[OddFile], count: int, seed: int) -> Iterator[OddFile]:
    rng = random.Random(seed)
    for _ in range(count):
        name, media_type, content = rng.choice(files)
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            if not changed:
                break
            position, n = rng.randrange(len(changed)), rng.choice((1, 1, 2, 4, 16))
            filler = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80", rng.randbytes(1)))
            kind = rng.randrange(4)
            if kind == 0:
                changed[position : position + n] = filler * len(changed[position : position + n])
            elif kind == 1:
                del changed[position : position + n]
            elif kind == 2:
                changed[position:position] = changed[position : position + 8 * n] * rng.choice(
                    (1, 2, 50)
                )
            else:
                donor = rng.choice(files)[2]
                changed[position : position + 64] = donor[-min(len(donor), 64) :]
        yield f"damaged {name}", media_type, bytes(changed)
