import onnx_ir
import pytest
import torch
from torch import nn

from tests.support.recipes import recipe_with
from training.export import exporter
from training.export.exporter import export_graph, folder, structure
from training.export.graphs import export
from training.export.served import served_network
from training.methods import METHODS
from training.model import build, initialise
from training.networks.local import localise

pytestmark = pytest.mark.usefixtures("fits")
ROWS = {"x": {0: torch.export.Dim("rows")}}
X = (torch.zeros(3, 4),)
SMALL = {
    "bhn-iaf": {"couplings": 1, "hidden": 4},
    "bhn-realnvp": {"couplings": 1, "hidden": 4},
    "bhn-weights": {"couplings": 1, "hidden": 4},
    "variational-hypernet": {"hidden": 4},
    "ensemble": {"members": 2},
}


@pytest.fixture(autouse=True)
def _separate_graphs(monkeypatch, tmp_path):
    monkeypatch.setenv("DUBITO_GRAPHS", str(tmp_path / "graphs"))
    monkeypatch.setattr(exporter, "_in_memory", {})


def get_graphs(method: str, seed: int) -> dict[str, bytes]:
    recipe = recipe_with(
        method=method, network={"hidden": [5]}, posterior=SMALL.get(method, {}), seed=seed
    )
    model = build(recipe, (4,), 3).eval()
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
    initialise(model, x)
    localised = localise(model, x)
    network = served_network(localised, x, seed, names=("feature_neighbours",))
    return export(localised, network, joint=model)


@pytest.mark.parametrize(
    "method", [m if m == "dropout" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_cached_graph_with_new_weights_equals_fresh_export(method, monkeypatch):
    first = get_graphs(method, 0)
    with monkeypatch.context() as changes:
        changes.setattr(torch.onnx, "export", None)  # A second export would fail.
        cached = get_graphs(method, 1)
    with monkeypatch.context() as changes:
        changes.setattr("training.export.exporter.export_program", _export_by_torch)
        new = get_graphs(method, 1)
    assert cached["network.onnx"] != first["network.onnx"]
    assert cached == new


def _export_by_torch(module, inputs, dynamic_shapes):
    shapes = tuple(dynamic_shapes.values())
    return torch.onnx.export(
        module, inputs, dynamo=True, opset_version=20, dynamic_shapes=shapes, verbose=False
    )


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * float(self.layer.bias[0])


def get_model(activation="tanh", **layer):
    layers = nn.Linear(4, 4, **layer), getattr(nn, "Tanh" if activation == "tanh" else "ReLU")()
    return nn.Sequential(*layers, nn.LeakyReLU(0.1))


def test_structure_changes_with_anything_except_weights():
    expected = structure(get_model(), X, ROWS)
    assert expected == structure(get_model(), X, ROWS)
    slope = get_model()
    slope[2].negative_slope = 0.2
    tied = get_model().append(nn.Linear(4, 4))
    untied = structure(tied, X, ROWS)
    tied[3].weight = tied[0].weight
    changed = [get_model("relu"), get_model(bias=False), get_model().double(), slope]
    keys = [structure(module, X, ROWS) for module in changed]
    for kind in ("cayley", "matrix_exp"):
        orthogonal = get_model()
        nn.utils.parametrizations.orthogonal(orthogonal[0], orthogonal_map=kind)
        keys.append(structure(orthogonal, X, ROWS))
    keys += [untied, structure(tied, X, ROWS), structure(get_model(), (torch.zeros(4, 4),), ROWS)]
    assert len({expected, *keys}) == 10


def test_structure_is_none_for_custom_modules_and_hooks():
    hooked = get_model()
    hooked[0].register_forward_hook(lambda *_: None)
    assert structure(Custom(), X, ROWS) is None
    assert structure(nn.Sequential(Custom()), X, ROWS) is None
    assert structure(hooked, X, ROWS) is None


def test_cached_graph_contains_no_weights_or_paths():
    module = get_model()
    nn.init.constant_(module[0].weight, 0.12345)
    export_graph(module, X, ROWS, ["y"])
    (path,) = folder().iterdir()
    assert module[0].weight.detach().numpy().tobytes() not in path.read_bytes()
    assert b"/" not in path.read_bytes()[32:]


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"", lambda content: content * 2]
)
def test_damaged_cache_file_is_rewritten(damage, monkeypatch):
    expected = export_graph(get_model(), X, ROWS, ["y"])
    (path,) = folder().iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    monkeypatch.setattr(exporter, "_in_memory", {})
    assert len(export_graph(get_model(), X, ROWS, ["y"]).graph.node) == len(expected.graph.node)
    assert path.read_bytes() == content


def test_export_works_without_writable_cache_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUBITO_GRAPHS", str(tmp_path / "file" / "graphs"))
    assert export_graph(get_model(), X, ROWS, ["y"]).graph.node


def test_cache_folder_is_limited_to_max_files(monkeypatch):
    monkeypatch.setattr(exporter, "MAX_FILES", 2)
    for key in "abc":
        exporter._write(key, b"")
    assert len(list(folder().iterdir())) == 2


def test_onnx_ir_counts_generated_names():
    model = onnx_ir.Model(onnx_ir.Graph([], [], nodes=[]), ir_version=10)
    names = model.graph._name_authority
    names._value_counter, names._node_counter = 7, 8
    node = onnx_ir.Node("", "Identity", [])
    model.graph.append(node)
    actual = (node.outputs[0].name, node.name, (names._value_counter, names._node_counter))
    assert actual == ("val_7", "node_Identity_8", (8, 9)), (
        f"onnx_ir {onnx_ir.__version__}: {actual}"
    )
