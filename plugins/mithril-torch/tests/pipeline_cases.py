"""Cases of ``test_parallel``: pipelines of ``TorchBackend`` in two or four processes, compared with one process."""

from __future__ import annotations

import tempfile
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from mesh_cases import G, X, assert_same, block, changes, images, language, on_numpy, raises, stepped
from module_cases import SIZES

import mithril as ml
from mithril.models import Dropout, IOKey, Linear, Model, Relu
from mithril_torch.parallel import pipeline_pass

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")

FAMILIES = (
    "1f1b",
    "interleaved1f1b",
    "zbvzerobubble",
)  # one or several stages per process, and divided backward passes
ROWS = {n: np.random.default_rng(6).standard_normal((16, k), np.float32) for n, k in (("x", 8), ("target", 6))}


def perceptron(size):
    """Return layers of different widths, of which the first and the last share a weight."""
    width = {"small": 6, "medium": 40}[size]
    w = IOKey("shared", shape=[9, width], trainable=True)
    h = IOKey("x") @ w
    for k in range(4):
        h = Relu()(Linear(width + 2 * k, name=f"layer{k}")(h))
    numbers = np.random.default_rng(5)
    batch = {n: numbers.standard_normal((16, k), np.float32) for n, k in (("x", 9), ("target", 3))}
    h = Linear(width, name="last")(h) @ ml.ops.transpose(w)
    return Model.create(outputs={"y": Linear(3, name="out")(h)}), batch, "mse_loss"


def assert_gradients(make, *rows, sizes=tuple(SIZES), tolerance=3e-6):
    """Compare gradients, state and loss with one process, at two sizes."""
    for size in sizes:
        expected = changes(make, size, None)
        for mesh, options in rows:
            actual = changes(make, size, mesh, **options)
            assert actual.keys() == expected.keys()
            for name, right in expected.items():
                error = np.abs(np.asarray(actual[name], np.float64) - right).max()
                message = f"{make.__name__}, {size}, {mesh} {options}: {name} differs by {error}"
                assert error <= tolerance * max(1.0, np.abs(right).max()), message


def by_schedule(names):
    count = dist.get_world_size()
    return [((1, 1, count), {"pipeline_schedule": name, "pipeline_chunks": 4}) for name in names]


def every_schedule():
    assert_gradients(perceptron, *by_schedule(SCHEDULES), sizes=("small",))
    assert_gradients(perceptron, *by_schedule(FAMILIES), sizes=("medium",))


def transformers():
    """Train on chunks with different numbers of targets."""
    assert_gradients(language, *by_schedule(FAMILIES))


def statistics_of_the_whole_batch():
    assert_gradients(images, ((1, 1, dist.get_world_size()), {}))


def combined():
    """Combine stages and chunks with rows and weights divided over processes."""
    chunks, fsdp = {"pipeline_chunks": 4}, {"parallelism": "fsdp", "pipeline_chunks": 2}
    rows = {
        2: [((2, 1, 1), fsdp), ((1, 2, 1), {**chunks, "parallelism": "sequence"})],
        4: [
            ((2, 1, 2), {**fsdp, "pipeline_chunks": 4, "pipeline_schedule": "interleavedzerobubble"}),
            ((1, 2, 2), chunks),
            ((1, 2, 2), {**chunks, "parallelism": "context"}),
            ((2, 2, 1), {"parallelism": "hsdp", "pipeline_chunks": 2}),
        ],
    }
    count = dist.get_world_size()
    assert_gradients(language, *rows[count], sizes=tuple(SIZES) if count == 2 else ("medium",))
    mixed = {2: (2, 1, 1), 4: (2, 1, 2)}[count], {**fsdp, "mixed_precision": True}
    assert_gradients(language, mixed, sizes=("small",), tolerance=0.02)


