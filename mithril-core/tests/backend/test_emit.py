"""Generated source: form, names, determinism, independence of mithril."""

from __future__ import annotations

import numpy as np
import pytest

from mithril import ops
from mithril.backend import Lowerings
from mithril.backend.codegen.control_flow import python_control
from mithril.backend.codegen.emit import emit, render
from mithril.backend.codegen.source import Source, from_template, transformed
from mithril.graph import Builder, Origin
from mithril.graph.dims import Dim
from mithril.graph.errors import BackendError, OptionError, UnsupportedError
from mithril.ops import exp, iota, neg, relu, reshape, sum


def table():
    result = Lowerings("numpy", ["import numpy as np"], bfloat16="ml_dtypes.bfloat16")
    result.rows({"neg": "-{x}", "matmul": "np.matmul({a}, {b})", "reshape": "np.reshape({x}, {shape})"})
    result.row("add", "{a} + {b}", out="np.add({a}, {b}, out={out})")
    result.row("exp", "np.exp({x})", out="np.exp({x}, out={out})")
    result.row("sum", "np.sum({x}, axis={axis}, keepdims={keepdims})")
    result.row("relu", "np.maximum({x}, 0)")
    result.row("transpose", "np.transpose({x}, {perm})", view=True)
    return result


def source(graph, chosen_table=None):
    return render(emit(graph, chosen_table or table()))


def run(graph, **inputs):
    return Source(source(graph)).function()({}, inputs)


def net():
    b = Builder()
    with b:
        x = b.input("x", (2, 3))
        with b.at(Origin("encoder.0", "model.py", 3)):
            h = x @ b.param("encoder.0.weight", (3, 4))
        with b.at(Origin("head")):
            y = sum(exp(h), axis=1)
    return b.build({"y": y})


def test_source_is_readable():
    text = source(net())
    assert (
        text[text.index("def forward") :]
        == """\
def forward(params, inputs):
    x = inputs["x"]
    encoder_0_weight = params["encoder.0.weight"]
    matmul = np.matmul(x, encoder_0_weight)  # encoder.0
    exp = np.exp(matmul, out=matmul)  # head
    sum_1 = np.sum(exp, axis=(1,), keepdims=False)  # head
    outputs = {"y": sum_1}
    return outputs
"""
    )


def test_source_is_deterministic():
    assert source(net()) == source(net())


@pytest.mark.parametrize(
    "name", ["lambda", "np", "inputs", "params", "outputs", "forward", "a-b", "é", "None", "1x", "print"]
)
def test_any_name_works(name):
    with Builder() as b:
        y = exp(neg(b.input(name, (2,))))
    result = Source(source(b.build({"y": y}))).function()({}, {name: np.zeros(2, np.float32)})
    np.testing.assert_array_equal(result["y"], [1, 1])


def test_outputs_can_be_inputs_constants_and_duplicates():
    with Builder() as b:
        x = b.input("x", (2,))
        y = exp(x)
        c = b.constant(np.float32([1, 2]))
    result = run(b.build({"a": x, "b": y, "c": y, "d": c}), x=np.zeros(2, np.float32))
    assert [result[n].tolist() for n in "abcd"] == [[0, 0], [1, 1], [1, 1], [1, 2]]


def test_live_buffers_are_not_overwritten():
    with Builder() as b:
        x = b.input("x", (4,))
        h = x + 1.0
        y = exp(h) + h
    x = np.arange(4, dtype=np.float32)
    result = run(b.build({"y": y, "h": h}), x=x)
    np.testing.assert_allclose(result["h"], x + 1)
    np.testing.assert_allclose(result["y"], np.exp(x + 1) + x + 1, rtol=1e-6)
    np.testing.assert_array_equal(x, np.arange(4))


def test_buffers_aliased_by_views_are_not_overwritten():
    with Builder() as b:
        h = b.input("x", (2, 2)) + 1.0
        t = mithril_transpose(h)
        y = exp(h) + t
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    np.testing.assert_allclose(run(b.build({"y": y}), x=x)["y"], np.exp(x + 1) + (x + 1).T, rtol=1e-6)


def mithril_transpose(x):
    from mithril.ops import transpose

    return transpose(x, perm=(1, 0))


