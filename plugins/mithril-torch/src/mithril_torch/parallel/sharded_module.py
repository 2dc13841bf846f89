"""A forward graph as a module whose parameters PyTorch's engines distribute.

``fully_shard`` exchanges parameters and gradients block by block, ``DistributedDataParallel`` averages the gradients of
complete parameters; ``DTensor`` splits weights. The graph is that of the rows of one process: sums over all rows are
collectives in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from mithril import ops
from mithril.graph import Graph, TensorType
from mithril_torch.blocks import Block, Step, name_clash, run_step, submodule_of
from mithril_torch.parallel.layout import CONTEXT, DATA, MODEL, PARTS, REPLICA, MeshAxes, Split
from mithril_torch.parallel.tensor_parallel import prepare, use_own_cache
from mithril_torch.segments import load_segments, repeated_blocks, segmented, separable

# Nothing modifies results of these modules in place.
OURS = r".*FSDP2-wrapped module \((FSDP|Replicate)(Block|ShardedModule)\) returned a view tensor"
warnings.filterwarnings("ignore", message=OURS, category=UserWarning)


Values = dict[str, torch.Tensor]
LARGE = 1 << 20  # elements of a layer that are worth exchanges of their own


class ShardedModule(torch.nn.Module):  # type: ignore[misc]
    """A forward graph of one process's rows; ``splits`` tell how each parameter is divided over the mesh."""

    def __init__(
        self,
        graph: Graph,
        load: Callable[[Graph], Callable[..., dict[str, Any]]],
        splits: Mapping[str, Split],
        trained: Sequence[str],
        axes: MeshAxes,
        *,
        reshard: bool = True,
        parts: Sequence[str] = (),
        compiler: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._parts = frozenset(parts)  # parameters that are split over the data axis in the graph itself
        self._axes, self._splits, self._trained = axes, splits, frozenset(trained)
        inputs = graph.with_role("param")
        self.paths = tuple(i.name for i in inputs)
        self._blocks = separable(_large_blocks({i.name: i.type for i in inputs}), [graph])
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        for i in inputs:
            owner, name = submodule_of(
                self, i.name, lambda prefix: Block() if prefix in self._blocks else torch.nn.Module()
            )
            if hasattr(owner, name):
                raise name_clash(i.name, name)
            shape, dtype = tuple(map(int, i.type.shape)), getattr(torch, i.type.dtype.name)
            owner.register_parameter(name, self._empty(i.name, shape, dtype))
            self._owners[i.name] = owner, name
        cut = segmented(graph, self._blocks)
        self._results = cut.results
        self._steps: list[Step] = []
        codes_of_segments = load_segments(cut.segments, load)
        if compiler is not None:
            use_own_cache()
            for code in dict.fromkeys(codes_of_segments):
                code.forward = torch.compile(code.forward, **{"dynamic": False, **compiler})  # sizes are static
        for segment, code in zip(cut.segments, codes_of_segments, strict=True):
            codes = self.get_submodule(segment.block).mithril_segments[True] if segment.block else []
            self._steps.append(Step(segment, len(codes), code))
            codes.append(code)
        self._branches = any(node.regions for node in graph.nodes)  # they may use other parameters in each step
        self._distribute(half_parameters(graph), reshard)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """Return a parameter by its path."""
        owner, leaf = self._owners[name]
        return getattr(owner, leaf)

    # -- engines ------------------------------------------------------------------------------------------------------
    def _empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
        """Return a parameter without elements, a ``DTensor`` if the mesh has a model axis."""
        # Without memory: the engine's parts take the memory of the carried arrays later, so that
        # weights exist once.
        tensor: Any = torch.empty(shape, dtype=dtype, device="meta")
        if self._axes.size(MODEL) > 1:
            prepare()
            split = self._splits[name]
            placement = Shard(split.index(MODEL)) if MODEL in split else Replicate()
            local = [n // self._axes.size(MODEL) if a == MODEL else n for n, a in zip(shape, split, strict=True)]
            part = torch.empty(local, dtype=dtype, device="meta")
            tensor = DTensor.from_local(
                part, self._axes.over(MODEL), [placement], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        return torch.nn.Parameter(tensor, requires_grad=name in self._trained)

    def _distribute(self, halves: Mapping[str, str], reshard: bool) -> None:
        """Let ``fully_shard`` or ``replicate`` manage each block, then the rest.

        Parameters and gradients that are computed with in 16 bits travel as 16 bits. ``replicate`` averages gradients
        of such parameters and of ``DTensor``; those of all others are averaged afterwards, or by ``averaging``.
        """
        self._undivided: list[str] = []  # trained parameters whose gradients are averaged here
        self._row_axes = [axis for axis in (DATA, CONTEXT) if self._axes.size(axis) > 1]
        if not self._row_axes:
            return
        stored, replicas = (PARTS, REPLICA) if self._axes.size(PARTS) > 1 else (DATA, CONTEXT)
        managed = [n for n in self.paths if n not in self._parts and (not halves or n in halves)]
        managed = [n for n in managed if self.get_parameter(n).ndim]  # engines have no scalars
        engine: Any = replicate
        options: dict[str, Any] = {"mesh": self._axes.over(*self._row_axes)}
        if any(stored in self._splits[n] for n in managed):
            engine = fully_shard
            managed = [n for n in managed if stored in self._splits[n]]
            parameters = {self.get_parameter(n): self._splits[n] for n in managed}
            options = {
                "mesh": self._axes.storage(stored, replicas),
                "reshard_after_forward": None if reshard else False,  # None: all but the last
                "shard_placement_fn": lambda p: Shard(parameters[p].index(stored)),
            }
        # Complete parameters in one dtype are averaged by DistributedDataParallel, in buckets during
        # the backward pass, without the hooks and copies of FSDP (commit 50fe2106).
        elif not halves and self._axes.size(MODEL) == 1:
            managed = []
        if halves:
            dtype = getattr(torch, next(iter(halves.values())))
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False
            )
        rest = [n for n in self.paths if n not in managed]
        self._undivided = [n for n in rest if n in self._trained and n not in self._parts]
        if managed:
            options["ignored_params"] = {self.get_parameter(n) for n in rest}
            for path in self._blocks:
                engine(self.get_submodule(path), **options)
            engine(self, **options)

    def averaging(self, deferred: Container[str] = ()) -> Callable[[Values], Values]:
        """Return this module run by ``DistributedDataParallel``, or itself if no gradient is averaged that way.

        Parameters must have memory. The gradients of ``deferred`` ones are not averaged.
        """
        self._undivided = [n for n in self._undivided if n not in deferred]
        names = [n for n in self._undivided if not isinstance(self.parameter(n), DTensor)]
        if not names:
            return self
        self._undivided = [n for n in self._undivided if n not in names]
        return DistributedDataParallel(  # type: ignore[no-any-return]
            _Replica(self.__call__, [self.parameter(n) for n in names]),
            process_group=self._axes.over(*self._row_axes).get_group(),
            init_sync=False,
            static_graph=not self._branches,
            find_unused_parameters=self._branches,
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def assign(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the parameters have the memory of these local parts."""
        new: dict[str, torch.Tensor] = {}
        for name in self.paths:
            parameter, x = self.parameter(name), values[name]
            old = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            # Values that were updated in place need no assignment.
            is_same = old.shape == x.shape and old.stride() == x.stride()
            if is_same and not old.is_meta and old.data_ptr() == x.data_ptr():
                continue
            if old.is_meta or isinstance(parameter, DTensor):
                new[name] = like(parameter, x.contiguous())
            else:
                parameter.data = x.contiguous()
        if new:
            self.load_state_dict(new, strict=False, assign=True)

    def release(self) -> None:
        """Release the parameters of all blocks that a forward pass without a backward pass has gathered."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # -- running ------------------------------------------------------------------------------------------------------
    def forward(self, values: Values) -> Values:
        """Run the segments on the inputs of this process; results are complete along the model axis."""
        values = {name: self._replicated(x) for name, x in values.items()}
        for step in self._steps:
            run_step(self, step, values)
            for name in step.segment.ends:
                del values[name]
        results = {name: values[value] for name, value in self._results.items()}
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}

    def _replicated(self, x: torch.Tensor) -> torch.Tensor:
        """Return an input as ``DTensor`` if the mesh has a model axis: some operations require it of all operands."""
        if self._axes.size(MODEL) == 1 or not x.is_floating_point():
            return x
        return DTensor.from_local(x, self._axes.over(MODEL), [Replicate()], run_check=False)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def gradients(self) -> dict[str, torch.Tensor]:
        """Remove the averaged gradients of the trained parameters, and return their local parts."""
        gradients: dict[str, torch.Tensor] = {}
        for name in self.paths:
            if name not in self._trained:
                continue
            parameter = self.parameter(name)
            gradient, parameter.grad = parameter.grad, None
            if isinstance(parameter, DTensor):
                local = torch.zeros_like(parameter.to_local()) if gradient is None else _local(gradient, parameter)
            else:
                local = torch.zeros_like(parameter) if gradient is None else gradient
            gradients[name] = local.detach()
        self._average(gradients, self._undivided, self._row_axes)
        parts = [n for n in self.paths if n in self._trained and n in self._parts]
        self._average(gradients, parts, [axis for axis in self._row_axes if axis != DATA])
        return gradients

    def _average(self, gradients: dict[str, torch.Tensor], names: Sequence[str], axes: Sequence[str]) -> None:
        """Sum gradients over these axes, all of a dtype at once; divide them by the number of processes with rows."""
        for dtype in {gradients[n].dtype: None for n in names}:
            group = [n for n in names if gradients[n].dtype == dtype]
            # One collective for all of a dtype: each costs a latency that small gradients do not
            # outweigh.
            flat = torch.cat([gradients[n].reshape(-1) for n in group]) / prod(map(self._axes.size, self._row_axes))
            if axes:
                dist.all_reduce(flat, group=self._axes.over(*axes).get_group())
            for name, part in zip(group, flat.split([gradients[n].numel() for n in group]), strict=True):
                gradients[name] = part.view(gradients[name].shape)


class _Replica(torch.nn.Module):  # type: ignore[misc]
    """A function with the parameters whose gradients ``DistributedDataParallel`` averages."""

    def __init__(self, run: Callable[[Values], Values], parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.run, self.averaged = run, torch.nn.ParameterList(parameters)

    def forward(self, values: Values) -> Values:
        return self.run(values)


def averaged_over_rows(gradient: torch.Tensor, split: Split, axes: MeshAxes) -> torch.Tensor:
    """Return the gradient of an input with this split: the mean over all processes with rows, as of parameters."""
    rows = [axis for axis in (DATA, CONTEXT) if axes.size(axis) > 1]
    gradient = gradient / prod(map(axes.size, rows))
    for axis in rows:
        if axis not in split:
            dist.all_reduce(gradient, group=axes.get_group(axis))
    return gradient


def half_parameters(graph: Graph) -> dict[str, str]:
    """Return the parameters that a graph reads only as 16-bit floats, with the names of their dtypes."""
    halves = {}
    for i in graph.with_role("param"):
        readers = graph.users.get(i.value, ())
        dtypes = {node.result.dtype for node in readers if node.op is ops.cast}
        if i.type.dtype.bits == 32 and len(dtypes) == 1 and all(node.op is ops.cast for node in readers):
            dtype = next(iter(dtypes))
            if dtype.is_float and dtype.bits == 16 and i.value not in graph.outputs:
                halves[i.name] = dtype.name
    return halves


def _large_blocks(types: Mapping[str, TensorType]) -> list[str]:
    """Return the repeated blocks of several layers, and large repeated layers: each is exchanged at once."""
    blocks = []
    for path in repeated_blocks(types):
        inner = {name[len(path) + 1 :]: t for name, t in types.items() if name.startswith(f"{path}.")}
        if any("." in name for name in inner) or sum(prod(map(int, t.shape)) for t in inner.values()) >= LARGE:
            blocks.append(path)
    return blocks


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this local part that is distributed like a parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(gradient: Any, parameter: DTensor) -> torch.Tensor:
    if tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(placements=parameter.placements)
    local: torch.Tensor = gradient.to_local()
    return local
