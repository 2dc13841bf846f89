"""One program in several processes: in a pool of our own, and under torchrun. Everything here has a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mithril as ml
from mithril.models import Gelu, IOKey, LayerNorm, Linear, Model, MultiHeadAttention
from mithril_torch.parallel import pool, program

pytest.importorskip("mithril_parallel", reason="graphs are cut by mithril-parallel")
SECONDS = 120
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


@pytest.fixture(scope="module")
def one():
    return stepped(ml.TorchBackend())[2]


@pytest.fixture(scope="module", autouse=True)
def no_pool_stays():
    yield
    for workers in pool._pools.values():
        workers.close()


def assert_same(results, expected):
    for left, right in zip(results, expected, strict=True):
        assert left.keys() == right.keys()
        for name in right:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5, err_msg=name)


MESHES = {
    "data": ((2,), {}),
    "model": ((1, 2), {}),
    "fsdp": ((2,), {"parallelism": "fsdp"}),
    "pipeline": ((1, 1, 2), {"pipeline_chunks": 4}),
    "gpipe": ((2,), {"parallelism": "pipeline", "pipeline_chunks": 2, "pipeline_schedule": "gpipe"}),
    "data and model": ((2, 2), {}),
    "data and stages": ((2, 1, 2), {"pipeline_chunks": 2}),
    "fully sharded stages": ((2, 1, 2), {"pipeline_chunks": 2, "parallelism": "fsdp"}),
}


@pytest.mark.parametrize("way", MESHES)
def test_equal_to_one_process(way, one):
    mesh, options = MESHES[way]
    compiled, params, results = stepped(ml.TorchBackend(device_mesh=mesh), **options)
    assert_same(results, one)
    params["fc.weight"].sub_(1.0)  # modified in place: the workers must receive it again
    changed = compiled.evaluate(params, X, G)[0]["y"]
    single = ml.compile(block(), ml.TorchBackend(), shapes={"x": [8, 6, 16]})
    np.testing.assert_allclose(changed, single.evaluate(params, X)["y"], rtol=1e-4, atol=1e-4)


def collectives(mesh, **options):
    compiled, _, _ = stepped(ml.TorchBackend(device_mesh=mesh), **options)
    lines = [line for line in compiled.source.splitlines() if not line.startswith("def ")]
    names = ("all_reduce", "all_gather", "reduce_scatter")
    return {n: sum(len(re.findall(rf"(?<![.\w]){n}(?:_of)?\(", line)) for line in lines) for n in names}


def test_collectives_are_those_expected():
    """All gradients are in one bucket; a pair of weights costs one all-reduce forward and one backward."""
    assert collectives((2,)) == {"all_reduce": 1, "all_gather": 0, "reduce_scatter": 0}
    assert collectives((1, 2)) == {"all_reduce": 4, "all_gather": 0, "reduce_scatter": 0}
    assert collectives((2,), parallelism="fsdp") == {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 1}


def trainer(mesh, options, **recipe):
    compiled = ml.compile(block(), ml.TorchBackend(device_mesh=mesh), shapes={"x": [8, 6, 16]}, **options)
    return ml.Trainer(compiled, ml.SGD(0.1, momentum=0.9), loss="mse_loss", progress=False, **recipe)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        (((2,), {}), {"gradient_accumulation_steps": 2}),
        (((2,), {"parallelism": "fsdp"}), {"clip_norm": 0.5, "ema": 0.9}),
        (((1, 1, 2), {"pipeline_chunks": 4}), {"clip_norm": 0.5}),
        (((2, 1, 2), {"pipeline_chunks": 2}), {"loss_scale": "dynamic", "metrics": ["mean_absolute_error"]}),
        (((2, 1, 2), {"pipeline_chunks": 2, "parallelism": "fsdp"}), {"clip_norm": 0.5}),
    ],
    ids=["data", "fsdp", "pipeline", "data and stages", "fully sharded stages"],
)
def test_training_in_a_pool(way, recipe):
    pytest.importorskip("mithril_train")
    batches = [{"x": np.roll(X["x"], k, 1), "target": np.roll(G, k, 1)} for k in range(4)]
    one, many = trainer(None, {}, **recipe), trainer(*way, **recipe)
    expected, results = ([dict(t.step(batch)) for batch in batches] for t in (one, many))
    for left, right in zip(results, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    weights = one.engine.to_numpy()
    for name, x in many.engine.to_numpy().items():
        np.testing.assert_allclose(x, weights[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_training_state_stays_in_the_workers(monkeypatch):
    pytest.importorskip("mithril_train")
    fsdp = trainer((2,), {"parallelism": "fsdp"})
    requests = []
    request = pool.Pool.request
    monkeypatch.setattr(pool.Pool, "request", lambda pool, *words: (requests.append(words), request(pool, *words))[1])
    for _ in range(2):
        fsdp.step({**X, "target": G})
    first, second = [words for words in requests if words[0] == "run"]
    assert set(fsdp.engine.arrays) <= set(first[2])
    assert set(second[2]) <= {"x", "target", "learning_rate"}
    fsdp.engine.arrays["fc.weight"].mul_(0.0)  # modified in place: the workers must receive it again
    fsdp.step({**X, "target": G})
    assert "fc.weight" in requests[-1][2]


def test_a_training_step_reduces_gradients_once():
    """Sharded parameters are updated in shards: a step gathers parameters, not gradients."""
    pytest.importorskip("mithril_train")
    fsdp = trainer((2,), {"parallelism": "fsdp"}, clip_norm=0.5)
    fsdp.begin({**X, "target": G})
    source = next(iter(fsdp.engine._steps.values())).run.source
    lines = [line for line in source.splitlines() if not line.startswith("def ")]
    names = ("all_reduce", "all_gather", "reduce_scatter")
    counts = {n: sum(len(re.findall(rf"(?<![.\w]){n}\(", line)) for line in lines) for n in names}
    assert counts == {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}, (
        "the loss and the norm are reduced as well"
    )


# -- processes ----------------------------------------------------------------------------------------------------
def test_worker_failure_is_reported_with_its_traceback():
    compiled, params, _ = stepped(ml.TorchBackend(device_mesh=(2,)))
    workers = pool.pool(2, "cpu")
    with pytest.raises(ml.BackendError, match="process . of 2 failed") as caught:
        workers.request("run", 999, [], [])
    assert "KeyError: 999" in str(caught.value)
    assert workers.process.poll() is not None
    with pytest.raises(ml.BackendError, match="have exited"):
        compiled.evaluate(params, X)
    stepped(ml.TorchBackend(device_mesh=(2,)))  # another pool


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(n) for n in file.read().split()]


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not any(map(_runs, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_killed_worker_ends_the_others():
    stepped(ml.TorchBackend(device_mesh=(2,)))
    workers = pool.pool(2, "cpu")
    members = _children(workers.process.pid)
    os.kill(members[1], signal.SIGKILL)
    with pytest.raises(ml.BackendError, match="exited without a message"):
        workers.request("forget", 0)
    assert _gone(members)


SCRIPT = """
    import sys, time
    import numpy as np, torch
    torch.set_num_threads(1)
    import mithril as ml
    from mithril.models import IOKey, Linear, Model

    model = Model.create(outputs={"y": Linear(4, name="second")(Linear(8, name="first")(IOKey("x")))})
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), shapes={"x": [4, 8]})
    y = compiled.evaluate(compiled.randomize_params(0), {"x": np.ones((4, 8), np.float32)})["y"]
    print(tuple(y.shape), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "time.sleep(60)"])
