"""cpu_options, and errors that say which layer code could not be made for."""

import inspect

import numpy as np
import pytest

import mithril as ml
from mithril.graph.errors import BackendError, MithrilError, OptionError
from mithril.models import Linear, Model, Tanh
from mithril_cbackend.lowering.element import elementwise
from mithril_cbackend.program import compile_graph
from mithril_cbackend.tir import machine_code

X = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def compiled(**options):
    model = Model()
    model += Linear(256, name="l")
    model += Tanh(name="t")
    return ml.compile(model, "c", shapes={"input": [64, 256]}, inference=True, **options)


def machine(compiled_model):
    return compiled_model.programs[-1].executable.machine


def test_threads_and_vectors_are_as_requested(monkeypatch):
    monkeypatch.setattr(compile_graph, "processors", lambda: 2)
    for requested, threads, width in (
        ({"num_threads": 1}, 1, None),
        ({"num_threads": 2}, 2, None),
        ({"vector_bytes": 16}, 2, 16),
        ({"vectorize": False}, 2, 4),
    ):
        compiled_model = compiled(cpu_options=requested)
        assert machine(compiled_model).threads == threads
        assert width is None or machine(compiled_model).vector_bytes == width
        assert not list(compiled_model.decisions)
        params = compiled_model.randomize_params(seed=0)
        expected = np.tanh(X @ params["l.weight"].T + params["l.bias"])
        np.testing.assert_allclose(compiled_model.evaluate(params, {"input": X})["output"], expected, atol=1e-5)


def test_source_shows_threads_and_vectors(monkeypatch):
    monkeypatch.setattr(compile_graph, "processors", lambda: 2)
    assert "PARALLEL\n" in compiled(num_threads=2).source
    assert "PARALLEL" not in compiled(num_threads=1).source
    assert "vector_size(4 * 4)" in compiled(cpu_options={"vector_bytes": 16}).source
    assert "VECTOR" not in compiled(cpu_options={"vectorize": False}).source


def test_more_threads_than_there_are_is_said(monkeypatch):
    monkeypatch.setattr(compile_graph, "processors", lambda: 2)
    compiled_model = compiled(num_threads=64)
    assert machine(compiled_model).threads == 2
    assert "using 2 instead of 64 threads" in str(compiled_model.decisions)
    with pytest.raises(ml.MithrilError, match="instead of 64 threads"):
        compiled(num_threads=64, strict=True)


def test_another_processor_of_the_same_kind():
    older = [n for n in ("x86-64-v2", "cortex-a53") if n in machine_code.cpu_names()]
    compiled_model = compiled(cpu_options={"cpu": older[0]})
    assert machine(compiled_model).cpu == older[0]
    compiled_model.evaluate(compiled_model.randomize_params(), {"input": X})


def test_unknown_cpu_is_rejected():
    with pytest.raises(OptionError, match="unknown CPU 'znver55' in cpu_options"):
        compiled(cpu_options={"cpu": "znver55"})


def test_code_that_this_computer_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(machine_code, "missing_features", lambda cpu: ["amx-tile", "avx512fp16"])
    with pytest.raises(OptionError) as error:
        compiled(cpu_options={"cpu": machine_code.host_cpu()})
    assert str(error.value) == (
        f"this machine cannot run code for the CPU '{machine_code.host_cpu()}'\n"
        f"  its CPU '{machine_code.host_cpu()}' lacks: amx-tile, avx512fp16\n"
        "hint: drop cpu from cpu_options; compiled.export(folder) writes C for other machines"
    )


def test_this_computer_lacks_nothing_of_its_own():
    assert machine_code.missing_features(machine_code.host_cpu()) == []


@pytest.mark.parametrize(
    ("options", "message"), [({"threads": 2}, "'threads'"), ({"vector_bytes": 12}, "invalid vector_bytes 12")]
)
def test_other_keys_and_values_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        compiled(cpu_options=options)


def test_a_failing_pass_of_tvm_is_said_with_the_layer(monkeypatch):
    def fails(functions, entries, cpu, threads, real=machine_code.compiled):
        if any("tanh" in name for name in functions):
            raise BackendError("TVM cannot compile: a pass failed")
        return real(functions, entries, cpu, threads)

    monkeypatch.setattr(machine_code, "compiled", fails)
    model = Model()
    line = inspect.currentframe().f_lineno + 1
    model += Tanh(name="t")
    with pytest.raises(BackendError) as error:
        ml.compile(model, "c", shapes={"input": [64, 256]})
    assert str(error.value) == (
        "backend 'c' cannot compile the kernel 'tanh'\n"
        f"  layer 't' at {__file__}:{line}\n"
        "  tanh(f32[64, 256]) -> f32[64, 256]\n"
        "  TVM cannot compile: a pass failed\n"
        "hint: this is a bug in mithril-cbackend: please report it with str(compiled.graph)"
    )


def test_an_error_while_a_kernel_is_written_is_said_with_the_layer(monkeypatch):
    def fails(*_):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(elementwise, "over_elements", fails)
    with pytest.raises(BackendError, match="backend 'c' cannot compile the kernel 'tanh'") as error:
        ml.compile(Tanh(name="t"), ml.CBackend(scheduler="own"), shapes={"input": [64, 256]})
    assert "IndexError: tuple index out of range" in str(error.value)


def test_file_path_holds_the_source_that_is_shown(tmp_path):
    path = tmp_path / "net.c"
    model = Model()
    model += Linear(3, name="l")
    compiled_model = ml.compile(model, "c", shapes={"input": [2, 4]}, file_path=path)
    assert path.read_text() == compiled_model.source
    params, x = compiled_model.randomize_params(seed=0), np.ones((2, 4), np.float32)
    compiled_model.evaluate(params, {"input": x}, output_gradients={"output": np.ones((2, 3), np.float32)})
    forward, gradients = path.read_text(), (tmp_path / "net.grad.c").read_text()
    assert forward != gradients == compiled_model.programs[-1].executable.source
    assert "net.grad.c" in str(compiled_model.decisions)


@pytest.mark.parametrize("backend", ["c", "ggml"])
@pytest.mark.parametrize("option", ["template_path", "code_transformers", "file_path"])
def test_options_of_generated_python_are_refused(backend, option, tmp_path):
    if (backend, option) == ("c", "file_path"):
        pytest.skip("works")
    if backend not in ml.plugins.backends():
        pytest.skip(f"the backend {backend} is not installed")
    (tmp_path / "template.py").write_text("{body}")
    value = {"code_transformers": [str.strip], "file_path": tmp_path / "a.c", "template_path": tmp_path / "template.py"}
    model = Model()
    model += Linear(3, name="l")
    with pytest.raises(MithrilError, match=f"backend '{backend}' does not support {option}="):
        ml.compile(model, backend, shapes={"input": [2, 4]}, **{option: value[option]})


def test_threads_of_the_backend():
    model = Model()
    model += Linear(3, name="l")
    compiled_model = ml.compile(model, ml.CBackend(num_threads=1), shapes={"input": [2, 4]})
    assert compiled_model.programs[-1].executable.machine.threads == 1
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(MithrilError, match="num_threads"):
            ml.CBackend(num_threads=wrong)
