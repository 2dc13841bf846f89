"""Export of a compiled model as a directory of C11 that needs only a compiler and the C library.

``model.c`` and ``model.h`` (kernels, driver, a small typed interface), the weights as a file and as a C array, a
Makefile, a CMakeLists.txt, and a test program that compares runs with the results of Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mithril as ml
from mithril.compiler import CompiledModel, Exported
from mithril.graph import Graph, InputError, UnsupportedError, bind, dtype as as_dtype, substitute
from mithril.system import files
from mithril_cbackend import toolchains
from mithril_cbackend.bundle import comparison, export_files
from mithril_cbackend.bundle.export_contents import Contents
from mithril_cbackend.bundle.hosts import host_files
from mithril_cbackend.bundle.makefiles import cmake, makefile
from mithril_cbackend.c_names import is_model_name
from mithril_cbackend.compile_target import resolve_target
from mithril_cbackend.graph.int8_weights import quantized
from mithril_cbackend.program import compile_graph
from mithril_cbackend.program.any_size import AnySizeExecutable
from mithril_cbackend.program.executable import Executable

EMBEDDED = 8 << 20  # bytes; weights up to this size are also written as a C array by default


@dataclass(frozen=True)
class ExportedC(Exported):
    """An exported directory, with the sizes of weights, arena and machine code."""

    contents: Contents
    library: Path | None = None
    code_bytes: int | None = None
    quantization_error: float | None = None  # of the results, relative to their largest magnitude

    def __str__(self) -> str:
        contents = self.contents
        rows = [("weights", len(contents.weights)), ("arena", contents.arena_bytes)]
        if self.code_bytes is not None:
            rows.append(("machine code", self.code_bytes))
        lines = [f"{self.path}: C for {contents.target.arch or 'this machine'}"]
        lines += [f"  {label:<14}{size:>14,} bytes" for label, size in rows]
        if self.quantization_error is not None:
            lines.append(f"  int8 weights change the results by {self.quantization_error:.2%} of their maximum")
        return "\n".join(lines)


def export(
    compiled: CompiledModel,
    directory: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
    library: str | None = "auto",
    embed: bool | None = None,
) -> ExportedC:
    """Write the latest program of a model as C; its symbolic sizes are arguments of a run.

    ``params`` defaults to the bound parameters. ``inputs`` are the inputs of the test program, random by default.
    ``library`` (``"object"``, ``"static"``, ``"shared"``) also compiles the code; ``"auto"`` compiles a static library
    for phones only. ``embed`` writes the weights as a C array in addition to the file; by default only small ones.
    """
    executable = program_of(compiled)
    weights = parameters(executable, params if params is not None else compiled.params or {})
    state = compiled.initial_state() if executable.graph.with_role("state") else {}
    return export_program(executable, directory, weights, inputs, state=state, name=name, library=library, embed=embed)


def export_program(
    executable: Executable,
    directory: str | os.PathLike[str],
    params: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    name: str = "model",
    library: str | None = "auto",
    embed: bool | None = None,
) -> ExportedC:
    """Write any program of this backend as C, such as a training step.

    An output with the name of a parameter or of state is stored by the C code and used by its next run.
    """
    if not is_model_name(name):
        raise InputError(
            f"export: name={name!r} is not a valid name of a model in C",
            facts=[f"the files declare {name}_t, {name}_run and others"],
            hint="pass letters, digits and underscores, a letter first, but no type of the C library: name='net'",
        )
    if executable.host_steps:
        names = ", ".join(sorted({f"'{step.node.op.name}'" for step in executable.host_steps}))
        raise UnsupportedError(
            f"cannot export to C: {names} runs as a Python function",
            facts=[str(executable.host_steps[0].node.origin)],
            hint="register a lowering for 'c' that writes a kernel, or compose it of other operations",
        )
    # The C code keeps two copies, so that a rejected run leaves the state unchanged.
    if executable.layout.updated:
        executable = compile_graph.rebuild(without_donations(executable.graph), executable)
    weights, target, sizes = parameters(executable, params), executable.target, known_sizes(executable, inputs)
    test_inputs = partial(test_inputs_of, executable, inputs)
    contents, error = Contents(executable, weights, test_inputs, state or {}, name, sizes), None
    if target.quantization == "int8" and not contents.carried.keys() & weights.keys():
        float_contents = contents
        graph, weights = quantized(executable.graph, weights)
        rebuilt = compile_graph.rebuild(graph, executable)
        contents = Contents(rebuilt, weights, test_inputs, state or {}, name, sizes)
        error = max_relative_error(contents.results, float_contents.results)
    folder = Path(directory)
    small = len(contents.weights) <= EMBEDDED or target.platform == "bare"  # which has no files
    write(contents, folder, small if embed is None else embed)
    kind = ("static" if target.arch else None) if library == "auto" else library
    if kind is None:
        return ExportedC(folder, contents, quantization_error=error)
    compiler = target.toolchain.require()
    flags = target.flags_of(compiler)
    built = toolchains.build(folder, name, kind, compiler, flags)
    code = toolchains.code_bytes(toolchains.build(folder, name, "object", compiler, flags))
    return ExportedC(folder, contents, built, code, error)


def without_donations(graph: Graph) -> Graph:
    """Return a graph whose results overwrite no input."""
    inputs = [replace(i, tags={n: x for n, x in i.tags.items() if n != "donated"}) for i in graph.inputs]
    return graph.replaced(inputs=tuple(inputs))


def write(contents: Contents, folder: Path, embedded: bool) -> None:
    """Write all files; the C array of weights only if ``embedded``."""
    name = contents.name
    texts: dict[str, files.Data] = {
        f"{name}.h": export_files.header(contents, embedded),
        f"{name}.c": export_files.source(contents),
        f"{name}_test.c": comparison.test(contents, embedded),
        "Makefile": makefile(name, contents.target, embedded),
        "CMakeLists.txt": cmake(name, contents.target, embedded),
        **host_files(contents.target),
    }
    if embedded:
        texts[f"{name}_weights.c"] = export_files.weights(contents)
    texts[f"{name}.weights"] = contents.weights
    files.write_folder(folder, texts)


def program_of(compiled: CompiledModel) -> Executable:
    """Return the latest program, compiled again for a phone if it is of another backend."""
    if not compiled.programs:
        raise InputError(
            "cannot export: no program has been compiled yet",
            hint="pass shapes=, where None is any size, or call the model once",
        )
    program = compiled.programs[-1]
    if isinstance(program.executable, Executable) and program.request.bound is not None:
        program = compiled.program_with_params() or program
    if isinstance(program.executable, Executable):
        return program.executable
    if "mobile" in compiled.backend.capabilities.families and resolve_target(compiled.options).arch is not None:
        return for_mobile(compiled)
    raise UnsupportedError(
        f"backend '{compiled.backend.name}' does not export C", hint="compile the model for backend 'c'"
    )


def for_mobile(compiled: CompiledModel) -> Executable:
    """Compile the traced graph of another backend's latest program for the phone that its options select."""
    program, options = compiled.programs[-1], compiled.options
    settings = {n: options[n] for n in ("target_hardware", "mobile_options", "inference") if options[n]}
    recompiled = ml.compile(program.traced, "c", **settings)
    return program_of(recompiled)


