"""The core set: a backend with rows for 40 primitives, and a host function, runs every layer and its gradients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mithril as ml
from mithril.backend import Lowerings
from mithril.compiler import TraceRequest, source_of
from mithril.graph import TensorType, dtype, evaluate, operations
from mithril.models import Model
from mithril.passes import random_arguments
from mithril_numpy.backend import NumpyBackend
from mithril_testing import CORE_SET, assert_close, tolerance
from mithril_tools.reference.layers import construction, layer_classes, layer_with_inputs

PAGE = Path(__file__).parents[1] / "docs" / "writing-plugins.md"
LAYERS = sorted(name for name, cls in layer_classes().items() if construction(cls))  # not base classes and containers
# Layers that need no call of the host, in forward and backward direction.
NATIVE = """Linear MLP Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d DepthwiseConv2d RNN LSTM GRU
LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d MultiHeadAttention
RotaryEmbedding SinusoidalEmbedding Softmax LogSoftmax Relu Gelu Silu Sigmoid Tanh Elu Softplus MSELoss
BinaryCrossEntropyWithLogits KLDivergence Sequential Residual Concat Split Reshape Transpose""".split()


class CoreBackend(NumpyBackend):
    """NumPy with rows for the core set and no others."""

    name = "core"


def core_table() -> Lowerings:
    full = NumpyBackend.tables["portable"]
    table = full.extend()
    for name in full.ops - CORE_SET:
        del table._rows[name]
    return table


CoreBackend.tables = {"portable": core_table()}


def graph_of(name: str, training: bool = True) -> ml.Graph:
    """Return the graph of a layer's documented example, with gradients of everything that has one."""
    layer, shapes, types = layer_with_inputs(layer_classes()[name])
    model = Model()
    model |= layer(**{terminal: terminal for terminal in shapes})
    inputs = {n: TensorType(dtype(types.get(n, "float32")), tuple(shape)) for n, shape in shapes.items()}
    source = source_of(model, outputs=None, inference=False)
    graph = source.graph(inputs, TraceRequest(training=training))
    wrt = [i.name for i in graph.arguments if i.type.dtype.is_float and i.role in ("param", "input")]
    outputs = [r.name for r in graph.results if r.type.dtype.is_float and r.role != "state"]
    try:
        return ml.gradients(graph, outputs, wrt) if wrt and outputs else graph
    except ml.GradientError:
        return graph


def test_core_set_is_small():
    assert len(CORE_SET) <= 40
    assert all(not operations()[name].composite for name in CORE_SET)
    assert CoreBackend.tables["portable"].ops == CORE_SET


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_runs(name):
    graph = graph_of(name)
    compiled = ml.compile(graph, CoreBackend())
    arguments = random_arguments(graph, seed=1)
    roles = {i.name: i.role for i in graph.arguments}
    params = {n: a for n, a in arguments.items() if roles[n] == "param"}
    results = compiled.programs[-1].executable(params, {n: a for n, a in arguments.items() if n not in params})
    for result, expected in evaluate(graph, arguments).items():
        assert_close(results[result], expected, tolerance(dtype(expected.dtype.name), 100.0), result)
    if name in NATIVE:
        assert not compiled.decisions.of("fallback")


def test_layers_that_run_without_the_host_exist():
    assert set(NATIVE) <= set(LAYERS)


def test_page_lists_the_core_set():
    text = PAGE.read_text()
    part = text[text.index("The core set") : text.index("## Tests")]
    assert {word for word in re.findall(r"`(\w+)`", part) if word in operations()} >= CORE_SET
