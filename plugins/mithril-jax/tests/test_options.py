"""Options of the JAX backend: their effects on the program, and which of them conflict."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import mithril as ml
from mithril import models
from mithril.graph.errors import InputError, OptionError, StrictError, UnsupportedError
from mithril.models import BatchNorm1d, Linear, Model, MSELoss, Relu
from mithril_jax.mesh import mesh_execution


def mlp():
    model = Model()
    model |= Linear(16, name="first")(input="x", output="h")
    model += Relu()(input="h", output="r")
    model += Linear(2, name="second")(input="r", output="y")
    return model


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(compiled, x, params=None):
    params = compiled.randomize_params(0) if params is None else params
    return np.asarray(compiled.evaluate(params, {"x": x})["y"])


def lowered(compiled, x):
    """Return the program as StableHLO."""
    call = compiled.programs[0].executable.call
    params = compiled.randomize_params(0)
    return call.lower(params, {"x": x})


@pytest.fixture(scope="module")
def expected():
    return run(ml.compile(mlp(), "jax", shapes={"x": [4, 8]}), random(4, 8))


# -- documented options -------------------------------------------------------------------------------------------
def test_the_documented_jax_options(expected):
    options = {
        "xla_flags": ["--xla_gpu_autotune_level=4"],
        "precision": jax.lax.Precision.HIGHEST,
        "donate_argnums": (0, 1),
        "unroll": 4,
    }
    compiled = ml.compile(mlp(), ml.JaxBackend(), shapes={"x": [4, 8]}, jax_options=options)
    np.testing.assert_allclose(run(compiled, random(4, 8)), expected, rtol=1e-5)
    assert "HIGHEST" in lowered(compiled, random(4, 8)).as_text()


def test_the_documented_jit_options(expected):
    options = {"static_argnums": (0, 1), "donate_argnums": (0,)}
    compiled = ml.compile(mlp(), ml.JaxBackend(), shapes={"x": [4, 8]}, jit=True, jit_options=options)
    np.testing.assert_allclose(run(compiled, random(4, 8)), expected, rtol=1e-5)
    assert [d.kind for d in compiled.decisions] == ["ignored"]
    with pytest.raises(StrictError, match="static_argnums"):
        ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jit_options=options, strict=True)


# -- XLA ----------------------------------------------------------------------------------------------------------
def test_levels_are_those_of_one_program(expected):
    jitted = []
    for level in (0, 3):
        compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, xla_optimization_level=level)
        np.testing.assert_allclose(run(compiled, random(4, 8)), expected, rtol=1e-5)
        jitted.append(compiled.programs[0].executable.call.jitted)
    assert jitted[0] is not jitted[1]
    assert "xla_backend_optimization_level" not in str(jax.config.values.get("jax_compiler_options", ""))


def test_a_flag_changes_the_compiled_program():
    """Without XLA's fusion pass the compiled program differs; other programs are not affected."""
    texts = []
    for flags in (None, "--xla_disable_hlo_passes=fusion", None):
        compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jax_options={"xla_flags": flags})
        texts.append(lowered(compiled, random(4, 8)).compile().as_text())
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]


def test_precision_reaches_the_products():
    for name, text in (("high", "precision = [HIGH, HIGH]"), ("highest", "HIGHEST")):
        compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jax_options={"precision": name})
        assert text in lowered(compiled, random(4, 8)).as_text()


def test_loops_are_written_out():
    model = Model()
    model |= ml.models.LSTM(4, name="cell")(input="x", output="y")
    results = {}
    for steps in (None, 3):
        compiled = ml.compile(model, "jax", shapes={"x": [2, 6, 5]}, jax_options={"unroll": steps} if steps else {})
        results[steps] = run(compiled, random(2, 6, 5))
        assert ("unroll=3" in compiled.source) == (steps == 3)
    np.testing.assert_allclose(results[3], results[None], rtol=1e-5)


# -- donation -----------------------------------------------------------------------------------------------------
def test_donated_arguments_become_results():
    """Every parameter that has a gradient of its type is donated, and using it again is an error."""
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jit_options={"donate_argnums": 0})
    params = compiled.randomize_params(0)
    compiled.evaluate(params, {"x": random(4, 8)}, np.ones((4, 2), np.float32))
    assert all(x.is_deleted() for x in params.values())
    with pytest.raises(InputError, match="was donated to an earlier call"):
        compiled.evaluate(params, {"x": random(4, 8)}, np.ones((4, 2), np.float32))