def parameters(executable: Executable, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return every parameter of the program as a contiguous array."""
    missing = [n for n, _ in executable.params if n not in arrays]
    if missing:
        raise InputError(
            "cannot export: weights are missing",
            facts=[f"missing: {', '.join(missing[:8])}"],
            hint="call compiled.bind(params), or export(..., params=params); trainer.begin(batch) draws a trainer's",
        )
    return {n: np.asarray(arrays[n], order="C") for n, _ in executable.params}


def known_sizes(executable: Executable, user_inputs: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the symbolic sizes of the user's inputs, else those of the last call."""
    selected = executable.selected if isinstance(executable, AnySizeExecutable) else None
    actual = {n: np.shape(x) for n, x in (user_inputs or {}).items()}
    declared = {i.name: i.type.shape for i in executable.graph.with_role("input", "cotangent") if i.name in actual}
    return {**(selected.sizes if selected is not None else {}), **bind(declared, actual)}


def test_inputs_of(
    executable: Executable, user_inputs: Mapping[str, Any] | None, sizes: Mapping[str, int]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of the test program: the user's, else random arrays."""
    rng = np.random.default_rng(0)
    arrays = {}
    for i in executable.graph.with_role("input", "cotangent"):
        shape = tuple(int(substitute(d, sizes)) for d in i.type.shape)
        x = None if user_inputs is None or i.name not in user_inputs else np.asarray(user_inputs[i.name])
        if x is not None and (x.shape == shape or i.type.is_static):
            if x.shape != shape:
                raise InputError(f"input '{i.name}' has shape {list(x.shape)}, expected {list(shape)}")
            arrays[i.name] = np.asarray(x, i.type.dtype.numpy, order="C")
        elif i.type.dtype.is_float:
            arrays[i.name] = rng.standard_normal(shape).astype(i.type.dtype.numpy)
        else:
            arrays[i.name] = rng.integers(0, 2, shape).astype(i.type.dtype.numpy)
    return arrays


def max_relative_error(
    actual: Mapping[str, np.ndarray[Any, Any]], expected: Mapping[str, np.ndarray[Any, Any]]
) -> float:
    """Return the largest error of float results, each relative to its largest magnitude."""
    error = 0.0
    for name, x in expected.items():
        if as_dtype(x.dtype).is_float and x.size:
            reference = x.astype(np.float64)
            error = max(
                error,
                float(np.abs(actual[name].astype(np.float64) - reference).max() / max(np.abs(reference).max(), 1e-30)),
            )
    return error
