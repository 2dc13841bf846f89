"""Probes of compilation options, files, control flow, several engines, training and tools."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril import models as m

from .cells import Cell, error, fails, fewer, holds, message, nothing, probe, refused, refused_without_device, when
from .networks import ENCODER, MLP, NETWORKS, Network, bound, called, compiled, slopes

BACKENDS = {
    "numpy": "NumpyBackend",
    "torch": "TorchBackend",
    "jax": "JaxBackend",
    "mlx": "MlxBackend",
    "c": "CBackend",
    "ggml": "GGMLBackend",
}


def foreign(engine: str, **options: Any) -> Cell:
    """Return the recorded decision about an option that is for other engines."""
    (keyword,) = options
    return nothing(message(compiled(MLP, engine, **options), keyword))


def without(engine: str, keyword: str, **options: Any) -> Cell:
    """Return the answer of another engine to an option: an error, or a recorded decision that nothing reads it."""
    try:
        return nothing(message(compiled(MLP, engine, **options), keyword))
    except ml.MithrilError:
        return refused(lambda: compiled(MLP, engine, **options))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def difference(network: Network, engine: Any, **options: Any) -> float:
    """Return the largest difference of a program from NumPy's without optimizations, relative to the output."""
    reference = compiled(network, "numpy", optimization_level="none")
    params = reference.randomize_params(seed=0)
    reference.bind(params)
    expected = called(reference, network)
    subject = compiled(network, engine, **options)
    kind = subject.backend.dtype
    subject.bind({name: subject.backend.array(x, dtype=kind) for name, x in params.items()})
    return float(np.abs(called(subject, network) - expected).max() / np.abs(expected).max())


def equal(engine: Any, limit: float = 1e-4, **options: Any) -> Cell:
    """Return a cell that holds if the three networks have the values of NumPy under these options."""
    observed = max(difference(network, engine, **options) for network in NETWORKS)
    return when(observed < limit, f"largest difference {observed:.0e}")


# -- one model, its interface, its errors ---------------------------------------------------------------------------
@probe()
def one_model(engine: str) -> Cell:
    """Largest relative difference of the outputs from NumPy without optimizations."""
    return equal(getattr(ml, BACKENDS[engine])())


@probe()
def interface(engine: str) -> Cell:
    """Gradients, shapes and types of a compiled model."""
    for network in NETWORKS:
        subject = compiled(network, engine)
        params = subject.randomize_params(seed=0)
        _, gradients, *_ = subject.evaluate(params, {"input": network.input()}, output_gradients=slopes(network))
        if set(gradients) != set(params) or any(gradients[n].shape != params[n].shape for n in params):
            return fails(f"gradients of {sorted(gradients)}")
    return when(
        tuple(subject.get_shapes()["output"]) == (2, 6, 4), f"{len(params)} gradients of {len(params)} parameters"
    )


@probe()
def shape_error(engine: str) -> Cell:
    """Return the error of a size that nothing determines."""
    subject = compiled(MLP, engine, shapes={})
    return when("Cannot infer shape" in (text := error(subject.randomize_params)), text)


@probe()
def type_error(engine: str) -> Cell:
    """Return the error of a batch in float64 where float32 is expected."""
    subject = bound(MLP, engine)
    text = error(lambda: subject({"input": MLP.input().astype(np.float64)}))
    return when("float32" in text and "float64" in text, text)


@probe()
def timeout(engine: str) -> Cell:
    """Return the error of a compilation that takes longer than its limit."""
    return when("timed out" in (text := error(lambda: compiled(MLP, engine, timeout=1e-9))), text)


# -- running ----------------------------------------------------------------------------------------------------------
@probe()
def jit(engine: str) -> Cell:
    """Return the kind of program that jit=True builds."""
    if engine in ("c", "ggml", "numpy"):
        return nothing(message(compiled(MLP, engine, jit=True), "jit"))
    options = {"jit_options": {"backend": "eager"}} if engine == "torch" else {}
    plain, jitted = (compiled(MLP, engine, jit=on, **(options if on else {})) for on in (False, True))
    observed = equal(engine, jit=True, **options)
    kinds = {"torch": "graphs of TorchDynamo", "jax": "programs of XLA", "mlx": "functions of mx.compile"}
    return when(observed.verdict == "holds" and running(plain) != running(jitted), f"{kinds[engine]}, equal values")


