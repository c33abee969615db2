import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from model_store.artifacts.manifest import EncoderSpec
from model_store.errors import InvalidInput
from model_store.inference.encoder import Encoder
from training.export.encoders import EncoderInput, examine, file_graph, module_graph, serialise

PIXELS = EncoderInput(
    (3, 4, 5), np.full((3, 1, 1), 10.0, np.float32), np.full((3, 1, 1), 4.0, np.float32)
)


def get_file(folder, nodes, inputs, outputs=("y",), tensors=(), opset=17):
    graph = helper.make_graph(
        nodes,
        "theirs",
        [helper.make_tensor_value_info(name, *parent) for name, parent in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in dict(tensors).items()],
    )
    path = folder / "theirs.onnx"
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)]), path
    )
    return path


def get_encoder(model, rows):
    content = serialise(model)
    size = int(np.prod(rows.shape))
    examples = np.random.default_rng(0).integers(0, 9, (5, size)).astype(np.float32)
    spec = examine(content, size, examples)
    return Encoder(content, spec, size), examples


@pytest.mark.parametrize(
    ("dims", "axes"),
    [
        (["n", 3, 4, 5], (0, 1, 2, 3)),
        ([None, 4, 5, 3], (0, 2, 3, 1)),
        ([1, 3, None, None], (0, 1, 2, 3)),
    ],
)
def test_images_come_as_the_file_has_its_axes(tmp_path, dims, axes):
    path = get_file(
        tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, dims)}
    )
    encoder, x = get_encoder(file_graph(path, PIXELS), PIXELS)
    expected = np.maximum((x.reshape(-1, 3, 4, 5) - 10) / 4, 0).transpose(axes)
    np.testing.assert_allclose(encoder(x), expected.reshape(len(x), -1), rtol=1e-6)
    assert encoder.spec == EncoderSpec(outputs=60, rows_at_once=8)


def test_a_network_that_averages_places_is_exported_with_its_pixels_mean(tmp_path):
    layers = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder, x = get_encoder(module_graph(layers, PIXELS.shape, PIXELS), PIXELS)
    images = (torch.from_numpy(x).unflatten(1, PIXELS.shape) - 10) / 4
    np.testing.assert_allclose(encoder(x), layers(images).detach(), rtol=1e-4, atol=1e-5)


def test_a_grey_image_may_have_a_channel(tmp_path):
    path = get_file(
        tmp_path,
        [helper.make_node("Neg", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 1, 4, 5])},
    )
    rows = EncoderInput((4, 5))
    encoder, x = get_encoder(file_graph(path, rows), rows)
    np.testing.assert_array_equal(encoder(x), -x)


def test_a_text_encoder_gets_its_mask_and_types_of_the_ids(tmp_path):
    table = np.arange(30, dtype=np.float32).reshape(10, 3)
    nodes = [
        helper.make_node("Add", ["input_ids", "token_type_ids"], ["ids"]),
        helper.make_node("Gather", ["table", "ids"], ["tokens"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
        helper.make_node("Mul", ["tokens", "weights"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "first"], ["y"], keepdims=0),
    ]
    ids = (TensorProto.INT64, ["batch", "sequence"])
    tensors = {"table": table, "last": np.array([2]), "first": np.array([1])}
    path = get_file(
        tmp_path,
        nodes,
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ids),
        tensors=tensors,
    )
    rows = EncoderInput((6,), pad_id=3)
    encoder, x = get_encoder(file_graph(path, rows), rows)
    expected = (table[x.astype(int)] * (x != 3)[:, :, None]).sum(1)
    np.testing.assert_allclose(encoder(x), expected)


def test_an_inner_value_can_be_taken_and_what_follows_is_left_out(tmp_path):
    nodes = [
        helper.make_node("Neg", ["x"], ["inner"]),
        helper.make_node("MatMul", ["inner", "w"], ["y"]),
    ]
    path = get_file(
        tmp_path,
        nodes,
        {"x": (TensorProto.FLOAT, ["n", 4])},
        tensors={"w": np.ones((4, 900), np.float32)},
    )
    rows = EncoderInput((4,))
    model = file_graph(path, rows, "inner")
    assert model.ByteSize() < 1000
    encoder, x = get_encoder(model, rows)
    np.testing.assert_array_equal(encoder(x), -x)


def relu(folder, name="x", kind=TensorProto.FLOAT, dims=("n", 4), **more):
    return get_file(
        folder, [helper.make_node("Relu", [name], ["y"])], {name: (kind, list(dims))}, **more
    )


def two_inputs(folder):
    parent = (TensorProto.FLOAT, ["n", 4])
    return get_file(
        folder, [helper.make_node("Add", ["a", "b"], ["y"])], {"a": parent, "b": parent}
    )


def two_outputs(folder):
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    return get_file(folder, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, ("y", "z"))


def custom(folder):
    node = helper.make_node("Own", ["x"], ["y"], domain="com.example")
    return get_file(folder, [node], {"x": (TensorProto.FLOAT, ["n", 4])})


def external(folder, weights=None):
    path = get_file(
        folder,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 4])},
        tensors={"w": np.ones((4, 400), np.float32) if weights is None else weights},
    )
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="w.bin")
    return path