def test_unusable_donations_are_kept(recwarn):
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jax_options={"donate_argnums": (0, 1)})
    params = compiled.randomize_params(0)
    first = run(compiled, random(4, 8), params)
    np.testing.assert_array_equal(first, run(compiled, random(4, 8), params))
    assert not [w for w in recwarn if "donated" in str(w.message)]


# -- calling ------------------------------------------------------------------------------------------------------
def test_outputs_keep_their_order():
    model = Model()
    model |= Linear(2, name="b")(input="x", output="z")
    model |= Linear(3, name="a")(input="x", output="a")
    model.set_outputs("z", "a")
    compiled = ml.compile(model, "jax", shapes={"x": [4, 8]})
    assert list(compiled.evaluate(compiled.randomize_params(0), {"x": random(4, 8)})) == ["z", "a"]


def test_one_compilation_per_signature():
    compiled = ml.compile(mlp(), "jax", shapes={"x": [None, 8]})
    params = compiled.randomize_params(0)
    for n in (2, 3, 2, 3):
        compiled.evaluate(params, {"x": random(n, 8)})
    assert compiled.programs[0].executable.call.jitted._cache_size() == 2


def test_gradients_of_both_kinds_agree():
    gradients = []
    for kind in ("graph", "native"):
        compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, autodiff=kind)
        g = np.ones((4, 2), np.float32)
        gradients.append(compiled.evaluate(compiled.randomize_params(0), {"x": random(4, 8)}, g)[1])
    for name, x in gradients[0].items():
        np.testing.assert_allclose(x, gradients[1][name], rtol=1e-4, atol=1e-5)


def test_jit_and_file_go_together(tmp_path, expected):
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, jit=True, file_path=tmp_path / "g.py")
    np.testing.assert_allclose(run(compiled, random(4, 8)), expected, rtol=1e-5)
    assert "def forward(params, inputs):" in (tmp_path / "g.py").read_text()


# -- vectorize ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["graph", "native"])
def test_examples_are_mapped(kind):
    plain = ml.compile(mlp(), "jax", shapes={"x": [None, 8]})
    compiled = ml.compile(mlp(), "jax", shapes={"x": [None, 8]}, vectorize=True, autodiff=kind)
    params = plain.randomize_params(0)
    for n in (1, 5):
        g = random(n, 2, seed=1)
        a, b = (c.evaluate(params, {"x": random(n, 8)}, g) for c in (plain, compiled))
        for left, right in zip(a, b, strict=True):
            for name, x in left.items():
                np.testing.assert_allclose(right[name], x, rtol=1e-4, atol=1e-5)
    assert not list(compiled.decisions.of("ignored"))


def test_mixing_examples_is_rejected():
    model = mlp()
    model += BatchNorm1d(2, name="norm")(input="y", output="n")
    compiled = ml.compile(model, "jax", shapes={"x": [None, 8]}, vectorize=True)
    params = compiled.randomize_params(0)
    compiled.evaluate(params, {"x": random(4, 8)})  # with running statistics examples are independent
    with pytest.raises(UnsupportedError, match="mixes the examples"):
        compiled.evaluate(params, {"x": random(4, 8)}, np.ones((4, 2), np.float32))


def test_a_mean_over_examples_is_rejected():
    model = mlp()
    model |= MSELoss()(predictions="y", targets="t", output="loss")
    model.set_outputs("loss")
    with pytest.raises(UnsupportedError, match="'loss' is not the same"):
        ml.compile(model, "jax", shapes={"x": ["B", 8], "t": ["B", 2]}, vectorize=True)


def test_vectorize_is_ignored_for_a_fixed_number_of_examples():
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, vectorize=True)
    assert "its size is fixed" in str(compiled.decisions)


