"""One program in several processes: of a launcher, or started by the backend. Everything here has a time limit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from mesh_cases import block, stepped
from processes import run_cases

import mithril as ml
from mithril_torch.parallel import meshes, schedules
from mithril_torch.parallel.tensor_parallel import layout_error

pytest.importorskip("mithril_parallel", reason="graphs are cut by mithril-parallel")
SECONDS = 120
ON_TWO = (
    "equal_to_one_process",
    "rows_split_over_a_mesh_of_the_caller",
    "collectives_are_those_expected",
    "gradients_of_16_bits",
    "sharded_parameters",
    "forward_passes_with_other_parameters",
    "inference_with_weights_in_parts",
    "calls_of_two_threads_are_refused",
    "kernels_without_a_rule",
    "weights_in_parts_on_another_engine",
)
REJECTED = ("conflicting_options_are_rejected",)
TRAINED = ("training", "gradients_of_several_kinds_of_models", "dropout_draws_the_numbers_of_one_device")
CASES = {2: (*ON_TWO, *REJECTED), 4: ("equal_to_one_process",)}
TRAINED_ON_TWO = (
    "a_training_step_reduces_gradients_once",
    "accumulated_gradients_are_exchanged_once",
    "activations_and_classes_in_parts",
    "rows_that_processes_cannot_divide",
    "rows_of_a_process_stay_there",
    "what_cannot_be_divided_is_reported",
    "tokens_travel_to_experts",
    "routed_rows_travel",
    "sums_of_gradients_are_split_like_their_parameters",
    "gradients_travel_as_16_bits",
    "replicated_values_are_updated",
    "forward_passes_are_compiled",
    "run_options_apply_on_a_mesh",
    "a_step_of_several_passes",
    "the_layer_that_is_not_finite_is_named",
)
PIPELINES = (
    "every_schedule",
    "transformers",
    "statistics_of_the_whole_batch",
    "combined",
    "terms_equal_in_all_chunks",
    "gradients_of_inputs",
    "dropout_and_restarts",
    "batches_that_chunks_cannot_divide",
    "stages_have_their_own_parameters",
    "wrong_numbers_are_rejected",
)
OWN_GRADIENTS = ("of_rows_and_weights", "in_pipelines", "gradients_on_parts_need_no_exchange")
PIPELINE_CASES = {2: PIPELINES, 4: ("combined",)}
TRAINING_CASES = {
    2: (*TRAINED, *TRAINED_ON_TWO),
    4: (
        *TRAINED,
        "mixed_precision_without_an_axis_of_examples",
        "activations_in_parts_of_positions",
        "rows_that_processes_cannot_divide",
        "rows_of_a_process_stay_there",
    ),
}


@pytest.mark.parametrize("count", CASES)
def test_cases_in_processes(count, tmp_path):
    trains = importlib.util.find_spec("mithril_train") is not None
    names = (*CASES[count], *(TRAINING_CASES[count] if trains else ()))
    names += tuple(f"pipeline_cases.{name}" for name in PIPELINE_CASES[count] if trains)
    if trains and importlib.util.find_spec("mithril_hub") is not None and count == 2:
        names += ("expert_cases.experts_of_a_checkpoint",)
    names += tuple(f"own_gradient_cases.{name}" for name in OWN_GRADIENTS if trains and count == 2)
    if trains and importlib.util.find_spec("mithril_lora") is not None and count == 4:
        names += ("models_on_processes.one_of_them",)
    errors = run_cases("mesh_cases", names, count, tmp_path)
    assert not any(errors.values()), "\n".join(f"-- {name} --\n{error}" for name, error in errors.items() if error)


def test_an_operation_without_a_rule_is_named():
    error = NotImplementedError("Operator aten.kron.default does not have a sharding strategy registered.")
    assert str(layout_error(error, 2)) == (
        "DTensor has no rule for an operation of this model, on a mesh with a model axis of 2 processes\n"
        "  Operator aten.kron.default does not have a sharding strategy registered.\n"
        'hint: omit the second number of device_mesh, and use parallelism="fsdp", or "expert" for a mixture of experts'
    )


@pytest.mark.soak
def test_every_schedule_takes_batches_of_any_size(tmp_path):
    pytest.importorskip("mithril_train")
    name = "pipeline_cases.batches_that_chunks_cannot_divide_in_every_schedule"
    error = run_cases("mesh_cases", [name], 2, tmp_path)[name]
    assert not error, error


@pytest.mark.soak
def test_models_in_every_way_equal_one_process(tmp_path):
    pytest.importorskip("mithril_lora")
    name = "models_on_processes.all_of_them"
    error = run_cases("mesh_cases", [name], 4, tmp_path, seconds=900)[name]
    assert not error, error


@pytest.mark.soak
def test_blocks_are_compiled_to_machine_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    name = "machine_code_of_forward_passes"
    error = run_cases("mesh_cases", [name], 2, tmp_path, seconds=900)[name]
    assert not error, error


# -- a plain script -----------------------------------------------------------------------------------------------
def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(n) for n in file.read().split()]


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not any(map(_runs, pids)):
            return True
        time.sleep(0.05)
    return False


SCRIPT = """
    import sys, time
    import numpy as np, torch
    torch.set_num_threads(1)
    import mithril as ml
    from mithril.models import IOKey, Linear, Model

    model = Model.create(outputs={"y": Linear(4, name="second")(Linear(8, name="first")(IOKey("x")))})
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), shapes={"x": [4, 8]})
    y = compiled.evaluate(compiled.randomize_params(0), {"x": np.ones((4, 8), np.float32)})["y"]
    print(tuple(y.full_tensor().shape), flush=True)