def without_its_weights(folder):
    path = external(folder)
    (folder / "w.bin").unlink()
    return path


def with_weights_elsewhere(folder):
    path = external(folder)
    content = path.read_bytes()
    assert content.count(b"w.bin") == 1
    (folder / "inner").mkdir()
    inner = folder / "inner" / "theirs.onnx"
    # of the same length, so that no length in the file changes
    inner.write_bytes(content.replace(b"w.bin", b"../wb"))
    (folder / "w.bin").rename(folder / "wb")
    return inner


def test_weights_in_a_second_file_of_the_folder_are_read(tmp_path):
    weights = np.random.default_rng(0).normal(size=(4, 400)).astype(np.float32)
    rows = EncoderInput((4,))
    model = file_graph(external(tmp_path, weights), rows)
    (tmp_path / "w.bin").unlink()
    encoder, x = get_encoder(model, rows)
    np.testing.assert_allclose(encoder(x), x @ weights, rtol=1e-5, atol=1e-5)


def text(folder):
    path = folder / "theirs.onnx"
    path.write_text("no model at all")
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none.onnx", "network.encoder: expected a file at "),
        (text, "network.encoder: expected an ONNX model, got a file of another format"),
        (two_inputs, "network.encoder: expected one input, in addition to attention_mask"),
        (two_outputs, "network.output: expected one of \\['y', 'z'\\], got no name"),
        (custom, "got .*expected supported operators, got com.example.Own"),
        (without_its_weights, "network.encoder: expected the weights of theirs\\.onnx"),
        (with_weights_elsewhere, r"in a second file of the same folder, got .*\.\./wb"),
        (
            lambda folder: relu(folder, kind=TensorProto.STRING),
            "expected a numeric input, got input x: string",
        ),
        (lambda folder: relu(folder, dims=(7, 4)), "whose first axis, of rows"),
        (
            lambda folder: relu(folder, dims=("n", 9)),
            r"an input for rows of shape \(4,\), got input x: float \['\?', 9\]",
        ),
    ],
)
def test_a_file_that_cannot_be_the_encoder_is_refused_by_name(tmp_path, make, says):
    with pytest.raises(InvalidInput, match=says):
        file_graph(make(tmp_path), EncoderInput((4,)))


def test_an_output_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"network\.output: expected one of \['y'\], or an inner value, got 'z'"
    ):
        file_graph(relu(tmp_path), EncoderInput((4,)), "z")


def mixing(folder):
    """An encoder that takes the mean over its batch from each row."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "part"], ["little"]),
        helper.make_node("Add", ["x", "little"], ["y"]),
    ]
    tensors = {"axes": np.array([0]), "part": np.array(1e-3, np.float32)}
    return get_file(folder, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, tensors=tensors, opset=18)


def test_rows_that_see_each_other_are_encoded_one_at_a_time(tmp_path):
    content = serialise(file_graph(mixing(tmp_path), EncoderInput((4,))))
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    assert examine(content, 4, x) == EncoderSpec(outputs=4, rows_at_once=1)


def test_what_is_no_number_is_refused(tmp_path):
    rows = EncoderInput((4,))
    logarithm = get_file(tmp_path, [helper.make_node("Log", ["x"], ["y"])], {"x": (1, ["n", 4])})
    content = serialise(file_graph(logarithm, rows))
    with pytest.raises(InvalidInput, match="expected finite numbers for every row"):
        examine(content, 4, -np.ones((4, 4), np.float32))
