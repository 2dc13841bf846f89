"""Malformed files: each raises an error of mithril, and none allocates the sizes that the file claims."""

import numpy as np
import onnx
import onnx.helper as h
import pytest
from damaged_models import CHANGES, sources

import mithril as ml
from mithril_testing.damaged_files import attempts, check

pytestmark = pytest.mark.filterwarnings("ignore")


def test_changed_files_give_errors_of_mithril():
    def read(content):
        ml.compile(ml.from_onnx(content), "numpy", inference=True)

    check(list(attempts(sources(), CHANGES, read, seed=0, count=200)), refused=80)


def model(nodes, inputs=("x",), outputs=("y",), initializers=(), **options):
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info(n, 1, ["n", 3]) for n in inputs],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        list(initializers),
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], **options)


def test_a_cycle():
    nodes = [h.make_node("Add", ["x", "b"], ["a"]), h.make_node("Relu", ["a"], ["b"]), h.make_node("Abs", ["a"], ["y"])]
    with pytest.raises(ml.InputError, match="refers to 'b', which no earlier node produces"):
        ml.compile(ml.from_onnx(model(nodes)), "numpy", inference=True)({"x": np.ones((2, 3), np.float32)})


def test_a_constant_of_a_thousand_million_elements():
    shape = onnx.numpy_helper.from_array(np.asarray([10**9], np.int64), "s")
    nodes = [
        h.make_node("ConstantOfShape", ["s"], ["c"]),
        h.make_node("ReduceMax", ["c"], ["m"]),
        h.make_node("Add", ["x", "m"], ["y"]),
    ]
    with pytest.raises(ml.UnsupportedError, match="1000000000 elements is too large"):
        ml.compile(ml.from_onnx(model(nodes, initializers=[shape])), "numpy", inference=True)(
            {"x": np.ones((2, 3), "f")}
        )


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_external_data_outside_the_folder(tmp_path, location):
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
    tensor.external_data.add(key="location", value=location)
    onnx.save(model([h.make_node("Add", ["x", "w"], ["y"])], initializers=[tensor]), tmp_path / "m.onnx")
    with pytest.raises(ml.InputError, match="outside the folder"):
        ml.from_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize(("offset", "length"), [("-4", "12"), ("100", "12"), ("0", "99"), ("x", "12")])
def test_external_data_with_wrong_places(tmp_path, offset, length):
    (tmp_path / "w.bin").write_bytes(bytes(64))
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
    for key, value in (("location", "w.bin"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    onnx.save(model([h.make_node("Add", ["x", "w"], ["y"])], initializers=[tensor]), tmp_path / "m.onnx")
    with pytest.raises(ml.InputError, match="damaged"):
        ml.from_onnx(tmp_path / "m.onnx")


def test_external_data_is_mapped(tmp_path):
    w = onnx.numpy_helper.from_array(np.arange(3, dtype=np.float32), "w")
    m = model([h.make_node("Add", ["x", "w"], ["y"])], initializers=[w])
    onnx.save(m, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
    imported = ml.from_onnx(tmp_path / "m.onnx")
    (array,) = imported.steps[0].layer.pretrained.values()
    assert not array.flags.owndata and not array.flags.writeable
    np.testing.assert_array_equal(array, [0, 1, 2])


@pytest.mark.parametrize("dims", [[-1, 3], [2**40, 2**40], [5, 3]])
def test_tensors_with_wrong_sizes(dims):
    tensor = onnx.TensorProto(name="w", data_type=1, dims=dims, raw_data=bytes(36))
    with pytest.raises(ml.InputError, match="tensor 'w' of the ONNX file is damaged"):
        ml.from_onnx(model([h.make_node("Add", ["x", "w"], ["y"])], initializers=[tensor]))


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x99garbage")
    with pytest.raises(ml.InputError, match="is not an ONNX file"):
        ml.load(tmp_path / "m.onnx", backend="numpy")


def test_a_function_that_calls_itself():
    function = h.make_function(
        "f", "F", ["a"], ["b"], [h.make_node("F", ["a"], ["b"], domain="f")], [h.make_opsetid("f", 1)]
    )
    m = model([h.make_node("F", ["x"], ["y"], domain="f")], functions=[function])
    m.opset_import.append(h.make_opsetid("f", 1))
    with pytest.raises(ml.InputError, match="calls itself"):
        ml.compile(ml.from_onnx(m), "numpy", inference=True)({"x": np.ones((2, 3), np.float32)})
