"""Ten programs of research: each trains the same on every engine, and its export agrees."""

from __future__ import annotations

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.models import GRU, Embedding, Layer, LayerNorm, Linear, MultiHeadAttention, Sequential, Silu, Tanh

pytestmark = pytest.mark.soak
ENGINES = ["torch", "jax", "mlx", "c", "ggml"]
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Pinn(Layer):
    """A physics-informed network: the residual of u'' = -sin(t), by differences of the network."""

    def __init__(self):
        self.net = Sequential(Linear(16), Tanh(), Linear(16), Tanh(), Linear(1))

    def build(self, t):
        h = 0.05
        second = (self.net(t + h) - 2.0 * self.net(t) + self.net(t - h)) / (h * h)
        return ops.mean(ops.square(second + ops.sin(t))) + ops.mean(ops.square(self.net(t * 0.0)))


class Contrastive(Layer):
    """Two views with one encoder, and the symmetric loss over their similarities."""

    def build(self, left, right):
        encoder = Sequential(Linear(16), Silu(), Linear(8))
        a, b = (z / ops.sqrt(ops.sum(z * z, -1, keepdims=True) + 1e-6) for z in (encoder(left), encoder(right)))
        logits = ops.matmul(a, ops.transpose(b)) / 0.2
        labels = ops.arange(left.shape[0])
        return ops.cross_entropy(logits, labels) + ops.cross_entropy(ops.transpose(logits), labels)


class Quantized(Layer):
    """An autoencoder with a codebook and the straight-through estimate of its gradient."""

    def build(self, x):
        z = Linear(4, name="encoder")(x)
        codes = self.param("codes", (8, 4), "normal(std=0.5)")
        distance = ops.sum(ops.square(z[:, None] - codes[None]), -1)
        nearest = ops.take(codes, ops.argmin(distance, -1), 0)
        decoded = Linear(x.shape[-1], name="decoder")(z + ops.stop_gradient(nearest - z))
        commitment = ops.mean(ops.square(ops.stop_gradient(nearest) - z))
        movement = ops.mean(ops.square(nearest - ops.stop_gradient(z)))
        return ops.mean(ops.square(decoded - x)) + movement + 0.25 * commitment


class Graph(Layer):
    """Messages along the edges of a graph, summed at their targets."""

    def __init__(self):
        self.layers = []
        for _ in range(2):
            self.layers.append({"message": Linear(8), "update": Linear(8)})

    def build(self, nodes, sources, targets):
        x = Linear(8, name="embed")(nodes)
        for layer in self.layers:
            messages = ops.relu(layer["message"](ops.take(x, sources, 0)))
            total = ops.scatter_add(ops.zeros(x.shape), targets, messages)
            x = x + ops.relu(layer["update"](ops.concat([x, total], -1)))
        return ops.mean(ops.square(ops.mean(x, 0)))


class Flow(Layer):
    """Affine couplings, and the log-likelihood of the data under a normal distribution."""

    def build(self, x):
        half, total = x.shape[-1] // 2, 0.0
        for k in range(3):
            a, b = (x[:, :half], x[:, half:]) if k % 2 == 0 else (x[:, half:], x[:, :half])
            scale, shift = ops.split(Sequential(Linear(16), Tanh(), Linear(2 * half))(a), (half, half), -1)
            scale = ops.tanh(scale)
            b = b * ops.exp(scale) + shift
            total = total + ops.sum(scale, -1)
            x = ops.concat([a, b] if k % 2 == 0 else [b, a], -1)
        return ops.mean(0.5 * ops.sum(x * x, -1) - total)


class NeuralOde(Layer):
    """Steps of Runge-Kutta through a network, as a loop of the program."""

    def __init__(self):
        self.field = Sequential(Linear(16), Tanh(), Linear(4))

    def build(self, x):
        def step(state, _):
            first = self.field(state)
            second = self.field(state + 0.1 * first)
            return state + 0.05 * (first + second), ops.sum(first)

        end, _ = ops.scan(step, x, ops.arange(5))
        return ops.mean(ops.square(end - 1.0))


class Diffusion(Layer):
    """Denoising with an embedding of the time, by sines."""

    def build(self, x, noise, time):
        frequencies = np.exp(-np.arange(4) / 2.0).astype(np.float32)
        angles = ops.cast(time, "float32")[:, None] * frequencies
        embedded = ops.concat([ops.sin(angles), ops.cos(angles)], -1)
        level = ops.exp(-0.1 * ops.cast(time, "float32"))[:, None]
        mixed = level * x + ops.sqrt(1.0 - level * level) * noise
        hidden = Silu()(Linear(16)(mixed) + Linear(16)(embedded))
        return ops.mean(ops.square(Linear(x.shape[-1])(hidden) - noise))


