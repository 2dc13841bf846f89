"""Cases of ``test_parallel``: programs of ``TorchBackend(device_mesh=...)`` in two or four processes."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from module_cases import SIZES, gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mithril as ml
from mithril import ops
from mithril.graph import MithrilError, broadcast, floating
from mithril.models import (
    LSTM,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    Flatten,
    Gelu,
    IOKey,
    Layer,
    LayerNorm,
    Linear,
    MaxPool2d,
    MixtureOfExperts,
    Model,
    MultiHeadAttention,
    Relu,
)
from mithril_torch.parallel import program

X = {"x": np.random.default_rng(0).standard_normal((8, 6, 16), np.float32)}
G = np.random.default_rng(1).standard_normal((8, 6, 16), np.float32)


def block(features=16, heads=4, hidden=32):
    x = IOKey("x")
    h = x + MultiHeadAttention(features, heads, name="attn")(LayerNorm(features, name="ln_1")(x))
    f = Linear(hidden, name="fc")(LayerNorm(features, name="ln_2")(h))
    return Model.create(outputs={"y": h + Linear(features, name="proj")(Gelu()(f))})


def stepped(backend, **options):
    compiled = ml.compile(block(), backend, shapes={"x": [8, 6, 16]}, **options)
    params = compiled.randomize_params(0)
    return compiled, params, compiled.evaluate(params, X, G)


@cache
def one():
    return stepped(ml.TorchBackend())[2]


def assert_same(results, expected):
    for left, right in zip(results, expected, strict=True):
        assert left.keys() == right.keys()
        for name in right:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5, err_msg=name)


MESHES = {
    "data": ((2,), {}),
    "model": ((1, 2), {}),
    "fsdp": ((2,), {"parallelism": "fsdp"}),
    "pipeline": ((2,), {"parallelism": "pipeline", "pipeline_chunks": 4}),
    "data and model": ((2, 2), {}),
    "data and stages": ((2, 1, 2), {"pipeline_chunks": 2}),
    "fully sharded stages": ((2, 1, 2), {"pipeline_chunks": 2, "parallelism": "fsdp"}),
}


def counts(function):
    """Return the number of collectives of each kind that a call issues."""
    with CommDebugMode() as mode:
        function()
    totals = Counter()
    for op, n in mode.get_comm_counts().items():
        totals[re.search("reduce_?scatter|all_?gather|all_?reduce|all_?to_?all", str(op))[0].replace("_", "")] += n
    names = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all")
    return {name: totals[name.replace("_", "")] for name in names if totals[name.replace("_", "")]}


def trainer(mesh, options, **recipe):
    compiled = ml.compile(block(), ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
    return ml.Trainer(compiled, ml.SGD(0.1, momentum=0.9), loss="mse_loss", progress=False, **recipe)


def on_numpy(compiled, parts):
    return [{name: compiled.backend.to_numpy(x) for name, x in part.items()} for part in parts]


def meshes():
    """Return the rows of ``MESHES`` that use all processes."""
    return {way: row for way, row in MESHES.items() if np.prod(row[0]) == dist.get_world_size()}


def equal_to_one_process():
    for mesh, options in meshes().values():
        compiled, params, results = stepped(ml.TorchBackend(device_mesh=mesh), **options)
        assert_same(on_numpy(compiled, results), one())
        params["fc.weight"].sub_(1.0)  # modified in place
        changed = compiled.backend.to_numpy(compiled.evaluate(params, X, G)[0]["y"])
        single = ml.compile(block(), ml.TorchBackend(), shapes={"x": [8, 6, 16]})
        (complete,) = on_numpy(compiled, [params])
        np.testing.assert_allclose(changed, single.evaluate(complete, X)["y"], rtol=1e-4, atol=1e-4)


def collectives_are_those_expected():
    """Count collectives: one bucket of gradients; for a pair of weights an all-reduce forward and one backward."""
    expected = [
        ((2,), {}, {"all_reduce": 1}),
        ((2,), {"parallelism": "fsdp"}, {"all_gather": 1, "reduce_scatter": 1}),
        ((1, 2), {}, {"all_reduce": 4}),  # of attention and of the feedforward layer
    ]
    for mesh, options, collectives in expected:
        compiled, params, _ = stepped(ml.TorchBackend(device_mesh=mesh), **options)
        assert counts(lambda c=compiled, p=params: c.evaluate(p, X, G)) == collectives, (mesh, options)
        engines = [type(getattr(step, "run", None)) for step in compiled.programs[-1].executable.call.steps]
        assert (DistributedDataParallel in engines) == (mesh == (2,) and not options), engines


RECIPES = {
    "data": {"gradient_accumulation_steps": 2},
    "fsdp": {"clip_norm": 0.5, "ema": 0.9},
    "pipeline": {"clip_norm": 0.5, "gradient_accumulation_steps": 2},
    "data and stages": {"loss_scale": "dynamic", "metrics": ["mean_absolute_error"]},
    "fully sharded stages": {"clip_norm": 0.5},
}


def training():
    batches = [{"x": np.roll(X["x"], k, 1), "target": np.roll(G, k, 1)} for k in range(4)]
    for way, recipe in RECIPES.items():
        if way not in meshes():
            continue
        single, many = trainer(None, {}, **recipe), trainer(*MESHES[way], **recipe)
        expected, results = ([dict(t.step(batch)) for batch in batches] for t in (single, many))
        for left, right in zip(results, expected, strict=True):
            assert set(left) == set(right)
            for name in right:
                np.testing.assert_allclose(float(left[name]), float(right[name]), rtol=1e-4, err_msg=name)
        weights = single.engine.to_numpy()
        for name, x in many.engine.to_numpy().items():
            np.testing.assert_allclose(x, weights[name], rtol=1e-4, atol=1e-6, err_msg=name)


def a_training_step_reduces_gradients_once():
    """Sharded parameters are updated in shards: a step gathers parameters, not gradients."""
    fsdp = trainer((2,), {"parallelism": "fsdp"}, clip_norm=0.5)
    batch = {**X, "target": G}
    fsdp.step(batch)
    # the norm and the loss
    assert counts(lambda: fsdp.step(batch)) == {"all_gather": 1, "all_reduce": 2, "reduce_scatter": 1}
    model, batch, loss = language("small")
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), parallelism="fsdp")
    blocks = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
    blocks.step(batch)
    # both blocks forward and backward, the rest once; sum and number of losses, the check of gradients
    collectives = counts(lambda: blocks.step(batch))
    assert collectives == {"all_gather": 5, "all_reduce": 3, "reduce_scatter": 3}, collectives


def accumulated_gradients_are_exchanged_once():
    """Sum gradients of several batches in each process, also across a checkpoint in the middle of a step."""
    model, batch, loss = language("small")
    recipe = {"loss": loss, "progress": False, "seed": 0, "clip_norm": 0.5, "gradient_accumulation_steps": 3}
    batches = [{n: np.roll(x, k, 1) for n, x in batch.items()} for k in range(6)]

    def trainer(mesh, **options):
        return ml.Trainer(
            model, ml.SGD(0.1, momentum=0.9), backend=ml.TorchBackend(device_mesh=mesh), **recipe, **options
        )

    single = trainer(None)
    for part in batches:
        single.step(part)
    ways = [((2,), {}), ((1, 2), {"parallelism": "context"}), ((2,), {"parallelism": "fsdp", "ema": 0.9}), ((1, 2), {})]
    for mesh, options in ways:
        many = trainer(mesh, **options)
        for part in batches[:3]:
            many.step(part)
        exchanged = []
        for part in batches[3:]:
            with Wire() as wire:
                many.step(part)
            exchanged.append(sum(n for _, n in wire.messages if n > 1))
        arrays = many.engine.to_numpy()
        weights = sum(x.size for n, x in arrays.items() if n in many.engine.trained)
        if not options and mesh == (2,):
            assert exchanged[:2] == [0, 0] and exchanged[2] >= weights, (exchanged, weights)
        assert_same([{n: arrays[n] for n in single.engine.to_numpy()}], [single.engine.to_numpy()])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    first, second = trainer((2,)), trainer((2,))
    for part in batches[:5]:
        first.step(part)
    first.save(folder[0])
    second.load(folder[0])
    second.step(batches[5])
    assert_same([second.engine.to_numpy()], [single.engine.to_numpy()])


def language(size, length=6):
    """Return a transformer, for which the processes have different numbers of targets."""
    numbers, count = np.random.default_rng(2), SIZES[size]["vocabulary"]
    tokens, targets = numbers.integers(0, count, (2, 8, length)).astype(np.int32)
    targets[:3, 2:] = targets[4] = -100
    batch = {"tokens": tokens, "target": targets}
    return gpt(**SIZES[size]), batch, lambda y, t: ml.ops.cross_entropy(y, t, ignore_index=-100)


def longer(size):
    """Return the transformer with positions that two axes can divide."""
    return language(size, 8)


def images(size):
    """Return a network whose statistics are those of the whole batch."""
    count = {"small": 4, "medium": 16}[size]
    h = Relu()(BatchNorm2d(count, name="n1")(Conv2d(3, count, kernel_size=3, padding=1, name="c1")(IOKey("x"))))
    h = h + Relu()(BatchNorm2d(count, name="n2")(Conv2d(count, count, kernel_size=3, padding=1, name="c2")(h)))
    h = h + ConvTranspose2d(count, kernel_size=2, stride=2, name="up")(MaxPool2d(2)(h))
    hidden = Dropout(0.3)(Relu()(Linear(2 * count, name="hidden")(Flatten()(MaxPool2d(2)(h)))))
    numbers = np.random.default_rng(3)
    batch = {"x": numbers.standard_normal((8, 3, 8, 8), np.float32), "target": numbers.integers(0, 4, 8)}
    return Model.create(outputs={"y": Linear(4, name="out")(hidden)}), batch, "cross_entropy"


def recurrent(size):
    width = {"small": 6, "medium": 16}[size]
    numbers = np.random.default_rng(4)
    batch = {n: numbers.standard_normal((8, 4, k), np.float32) for n, k in (("x", 5), ("target", 3))}
    states, *_ = LSTM(width, name="lstm")(IOKey("x"))
    return Model.create(outputs={"y": Linear(3, name="out")(states)}), batch, "mse_loss"


class Experts(Layer):
    """Each token goes to two experts, each of which takes ``capacity`` tokens of a row."""

    def __init__(self, count, hidden, capacity):
        self.sizes = count, hidden, capacity

    def build(self, x):
        (rows, length, width), (count, hidden, capacity) = x.shape, self.sizes
        shares = ops.softmax(ops.linear(x, self.param("router", (count, width), "normal(std=0.5)")), axis=-1)
        values, indices = ops.top_k(shares, k=2, axis=-1)
        empty = ops.full(shape=(rows, length, count), value=0.0)
        routing = ops.scatter_along_axis(empty, indices, values, axis=-1)
        is_chosen = ops.cast(ops.greater(routing, 0.0), dtype="float32")
        place = ops.unsqueeze(ops.cumsum(is_chosen, axis=1) - 1.0, axis=(3,))
        numbers = ops.cast(ops.iota(shape=(1, 1, 1, capacity), axis=3), dtype="float32")
        slots = ops.cast(ops.equal(place, numbers), dtype="float32") * ops.unsqueeze(is_chosen, axis=(3,))
        dispatch = ops.reshape(ops.transpose(slots, perm=(0, 2, 3, 1)), shape=(rows, count * capacity, length))
        tokens = ops.reshape(ops.matmul(dispatch, x), shape=(rows, count, capacity, width))
        tokens = ops.reshape(ops.transpose(tokens, perm=(1, 0, 2, 3)), shape=(count, rows * capacity, width))
        up = self.param("up", (count, width, hidden), "normal(std=0.3)")
        y = ops.matmul(ops.gelu(ops.matmul(tokens, up)), self.param("down", (count, hidden, width), "normal(std=0.3)"))
        y = ops.transpose(ops.reshape(y, shape=(count, rows, capacity, width)), perm=(1, 0, 2, 3))
        weights = ops.reshape(slots * ops.unsqueeze(routing, axis=(3,)), shape=(rows, length, count * capacity))
        return ops.matmul(weights, ops.reshape(y, shape=(rows, count * capacity, width)))


def bidirectional(size):
    """Attend in both directions, with heads that share keys and values."""
    width = {"small": 16, "medium": 32}[size]
    numbers = np.random.default_rng(5)
    batch = {name: numbers.standard_normal((4, 6, width), np.float32) for name in ("x", "target")}
    h = Linear(width, name="first")(IOKey("x"))
    y = h + MultiHeadAttention(width, 4, kv_heads=2, causal=False, name="attention")(h)
    return Model.create(outputs={"y": y}), batch, "mse_loss"


def mixture(size):
    count, width, hidden, capacity = {"small": (4, 8, 12, 5), "medium": (8, 32, 48, 3)}[size]
    numbers = np.random.default_rng(6)
    batch = {name: numbers.standard_normal((8, 6, width), np.float32) for name in ("x", "target")}
    h = Linear(width, name="first")(IOKey("x"))
    h = h + Experts(count, hidden, capacity, name="mixture")(h)
    return Model.create(outputs={"y": Linear(width, name="last")(h)}), batch, "mse_loss"


def routed(size):
    """Return a mixture whose experts compute the tokens that are routed to them."""
    count, width, hidden = {"small": (4, 8, 12), "medium": (8, 32, 48)}[size]
    numbers = np.random.default_rng(7)
    batch = {name: numbers.standard_normal((8, 6, width), np.float32) for name in ("x", "target")}
    h = Linear(width, name="first")(IOKey("x"))
    h = h + MixtureOfExperts(count, hidden, name="mixture")(h)
    return Model.create(outputs={"y": Linear(width, name="last")(h)}), batch, "mse_loss"


class OneSided(Layer):
    """All experts have the same share of each token, so that the first two compute all tokens."""

    def build(self, x):
        width = x.shape[-1]
        logits = ops.linear(x, self.param("router", (4, width), "zeros"))
        _, indices, used = MixtureOfExperts.routed(logits, 2, normalized=True)
        up, down = (self.param(n, (4, width, width), "normal(std=0.3)") for n in ("up", "down"))
        return ops.expert_mixture(x, used, indices, up, down, activation="gelu")


def one_sided(size):
    """Return a mixture whose tokens all travel to one process."""
    _, batch, loss = routed(size)
    h = Linear(batch["x"].shape[-1], name="first")(IOKey("x"))
    return Model.create(outputs={"y": h + OneSided(name="mixture")(h)}), batch, loss


def changes(make, size, mesh, **options):
    """Return the changes of the parameters, the new state and the loss after a step of gradient descent."""
    model, batch, loss = make(size)
    backend = ml.TorchBackend(device_mesh=mesh)
    trainer = ml.Trainer(model, ml.SGD(1.0), loss=loss, backend=backend, progress=False, seed=0, **options)
    trainer.begin(batch)
    before = trainer.engine.to_numpy()
    loss_value = float(trainer.step(batch)["loss"])
    after = trainer.engine.to_numpy()
    trained = trainer.engine.trained
    return {"loss": loss_value, **{n: after[n] - x if n in trained else after[n] for n, x in before.items()}}


def gradients_of_several_kinds_of_models():
    """Compare gradients, running statistics and losses with one process, at two sizes."""
    data, fsdp, model = ((2,), {}), ((2,), {"parallelism": "fsdp"}), ((1, 2), {})
    context, hsdp = ((1, 2), {"parallelism": "context"}), ((2, 2), {"parallelism": "hsdp"})
    sharded_context = ((2, 2), {"parallelism": ("fsdp", "context")})
    sequence = ((1, 2), {"parallelism": "sequence"})
    sharded_sequence = ((2, 2), {"parallelism": ("fsdp", "sequence")})
    expert, sharded_expert = (((2,), {"parallelism": kinds}) for kinds in ("expert", ("fsdp", "expert")))
    expert_context = ((2, 2), {"parallelism": ("expert", "context")})
    context_model, context_sequence = (((2, 2), {"parallelism": ("context", kind)}) for kind in ("model", "sequence"))
    ways = {
        2: {
            mixture: (expert, sharded_expert, model),
            routed: (expert, sharded_expert, model),
            one_sided: (expert,),
            bidirectional: (context,),
            language: (fsdp, model, context, sequence),
            images: (data, model),
            recurrent: (fsdp, context),
        },
        4: {
            language: [
                *(((2, 2), {"parallelism": "fsdp"}), hsdp, sharded_context, sharded_sequence),
                context_model,
            ],
            longer: [context_sequence],
            images: [hsdp],
            mixture: [expert_context],
            routed: [((4,), {"parallelism": "expert"}), ((2, 2), {"parallelism": "expert"}), expert_context],
            one_sided: [((4,), {"parallelism": "expert"})],
        },
    }
    for make, rows in ways[dist.get_world_size()].items():
        for size in SIZES:
            expected = changes(make, size, None)
            for mesh, options in rows:
                actual = changes(make, size, mesh, **options)
                assert actual.keys() == expected.keys()
                for name, right in expected.items():
                    error = np.abs(np.asarray(actual[name], np.float64) - right).max()
                    message = f"{make.__name__}, {size}, {mesh} {options}: {name} differs by {error}"
                    assert error <= 3e-6 * max(1.0, np.abs(right).max()), message


def activations_and_classes_in_parts():
    """Count collectives: sums are scattered along the sequence, and no process gathers the logits of all classes."""
    model, batch, loss = language("small")
    # products of two blocks and the head gather their operands, forward and for gradients; the results of four
    # products, and five gradients, are scattered
    expected = {None: (1, 0), "sequence": (11, 9)}
    for kind, (gathers, scatters) in expected.items():
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=(1, 2)), parallelism=kind)
        trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
        trainer.step(batch)
        assert trainer.engine.arrays["head.weight"].to_local().shape == (12, 16)
        collectives = counts(lambda t=trainer: t.step(batch))
        assert collectives["all_gather"] == gathers, collectives
        assert collectives.get("reduce_scatter", 0) == scatters, collectives


def rows_that_processes_cannot_divide():
    """Train, evaluate and predict with batches down to one row: activations between products are complete."""
    ways = {
        2: [((1, 2), {}), ((1, 2), {"parallelism": "sequence"})],
        4: [((2, 2), {"parallelism": "fsdp"}), ((2, 2), {"parallelism": ("context", "model")}), ((2, 2), {})],
    }
    tokens = np.random.default_rng(4).integers(0, 48, (8, 16)).astype(np.int32)
    h = block(32, 4, 64)(Embedding(48, 32, name="table")(IOKey("tokens", dtype="int32")))
    model = Model.create(outputs={"y": Linear(48, bias=False, name="head")(h)})
    parts = {n: {"tokens": tokens[8 - n :], "target": tokens[8 - n :]} for n in (5, 3, 1)}

    def results(mesh, options):
        backend = ml.TorchBackend(device_mesh=mesh)
        trainer = ml.Trainer(
            model, ml.SGD(0.1), loss="cross_entropy", backend=backend, progress=False, seed=0, **options
        )
        losses = [float(trainer.step(parts[n])["loss"]) for n in (5, 1)]
        losses += [trainer.evaluate([parts[3], parts[1]])["loss"]]
        return {"loss": np.array(losses), "y": trainer.predict(parts[1]["tokens"]), **trainer.engine.to_numpy()}

    expected = results(None, {})
    for mesh, options in ways[dist.get_world_size()]:
        actual = results(mesh, options)
        for name, right in expected.items():
            np.testing.assert_allclose(actual[name], right, rtol=1e-4, atol=1e-5, err_msg=f"{mesh} {options}: {name}")


def rows_of_a_process_stay_there():
    """Train with the rows that each process has read: those of a data axis travel nowhere."""
    count, rank = dist.get_world_size(), dist.get_rank()
    model, batch, loss = language("small")
    rows = 8 // count
    own_rows = ml.LocalRows({n: x[rank * rows : (rank + 1) * rows] for n, x in batch.items()})

    def trainer(mesh, **options):
        backend, recipe = ml.TorchBackend(device_mesh=mesh), {"progress": False, "seed": 0}
        return ml.Trainer(model, ml.SGD(1.0), loss=loss, backend=backend, **recipe, **options)

    single = trainer(None)
    expected = [float(single.step(batch)["loss"]) for _ in range(2)]
    meshes = {2: [(2,), (1, 2)], 4: [(4,), (2, 2), (2, 1, 2)]}[count]
    for mesh in meshes:
        many = trainer(mesh)
        losses = [float(many.step(own_rows)["loss"])]
        collectives = counts(lambda t=many, values=losses: values.append(float(t.step(own_rows)["loss"])))
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=str(mesh))
        assert len(mesh) > 1 or "all_gather" not in collectives, collectives
        assert_same([many.engine.to_numpy()], [single.engine.to_numpy()])


def sums_of_gradients_are_split_like_their_parameters():
    """Reset the sums of weights of one shape, which are split along different axes, to one constant."""
    sums = trainer((1, 2), {}, gradient_accumulation_steps=2)
    for _ in range(2):
        sums.step({**X, "target": G})
    arrays = sums.engine.arrays
    split = {n: arrays[f"accumulated/{n}"] for n in ("attn.query.weight", "attn.output.weight")}
    assert len({x.placements for x in split.values()}) == 2
    assert all(x.placements == arrays[n].placements for n, x in split.items()), split


def inference_with_weights_in_parts():
    """Compute products and a convolution for which one device calls oneDNN."""
    rows = Linear(512, name="second")(Relu()(Linear(2048, name="first")(IOKey("rows"))))
    outputs = {"y": rows, "image": Conv2d(3, 4, kernel_size=3, name="conv")(IOKey("x"))}
    model, shapes = Model.create(outputs=outputs), {"rows": [16, 512], "x": [1, 3, 8, 8]}
    inputs = {name: np.random.default_rng(8).standard_normal(shape, np.float32) for name, shape in shapes.items()}
    single = ml.compile(model, ml.TorchBackend(), shapes=shapes)
    params = single.randomize_params(0)
    expected = on_numpy(single, [single.evaluate(params, inputs)])
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(1, 2)), shapes=shapes)
    assert_same(on_numpy(compiled, [compiled.evaluate(params, inputs)]), expected)
    with tempfile.TemporaryDirectory() as folder:
        message = "exports one function, but this program runs on several devices"
        raises(ml.UnsupportedError, message, lambda: compiled.export(f"{folder}/model.pt2", params=params))
    opened = ml.compile(model, compiled.backend, shapes={"rows": [16, 512], "x": ["B", 3, 8, 8]})
    raises(ml.UnsupportedError, "a program over several devices has no function for PyTorch", opened.to_module)
    parts = compiled.randomize_params(0)
    assert any(isinstance(x, DTensor) for x in parts.values())
    embedding = ml.compile(model, compiled.backend, shapes=shapes, static_inference=True)
    for bind in (embedding.bind, embedding.load_state_dict):
        bind(parts)
        assert_same(on_numpy(embedding, [embedding(inputs)]), expected)
    single.bind(params)
    module = single.to_module().distribute(init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))
    with torch.no_grad():
        assert_same([module(**{name: torch.from_numpy(x) for name, x in inputs.items()})], expected)


def what_cannot_be_divided_is_reported():
    """Tell that a kind of parallelism has no effect, as a whole or for some of the weights."""
    for length, expected in ((5, True), (6, False)):
        model, batch, loss = language("small", length)
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=(1, 2)), parallelism="sequence")
        ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False).step(batch)
        is_recorded = any("'sequence' splits no activation" in str(d) for d in compiled.decisions)
        assert is_recorded == expected, [*map(str, compiled.decisions)]
    h = MixtureOfExperts(3, 4, name="odd")(MixtureOfExperts(4, 4, name="even")(IOKey("x")))
    mesh = ml.TorchBackend(device_mesh=(2,))
    compiled = ml.compile(Model.create(outputs={"y": h}), mesh, shapes={"x": [4, 8]}, parallelism="expert")
    messages = [str(d) for d in compiled.decisions if "its experts" in str(d)]
    assert len(messages) == 3 and all("'odd." in m and "2 processes" in m for m in messages), messages


def activations_in_parts_of_positions():
    """Divide positions over one axis, and the activations of each part over the other one."""
    model, batch, loss = longer("small")
    scatters = {}
    for kind in ("model", "sequence"):
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2, 2)), parallelism=("context", kind))
        trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
        trainer.step(batch)
        scatters[kind] = counts(lambda t=trainer: t.step(batch)).get("reduce_scatter", 0)
    assert scatters["model"] == 0 and scatters["sequence"] >= 9, scatters


class Windows(Layer):
    """Kernels for which DTensor has no rule, forward or backward, between products with split weights."""

    def build(self, input):
        rows = input.shape[0]
        h = ops.log_sigmoid(ops.linear(input, self.param("up", (32, 16), "normal(std=0.3)")))
        images = ops.reshape(h, shape=(rows, 2, 4, 4))
        kernel = self.param("kernel", (2, 3, 2, 2), "normal(std=0.3)")
        large = ops.conv_transpose(images, kernel, stride=(2, 2), padding=((0, 0), (0, 0)))
        small = ops.avg_pool(large, kernel=(2, 2), stride=(2, 2))
        flat = ops.reshape(small, shape=(rows, 48))
        return ops.linear(flat, self.param("down", (16, 48), "normal(std=0.3)"))


@ml.op(name="mesh.bend", shape=broadcast, dtype=floating, axes="... -> ...")
def bend(x):
    """x / (1 + x * x), which runs in NumPy."""
    return x / (1.0 + x * x)


@bend.vjp
def _(g, y, x):
    return (g * (1.0 - x * x) / ops.square(1.0 + x * x),)


class Bent(Layer):
    def build(self, input):
        h = bend(ops.linear(input, self.param("up", (32, 16), "normal(std=0.3)")))
        return ops.linear(h, self.param("down", (16, 32), "normal(std=0.3)"))


def kernels_without_a_rule():
    """Compute with complete tensors where DTensor has no rule, and products of no rows."""
    for layer, rows in ((Windows(), 4), (Windows(), 0), (Bent(), 4)):
        x, g = X["x"][:rows, 0], G[:rows, 0]
        results = []
        for mesh in (None, (1, 2)):
            compiled = ml.compile(layer, ml.TorchBackend(device_mesh=mesh), shapes={"input": [rows, 16]})
            params, inputs = compiled.randomize_params(0), {"input": x}
            inferred = compiled.evaluate(params, inputs)
            results.append(on_numpy(compiled, [inferred, *compiled.evaluate(params, inputs, g)]))
        assert_same(*reversed(results))


def tokens_travel_to_experts():
    """Exchange tokens for the experts and back, forward and backward; no process gathers the weights of others."""
    model, batch, loss = mixture("small")
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), parallelism="expert")
    trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
    trainer.step(batch)
    collectives = counts(lambda: trainer.step(batch))
    assert collectives["all_to_all"] == 4, collectives
    assert "all_gather" not in collectives, collectives
    assert trainer.engine.arrays["mixture.up"].to_local().shape == (2, 8, 12)


def routed_rows_travel():
    """Send the rows of other processes' experts: counts and rows there, results back, and the cotangents of both."""
    model, batch, loss = routed("small")
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), parallelism="expert")
    trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
    trainer.step(batch)
    collectives = counts(lambda: trainer.step(batch))
    assert collectives["all_to_all"] == 5, collectives
    assert not {"all_gather", "reduce_scatter"} & collectives.keys(), collectives