# -- meshes -------------------------------------------------------------------------------------------------------
def test_results_on_a_mesh_are_the_same():
    """Runs in a separate process, since JAX fixes the number of simulated CPU devices once."""
    code = """
        import jax, numpy as np
        from importlib.util import find_spec
        import mithril as ml
        from mithril.models import Linear, Model, Relu

        model = Model()
        model |= Linear(16, name="first")(input="x", output="h")
        model += Relu()(input="h", output="r")
        model += Linear(2, name="second")(input="r", output="y")
        x = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
        g = np.ones((8, 2), np.float32)
        backends = [ml.JaxBackend(device_mesh=(2, 2)), ml.JaxBackend(device_mesh=(4,)), ml.JaxBackend()]
        results = []
        for backend in backends:
            for shape in ([8, 12], [None, 12]):
                compiled = ml.compile(model, backend, shapes={"x": shape})
                params = compiled.randomize_params(0)
                results.append([compiled.evaluate(params, {"x": x}, g) for _ in range(3)][-1])
                odd = compiled.evaluate(params, {"x": x[:3]})["y"] if shape[0] is None else None
                if backend is backends[0] and shape[0] == 8:
                    split = results[0][1]["first.weight"].sharding
                    assert split.spec == jax.sharding.PartitionSpec("model", None), split
                if odd is not None:
                    np.testing.assert_allclose(odd, results[-1][0]["y"][:3], rtol=1e-4, atol=1e-5)
                    recorded = "'x' is replicated" in str(compiled.decisions)
                    assert recorded == (backend is not backends[2]), compiled.decisions
        for pair in results[:-1]:
            for left, right in zip(pair, results[-1]):
                for name in right:
                    np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=1e-5)
        pjit = ml.compile(model, "jax", shapes={"x": [8, 12]}, pjit=True)
        y = pjit.evaluate(pjit.randomize_params(0), {"x": x})["y"]
        np.testing.assert_allclose(y, results[-1][0]["y"], rtol=1e-4, atol=1e-5)
        text = backends[0].mesh.shape
        wrong = {"weights": 7}
        without = "belongs to mithril-parallel" if find_spec("mithril_parallel") is None else None
        for options, message in (
            ({"tensor_split_dims": {"wieghts": 0}}, without or "no parameter matches"),
            ({"tensor_split_dims": wrong}, without or "has no axis 7"),
            ({"jit": False}, "conflicts with a mesh"),
        ):
            try:
                ml.compile(model, backends[0], shapes={"x": [8, 12]}, **options)
            except ml.MithrilError as error:
                assert message in str(error), error
            else:
                raise AssertionError(options)
        print("fine", len(jax.devices()))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.strip() == "fine 4", done.stderr[-3000:]


def test_one_device_needs_no_sharding():
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, pjit=True)
    if len(jax.devices()) == 1:
        assert "there is one device only" in str(compiled.decisions)


@pytest.mark.parametrize("mesh", [(), (0,), (2, 2, 2, 2), ("a",)])
def test_invalid_mesh_is_rejected(mesh):
    with pytest.raises(OptionError, match="is not a valid mesh of devices|device_mesh: at .0.: expected int"):
        ml.JaxBackend(device_mesh=mesh)


def test_a_mesh_with_more_devices_than_available_is_rejected():
    jax.devices()
    with pytest.raises(ml.BackendError, match="requires 4096 devices"):
        ml.JaxBackend(device_mesh=(64, 64))
    assert mesh_execution.parse_mesh(4) == (4,)


# -- settings of the process --------------------------------------------------------------------------------------
def test_preallocation_is_for_gpus(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    backend = ml.JaxBackend(pre_allocate=True)
    if backend.device == "cpu":
        assert "GPUs only" in str(ml.compile(mlp(), backend, shapes={"x": [4, 8]}).decisions)
    with pytest.raises(OptionError, match="conflicts with the environment variable"):
        ml.JaxBackend(pre_allocate=False)


def test_threads_belong_to_the_process():
    jax.devices()
    with pytest.raises(ml.BackendError, match="JAX is already initialized"):
        ml.JaxBackend(num_threads=4096)
    compiled = ml.compile(mlp(), "jax", shapes={"x": [4, 8]}, num_threads=4096)
    assert "one pool of" in str(compiled.decisions)
    assert "one pool" in ml.JaxBackend.diagnose()["threads"]


def test_threads_are_limited_before_the_first_use():
    code = """
        import mithril as ml, glob
        backend = ml.JaxBackend(num_threads=1)
        model = ml.models.Model()
        model += ml.models.Linear(512)
        compiled = ml.compile(model, backend, shapes={"input": [512, 512]}, num_threads=1)
        compiled.evaluate(compiled.randomize_params(0), {"input": backend.ones((512, 512))})
        print(len(compiled.decisions), open("/proc/self/comm").read().strip() and
              sum("XLAEigen" in open(p).read() for p in glob.glob("/proc/self/task/*/comm")))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**{k: v for k, v in os.environ.items() if k != "NPROC"}, "JAX_PLATFORMS": "cpu"},
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("counts threads in /proc")
    ignored, threads = map(int, done.stdout.split())
    assert ignored == 0, done.stderr
    assert threads <= 1


