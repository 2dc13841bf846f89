"""``TorchBackend(device_mesh=...)``: programs on several processes, of ``torchrun`` or started by the backend.

A program consists of forward passes, which PyTorch differentiates and distributes (``sharded_module``), and of other
parts, mainly the optimizer's update: each process computes those for the arrays that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from math import prod
from threading import RLock
from typing import Any

import torch

import mithril as ml
from mithril.backend import BuildOptions, Source, SourceExecutable
from mithril.graph import Graph, Input, MithrilError, OptionError, UnsupportedError
from mithril_torch.execution import RunOptions, read, run_settings
from mithril_torch.parallel.accumulation import accumulate_locally
from mithril_torch.parallel.arrays import MeshArrays, connection_error, is_connection_error
from mithril_torch.parallel.layout import CONTEXT, DATA, MODEL, PARTS, PIPELINE, Split, kinds_of
from mithril_torch.parallel.meshes import MeshBackend, require_processes, select
from mithril_torch.parallel.owned_values import part_of_process
from mithril_torch.parallel.program_parts import ForwardPart, Part, parts_of
from mithril_torch.parallel.sharded_module import ShardedModule, averaged_over_rows, half_parameters
from mithril_torch.parallel.tensor_parallel import layout_error, record_complete_sequences, unsupported

Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
Loader = Callable[[Graph, bool], Forward]  # of a graph, and whether autograd differentiates it
Values = dict[str, torch.Tensor]  # local parts by name

CALLS = RLock()  # of the thread whose call exchanges arrays with other processes


def run_options(backend: MeshBackend, options: BuildOptions) -> RunOptions:
    """Return the run options; raise OptionError for those that programs of several processes do not have."""
    running = read(
        options, backend.torch_device, cudnn_benchmark=backend.cudnn_benchmark, enable_amp=backend.enable_amp
    )
    if running.capture:
        raise OptionError(
            "torch_fx=True conflicts with a mesh of devices",
            facts=["a program of several processes consists of parts, with collectives in between"],
            hint="omit torch_fx or device_mesh",
        )
    if running.jit:
        options.decisions.record("choice", "torch.compile compiles each block of layers; the update runs eagerly")
    return running


def is_staged(mesh: tuple[int, ...], options: BuildOptions) -> bool:
    """Whether forward passes run in stages or in chunks."""
    return mesh[2] > 1 or options.settings["pipeline_chunks"] > 1


def build(
    backend: MeshBackend, graph: Graph, options: BuildOptions, mesh: tuple[int, ...], load: Callable[..., Any]
) -> SourceExecutable:
    """Build the executable of a graph on a mesh; ``load`` returns the source and the function of a part."""
    running = run_options(backend, options)
    require_processes(mesh)
    texts: list[str] = []

    def loaded(part: Graph, differentiated: bool) -> Forward:
        source, forward = load(part, differentiated)
        texts.append(source.text)
        return forward  # type: ignore[no-any-return]

    call = MeshProgram(graph, mesh, options, backend, loaded, running)
    executable = SourceExecutable(graph, Source("\n\n".join(texts)), call, call)
    executable.differentiated = True  # several programs cannot be cached as one
    return executable


# -- the program ------------------------------------------------------------------------------------------------------
class MeshProgram(MeshArrays):
    """Program of one process among several that all run the user's script.

    Arguments are full tensors, equal in every process, or ``DTensor``; results that are split are ``DTensor``. Values
    of arguments tagged ``donated`` are overwritten.
    """

    def __init__(
        self,
        graph: Graph,
        shape: tuple[int, ...],
        options: BuildOptions,
        backend: MeshBackend,
        load: Loader,
        running: RunOptions,
    ) -> None:
        self.running = running
        self.compiler = running.compiler if running.jit else None
        parts, self.results = parts_of(graph)
        self.kinds = kinds_of(options.settings["parallelism"])
        super().__init__(shape, {}, backend, self.kinds)
        staged = is_staged(shape, options)
        if not staged and self.axes.size(MODEL) == 1 and self.axes.mesh.size() > 1:
            parts, self.results = accumulate_locally(parts, self.results, lambda p: self._averaged(p, options))
            self.sums = frozenset(n for part in parts if isinstance(part, ForwardPart) for n in part.sums.values())
        self.splits = splits = _argument_splits(graph, parts, self.axes.sizes, self.kinds, options, staged=staged)
        self.donated = [i.name for i in graph.arguments if i.tags.get("donated")]
        self.types = {r.name: r.value.type for r in graph.results}
        value_splits = dict(splits)  # also of the values between parts
        self.value_owners: dict[str, int | None] = {}  # the process of a pipeline that has a value; None: all have it
        types = {i.name: i.type for i in graph.arguments}
        self.unaveraged: set[str] = set()  # sums that this program does not exchange
        self.steps: list[Callable[[Values], Values]] = []
        for part in parts:
            step: Any
            if not isinstance(part, ForwardPart):
                step = _Operations(self, part, value_splits, options, load)
            elif staged:
                from mithril_torch.parallel.pipeline_pass import PipelinePass

                step = PipelinePass(self, part, value_splits, options, load)
            else:
                step = _ForwardPass(self, part, value_splits, options, load)
            value_splits.update(step.splits)
            self.value_owners.update(step.owners_of_results)
            owners = {n: owner for n, owner in self.value_owners.items() if n in types}
            for name in splits:
                param = parameter_of(name, owners)
                if param is not None and types[name].shape:
                    self.value_owners.setdefault(name, owners[param])
            self.steps.append(step)
        self.owners = {n: owner for n in splits if (owner := self.value_owners.get(n)) is not None}
        self.splits_of_results = {name: value_splits[value] for name, value in self.results.items()}

    def _averaged(self, part: ForwardPart, options: BuildOptions) -> set[str]:
        """Return the trained parameters whose gradients only ``DistributedDataParallel`` exchanges."""
        if half_parameters(part.graph) or any(node.regions for node in part.graph.nodes):
            return set()  # branches may leave a parameter without a gradient in the last batch
        requests = dict(options.settings["tensor_split_dims"])
        splits, _ = _placement(part.graph, self.axes.sizes, self.kinds, requests, staged=False)
        return {n for n in part.trained if n in part.params and not any(splits[n])}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not CALLS.acquire(blocking=False):
            raise UnsupportedError(
                "two threads call programs on a mesh of several processes at once",
                facts=["all processes must exchange the same arrays in the same order"],
                hint="call them from one thread",
            )
        try:
            return self._called(params, inputs)
        finally:
            CALLS.release()

    def _called(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        select(self.axes)
        arguments = {**params, **inputs}
        try:
            with run_settings(self.running):
                with torch.no_grad():
                    values = {name: self.local(name, arguments[name]) for name in self.splits}
                memory = {name: values[name] for name in self.donated}
                for step in self.steps:
                    values.update(step(values))
        except (RuntimeError, AssertionError, ValueError) as error:
            if is_connection_error(error):
                raise connection_error(error) from error
            if self.axes.size(MODEL) > 1 and not isinstance(error, (MithrilError, torch.OutOfMemoryError)):
                raise layout_error(error, self.axes.size(MODEL)) from error
            raise
        results = {n: values[v] if v in values else self._absent(n, memory) for n, v in self.results.items()}
        with torch.no_grad():
            donated = self._overwritten(arguments, memory, results)
        return {name: donated[name] if name in donated else self._joined(name, x) for name, x in results.items()}

    def _absent(self, name: str, memory: Values) -> torch.Tensor:
        """Return the part of a result of another stage, which is empty."""
        if name in memory:
            return memory[name]
        return torch.empty(0, dtype=getattr(torch, self.types[name].dtype.name), device=self.device)

    def _joined(self, name: str, local: torch.Tensor) -> torch.Tensor:
        if name in self.sums and self.results[name] in self.unaveraged:
            return self.joined_sum(local)
        shape, owner = tuple(map(int, self.types[name].shape)), self.owners.get(name)
        if owner is None:
            owner = self.value_owners.get(self.results[name])
        elif not self.is_here(name):  # all have the value, such as zeros
            local = local.new_empty(0)
        return self.joined(local, self.splits_of_results[name], shape, owner)

    def _overwritten(self, arguments: Mapping[str, Any], memory: Values, results: Values) -> dict[str, Any]:
        """Store new values in the memory of donated arguments in parts: engines hold that of their parameters."""
        old = {n: arguments[n] for n in self.donated if n in results and _has_memory(arguments[n], memory[n])}
        separate = [n for n in old if results[n] is not memory[n]]
        fits = [n for n in separate if memory[n].shape == results[n].shape and memory[n].dtype == results[n].dtype]
        owned = {memory[n].untyped_storage().data_ptr(): n for n in old}
        new = {}
        for n in fits:
            owner = owned.get(results[n].untyped_storage().data_ptr())
            # A result in the memory of another argument is copied before that argument is overwritten.
            new[n] = results[n] if owner in (None, n) else results[n].clone()
        for n, x in new.items():
            memory[n].copy_(x)
        return {n: x for n, x in old.items() if n in new or n not in separate}


def _has_memory(x: Any, local: torch.Tensor) -> bool:
    """Whether an argument is a ``DTensor`` with this part: a redistributed part is a copy."""
    return hasattr(x, "to_local") and x.to_local().data_ptr() == local.data_ptr()


def _argument_splits(
    graph: Graph,
    parts: Sequence[Part],
    sizes: Mapping[str, int],
    kinds: frozenset[str],
    options: BuildOptions,
    *,
    staged: bool,
) -> dict[str, Split]:
    """Return the splits of all arguments: those of the forward passes, and for optimizer values those of parameters."""
    selected: dict[str, Split] = {}
    for part in (p for p in parts if isinstance(p, ForwardPart)):
        requests = dict(options.settings["tensor_split_dims"])
        splits, unsplit = _placement(part.graph, sizes, kinds, requests, staged=staged)
        weights = {i.name for i in part.graph.with_role("param") if MODEL in splits.get(i.name, ())}
        for name, op in unsupported(part.graph, weights).items():
            splits[name] = tuple(None if a == MODEL else a for a in splits[name])
            unsplit[name] = f"DTensor cannot split the weights of '{op}'"
        for name, reason in unsplit.items():
            options.decisions.record("choice", f"'{name}' is replicated: {reason}")
        for name, i in zip(part.takes, part.graph.arguments, strict=False):
            selected.setdefault(name, splits.get(i.name, (None,) * i.value.ndim))
    result: dict[str, Split] = {}
    types = {i.name: i.type for i in graph.arguments}
    for name, t in types.items():
        param = parameter_of(name, selected)
        if param is not None and types[param].shape == t.shape:
            result[name] = selected[param]
        else:
            result[name] = (None,) * len(t.shape)
    return result


def parameter_of(name: str, names: Container[str]) -> str | None:
    """Return the one of ``names`` to which an argument belongs: optimizer values are named after parameters."""
    owner = name
    while owner not in names and "/" in owner:
        owner = owner.partition("/")[2]
    return owner if owner in names else None


def _placement(
    graph: Graph, sizes: Mapping[str, int], kinds: frozenset[str], requests: Mapping[str, int], *, staged: bool
) -> tuple[dict[str, Split], dict[str, str]]:
    """Return the splits of the arguments of a forward pass, and why some that could be split are not."""
    stored = PARTS if PARTS in sizes else DATA  # the axis over which fsdp divides parameters
    axes = {a: n for a, n in sizes.items() if a in (DATA, MODEL, CONTEXT)}
    rows, unsplit = ml.placement(graph, axes, splits=requests, uneven=True, classes=True)
    axes[DATA] = sizes.get(stored, 1)
    weights = rows
    if kinds & {"fsdp", "hsdp"}:
        weights, reasons = ml.placement(graph, axes, splits=requests, fsdp=True, uneven=True, classes=True)
        unsplit |= {n: reason for n, reason in reasons.items() if n not in unsplit}
    splits = {}
    halves = half_parameters(graph)
    for i in graph.arguments:
        rank = i.value.ndim
        if i.role == "param":
            # Gathered by the graph, over all processes with rows.
            in_graph = bool(halves) and i.name not in halves
            parts = sizes.get(DATA, 1) if in_graph else axes[DATA]
            split = _along_first(i, weights.get(i.name, (None,) * rank), parts)
            replicated = in_graph and (rank == 1 or staged or not _divides(parts, i, split))
            axis = None if replicated else DATA if in_graph else stored
            splits[i.name] = tuple(axis if a == DATA else a for a in split)
        else:  # an input of a module is complete along the model axis
            splits[i.name] = tuple(a if a in (DATA, CONTEXT) else None for a in rows.get(i.name, (None,) * rank))
    if experts := _experts(graph, sizes, kinds):
        splits |= {n: (DATA, *(None,) * (graph.input(n).value.ndim - 1)) for n in experts}
        undivided = set(ml.expert_parameters(graph, 1)) - set(experts)
        unsplit |= dict.fromkeys(sorted(undivided), f"{sizes[DATA]} processes cannot divide its experts")
    return splits, unsplit


def _experts(graph: Graph, sizes: Mapping[str, int], kinds: frozenset[str]) -> list[str]:
    """Return the parameters whose first axis, that of experts, is divided over the processes of the data axis."""
    if "expert" not in kinds:
        return []
    names: list[str] = ml.divided_experts(graph, sizes[DATA], "processes")
    return names


def _along_first(i: Input, split: Split, parts: int) -> Split:
    """Move the split over ``data`` to the first axis if possible: parts are contiguous there."""
    if DATA not in split or split[0] is not None or int(i.type.shape[0]) % parts:
        return split
    return (DATA, *(None if a == DATA else a for a in split[1:]))


def _divides(parts: int, i: Input, split: Split) -> bool:
    return all(int(n) % parts == 0 for n, axis in zip(i.type.shape, split, strict=True) if axis == DATA)


class _Operations:
    """Operations that every process runs on its parts, with collectives where they need others."""

    def __init__(
        self, program: MeshProgram, part: Part, value_splits: Mapping[str, Split], options: BuildOptions, load: Loader
    ) -> None:
        program.value_owners.update((n, None) for n in part.takes if n not in program.value_owners)
        owners = {n: owner for n in part.takes if (owner := program.value_owners[n]) is not None}
        needed: dict[str, int | None] = {}
        for n, v in program.results.items():
            if n in program.value_owners:
                owner = program.value_owners[n]
                needed[v] = owner if needed.get(v, owner) == owner else None
        position, count = program.axes.index(PIPELINE), program.axes.size(PIPELINE)
        local = part_of_process(part.graph, owners, needed, position, count)
        self.owners_of_results = local.owners
        inputs = {i.name: value_splits[i.name] for i in local.graph.arguments if i.name in value_splits}
        requested = {value: program.splits[name] for name, value in program.results.items() if name in program.splits}
        outputs = {name: requested[name] for name in local.graph.output_names if name in requested}
        device_graph = ml.partition_graph(local.graph, program.axes.sizes, inputs, outputs=outputs)
        self.splits: dict[str, Split] = {name: p.split for name, p in device_graph.outputs.items()}
        absent = [r for r in part.graph.results if r.name not in self.splits]
        self.splits.update((r.name, requested.get(r.name, (None,) * r.value.ndim)) for r in absent)
        self.index = _indices(program, device_graph)
        arguments = device_graph.graph.arguments
        self.params = [i.name for i in arguments if i.role == "param"]
        self.inputs = [i.name for i in arguments if i.role != "param"]
        self.forward = load(device_graph.graph, False)

    def __call__(self, values: Values) -> Values:
        values = {**values, **self.index}
        with torch.no_grad():
            return self.forward({n: values[n] for n in self.params}, {n: values[n] for n in self.inputs})


class _ForwardPass:
    """A forward pass and its gradients, run and distributed by PyTorch."""

    def __init__(
        self,
        program: MeshProgram,
        part: ForwardPart,
        value_splits: Mapping[str, Split],
        options: BuildOptions,
        load: Loader,
    ) -> None:
        self.part, forward = part, part.graph
        self.operands, self.cotangents = part.operands, part.cotangents
        self.params, self.inputs, self.trained = part.params, part.inputs, part.trained
        names = list(self.operands)
        self.axes = program.axes
        self.rows = {axis: self.axes.size(axis) for axis in (DATA, CONTEXT)}  # axes along which activations are split
        splits = {n: value_splits.get(self.operands[n], (None,) * forward.input(n).value.ndim) for n in names}
        parts = _experts(forward, self.axes.sizes, program.kinds)
        if halves := half_parameters(forward):  # engines exchange all parameters in one dtype
            parts += [n for n in self.params if n not in halves and n not in parts and DATA in splits[n]]
        rows = {n: tuple(a if a in self.rows else None for a in splits[n]) for n in (*self.inputs, *parts)}
        device_graph = ml.partition_graph(
            forward,
            self.rows,
            rows,
            differentiated=True,
            exchanges_rows=program.compiler is None and self.axes.size(MODEL) == 1,
        )
        self.index = _indices(program, device_graph)
        local_graph, processes = device_graph.graph, self.axes.size(MODEL)
        if processes > 1:
            weights = {n: splits[n] for n in self.params}
            sequences = "sequence" in program.kinds
            local_graph = ml.with_model_layout(local_graph, weights, processes, sequences=sequences)
            if sequences:
                record_complete_sequences([local_graph], processes, options.decisions)
        self.module = ShardedModule(
            local_graph,
            lambda graph: load(graph, bool(self.trained)),
            {n: splits[n] for n in self.params},
            [n for n in self.trained if n in self.params],
            program.axes,
            reshard=options.settings["fsdp_reshard"],
            parts=parts,
            compiler=program.compiler,
        )
        self.outputs = {name: p.split for name, p in device_graph.outputs.items()}
        self.splits = dict(zip(part.gives, [*self.outputs.values(), *(splits[n] for n in self.trained)], strict=True))
        self.input_splits = splits
        self.owners_of_results: dict[str, int | None] = {}
        for k, name in zip(self.part.objectives, self.cotangents, strict=True):
            if name in program.splits:
                program.splits[name] = list(self.outputs.values())[k]
        gradients = dict(zip(self.trained, part.gives[len(self.outputs) :], strict=True))
        self.deferred = {n for n, holder in part.sums.items() if program.results.get(holder) == gradients[n]}
        program.unaveraged |= {gradients[n] for n in self.deferred}
        self.run: Callable[[Values], Values] | None = None  # the module with its engine, in training

    def __call__(self, values: Values) -> Values:
        self.module.assign({n: values[self.operands[n]] for n in self.params})
        inputs = {n: values[self.operands[n]] for n in self.inputs} | self.index
        if not self.trained:
            with torch.no_grad():
                results = self._ordered(self.module(inputs))
            self.module.release()
            return dict(zip(self.part.gives, results, strict=True))
        leaves = {n: inputs[n].detach().requires_grad_() for n in self.trained if n in inputs}
        if self.run is None:
            self.run = self.module.averaging(self.deferred)
        for n, holder in self.part.sums.items():
            self.module.parameter(n).grad = values[holder]
        with torch.enable_grad():
            results = self._ordered(self.run({**inputs, **leaves}))
            seeds = {
                k: self._seed(k, values[name]) for k, name in zip(self.part.objectives, self.cotangents, strict=True)
            }
            reached = [k for k in self.part.objectives if results[k].requires_grad]
            if reached:
                torch.autograd.backward([results[k] for k in reached], [seeds[k] for k in reached])
        slopes = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
        averaged = {n: averaged_over_rows(x, self.input_splits[n], self.axes) for n, x in slopes.items()}
        gradients = self.module.gradients() | averaged
        gradients |= {n: values[self.part.sums[n]] for n in self.deferred}  # the same memory
        arrays = [*(x.detach() for x in results), *(gradients[n] for n in self.trained)]
        return dict(zip(self.part.gives, arrays, strict=True))

    def _ordered(self, results: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [results[name] for name in self.outputs]

    def _seed(self, k: int, cotangent: torch.Tensor) -> torch.Tensor:
        """Return the cotangent of a result: engines average the gradients of objectives over all processes with rows.

        A result that all processes have counts once in this average; of one that is split, each has other elements.
        """
        split = list(self.outputs.values())[k]
        return cotangent * prod(self.axes.size(a) for a in split if a in self.rows)


def _indices(program: MeshProgram, device_graph: Any) -> Values:
    """Return the inputs of a device's graph that hold its position in the mesh."""
    device = program.array([0]).device
    return {
        name: torch.tensor(program.axes.index(axis), dtype=torch.int32, device=device)
        for name, axis in device_graph.indices.items()
    }