class Wire(TorchDispatchMode):
    """Records the dtype and the number of elements of each collective."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in str(function) and re.search("reduce|gather", str(function)):
            x = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)][-1]
            self.messages.append((x.dtype, x.numel()))
        return function(*args, **(kwargs or {}))


def gradients_travel_as_16_bits():
    """Exchange weights that products read as bfloat16, and their gradients; others, such as those of norms, do not."""
    model, batch, loss = language("small")
    options = {"precision": "bfloat16"}, {"enable_amp": True}, {"mixed_precision": True}, {"enable_amp": True}
    for parallelism, o in zip((None, "fsdp", None, "hsdp"), options, strict=True):
        mixed = {"mixed_precision": o["mixed_precision"]} if "mixed_precision" in o else {}
        backend = ml.TorchBackend(device_mesh=(1, 2) if parallelism == "hsdp" else (2,), **({} if mixed else o))
        compiled = ml.compile(model, backend, parallelism=parallelism, **mixed)
        trainer = ml.Trainer(compiled, ml.SGD(0.1), loss=loss, progress=False)
        trainer.begin(batch)
        with Wire() as wire:
            trainer.step(batch)
        shapes = {n: x.shape for n, x in trainer.engine.arrays.items() if n == "wte.weight" or "ln_" in n}
        singles = 0 if "precision" in o else sum(map(np.prod, shapes.values()))
        if parallelism:
            assert trainer.engine.arrays["wte.weight"].to_local().shape == (12, 16)
        assert sum(n for dtype, n in wire.messages if dtype == torch.float32 and n > 1) == singles, wire.messages
        assert sum(n for dtype, n in wire.messages if dtype == torch.bfloat16) > 6000, wire.messages


def mixed_precision_without_an_axis_of_examples():
    results = []
    for mesh, parallelism in ((None, None), ((2, 2), ("context", "model"))):
        model, batch, loss = language("small")
        backend = ml.TorchBackend(device_mesh=mesh, enable_amp=True)
        trainer = ml.Trainer(
            ml.compile(model, backend, parallelism=parallelism), ml.SGD(0.1), loss=loss, progress=False, seed=0
        )
        results.append([float(trainer.step(batch)["loss"]) for _ in range(2)])
    np.testing.assert_allclose(results[1], results[0], rtol=2e-3)


def forward_passes_are_compiled(backend="aot_eager"):
    options = {"jit": True, "jit_options": {"backend": backend}}
    expected = changes(language, "small", None)
    for mesh, way in (((2,), {"parallelism": "fsdp"}), ((2,), {}), ((1, 1, 2), {"pipeline_chunks": 2})):
        torch._dynamo.utils.counters.clear()
        assert_same([changes(language, "small", mesh, **way, **options)], [expected])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def machine_code_of_forward_passes():
    forward_passes_are_compiled("inductor")


class Surroundings(TorchDispatchMode):
    """Records the number of threads and the cache of torch.compile at each operation."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add((torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")))
        return function(*args, **(kwargs or {}))


