"""Compiled models in PyTorch's autograd: ``to_module()``, ``to_function()`` and ``evaluate``."""

from __future__ import annotations

import copy
from keyword import iskeyword

import numpy as np
import pytest
import torch

import mithril as ml
from mithril import ops
from mithril.graph import GradientError, InputError, UnsupportedError
from mithril.models import (
    BatchNorm1d,
    Dropout,
    Embedding,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Model,
    MultiHeadAttention,
    Multiply,
    Relu,
    Sequential,
)
from mithril_torch.blocks import Block, Stage

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class HandWritten(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.bn = torch.nn.BatchNorm1d(16)
        self.second = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.relu(self.bn(self.first(x))))


def model(dropout=0.0):
    m = Model()
    m += Linear(16, name="first")(input="x")
    m += BatchNorm1d(name="bn")
    m += Relu()
    if dropout:
        m += Dropout(dropout)
    m += Linear(3, name="second")(output="y")
    return m


def x_and_labels(n=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def test_a_torch_optimizer_trains_the_module_like_a_hand_written_one():
    torch.manual_seed(0)
    twin = HandWritten()
    module = ml.compile(model(), "torch", shapes={"x": ["B", 8]}).to_module()
    state = twin.state_dict()
    del state["bn.num_batches_tracked"]
    module.load_state_dict(state)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in twin.named_parameters()]
    for net in (twin, module):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.train()
        for n in (6, 5, 6):
            x, labels = x_and_labels(n)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), labels).backward()
            optimizer.step()
        net.eval()
    x, _ = x_and_labels()
    torch.testing.assert_close(module(x), twin(x), rtol=1e-5, atol=1e-6)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert not module.training and module(x).shape == (6, 3)


def test_every_parameter_of_many_layers_has_the_gradient_of_the_graph():
    m = Model()
    m += LayerNorm()(input="x")
    m += MultiHeadAttention(8, 2, name="attention")
    m += Linear(2)(output="y")
    compiled = ml.compile(m, "torch", shapes={"x": ["B", 5, 8]})
    module = compiled.to_module()
    x, g = torch.randn(3, 5, 8), torch.randn(3, 5, 2)
    module(x).backward(g)
    _, gradients = compiled.evaluate(dict(module.named_parameters()), {"x": x}, {"y": g})
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].detach(), rtol=1e-4, atol=1e-5)


def test_torch_func_and_torch_compile_around_the_module():
    module = ml.compile(model(), "torch", shapes={"x": ["B", 8]}).to_module().eval()
    x, labels = x_and_labels()

    def loss(params):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(module, params, (x,)), labels)

    params = {n: p.detach() for n, p in module.named_parameters()}
    gradients = torch.func.grad(loss)(params)
    torch.nn.functional.cross_entropy(module(x), labels).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    per_row = torch.func.vmap(lambda row: module(row[None])[0])(x)
    torch.testing.assert_close(per_row, module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled(x[:3]), module(x[:3]))
    hessian = torch.func.hessian(lambda row: module(row).square().sum())(x[:1])
    assert hessian.abs().sum() > 0


class Experts(Layer):
    inputs = ("x", "experts")

    def build(self, x, experts):
        return ops.expert_matmul(x, self.param("w", [3, 4, 5], "normal(std=1.0)"), experts)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the checks of shapes
@pytest.mark.parametrize(("rows", "numbers"), [((3, 4), (3,)), ((3, 4), (2, 3)), ((2, 3, 4), (3,))])
def test_captured_and_vectorized_experts_compute_for_other_numbers(rows, numbers):
    shapes = {"x": list(rows), "experts": list(numbers)}
    module = ml.compile(Experts(), "torch", shapes=shapes, types={"experts": "int32"}).to_module()
    x, routings = torch.randn(rows), torch.randint(-1, 4, (6, *numbers), dtype=torch.int32)
    expected = torch.stack([module(x, experts) for experts in routings])
    for captured in (
        torch.jit.trace(module, (x, routings[0]), check_trace=False),
        torch.compile(module, fullgraph=True, backend="aot_eager"),
        torch.export.export(module, (x, routings[0])).module(),
    ):
        torch.testing.assert_close(torch.stack([captured(x, experts) for experts in routings]), expected)
    torch.testing.assert_close(torch.func.vmap(module, in_dims=(None, 0))(x, routings), expected)

    def loss(params, experts):
        return torch.func.functional_call(module, params, (x, experts)).square().sum()

    params = {n: p.detach() for n, p in module.named_parameters()}
    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, routings)
    loss(dict(module.named_parameters()), routings[1]).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(slopes[name][1], parameter.grad)


