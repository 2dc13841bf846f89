"""Operations of training steps that share a kernel: updates of many parameters, normalizations and their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import BuildOptions
from mithril.derivatives import gradients, value_and_gradients
from mithril.graph import Builder, Output
from mithril.graph.evaluation import evaluate
from mithril_torch.fusion.attention_gradients import join_attentions
from mithril_torch.parallel import program_parts

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3, 4), "large": (100, 100), "row": (1, 7)}


def results_of(graph, arrays):
    """Return the source of a graph and its results on PyTorch; check that the arguments are as before."""
    backend = ml.TorchBackend()
    options = BuildOptions()
    executable = backend.build(backend.decomposed(graph, options), options)
    params = {i.name: backend.array(arrays[i.name]) for i in graph.with_role("param")}
    inputs = {i.name: backend.array(arrays[i.name]) for i in graph.with_role("input")}
    results = {n: np.array(backend.to_numpy(x)) for n, x in executable(params, inputs).items()}
    for name, x in {**params, **inputs}.items():
        np.testing.assert_array_equal(backend.to_numpy(x), arrays[name], err_msg=name)
    return executable.source, results


def compare(graph, arrays, rtol=1e-5):
    source, results = results_of(graph, arrays)
    expected = evaluate(graph, arrays)
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(
            results[name], x, rtol=rtol, atol=rtol * np.nanmax(np.abs(x), initial=1), err_msg=name
        )
    return source


def adam(p, g, m, v, rate):
    m_new, v_new = (g - m) * 0.1 + m, (g * g - v) * 0.001 + v
    return p * (1.0 - rate * 0.01) - rate * (m_new / (ops.sqrt(v_new) + 1e-8)), m_new, v_new


def momentum(p, g, m, v, rate):
    m_new = m * 0.9 + g
    return p - rate * m_new, m_new, ops.maximum(v, 0.25)


def update(rule, chained=False):
    with Builder() as b:
        good, rate = b.input("good", (), "bool"), b.input("rate", ())
        outputs, previous = {}, None
        for name, shape in SHAPES.items():
            p, m, v = (b.param(f"{kind}_{name}", shape) for kind in "pmv")
            g = b.input(f"g_{name}", shape)
            if chained and previous is not None:
                g = g + ops.mean(previous)
            new = ops.cond(good, lambda: rule(p, g, m, v, rate), lambda: (p, m, v))
            outputs.update(zip((f"new_{kind}_{name}" for kind in "pmv"), new, strict=True))
            previous = new[0]
    return b.build(outputs)


def test_lists_overwrite_no_value_that_autograd_saves():
    with Builder() as b:
        on = b.input("on", (), "bool")
        values = [b.param(name, (3,)) for name in "pq"]
        p, q = (ops.cond(on, lambda x=x: ops.exp(x) * 2.0, lambda x=x: x) for x in values)
        graph = b.build({"loss": ops.sum(p) + ops.sum(q)})
    arrays = {name: np.arange(3, dtype=np.float32) + k for k, name in enumerate("pq")}
    compiled = ml.compile(graph, "torch", autodiff="native")
    params = {name: compiled.backend.array(x) for name, x in arrays.items()}
    _, slopes = compiled.evaluate(params, {"on": np.array(True)}, "loss")
    for name, x in arrays.items():
        np.testing.assert_allclose(compiled.backend.to_numpy(slopes[name]), 2.0 * np.exp(x), rtol=1e-6)
    assert "_foreach_mul_(" in ml.compile(graph, "torch").source


def arrays_of(graph, good=True):
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.uniform(0.1, 1.0, i.type.shape).astype("float32") for i in graph.inputs}
    return {**arrays, "good": np.asarray(good), "rate": np.float32(0.1)}


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("rule", [adam, momentum])
def test_small_parameters_are_updated_by_calls_on_lists(rule, good):
    graph = update(rule)
    source = compare(graph, arrays_of(graph, good))
    assert source.count("def if_") == 4, "the small parameters share an if, the large one has its own"
    assert "torch._foreach_" in source
    assert "p_large_1, " not in source.split("torch._foreach_")[1].split("\n")[0]


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("selected", ["large", "", "m_"])
def test_updates_write_into_donated_memory(selected, good):
    """Overwrite donated memory only: other arguments, such as gradients, keep their elements."""
    graph = update(adam)
    donated = [i.name for i in graph.with_role("param") if selected in i.name]
    tagged = tuple(replace(i, tags={**i.tags, "donated": True}) if i.name in donated else i for i in graph.inputs)
    arrays, backend = arrays_of(graph, good), ml.TorchBackend()
    executable = backend.build(backend.decomposed(graph.replaced(inputs=tagged), BuildOptions()), BuildOptions())
    params, inputs = ({i.name: backend.array(arrays[i.name]) for i in graph.with_role(r)} for r in ("param", "input"))
    results = executable(params, inputs)
    for name, x in evaluate(graph, arrays).items():
        np.testing.assert_allclose(backend.to_numpy(results[name]), x, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, x in {**params, **inputs}.items():
        if name in donated:
            assert results[f"new_{name}"].data_ptr() == x.data_ptr()
        else:
            np.testing.assert_array_equal(backend.to_numpy(x), arrays[name], err_msg=name)


def test_updates_that_read_others_are_not_merged_with_them():
    graph = update(adam, chained=True)
    assert "_foreach_" not in compare(graph, arrays_of(graph))


def test_values_with_two_readers_are_not_overwritten():
    def rule(p, g, m, v, rate):
        d = ops.exp(g)
        return d + 1.0, d * rate, p - d

    graph = update(rule)
    assert "torch._foreach_exp(" in compare(graph, arrays_of(graph))


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (6, 4)])
def test_batch_norm_of_a_step_computes_its_statistics_once(shape):
    with Builder() as b:
        x = b.param("x", shape)
        scale, bias = b.param("scale", (4,)), b.param("bias", (4,))
        y, mean, var = ops.batch_norm_training(ops.sin(x), scale, bias, eps=1e-4)
        loss = ops.mean(ops.sin(y))
    graph = value_and_gradients(
        b.build([Output(loss, "loss"), Output(mean, "mean", "state"), Output(var, "var", "state")]), "loss"
    )
    roles = {"gradient": "report"}
    graph = graph.replaced(results=tuple(Output(r.value, r.name, roles.get(r.role, r.role)) for r in graph.results))
    source = compare(graph, arrays_of(graph), rtol=2e-5)
    assert "batch_norm_saving(" in source
    assert "batch_norm_grads(" in source
    assert source.count("torch.mean(") <= 1, "of the loss"


def test_lowered_batch_norm_has_the_values_of_its_declaration():
    """Passes of a trainer see lowered graphs, and evaluate them with ``verify="numeric"``."""
    with Builder() as b:
        x, scale, bias = b.input("x", (6, 3, 2)), b.param("scale", (3,)), b.param("bias", (3,))
        y, mean, _ = ops.batch_norm_training(x, scale, bias, eps=0.5)
    graph = b.build([Output(y, "y"), Output(mean, "mean", "state")])
    lowered = ml.TorchBackend().decomposed(graph, BuildOptions())
    assert [node.op.name for node in lowered.nodes] == ["torch.batch_norm_for_state"]
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.inputs}
    expected = evaluate(graph, arrays)
    for name, array in evaluate(lowered, arrays).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("shape", [(), (5, 5)], ids=["rows", "images"])
def test_batch_norm_of_an_empty_batch(shape):
    """Its kernels raise an error, and that of the gradient ends the process."""
    with Builder() as b:
        x = b.input("x", (0, 4, *shape))
        scale, bias = b.param("scale", (4,)), b.param("bias", (4,))
        y, mean, _ = ops.batch_norm_training(ops.sin(x), scale, bias, eps=1e-4)
        loss = ops.sum(ops.sin(y))
    forward = b.build([Output(loss, "loss"), Output(mean, "mean", "state")])
    for graph in (forward, value_and_gradients(forward, "loss", wrt=("x", "scale", "bias"))):
        compare(graph, arrays_of(graph))


def test_normalizations_with_one_cotangent_have_their_own_sums():
    with Builder() as b:
        x = b.param("x", (2, 3, 8))
        parts = [b.param(n, (8,)) for n in ("s", "c", "t", "d")]
        y = ops.layer_norm(x, *parts[:2]) + ops.layer_norm(ops.sin(x), *parts[2:], eps=1e-3)
        loss = ops.mean(ops.sin(y))
    graph = value_and_gradients(b.build([loss]))
    source = compare(graph, arrays_of(graph), rtol=2e-5)
    assert source.count("native_layer_norm_backward(") == 2
    assert source.count("native_layer_norm(") == 2


def attention_gradients(q, k, v, mask=None, **settings):
    """Return the source of the gradients of an attention; compare them with the reference."""
    with Builder() as b:
        x, y, z = (b.param(n, shape) for n, shape in (("q", q), ("k", k), ("v", v)))
        m = None if mask is None else b.param("mask", mask)
        out = ops.attention(x, ops.sin(y), z, m, **settings)
    graph = b.build({"out": out})
    compiled = ml.compile(graph, "torch")
    arrays = {n: a for n, a in arrays_of(graph).items() if n in graph.by_name}
    slope = np.cos(np.arange(np.prod(out.shape))).reshape(out.shape).astype("float32")
    _, results = compiled.evaluate({n: compiled.backend.array(a) for n, a in arrays.items()}, {}, slope)
    expected = evaluate(gradients(graph), {**arrays, "grad/out": slope})
    for name, x in results.items():
        np.testing.assert_allclose(compiled.backend.to_numpy(x), expected[f"grad/{name}"], atol=2e-6, err_msg=name)
    return compiled.source


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"scale": 0.3}])
def test_cotangents_of_attention_are_one_call(settings):
    keys = (2, 2, 5 if "causal" in settings else 7, 4)
    source = attention_gradients((2, 2, 5, 4), keys, keys, **settings)
    assert "attention_grads(" in source
    assert "softmax(" not in source.partition("def forward")[2]


def test_cotangents_before_their_attention_are_not_joined(monkeypatch):
    """Move the attention behind the cotangent of its values, which does not read its result."""
    graphs = []
    monkeypatch.setattr("mithril_torch.backend.join_attentions", lambda graph: graphs.append(graph) or graph)
    attention_gradients((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    graph = graphs[-1]
    late = {next(node for node in graph.nodes if node.op is ops.attention)}
    for node in graph.nodes:
        late |= {node} if any(graph.producers.get(v) in late for v in node.operands if v is not None) else set()
    reordered = graph.replaced(nodes=tuple(sorted(graph.nodes, key=lambda node: node in late)))
    for case, is_match in ((graph, True), (reordered, False)):
        after = join_attentions(case)
        assert ("torch.attention_grads" in [node.op.name for node in after.nodes]) == is_match
        available = {i.value for i in after.inputs}
        for node in after.nodes:
            assert available.issuperset(v for v in node.operands if v is not None), node
            available.update(node.results)


@pytest.mark.parametrize("case", ["mask", "shared heads", "wider values", "more keys"])
def test_attention_without_a_kernel_is_decomposed_in_its_gradient(case):
    q, k = (1, 2, 3, 4), (1, 1 if case == "shared heads" else 2, 5 if case == "more keys" else 3, 4)
    v = (*k[:3], 5 if case == "wider values" else 4)
    source = attention_gradients(q, k, v, (3, 3) if case == "mask" else None, causal=case == "more keys")
    assert "attention_grads(" not in source


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_cotangents_of_sampling_are_one_call(mode, rank):
    size = (6, 5, 4)[:rank]
    with Builder() as b:
        x, grid = b.param("x", (2, 3, *size)), b.param("grid", (2, *size, rank))
        loss = ops.mean(ops.sin(ops.grid_sample(x, grid * 2.0 - 1.0, mode=mode, padding_mode="border")))
    graph = b.build({"loss": loss})
    source = gradient_source(ml.compile(graph, "torch"), graph, arrays_of(graph))
    assert ("sampled_grads(" in source) == (rank == 2 or mode != "bicubic"), "no kernel for bicubic volumes"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_the_cotangent_of_ctc_is_one_call(reduction, zero_infinity):
    with Builder() as b:
        logits = b.param("logits", (3, 6, 5))
        labels = np.array([[1, 1, 2], [3, 4, 1], [2, 2, 2]], np.int32)
        losses = ops.ctc_loss(logits, labels, np.array([6, 5, 3], np.int32), np.array([2, 3, 3], np.int32),
                              reduction=reduction, zero_infinity=zero_infinity)  # fmt: skip
        loss = ops.sum(ops.where(ops.isfinite(losses), losses, 0.0)) if reduction == "none" else losses
    graph = b.build({"loss": loss})
    source = gradient_source(ml.compile(graph, "torch"), graph, arrays_of(graph))
    assert "ctc_grad(" in source
    assert "for step" not in source


def gradient_source(compiled, graph, arrays):
    """Return the source of the gradients of a loss; compare them with those of the reference."""
    arrays = {i.name: arrays[i.name] for i in graph.arguments}
    params = {n: compiled.backend.array(a) for n, a in arrays.items()}
    _, results = compiled.evaluate(params, {}, np.float32(1.0))
    expected = evaluate(gradients(graph), {**arrays, "grad/loss": np.float32(1.0)})
    for name, x in results.items():
        np.testing.assert_allclose(compiled.backend.to_numpy(x), expected[f"grad/{name}"], atol=2e-6, err_msg=name)
    return compiled.source


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0)])
def test_cotangents_of_a_split_are_concatenated(order):
    with Builder() as b:
        x = b.param("x", (3, 8))
        parts = ops.split(x, sizes=(1, 3, 2, 2), axis=1)
        loss = ops.sum(ops.concat(*(ops.sin(parts[k]) * (k + 1.0) for k in order), axis=1))
    graph = b.build({"loss": loss})
    source = gradient_source(ml.compile(graph, "torch"), graph, arrays_of(graph))
    assert source.count("F.pad(") == (0 if len(order) == 4 else 2), "parts with a gap stay apart"


# -- results in the memory of operands ----------------------------------------------------------------------------
OVERLAPS = {
    "divided by its first column": lambda h: h / h[:, :1],
    "divided by its first row": lambda h: h / h[:1],
    "symmetric": lambda h: h + ops.transpose(h),
    "twice": lambda h: h + h,
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_no_operation_overwrites_memory_that_another_operand_views(case):
    with Builder() as b:
        x, good = b.input("x", (4, 4)), b.input("good", (), "bool")
        y = ops.cond(good, lambda: OVERLAPS[case](ops.exp(x)), lambda: x)
        graph = b.build({"y": y})
    source = compare(graph, {"x": np.random.default_rng(5).standard_normal((4, 4), np.float32), "good": np.array(True)})
    assert ("out=" in source) == (case == "twice"), source


@pytest.mark.parametrize("reads", ["nothing", "a result", "a later part"])
def test_parts_of_a_program_keep_arguments_that_are_still_read(reads, monkeypatch):
    with Builder() as b:
        d = b.param("d", (2, 3))
        new, middle = d * 2.0, ops.exp(b.input("x", (2, 3)))
        later = middle + (d if reads == "a later part" else 1.0)
        graph = b.build({"new": new, "later": later, **({"old": d} if reads == "a result" else {})})
    graph = graph.replaced(inputs=tuple(replace(i, tags={"donated": True}) for i in graph.inputs))
    (call,) = (node for node in graph.nodes if node.op is ops.exp)
    monkeypatch.setattr(program_parts._Cutter, "_forward", lambda self, node: None)
    first, _, _ = program_parts._Cutter(graph, [call]).run()[0]
    assert first.graph.input("d").tags.get("donated", False) == (reads == "nothing")