def running(subject: Any) -> list[Any]:
    call = subject.programs[-1].executable.call
    captured = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    return [*(type(x).__name__ for x in (call, *captured)), str(getattr(call, "jitted", ""))]


@probe(timed=True)
def inductor(engine: str) -> Cell:
    """Values of programs compiled by Inductor in the mode max-autotune."""
    options = {"jit": True, "jit_options": {"backend": "inductor", "mode": "max-autotune"}}
    if engine != "torch":
        return without(engine, "jit", **options)
    observed = difference(MLP, engine, **options)
    return when(observed < 1e-4, f"largest difference {observed:.0e}")


@probe()
def donation(engine: str) -> Cell:
    """Parameters after a call that donates them: reading them again is an error."""
    options = {"jit": True, "jit_options": {"donate_argnums": 0}}
    if engine != "jax":
        return without(engine, "jit", **options)
    subject = compiled(MLP, engine, **options)
    params = subject.randomize_params(seed=0)
    arguments = params, {"input": MLP.input()}, slopes(MLP)
    subject.evaluate(*arguments)
    return when("donated" in (text := error(lambda: subject.evaluate(*arguments))), f"memory is used again: {text}")


@probe()
def static_argnums(engine: str) -> Cell:
    """Return the effect of static_argnums."""
    options = {"jit": True, "jit_options": {"static_argnums": (0, 1)}}
    if engine != "jax":
        return without(engine, "jit", **options)
    return nothing(message(compiled(MLP, engine, **options), "static_argnums"))


@probe()
def jax_options(engine: str) -> Cell:
    """Products of highest precision in the traced program, and unrolled loops."""
    options = {"jax_options": {"precision": "highest", "unroll": 4, "xla_flags": ["--xla_gpu_autotune_level=4"]}}
    if engine != "jax":
        return foreign(engine, **options)
    import jax

    subject = bound(MLP, engine, **options)
    call = subject.to_function()
    text = str(jax.make_jaxpr(lambda x: call(subject.params, {"input": x}))(MLP.input()))
    return when("HIGHEST" in text, f"{text.count('HIGHEST')} products of highest precision")


@probe()
def xla_level(engine: str) -> Cell:
    """Values with xla_optimization_level=3."""
    options = {"xla_optimization_level": 3}
    return equal(engine, **options) if engine == "jax" else foreign(engine, **options)


@probe()
def vectorize(engine: str) -> Cell:
    """Values of a program for one example that is mapped over an open batch."""
    options = {"vectorize": True, "shapes": {"input": [None, 16]}}
    if engine != "jax":
        return nothing(message(compiled(MLP, engine, vectorize=True), "vectorize"))
    subject = compiled(MLP, engine, **options)
    subject.bind(compiled(MLP, engine).randomize_params(seed=0))
    plain = compiled(MLP, engine).bind(subject.params)
    np.testing.assert_allclose(called(subject, MLP), called(plain, MLP), rtol=1e-4, atol=1e-5)
    return when(not list(subject.decisions.of("ignored")), "equal values")


@probe()
def torchscript(engine: str) -> Cell:
    """Programs traced and frozen by torch.jit."""
    options = {"torch_options": {"graph_mode": True, "script_optimization": 3}}
    if engine != "torch":
        return foreign(engine, **options)
    text = message(compiled(MLP, engine, **options), "graph_mode")
    return when("traced" in text and equal(engine, **options).verdict == "holds", text)


@probe()
def amp(engine: str) -> Cell:
    """Products in bfloat16 with enable_amp."""
    options = {"torch_options": {"enable_amp": True}}
    if engine != "torch":
        return foreign(engine, **options)
    observed = max(difference(network, engine, **options) for network in NETWORKS)
    return when(1e-4 < observed < 0.03, f"largest difference {observed:.0e}")


@probe()
def cudnn(engine: str) -> Cell:
    """Return the cuDNN options on this machine's CPU."""
    options = {"torch_options": {"enable_cudnn": True, "benchmark_mode": True}}
    if engine != "torch":
        return foreign(engine, **options)
    return when(equal(engine, **options).verdict == "holds", "accepted; cuDNN runs on NVIDIA GPUs alone")