def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path, ending):
    """Regardless of whether it returns, fails, or is killed."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT) + ending)
    owner = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "(4, 4)\n", owner.stderr.read()
        running = _children(owner.pid)
        running += [n for pid in running for n in _children(pid)]
        if "sleep" in ending:
            owner.kill()
        owner.wait(SECONDS)
        assert owner.returncode == {"": 0, "raise SystemExit(3)": 3}.get(ending, -signal.SIGKILL)
        assert _gone(running)
        assert not list(_shared()), "shared memory was not released"
    finally:
        owner.kill()
        owner.communicate()


def _shared():
    return (n for n in os.listdir("/dev/shm") if n.startswith("mithril-")) if os.path.isdir("/dev/shm") else iter(())


RANKED = """
    import sys
    import numpy as np, torch, torch.distributed as dist
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    import mithril as ml
    from test_parallel import G, MESHES, X, assert_same, block, stepped, trainer

    world = int(__import__("os").environ["WORLD_SIZE"])
    values = {{}}
    single = ml.compile(block(), ml.TorchBackend(), shapes={{"x": [8, 6, 16]}})
    params = single.randomize_params(0)
    expected = single.evaluate(params, X, G)
    for way in {ways!r}:
        mesh, options = MESHES[way]
        compiled, _, results = stepped(ml.TorchBackend(device_mesh=mesh), **options)
        full = [{{n: compiled.backend.to_numpy(x) for n, x in part.items()}} for part in results]
        assert_same(full, expected)
        if __import__("importlib.util").util.find_spec("mithril_train"):
            one, many = trainer(None, {{}}, clip_norm=0.5), trainer(mesh, options, clip_norm=0.5)
            for _ in range(2):
                losses = [float(t.step({{**X, "target": G}})["loss"]) for t in (one, many)]
                np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
            assert_same([many.engine.to_numpy()], [one.engine.to_numpy()])
        if way == "fsdp":
            sharded = compiled.programs[-1].executable.call.placed(params)
            gradients = compiled.evaluate(sharded, X, G)[1]
            for name, p in sharded.items():
                assert p.to_local().numel() * world == p.numel(), name
                assert gradients[name].placements == p.placements, name
            new = {{name: p - 0.1 * gradients[name] for name, p in sharded.items()}}  # each process updates its shard
            y = compiled.evaluate(new, X)["y"]
            plain = {{name: p - 0.1 * expected[1][name] for name, p in params.items()}}
            assert_same([{{"y": compiled.backend.to_numpy(y)}}], [single.evaluate(plain, X)])
            ml.save_sharded({folder!r}, sharded)
            dist.barrier()
            other = ml.compile(block(), ml.TorchBackend(device_mesh=(1, world)), shapes={{"x": [8, 6, 16]}})
            loaded = ml.load_sharded({folder!r}, other)
            assert loaded["fc.weight"].to_local().numel() * world == params["fc.weight"].numel()
            assert_same([{{n: other.backend.to_numpy(x) for n, x in loaded.items()}}], [params])
    if dist.get_rank() == 0:
        print("fine", world, flush=True)
    dist.destroy_process_group()
