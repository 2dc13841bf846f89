"""Gradients of composites as operations of their own, for which a backend can have a kernel.

The body of such an operation differentiates the body of the composite, so that it needs no formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from mithril.graph import Builder, Graph, Op, TensorType, Value, dtype as as_dtype, evaluate, operations, trace


class BodyGradient:
    """The late binding by which this package differentiates a body; ``mithril.derivatives`` sets it.

    ``differentiate(body, numbers)`` returns a graph whose last input is the cotangent of the output, and whose outputs
    are the cotangents of the inputs of these numbers.
    """

    differentiate: ClassVar[Callable[[Graph, Sequence[int]], Graph] | None] = None


# Composites whose own body is differentiated if the backend has no kernel for their gradient: the body of the gradient
# would repeat the forward pass.
BY_KERNEL: set[Op] = set()


def cotangents(function: Callable[..., Any], wrt: Sequence[int], g: Any, *operands: Any) -> tuple[Any, ...]:
    """Return the cotangents of operands of a function, numbered by ``wrt``, for the cotangent ``g`` of its result."""
    if BodyGradient.differentiate is None:
        operations()  # imports the package that sets it
    assert BodyGradient.differentiate is not None
    present = [k for k, x in enumerate(operands) if x is not None]
    types = [None if x is None else _type_of(x) for x in operands]
    body = trace(function, types, [f"x{k}" for k in range(len(types))])
    graph = BodyGradient.differentiate(body, [present.index(k) for k in wrt])
    arguments = [*(operands[k] for k in present), g]
    if any(isinstance(x, Value) for x in arguments):
        builder = Builder.current()
        return builder.inline(graph, [x if isinstance(x, Value) else builder.constant(x) for x in arguments])
    names = [i.name for i in graph.arguments]
    return tuple(evaluate(graph, dict(zip(names, map(np.asarray, arguments), strict=True))).values())


def _type_of(x: Any) -> TensorType:
    return x.type if isinstance(x, Value) else TensorType(as_dtype(np.asarray(x).dtype), np.shape(x))
