"""Large tensors are views of the mapped file; a file read by its path equals the same bytes."""

import numpy as np
import onnx
import onnx.helper as h
import pytest
from damaged_models import CHANGES, sources
from onnx import numpy_helper

import mithril as ml
from mithril.system import fingerprint
from mithril_onnx import mapped
from mithril_onnx.reading import read
from mithril_testing.damaged_files import attempts, check

rng = np.random.default_rng(0)
WEIGHT, TABLE = rng.normal(size=(64, 48)).astype(np.float32), rng.integers(0, 64, 4000)


def write(path, table=TABLE, name="w"):
    tensors = [numpy_helper.from_array(WEIGHT, name), numpy_helper.from_array(table, "table")]
    nodes = [
        h.make_node("Gather", ["table", "x"], ["rows"]),
        h.make_node("Gather", [name, "rows"], ["y"]),
    ]
    x, y = h.make_tensor_value_info("x", 7, ["n"]), onnx.ValueInfoProto(name="y")
    graph = h.make_graph(nodes, "g", [x], [y], tensors)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 20)]), path)
    return path


@pytest.mark.parametrize("name", ["w", "a longer name", "é"])  # the bytes begin at other places
def test_large_tensors_stay_in_the_file(tmp_path, name):
    path = write(tmp_path / "m.onnx", name=name)
    file = read(path)
    assert not any(t.HasField("raw_data") for t in file.proto.graph.initializer)
    np.testing.assert_array_equal(file.arrays[name], WEIGHT)
    assert not file.arrays[name].flags.owndata and not file.arrays[name].flags.writeable
    positions = np.asarray([3, 1, 3999])
    for source in (path, path.read_bytes()):
        compiled = ml.compile(ml.from_onnx(source), "numpy", inference=True)
        np.testing.assert_array_equal(compiled({"x": positions})["y"], WEIGHT[TABLE[positions]])
        assert all(x.flags.aligned for x in compiled.params.values())


@pytest.mark.parametrize("first", [2 * WEIGHT, WEIGHT[:1]], ids=["large", "small"])
@pytest.mark.parametrize("is_raw", [True, False])
def test_tensors_of_one_name(tmp_path, first, is_raw):
    path = write(tmp_path / "m.onnx")
    model = onnx.load(path)
    again = numpy_helper.from_array(first, "w") if is_raw else h.make_tensor("w", 1, first.shape, first.ravel())
    tensors = [again, *model.graph.initializer]
    for order in (tensors, tensors[::-1]):
        del model.graph.initializer[:]
        model.graph.initializer.extend(order)
        onnx.save(model, path)
        np.testing.assert_array_equal(read(path).arrays["w"], read(path.read_bytes()).arrays["w"])


def test_constants_of_the_file_are_part_of_its_fingerprint(tmp_path):
    changed = TABLE.copy()
    changed[77] = 63 - changed[77]
    paths = write(tmp_path / "a.onnx"), write(tmp_path / "b.onnx"), write(tmp_path / "c.onnx", changed)
    first, copy, other = (fingerprint(ml.from_onnx(path).steps[0].layer) for path in paths)
    assert first == copy != other


def test_damaged_files_read_by_path_equal_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "LARGE", 4)
    path = tmp_path / "m.onnx"

    def outcome(source):
        try:
            file = read(source)
            return file.proto.graph.node, {name: x.tobytes() for name, x in file.arrays.items()}
        except ml.MithrilError as error:
            return str(error).split("'")[0].split("the ONNX model")[0]

    def compare(content):
        path.write_bytes(content)
        assert outcome(path) == outcome(content)
        read(content)

    check(list(attempts(sources(), CHANGES, compare, seed=3, count=150)), refused=10)
