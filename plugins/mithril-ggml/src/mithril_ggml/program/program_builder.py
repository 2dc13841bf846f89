"""A program being written: values get places, operations become steps of ggml or of NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import in_place_updates
from mithril.graph import DType, Graph, Node, UnsupportedError, Value, float32
from mithril_ggml.program.strided_tensor import Shape, Storage, Tensor, row_strides, simplified

# Elements below which ggml copies faster than NumPy.
SMALL = 8192
TILED, TILE = 1 << 16, 32  # elements from which, and rows and columns by which, copies are tiled
DIMS = 4  # ggml's limit


@dataclass(eq=False)
class Step:
    """One operation on memory. ``run`` gets headers of the operands (ggml) or arrays, the results' last (NumPy)."""

    native: bool  # a node of a ggml graph
    name: str
    run: Callable[..., Any]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    donors: tuple[Tensor, ...] = ()  # operands whose memory a result may take over
    node: Node | None = None


class ProgramBuilder:
    """Collects the steps of one graph."""

    def __init__(self, graph: Graph, settings: Any) -> None:
        self.graph = graph
        self.settings = settings
        self.steps: list[Step] = []
        self.values: dict[Value, Tensor] = {}
        self.node: Node | None = None
        self.storages: list[Storage] = []
        self.in_place = in_place_updates(graph)  # next state -> the state that it overwrites

    # -- memory ------------------------------------------------------------------------------------------------------
    def new(self, shape: Sequence[int], dtype: DType = float32) -> Tensor:
        """Memory for a value, at a place found when the program is whole."""
        shape = tuple(shape)
        storage = Storage(math.prod(shape) * dtype.itemsize)
        self.storages.append(storage)
        return Tensor(storage, shape, row_strides(shape, dtype), dtype)

    def like(self, value: Value) -> Tensor:
        return self.new(static(value), value.dtype)

    def constant_tensor(self, array: np.ndarray[Any, Any], dtype: DType, name: str = "") -> Tensor:
        """Create a constant."""
        contiguous = np.asarray(array, order="C")
        storage = Storage(contiguous.nbytes, "fixed", name, contiguous)
        self.storages.append(storage)
        scalar = contiguous.item() if contiguous.size == 1 else None
        return Tensor(storage, contiguous.shape, row_strides(contiguous.shape, dtype), dtype, scalar=scalar)

    def caller_tensor(self, name: str, shape: Shape, dtype: DType) -> Tensor:
        """Create a tensor in the caller's memory."""
        storage = Storage(math.prod(shape) * dtype.itemsize, "given", name)
        self.storages.append(storage)
        return Tensor(storage, shape, row_strides(shape, dtype), dtype)

    # -- steps -------------------------------------------------------------------------------------------------------
    def _add(self, step: Step) -> None:
        index = len(self.steps)
        for t in (*step.reads, *step.writes):
            t.storage.end = max(t.storage.end, index)
        for t in step.writes:
            if t.storage.start < 0:
                t.storage.start = index
        self.steps.append(step)

    def numpy(
        self,
        name: str,
        function: Callable[..., Any],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        donors: Sequence[Tensor] = (),
    ) -> None:
        """``function(*operands, *results)`` fills the results."""
        self._add(Step(False, name, function, tuple(reads), tuple(writes), tuple(donors), self.node))

    def ggml(
        self,
        name: str,
        function: Callable[..., Any],
        reads: Sequence[Tensor],
        write: Tensor,
        donors: Sequence[Tensor] = (),
    ) -> Tensor:
        """``function(context, *headers)`` gives the one node that fills the result; at most four axes each."""
        for t in (*reads, write):
            if t.rank > DIMS or t.size == 0:
                raise UnsupportedError(f"ggml takes 1 to 4 axes and at least one element, got {list(t.shape)}")
        self._add(Step(True, name, function, tuple(reads), (write,), tuple(donors), self.node))
        return write

    # -- moving ------------------------------------------------------------------------------------------------------
    def dense(self, t: Tensor) -> Tensor:
        """Return a contiguous tensor with the same elements."""
        return t if t.dense else self.copied(t)

    def copied(self, t: Tensor) -> Tensor:
        out = self.new(t.shape, t.dtype)
        self.copy(t, out)
        return out

    def copy(self, t: Tensor, out: Tensor) -> None:
        """Elements of one view into another of the same shape."""
        # ggml copies float32 without leaving its graph, but has no negative strides.
        if t.dtype is float32 and 0 < t.size <= SMALL and all(s > 0 or n == 1 for n, s in zip(t.shape, t.strides)):
            source, target = simplified(t, out)
            if source.rank <= DIMS:
                self.ggml("cpy", copy_by_ggml, [source, target], target)
                return
        self.numpy("copy", copy_array, [t], [out])

    def shaped(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape a tensor, with a copy only if required."""
        shape = tuple(shape)
        view = t.reshaped(shape)
        if view is None:
            view = self.copied(t).reshaped(shape)
        assert view is not None
        view.scalar = t.scalar
        return view


def copy_by_ggml(ctx: Any, source: Any, target: Any) -> Any:
    from mithril_ggml.library.library import ggml

    return ggml.ggml_cpy(ctx, source, target)


def copy_array(source: Any, target: Any) -> None:
    """Copy transposed data in tiles: otherwise each element would touch a separate cache line."""
    if source.size < TILED or target.ndim < 2 or source.strides[-1] == source.itemsize:
        np.copyto(target, source)
        return
    k = min(range(source.ndim), key=lambda axis: abs(source.strides[axis]) or 1 << 62)
    n, m = source.shape[k], source.shape[-1]
    if k == source.ndim - 1 or n < TILE or m < TILE:
        np.copyto(target, source)
        return
    from_k, to_k = np.moveaxis(source, (k, -1), (0, 1)), np.moveaxis(target, (k, -1), (0, 1))
    for i in range(0, n, TILE):
        for j in range(0, m, TILE):
            to_k[i : i + TILE, j : j + TILE] = from_k[i : i + TILE, j : j + TILE]


def static(value: Value) -> Shape:
    """Return the shape of a value, which must be static."""
    if not value.type.is_static:
        raise UnsupportedError(
            f"backend 'ggml' needs every size when a program is made, but '{value.name}' is {value.type}",
            hint="compile for the shapes of the inputs: shapes={...} with numbers, or call with arrays",
        )
    return value.shape  # type: ignore[return-value]


Lower = Callable[[ProgramBuilder, Node, Sequence[Any]], Any]
Table = Mapping[str, Lower]
