"""A forward pass of a program, and its gradients, in stages and chunks.

A parameter belongs to the processes of the first stage that reads it. Those of other stages, as of tied weights,
receive it before a step and return its gradient. Every process has all inputs: stages exchange only activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mithril as ml
from mithril.backend import BuildOptions
from mithril.graph import Graph, MithrilError, OptionError, cotangent_name
from mithril_torch.parallel.layout import CONTEXT, DATA, MODEL, PIPELINE, Split
from mithril_torch.parallel.pipelines import Pipeline, StageModule
from mithril_torch.parallel.program_parts import ForwardPart
from mithril_torch.parallel.schedules import FOR_ANY_CHUNKS, ZERO_BUBBLE, num_stages, owners
from mithril_torch.parallel.sharded_module import averaged_over_rows
from mithril_torch.parallel.tensor_parallel import record_complete_sequences

Form = tuple[tuple[int, ...], torch.dtype]


def exchange(
    messages: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Form]], group: Any, device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``messages[r]`` to process ``r`` of the group; return the tensors of each process, of the expected forms."""
    if len(messages) == 1:
        return [list(messages[0])]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    packed = [torch.cat([empty, *map(_bytes, tensors)]) for tensors in messages]
    sizes = [[prod(shape) * dtype.itemsize for shape, dtype in forms] for forms in expected]
    totals = [sum(row) for row in sizes]
    incoming = torch.empty(sum(totals), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, torch.cat(packed), totals, [len(m) for m in packed], group=group)
    received = []
    for message, row, forms in zip(incoming.split(totals), sizes, expected, strict=True):
        parts = message.split(row) if row else ()
        received.append([_aligned(p, t).view(t).view(shape) for p, (shape, t) in zip(parts, forms, strict=True)])
    return received