def test_branches_reuse_only_buffers_that_die_in_them():
    """Buffers of the function with their last use in a branch; never inputs, or values with two uses."""
    selected = table()
    python_control(selected, "np.stack({rows})", "np.empty({shape}, {dtype})")
    with Builder() as b:
        x, y, flag = b.input("x", (2,)), b.input("y", (2,)), b.input("flag", (), "bool")
        dying, twice, retained = exp(x), exp(y), neg(x)
        one = ops.cond(flag, lambda: exp(dying) + x, lambda: dying + y)
        branches = ops.cond(flag, lambda: exp(twice) + exp(retained), lambda: exp(exp(twice)))
    graph = b.build({"one": one, "both": branches, "kept": retained})
    text = source(graph, selected)
    assert "np.exp(exp_2, out=exp_2)" in text, "its own, read for the last time"
    assert "np.exp(neg_1)\n" in text, "an output of the whole"
    x, y = np.array([0.5, 1.0], np.float32), np.array([0.25, -1.0], np.float32)
    for flag in (True, False):
        arguments = {"x": x.copy(), "y": y.copy(), "flag": np.array(flag)}
        result = Source(text).function()({}, arguments)
        np.testing.assert_array_equal(arguments["x"], x)
        np.testing.assert_array_equal(arguments["y"], y)
        np.testing.assert_array_equal(result["kept"], -x)
        e, f = np.exp(x), np.exp(y)
        np.testing.assert_allclose(result["one"], np.exp(e) + x if flag else e + y, rtol=1e-6)
        np.testing.assert_allclose(result["both"], np.exp(f) + np.exp(-x) if flag else np.exp(np.exp(f)), rtol=1e-6)


def test_symbolic_sizes_are_read_from_the_inputs():
    with Builder() as b:
        x = b.input("x", (Dim("B"), 2, 3))
        y = reshape(x, shape=(x.shape[0] * 2, 3))
    graph = b.build({"y": y})
    for n in (1, 4):
        assert run(graph, x=np.zeros((n, 2, 3), np.float32))["y"].shape == (2 * n, 3)
    assert "B = x.shape[0]" in source(graph)


def test_constants_are_written_to_the_file():
    data = np.linspace(0, 1, 100).astype(np.float32)
    with Builder() as b:
        y = b.input("x", (100,)) + data
    graph = b.build({"y": y})
    np.testing.assert_array_equal(run(graph, x=np.zeros(100, np.float32))["y"], data)
    text = source(graph)
    assert "mithril" not in text.split("def forward")[1]
    assert "import mithril" not in text


def test_helpers_include_their_dependencies():
    def inner(x):
        return x + 1

    def outer(x):
        return inner(x) * 2

    outer.needs = (inner,)
    selected = table()

    @selected.function("relu")
    def _(call):
        return f"{call.helper(outer)}({call.x})"

    with Builder() as b:
        y = relu(b.input("x", (2,)))
    text = source(b.build({"y": y}), selected)
    assert text.index("def inner") < text.index("def outer") < text.index("def forward")
    assert text.count("def inner") == 1


def test_helper_parameters_select_operands_and_attributes():
    def clip(low, x, high):
        return np.minimum(np.maximum(x, low), high)

    def sum(x, axis, keepdims, faster=False):  # the operation's name
        return np.sum(x, axis=axis, keepdims=keepdims)

    selected = table()
    selected.helpers(sum)
    selected.helper(clip, op="clip")
    with Builder() as b:
        x = b.input("x", (2, 3))
        y = ops.sum(ops.clip(x, low=0.0, high=2.0), axis=1)
    graph = b.build({"y": y})
    np.testing.assert_array_equal(
        Source(source(graph, selected)).function()({}, {"x": np.float32([[-1, 1, 3], [4, 5, 0]])})["y"], [3, 4]
    )


def test_operations_without_lowering_are_reported():
    with Builder() as b:
        y = iota(shape=(3,))
    with pytest.raises(UnsupportedError) as caught:
        source(b.build({"y": y}))
    assert str(caught.value) == (
        "backend 'numpy' does not lower 'iota'\n"
        "hint: add table.row('iota', ...), or pass host= to Lowerings, which runs its reference"
    )


def test_operation_that_a_correction_needs_is_reported_with_it():
    selected = table()
    selected.row("add", "({a} + {b})")

    def add_(a, b):
        return ops.iota(shape=(2,), dtype="float32") + a

    selected.correct(add_)
    with Builder() as b:
        x = b.input("x", (2,))
        y = ops.add(x, x)
    with pytest.raises(UnsupportedError) as caught:
        source(b.build({"y": y}), selected)
    assert str(caught.value) == (
        "backend 'numpy' does not lower 'iota'\n"
        f"  used by the correction 'add_' of {__name__}\n"
        "hint: add table.row('iota', ...), or pass host= to Lowerings, which runs its reference; "
        "or leave the correction out"
    )


def test_conditional_rows_take_precedence():
    selected = table()
    selected.row("exp", "np.exp2({x})", when=lambda node: node.result.dtype.name == "float64")
    for dtype, expected in (("float32", "np.exp("), ("float64", "np.exp2(")):
        with Builder() as b:
            y = exp(b.input("x", (2,), dtype))
        assert expected in source(b.build({"y": y}), selected)


# -- transformers -------------------------------------------------------------------------------------------------
TEXT = "import math\n\n\ndef forward(params, inputs):\n    x = 1\n    return outputs\n"


def test_inserted_lines_are_indented():
    result = transformed(TEXT, [lambda c: c.replace("return outputs", "    y = 2\n    return outputs")])
    assert "    y = 2\n    return outputs" in result


