"""Calling a model on arrays: the layers are traced, and each operation is computed as soon as it is added.

It is computed by its NumPy reference, or by a program of one operation on a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril.compiler import CompiledModel, compile, initialize
from mithril.graph import Builder, DType, InputError, Node, Op, TensorType, Value, dtype as as_dtype, parse, to_text
from mithril.models.language.flatten import flatten
from mithril.models.language.layer import TRAINING_FLAG, Layer
from mithril.models.language.trace import run_flat
from mithril.models.language.trace_context import Context

Compute = Callable[[Node, Sequence[Any]], Sequence[Any]]  # the results of a node for arrays of its operands


class EagerValue(Value):
    """A value with its elements, which ``print`` shows and ``np.asarray`` returns."""

    __slots__ = ("array",)

    def __init__(self, value: Value, array: Any) -> None:
        super().__init__(value.name, value.type)
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(to_numpy(self.array), dtype, copy=copy)

    def __repr__(self) -> str:
        return f"{super().__repr__()} =\n{to_numpy(self.array)}"


class EagerBuilder(Builder):
    """A builder that computes each node, and draws parameters and states on first use."""

    def __init__(self, name: str, compute: Compute, arrays: Mapping[str, Any], pretrained: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.compute = compute
        self.arrays, self.pretrained = arrays, pretrained

    def input(self, name: str, *arguments: Any, **keywords: Any) -> Value:
        plain = super().input(name, *arguments, **keywords)
        declared = self.inputs.pop()
        data = declared.data
        if data is None and declared.role == "input":
            data = self.arrays[name]
        elif data is None:
            data = initialize([declared], 0, self.pretrained)[declared.name]
        value = EagerValue(plain, data)
        self.inputs.append(replace(declared, value=value))
        return value

    def emit(self, op: Op, operands: Sequence[Any], *arguments: Any, **keywords: Any) -> tuple[Value, ...]:
        results = super().emit(op, operands, *arguments, **keywords)
        node = self.nodes[-1]
        computed = self.compute(node, [None if v is None else v.array for v in operands])
        values = tuple(EagerValue(v, x) for v, x in zip(results, computed, strict=True))
        self.nodes[-1] = self.nodes[-1].replaced(results=values)
        return values


def by_reference(node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
    """Compute a node by the NumPy reference of its operation."""
    computed = node.op.evaluate(arrays, node.attributes, node.regions)
    return computed if isinstance(computed, tuple) else (np.asarray(computed),)


def on_backend(backend: Any) -> Compute:
    """Return a function that computes a node by a program of this backend."""

    def compute(node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
        builder = Builder(node.op.name)
        with builder:
            operands = [
                None if v is None else builder.input(f"x{k}", v.type.shape, v.type.dtype)
                for k, v in enumerate(node.operands)
            ]
            results = builder.emit(node.op, operands, node.attributes, node.regions)
        graph = builder.build({f"y{k}": v for k, v in enumerate(results)})
        inputs = {f"x{k}": x for k, x in enumerate(arrays) if x is not None}
        return list(_program(backend, to_text(graph, origins=False)).evaluate({}, inputs).values())

    return compute


@lru_cache(maxsize=256)
def _program(backend: Any, text: str) -> CompiledModel:
    """Return the compiled graph of one operation."""
    return compile(parse(text), backend)


def compute(layer: Layer, arguments: Mapping[str, Any], backend: Any = None) -> Any:
    """Return the output of a model for arrays by input name, or several outputs by name."""
    flat = flatten(layer)
    arrays = {name: _array(name, x) for name, x in arguments.items()}
    arrays = {d.name: _converted(arrays[d.name], d.dtype) for d in flat.inputs if d.name in arrays}
    operation = by_reference if backend is None else on_backend(backend)
    builder = EagerBuilder(flat.name, operation, arrays, flat.pretrained)
    context = Context(builder, training=False, dtype=None, frozen={})
    context.pretrained = flat.pretrained
    with builder, context.active():
        slots: list[Any] = [None] * flat.slots
        for decl in flat.inputs:
            if decl.name in arrays:
                slots[decl.slot] = builder.input(decl.name, arrays[decl.name].shape, arrays[decl.name].dtype)
            elif decl.name == TRAINING_FLAG:
                slots[decl.slot] = False
            elif decl.required:
                raise InputError(f"input '{decl.name}' is missing", facts=[decl.where])
            else:
                slots[decl.slot] = decl.default
        outputs = {name: context.as_value(v).array for name, v in run_flat(context, flat, slots).items()}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _array(name: str, x: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(to_numpy(x))
    if array.dtype == np.object_:
        raise InputError(f"input '{name}' is not an array of numbers", facts=[f"got {type(x).__name__}"])
    return array


def _converted(array: np.ndarray[Any, Any], dtype: DType | None) -> np.ndarray[Any, Any]:
    """Return the array with the declared dtype; undeclared floats of NumPy's default precision become float32."""
    kind = dtype or (as_dtype("float32") if array.dtype == np.float64 else TensorType(as_dtype(array.dtype), ()).dtype)
    return array.astype(kind.numpy, copy=False)