def _aligned(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes at an address that a tensor of this dtype can have."""
    return x.clone() if x.storage_offset() % dtype.itemsize else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


Values = dict[str, torch.Tensor]  # local parts by name
Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


class Item(NamedTuple):
    """A result of a stage, or its gradient for an argument."""

    stage: int
    name: str
    is_result: bool


class PipelinePass:
    """A forward pass and its gradients, run in stages by PyTorch."""

    def __init__(
        self,
        program: Any,
        part: ForwardPart,
        value_splits: Mapping[str, Split],
        options: BuildOptions,
        load: Callable[[Graph, bool], Forward],
    ) -> None:
        self.part, self.axes, self.device = part, program.axes, program.array([0]).device
        if "expert" in program.kinds:
            raise OptionError(
                f"parallelism='expert' conflicts with pipeline_chunks={options.settings['pipeline_chunks']}",
                facts=["tokens are exchanged between the experts of the whole batch"],
                hint="omit pipeline_chunks, or 'expert'",
            )
        self.sequences = "sequence" in program.kinds
        self.layouts: list[Graph] = []  # of this process's stages, with weights split over the model axis
        graph, operands = part.graph, part.operands
        self.input_splits = {
            i.name: value_splits.get(operands[i.name], (None,) * i.value.ndim) for i in graph.arguments
        }
        self.rows = {axis: self.axes.size(axis) for axis in (DATA, CONTEXT)}  # axes along which activations are split
        self.processes = self.axes.size(PIPELINE)
        requested_chunks = options.settings["pipeline_chunks"]
        schedule, requested = options.settings["pipeline_schedule"], options.settings["pipeline_stages"]
        count = num_stages(schedule, self.processes, requested)
        if not part.trained:  # stages that run forward only have no use for another schedule
            schedule, count = "gpipe", self.processes
        self.names = graph.output_names
        objectives = [self.names[k] for k in part.objectives]
        rows: dict[str, Any] = {"rows": self.rows, "splits": {n: self.input_splits[n] for n in part.inputs}}
        try:
            self.plan = ml.forward_pipeline(graph, objectives, count, requested_chunks, **rows)
        except MithrilError as error:
            if part.trained:
                raise
            # without gradients chunks save no memory that must last
            self.plan = ml.forward_pipeline(graph, objectives, count, **rows)
            options.decisions.record("choice", f"a forward pass runs in one chunk: {error.what}")
        self.chunks = self.plan.chunks
        if self.chunks < requested_chunks:
            schedule = FOR_ANY_CHUNKS.get(schedule, schedule)
        if schedule == "1f1b" and self.chunks < count:
            schedule = "gpipe"  # PyTorch requires as many chunks as stages
        self.cut = self.plan.cut
        self.owners = owners(schedule, self.processes, count)
        self.rank = self.axes.index(PIPELINE)
        self._record(options, schedule, requested_chunks)
        self._load(load, schedule, program.compiler)
        if self.sequences:
            record_complete_sequences(self.layouts, self.axes.size(MODEL), options.decisions)
        self.finish = None if self.cut.finish is None else _function(load, self.cut.finish)
        self.seeds = None if self.cut.seeds is None else _function(load, self.cut.seeds)
        self.ahead = None if self.plan.ahead is None else _function(load, self.plan.ahead)
        operands = part.operands
        for k, stage in enumerate(self.plan.stages):
            for i in stage.graph.with_role("param"):
                if i.value.ndim and self.processes > 1:
                    program.value_owners.setdefault(operands[i.name], self.owners[k])
        self.home = {n: program.value_owners.get(operands[n]) for n in part.params}  # None: all processes have it
        self._plan_moves()
        gradients = zip(part.gives[len(self.names) :], part.trained, strict=True)
        self.owners_of_results = {gives: self.home.get(n) for gives, n in gradients}
        self.outputs = {n: self.plan.splits[self.cut.results[n]] if n in self.cut.results else () for n in self.names}
        splits = [*self.outputs.values(), *(self.input_splits[n] for n in part.trained)]
        ranks = [v.ndim for v in graph.outputs] + [len(self.input_splits[n]) for n in part.trained]
        self.splits = {n: s or (None,) * r for n, s, r in zip(part.gives, splits, ranks, strict=True)}
        for k, name in zip(part.objectives, part.cotangents, strict=True):
            if name in program.splits:
                program.splits[name] = self.splits[part.gives[k]]

    def _record(self, options: BuildOptions, schedule: str, requested_chunks: int) -> None:
        loads = ", ".join(f"{stage.share:.0%}" for stage in self.plan.stages)
        message = (
            f"{len(self.plan.stages)} pipeline stages with {loads} of the work, {self.chunks} chunk(s), {schedule}"
        )
        if self.chunks < requested_chunks:
            message += f"; pipeline_chunks={requested_chunks} cannot divide this batch"
        options.decisions.record("choice", message)

    def _load(self, load: Callable[[Graph, bool], Forward], schedule: str, compiler: Mapping[str, Any] | None) -> None:
        stages, trained = self.plan.stages, self.part.trained
        self.leaves = [n for n in trained if n in self.part.inputs]
        if self.leaves and schedule in ZERO_BUBBLE:
            raise OptionError(
                f"pipeline_schedule='{schedule}' computes gradients of parameters only",
                facts=[f"gradients are requested for '{', '.join(self.leaves)}'"],
                hint="set pipeline_schedule='interleaved1f1b'",
            )
        if compiler is not None and schedule in ZERO_BUBBLE:
            raise OptionError(
                f"jit=True conflicts with pipeline_schedule='{schedule}'",
                facts=["a compiled block computes the gradients of parameters and activations in one function"],
                hint="set pipeline_schedule='interleaved1f1b', or omit jit",
            )
        objectives = self.plan.objectives if trained else ()
        modules: dict[int, StageModule] = {}
        for k, stage in enumerate(stages):
            if self.owners[k] == self.rank:
                gives = stage.gives if k < len(stages) - 1 else objectives
                modules[k] = StageModule(
                    self._with_layout(stage),
                    lambda graph: load(graph, bool(trained)),
                    self.input_splits,
                    trained,
                    self.axes,
                    gives,
                    compiler,
                )
        self.modules = modules
        self.pipeline = Pipeline(
            stages,
            modules,
            objectives,
            self.axes.get_group(PIPELINE),
            self.device,
            chunks=self.chunks,
            schedule=schedule,
        )

    def _plan_moves(self) -> None:
        """Determine the parameters that a stage reads and another one has, with the process that reads them."""
        self.forms: dict[str, Form] = {}  # of the local parts of parameters
        moves: dict[tuple[str, int], None] = {}
        for k, stage in enumerate(self.plan.stages):
            for i in stage.graph.with_role("param"):
                shape = zip(map(int, i.type.shape), self.input_splits[i.name], strict=True)
                self.forms[i.name] = tuple(n // self.axes.size(a) for n, a in shape), getattr(torch, i.type.dtype.name)
                if self.home[i.name] not in (None, self.owners[k]):
                    moves[i.name, self.owners[k]] = None
        self.moves = list(moves)
        self.copies: Values = {}  # the parameters that this process receives

    def _with_layout(self, stage: Any) -> Any:
        """Return a stage whose weights are split over the model axis."""
        if self.axes.size(MODEL) == 1:
            return stage
        weights = {i.name: self.input_splits[i.name] for i in stage.graph.with_role("param")}
        graph = ml.with_model_layout(stage.graph, weights, self.axes.size(MODEL), sequences=self.sequences)
        self.layouts.append(graph)
        return replace(stage, graph=graph)

    def _number(self, n: int) -> torch.Tensor:
        return torch.tensor(n, dtype=torch.int32, device=self.device)

    # -- running ------------------------------------------------------------------------------------------------------
    def __call__(self, values: Values) -> Values:
        # those of an earlier pass that belong to other stages are not here
        arguments = {name: values[value] for name, value in self.part.operands.items() if value in values}
        cotangents = {
            self.names[k]: values[name] for k, name in zip(self.part.objectives, self.part.cotangents, strict=True)
        }
        with torch.no_grad():
            self._move(arguments)
            chunks = [self._chunk(c, arguments) for c in range(self.chunks)]
            seeds = self._seeds(cotangents, arguments, chunks) if self.part.trained else []
        inputs, leaves = self._inputs(chunks)
        self.pipeline.run(inputs, seeds)
        with torch.no_grad():
            return self._results(arguments, leaves)

    def _move(self, values: Values) -> None:
        """Let the stages of this process have their parameters, of which a few belong to other stages."""
        if self.moves:
            messages: list[list[torch.Tensor]] = [[] for _ in range(self.processes)]
            expected: list[list[Form]] = [[] for _ in range(self.processes)]
            for name, target in self.moves:
                source = self.home[name]
                if source == self.rank:
                    messages[target].append(values[name])
                if target == self.rank:
                    expected[source].append(self.forms[name])
            received = exchange(messages, expected, self.axes.get_group(PIPELINE), self.device)
            for source, tensors in enumerate(received):
                names = [n for n, target in self.moves if target == self.rank and self.home[n] == source]
                for name, x in zip(names, tensors, strict=True):
                    self.copies[name] = self.copies[name].copy_(x) if name in self.copies else x.clone()
        for module in self.modules.values():
            module.assign({n: self.copies[n] if n in self.copies else values[n] for n in module.paths})

    def _chunk(self, c: int, values: Values) -> Values:
        """Return the inputs of one chunk of this process's rows."""
        chunk = {}
        for name in self.part.inputs:
            axis = self.cut.axes.get(name)
            chunk[name] = values[name] if axis is None else values[name].chunk(self.chunks, axis)[c]
        # rows are in the order of the processes, but operations count them in the order of the chunks
        number = self.axes.index(DATA) * self.chunks + c
        for name, position in zip(self.plan.indices, divmod(number, self.rows[DATA]), strict=True):
            chunk[name] = self._number(position)
        chunk[self.plan.context_index] = self._number(self.axes.index(CONTEXT) if self.rows[CONTEXT] > 1 else 0)
        return chunk

    def _seeds(self, cotangents: Values, arguments: Values, chunks: Sequence[Values]) -> list[Values]:
        """Return for each chunk the cotangents of its ends, which engines average over the data axis."""
        seeds = {self.cut.results[n]: x for n, x in cotangents.items() if n in self.cut.results}
        if self.seeds is not None:
            totals: Values = {}
            if self.ahead is not None:
                results = [self.ahead(chunk) for chunk in chunks]
                totals = {n: self._total(n, [r[n] for r in results]) for n in results[0]}
            inputs = {**arguments, **totals, **{cotangent_name(n): x for n, x in cotangents.items()}}
            for name, x in self.seeds(inputs).items():
                seeds[name] = seeds[name] + x if name in seeds else x
        per_chunk: list[Values] = [{} for _ in chunks]
        for name, x in seeds.items():
            axis = self.cut.axes.get(name)
            x = x * prod(
                n for axis, n in self.rows.items() if axis in (*self.plan.partial[name], *self.plan.splits[name])
            )
            if axis is None and name not in self.cut.sums:
                x = x / self.chunks  # equal in all chunks
            parts = [x] * self.chunks if axis is None else x.chunk(self.chunks, axis)
            for values, value in zip(per_chunk, parts, strict=True):
                values[name] = value
        return per_chunk

    def _total(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value of an end for all chunks and, if it is a sum, for all processes with rows."""
        if name in self.cut.axes:
            return torch.cat(list(parts), self.cut.axes[name])
        if name not in self.cut.sums:
            return parts[-1]
        total = torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
        for axis in sorted(self.plan.partial[name]):
            dist.all_reduce(total, group=self.axes.get_group(axis))
        return total

    def _inputs(self, chunks: Sequence[Values]) -> tuple[list[dict[int, Values]], dict[tuple[int, str], list[Any]]]:
        """Return the inputs of each stage by chunk, and those that have gradients by stage and name."""
        inputs: list[dict[int, Values]] = [{} for _ in chunks]
        leaves: dict[tuple[int, str], list[Any]] = {}
        for k, module in self.modules.items():
            for stage_inputs, chunk in zip(inputs, chunks, strict=True):
                stage_inputs[k] = {n: chunk[n] for n in module.reads}
                for name in self.leaves:
                    if name in stage_inputs[k]:
                        leaf = stage_inputs[k][name] = chunk[name].detach().requires_grad_()
                        leaves.setdefault((k, name), []).append(leaf)
        return inputs, leaves

    # -- results ---------------------------------------------------------------------------------------------------
    def _results(self, arguments: Values, leaves: Mapping[tuple[int, str], Sequence[Any]]) -> Values:
        """Return results and gradients, which all processes of the pipeline exchange at once."""
        local: dict[Item, torch.Tensor] = {}
        for k, module in self.modules.items():
            for name in module.ends:
                local[Item(k, name, True)] = self._total(name, [results[name] for results in module.results])
            if self.part.trained:
                local.update({Item(k, n, False): x for n, x in module.gradients().items()})
            module.results, module.inputs = [], []
        for (k, name), parts in leaves.items():
            local[Item(k, name, False)] = self._of_input(name, parts)
        ends: Values = {}
        gradients: Values = {}
        for item, x in self._exchanged(local, arguments):
            if item.is_result:
                ends[item.name] = x
            else:  # a parameter of several stages has a gradient in each
                gradients[item.name] = gradients[item.name] + x if item.name in gradients else x
        results = {n: ends[end] for n, end in self.cut.results.items()}
        if self.finish is not None:
            results.update(self.finish({**arguments, **ends}))
        local_names = [n for n in self.part.trained if self.home.get(n) in (None, self.rank)]
        missing = {n: torch.zeros_like(arguments[n]) for n in local_names if n not in gradients}
        values = dict(zip(self.part.gives, [results[n] for n in self.names], strict=False))
        gives = dict(zip(self.part.trained, self.part.gives[len(self.names) :], strict=True))
        return {**values, **{gives[n]: x for n, x in {**gradients, **missing}.items()}}

    def _of_input(self, name: str, parts: Sequence[Any]) -> torch.Tensor:
        """Return the gradient of an input from its parts in the chunks."""
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in parts]
        axis = self.cut.axes.get(name)
        gradient = torch.stack(gradients).sum(0) if axis is None else torch.cat(gradients, axis)
        return averaged_over_rows(gradient, self.input_splits[name], self.axes)

    def _exchanged(self, local: Mapping[Item, torch.Tensor], arguments: Values) -> Iterator[tuple[Item, torch.Tensor]]:
        """Send the results of each stage to all processes, and gradients to those that have the parameter."""
        messages: list[list[torch.Tensor]] = [[] for _ in range(self.processes)]
        expected: list[list[Form]] = [[] for _ in range(self.processes)]
        items: list[list[Item]] = [[] for _ in range(self.processes)]
        for item, form in self._items(arguments):
            source, home = self.owners[item.stage], None if item.is_result else self.home.get(item.name)
            for target in range(self.processes) if home is None else (home,):
                if source == target == self.rank:
                    yield item, local[item]
                elif source == self.rank:
                    messages[target].append(local[item])
                elif target == self.rank:
                    items[source].append(item)
                    expected[source].append(form)
        received = exchange(messages, expected, self.axes.get_group(PIPELINE), self.device)
        for row, tensors in zip(items, received, strict=True):
            yield from zip(row, tensors, strict=True)

    def _items(self, arguments: Values) -> Iterator[tuple[Item, Form]]:
        """Yield the results and gradients of all stages with their forms."""
        for k, stage in enumerate(self.plan.stages):
            types = {r.name: r.value.type for r in stage.graph.results}
            for name in stage.results:
                axis, t = self.cut.axes.get(name), types[name]
                shape = tuple(int(n) * (self.chunks if j == axis else 1) for j, n in enumerate(t.shape))
                yield Item(k, name, True), (shape, getattr(torch, t.dtype.name))
            arguments_of_stage = {i.name for i in stage.graph.arguments}
            for name in self.part.trained:
                if name in arguments_of_stage:
                    yield Item(k, name, False), self.forms.get(name) or _form(arguments[name])


def _form(x: torch.Tensor) -> Form:
    return tuple(x.shape), x.dtype


def _function(load: Callable[[Graph, bool], Forward], graph: Graph) -> Callable[[Values], Values]:
    """Return a function of one dictionary for a graph without parameters."""
    forward = load(graph, False)
    names = [i.name for i in graph.arguments]
    return lambda values: forward({}, {n: values[n] for n in names})
