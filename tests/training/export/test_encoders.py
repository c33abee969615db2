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
        [helper.make_tensor_value_info(name, *signature) for name, signature in inputs.items()],
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
def test_image_axes_follow_onnx_file(tmp_path, dims, axes):
    path = get_file(
        tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, dims)}
    )
    encoder, x = get_encoder(file_graph(path, PIXELS), PIXELS)
    expected = np.maximum((x.reshape(-1, 3, 4, 5) - 10) / 4, 0).transpose(axes)
    np.testing.assert_allclose(encoder(x), expected.reshape(len(x), -1), rtol=1e-6)
    assert encoder.spec == EncoderSpec(outputs=60, rows_at_once=8)


def test_average_pooling_network_is_exported_with_standardised_pixels(tmp_path):
    layers = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder, x = get_encoder(module_graph(layers, PIXELS.shape, PIXELS), PIXELS)
    images = (torch.from_numpy(x).unflatten(1, PIXELS.shape) - 10) / 4
    np.testing.assert_allclose(encoder(x), layers(images).detach(), rtol=1e-4, atol=1e-5)


def test_grey_images_get_channel_axis(tmp_path):
    path = get_file(
        tmp_path,
        [helper.make_node("Neg", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 1, 4, 5])},
    )
    rows = EncoderInput((4, 5))
    encoder, x = get_encoder(file_graph(path, rows), rows)
    np.testing.assert_array_equal(encoder(x), -x)


def test_text_encoder_derives_mask_and_token_types_from_ids(tmp_path):
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


def test_inner_value_can_be_output_and_later_nodes_are_removed(tmp_path):
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


def create_relu(folder, name="x", kind=TensorProto.FLOAT, dims=("n", 4), **options):
    return get_file(
        folder, [helper.make_node("Relu", [name], ["y"])], {name: (kind, list(dims))}, **options
    )


def create_two_inputs(folder):
    signature = (TensorProto.FLOAT, ["n", 4])
    return get_file(
        folder, [helper.make_node("Add", ["a", "b"], ["y"])], {"a": signature, "b": signature}
    )


def create_two_outputs(folder):
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    return get_file(folder, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, ("y", "z"))


def create_custom_operator(folder):
    node = helper.make_node("Own", ["x"], ["y"], domain="com.example")
    return get_file(folder, [node], {"x": (TensorProto.FLOAT, ["n", 4])})


def create_external_weights(folder, weights=None):
    path = get_file(
        folder,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 4])},
        tensors={"w": np.ones((4, 400), np.float32) if weights is None else weights},
    )
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="w.bin")
    return path


def create_without_weights(folder):
    path = create_external_weights(folder)
    (folder / "w.bin").unlink()
    return path


def create_with_weights_in_parent(folder):
    path = create_external_weights(folder)
    content = path.read_bytes()
    assert content.count(b"w.bin") == 1
    (folder / "inner").mkdir()
    inner = folder / "inner" / "theirs.onnx"
    # The new path has the same length, so no length in the file changes.
    inner.write_bytes(content.replace(b"w.bin", b"../wb"))
    (folder / "w.bin").rename(folder / "wb")
    return inner


def test_external_weights_in_same_folder_are_loaded(tmp_path):
    weights = np.random.default_rng(0).normal(size=(4, 400)).astype(np.float32)
    rows = EncoderInput((4,))
    model = file_graph(create_external_weights(tmp_path, weights), rows)
    (tmp_path / "w.bin").unlink()
    encoder, x = get_encoder(model, rows)
    np.testing.assert_allclose(encoder(x), x @ weights, rtol=1e-5, atol=1e-5)


def create_text_file(folder):
    path = folder / "theirs.onnx"
    path.write_text("no model at all")
    return path


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda folder: folder / "none.onnx", "network.encoder: expected a file at "),
        (create_text_file, "network.encoder: expected an ONNX model, got a file of another format"),
        (create_two_inputs, "network.encoder: expected one input, in addition to attention_mask"),
        (create_two_outputs, "network.output: expected one of \\['y', 'z'\\], got no name"),
        (create_custom_operator, "got .*expected supported operators, got com.example.Own"),
        (create_without_weights, "network.encoder: expected the weights of theirs\\.onnx"),
        (create_with_weights_in_parent, r"in a second file of the same folder, got .*\.\./wb"),
        (
            lambda folder: create_relu(folder, kind=TensorProto.STRING),
            "expected a numeric input, got input x: string",
        ),
        (lambda folder: create_relu(folder, dims=(7, 4)), "whose first axis, of rows"),
        (
            lambda folder: create_relu(folder, dims=("n", 9)),
            r"an input for rows of shape \(4,\), got input x: float \['\?', 9\]",
        ),
    ],
)
def test_unsuitable_encoder_file_is_rejected_with_reason(tmp_path, create, message):
    with pytest.raises(InvalidInput, match=message):
        file_graph(create(tmp_path), EncoderInput((4,)))


def test_unknown_output_is_rejected(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"network\.output: expected one of \['y'\], or an inner value, got 'z'"
    ):
        file_graph(create_relu(tmp_path), EncoderInput((4,)), "z")


def create_mixing_encoder(folder):
    """Create an encoder that adds a fraction of the batch mean to each row."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "part"], ["little"]),
        helper.make_node("Add", ["x", "little"], ["y"]),
    ]
    tensors = {"axes": np.array([0]), "part": np.array(1e-3, np.float32)}
    return get_file(folder, nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, tensors=tensors, opset=18)


def test_encoder_that_mixes_rows_runs_one_row_at_a_time(tmp_path):
    content = serialise(file_graph(create_mixing_encoder(tmp_path), EncoderInput((4,))))
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    assert examine(content, 4, x) == EncoderSpec(outputs=4, rows_at_once=1)


def test_non_finite_outputs_are_rejected(tmp_path):
    rows = EncoderInput((4,))
    logarithm = get_file(tmp_path, [helper.make_node("Log", ["x"], ["y"])], {"x": (1, ["n", 4])})
    content = serialise(file_graph(logarithm, rows))
    with pytest.raises(InvalidInput, match="expected finite numbers for every row"):
        examine(content, 4, -np.ones((4, 4), np.float32))