def test_transformers_run_in_order():
    result = transformed(TEXT, [lambda c: c.replace("x = 1", "x = 2"), lambda c: c.replace("x = 2", "x = 3")])
    assert "x = 3" in result


def test_invalid_transformer_result_is_reported_as_diff():
    with pytest.raises(OptionError) as caught:
        transformed(TEXT, [lambda c: c.replace("x = 1", "x = = 1")])
    assert "-    x = 1" in str(caught.value)
    assert "+    x = = 1" in str(caught.value)
    with pytest.raises(OptionError, match="returned NoneType"):
        transformed(TEXT, [lambda c: None])


def test_source_that_does_not_compile_names_the_line():
    with pytest.raises(BackendError, match="does not compile"):
        Source("def forward(params, inputs):\n    return (\n").function()


# -- templates ----------------------------------------------------------------------------------------------------
def test_templates_see_the_parts(tmp_path):
    (tmp_path / "t.j2").write_text("{{ signature }}|{{ closing }}|{{ backend }}|{{ body | length }}")
    assert (
        from_template(tmp_path / "t.j2", emit(net(), table())) == "def forward(params, inputs):|return outputs|numpy|6"
    )


def test_unknown_names_in_templates_are_errors(tmp_path):
    (tmp_path / "t.j2").write_text("{{ nosuch }}")
    with pytest.raises(OptionError, match="'nosuch' is undefined"):
        from_template(tmp_path / "t.j2", emit(net(), table()))
    with pytest.raises(OptionError, match="does not exist"):
        from_template(tmp_path / "no.j2", {})


def test_rows_after_a_copy_are_refused():
    """Refuse them, because the lowerings of other semantics are a copy that would miss them."""
    table = Lowerings("np", ("import numpy as np",))
    table.row("add", "{x} + {y}")
    table.extend().row("sub", "{x} - {y}")
    with pytest.raises(BackendError, match="a row for 'mul' is added to the lowerings to np after"):
        table.row("mul", "{x} * {y}")


# -- corrections ------------------------------------------------------------------------------------------------------
def abs_(x):
    return ops.where(ops.equal(x, 0.0), 0.0, ops.abs(x))


def maximum(a, b):
    return ops.where(ops.isnan(a), a, ops.maximum(a, b))


def clip(x, low, high):
    return x if high is None else ops.minimum(x, high)


def take(x, indices, axis):
    return ops.take(x, indices + ops.size_value(value=x.shape[axis]), axis=axis)


def corrected_table():
    result = table()
    result.rows(
        {"abs": "np.abs({x})", "equal": "{a} == {b}", "maximum": "np.maximum({a}, {b})", "isnan": "np.isnan({x})"}
    )
    result.rows({"where": "np.where({condition}, {a}, {b})", "take": "np.take({x}, {indices}, {axis})"})
    result.row("size_value", "np.int32({value})")
    result.correct(abs_, maximum, clip, take)
    return result


def test_a_correction_is_one_function_in_which_its_operation_means_the_row_below():
    b = Builder()
    with b:
        x, z = b.input("x", (2,)), b.input("z", (3, 4))
        graph = b.build({"x": ops.abs(x), "z": ops.abs(z), "m": ops.maximum(x, 0.0)})
    text = source(graph, corrected_table())
    assert text.count("def corrected_abs(x):") == 1  # for both shapes
    assert text.count("np.abs(") == 1 and text.count("corrected_abs(") == 3
    assert "np.maximum(a, 0.0)" in text  # a number stays one
    arrays = {"x": np.array([-0.0, -2.0], np.float32), "z": np.ones((3, 4), np.float32)}
    results = Source(text).function()({}, arrays)
    assert not np.signbit(results["x"]).any()
    np.testing.assert_array_equal(results["m"], [0, 0])


def test_a_correction_that_returns_its_argument_is_copied_as_a_result():
    b = Builder()
    with b:
        graph = b.build({"y": ops.clip(b.input("x", (2,)), None, None)})
    numpy_table = corrected_table()
    numpy_table.copy = "np.array({x})"
    x = np.ones(2, np.float32)
    assert not np.shares_memory(Source(source(graph, numpy_table)).function()({}, {"x": x})["y"], x)


def test_corrections_read_sizes_of_the_function():
    b = Builder()
    with b:
        graph = b.build({"y": ops.take(b.input("x", (Dim("B"),)), b.input("k", (1,), "int32"), axis=0)})
    text = source(graph, corrected_table())
    arrays = {"x": np.arange(5, dtype=np.float32), "k": np.array([-2], np.int32)}
    assert Source(text).function()({}, arrays)["y"] == [3]
    assert "    def corrected_take(x_1, indices):" in text


def test_a_later_row_replaces_a_correction():
    numpy_table = corrected_table()
    numpy_table.row("abs", "np.fabs({x})")
    b = Builder()
    with b:
        graph = b.build({"y": ops.abs(b.input("x", (2,)))})
    assert "np.fabs(x)" in source(graph, numpy_table)