def run_options_apply_on_a_mesh():
    """Apply the number of threads and the cache folder during a call only, also in a pipeline."""
    surroundings_now = lambda: (torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"))  # noqa: E731
    folder = tempfile.mkdtemp()
    jit = {"jit": True, "jit_options": {"backend": "eager"}, "cache": True, "cache_dir": folder}
    for mesh, options in (((2,), jit), ((1, 1, 2), {})):
        compiled, params, _ = stepped(ml.TorchBackend(device_mesh=mesh), num_threads=3, **options)
        before = surroundings_now()
        with Surroundings() as surroundings:
            compiled.evaluate(params, X, G)
        assert (3, f"{folder}/inductor" if options else before[1]) in surroundings.seen, surroundings.seen
        assert surroundings_now() == before


def a_step_of_several_passes():
    """Move the parameters up the gradient, and update them by the gradients there."""

    class Sharpness(ml.Trainer):
        def train_step(self, step):
            gradients = step.gradients()
            scale = 0.05 / (step.norm(gradients) + 1e-6)
            ascent = {n: step.params[n] + g * scale for n, g in gradients.items()}
            step.update(step.gradients(params=ascent))

    weights = []
    for mesh, options in ((None, {}), MESHES["fsdp"], MESHES["pipeline"]):
        compiled = ml.compile(block(), ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
        trainer = Sharpness(compiled, ml.SGD(0.1), loss="mse_loss", progress=False)
        trainer.step({**X, "target": G})
        weights.append(trainer.engine.to_numpy())
    assert_same(weights[1:], [weights[0]] * 2)


def the_layer_that_is_not_finite_is_named():
    for mesh, options in (((2,), {"parallelism": "fsdp"}), ((1, 2), {}), MESHES["pipeline"]):
        compiled = ml.compile(block(), ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
        trainer = ml.Trainer(compiled, ml.SGD(1e30), loss="mse_loss", progress=False)
        for _ in range(2):
            trainer.step({**X, "target": G})
        raises(MithrilError, "layer 'attn.query' is not finite", trainer.check_finite)


def sharded_parameters():
    """Evaluate and update parameters in shards, save them, and load them for another mesh."""
    world = dist.get_world_size()
    single = ml.compile(block(), ml.TorchBackend(), shapes={"x": [8, 6, 16]})
    params = single.randomize_params(0)
    compiled, sharded, _ = stepped(ml.TorchBackend(device_mesh=(world,)), parallelism="fsdp")
    assert_same(on_numpy(compiled, [sharded]), [params])
    gradients = compiled.evaluate(sharded, X, G)[1]
    for name, p in sharded.items():
        assert p.to_local().numel() * world == p.numel(), name
        assert gradients[name].placements == p.placements, name
    new = {name: p - 0.1 * gradients[name] for name, p in sharded.items()}  # each process updates its shard
    compiled.evaluate(sharded, X)  # the next call has other parameters
    y = compiled.evaluate(new, X)["y"]
    plain = {name: p - 0.1 * one()[1][name] for name, p in params.items()}
    assert_same(on_numpy(compiled, [{"y": y}]), [single.evaluate(plain, X)])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    ml.save_sharded(folder[0], sharded)
    dist.barrier()
    other = ml.compile(block(), ml.TorchBackend(device_mesh=(1, world)), shapes={"x": [8, 6, 16]})
    loaded = ml.load_sharded(folder[0], other)
    assert loaded["fc.weight"].to_local().numel() * world == params["fc.weight"].numel()
    assert_same(on_numpy(other, [loaded]), [params])


def forward_passes_with_other_parameters():
    """Evaluate a model of repeated blocks with one set of parameters after another."""
    model, batch, _ = language("small")
    tokens = {"tokens": batch["tokens"]}
    single = ml.compile(model, ml.TorchBackend())
    sets = [single.randomize_params(seed) for seed in range(2)]
    expected = [single.evaluate(params, tokens) for params in sets]
    for options in ({}, {"parallelism": "fsdp"}, {"parallelism": "fsdp", "fsdp_reshard": False}):
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), **options)
        results = [compiled.evaluate(params, tokens) for params in sets]
        assert_same(on_numpy(compiled, results), on_numpy(single, expected))


def gradients_of_16_bits():
    results = []
    for mesh in (None, (2,)):
        backend = ml.TorchBackend(device_mesh=mesh, precision="bfloat16")
        compiled = ml.compile(block(), backend, shapes={"x": [8, 6, 16]})
        x, g = (backend.array(a, "bfloat16") for a in (X["x"], G))
        results.append(compiled.evaluate(compiled.randomize_params(0), {"x": x}, g)[1])
    for name, x in results[0].items():
        assert results[1][name].dtype == torch.bfloat16
        np.testing.assert_allclose(results[1][name].float(), x.float(), rtol=0.05, atol=0.15)


def dropout_draws_the_numbers_of_one_device():
    """Dropout on a mesh, also with parameters and batch split at once."""
    hidden = Dropout(0.5)(Linear(32, name="first")(IOKey("x")))
    model = Model.create(outputs={"y": Linear(4, name="second")(hidden)})
    rows = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    batch = {"x": rows, "target": np.ones((8, 4), np.float32)}
    weights = []
    for mesh, options in [(None, {}), *[row for row in meshes().values() if "pipeline_chunks" not in row[1]]]:
        fsdp = {"parallelism": "fsdp"} if mesh == (2, 2) else options
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 16]}, **fsdp)
        trainer = ml.Trainer(compiled, ml.SGD(0.1), loss="mse_loss", progress=False)
        for _ in range(2):
            trainer.step(batch)
        weights.append(trainer.engine.to_numpy())
        assert_same([weights[-1]], [weights[0]])
    assert len(weights) > 1


