"""Damaged and hostile files: each gives an error of mithril, quickly and in little memory."""

import numpy as np
import pytest
from test_networks import controlled, network
from tflite_files import Model, Table

import mithril as ml


def compiled(content):
    return ml.compile(ml.from_tflite(content), "numpy", inference=True).graph


def test_changed_bytes_give_an_error_or_a_model():
    content = network().bytes()
    tables = content[: content.find(b"arith.constant")]
    refused = 0
    for position in range(0, len(tables), 9):
        for byte in (0, 255):
            damaged = bytearray(content)
            damaged[position] = byte
            try:
                compiled(bytes(damaged))
            except ml.MithrilError:
                refused += 1
    assert 0 < refused < len(tables) // 9 * 2


@pytest.mark.parametrize("length", [0, 3, 8, 40, 200, 500])
def test_truncated_files(length):
    with pytest.raises(ml.MithrilError) as error:
        compiled(network().bytes()[:length])
    assert "TensorFlow Lite" in str(error.value)


def test_other_files():
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(b"GGUF" + bytes(60))
    assert str(error.value) == (
        "'model' is not a TensorFlow Lite file, or is damaged\n  bytes 4 to 8 are not 'TFL3'\n"
        "hint: download or convert it again; ai_edge_litert.interpreter.Interpreter(path) checks a file"
    )
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(5)
    assert str(error.value) == "a TensorFlow Lite model cannot be a int\n  accepted: a path, bytes"
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite("absent.tflite")
    assert str(error.value) == "there is no file 'absent.tflite'"


def test_one_table_does_not_multiply():
    """Refer from a vector to one large table many times."""
    model = Model()
    model.graph().tensors = [Table({0: np.ones(30, np.int32), 3: "x" * 1000})] * 20_000
    content = model.bytes()
    assert len(content) < 100_000
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(content)
    assert "the tables of 'model' needs" in str(error.value) and "ml.reader_limits(room=" in str(error.value)


@pytest.mark.parametrize("count", [1 << 31, (1 << 32) - 1])
def test_counts_beyond_the_file(count):
    content = bytearray(network().bytes())
    place = content.find(b"main") - 4
    content[place : place + 4] = np.uint32(count).tobytes()
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(bytes(content))
    assert f"bytes {place + 4} to {place + 4 + count} are not within its {len(content)}" in str(error.value)


def test_graphs_that_call_themselves():
    model = Model()
    g = model.graph()
    y = g.tensor([])
    g.operator("CALL", [g.input([])], [y], subgraph=0)
    g.outputs.append(y)
    with pytest.raises(ml.InputError) as error:
        compiled(model.bytes())
    assert "'model' nests 101 graphs, more than the limit 'depth'" in str(error.value)


def test_graphs_that_multiply():
    model = Model()
    for k in range(30):
        g = model.graph()
        x, y, z = g.input([]), g.tensor([]), g.tensor([])
        for a, b in ((x, y), (y, z)):
            if k < 29:
                g.operator("CALL", [a], [b], subgraph=k + 1)
            else:
                g.operator("NEG", [a], [b])
        g.outputs.append(z)
    with ml.reader_limits(nodes=500), pytest.raises(ml.InputError) as error:
        compiled(model.bytes())
    assert "the graphs of 'model' expand to more operators, more than the limit 'nodes'" in str(error.value)


def test_sizes_without_memory():
    for build in (_filled, _tiled, _padded):
        with pytest.raises(ml.MithrilError):
            compiled(build())


def _constant_case(operator, *arrays, **options):
    model = Model()
    g = model.graph()
    y = g.tensor(None)
    g.operator(operator, [g.constant(np.asarray(a)) for a in arrays], [y], **options)
    g.outputs.append(y)
    return model.bytes()


def _filled():
    return _constant_case("FILL", np.asarray([1 << 30, 1 << 20], np.int32), np.float32(1))


def _tiled():
    return _constant_case("TILE", np.ones((2, 2), np.int32), np.asarray([1 << 30, 1 << 20], np.int32))


def _padded():
    return _constant_case("PAD", np.ones((2, 2), np.int32), np.asarray([[0, 1 << 30], [0, 1 << 30]], np.int32))


def test_indices_beyond_the_tables():
    model = controlled()
    model.graphs[0].operators[0][1] = np.asarray([7, 1000, 3], np.int32)
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(model.bytes())
    assert "an operand of operator 0 (WHILE) is tensor 1000, but there are 8" in str(error.value)
