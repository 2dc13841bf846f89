"""A program compiled for devices that this machine need not have: its analysis, texts and execution."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh, NamedSharding, PartitionSpec

from mithril.graph import BackendError, Graph, Input, MemoryLimitError, TensorType, result_name
from mithril.plugins import HardwareTarget
from mithril.system import files
from mithril_jax.execution import keeping_barriers
from mithril_jax.mesh.mesh_execution import arranged
from mithril_parallel.mesh import Split, replicated
from mithril_parallel.placing.rules import sizes
from mithril_parallel.placing.strategy import Strategy
from mithril_tpu.aot.analysis import Analysis, analyze, memory
from mithril_tpu.aot.artifact import versions

Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
GIB = 1 << 30
_EFFORT = (9, 19, 29, 39)  # XLA's optimization_level for O0 to O3
# "... required for HLO temporaries (24.48G) exceeds available HBM (15.75G)", and its variants for arguments and results
_TOO_MUCH = re.compile(r"([\d.]+)([KMGT]?)i?B?\)?\s+exceeds\s+available\s+(?:HBM|memory)\s+\(?([\d.]+)([KMGT]?)")
_USED = re.compile(r"Used\s+([\d.]+)([KMGT])i?B?\s+of\s+([\d.]+)([KMGT])")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class AheadProgram:
    """A lazily compiled program with its texts and ``analysis``; a call requires the devices.

    ``graph`` defines names, types and roles of the arguments; ``strategy`` defines their splits.
    """

    def __init__(
        self,
        forward: Forward,
        graph: Graph,
        strategy: Strategy,
        target: HardwareTarget,
        devices: list[Any],
        *,
        present: bool,
        effort: int | None = None,
        x64: bool = False,
        exact: bool = True,
        donate: bool = False,
        remedy: Callable[[float, float], str | None] | None = None,
        like: Mapping[str, str] | None = None,
    ) -> None:
        self.forward = forward
        self.graph = graph
        self.strategy = strategy
        self.target = target
        self.present = present  # whether the devices are on this machine
        self.x64 = x64
        self.exact = exact  # compute float32 products in full precision instead of one bfloat16 pass
        axes = strategy.mesh.axes
        self.mesh = JaxMesh(arranged(devices, tuple(axes.values())), tuple(axes))
        self._donate = donate
        self._effort = effort
        self._remedy = remedy
        self.seconds: dict[str, float] = {}
        native = {result_name("gradient", n): n for n in getattr(forward, "wrt", ())}  # gradients by JAX
        self.gradients = {**{r.name: r.of for r in graph.results_of("gradient")}, **native}  # result -> input
        states = {r.name: r.of for r in graph.results_of("state")}
        self._like = {**states, **self.gradients, **(like or {})}

    def derived(self, forward: Forward, *, donate: bool = False, like: Mapping[str, str] | None = None) -> AheadProgram:
        """Return a program of another function on the same arguments and devices.

        ``like`` maps results to the arguments whose splits they have.
        """
        return AheadProgram(
            forward,
            self.graph,
            self.strategy,
            self.target,
            list(self.mesh.devices.flat),
            present=self.present,
            effort=self._effort,
            x64=self.x64,
            exact=self.exact,
            donate=donate,
            remedy=self._remedy,
            like=like,
        )

    # -- compilation -------------------------------------------------------------------------------------------------
    @cached_property
    def lowered(self) -> Any:
        """The ``jax.stages.Lowered``, created on first access."""
        with self._x64_context(), self._timed("lower"):
            return self._lower()

    @cached_property
    def compiled(self) -> Any:
        """The ``jax.stages.Compiled``, created on first access; raises MemoryLimitError if it does not fit."""
        lowered = self.lowered
        with self._x64_context(), self._timed("compile"):
            executable = self._compile(lowered)
        if self.target.family != "tpu":
            self._check_memory(executable)
        return executable

    def ready(self) -> AheadProgram:
        """Compile now, so that errors are raised early, and return the program."""
        assert self.compiled is not None
        return self

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def _x64_context(self) -> Any:
        return jax.enable_x64(True) if self.x64 else nullcontext()

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the types and shardings of params and inputs."""
        params: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        for i in self.graph.arguments:
            struct = self._struct(i.type, self.strategy.of(i.name, len(i.type.shape)))
            (params if i.role == "param" else inputs)[i.name] = struct
        return params, inputs

    def local_bytes(self, i: Input) -> int:
        """Return the bytes of one device's part of an argument."""
        return (
            prod(self.strategy.mesh.local(sizes(i.value), self.strategy.of(i.name, i.value.ndim)))
            * i.type.dtype.itemsize
        )

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Transfer parameters to the devices of the program."""
        return {name: jax.device_put(x, self._shardings[name]) for name, x in params.items()}

    def _struct(self, t: TensorType, split: Split) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(t.shape, t.dtype.numpy, sharding=self.sharding(split))

    def sharding(self, split: Split) -> NamedSharding:
        """Return a split as a JAX sharding on this program's mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*split))

    def _lower(self) -> Any:
        params, inputs = self.arguments()
        # Shardings of results are arguments of jit, so their names must be known before it traces.
        names = jax.eval_shape(on_mesh(self.forward, self.mesh), params, inputs)
        results = {name: self._result_sharding(name) for name in names}
        donated = {"donate_argnums": (0,)} if self._donate or self._is_training_step else {}
        with jax.default_matmul_precision("highest") if self.exact else nullcontext():
            return jax.jit(on_mesh(self.forward, self.mesh), out_shardings=results, **donated).lower(params, inputs)

    @property
    def _is_training_step(self) -> bool:
        """Whether the graph itself replaces all its parameters, as a step of ``ml.Trainer`` does."""
        params = self.graph.with_role("param")
        return bool(params) and all(i.tags.get("donated") for i in params)

    def _result_sharding(self, name: str) -> NamedSharding | None:
        """Return the sharding of a result: gradients and new values like their argument, others as XLA chooses."""
        argument = self._like.get(name)
        for i in self.graph.arguments:
            if i.name == argument:
                return self.sharding(self.strategy.splits.get(i.name) or replicated(len(i.type.shape)))
        return None

    def _compile(self, lowered: Any) -> Any:
        options: dict[str, Any] = {} if self._effort is None else {"optimization_level": _EFFORT[self._effort]}
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            raise self._translated_error(str(error)) from error

    def _check_memory(self, compiled: Any) -> None:
        """Raise MemoryLimitError if the program does not fit; only the TPU compiler checks this itself."""
        limit, peak = self.target.costs.get("usable_memory", self.target.memory), memory(compiled).peak
        if limit is not None and peak > limit:
            raise self._too_large(peak, limit, [])

    def _too_large(self, needed: float, available: float, facts: list[str]) -> MemoryLimitError:
        hint = self._remedy(needed, available) if self._remedy else None
        return MemoryLimitError(
            f"this program requires {_gib(needed)} on each {self.target.name}, which has {_gib(available)}",
            facts=[f"mesh: {self.strategy.mesh.description}", *facts],
            hint=hint or "reduce the batch, set gradient_checkpointing=True, or use more devices",
        )

    def _translated_error(self, message: str) -> Exception:
        if "ScopedVmemOom" in message:  # scratch memory of one kernel, independent of the mesh
            return BackendError(
                f"the compiler of {self.target.name} generated a kernel that exceeds the chip's scratch memory",
                facts=[_first_line(message), f"effort: {'default' if self._effort is None else self._effort}"],
                hint="set tpu_options={'effort': 1} or higher to get smaller kernels",
            )
        if "RESOURCE_EXHAUSTED" not in message:
            return BackendError(
                f"the compiler of {self.target.name} rejected the program",
                facts=[message.splitlines()[0]],
            )
        match = _TOO_MUCH.search(message) or _USED.search(message)
        if match is None:
            return MemoryLimitError(
                f"this program exceeds the memory of a {self.target.name}",
                facts=[f"mesh: {self.strategy.mesh.description}", _first_line(message)],
                hint="reduce the batch, set gradient_checkpointing=True, or use more devices",
            )
        return self._too_large(*_parse_sizes(match), [_first_line(message)])

    @property
    def kind(self) -> str:
        """The kind of the target, "TPU" or "GPU", for messages."""
        return "TPU" if self.target.family == "tpu" else "GPU"

    # -- texts and analysis ------------------------------------------------------------------------------------------
    @cached_property
    def hlo(self) -> str | None:
        """The optimized program's HLO text; None if this version of jaxlib cannot parse it."""
        with _stderr_discarded() if self.target.family == "tpu" else nullcontext():
            try:
                text: str = self.compiled.as_text()
            except jax.errors.JaxRuntimeError:  # jaxlib's parser is older than libtpu's format (v7x, many chips)
                return None
        return text

    @cached_property
    def stablehlo(self) -> str:
        """The input of the compiler, portable between versions."""
        text: str = self.lowered.as_text()
        return text

    @cached_property
    def analysis(self) -> Analysis:
        """Memory, operations and collectives of one device."""
        return analyze(self.compiled, self.hlo)

    def serialized(self) -> bytes:
        """Return the compiled program, for ``jax.experimental.serialize_executable`` on a machine with the devices."""
        from jax.experimental import serialize_executable

        payload: bytes = serialize_executable.serialize(self.compiled)[0]
        return payload

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the texts, the serialized program and the analysis into a folder."""
        contents: dict[str, files.Data] = {
            "program.stablehlo.mlir": self.stablehlo,
            **({} if self.hlo is None else {"program.hlo.txt": self.hlo}),
            "program.bin": self.serialized(),
            "analysis.json": json.dumps(self.as_dict(), indent=2) + "\n",
        }
        return files.write_folder(folder, contents)

    def as_dict(self) -> dict[str, Any]:
        """Return arguments, splits, devices and analysis as JSON-serializable data."""
        return {
            "target": self.target.name,
            "versions": versions(self.target.family),
            "mesh": dict(self.strategy.mesh.axes),
            "splits": {name: list(split) for name, split in self.strategy.splits.items()},
            "left_whole": dict(self.strategy.unsplit),
            "devices": [str(d) for d in self.mesh.devices.flat],
            "params": sorted(i.name for i in self.graph.arguments if i.role == "param"),
            "inputs": sorted(i.name for i in self.graph.arguments if i.role != "param"),
            "outputs": sorted(self.compiled.out_info),
            "seconds": dict(self.seconds),
            "analysis": self.analysis.as_dict(),
        }

    def report(self) -> str:
        """Return a short readable report."""
        a = self.analysis
        limit = self.target.costs.get("usable_memory")
        limit_text = f" of {_gib(limit)}" if limit else ""
        lines = [
            f"{self.target.name}, mesh {self.strategy.mesh}: compiled in {self.seconds['compile']:.2f} s",
            f"memory per device: peak {_gib(a.memory.peak)}{limit_text}, arguments {_gib(a.memory.arguments)}",
        ]
        if a.flops is not None:
            lines.append(f"operations per device: {a.flops:.3g}")
        if a.bytes_accessed is not None:
            lines.append(f"memory traffic per device: {_gib(a.bytes_accessed)}")
        if a.collectives is None:
            lines.append("collectives: unknown, the format of this program is newer than mithril-tpu")
        else:
            counts = [f"{c.count} {kind} ({_gib(c.bytes)})" for kind, c in a.collectives.items()]
            lines.append("collectives: " + (", ".join(counts) or "none"))
        lines += [f"replicated: {name}, {reason}" for name, reason in self.strategy.unsplit.items()]
        return "\n".join(lines)

    # -- execution ---------------------------------------------------------------------------------------------------
    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not self.present:
            raise BackendError(
                f"this program was compiled for {self.target.name}, but this machine has no {self.kind}",
                facts=[f"mesh: {self.strategy.mesh.description}"],
                hint=f"run it on a machine with a {self.kind}, or set tpu_options={{'simulate': True}} for CPU devices",
            )
        outputs: dict[str, Any] = self.compiled(*self._placed(params, inputs))
        return outputs

    def _placed(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Transfer arguments to the devices of the program; those already there are not copied."""
        shardings = self._shardings
        return (
            {name: jax.device_put(x, shardings[name]) for name, x in params.items()},
            {name: jax.device_put(x, shardings[name]) for name, x in inputs.items()},
        )

    @cached_property
    def _shardings(self) -> dict[str, NamedSharding]:
        return {i.name: self.sharding(self.strategy.of(i.name, len(i.type.shape))) for i in self.graph.arguments}


