"""Graph construction: inside ``with Builder() as b``, operations on values append nodes to ``b``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mithril.graph.core import (
    CHECKS,
    NOWHERE,
    Attributes,
    Graph,
    Input,
    Node,
    Op,
    Origin,
    Output,
    Value,
    as_results,
    types_of,
)
from mithril.graph.current_builder import thread
from mithril.graph.dims import Dim, Size, TensorType, parse_dim
from mithril.graph.dtypes import DType, dtype as as_dtype, scalar_dtype
from mithril.graph.errors import DTypeError, GraphError, MithrilError, ShapeError
from mithril.graph.guards import Guard, collect_guards
from mithril.graph.registry import operation


class Builder:
    """A graph under construction: infers types, keeps names unique, shares scalar constants."""

    def __init__(self, name: str = "forward") -> None:
        self.name = name
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.guards: dict[Guard, None] = {}
        self.origin: Origin = NOWHERE
        self._tags: Attributes | None = None
        self._used: dict[str, int] = {}
        self._scalars: dict[tuple[str, DType], Value] = {}
        self._outer: list[Builder | None] = []

    @property
    def tags(self) -> Attributes | None:
        """The tags of the nodes that are emitted: those of the node that they are made from, without its checks."""
        return self._tags

    @tags.setter
    def tags(self, tags: Attributes | None) -> None:
        self._tags = tags and {name: tag for name, tag in tags.items() if name not in CHECKS}

    # -- being the current builder -----------------------------------------------------------------------------------
    def __enter__(self) -> Builder:
        self._outer.append(thread.builder)
        thread.builder = self
        return self

    def __exit__(self, *exc: object) -> None:
        thread.builder = self._outer.pop()

    @staticmethod
    def current() -> Builder:
        """Return the innermost builder entered on this thread."""
        builder: Builder | None = thread.builder
        if builder is None:
            raise GraphError("no graph is being built here", hint="enter a builder: with ml.Builder() as b: ...")
        return builder

    @contextmanager
    def at(self, origin: Origin, tags: Attributes | None = None) -> Iterator[None]:
        """Attach ``origin`` and ``tags`` to the nodes emitted in the block."""
        outer, self.origin, self.tags = (self.origin, self.tags), origin, tags
        try:
            yield
        finally:
            self.origin, self.tags = outer

    # -- names -------------------------------------------------------------------------------------------------------
    def unique(self, stem: str) -> str:
        """Return ``stem`` if it is unused, else ``stem`` with the next free number."""
        # The next number of each stem is stored, or naming n values of one stem would take time
        # quadratic in n.
        n = self._used.get(stem)
        if n is None:
            self._used[stem] = 1
            return stem
        while True:
            name = f"{stem}_{n}"
            n += 1
            if name not in self._used:
                self._used[stem] = n
                self._used[name] = 1
                return name

    # -- inputs ------------------------------------------------------------------------------------------------------
    def input(
        self,
        name: str,
        shape: Sequence[Size],
        dtype: Any = "float32",
        role: str = "input",
        data: np.ndarray[Any, Any] | None = None,
        tags: Attributes | None = None,
        of: str = "",
    ) -> Value:
        sizes = tuple([d if type(d) is int and d >= 0 else _size(d, name) for d in shape])
        value = Value(self.unique(name), TensorType(as_dtype(dtype), sizes))
        self.inputs.append(Input(value, role, data, tags or {}, of))
        return value

    def param(self, name: str, shape: Sequence[Size], dtype: Any = "float32", **tags: Any) -> Value:
        return self.input(name, shape, dtype, "param", tags=tags)

    def constant(self, value: Any, dtype: Any = None, name: str = "constant") -> Value:
        """Return a Python scalar (shared within the graph) or an array as a value."""
        if isinstance(value, (bool, int, float)):
            kind = as_dtype(dtype) if dtype is not None else scalar_dtype(value)
            value = _scalar(value, kind)
            # repr, because 0.0 == -0.0 and nan != nan: the first must differ, the second must be found
            # again.
            key = (repr(value), kind)
            if key not in self._scalars:
                self._scalars[key] = self.emit(operation("constant"), (), {"value": value, "dtype": kind})[0]
            return self._scalars[key]
        array = np.asarray(value)
        if dtype is not None:
            array = array.astype(as_dtype(dtype).numpy)
        elif array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            array = array.astype(np.float32)  # lists of Python numbers get the default dtypes
        elif array.dtype == np.int64 and not isinstance(value, np.ndarray | np.generic):
            array = array.astype(np.int32)
        # A copy if the caller could still write to the elements: the graph, its fingerprint and packed
        # forms rely on them.
        array = np.array(array, order="C", copy=array.flags.writeable or array.base is not None or None)
        array.setflags(write=False)
        return self.input(name, array.shape, array.dtype, "constant", data=array)

    # -- nodes -------------------------------------------------------------------------------------------------------
    def emit(
        self,
        op: Op,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any],
        regions: Sequence[Graph] = (),
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Append a node; operands and attributes must be canonical (``Op.__call__`` canonicalizes them)."""
        try:
            with collect_guards() as guards:
                types = op.infer(types_of(operands), attributes, regions)
        except MithrilError as error:
            raise error.with_facts(str(self.origin)) from None
        for guard in guards:
            self.guards[guard] = None
        stem = name or op.name.rsplit(".", 1)[-1]
        results = tuple([Value(self.unique(stem), t) for t in types])
        self.nodes.append(Node(op, tuple(operands), attributes, results, tuple(regions), self.origin, self.tags))
        return results

    def inline(self, graph: Graph, arguments: Sequence[Value | None]) -> tuple[Value, ...]:
        """Copy the nodes of another graph, with its non-constant inputs bound to ``arguments``; return its outputs.

        Nodes without an origin get the builder's.
        """
        mapping: dict[Value | None, Value | None] = {None: None}
        remaining = iter(arguments)
        for i in graph.inputs:
            if i.role == "constant":
                mapping[i.value] = self.input(i.name, i.type.shape, i.type.dtype, "constant", data=i.data, tags=i.tags)
            else:
                mapping[i.value] = next(remaining)
        for guard in graph.guards:
            self.guards[guard] = None
        for node in graph.nodes:
            # Scalars are shared within a graph, so that inlined bodies do not repeat them.
            if node.is_constant:
                mapping[node.result] = self.constant(node.attributes["value"], node.attributes["dtype"])
                continue
            results = tuple([Value(self.unique(v.name), v.type) for v in node.results])
            mapping.update(zip(node.results, results, strict=True))
            operands = tuple(map(mapping.__getitem__, node.operands))
            origin = node.origin if node.origin != NOWHERE else self.origin
            self.nodes.append(
                Node(node.op, operands, node.attributes, results, node.regions, origin, node.tags or self.tags)
            )
        return tuple([mapping[v] for v in graph.outputs])  # type: ignore[misc]

    def build(self, outputs: Value | Iterable[Value | Output] | Mapping[str, Value]) -> Graph:
        """Return the graph. A mapping of ``outputs`` also provides their names, an ``Output`` its role."""
        return Graph(tuple(self.inputs), tuple(self.nodes), as_results(outputs), self.name, tuple(self.guards))


