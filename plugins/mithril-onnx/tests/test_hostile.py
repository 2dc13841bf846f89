"""Malformed files: each raises an error of mithril, and none allocates the sizes that the file claims."""

from itertools import pairwise

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


def test_memory_of_messages_is_counted_before_they_are_made():
    """Nodes of few bytes need hundreds of bytes each; a file whose tensors are as large may have them."""
    nodes = [h.make_node("Relu", ["x"], ["y"])] * 90_000
    content = model(nodes).SerializeToString()
    with pytest.raises(ml.InputError) as raised:
        ml.from_onnx(content)
    needed = 90_000 * (900 + 3 * 24)
    assert str(raised.value).startswith("the graph of the ONNX model needs ")
    assert needed < int(str(raised.value).split()[7].replace(",", "")) < 1.01 * needed
    weight = onnx.TensorProto(name="w", data_type=1, dims=[1 << 22], raw_data=bytes(4 << 22))
    ml.from_onnx(model(nodes, initializers=[weight]).SerializeToString())
    with ml.reader_limits(room=100 << 20):
        ml.from_onnx(content)


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
    with pytest.raises(ml.UnsupportedError, match=r"a constant of the sizes \[1000000000\] cannot be made"):
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


def compiled(m):
    return ml.compile(ml.from_onnx(m), "numpy", inference=True)({"x": np.ones((2, 3), np.float32)})


def test_functions_that_double():
    opsets = [h.make_opsetid("", 20), h.make_opsetid("f", 1)]

    def call(k, x, y):
        return h.make_node(f"F{k}", [x], [y], domain="f")

    def doubling(depth):
        functions = [
            h.make_function("f", f"F{k}", ["a"], ["b"], [call(k + 1, "a", "t"), call(k + 1, "t", "b")], opsets)
            for k in range(depth)
        ]
        functions.append(h.make_function("f", f"F{depth}", ["a"], ["b"], [h.make_node("Relu", ["a"], ["b"])], opsets))
        m = model([call(0, "x", "y")], functions=functions)
        m.opset_import.append(h.make_opsetid("f", 1))
        return m

    with ml.reader_limits(nodes=45), pytest.raises(ml.InputError, match="more than the limit 'nodes'"):
        compiled(doubling(4))
    with ml.reader_limits(nodes=46):
        compiled(doubling(4))
    with ml.reader_limits(nodes=1000), pytest.raises(ml.InputError, match="'nodes'"):
        compiled(doubling(40))
    with pytest.raises(ml.MithrilError, match="'depth'"):
        compiled(doubling(120))


def test_functions_that_repeat_a_large_constant():
    w = onnx.numpy_helper.from_array(np.ones(1 << 18, np.float32), "w")
    body = [h.make_node("Constant", [], ["c"], value=w), h.make_node("ReduceMax", ["c"], ["m"], keepdims=0)]
    body.append(h.make_node("Add", ["a", "m"], ["b"]))
    function = h.make_function("f", "F", ["a"], ["b"], body, [h.make_opsetid("", 20)])
    names = ["x", *(f"v{k}" for k in range(99)), "y"]
    calls = [h.make_node("F", [a], [b], domain="f") for a, b in pairwise(names)]
    m = model(calls, functions=[function])
    m.opset_import.append(h.make_opsetid("f", 1))
    with pytest.raises(ml.InputError, match="bytes of memory"):
        compiled(m)


def sparse(dims, name="s"):
    values = onnx.numpy_helper.from_array(np.ones(1, np.float32), name)
    return h.make_sparse_tensor(values, onnx.numpy_helper.from_array(np.zeros(1, np.int64), "i"), dims)


@pytest.mark.parametrize("dims", [[2**16, 2**14], [2**40, 2**40], [-1, 2], [2**24 + 2**10]])
@pytest.mark.parametrize("place", ["initializer", "attribute"])
def test_sparse_tensors_that_claim_large_sizes(dims, place):
    nodes = [h.make_node("ReduceMax", ["s"], ["m"], keepdims=0), h.make_node("Add", ["x", "m"], ["y"])]
    if place == "attribute":
        nodes.insert(0, h.make_node("Constant", [], ["s"], sparse_value=sparse(dims)))
    m = model(nodes)
    if place == "initializer":
        m.graph.sparse_initializer.append(sparse(dims))
    with pytest.raises(ml.InputError, match=r"sparse tensors? "):
        ml.compile(ml.from_onnx(m), "numpy", inference=True)


def test_many_sparse_tensors_count_together():
    nodes = [h.make_node("ReduceMax", [f"s{k}"], [f"m{k}"], keepdims=0) for k in range(9)]
    m = model([*nodes, h.make_node("Add", ["x", "m0"], ["y"])])
    m.graph.sparse_initializer.extend(sparse([1 << 21], f"s{k}") for k in range(9))
    with pytest.raises(ml.InputError, match="bytes of memory"):
        compiled(m)


def test_external_data_behind_links(tmp_path):
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_bytes(bytes(12))
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "out" / "w")
    (tmp_path / "in" / "same").symlink_to(tmp_path / "in" / "w")
    for location in ("sub/w", "linked", "same"):
        tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
        tensor.external_data.add(key="location", value=location)
        path = tmp_path / "in" / "m.onnx"
        onnx.save(model([h.make_node("Add", ["x", "w"], ["y"])], initializers=[tensor]), path)
        if location == "same":
            ml.from_onnx(path)
        else:
            with pytest.raises(ml.InputError, match="outside the folder"):
                ml.from_onnx(path)


@pytest.mark.parametrize(
    "text", ["*".join(["(a+b+c+d+e+f+g+h+i+j+k+l)"] * 10), "+".join("(" * 5000), "a+" * 20_000 + "a"]
)
def test_sizes_with_many_terms(text):
    m = model([h.make_node("Relu", ["x"], ["y"])])
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
    ml.from_onnx(m)  # a size without a readable form is a symbol of its own