# -- invalid options ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jit": False, "xla_optimization_level": 1}, "jit=False conflicts with xla_optimization_level"),
        ({"jit": False, "vectorize": True}, "jit=False conflicts with vectorize"),
        ({"jit": False, "jax_options": {"donate_argnums": 0}}, "jit=False conflicts with donate_argnums"),
        ({"xla_optimization_level": 4}, "expected 0 to 3"),
        ({"jax_options": {"xla_flags": "--xla_nonsense=1"}}, "No such compile option: 'xla_nonsense'"),
        ({"jax_options": {"xla_flags": "xla_nonsense"}}, "is not an XLA flag"),
        ({"jax_options": {"xla_flags": "--xla_force_host_platform_device_count=4"}}, "device_mesh"),
        (
            {"jax_options": {"xla_flags": "--xla_backend_optimization_level=1"}, "xla_optimization_level": 2},
            "one place",
        ),
        ({"jax_options": {"precison": "high"}}, "precision"),
        ({"jax_options": {"precision": "sharp"}}, "unknown precision 'sharp'"),
        ({"jax_options": {"unroll": 0}}, "1 or more"),
        ({"jax_options": {"donate_argnums": 2}}, "is out of range"),
        (
            {"jax_options": {"donate_argnums": 0}, "jit_options": {"donate_argnums": 1}},
            "conflicts with donate_argnums of jit_options",
        ),
        ({"jit_options": {"static_argnums": 3}}, "is out of range"),
        ({"jit_options": {"donate": 0}}, "donate_argnums"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(OptionError) as caught:
        ml.compile(mlp(), "jax", shapes={"x": [2, 8]}, **options)
    assert message in str(caught.value)


def test_a_precision_keeps_everything_else():
    backend = ml.JaxBackend()
    backend.pre_allocate = True
    other = backend.with_precision("bfloat16")
    assert (other.precision, other.pre_allocate, other.dtype) == ("bfloat16", True, ml.bfloat16)


@pytest.mark.gpu
def test_runs_on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    compiled = ml.compile(mlp(), ml.JaxBackend(device="gpu"), shapes={"x": [4, 8]})
    y = compiled.evaluate(compiled.randomize_params(0), {"x": random(4, 8)})["y"]
    assert next(iter(y.devices())).platform == "gpu"


def test_checkpointing_is_not_undone_by_xla():
    """XLA on CPUs removes barriers and merges recomputed values, unless that pass is disabled."""
    from mithril.models import TransformerEncoderLayer

    sizes = []
    for options in ({}, {"gradient_checkpointing": True}):
        model = Model()
        for k in range(12):
            model += TransformerEncoderLayer(32, 2, 128, name=f"l{k}")
        compiled = ml.compile(model, "jax", shapes={"input": [4, 32, 32]}, **options)
        params = compiled.randomize_params(0)
        x = compiled.backend.array(np.ones((4, 32, 32), np.float32))
        (name,) = compiled.evaluate(params, {"input": x}, training=False)
        compiled.evaluate(params, {"input": x}, {name: x}, training=False)
        program = compiled.programs[-1].executable.call.lower(params, {"input": x, f"grad/{name}": x}).compile()
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 0.6 * sizes[0], sizes


def test_xla_frees_recomputed_values_in_a_perceptron():
    """The barrier holds a cotangent that later nodes use: XLA would bypass a transposed weight or an unused value."""
    needed = []
    for checkpointing in (False, True):
        model = Model()
        for _ in range(12):
            model += models.Linear(64)
            model += models.Gelu()
        options = {"gradient_checkpointing": checkpointing}
        compiled = ml.compile(model, "jax", shapes={"input": [1024, 64]}, **options)
        report = compiled.memory_report(gradients=True)
        assert report.use.source == "XLA"
        needed.append(report.workspace)
    assert needed[1] < 0.6 * needed[0]


def test_nothing_is_printed_on_stderr():
    """This includes installations with libtpu, which prints warnings on machines without a TPU."""
    code = "import mithril as ml; print(ml.JaxBackend().ones([2]))"
    settings = {n: v for n, v in os.environ.items() if not n.startswith("TPU_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0 and done.stderr == ""
