"""Ahead-of-time programs of a compiled model: for inference, for gradients, for a complete training step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from mithril import compile
from mithril.backend import Executable
from mithril.compiler import CompiledModel, Program, ProgramKey, ProgramKind
from mithril.graph import BackendError, InputError, unknown
from mithril_jax.backend import JaxBackend
from mithril_parallel.planning.plan import Plan
from mithril_tpu.aot.program import AheadProgram, SimulatedProgram
from mithril_tpu.backend import AheadBackend

Update = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


def simulate_devices(count: int) -> None:
    """Configure JAX to create ``count`` CPU devices; call it before JAX is first used.

    XLA runs their collectives in one thread each, from a pool with one thread per core. With fewer threads than
    devices they deadlock, so that NPROC is set, too.
    """
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * count + 8)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    # JAX refuses once it runs, which matters only if it has fewer devices.
    except RuntimeError as error:
        if len(jax.devices("cpu")) >= count:
            return
        raise BackendError(
            f"cannot create {count} CPU devices: JAX already runs with {len(jax.devices('cpu'))}",
            hint="call simulate_devices before the first JaxBackend and the first use of JAX",
        ) from error


def ahead_of(compiled: CompiledModel | Program | Executable) -> AheadProgram:
    """Return the ahead-of-time program of a compiled model's latest program, or of a program or an executable."""
    program = compiled.programs[-1] if isinstance(compiled, CompiledModel) and compiled.programs else compiled
    if isinstance(program, CompiledModel):
        raise InputError(
            "this model has no program yet: the shapes of its inputs are unknown",
            hint="pass shapes={...} with numbers to ml.compile",
        )
    executable = program.executable if isinstance(program, Program) else program
    call = getattr(executable, "call", None)
    ahead = call.ahead if isinstance(call, SimulatedProgram) else call
    if not isinstance(ahead, AheadProgram):
        raise InputError(
            "this model was not compiled ahead of time",
            facts=[f"executable: {type(executable).__name__}"],
            hint="pass target_hardware='tpu_v5e', after pip install 'mithril-tpu[compiler]'",
        )
    return ahead


def training_program(
    compiled: CompiledModel,
    of: str | Sequence[str],  # english: ok, documented
    update: Update | None = None,
) -> AheadProgram:
    """Return a program that also computes gradients of the outputs ``of``.

    ``update(params, gradients) -> params``, written with JAX operations, extends it to a complete training step: its
    results are the outputs and ``param/<name>``, and the old parameters' buffers are reused for the new ones.
    """
    backend = compiled.backend
    if not isinstance(backend, AheadBackend):
        raise InputError(
            "training_program requires a model compiled for a TPU or GPU target",
            facts=[f"backend: {backend!r}"],
            hint="pass target_hardware='tpu_v5e' to ml.compile",
        )
    if not compiled.programs:
        ahead_of(compiled)
    types = compiled.programs[0].request.types
    names = (of,) if isinstance(of, str) else tuple(of)
    output_names = [r.name for r in compiled.interface.results_of("output")]
    for name in names:
        if name not in output_names:
            message, facts, hint = unknown("output", name, output_names)
            raise InputError(message, facts=facts, hint=hint)
    with _lazy_compilation(backend):
        program = ahead_of(compiled.compiler.specialize(ProgramKey(types, ProgramKind(True, names))))
    return (program if update is None else _with_update(program, update)).ready()


def step_program(trainer: Any, batch: Mapping[str, Any]) -> AheadProgram:
    """Return the program of a step of ``ml.Trainer`` for such batches: forward, backward and the optimizer's update.

    Its parameters include the values of the optimizer; their buffers are reused for the new ones.
    """
    backend = trainer.engine.backend
    if not isinstance(backend, AheadBackend):
        raise InputError(
            "step_program requires a model compiled for a TPU or GPU target",
            facts=[f"backend: {backend!r}"],
            hint="pass target_hardware='tpu_v5e' to ml.compile",
        )
    if not trainer.engine.arrays:
        trainer.begin(batch)
    return ahead_of(trainer.engine.prepare(batch).run)


def compile_plan(plan: Plan, top: int = 3) -> Plan:
    """Return the plan with the compiler's memory of its ``top`` first entries, sorted again.

    For a training step these are programs with an update by gradient descent; values of the optimizer are added.
    """
    if plan.model is None:
        raise InputError("this plan has no model", hint="pass the result of ml.plan")
    entries = list(plan.entries)
    for k, entry in enumerate(entries[:top]):
        options = {**plan.options, **entry.options}
        compiled = compile(plan.model, JaxBackend(), target_hardware=plan.target.name, **options)
        program = training_program(compiled, plan.outputs, _gradient_descent) if plan.training else ahead_of(compiled)
        entries[k] = replace(entry, compiled_peak=program.analysis.memory.peak + entry.memory.slots)
    result = replace(plan, entries=entries)
    result.sort()
    return result


def _gradient_descent(params: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x - 0.1 * gradients[name] for name, x in params.items()}


@contextmanager
def _lazy_compilation(backend: AheadBackend) -> Iterator[None]:
    """Postpone compilation: the gradient program is only a part of the step, and compiling both doubles the time."""
    backend.is_lazy = True
    try:
        yield
    finally:
        backend.is_lazy = False


def _with_update(program: AheadProgram, update: Update) -> AheadProgram:
    forward, inputs_by_gradient = program.forward, program.gradients
    names = {i.name: f"param/{i.name}" for i in program.graph.with_role("param")}

    def step(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = forward(params, inputs)
        new = update(params, {inputs_by_gradient[n]: g for n, g in results.items() if n in inputs_by_gradient})
        if set(new) != set(params):
            raise InputError(
                "the update of a training program must return exactly the parameters",
                facts=[
                    *([f"missing: {_first_names(set(params) - set(new))}"] if set(params) - set(new) else []),
                    *([f"unknown: {_first_names(set(new) - set(params))}"] if set(new) - set(params) else []),
                ],
                hint="pass lambda params, gradients: {n: params[n] - 0.1 * gradients[n] for n in params}",
            )
        return {
            **{n: x for n, x in results.items() if n not in inputs_by_gradient},
            **{names[n]: x for n, x in new.items()},
        }

    return program.derived(step, donate=True, like={name: n for n, name in names.items()})


def _first_names(names: set[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
