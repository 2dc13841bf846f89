"""Cases of ``test_parallel``: pipelines of ``TorchBackend`` in two or four processes, compared with one process."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from mesh_cases import assert_same, changes, images, language, on_numpy, one, stepped
from module_cases import SIZES

import mithril as ml
from mithril.models import IOKey, Linear, Model, Relu

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


def perceptron(size):
    """Return layers of different widths."""
    width = {"small": 6, "medium": 40}[size]
    h = IOKey("x")
    for k in range(5):
        h = Relu()(Linear(width + 2 * k, name=f"layer{k}")(h))
    numbers = np.random.default_rng(5)
    batch = {n: numbers.standard_normal((16, k), np.float32) for n, k in (("x", 9), ("target", 3))}
    return Model.create(outputs={"y": Linear(3, name="out")(h)}), batch, "mse_loss"


def assert_gradients(make, *rows):
    """Compare gradients, state and loss with one process, at two sizes."""
    for size in SIZES:
        expected = changes(make, size, None)
        for mesh, options in rows:
            actual = changes(make, size, mesh, **options)
            assert actual.keys() == expected.keys()
            for name, right in expected.items():
                error = np.abs(np.asarray(actual[name], np.float64) - right).max()
                message = f"{make.__name__}, {size}, {mesh} {options}: {name} differs by {error}"
                assert error <= 3e-6 * max(1.0, np.abs(right).max()), message


def by_schedule(names):
    count = dist.get_world_size()
    return [((1, 1, count), {"pipeline_schedule": name, "pipeline_chunks": 4}) for name in names]


def every_schedule():
    assert_gradients(perceptron, *by_schedule(SCHEDULES))


def transformers():
    """Train with an embedding that is also the head, on chunks with different numbers of targets."""
    assert_gradients(language, *by_schedule(("1f1b", "interleaved1f1b", "zbvzerobubble")))


def statistics_of_the_whole_batch():
    assert_gradients(images, ((1, 1, dist.get_world_size()), {}))


def combined():
    """Combine stages and chunks with rows and weights divided over processes."""
    chunks, fsdp = {"pipeline_chunks": 4}, {"parallelism": "fsdp", "pipeline_chunks": 2}
    rows = {
        2: [((2, 1, 1), fsdp), ((1, 2, 1), chunks)],
        4: [
            ((2, 1, 2), chunks),
            ((2, 1, 2), {**fsdp, "pipeline_chunks": 4, "pipeline_schedule": "interleavedzerobubble"}),
            ((1, 2, 2), chunks),
        ],
    }
    assert_gradients(language, *rows[dist.get_world_size()])


def native_gradients():
    mesh = ml.TorchBackend(device_mesh=(1, 1, dist.get_world_size()))
    compiled, _, results = stepped(mesh, autodiff="native", pipeline_chunks=2)
    assert_same(on_numpy(compiled, results), one())
    assert "pipeline stages" in str(compiled.decisions)
