"""Which batch norms are folded, which are not, and that results do not change."""

from typing import ClassVar

import numpy as np
import pytest

import mithril as ml
from mithril import plugins
from mithril.models import BatchNorm2d, Conv2d, Model, Relu
from mithril_pass_example.folding import fold_batch_norm
from mithril_testing import PassConformance


def graph_of(function, size=8, **conv):
    """``function(conv, norm)`` traced on an image; ``norm`` is a batch norm with statistics of its own."""
    with ml.Builder() as b:
        x = b.input("x", (2, 4, size, size))
        w = b.param("w", (6, 4 // conv.get("groups", 1), 3, 3))
        bias = b.param("b", (1, 6, 1, 1))
        y = ml.ops.conv(x, w, **{"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), **conv})

        def norm(value):
            statistics = [b.param(name, (6,)) for name in ("scale", "shift", "mean", "var")]
            return ml.ops.batch_norm(value, *statistics[:3], ml.ops.square(statistics[3]) + 0.5, eps=1e-3)

        result = function(y, norm, bias)
    return b.build({"y": result})


def names(graph):
    return [node.op.name for node in graph.nodes]


def folded(graph):
    """Return the graph after the pass; the manager verifies it and compares results before and after."""
    return ml.PassManager([fold_batch_norm], check="numeric").run(graph)[0]


@pytest.mark.parametrize(
    "conv",
    [
        {},
        {"stride": (2, 1)},
        {"dilation": (1, 2)},
        {"groups": 2},
        {"padding": ((0, 0), (2, 1))},
    ],
    ids=str,
)
def test_scale_and_shift_go_into_the_convolution(conv):
    after = names(folded(graph_of(lambda y, norm, bias: norm(y), **conv)))
    assert "batch_norm" not in after
    assert after.count("conv") == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_bias_in_between_is_scaled_too(swapped):
    after = names(folded(graph_of(lambda y, norm, bias: norm(bias + y if swapped else y + bias))))
    assert "batch_norm" not in after


@pytest.mark.parametrize(
    "function",
    [
        lambda y, norm, bias: norm(y) + y,
        lambda y, norm, bias: norm(y + bias) * (y + bias),
        lambda y, norm, bias: norm(ml.ops.tanh(y)),
        lambda y, norm, bias: norm(y + y),
    ],
    ids=["read elsewhere", "sum computed twice", "not linear", "not per channel"],
)
def test_other_graphs_are_unchanged(function):
    assert "batch_norm" in names(folded(graph_of(function)))


def test_weights_larger_than_activations_are_unchanged():
    graph = graph_of(lambda y, norm, bias: norm(y), size=3, padding=((0, 0), (0, 0)))
    assert folded(graph) is graph


class TestFoldBatchNorm(PassConformance):
    pass_ = "example-fold-batch-norm"
    graphs: ClassVar = {"convolution and batch norm": graph_of(lambda y, norm, bias: norm(y + bias))}


def test_by_name_in_a_whole_model():
    def model():
        net = Model()
        net |= Conv2d(3, 8, kernel_size=3, padding=1)(input="input", output="data")
        net |= BatchNorm2d(8)(input="data", output="normal")
        net |= Relu()(input="normal", output="output")
        return net

    image = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    results = []
    for switch in (False, True):
        compiled = ml.compile(
            model(),
            "numpy",
            shapes={"input": [2, 3, 16, 16]},
            inference=True,
            optimizations={"example-fold-batch-norm": switch},
        )
        params = compiled.randomize_params(seed=0)
        results.append(np.asarray(compiled.evaluate(params, {"input": image})["output"]))
        records = [d for d in compiled.decisions if "batch norm folded" in d.message]
        assert len(records) == switch
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_installed():
    entry = plugins.pass_spec("example-fold-batch-norm")
    assert entry.origin.startswith("mithril-pass-example ")
    assert plugins.load_pass("example-fold-batch-norm") is fold_batch_norm
