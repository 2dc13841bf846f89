"""``GraphBuilder``: a graph of the framework's operations, one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import Builder, InputError, Origin, Value, operation
from mithril_mlx.utilities.analysis import MlxComputationGraph
from mithril_mlx.utilities.op_chain import canonical_name


class GraphBuilder:
    """Builder of graphs, operation by operation. The device is cpu or gpu, and must be the same for all operations."""

    def __init__(self, name: str = "graph") -> None:
        self._builder = Builder(name)
        self._outputs: dict[str, Value] = {}
        self._device: str | None = None

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32", device: str | None = None) -> Value:
        """Add an input: an array that each run receives."""
        self._on(device)
        return self._builder.input(name, tuple(shape), dtype)

    def apply(self, name: str, *operands: Any, device: str | None = None, **attributes: Any) -> Value:
        """Apply any operation of ``mithril.ops`` by name."""
        self._on(device)
        with self._builder, self._builder.at(Origin(canonical_name(name))):
            value: Value = operation(canonical_name(name))(*operands, **attributes)
        return value

    def matmul(self, a: Value, b: Value, device: str | None = None) -> Value:
        return self.apply("matmul", a, b, device=device)

    def add(self, a: Any, b: Any, device: str | None = None) -> Value:
        return self.apply("add", a, b, device=device)

    def multiply(self, a: Any, b: Any, device: str | None = None) -> Value:
        return self.apply("mul", a, b, device=device)

    def quantize(self, x: Value, scale: float, device: str | None = None) -> Value:
        """Quantize to bytes: x / scale, rounded."""
        return self.apply("quantize", x, self._scale(scale), device=device)

    def dequantize(self, x: Value, scale: float, device: str | None = None) -> Value:
        return self.apply("dequantize", x, self._scale(scale), device=device)

    def output(self, value: Value, name: str = "output") -> Value:
        """Name a result."""
        if name in self._outputs:
            raise InputError(f"there is an output '{name}' already")
        self._outputs[name] = value
        return value

    def build(self) -> MlxComputationGraph:
        if not self._outputs:
            raise InputError("the graph has no outputs", hint="builder.output(value, name)")
        return MlxComputationGraph(self._builder.build(self._outputs), self._device)

    def _scale(self, scale: float) -> Value:
        return self._builder.constant(float(scale), "float32")

    def _on(self, device: str | None) -> None:
        if device is not None and self._device is not None and device != self._device:
            raise InputError(f"the graph is on '{self._device}', and this is to be on '{device}'")
        self._device = device if device is not None else self._device