def on_mesh(forward: Forward, mesh: JaxMesh) -> Forward:
    """Return the function for tracing: its sharding constraints refer to the axes of this mesh."""

    def with_mesh(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return forward(params, inputs)

    return with_mesh


class SimulatedProgram:
    """The same function with the same splits on CPU devices, each of which simulates one device of the target."""

    def __init__(
        self,
        forward: Forward,
        graph: Graph,
        strategy: Strategy,
        devices: list[Any],
        *,
        x64: bool = False,
        ahead: AheadProgram | None = None,
    ) -> None:
        axes = strategy.mesh.axes
        self.ahead = ahead
        self.strategy = strategy
        self.mesh = JaxMesh(arranged(devices, tuple(axes.values())), tuple(axes))
        self._x64 = x64
        self._shardings: dict[str, NamedSharding] = {
            i.name: NamedSharding(self.mesh, PartitionSpec(*strategy.of(i.name, len(i.type.shape))))
            for i in graph.arguments
        }
        self._call = jax.jit(on_mesh(forward, self.mesh), compiler_options=keeping_barriers(graph) or None)

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.enable_x64(True) if self._x64 else nullcontext():
            outputs: dict[str, Any] = self._call(self._place(params), self._place(inputs))
        # a second program dispatched before the first has ended can starve it of threads, a deadlock
        jax.block_until_ready(outputs)
        return outputs

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Transfer parameters to the devices of the program."""
        return self._place(params)

    def _place(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: jax.device_put(x, self._shardings[name]) for name, x in arrays.items()}


def cpu_devices(count: int) -> list[Any]:
    """Return ``count`` CPU devices for the simulation."""
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise BackendError(
            f"simulating {count} devices requires as many CPU devices, but JAX has {len(devices)}",
            facts=["JAX creates its devices on first use, for instance by the first JaxBackend"],
            hint=f"call mithril_tpu.simulate_devices({count}) before the first JaxBackend, "
            f"or set the environment variable JAX_NUM_CPU_DEVICES={count}",
        )
    return list(devices[:count])


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard stderr of C++ code: it prints a stack trace before it raises an error that is handled here."""
    sys.stderr.flush()
    saved = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)


def _parse_sizes(match: re.Match[str]) -> tuple[float, float]:
    needed, unit, available, other = match.groups()
    return float(needed) * _UNITS[unit], float(available) * _UNITS[other]


def _first_line(message: str) -> str:
    return message.splitlines()[0][:300]


def _gib(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