"""


DEAF = """import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(90)"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "time.sleep(60)", DEAF])
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
        assert owner.returncode == {"raise SystemExit(3)": 3}.get(ending, -signal.SIGKILL)
        assert _gone(running)
    finally:
        owner.kill()
        owner.communicate()


FAILING = """
    import os
    import mithril as ml
    from mithril.models import IOKey, Linear, Model

    model = Model.create(outputs={"y": Linear(4)(IOKey("x"))})
    compiled = ml.compile(model, ml.TorchBackend(device_mesh=(2,)), shapes={"x": [4, 8]})
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    compiled.evaluate(compiled.randomize_params(0), {"x": [[0.0] * 8] * 4})
"""


def test_a_failure_in_another_process_ends_the_script_with_its_reason(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(FAILING))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0
    assert "ValueError: the reason" in done.stderr, done.stderr


def test_only_a_script_starts_processes():
    with pytest.raises(ml.BackendError, match="only a script can start them"):
        stepped(ml.TorchBackend(device_mesh=(2,)))


# -- invalid options ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ((2,), {"parallelism": "model"}, "requires a mesh with a second axis"),
        ((2,), {"parallelism": "hsdp"}, "requires a mesh with a second axis"),
        ((1, 2), {"parallelism": "expert"}, "requires a mesh with a data axis"),
        ((1, 2), {"parallelism": ("fsdp", "hsdp")}, "'fsdp' conflicts with 'hsdp'"),
        ((1, 2), {"parallelism": ("context", "model")}, r"requires a mesh of two axes(.|\n)*=\(2, 2\)"),
        ((2, 2), {"parallelism": ("context", "model", "fsdp")}, "'fsdp' conflicts with 'context'"),
        ((1, 1, 2), {"pipeline_stages": 3}, "conflicts with device_mesh"),
        ((1, 1, 2), {"parallelism": "data"}, "conflicts with device_mesh"),
        ((4,), {"parallelism": "pipeline", "pipeline_stages": 3}, r"cannot be divided into 3 stages(.|\n)*=\(12,\)"),
        ((2, 4), {"pipeline_stages": 2}, r"does not tell how many(.|\n)*hint: use device_mesh=\(2, 4, 2\), .*=\(8,\)"),
        ((1, 2), {"parallelism": ("pipeline", "sequence")}, r"does not tell how many(.|\n)*hint: .*=\(1, 2, 2\)"),
        ((2,), {"parallelism": ("pipeline", "sequence")}, r"a second axis(.|\n)*hint: use device_mesh=\(1, 2, 2\)"),
        ((2,), {"pipeline_chunks": 0}, "'pipeline_chunks'.*expected int of at least 1, got 0"),
        ((1, 1, 2), {"pipeline_chunks": -1}, "expected int of at least 1, got -1"),
        ((1, 1, 2), {"pipeline_stages": 0}, "expected int of at least 1 or None, got 0"),
        ((1, 1, 2), {"pipeline_stages": 6, "pipeline_schedule": "zbvzerobubble"}, "two stages in each(.|\n)*=4"),
        ((1, 1, 2), {"pipeline_stages": 5, "pipeline_schedule": "loopedbfs"}, "equally many stages in each(.|\n)*=4"),
        ((1, 1, 2), {"pipeline_schedule": "interleaved"}, "did you mean 'interleaved1f1b'"),
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
    assert meshes.launched_world_size() is None


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