def test_dropout_draws_new_masks_only_in_training():
    module = ml.compile(model(0.5), "torch", shapes={"x": ["B", 8]}).to_module()
    x, _ = x_and_labels()
    assert module.training and not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    again = copy.deepcopy(module)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), module(x)) and again.first.weight is not module.first.weight


def test_a_copy_shares_the_generated_functions_of_blocks_only():
    m = Model()
    for k in range(2):
        m += Linear(8, name=f"layer{k}")(**({"input": "x"} if not k else {}))
    module = ml.compile(m, "torch", shapes={"x": ["B", 8]}).to_module()
    again = copy.deepcopy(module)
    for old, new in zip(module.blocks, again.blocks, strict=True):
        assert new.mithril_segments[True][0] is old.mithril_segments[True][0] and new.weight is not old.weight
    x, _ = x_and_labels()
    with torch.no_grad():
        again.blocks[0].weight.zero_()
    assert not torch.equal(again(x), module(x))


def test_evaluate_takes_part_in_autograd():
    compiled = ml.compile(model(), "torch", shapes={"x": ["B", 8]})
    params = {n: p.requires_grad_() for n, p in compiled.randomize_params(0).items()}
    x, _ = x_and_labels()
    g = torch.randn(6, 3)
    y = compiled.evaluate(params, {"x": x})["y"]
    y.backward(g)
    _, gradients = compiled.evaluate({n: p.detach() for n, p in params.items()}, {"x": x}, {"y": g}, training=False)
    for name, p in params.items():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not compiled.evaluate(params, {"x": x})["y"].requires_grad
    assert not compiled.evaluate(params, {"x": x}, {"y": g})[1]["first.weight"].requires_grad


class RoundedWeight(ml.models.Layer):
    """Weights that reach the output only after rounding."""

    surrogate = False

    def build(self, x):
        w = self.param("w", (8, 3), "normal")
        return x @ (ops.fake_quantize(w, 0.1) if self.surrogate else ops.round(w))


class Surrogate(RoundedWeight):
    surrogate = True


@pytest.mark.parametrize(
    "layer, text", [(RoundedWeight, "zeros as the gradient of 'w'"), (Surrogate, "custom gradient")]
)
def test_silent_zero_gradients_are_refused(layer, text):
    compiled = ml.compile(layer(), "torch", shapes={"input": ["B", 8]})
    with pytest.raises(GradientError, match=text):
        compiled.to_module()
    params = {n: p.requires_grad_() for n, p in compiled.randomize_params(0).items()}
    x, _ = x_and_labels()
    with pytest.raises(GradientError, match=text):
        compiled.evaluate(params, {"input": x})
    with torch.no_grad():
        compiled.evaluate(params, {"input": x})


def test_a_slice_at_computed_positions_has_a_gradient():
    starts = ops.cast(ml.IOKey("starts"), dtype="int32")
    model = Model.create(outputs={"y": ops.dynamic_slice(Linear(4)(ml.IOKey("x")), starts, sizes=(1, 2))})
    module = ml.compile(model, "torch", shapes={"x": [2, 3], "starts": [2]}).to_module()
    module(x=torch.ones(2, 3), starts=torch.tensor([0.0, 1.0])).sum().backward()
    assert module.get_parameter("linear.bias").grad.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_programs_for_inference():
    x, _ = x_and_labels()
    compiled = ml.compile(model(), "torch", shapes={"x": ["B", 8]}, inference=True)
    module = compiled.to_module()
    module(x).sum().backward()
    assert all(p.grad.abs().sum() > 0 for n, p in module.named_parameters() if n != "first.bias")
    with pytest.raises(InputError, match="no training mode"):
        module.train()
    static = ml.compile(model(), "torch", shapes={"x": [6, 8]}, static_inference=True)
    with pytest.raises(InputError, match="embeds the parameters"):
        static.to_module()


