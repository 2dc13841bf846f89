"""Cases of ``test_parallel``: custom gradients, and operations on the host, compared with one process."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from mesh_cases import changes, counts, raises
from pipeline_cases import assert_gradients

import mithril as ml
from mithril import ops
from mithril.graph import UnsupportedError
from mithril.graph.type_rules import floating, same_shape
from mithril.models import IOKey, Layer, Linear, Model, Relu


def declared(name, reference, vjp, *, surrogate=True, **declaration):
    """Return a new operation of one operand."""
    function = lambda x: reference(x)  # noqa: E731
    function.__name__, function.__doc__ = name, "An operation of a test."
    new = ml.op(name=f"test.{name}", shape=same_shape, dtype=floating, **declaration)(function)
    (new.surrogate_vjp if surrogate else new.vjp)(vjp)
    return new


EACH = {"axes": "*x -> *x"}
# runs on the host with its true gradient
host_cube = declared("host_cube", lambda x: x**3, lambda g, y, x: (3.0 * g * x * x,), surrogate=False, **EACH)
# gradients that need the true cotangent, other rows, and the number of rows
clipped = declared("clipped", lambda x: x * 1, lambda g, y, x: (ops.clip(g, low=-0.002, high=0.002),), **EACH)
squared = declared("squared", lambda x: x * 1, lambda g, y, x: (100.0 * (g * g),), **EACH)
centered = declared("centered", lambda x: x * 1, lambda g, y, x: (g - ops.mean(g, axis=0, keepdims=True),), **EACH)
averaged = declared("averaged", lambda x: x * 1, lambda g, y, x: (g * (8.0 / x.shape[0]),), **EACH)
host_only = declared("host_only", np.tanh, lambda g, y, x: (g * 2.0,))  # without a declaration of its axes


class Rounded(Layer):
    """A product of rounded weights and activations, with trained scales."""

    def __init__(self, features):
        self.features = features

    def build(self, x):
        w = self.param("weight", (x.shape[-1], self.features), "normal(std=0.5)")
        scales = self.param("scales", (self.features,), "constant(value=0.04)")
        scale = self.param("scale", (), "constant(value=0.06)")
        return ops.matmul(ops.fake_quantize(x, scale), ops.fake_quantize(w, scales, axis=1, bits=4))


def sizes_of(size):
    return {"small": 8, "medium": 24}[size]


def batch_of(width):
    numbers = np.random.default_rng(11)
    return {n: numbers.standard_normal((16, k), np.float32) for n, k in (("x", 9), ("target", width))}


def rounded(size):
    width = sizes_of(size)
    h = Rounded(width, name="first")(IOKey("x"))
    h = host_cube(Relu()(Linear(width, name="middle")(h)) * 0.5)
    h = Linear(width, name="before")(h)
    return Model.create(outputs={"y": Rounded(width, name="last")(h)}), batch_of(width), "mse_loss"


def limited(size):
    """Limit the cotangents of activations and of a weight: not linear."""
    width = sizes_of(size)
    w = IOKey("w", shape=[9, width], trainable=True)
    h = clipped(Relu()(IOKey("x") @ clipped(w)))
    return Model.create(outputs={"y": Linear(width, name="out")(h)}), batch_of(width), "mse_loss"


def squares(size):
    """Multiply cotangents by themselves: linear in each operand, but not in both."""
    width = sizes_of(size)
    h = squared(Relu()(Linear(width, name="in")(IOKey("x"))))
    return Model.create(outputs={"y": Linear(width, name="out")(h)}), batch_of(width), "mse_loss"


def limited_rows(size):
    width = sizes_of(size)
    h = clipped(Relu()(Linear(width, name="in")(IOKey("x"))))
    return Model.create(outputs={"y": Linear(width, name="out")(h)}), batch_of(width), "mse_loss"


def mixed(size):
    """Mix rows in gradients, count them, and run an operation on the host that declares no axes."""
    width = sizes_of(size)
    h = averaged(centered(Linear(width, name="in")(IOKey("x"))))
    return Model.create(outputs={"y": Linear(width, name="out")(host_only(h))}), batch_of(width), "mse_loss"


class Stopped(Layer):
    """Gradients that end at a part of the values: the scale of a weight, and a quantized activation."""

    def build(self, x):
        w = self.param("weight", (x.shape[-1], x.shape[-1]), "normal(std=0.5)")
        y = x @ (w * ops.stop_gradient(ops.max(ops.abs(w))))
        return y + ops.stop_gradient(ops.round(y) - y)


def stopped(size):
    width = sizes_of(size)
    h = Stopped(name="middle")(Linear(width, name="in")(IOKey("x")))
    return Model.create(outputs={"y": Linear(width, name="out")(h)}), batch_of(width), "mse_loss"


def of_rows_and_weights():
    """Divide rows, stored weights and weights over the processes."""
    count = dist.get_world_size()
    fsdp = {"parallelism": "fsdp"}
    ways = {2: [((2,), {}), ((2,), fsdp), ((1, 2), {})], 4: [((2, 2), fsdp), ((2, 2), {"parallelism": "hsdp"})]}
    for make in (rounded, limited, squares, mixed, stopped):
        assert_gradients(make, *ways[count], sizes=("small", "medium") if make is rounded else ("small",))


def in_pipelines():
    """Run custom gradients in chunks and stages; refuse those that need other chunks."""
    count = dist.get_world_size()
    chunks = {"pipeline_chunks": 4}
    ways = [((1, 1, count), chunks | {"pipeline_schedule": name}) for name in ("1f1b", "zbvzerobubble")]
    ways += [((count, 1, 1), {"pipeline_chunks": 2}), ((1, count, 1), {"pipeline_chunks": 2})]
    assert_gradients(rounded, *ways, sizes=("small",))
    assert_gradients(limited_rows, ways[0], ways[2], sizes=("small",))
    for make in (limited, mixed):
        refused = lambda make=make: changes(make, "small", (1, 1, count), **chunks)  # noqa: E731
        raises(UnsupportedError, r"cannot be cut into chunks(.|\n)*pipeline_chunks=1", refused)
        assert_gradients(make, ((1, 1, count), {}), sizes=("small",))


def gradients_on_parts_need_no_exchange():
    """Reduce gradients of rounded products once, as those of other products; only a mixture of rows gathers."""
    totals = {}
    for make in (rounded, mixed):
        model, batch, loss = make("small")
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)))
        trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
        trainer.step(batch)
        totals[make] = counts(lambda t=trainer, b=batch: t.step(b))
    assert "all_gather" not in totals[rounded], totals
    assert totals[mixed]["all_gather"] >= 1, totals
