"""Imported files: names, layers, sizes, selections, control flow, states, and training."""

import numpy as np
import pytest
from tflite_files import Model, Table, interpreted
from tflite_networks import image_network, keyword_network

import mithril as ml
from mithril_lora import LoRA

RNG = np.random.default_rng(3)
RELU = 1


def real(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def network(batch=None):
    """Two dense layers with names of Keras, a signature, and an open batch if requested."""
    model = Model()
    g = model.graph()
    signature = None if batch is None else [batch, 6]
    x = g.input([1, 6], name="serving_default_image:0", signature=signature)
    w1, b1 = (
        g.constant(real(8, 6), name="net/hidden/MatMul"),
        g.constant(real(8), name="net/hidden/BiasAdd/ReadVariableOp"),
    )
    w2 = g.constant(real(3, 8), name="arith.constant")
    shape = None if batch is None else [batch, 8]
    h = g.tensor([1, 8], name="net/hidden/MatMul;net/hidden/Relu;net/hidden/BiasAdd", signature=shape)
    g.operator("FULLY_CONNECTED", [x, w1, b1], [h], activation=RELU)
    y = g.tensor([1, 3], name="net/top/MatMul", signature=None if batch is None else [batch, 3])
    g.operator("FULLY_CONNECTED", [h, w2], [y])
    p = g.tensor([1, 3], name="StatefulPartitionedCall:0", signature=None if batch is None else [batch, 3])
    g.operator("SOFTMAX", [y], [p], beta=1.0)
    g.outputs.append(p)
    model.signature("serving_default", {"image": x}, {"probabilities": p})
    return model


def run(model, *arrays, backend="numpy", **options):
    compiled = ml.compile(model, backend, inference=True, **options)
    return [np.asarray(v) for v in compiled(dict(zip(model.inputs, arrays, strict=True))).values()]


def test_names_are_those_of_the_signature_and_layers_those_of_tensors():
    file = network()
    model = ml.from_tflite(file.bytes())
    assert model.inputs == ("image",) and model.outputs == ("probabilities",)
    assert [(path, repr(layer)) for path, layer in model.find("net.*").items()] == [
        ("net.hidden", "Linear(6, 8, bias=True)"),
        ("net.top", "Linear(8, 3, bias=False)"),
    ]
    x = real(1, 6)
    np.testing.assert_allclose(run(model, x)[0], interpreted(file, [x])[0], rtol=1e-5)
    compiled = ml.compile(model, "numpy", inference=True)
    assert list(compiled.params) == ["net.hidden.weight", "net.hidden.bias", "net.top.weight"]


def test_files_are_formats_of_load_and_compile(tmp_path):
    path = tmp_path / "model.tflite"
    file = network()
    path.write_bytes(file.bytes())
    x = real(1, 6)
    expected = interpreted(file, [x])[0]
    for compiled in (ml.load(path, backend="numpy"), ml.compile(str(path), "numpy", inference=True)):
        np.testing.assert_allclose(compiled({"image": x})["probabilities"], expected, rtol=1e-5)
    model = ml.from_tflite(path)
    weight = model.steps[0].layer.pretrained["net.hidden.weight"]
    assert not weight.flags.writeable and not weight.flags.owndata  # a view of the mapped file
    assert ml.verify(model, path, {"image": x})


def test_batches_are_open():
    file = network(batch=-1)
    model = ml.from_tflite(file.bytes())
    x = real(5, 6)
    (result,) = run(model, x)
    rows = [interpreted(file, [row[None]])[0][0] for row in x]
    np.testing.assert_allclose(result, rows, rtol=1e-5)


def test_lora_trains_and_merges():
    model = ml.from_tflite(network().bytes())
    x = real(1, 6)
    before = run(model, x)[0]
    model.replace("net.*", LoRA(rank=2))
    trained = ml.compile(model, "numpy")
    params = trained.randomize_params(seed=0)
    outputs, gradients = trained.evaluate(params, {"image": x}, {"probabilities": np.eye(3, dtype=np.float32)[:1]})
    np.testing.assert_allclose(outputs["probabilities"], before, rtol=1e-5)
    assert any("lora" in name and np.abs(np.asarray(g)).max() > 0 for name, g in gradients.items())


def test_outputs_select_tensors_by_name():
    file = network()
    model = ml.from_tflite(file.bytes(), outputs=["net/top/MatMul"])
    (logits,) = run(model, real(1, 6))
    assert logits.shape == (1, 3) and model.outputs == ("net/top/MatMul",)
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(file.bytes(), outputs=["net/top/MatMu"])
    assert str(error.value) == "the graph 'main' has no tensor 'net/top/MatMu'\nhint: did you mean 'net/top/MatMul'?"
    with pytest.raises(ml.InputError) as error:
        ml.from_tflite(file.bytes(), signature="serving")
    assert str(error.value) == (
        "'model' has no signature 'serving'\n  signatures: serving_default\nhint: did you mean 'serving_default'?"
    )


def test_reshapes_follow_open_batches():
    model = Model()
    g = model.graph()
    x = g.input([1, 4, 3], signature=[-1, 4, 3])
    sizes, first, shape, y = g.tensor([3], "int32"), g.tensor([], "int32"), g.tensor([2], "int32"), g.tensor(None)
    g.operator("SHAPE", [x], [sizes], union=55, slots={0: ("b", 2)})
    begin, end, step = (g.constant(np.asarray([n], np.int32)) for n in (0, 1, 1))
    g.operator("STRIDED_SLICE", [sizes, begin, end, step], [first], shrink_axis_mask=1)
    g.operator("PACK", [first, g.constant(np.asarray(12, np.int32))], [shape], axis=0, slots={0: ("i", 2)})
    g.operator("RESHAPE", [x, shape], [y])
    g.outputs.append(y)
    data = real(7, 4, 3)
    (result,) = run(ml.from_tflite(model.bytes()), data)
    np.testing.assert_array_equal(result, data.reshape(7, 12))


def controlled():
    """Triples a number while it is below a limit; then negates it, if a flag is set."""
    model = Model()
    g, condition, body, then, otherwise = (model.graph(n) for n in ("main", "condition", "body", "then", "otherwise"))
    for graph, operator, dtype in ((condition, "LESS", "bool"), (body, "MUL", "float32")):
        x, limit, factor = (graph.input([]) for _ in range(3))
        y = graph.tensor([], dtype)
        graph.operator(operator, [x, limit if graph is condition else factor], [y])
        graph.outputs += [y] if graph is condition else [y, limit, factor]
    for graph, operator in ((then, "NEG"), (otherwise, "ABS")):
        y = graph.tensor([])
        graph.operator(operator, [graph.input([])], [y])
        graph.outputs.append(y)
    x, flag = g.input([]), g.input([], "bool")
    constants = [g.constant(np.float32(10)), g.constant(np.float32(3))]
    results = [g.tensor([]) for _ in range(3)]
    g.operator("WHILE", [x, *constants], results, cond_subgraph_index=1, body_subgraph_index=2)
    y = g.tensor([])
    g.operator("IF", [flag, results[0]], [y], then_subgraph_index=3, else_subgraph_index=4)
    g.outputs.append(y)
    return model


@pytest.mark.parametrize("flag", [True, False])
def test_loops_and_branches(flag):
    file = controlled()
    model = ml.from_tflite(file.bytes())
    arrays = [np.float32(0.7), np.asarray(flag)]
    np.testing.assert_allclose(run(model, *arrays)[0], interpreted(file, arrays)[0], rtol=1e-6)


def counter(graph_name="main"):
    """Return a file with a variable to which each call adds its input."""
    model = Model()
    g, once = model.graph(graph_name), model.graph("once")
    for graph in (g, once):
        handle = graph.tensor([1], 13, name="stream/total")
        graph.operator("VAR_HANDLE", [], [handle], shared_name="stream/total")
    once.operator("ASSIGN_VARIABLE", [0, once.constant(np.asarray([2, 3], np.float32))], [], union=113)
    g.operator("CALL_ONCE", [], [], init_subgraph_index=1)
    x, before, after = g.input([2]), g.tensor([2]), g.tensor([2])
    g.operator("READ_VARIABLE", [0], [before], union=112)
    g.operator("ADD", [before, x], [after])
    g.operator("ASSIGN_VARIABLE", [0, after], [], union=113)
    g.outputs.append(after)
    return model


def test_variables_are_states():
    file = counter()
    model = ml.from_tflite(file.bytes())
    runner = ml.compile(model, "numpy", inference=True).runner()
    x = np.asarray([1, 10], np.float32)
    expected = [results[0] for results in interpreted(file, [x], calls=3)]
    np.testing.assert_array_equal(
        [np.asarray(runner({model.inputs[0]: x})[model.outputs[0]]) for _ in range(3)], expected
    )
    np.testing.assert_array_equal(expected[-1], [5, 33])


def test_weights_of_four_bits_and_sparse_weights():
    model = Model()
    g = model.graph()
    x = g.input([2, 4])
    numbers = np.asarray([[-8, 7, 3, -1], [0, 1, -2, 5]], np.int8)
    halves = numbers.reshape(-1, 2) & 15
    packed = (halves[:, 0] | halves[:, 1] << 4).astype(np.uint8)
    model.buffers.append(packed.tobytes())
    w = g.tensor([2, 4], 17, buffer=1, scale=0.5)
    y = g.tensor([2, 2])
    g.operator("FULLY_CONNECTED", [x, w], [y])
    # A matrix whose rows list their elements: [[0, 1.5, 0, 2], [0, 0, -3, 0]].
    model.buffers.append(np.asarray([1.5, 2, -3], np.float32).tobytes())
    s = g.tensor([2, 4], buffer=2)
    positions = [Table({0: np.asarray(v, np.uint8)}) for v in ([0, 2, 3], [1, 3, 2])]
    rows = Table({0: ("b", 0), 1: ("i", 2)})
    columns = Table({0: ("b", 1), 2: ("B", 3), 3: positions[0], 4: ("B", 3), 5: positions[1]})
    g.tensors[s][6] = Table({0: np.asarray([0, 1], np.int32), 2: [rows, columns]})
    d, z = g.tensor([2, 4]), g.tensor([2, 2])
    g.operator("DENSIFY", [s], [d])
    g.operator("FULLY_CONNECTED", [x, d], [z])
    g.outputs += [y, z]
    data = real(2, 4)
    results = run(ml.from_tflite(model.bytes()), data)
    np.testing.assert_allclose(results[0], data @ (numbers * 0.5).T, rtol=1e-5)
    np.testing.assert_allclose(results[1], data @ np.asarray([[0, 1.5, 0, 2], [0, 0, -3, 0]]).T, rtol=1e-5, atol=1e-6)


def test_weights_of_eight_bits_with_float_activations_are_exact():
    """Keep activations as floats, which the interpreter rounds to bytes for such products."""
    model = Model()
    g = model.graph()
    x = g.input([3, 16])
    numbers, scale = RNG.integers(-127, 128, (5, 16)).astype(np.int8), 0.01
    y = g.tensor([3, 5])
    g.operator("FULLY_CONNECTED", [x, g.constant(numbers, scale=scale)], [y], activation=RELU)
    g.outputs.append(y)
    data = real(3, 16)
    (result,) = run(ml.from_tflite(model.bytes()), data)
    np.testing.assert_allclose(result, np.maximum(data @ (numbers * scale).T, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result, interpreted(model, [data])[0], atol=0.02 * np.abs(result).max())


def test_results_differ_from_their_declaration():
    model = Model()
    g = model.graph()
    y = g.tensor([3, 2], name="net/product")
    g.operator("MUL", [g.input([2, 3])] * 2, [y])
    g.outputs.append(y)
    with pytest.raises(ml.OperationError) as error:
        run(ml.from_tflite(model.bytes()), real(2, 3))
    assert str(error.value).startswith(
        "the result is float32[2, 3]\n  the file declares float32[3, 2]\n"
        "  operator 0 (MUL) of 'model', which computes 'net/product'\n"
    )
    assert "ai_edge_litert.interpreter.Interpreter(path).allocate_tensors()" in str(error.value)


def test_unsupported_operators_are_listed_together():
    model = Model()
    g = model.graph()
    x, a, b, c = g.input([2]), g.tensor([2], name="a"), g.tensor([2], name="b"), g.tensor([2], name="c")
    g.operator("UNIQUE", [x], [a])
    g.operator("Detect", [a], [b])
    g.operator("Detect", [b], [c])
    g.outputs.append(c)
    with pytest.raises(ml.UnsupportedError) as error:
        ml.from_tflite(model.bytes())
    assert str(error.value) == (
        "2 operators have no meaning here, in 'model'\n"
        "  UNIQUE, once: operator 0 'a' (the size of its result depends on data)\n"
        "  custom operator 'Detect', 2 times: operator 1 'b', operator 2 'c' (code that is not in the file)\n"
        "hint: ml.from_tflite(path, outputs=[...]) stops before them, at tensors of these names"
    )


def test_networks_of_bytes_are_transposed_once():
    """Between quantized layers there is no transpose, which would hide their products from kernels for bytes."""
    file, _ = keyword_network()
    graph = ml.compile(ml.from_tflite(file.bytes()), "numpy", inference=True).graph
    constants = {i.value for i in graph.inputs if i.role == "constant"}
    transposed = [n for n in graph.nodes if n.op.name == "transpose" and n.operands[0] not in constants]
    assert len(transposed) <= 2
    pairs = [n for n in graph.nodes if n.op.name == "conv"]
    assert pairs and all(graph.producers[n.operands[k]].op.name == "dequantize" for n in pairs for k in (0, 1))


def test_residual_networks_of_bytes():
    file, x = image_network()
    (y,) = run(ml.from_tflite(file.bytes()), x)
    expected = interpreted(file, [x])[0]
    assert np.ptp(expected) > 20 and np.abs(y.astype(int) - expected).max() <= 1