@probe()
def torch_fx(engine: str) -> Cell:
    """Return the program that torch_fx=True runs."""
    if engine != "torch":
        return foreign(engine, torch_fx=True)
    plain, subject = (compiled(MLP, engine, **o) for o in ({}, {"torch_fx": True}))
    changed = running(plain) != running(subject) or str(plain.programs[-1].executable.forward) != str(
        subject.programs[-1].executable.forward
    )
    return when(changed and equal(engine, torch_fx=True).verdict == "holds", "a graph of torch.fx")


@probe()
def torch_dynamo(engine: str) -> Cell:
    """Graphs that TorchDynamo captures."""
    options = {"torch_dynamo": True}
    if engine != "torch":
        return foreign(engine, **options)
    import torch

    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    bound(MLP, engine, jit_options={"backend": "eager"}, **options)
    return fewer([(1, 1 - (torch._dynamo.utils.counters["stats"]["unique_graphs"] - before))], "graphs left to capture")


@probe()
def pjit(engine: str) -> Cell:
    """Return the effect of pjit=True with one device."""
    return nothing(message(compiled(MLP, engine, pjit=True), "pjit"))


@probe()
def gpu(engine: str) -> Cell:
    """Return a GPU as the device of the backend, on this machine."""
    device = {"torch": "cuda"}.get(engine, "gpu")
    return refused_without_device(lambda: compiled(MLP, getattr(ml, BACKENDS[engine])(device=device)))


@probe()
def thread_option(engine: str) -> Cell:
    """Return the decision about num_threads=2."""
    subject = compiled(MLP, engine, cpu_options={"num_threads": 2})
    messages = [d.message.splitlines()[0] for d in subject.decisions if "threads" in d.message]
    return when(subject.options["num_threads"] == 2, messages[0] if messages else "2 threads are passed to the engine")


@probe()
def graph_optimization(engine: str) -> Cell:
    """Passes at level none, without and with graph_optimization=True."""
    options: tuple[dict[str, Any], ...] = ({}, {"graph_optimization": True})
    plain, subject = (str(compiled(MLP, engine, optimization_level="none", **o).pipeline) for o in options)
    return when(len(subject) > len(plain), f"{len(plain.splitlines())} to {len(subject.splitlines())} lines of passes")