def replicated_values_are_updated():
    """Pass complete parameters to a step that holds parts of them: the new values are those of the results."""
    subjects = [trainer(*MESHES["fsdp"]) for _ in range(2)]
    batch = {"x": X["x"], "target": G}
    for replaces, subject in enumerate(subjects):
        subject.begin(batch)
        arrays = subject.engine.arrays
        if replaces:
            complete = [n for n, x in arrays.items() if isinstance(x, DTensor)]
            arrays.update(
                {n: arrays[n].redistribute(placements=[Replicate()] * arrays[n].device_mesh.ndim) for n in complete}
            )
            assert complete
        for _ in range(2):
            subject.step(batch)
    expected, actual = (subject.engine.to_numpy() for subject in subjects)
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-6, atol=1e-7, err_msg=name)


def rows_split_over_a_mesh_of_the_caller():
    compiled, params, _ = stepped(ml.TorchBackend(device_mesh=(2,)))
    rows = torch.from_numpy(X["x"]).chunk(2)[dist.get_rank()]
    x = DTensor.from_local(rows, init_device_mesh("cpu", (2,)), [Shard(0)])
    assert_same(on_numpy(compiled, [compiled.evaluate(params, {"x": x})]), one()[:1])


def raises(error, message, function):
    try:
        function()
    except error as caught:
        assert re.search(message, str(caught)), caught
    else:
        raise AssertionError(f"no {error.__name__}: {message}")


