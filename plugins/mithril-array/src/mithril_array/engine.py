"""Programs of single functions on one backend, by function and types of the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mithril.backend import Backend, BuildOptions, ExactSizesRequired
from mithril.graph import Builder, Dim, DType, Shape
from mithril_array.complex_numbers import Pair
from mithril_array.dtypes import ComplexDType, part_of

PROGRAMS = 2048  # the least recently used ones beyond are forgotten
Kernel = Callable[..., Any]
Types = tuple[tuple[DType, Shape], ...]
_SIZES = tuple(Dim(f"n{k}") for k in range(64))


class Program:
    """The executable of one function; a call takes arrays of the backend and returns those of the results."""

    def __init__(self, backend: Backend, kernel: Kernel, attributes: tuple[tuple[str, Any], ...], types: Types) -> None:
        with Builder("call") as builder:
            operands = [_declared(builder, k, dtype, shape) for k, (dtype, shape) in enumerate(types)]
            returned = kernel(*operands, **dict(attributes))
        self.is_single = isinstance(returned, Pair) or not isinstance(returned, tuple)
        results = (returned,) if self.is_single else returned
        self.dtypes: tuple[DType, ...] = tuple(r.dtype for r in results)
        parts = [part for r in results for part in (r if isinstance(r, Pair) else (r,))]
        graph = builder.build({f"y{k}": part for k, part in enumerate(parts)})
        options = BuildOptions()
        self.run = backend.build(backend.decomposed(graph, options), options)
        self.inputs = tuple(i.name for i in graph.inputs if i.role == "input")
        self.outputs = tuple(f"y{k}" for k in range(len(parts)))

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        results = self.run({}, dict(zip(self.inputs, arrays, strict=True)))
        return [results[name] for name in self.outputs]


def _declared(builder: Builder, k: int, dtype: DType, shape: Shape) -> Any:
    if isinstance(dtype, ComplexDType):
        return Pair(*(builder.input(f"{part}{k}", shape, dtype.part) for part in ("re", "im")))
    return builder.input(f"x{k}", shape, part_of(dtype))


class Engine:
    """A backend with the programs that were built for it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.program = lru_cache(maxsize=PROGRAMS)(self._build)
        self.program_of_any_size = lru_cache(maxsize=PROGRAMS)(self._of_any_size)

    def _build(self, kernel: Kernel, attributes: tuple[tuple[str, Any], ...], types: Types) -> Program | None:
        """Return the program for operands of these types, or None if the backend has none for open sizes."""
        try:
            return Program(self.backend, kernel, attributes, types)
        except ExactSizesRequired:
            return None

    def _of_any_size(self, kernel: Kernel, attributes: tuple[tuple[str, Any], ...], types: Types) -> Program:
        """Return the program in which only axes that are spread have size 1, or the one for exactly these sizes."""
        shapes = open_shapes(*(shape for _, shape in types))
        opened = tuple((dtype, shape) for (dtype, _), shape in zip(types, shapes, strict=True))
        return self.program(kernel, attributes, opened) or Program(self.backend, kernel, attributes, types)


def open_shapes(*shapes: Shape) -> tuple[Shape, ...]:
    """Return the shapes of operands that broadcast, with a symbol for each size; 1 remains where another is spread."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    is_spread = [max(sizes) != min(sizes) for sizes in zip(*padded, strict=True)]
    return tuple(
        tuple(1 if is_spread[k] and p[k] == 1 else _SIZES[k] for k in range(rank - len(s), rank))
        for s, p in zip(shapes, padded, strict=True)
    )