# -- files ------------------------------------------------------------------------------------------------------------
@probe()
def file_path(engine: str) -> Cell:
    """Return the generated file: it runs without mithril and computes the same."""
    with folder() as directory:
        path = directory / ("model.c" if engine == "c" else "model.py")
        if engine == "ggml":
            return refused(lambda: compiled(MLP, engine, file_path=path))
        for network in NETWORKS:
            subject = compiled(network, engine, file_path=path).bind(compiled(network, engine).randomize_params(seed=0))
            text = path.read_text()
            if engine == "c" or "mithril" in text.partition("import ")[2]:
                continue
            spec = importlib.util.spec_from_file_location("generated", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            state = dict(subject.initial_state())
            x = {"input": subject.backend.array(network.input())}
            observed = subject.backend.to_numpy(module.forward(subject.params, {**x, **state})["output"])
            np.testing.assert_allclose(observed, called(subject, network), rtol=1e-4, atol=1e-5)
    return when(
        "forward" in text or "run(" in text, f"{len(text.splitlines())} lines" + (", equal values" * (engine != "c"))
    )


TEMPLATE = """# mine
{% for part in imports + helpers + constants + [signature] %}{{ part }}
{% endfor %}{% for line in body + [closing] %}    {{ line }}
{% endfor %}"""


@probe()
def template(engine: str) -> Cell:
    """Return the first line of a program that a template of the user writes."""
    with folder() as directory:
        (directory / "own.py.j2").write_text(TEMPLATE)
        options = {"template_path": directory / "own.py.j2"}
        if engine in ("c", "ggml"):
            return refused(lambda: compiled(MLP, engine, **options))
        return when(bound(MLP, engine, **options).source.startswith("# mine"), "the template is used")


@probe()
def code_transformer(engine: str) -> Cell:
    """Lines that inserted code prints in 3 calls."""

    def speaking(code: str) -> str:
        head = "def forward(params, inputs):"
        return code.replace(head, f"{head}\n    print('called')")

    if engine in ("c", "ggml"):
        return refused(lambda: compiled(MLP, engine, code_transformers=[speaking]))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        subject = compiled(MLP, engine, code_transformers=[speaking])
        subject.bind(subject.randomize_params(seed=0))
        for _ in range(3):
            called(subject, MLP)
    return when(text.getvalue().count("called") == 3, "3 lines")


@probe()
def dump_graph(engine: str) -> Cell:
    """Files of dump_graph in three formats."""
    counts = []
    with folder() as directory:
        for kind in ("dot", "json", "text"):
            compiled(MLP, engine, dump_graph=directory / kind, dump_format=kind)
            counts.append(len(list((directory / kind).iterdir())))
    return when(all(counts), f"{counts[0]}, {counts[1]} and {counts[2]} files of dot, json and text")


@probe()
def intermediates(engine: str) -> Cell:
    """Files of save_intermediates, and values that capture() returns."""
    with folder() as directory:
        subject = compiled(ENCODER, engine, save_intermediates=True, intermediate_dir=directory)
        count = len(list(directory.rglob("*.*")))
    values = subject.capture(subject.randomize_params(seed=0), {"input": ENCODER.input()})
    return when(count and values, f"{count} files, {len(values)} values")


@probe()
def shape_trace(engine: str) -> Cell:
    """Lines of trace_shapes with a shape."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        compiled(ENCODER, engine, trace_shapes=True)
    lines = [line for line in text.getvalue().splitlines() if "[2, 6, 16]" in line]
    return when(lines, f"{len(lines)} lines with [2, 6, 16]")


@probe()
def profile_file(engine: str) -> Cell:
    """Events of the profile of a compilation."""
    with folder() as directory:
        compiled(MLP, engine, profile=True, profile_output=directory / "profile.json")
        content = json.loads((directory / "profile.json").read_text())
    events = content["traceEvents"] if isinstance(content, dict) else content
    return when(len(events) > 5, f"{len(events)} events")


@probe()
def drawing(engine: str) -> Cell:
    """Shapes, types and bytes in the drawing of a model."""
    with folder() as directory:
        style = {
            "format": "svg",
            "show_shapes": True,
            "show_types": True,
            "show_memory": True,
            "output_path": directory / "m.svg",
        }
        compiled(MLP, engine, visualize=True, viz_options=style)
        text = (directory / "m.svg").read_text()
    words = [word for word in ("<svg", "8", "24", "float32", "peak") if word in text]
    return when(len(words) == 5, f"{len(text):,} characters with shapes, types and bytes")


@probe()
def program_cache(engine: str) -> Cell:
    """Passes that the second compilation of a cached model runs."""
    with folder() as directory:
        counts = []
        for _ in range(2):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                bound(MLP, engine, cache=True, cache_dir=directory, verbose=True)
            counts.append(text.getvalue().count("linear-activation"))
        files = len([path for path in directory.rglob("*") if path.is_file()])
    return fewer([(counts[0], counts[1])], f"lines of a pass, {files} files")


# -- models -----------------------------------------------------------------------------------------------------------
@probe()
def many_inputs(engine: str) -> Cell:
    """Return a model of an image and a text with a shape for each."""
    model = m.Model()
    model |= m.Conv2d(3, 4, kernel_size=3)(input="image_input", output="maps")
    model |= m.GlobalAvgPool2d()(input="maps", output="pooled")
    model |= m.Linear(4)(input="text_input", output="text")
    model |= m.Add()(left="pooled", right="text", output="output")
    shapes = {"image_input": [2, 3, 8, 8], "text_input": [2, 16]}
    subject = ml.compile(model, engine, shapes=shapes)
    subject.bind(subject.randomize_params(seed=0))
    result = subject({name: np.ones(shape, np.float32) for name, shape in shapes.items()})["output"]
    return when(tuple(result.shape) == (2, 4), "output [2, 4]")


@probe()
def branches(engine: str) -> Cell:
    """Outputs of If with the flag off, twice, and on."""
    model = m.Model()
    model |= m.Linear(64)(input="input", output="hidden")
    model |= m.If(
        condition="is_training",
        then_branch=m.Dropout(p=0.5)(input="hidden", output="processed"),
        else_branch=m.Identity()(input="hidden", output="processed"),
    )
    model |= m.Linear(4)(input="processed", output="output")
    subject = ml.compile(model, engine, shapes={"input": [8, 16]}, dynamic_control_flow=True)
    params = subject.randomize_params(seed=0)
    values = [
        subject.backend.to_numpy(subject.evaluate(params, {"input": MLP.input(), "is_training": on})["output"])
        for on in (False, False, True)
    ]
    is_right = np.array_equal(values[0], values[1]) and not np.array_equal(values[0], values[2])
    return when(is_right, "one program takes either branch")


@probe()
def loops(engine: str) -> Cell:
    """Outputs of While with 0, 1 and 3 steps, compared with NumPy."""
    block = m.Model()
    block |= m.Linear(16)(input="state", output="new_state")
    block |= m.Add()(left="new_state", right="input", output="output")
    model = m.Model()
    model |= m.Linear(16)(input="input", output="initial_state")
    model |= m.While(
        condition="step < max_steps",
        body=block,
        initial_state={"state": "initial_state", "step": 0},
        loop_vars={"state": "new_state", "step": "step + 1"},
        output_vars={"final_state": "state"},
    )(output="final_state")
    model |= m.Linear(4)(input="final_state", output="output")
    results: list[list[Any]] = []
    drawn: dict[str, Any] = {}
    for name in ("numpy", engine):
        subject = ml.compile(model, name, shapes={"input": [8, 16]}, dynamic_control_flow=True)
        params = (
            {n: subject.backend.array(x) for n, x in drawn.items()} if results else subject.randomize_params(seed=0)
        )
        drawn = drawn or params
        results.append(
            [
                subject.backend.to_numpy(subject.evaluate(params, {"input": MLP.input(), "max_steps": k})["output"])
                for k in (0, 1, 3)
            ]
        )
    observed = max(float(np.abs(a - b).max()) for a, b in zip(*results, strict=True))
    return when(observed < 1e-4 and not np.allclose(results[1][0], results[1][2]), f"largest difference {observed:.0e}")


@probe()
def several_engines(engine: str) -> Cell:
    """Return a part of each network on PyTorch (on NumPy, for PyTorch): values compared with one engine."""
    guest = "numpy" if engine == "torch" else "torch"

    def make() -> Any:
        part = m.Linear(16)
        part.set_attribute("backend", "other")
        return m.Model(m.Linear(16), m.Relu(), part, m.Relu(), m.Linear(4))

    network = Network(make, (8, 16))
    subject = compiled(network, engine, backend_map={"other": guest})
    reference = ml.compile(
        m.Model(m.Linear(16), m.Relu(), m.Linear(16), m.Relu(), m.Linear(4)), "numpy", shapes={"input": [8, 16]}
    )
    params = reference.randomize_params(seed=0)
    reference.bind(params)
    subject.bind({name: subject.backend.array(x) for name, x in params.items()})
    observed = float(np.abs(called(subject, network) - called(reference, network)).max())
    is_divided = type(subject.programs[-1].executable).__name__ == "Partitioned"
    return when(is_divided and observed < 1e-4, f"with {guest}: largest difference {observed:.0e}")


@probe()
def mobile(engine: str) -> Cell:
    """C for an arm64 phone with int8 weights."""
    options = {"platform": "linux", "arch": "arm64-v8a", "quantization": "int8", "optimize_size": True}
    if engine not in ("torch", "c"):
        return refused(lambda: compiled(MLP, engine, target_hardware="mobile", mobile_options=options))
    network = Network(lambda: m.Model(m.Linear(32), m.Relu(), m.Linear(4)), (4, 64))
    subject = bound(network, engine, target_hardware="mobile", mobile_options=options)
    with folder() as directory:
        exported = subject.export(directory / "phone", library=None)
        size = (directory / "phone" / "model.c").stat().st_size
        kind = exported.contents.target.arch
    return when(kind == "arm64-v8a", f"{size:,} bytes of C for {kind}")


# -- tools ------------------------------------------------------------------------------------------------------------
@probe()
def profile(engine: str) -> Cell:
    """Layers of each network that the profile of a call names."""
    counts = []
    for network in NETWORKS:
        subject = bound(network, engine)
        with ml.profile() as prof:
            called(subject, network)
        summary = prof.summary()
        counts.append(sum(word in summary for word in ("linear", "conv", "norm")))
    return when(all(counts), f"{len(summary.splitlines())} lines for the encoder")


@probe()
def profile_stats(engine: str) -> Cell:
    """Rows of the execution breakdown of a model that is compiled with profile=True."""
    subject = bound(MLP, engine, profile=True)
    stats = subject.get_profile_stats()
    return when(stats.execution_breakdown, f"{len(stats.execution_breakdown)} rows")


@probe()
def batch_loop(engine: str) -> Cell:
    """Batch sizes that one compiled model accepts in a loop."""
    subject = compiled(MLP, engine, shapes={"input": [None, 16]})
    subject.bind(compiled(MLP, engine).randomize_params(seed=0))
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    rows = [len(called(subject, MLP, size)) for size in sizes]
    return when(rows == sizes, f"{len(rows)} sizes, {len(subject.programs)} programs")


@probe()
def accumulation(engine: str) -> Cell:
    """Weights after one step on 32 rows, and after 4 accumulated steps on 8 rows."""
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    y = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)
    observed = []
    for rows, steps in ((32, 1), (8, 4)):
        network = Network(lambda: m.Model(m.Linear(16), m.Relu(), m.Linear(4)), (rows, 16))
        trainer = ml.Trainer(
            network.make(), ml.SGD(0.1), loss="mse", backend=engine, progress=False, gradient_accumulation_steps=steps
        )
        trainer.fit(ml.DataLoader((x, y), batch_size=rows), epochs=1)
        backend = trainer.engine.backend
        observed.append({n: np.asarray(backend.to_numpy(a)) for n, a in trainer.params.items()})
    difference = max(float(np.abs(observed[0][n] - observed[1][n]).max()) for n in observed[0])
    return when(difference < 1e-5, f"largest difference {difference:.0e}")


@probe()
def quantization_aware(engine: str) -> Cell:
    """Loss of training with the rounding of int8 weights."""
    return trained(engine, quantization_aware=True)


@probe()
def amp_training(engine: str) -> Cell:
    """Loss of training with products in bfloat16."""
    return trained(engine, mixed_precision=True)


def trained(engine: str, **options: Any) -> Cell:
    """Return the losses of the first and the last epoch, which differ from those without the options."""
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    batches = ml.DataLoader((x, x[:, :4] * 0.5), batch_size=32)
    runs = []
    for extra in ({}, options):
        model = m.Model(m.Linear(32), m.Relu(), m.Linear(4))
        trainer = ml.Trainer(model, ml.Adam(0.02), loss="mse", backend=engine, progress=False, **extra)
        runs.append(trainer.fit(batches, epochs=12)["loss"])
    plain, losses = runs
    is_right = losses[-1] < 0.5 * losses[0] and losses[-1] != plain[-1]
    return when(is_right, f"loss {losses[0]:.2f} to {losses[-1]:.4f} ({plain[-1]:.4f} without)")


@probe()
def data_loader(engine: str) -> Cell:
    """Rows of a shuffled loader with 2 workers, pinned memory and prefetching: each once."""
    x = np.arange(64, dtype=np.float32).reshape(64, 1)
    loader = ml.DataLoader(dataset=x, batch_size=8, shuffle=True, num_workers=2, pin_memory=True, prefetch_factor=2)
    rows = [float(v) for batch in loader for v in np.asarray(_first(batch)).ravel()]
    return when(sorted(rows) == x.ravel().tolist() and rows != sorted(rows), f"{len(rows)} rows in another order")


def _first(batch: Any) -> Any:
    return next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch


@probe(timed=True)
def tuning(engine: str) -> Cell:
    """Trials of ml.tune."""
    with folder() as directory, unittest.mock.patch.dict("os.environ", MITHRIL_CACHE_DIR=str(directory)):
        tuned = ml.tune(
            MLP.make(), engine, {"input": MLP.input()}, choices={"optimization_level": ("medium", "low")}, seconds=0.02
        )
    return holds(str(tuned).splitlines()[0])