def weights_in_parts_on_another_engine():
    """Join the parts of weights where an engine without a mesh reads them."""
    compiled = ml.compile(block(), ml.TorchBackend(device_mesh=(2,)), parallelism="fsdp", shapes={"x": [8, 6, 16]})
    params = compiled.bind(compiled.randomize_params(0)).params
    assert isinstance(params["fc.weight"], DTensor)
    other = ml.compile(block(), "numpy", shapes={"x": [8, 6, 16]})
    np.testing.assert_allclose(other.evaluate(params, X)["y"], one()[0]["y"], rtol=1e-4, atol=1e-5)


def calls_of_two_threads_are_refused():
    compiled, params, _ = stepped(ml.TorchBackend(device_mesh=(2,)))
    with ThreadPoolExecutor(1) as pool:
        with program.CALLS:
            error = pool.submit(compiled.evaluate, params, X).exception()
        assert str(error) == (
            "two threads call programs on a mesh of several processes at once\n"
            "  all processes must exchange the same arrays in the same order\n"
            "hint: call them from one thread"
        )
        pool.submit(compiled.evaluate, params, X).result()


def conflicting_options_are_rejected():
    mesh = ml.TorchBackend(device_mesh=(2,))
    raises(ml.OptionError, "torch_fx=True conflicts with a mesh", lambda: stepped(mesh, torch_fx=True))
    message = (
        "a gradient of 'torch' on several devices requires a single backend, but backend_map names others\n"
        "hint: omit backend_map, or compile for one device"
    )
    raises(ml.OptionError, message, lambda: stepped(mesh, backend_map={"other": "numpy"}))
    zero_bubble = {"jit": True, "pipeline_schedule": "zbvzerobubble"}
    stages = ml.TorchBackend(device_mesh=(1, 1, 2))
    raises(ml.OptionError, "jit=True conflicts with pipeline_sch", lambda: stepped(stages, **zero_bubble))
    odd = [block(), ml.TorchBackend(device_mesh=(1, 2))]
    message = "5 positions of input 'x' cannot be divided over 2 devices"
    raises(ml.OptionError, message, lambda: ml.compile(*odd, shapes={"x": [8, 5, 16]}, parallelism="context"))
    three = Model.create(outputs={"y": ops.matmul(IOKey("x"), IOKey("w", shape=[3, 4, 4], trainable=True))})
    message = (
        "that 2 processes can divide(.|\\n)*weights of 3 experts(.|\\n)*hint: use a mesh whose first number divides 3"
    )
    raises(ml.OptionError, message, lambda: ml.compile(three, mesh, shapes={"x": [3, 2, 4]}, parallelism="expert"))
    raises(ml.BackendError, "requires 4 processes, got 2", lambda: stepped(ml.TorchBackend(device_mesh=(4,))))