class Dqn(Layer):
    """The temporal difference of actions that were taken, with a target that is not trained."""

    def build(self, state, action, reward, following):
        network = Sequential(Linear(16), Silu(), Linear(3))
        value = ops.sum(network(state) * ops.one_hot(action, 3), -1)
        target = reward + 0.9 * ops.max(ops.stop_gradient(network(following)), -1)
        error = value - target
        return ops.mean(ops.where(ops.abs(error) < 1.0, 0.5 * error * error, ops.abs(error) - 0.5))


class Sequences(Layer):
    """An encoder by a recurrent layer, a decoder by attention."""

    def build(self, source, target):
        table = Embedding(11, 8)
        memory = GRU(8)(table(source))
        memory = memory[0] if isinstance(memory, tuple) else memory
        queries = LayerNorm()(table(target))
        attended = MultiHeadAttention(heads=2)(queries, memory, memory)
        logits = Linear(11)(queries + attended)
        return ops.cross_entropy(ops.reshape(logits, (-1, 11)), ops.reshape(target, (-1,)))


class Meta(Layer):
    """One step of gradient descent on the support set inside the loss of the query set."""

    def build(self, support, answers, query, expected):
        w = self.param("w", (4, 1), "normal(std=0.5)")
        residual = ops.matmul(support, w) - answers
        adapted = w - 0.1 * ops.matmul(ops.transpose(support), residual) / support.shape[0]
        return ops.mean(ops.square(ops.matmul(query, adapted) - expected))


def integers(high, *shape):
    return RNG.integers(0, high, shape).astype(np.int32)


PROGRAMS = {
    "pinn": (Pinn, lambda: {"input": normal(16, 1)}),
    "contrastive": (Contrastive, lambda: {"left": normal(8, 6), "right": normal(8, 6)}),
    "quantized": (Quantized, lambda: {"input": normal(8, 6)}),
    "graph": (Graph, lambda: {"nodes": normal(6, 3), "sources": integers(6, 12), "targets": integers(6, 12)}),
    "flow": (Flow, lambda: {"input": normal(16, 4)}),
    "ode": (NeuralOde, lambda: {"input": normal(8, 4)}),
    "diffusion": (Diffusion, lambda: {"x": normal(8, 6), "noise": normal(8, 6), "time": integers(10, 8)}),
    "dqn": (
        Dqn,
        lambda: {"state": normal(8, 4), "action": integers(3, 8), "reward": normal(8), "following": normal(8, 4)},
    ),
    "sequences": (Sequences, lambda: {"source": integers(11, 4, 5), "target": integers(11, 4, 6)}),
    "meta": (
        Meta,
        lambda: {"support": normal(8, 4), "answers": normal(8, 1), "query": normal(8, 4), "expected": normal(8, 1)},
    ),
}


def trained(kind, data, engine):
    """Return the losses of some steps, and the parameters after them."""
    trainer = ml.Trainer(kind(), ml.Adam(1e-2), backend=engine, seed=0, progress=False)
    losses = [float(trainer.step(data)["loss"]) for _ in range(6)]
    return losses, {name: np.asarray(trainer.to_numpy(x)) for name, x in trainer.params.items()}


@pytest.fixture(scope="module", params=list(PROGRAMS))
def program(request):
    kind, make = PROGRAMS[request.param]
    data = make()
    losses, params = trained(kind, data, "numpy")
    assert losses[-1] < losses[0]
    return kind, data, losses, params


@pytest.mark.parametrize("engine", ENGINES)
def test_programs_train_equally(program, engine):
    kind, data, losses, _ = program
    np.testing.assert_allclose(trained(kind, data, engine)[0], losses, rtol=2e-4, atol=1e-5)


def test_exports_agree(program, tmp_path):
    kind, data, _, params = program
    shapes = {name: list(x.shape) for name, x in data.items()}
    types = {name: str(x.dtype) for name, x in data.items()}
    compiled = ml.compile(kind(), "numpy", shapes=shapes, types=types, inference=True).bind(params)
    compiled.export(tmp_path / "model.onnx")
    again = ml.compile(ml.from_onnx(tmp_path / "model.onnx"), "numpy", inference=True)
    np.testing.assert_allclose(again(data)["output"], compiled(data)["output"], rtol=1e-4, atol=1e-5)