RESTARTED = """
import os, pathlib, signal, sys
import numpy as np
import mithril as ml
from mithril.models import Dropout, IOKey, Linear, Model

rank, world, step = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
killed = pathlib.Path("killed")


class Kill(ml.Callback):
    def step_end(self, trainer, report):
        if trainer.steps == step and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


x = np.random.default_rng(0).standard_normal((103, 13), np.float32)
trainer = ml.Trainer(
    Model.create(outputs={"y": Linear(1)(Dropout(0.1)(Linear(32)(IOKey("x"))))}),
    ml.AdamW(1e-2, eps=1e-5),
    loss=lambda y, target: ml.ops.mse_loss(y, target),
    backend=ml.TorchBackend(device_mesh=(2,)),
    parallelism="fsdp",
    callbacks=[Kill(), ml.Checkpoint("saved", every=3)],
    seed=3,
    timeout=5,
    progress=False,
)
data = ml.DataLoader({"x": x, "target": x[:, :1] * 2}, 8, shuffle=True, seed=1, rank=rank, world=world)
trainer.fit(data, epochs=2, resume="auto")
values = {n: np.asarray(trainer.engine._numpy(v)).tobytes().hex() for n, v in sorted(trainer.params.items())}
if rank == 0:
    pathlib.Path("values").write_text(f"{trainer.steps} {values}")
"""


@pytest.mark.soak
def test_restarted_job_ends_like_an_undisturbed_one(tmp_path):
    """A restart finds nothing of the attempt before in the store of torchrun, which survives it: no request to stop."""
    (tmp_path / "train.py").write_text(RESTARTED)
    values = []
    for step in (0, 17, 16):  # 0: undisturbed
        folder = tmp_path / f"killed-after-{step}"
        folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path / "train.py"), str(step)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "killed").exists() == (step > 0)
        values.append((folder / "values").read_text())
    assert values[0].startswith("26 ")
    assert values[1:] == values[:1] * 2


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    selected = []
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch, "empty", lambda *size, device: selected.append(device))
    ml.TorchBackend(device="cuda")
    assert selected == [1, "cuda"]


def test_reading_an_array_of_a_lost_process_is_explained(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    class Lost:
        dtype = torch.float32

        def full_tensor(self):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    with pytest.raises(ml.BackendError, match="another process of this program has exited"):
        ml.TorchBackend().to_numpy(Lost())


def test_schedules_distribute_stages_in_turn_or_back():
    assert schedules.owners("interleaved1f1b", 2, 6) == [0, 1, 0, 1, 0, 1]
    assert schedules.owners("zbvzerobubble", 3, 6) == [0, 1, 2, 2, 1, 0]
    assert [schedules.num_stages(name, 2, None) for name in ("1f1b", "loopedbfs", "dualpipev")] == [2, 4, 4]
    assert schedules.num_stages("loopedbfs", 2, 6) == 6
