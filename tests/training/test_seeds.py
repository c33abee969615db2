import ast
from enum import IntEnum

from experiments.active.protocol import ActiveStream
from tests.support.environment import ROOT
from training import seeds
from training.seeds import hash_key

ENUMERATIONS = {
    name: value for name, value in vars(seeds).items() if name[0].isupper() and value is not IntEnum
} | {"ActiveStream": ActiveStream}
KEYED = {
    "hash_key": 1,
    "generator": 1,
    "noise": 3,
    "_order": 2,
}


def test_hash_key_is_unique_and_fits_every_generator():
    keys = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (2**53 - 1,), (2**53 - 1, 5, 10**6)]
    keys += [
        (seed, stream, step) for seed in range(10) for stream in range(6) for step in range(200)
    ]
    hashes = [hash_key(*key) for key in keys]
    assert len(set(hashes)) == len(keys)
    assert all(0 <= value < 2**63 for value in hashes)


def test_streams_have_unique_values():
    for streams in ENUMERATIONS.values():
        values = [member.value for member in streams.__members__.values()]
        assert len(set(values)) == len(values)
    assert len(ENUMERATIONS) == 4


def test_every_key_names_its_stream():
    streams = [
        stream
        for folder in ("training", "experiments/active")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for stream in find_streams(path)
    ]
    unnamed = [location for location, enumeration in streams if enumeration not in ENUMERATIONS]
    assert not unnamed
    assert len(streams) > 15


def find_streams(path):
    tree = ast.parse(path.read_text())
    foreign = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("model_store")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in KEYED.keys() - foreign:
            stream = node.args[KEYED[node.func.id] :][:1]
            if stream and not isinstance(stream[0], ast.Starred):
                yield (
                    f"{path.relative_to(ROOT)}:{node.lineno}",
                    getattr(getattr(stream[0], "value", None), "id", None),
                )
