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
def _own_graphs(monkeypatch, tmp_path):
    monkeypatch.setenv("DUBITO_GRAPHS", str(tmp_path / "graphs"))
    monkeypatch.setattr(exporter, "_in_memory", {})


def get_graphs(method: str, seed: int) -> dict[str, bytes]:
    recipe = recipe_with(
        method=method, network={"hidden": [5]}, posterior=SMALL.get(method, {}), seed=seed
    )
    model = build(recipe, (4,), 3).eval()
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
    initialise(model, x)
    served = localise(model, x)
    network = served_network(served, x, seed, names=("feature_neighbours",))
    return export(served, network, joint=model)


@pytest.mark.parametrize(
    "method", [m if m == "dropout" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_a_kept_graph_with_other_weights_has_the_bytes_of_a_new_one(method, monkeypatch):
    first = get_graphs(method, 0)
    with monkeypatch.context() as changes:
        changes.setattr(torch.onnx, "export", None)  # a second call would fail
        retained = get_graphs(method, 1)
    with monkeypatch.context() as changes:
        changes.setattr("training.export.exporter.export_program", _export_by_torch_alone)
        new = get_graphs(method, 1)
    assert retained["network.onnx"] != first["network.onnx"]
    assert retained == new


def _export_by_torch_alone(module, inputs, dynamic_shapes):
    shapes = tuple(dynamic_shapes.values())
    return torch.onnx.export(
        module, inputs, dynamo=True, opset_version=20, dynamic_shapes=shapes, verbose=False
    )


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * float(self.layer.bias[0])


def get_model(activation="tanh", **layer):
    layers = nn.Linear(4, 4, **layer), getattr(nn, "Tanh" if activation == "tanh" else "ReLU")()
    return nn.Sequential(*layers, nn.LeakyReLU(0.1))


def test_only_weights_leave_a_structure_as_it_is():
    expected = structure(get_model(), X, ROWS)
    assert expected == structure(get_model(), X, ROWS)
    slope = get_model()
    slope[2].negative_slope = 0.2
    tied = get_model().append(nn.Linear(4, 4))
    apart = structure(tied, X, ROWS)
    tied[3].weight = tied[0].weight
    changed = [get_model("relu"), get_model(bias=False), get_model().double(), slope]
    keys = [structure(module, X, ROWS) for module in changed]
    for kind in ("cayley", "matrix_exp"):
        orthogonal = get_model()
        nn.utils.parametrizations.orthogonal(orthogonal[0], orthogonal_map=kind)
        keys.append(structure(orthogonal, X, ROWS))
    keys += [apart, structure(tied, X, ROWS), structure(get_model(), (torch.zeros(4, 4),), ROWS)]
    assert len({expected, *keys}) == 10


def test_code_of_other_packages_has_no_structure():
    hooked = get_model()
    hooked[0].register_forward_hook(lambda *_: None)
    assert structure(Own(), X, ROWS) is None
    assert structure(nn.Sequential(Own()), X, ROWS) is None
    assert structure(hooked, X, ROWS) is None


def test_a_kept_graph_holds_no_weights_and_names_no_files():
    module = get_model()
    nn.init.constant_(module[0].weight, 0.12345)
    export_graph(module, X, ROWS, ["y"])
    (path,) = folder().iterdir()
    assert module[0].weight.detach().numpy().tobytes() not in path.read_bytes()
    assert b"/" not in path.read_bytes()[32:]


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:-1], lambda kept: b"", lambda kept: kept * 2]
)
def test_a_damaged_file_is_made_again(damage, monkeypatch):
    expected = export_graph(get_model(), X, ROWS, ["y"])
    (path,) = folder().iterdir()
    kept = path.read_bytes()
    path.write_bytes(damage(kept))
    monkeypatch.setattr(exporter, "_in_memory", {})
    assert len(export_graph(get_model(), X, ROWS, ["y"]).graph.node) == len(expected.graph.node)
    assert path.read_bytes() == kept


def test_a_folder_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUBITO_GRAPHS", str(tmp_path / "file" / "graphs"))
    assert export_graph(get_model(), X, ROWS, ["y"]).graph.node


def test_the_folder_keeps_the_newest(monkeypatch):
    monkeypatch.setattr(exporter, "MAX_FILES", 2)
    for key in "abc":
        exporter._write(key, b"")
    assert len(list(folder().iterdir())) == 2


def test_onnx_ir_counts_the_names_that_it_gives():
    model = onnx_ir.Model(onnx_ir.Graph([], [], nodes=[]), ir_version=10)
    names = model.graph._name_authority
    names._value_counter, names._node_counter = 7, 8
    node = onnx_ir.Node("", "Identity", [])
    model.graph.append(node)
    received = (node.outputs[0].name, node.name, (names._value_counter, names._node_counter))
    assert received == ("val_7", "node_Identity_8", (8, 9)), (
        f"onnx_ir {onnx_ir.__version__}: {received}"
    )