"""


def ranked(tmp_path, count, ways):
    file = tmp_path / "ranked.py"
    file.write_text(
        textwrap.dedent(RANKED.format(tests=os.path.dirname(__file__), ways=ways, folder=str(tmp_path / "saved")))
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    assert done.stdout.strip() == f"fine {count}", done.stderr[-4000:]


def test_under_torchrun(tmp_path):
    ranked(tmp_path, 2, ["data", "model", "fsdp", "pipeline"])


@pytest.mark.slow
def test_under_torchrun_with_four(tmp_path):
    ranked(tmp_path, 4, ["data and model", "data and stages"])


# -- invalid options ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ((2,), {"parallelism": "model"}, "requires a mesh with a model axis"),
        ((1, 1, 2), {"pipeline_stages": 3}, "conflicts with device_mesh"),
        ((1, 1, 2), {"parallelism": "data"}, "conflicts with device_mesh"),
        ((4,), {"parallelism": "pipeline", "pipeline_stages": 3}, "cannot be divided into 3 stages"),
        ((3,), {}, "cannot be divided over 3"),
        ((2,), {"autodiff": "native"}, "conflicts with a mesh"),
        ((2,), {"jit": True}, "conflicts with a mesh"),
    ],
)
def test_conflicting_options_are_rejected(mesh, options, message):
    with pytest.raises(ml.OptionError, match=message):
        stepped(ml.TorchBackend(device_mesh=mesh), **options)


@pytest.mark.parametrize("mesh", [(), (0,), (2, 2, 2, 2), ("a",)])
def test_invalid_mesh_is_rejected(mesh):
    with pytest.raises(ml.OptionError, match="is not a valid mesh of devices|device_mesh: at .0.: expected int"):
        ml.TorchBackend(device_mesh=mesh)


def test_parallelism_without_devices_is_ignored():
    compiled = ml.compile(block(), ml.TorchBackend(), shapes={"x": [8, 6, 16]}, parallelism="data")
    assert "device_mesh=(4,)" in str(compiled.decisions)
    assert program.launched_world_size() is None


def test_16_bit_floats_are_summed_in_float32():
    results = []
    for mesh in (None, (2,)):
        backend = ml.TorchBackend(device_mesh=mesh, precision="bfloat16")
        compiled = ml.compile(block(), backend, shapes={"x": [8, 6, 16]})
        x, g = (backend.array(a, "bfloat16") for a in (X["x"], G))
        results.append(compiled.evaluate(compiled.randomize_params(0), {"x": x}, g)[1])
    for name, x in results[0].items():
        assert results[1][name].dtype == torch.bfloat16
        np.testing.assert_allclose(results[1][name].float(), x.float(), rtol=0.05, atol=0.15)


SLURM_SCRIPT = """
import sys
import numpy as np
import mithril as ml
import torch.distributed as dist
from mithril.models import IOKey, Linear, Model

model = Model.create(outputs={"y": Linear(4)(IOKey("x"))})
compiled = ml.compile(model, ml.TorchBackend(device="cpu", device_mesh=(2,)), shapes={"x": [4, 3]})
compiled.evaluate(compiled.randomize_params(0), {"x": np.ones((4, 3), np.float32)})
print(dist.get_rank(), "of", dist.get_world_size())
"""


def test_tasks_of_slurm_are_one_program(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SLURM_SCRIPT)
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.1"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(file)],
            env={**os.environ, **slurm, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    outputs = [task.communicate(timeout=SECONDS) for task in tasks]
    assert [out.strip() for out, _ in outputs] == ["0 of 2", "1 of 2"], outputs


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    selected = []
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch, "empty", lambda *size, device: selected.append(device))
    ml.TorchBackend(device="cuda")
    assert selected == [1, "cuda"]