def _size(size: Any, name: str) -> Size:
    """Return a size of an input, with text such as ``"B"`` or ``"2*B"`` as a symbolic one."""
    if isinstance(size, Dim):
        return size
    if isinstance(size, str):
        return parse_dim(size)
    if isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    raise ShapeError(
        f"the size {size!r} of input '{name}' is neither a number of elements nor a symbol",
        hint='sizes look like 32, "B" or "2*B"',
    )


def _scalar(value: bool | int | float, kind: DType) -> bool | int | float:
    """Return a Python scalar as one of a dtype, or raise DTypeError if the dtype has no such number."""
    if kind.is_bool:
        return bool(value)
    if kind.is_float:
        try:
            return float(value)
        # Of integers beyond the largest float64.
        except OverflowError:
            fits = False
    else:
        value = int(value)
        limits = np.iinfo(kind.numpy)
        fits = limits.min <= value <= limits.max
    if not fits:
        number = str(value) if abs(value) < 2**64 else f"an integer of {int(value).bit_length()} bits"
        raise DTypeError(
            f"{number} is not a number of {kind}",
            hint="a Python number takes the dtype of the tensor it is combined with: cast that to one with this number",
        )
    return value


def trace(function: Any, types: Sequence[TensorType | None], names: Sequence[str] = (), name: str = "traced") -> Graph:
    """Trace a Python function of values to a graph, for operands of these types."""
    builder = Builder(name)
    with builder:
        arguments = [
            None if t is None else builder.input(names[k] if k < len(names) else f"x{k}", t.shape, t.dtype)
            for k, t in enumerate(types)
        ]
        returned = function(*arguments)
        values = [returned] if not isinstance(returned, (tuple, list)) else list(returned)
        outputs = [v if isinstance(v, Value) else builder.constant(v) for v in values]
    return builder.build(outputs)


Op._trace = staticmethod(trace)
