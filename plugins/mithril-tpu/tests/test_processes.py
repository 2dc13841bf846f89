"""JAX in several processes equals one device; every process has a time limit, so that tests cannot hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODELS = str(Path(__file__).parents[2] / "mithril-parallel" / "tests")
SECONDS = 300
SCRIPT = """
    import os, sys
    port, count, rank, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    import jax
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    sys.path.insert(0, TESTS)
    import numpy as np
    import mithril as ml
    from small_models import block

    x = {"x": np.random.default_rng(0).standard_normal((8, 6, 16), np.float32)}
    g = np.random.default_rng(1).standard_normal((8, 6, 16), np.float32)

    def stepped(backend, **options):
        compiled = ml.compile(block(16, 4, 32), backend, shapes={"x": [8, 6, 16]}, **options)
        params = compiled.randomize_params(0)
        return compiled, params, compiled.evaluate(params, x, g)

    single = stepped(ml.JaxBackend())[2]
    assert len(jax.devices()) == 2 * jax.local_device_count()
    n = len(jax.devices())
    for mesh, options in WAYS(n):
        compiled, params, found = stepped(ml.JaxBackend(device_mesh=mesh), **options)
        for mine, right in zip(found, single):
            for name, expected in right.items():
                np.testing.assert_allclose(compiled.backend.to_numpy(mine[name]), expected, rtol=1e-4, atol=1e-5)
        if options:
            there = compiled.programs[-1].executable.call.placed(params)
            part = there["fc.weight"].addressable_shards[0].data
            assert part.size * n == there["fc.weight"].size
    trained, linear = [], ml.models.Model.create(outputs={"y": ml.models.Linear(16)(ml.models.IOKey("x"))})
    for mesh in (None, (n,), (1, n)):
        loss = {"loss": "mse_loss", "gradient_accumulation_steps": 3, "progress": False}
        trainer = ml.Trainer(linear, ml.SGD(0.1), backend=ml.JaxBackend(device_mesh=mesh), **loss)
        for _ in range(4):
            batch = {**x, "target": g}
            own = {name: np.split(a, count)[rank] for name, a in batch.items()}
            trainer.step(ml.LocalRows(own) if mesh else batch)
        trained.append(trainer.engine.to_numpy())  # in the middle of the second step
    for name, expected in trained[0].items():
        for others in trained[1:]:
            np.testing.assert_allclose(others[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    print("fine", rank, flush=True)
"""


def started(file, tmp_path, devices):
    """Start two processes that run a script."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(file), str(port), "2", str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]


def together(tmp_path, ways, devices):
    """Run the script in two processes with ``devices`` devices each."""
    file = tmp_path / "script.py"
    text = textwrap.dedent(SCRIPT).replace("TESTS", repr(MODELS)).replace("WAYS", f"({ways})")
    file.write_text(text)
    running = started(file, tmp_path, devices)
    try:
        for rank, process in enumerate(running):
            out, err = process.communicate(timeout=SECONDS)
            assert f"fine {rank}" in out.splitlines(), err[-3000:]
    finally:
        for process in running:
            process.kill()
            process.communicate()


STAGES = "((1, 1, n), {'pipeline_chunks': 2})"  # of a pipeline, in both processes


def test_two_processes_equal_one_device(tmp_path):
    together(tmp_path, f"lambda n: [((n,), {{}}), ((n,), {{'parallelism': 'fsdp'}}), {STAGES}]", 1)


@pytest.mark.slow
def test_two_processes_of_two_devices(tmp_path):
    together(tmp_path, "lambda n: [((2, 2), {}), ((1, 4), {}), ((n,), {'parallelism': 'fsdp'})]", 2)


KILLED = """
    import os, signal, sys
    port, rank = sys.argv[1], int(sys.argv[3])
    import jax
    jax.distributed.initialize(f"localhost:{port}", 2, rank, heartbeat_timeout_seconds=10)
    import numpy as np
    import mithril as ml

    model = ml.models.Model.create(outputs={"y": ml.models.Linear(4)(ml.models.IOKey("x"))})
    compiled = ml.compile(model, ml.JaxBackend(device_mesh=(2,)), shapes={"x": [4, 8]})
    params, x, g = compiled.randomize_params(0), np.ones((4, 8), np.float32), np.ones((4, 4), np.float32)
    compiled.evaluate(params, {"x": x}, g)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        compiled.evaluate(params, {"x": x}, g)
    except ml.BackendError as error:
        assert "another process of this program has exited" in str(error)
        print("fine", rank, flush=True)
"""


@pytest.mark.slow
def test_killed_process_is_reported_to_the_other(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(KILLED))
    running = started(file, tmp_path, 1)
    try:
        out, err = running[0].communicate(timeout=SECONDS)
        assert "fine 0" in out.splitlines(), err[-3000:]
    finally:
        for process in running:
            process.kill()
            process.communicate()