def terms_equal_in_all_chunks():
    """Add a penalty on weights to a mean over the rows: it counts once, not once per chunk or process."""
    w = IOKey("w", shape=[16, 16], trainable=True)
    y = Linear(4, name="out")(Relu()(IOKey("x") @ w))
    loss = ml.ops.mean(y * y) + 0.1 * ml.ops.sum(w * w)
    model = Model.create(outputs={"loss": loss, "y": y})
    results = []
    count = dist.get_world_size()
    for mesh in (None, (1, 1, count), (count, 1, 1)):
        options = {"pipeline_chunks": 4} if mesh else {}
        compiled = ml.compile(model, ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
        params = compiled.randomize_params(0)
        results.append(on_numpy(compiled, compiled.evaluate(params, X, "loss")))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def gradients_of_inputs():
    """Differentiate an input that several stages read, by the graph and by PyTorch."""
    h = IOKey("x")
    for k in range(3):
        h = IOKey("x") + Relu()(Linear(16, name=f"layer{k}")(h))
    model = Model.create(outputs={"y": h})
    results = []
    world = dist.get_world_size()
    native = {"autodiff": "native"}
    for mesh, options in ((None, {}), ((1, 1, world), {}), ((world, 1, 1), {}), ((1, 1, world), native)):
        chunks = {"pipeline_chunks": 4} if mesh else {}
        backend = ml.TorchBackend(device_mesh=mesh)
        compiled = ml.compile(model, backend, shapes={"x": [8, 6, 16]}, **chunks, **options)
        parts = compiled.evaluate(compiled.randomize_params(0), X, G, wrt=("x", "layer0.weight"))
        results.append(on_numpy(compiled, parts))
        assert mesh is None or "pipeline stages" in str(compiled.decisions)
    assert results[0][1].keys() == {"x", "layer0.weight"}
    for parts in results[1:]:
        assert_same(parts, results[0])


def dropout_and_restarts():
    """Draw the numbers of one process, save parameters of the stages, and resume on other meshes."""
    count = dist.get_world_size()
    h = Dropout(0.5)(Relu()(Linear(16, name="first")(IOKey("x"))))
    model = Model.create(outputs={"y": Linear(6, name="second")(h)})
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    ways = (
        ((1, 1, count), {"pipeline_chunks": 4, "pipeline_schedule": "interleaved1f1b"}),
        ((count, 1, 1), {"pipeline_chunks": 2, "parallelism": "fsdp"}),
    )

    def trainer(mesh, options):
        backend = ml.TorchBackend(device_mesh=mesh)
        recipe = {"loss": "mse_loss", "clip_norm": 1.0, "progress": False, "seed": 0}
        return ml.Trainer(model, ml.Adam(0.01), backend=backend, **recipe, **options)

    single = trainer(None, {})
    for k in (0, 8, 0, 8):
        single.step({n: x[k : k + 8] for n, x in ROWS.items()})
    for k, first in enumerate(ways):
        path = f"{folder[0]}/{k}"
        trainer(*first).fit(ROWS, epochs=1, batch_size=8, shuffle=False, callbacks=[ml.Checkpoint(path, every=2)])
        second = trainer(*ways[1 - k])
        second.fit(ROWS, epochs=2, batch_size=8, shuffle=False, resume=path)
        moments = {n: x for n, x in second.engine.arrays.items() if "/" in n and n.endswith("first.weight")}
        assert len(moments) >= 2
        assert all(elements_of_processes(x) == x.numel() for x in moments.values())
        assert_same([second.engine.to_numpy()], [single.engine.to_numpy()])
        rows = ROWS["x"][:7]  # cannot be cut into chunks
        np.testing.assert_allclose(second.predict(rows), single.predict(rows), rtol=1e-4, atol=1e-5)


def batches_that_chunks_cannot_divide_in_every_schedule():
    batches_that_chunks_cannot_divide(SCHEDULES)


def batches_that_chunks_cannot_divide(schedules=("1f1b", "interleaved1f1b", "dualpipev")):
    """Train, evaluate and predict with rests of epochs, down to one row; the processes stay in step afterwards."""
    model, batch, loss = perceptron("small")
    count = dist.get_world_size()

    def trainer(mesh, options):
        backend, recipe = ml.TorchBackend(device_mesh=mesh), {"progress": False, "seed": 0}
        return ml.Trainer(model, ml.SGD(0.1, momentum=0.9), loss=loss, backend=backend, **recipe, **options)

    def fit(trainer, rows, epochs):
        columns = {n: x[:rows] for n, x in batch.items()}
        if trainer.engine.is_distributed:
            trainer.fit(columns, epochs=epochs, batch_size=8, shuffle=False)
            return
        for k in (0, 8) * epochs:
            trainer.step({n: x[k : k + 8] for n, x in columns.items()})

    def results(trainer):
        fit(trainer, 15, epochs=2)
        fit(trainer, 9, epochs=1)
        trainer.step({n: x[:6] for n, x in batch.items()})
        loss = trainer.evaluate({n: x[:5] for n, x in batch.items()}, batch_size=3)["loss"]
        return {"loss": loss, "y": trainer.predict(batch["x"][:1]), **trainer.engine.to_numpy()}

    expected = results(trainer(None, {}))
    ways = [
        *by_schedule(schedules),
        ((count, 1, 1), {"pipeline_chunks": 4}),
        ((count // 2, 1, 2), {"pipeline_chunks": 4}),
    ]
    for mesh, options in ways:
        chunked = trainer(mesh, options)
        assert_same([results(chunked)], [expected])
        assert "pipeline_chunks=4 cannot divide this batch" in str(chunked.engine.compiled.decisions), (mesh, options)


def elements_of_processes(x):
    """Return the number of elements that all processes hold of an array."""
    total = torch.tensor(x.to_local().numel())
    dist.all_reduce(total)
    return int(total)


def stages_have_their_own_parameters():
    """Exchange the weight of two stages and the loss in a step, and a number for the norm; hold each array once."""
    model, batch, loss = perceptron("medium")
    mesh = ml.TorchBackend(device_mesh=(1, 1, dist.get_world_size()))
    recipe = {"loss": loss, "clip_norm": 0.5, "ema": 0.9, "progress": False, "seed": 0}
    single = ml.Trainer(model, ml.Adafactor(0.01), backend=ml.TorchBackend(), **recipe)
    trainer = ml.Trainer(model, ml.Adafactor(0.01), backend=mesh, pipeline_chunks=4, **recipe)
    single.step(batch)
    trainer.step(batch)
    with (
        mock.patch.object(pipeline_pass, "exchange", wraps=pipeline_pass.exchange) as exchanges,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        trainer.step(batch)
    single.step(batch)
    assert sums.call_count == 1
    shapes = [tuple(x.shape) for call in exchanges.call_args_list for row in call.args[0] for x in row]
    assert set(shapes) <= {(9, 40), ()}, shapes
    split = {n: x for n, x in trainer.engine.arrays.items() if x.ndim}
    assert all(elements_of_processes(x) == x.numel() for x in split.values())
    owners = {n: bool(x.to_local().numel()) for n, x in split.items()}
    assert all(owners[n] == owners[n.rpartition("/")[2]] for n in owners)
    assert_same([trainer.engine.to_numpy()], [single.engine.to_numpy()])


def wrong_numbers_are_rejected():
    """Refuse schedules that do not fit the chunks, and gradients that a schedule does not compute."""
    mesh = ml.TorchBackend(device_mesh=(1, 1, dist.get_world_size()))
    dual = {"pipeline_schedule": "dualpipev"}
    raises(ml.OptionError, "pipeline_chunks=2 in 4 stages(.|\n)*=4", lambda: stepped(mesh, **dual, pipeline_chunks=2))
    options = {"pipeline_schedule": "interleavedzerobubble", "pipeline_chunks": 4}
    compiled = ml.compile(block(), mesh, shapes={"x": [8, 6, 16]}, **options)
    params = compiled.randomize_params(0)
    raises(ml.OptionError, "gradients of parameters only", lambda: compiled.evaluate(params, X, G, wrt=("x",)))
    count = dist.get_world_size()
    experts = {"parallelism": "expert", "pipeline_chunks": 2}
    raises(ml.OptionError, "conflicts with pipeline_chunks=2", lambda: expert_model((count,), experts))


def expert_model(mesh, options):
    w = IOKey("w", shape=[4, 16, 16], trainable=True)
    model = Model.create(outputs={"y": ml.ops.matmul(IOKey("x"), w)})
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=mesh), shapes={"x": [4, 8, 16]}, **options)
    return compiled.evaluate(compiled.randomize_params(0), {"x": np.ones((4, 8, 16), np.float32)})