def test_wrong_calls_name_the_inputs():
    module = ml.compile(model(), "torch", shapes={"x": ["B", 8]}).to_module()
    with pytest.raises(InputError, match="axis 1 of input 'x' is 9"):
        module(torch.randn(2, 9))
    with pytest.raises(InputError, match="expected float32, got torch.float64"):
        module(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(InputError, match="forward expects the inputs x"):
        module()
    with pytest.raises(InputError, match="shapes of the inputs"):
        ml.compile(model(), "torch").to_module()
    clash = Model()
    clash += Linear(2, name="forward")(input="x", output="y")
    with pytest.raises(UnsupportedError, match=r"forward.weight"):
        ml.compile(clash, "torch", shapes={"x": ["B", 8]}).to_module()


def test_the_pure_function_returns_new_states():
    compiled = ml.compile(model(), "torch", shapes={"x": ["B", 8]})
    function = compiled.to_function(training=True)
    params, state = compiled.randomize_params(0), compiled.initial_state()
    x, _ = x_and_labels()
    outputs, new = function(params, {"x": x}, state)
    expected, expected_state = compiled.evaluate(params, {"x": x}, training=True, state=state)
    torch.testing.assert_close(outputs["y"], expected["y"])
    torch.testing.assert_close(new, expected_state)
    with pytest.raises(InputError, match="the model has a state"):
        function(params, {"x": x})
    with pytest.raises(InputError, match="parameters do not match"):
        function({}, {"x": x}, state)
    assert np.isfinite(outputs["y"].numpy()).all()


# -- kernels under autograd ------------------------------------------------------------------------------------------
def backward_nodes(y):
    """Return the names of the functions through which autograd goes back."""
    names, pending = set(), [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            names.add(type(node).__name__)
            pending += [inner for inner, _ in node.next_functions]
    return names


def test_batch_norm_in_training_is_one_kernel():
    module = ml.compile(model(), "torch", shapes={"x": ["B", 8]}).to_module()
    x, _ = x_and_labels()
    x = x * 3 + 1
    h = module.get_submodule("first")
    rows = torch.nn.functional.linear(x, h.weight, h.bias)
    assert "NativeBatchNormBackward0" in backward_nodes(module(x))
    batch = module.get_submodule("bn")
    torch.testing.assert_close(batch.running_mean, 0.1 * rows.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch.running_var, 0.9 + 0.1 * rows.var(0), rtol=1e-5, atol=1e-6)


class WithStatistics(Layer):
    """Batch normalization whose statistics are outputs as well."""

    outputs = ("y", "mean", "var")

    def build(self, x):
        return ops.batch_norm_training(x, self.param("weight", (8,), "ones"), self.param("bias", (8,)))


def test_statistics_that_are_outputs_keep_their_gradients():
    module = ml.compile(WithStatistics(), "torch", shapes={"input": ["B", 8]}).to_module()
    x = x_and_labels()[0].requires_grad_()
    results = module(x)
    assert "NativeBatchNormBackward0" not in backward_nodes(results["var"])
    (gradient,) = torch.autograd.grad((results["mean"] ** 2 + results["var"]).sum(), x)
    twin = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad((twin.mean(0) ** 2 + twin.var(0, correction=0)).sum(), twin)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_large_values_pass_through_gelu_in_every_way_to_run_it():
    compiled = ml.compile(Gelu(), "torch", shapes={"input": [4, 16]})
    ordinary = torch.linspace(-5, 5, 64).reshape(4, 16)
    large = torch.full((4, 16), 3e38)
    large[0, :2] = torch.tensor([float("inf"), -0.0])
    pure, module = compiled.to_function(), compiled.to_module()
    for x in (ordinary, large):
        expected = torch.nn.functional.gelu(x.double()).float().where(x < 1e30, x)
        rows = torch.func.vmap(lambda row: pure({}, {"input": row[None].expand(4, 16)})["output"][0])
        for y in (compiled(x)["output"], module(x), rows(x)):
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
        value = x.clone().requires_grad_()
        module(value).sum().backward()
        finite = x.isfinite()
        gradient = torch.func.grad(lambda z: pure({}, {"input": z})["output"].sum())(x)
        torch.testing.assert_close(value.grad[finite], gradient[finite])
    assert value.grad[1].eq(1).all()


def free_names():
    """Return names that PyTorch allows for submodules and that classes of PyTorch or of this package use themselves."""
    plain = ml.compile(model(), "torch", shapes={"x": ["B", 8]}).to_module()
    classes = (torch.nn.Module, torch.fx.GraphModule, type(plain), Block, Stage)
    names = {name for used in (*classes, plain) for name in dir(used)} | set(vars(plain))
    names |= {name.removeprefix("mithril_") for name in names} | {name.strip("_") for name in names}
    names |= {
        "graph",
        "shared",
        "takes",
        "gives",
        "module",
        "model",
        "self",
        "fn",
        "x",
        "input",
        "output",
        "items",
        "T",
    }
    allowed = []
    for name in sorted(names - {""}):
        if name.startswith(("__", "_CompiledModule__", "_Stage__")) or iskeyword(name):  # reserved
            continue
        try:
            torch.nn.Module().add_module(name, torch.nn.Linear(4, 4))
        except KeyError:
            continue
        allowed.append(name)
    return allowed


class Children(torch.nn.Module):
    """Submodules of many names, which repeat and so are blocks, and a tensor."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]))
        self.mithril_distribute = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        for child in self.children():
            for layer in child:
                x = torch.tanh(layer(x))
        return x * self.mithril_distribute


def test_submodules_may_have_all_names_that_pytorch_allows():
    names = [n for n in free_names() if n != "mithril_distribute"]
    assert {"mithril_blocks", "mithril_stage", "mithril_input_names"} <= set(names)
    assert {"blocks", "block_paths", "graph", "stage", "distribute", "input_names", "shared", "code"} <= set(names)
    net, x = Children(names).eval(), torch.randn(3, 4)
    module = ml.compile(ml.from_torch(net, x, training=False), "torch").to_module()
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in net.named_parameters()}
    module.load_state_dict(net.state_dict())
    torch.testing.assert_close(module(x), net(x), rtol=1e-5, atol=1e-6)
    assert isinstance(module.blocks, torch.nn.Module) and len(module.mithril_blocks) == len(names)
    stage = module.mithril_stage(0, num_stages=1)
    torch.testing.assert_close(stage(x), net(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(module)(x), net(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("declared", ["int32", "int64"])
def test_integers_of_both_widths_are_inputs(declared):
    m = Model()
    m += Embedding(10, 4, name="table")(input="ids")
    m += Linear(3, name="head")(output="y")
    module = ml.compile(m, "torch", shapes={"ids": ["B", 5]}, types={"ids": declared}).to_module()
    ids = torch.randint(0, 10, (2, 5))
    expected = module(ids.to(getattr(torch, declared)))
    for dtype in (torch.int32, torch.int64):
        torch.testing.assert_close(module(ids.to(dtype)), expected)
        torch.testing.assert_close(module(ids=ids.to(dtype)), expected)
        torch.testing.assert_close(
            torch.func.functional_call(module, dict(module.named_parameters()), ids.to(dtype)), expected
        )
    torch.testing.assert_close(module(ids + 2**32)[0, 0], module(torch.full_like(ids, 9))[0, 0])
    with pytest.raises(InputError, match="Type mismatch"):
        module(ids.float())


def test_bound_parameters_may_be_arrays_of_numpy():
    compiled = ml.compile(model(), "torch", shapes={"x": [6, 8]})
    params = {name: p.numpy() for name, p in compiled.randomize_params(0).items()}
    net = compiled.bind(params).to_module()
    for name, p in net.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), params[name])
    x, _ = x_and_labels()
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_bound_arrays_of_another_dtype_are_refused():
    compiled = ml.compile(model(), "torch", shapes={"x": [6, 8]})
    params = {name: p.numpy().astype(np.float64) for name, p in compiled.randomize_params(0).items()}
    with pytest.raises(InputError, match="expected float32, got float64"):
        compiled.bind(params).to_module()


def test_no_block_is_a_layer_that_a_pass_joins():
    """``high`` makes one product of those with the same operand: it reads parameters of both."""
    model = Model()
    for name in ("query", "key"):
        model |= Linear(8, name=name)(input="input", output=name)
    model |= Multiply()(left="query", right="key", output="output")
    compiled = ml.compile(model, "torch", shapes={"input": ["B", 8]}, optimization_level="high")
    compiled.bind(compiled.randomize_params(0))
    module, x = compiled.to_module(), np.ones((3, 8), np.float32)
    assert not module.mithril_block_paths
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), compiled({"input": x})["output"], rtol=1e-6)
    with pytest.raises(UnsupportedError, match="reads parameters of several blocks: query, key"):
        compiled.to_module(blocks=["query", "key"])


def test_joined_layers_are_one_block_with_the_layer_around_them():
    attention = Model(name="attention")
    for name in ("query", "key"):
        attention |= Linear(8, name=name)(input="input", output=name)
    attention |= Multiply()(left="query", right="key", output="output")
    model = Sequential(Linear(8, name="first"), attention, Linear(8, name="last"))
    compiled = ml.compile(model, "torch", shapes={"input": ["B", 8]}, optimization_level="high")
    compiled.bind(compiled.randomize_params(0))
    module, x = compiled.to_module(), np.ones((3, 8), np.float32)
    assert module.mithril_block_paths == ("first", "attention", "last")
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), compiled({"input": x})["output"], rtol=1e-5)
