"""Mixtures of experts on every backend, against a formula in NumPy, and those of decoders in one parameter each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import to_numpy
from mithril.models import IOKey, Layer, MixtureOfExperts, Model

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "mithril-hub" / "tests"))
from checkpoints import folder_of, read_record

BACKENDS = ["numpy", "jax", "torch", "mlx", "c", "ggml"]
EXPERTS, HIDDEN, WIDTH, ACTIVE = 5, 6, 4, 2


def arguments():
    """Return inputs and parameters; the shares of the router differ clearly."""
    rng = np.random.default_rng(3)
    forms = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: rng.standard_normal((EXPERTS, *form), np.float32) * 0.5 for name, form in forms.items()}
    x = rng.standard_normal((2, 3, WIDTH), np.float32)
    router = rng.standard_normal((EXPERTS, WIDTH), np.float32)
    gaps = np.diff(np.sort(x @ router.T, -1), axis=-1)
    assert gaps.min() > 1e-3  # no token is between two experts
    return x, {"router": router, **params}


def silu(x):
    return x / (1 + np.exp(-x))


def expected(x, router, gate, up, down, *, normalized):
    """Send each token to its experts, one by one."""
    y = np.zeros_like(x)
    logits = x @ router.T
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for index in np.ndindex(*x.shape[:-1]):
        token, experts = x[index], np.argsort(-shares[index])[:ACTIVE]
        total = shares[index][experts].sum() if normalized else 1.0
        for e in experts:
            y[index] += shares[index][e] / total * ((silu(token @ gate[e]) * (token @ up[e])) @ down[e])
    return y, shares


@pytest.mark.parametrize(("backend", "normalized"), [*((b, True) for b in BACKENDS), ("numpy", False)])
def test_tokens_pass_through_their_experts(backend, normalized):
    x, params = arguments()
    layer = MixtureOfExperts(EXPERTS, HIDDEN, active=ACTIVE, normalized=normalized)
    compiled = ml.compile(Model(layer), backend, shapes={"input": list(x.shape)})
    parameters = {f"mixture_of_experts.{n}": compiled.backend.array(a) for n, a in params.items()}
    actual = to_numpy(compiled.evaluate(parameters, {"input": compiled.backend.array(x)})["output"])
    np.testing.assert_allclose(actual, expected(x, **params, normalized=normalized)[0], rtol=2e-4, atol=2e-5)


def gradients_of(backend, x, params, cotangent, **options):
    """Return the gradients of the parameters of a mixture, by name."""
    layer = MixtureOfExperts(EXPERTS, HIDDEN, **options)
    compiled = ml.compile(Model(layer), backend, shapes={"input": list(x.shape)})
    parameters = {f"mixture_of_experts.{n}": compiled.backend.array(a) for n, a in params.items()}
    _, gradients = compiled.evaluate(parameters, {"input": x}, cotangent)
    return {n: to_numpy(gradients[f"mixture_of_experts.{n}"]) for n in params}


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_finite_differences(backend):
    """Compare the change of the result along random directions; no token changes its experts on the way."""
    x, params = arguments()
    rng = np.random.default_rng(8)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    gradients = gradients_of(backend, x, params, cotangent, active=ACTIVE)
    assert np.abs(gradients["router"]).max() > 0.01
    exact = {n: a.astype(np.float64) for n, a in params.items()}
    for name, slope in gradients.items():
        direction = rng.standard_normal(slope.shape)
        ends = [
            (expected(x.astype(np.float64), **{**exact, name: exact[name] + step * direction}, normalized=True)[0])
            for step in (1e-5, -1e-5)
        ]
        change = ((ends[0] - ends[1]) / 2e-5 * cotangent).sum()
        assert (slope * direction).sum() == pytest.approx(change, rel=2e-3, abs=2e-3), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_active_expert_trains_the_router(backend):
    x, params = arguments()
    del params["gate"]
    gradients = gradients_of(backend, x, params, np.ones_like(x), active=1, gated=False)
    experts = set(np.argmax(x @ params["router"].T, -1).ravel().tolist())
    used = {e for e, g in enumerate(gradients["up"]) if np.abs(g).max() > 0}
    assert used == experts and len(used) < EXPERTS
    assert np.abs(gradients["router"]).max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_that_overflows_concerns_its_tokens_only(backend):
    x, params = arguments()
    active = np.argsort(-(x @ params["router"].T), -1)[..., :ACTIVE]
    expert = int(np.argmin(np.bincount(active.ravel(), minlength=EXPERTS)))
    unaffected = (active != expert).all(-1)
    assert unaffected.any()
    params["down"][expert] = 1e38
    params["up"][expert] *= 1e3
    compiled = ml.compile(Model(MixtureOfExperts(EXPERTS, HIDDEN)), backend, shapes={"input": list(x.shape)})
    parameters = {f"mixture_of_experts.{n}": compiled.backend.array(a) for n, a in params.items()}
    y = to_numpy(compiled.evaluate(parameters, {"input": x})["output"])
    with np.errstate(all="ignore"):
        exact = expected(x.astype(np.float64), **{n: a.astype(np.float64) for n, a in params.items()}, normalized=True)
    np.testing.assert_allclose(y[unaffected], exact[0][unaffected], rtol=2e-4, atol=2e-5)


class Products(Layer):
    """Multiplies rows by the weights of experts."""

    inputs = ("x", "w", "experts")

    def build(self, x, w, experts):
        return ops.expert_matmul(x, w, experts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_of_many_rows_are_those_of_single_rows(backend):
    """Send more rows to an expert than a block has, none to another, and some to experts that do not exist."""
    rng = np.random.default_rng(5)
    w, cotangent = (rng.standard_normal(s, np.float32) for s in ((4, 3, 5), (40, 2, 5)))
    x, experts = rng.standard_normal((40, 1, 3), np.float32), rng.choice([-1, 0, 1, 1, 3, 4], (40, 2)).astype(np.int32)
    inputs = {"x": x, "w": w, "experts": experts}
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    model = Model.create(outputs={"y": Products()(*map(IOKey, inputs))})
    compiled = ml.compile(model, backend, shapes=shapes, types={"experts": "int32"}, trainable=["x", "w"])
    y, gradients = compiled.evaluate({}, inputs, {"y": cotangent})
    rows = {e: (experts == e)[..., None] for e in range(4)}
    expected = sum(np.where(rows[e], x @ w[e], 0) for e in rows)
    np.testing.assert_allclose(to_numpy(y["y"]), expected, rtol=1e-5, atol=1e-5)
    slopes = [np.einsum("nkd,nke->de", np.broadcast_to(x, (40, 2, 3)), np.where(rows[e], cotangent, 0)) for e in rows]
    np.testing.assert_allclose(to_numpy(gradients["w"]), slopes, rtol=1e-4, atol=1e-5)
    back = sum(np.where(rows[e], cotangent @ w[e].T, 0) for e in rows).sum(1, keepdims=True)
    np.testing.assert_allclose(to_numpy(gradients["x"]), back, rtol=1e-4, atol=1e-5)


def test_uneven_use_of_experts_costs():
    x, params = arguments()
    losses = {}
    for balance in (0.0, 0.5):
        model = Model(MixtureOfExperts(EXPERTS, HIDDEN, active=ACTIVE, balance=balance))
        trainer = ml.Trainer(model, ml.SGD(0.0), loss="mse_loss", backend="numpy", progress=False, seed=0)
        trainer.begin({"input": x, "target": np.zeros_like(x)})
        parameters = {f"mixture_of_experts.{n}": a for n, a in params.items()}
        trainer.engine.arrays.update({n: a.copy() for n, a in parameters.items()})
        losses[balance] = float(trainer.step({"input": x, "target": np.zeros_like(x)})["loss"])
    _, shares = expected(x, **params, normalized=True)
    rows = shares.reshape(-1, EXPERTS)
    used = np.bincount(np.argsort(-rows, -1)[:, :ACTIVE].ravel(), minlength=EXPERTS) / rows.shape[0] / ACTIVE
    assert losses[0.5] - losses[0.0] == pytest.approx(0.5 * EXPERTS * (used * rows.mean(0)).sum(), rel=1e-4)


def test_arguments_are_checked():
    with pytest.raises(ml.ModelError, match="active=3 exceeds the 2 experts"):
        MixtureOfExperts(2, 4, active=3)
    with pytest.raises(ml.ModelError, match="(?s)unknown activation 'sillu' of MixtureOfExperts.*silu"):
        MixtureOfExperts(4, 8, activation="sillu")
    x, weights, numbers = np.ones((2, 4)), np.ones((3, 4, 5)), np.zeros(2, np.int32)
    with pytest.raises(ml.ShapeError, match=r"requires x \[..., in\] and w \[experts, in, out\]"):
        Model(Products())(x, weights[0], numbers)
    with ml.Builder() as b, pytest.raises(ml.ShapeError, match="a row of x and g for each number of an expert"):
        ops.expert_weight_grad(b.input("x", (2, 4)), b.input("g", (2, 5)), b.input("n", (1,), "int32"), count=3)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_numbers_that_may_not_hold_all_experts_are_refused(kind):
    model = Model.create(outputs={"y": Products()(*map(IOKey, ("x", "w", "experts")))})
    inputs = {"x": np.ones((2, 3), np.float32), "w": np.ones((300, 3, 5), np.float32), "experts": np.ones(2, kind)}
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    with pytest.raises(ml.DTypeError, match=f"at least 32 bits, not {kind}"):
        ml.compile(model, "numpy", shapes=shapes, types={"experts": kind}).evaluate({}, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_experts_without_a_sign(backend):
    inputs = {"x": np.ones((3, 2), np.float32), "w": np.ones((2, 2, 2), np.float32)}
    inputs["experts"] = np.array([0, 1, 4294967295], np.uint32)
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    model = Model.create(outputs={"y": Products()(*map(IOKey, inputs))})
    compiled = ml.compile(model, backend, shapes=shapes, types={"experts": "uint32"}, trainable=["w"])
    y, gradients = compiled.evaluate({}, inputs, {"y": inputs["x"]})
    np.testing.assert_allclose(to_numpy(y["y"]), [[2, 2], [2, 2], [0, 0]])
    np.testing.assert_allclose(to_numpy(gradients["w"]), np.ones((2, 2, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_of_integers(backend):
    rng = np.random.default_rng(6)
    x, w = (rng.integers(-9, 9, shape).astype(np.int32) for shape in ((4, 3), (2, 3, 5)))
    inputs = {"x": x, "w": w, "experts": np.array([1, 0, 2, 1], np.int32)}
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    model = Model.create(outputs={"y": Products()(*map(IOKey, inputs))})
    compiled = ml.compile(model, backend, shapes=shapes, types=dict.fromkeys(inputs, "int32"))
    expected = [x[0] @ w[1], x[1] @ w[0], np.zeros(5), x[3] @ w[1]]
    np.testing.assert_array_equal(to_numpy(compiled.evaluate({}, inputs)["y"]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_with_any_number_of_experts(backend):
    """Compile once for a symbolic number of experts, and train three sizes."""
    model = Model.create(outputs={"y": Products()(*map(IOKey, ("x", "w", "experts")))})
    shapes = {"x": [3, 2], "w": [None, 2, 2], "experts": [3]}
    compiled = ml.compile(model, backend, shapes=shapes, types={"experts": "int32"}, trainable=["w"])
    x, experts = np.ones((3, 2), np.float32), np.array([1, 1, 0], np.int32)
    for count in (2, 4, 0):
        inputs = {"x": x, "w": np.ones((count, 2, 2), np.float32), "experts": experts}
        _, gradients = compiled.evaluate({}, inputs, {"y": x})
        slopes = to_numpy(gradients["w"])
        np.testing.assert_allclose(slopes[:, 0, 0], [1, 2, 0, 0][:count])


class Shared(Layer):
    """Sums the results of experts with given shares."""

    inputs = ("x", "shares", "experts", "up", "down")

    def build(self, x, shares, experts, up, down):
        return ops.expert_mixture(x, shares, experts, up, down, activation="relu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_active_expert_without_a_share_is_ignored(backend):
    """Let an expert overflow whose share underflowed to 0: gradients are those without the expert."""
    ones = np.ones((1, 2), np.float32)
    up = np.stack([np.eye(2, dtype=np.float32), np.full((2, 2), 3e38, np.float32)])
    down = np.stack([np.eye(2, dtype=np.float32)] * 2)
    inputs = {"x": ones, "shares": np.array([[1, 0]], np.float32), "experts": np.array([[0, 1]], np.int32)}
    inputs |= {"up": up, "down": down}
    model = Model.create(outputs={"y": Shared()(*map(IOKey, inputs))})
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    trainable = ["x", "shares", "up", "down"]
    compiled = ml.compile(model, backend, shapes=shapes, types={"experts": "int32"}, trainable=trainable)
    y, gradients = compiled.evaluate({}, inputs, {"y": ones})
    np.testing.assert_allclose(to_numpy(y["y"]), ones)
    used = np.stack([np.ones((2, 2)), np.zeros((2, 2))])
    for name, slope in {"x": ones, "shares": [[2, 0]], "up": used, "down": used}.items():
        np.testing.assert_allclose(to_numpy(gradients[name]), slope)


# -- pretrained decoders ----------------------------------------------------------------------------------------------
FAMILIES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_checkpoints_in_one_parameter(family, tmp_path):
    """Stack the matrices of a checkpoint, compute the same logits, and write the same files."""
    record, folder = read_record(family), folder_of(family, tmp_path)
    inputs = {"input_ids": np.array([record["prompt"]], np.int32)}
    models = {s: ml.from_pretrained(folder, stack_experts=s) for s in (False, True)}
    compiled = {s: ml.compile(m, "numpy", inference=True) for s, m in models.items()}
    logits = {s: to_numpy(c(inputs)["logits"]) for s, c in compiled.items()}
    np.testing.assert_allclose(logits[True], logits[False], rtol=1e-4, atol=1e-5)
    separate, stacked = (compiled[s].params for s in (False, True))
    joint = sorted(set(stacked) - set(separate))
    assert joint and all(stacked[n].ndim == 3 for n in joint)
    again = models[True].checkpoint_parameters(stacked)
    assert {n: a.shape for n, a in again.items()} == {n: a.shape for n, a in separate.items()}
    assert all(np.array_equal(again[n], separate[n]) for n in separate)
    files = {s: tmp_path / f"{s}.gguf" for s in models}
    for s, path in files.items():
        compiled[s].export(path, architecture=FAMILIES[family], quantize="q8_0")
    assert files[True].read_bytes() == files[False].read_bytes()


def test_experts_of_a_checkpoint_on_ggml(tmp_path):
    record, folder = read_record("mixtral"), folder_of("mixtral", tmp_path)
    compiled = ml.compile(ml.from_pretrained(folder, cache=24, stack_experts=True), "ggml", inference=True)
    assert ml.generate(compiled, record["prompt"][:5], max_new_tokens=6, stop=()) == record["tokens"]["5"][:6]


def test_stacked_experts_know_the_activations_of_separate_ones(tmp_path):
    folder = folder_of("mixtral", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "quick_gelu"}))
    inputs = {"input_ids": np.array([[1, 2, 3]], np.int32)}
    compiled = [ml.compile(ml.from_pretrained(folder, stack_experts=s), "numpy", inference=True) for s in (False, True)]
    first, second = (to_numpy(c(inputs)["logits"]) for c in compiled)
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)


def test_an_expert_of_a_checkpoint_that_overflows_concerns_its_tokens_only(tmp_path):
    """Let the first expert of the last layer return infinity: the other rows of logits are unchanged."""
    folder, inputs = folder_of("mixtral", tmp_path), {"input_ids": np.array([[1, 2, 3, 4, 5, 6]], np.int32)}
    compiled = [ml.compile(ml.from_pretrained(folder, stack_experts=s), "numpy", inference=True) for s in (False, True)]
    names = [f"model.layers.1.block_sparse_moe.experts.{n}.weight" for n in ("0.w2", "w2")]
    rows = []
    for program, name in zip(compiled, names, strict=True):
        weight = np.array(program.params[name])
        weight[... if weight.ndim == 2 else 0] = 3e38
        before, after = (
            to_numpy(program.evaluate({**program.params, **new}, inputs)["logits"]) for new in ({}, {name: weight})
        )
        rows.append(np.isclose(before, after, atol=1e-5).all(-1))
    assert rows[1].any() and not rows[1].all()
    np.testing.assert_array_equal(*rows)


def test_models_without_experts_are_refused(tmp_path):
    with pytest.raises(ml.InputError, match="requires a mixture of experts"):
        ml.from_pretrained(folder_of("llama2", tmp_path), stack_experts=True)
