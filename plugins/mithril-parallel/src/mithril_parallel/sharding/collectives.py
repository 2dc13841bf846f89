"""Collectives over one axis of a mesh as operations. Their references assume that all devices hold the same value."""

from __future__ import annotations

from typing import Any

from mithril.graph import TensorType, int32, op, product
from mithril_parallel.mesh import Split

WHOLE = "."
KINDS = ("sum", "max", "min")


def _same(x: Any, **attributes: Any) -> Any:
    return x


def _like(dtypes: Any, attributes: Any) -> Any:
    return dtypes[0]


def _gathered_shape(x: Any, *, mesh: str, parts: int, axis: int) -> Any:
    return tuple(n * parts if k == axis else n for k, n in enumerate(x))


def _scattered(x: Any, *, mesh: str, parts: int, axis: int) -> Any:
    return tuple(n // parts if k == axis else n for k, n in enumerate(x))


@op(name="mesh.all_reduce", shape=_same, dtype=_like, opaque=True, no_axes="it already works on local parts")
def all_reduce(x: Any, *, mesh: str, parts: int, kind: str = "sum") -> Any:
    """The sum (or ``max``, ``min``) of the values of the ``parts`` devices along the axis ``mesh``.

    A ``total`` is a sum whose cotangent all devices have.
    """
    return x


@op(name="mesh.all_gather", shape=_gathered_shape, dtype=_like, opaque=True, no_axes="it already works on local parts")
def all_gather(x: Any, *, mesh: str, parts: int, axis: int) -> Any:
    """The parts of all devices concatenated along ``axis``."""
    import numpy as np

    return np.concatenate([x] * parts, axis)


@op(name="mesh.reduce_scatter", shape=_scattered, dtype=_like, opaque=True, no_axes="it already works on local parts")
def reduce_scatter(x: Any, *, mesh: str, parts: int, axis: int) -> Any:
    """The sum over devices, split along ``axis``: each device has one part of it."""
    import numpy as np

    return np.split(x, parts, axis)[0]


def _exchanged(x: Any, *, mesh: str, parts: int, split: int, axis: int) -> Any:
    return tuple(n // parts if k == split else n * parts if k == axis else n for k, n in enumerate(x))


@op(name="mesh.all_to_all", shape=_exchanged, dtype=_like, opaque=True, no_axes="it already works on local parts")
def all_to_all(x: Any, *, mesh: str, parts: int, split: int, axis: int) -> Any:
    """The parts along ``axis``, concatenated; each device has one part of the result along ``split`` instead."""
    import numpy as np

    return np.concatenate([np.split(x, parts, split)[0]] * parts, axis)


@op(name="mesh.chunk_sum", shape=_same, dtype=_like, opaque=True, axes="*x -> *x", linear="x")
def chunk_sum(x: Any) -> Any:
    """The sum of the values of all chunks of a batch. Its consumers run once, after the last chunk."""
    return x


def split_text(split: Split) -> str:
    """Return a split as an attribute of ``mesh.constrain``: "data . model", where "." is an axis that is not split."""
    return " ".join(axis or WHOLE for axis in split)


def split_from_text(text: str) -> Split:
    """Return the split that ``split_text`` wrote."""
    return tuple(None if axis == WHOLE else axis for axis in text.split())


@op(name="mesh.constrain", shape=_same, dtype=_like, opaque=True, axes="*x -> *x", linear="x")
def constrain(x: Any, *, split: str) -> Any:
    """The value, which a partitioning compiler must split as ``split`` says."""
    return x


@op(name="mesh.cotangent", shape=_same, dtype=_like, opaque=True, axes="*x -> *x", linear="x")
def cotangent(x: Any, *, mesh: str, parts: int, scale: float) -> Any:
    """The value; its cotangent is summed over the ``parts`` devices along the axis ``mesh``, if any, and scaled."""
    return x


def _attended(q: Any, k: Any, v: Any, **attributes: Any) -> Any:
    return (*q[:3], v[3])


@op(name="mesh.ring_attention", shape=_attended, dtype=_like, opaque=True, no_axes="it already works on local parts")
def ring_attention(q: Any, k: Any, v: Any, *, mesh: str, parts: int, causal: bool, scale: float | None = None) -> Any:
    """The attention of the queries of a device over the keys of all ``parts`` devices, which pass around a ring."""
    raise NotImplementedError("it requires the keys of other devices")


def _at_experts(types: Any, attributes: Any, regions: Any) -> Any:
    x, experts = types
    rows = attributes["parts"] * product(experts.shape)
    numbers = TensorType(experts.dtype, (rows,))
    return (
        TensorType(x.dtype, (rows, x.shape[-1])),
        numbers,
        TensorType(int32, (attributes["parts"] * attributes["count"],)),
    )


@op(
    name="mesh.to_experts",
    infer=_at_experts,
    results=("rows", "numbers", "counts"),
    opaque=True,
    no_axes="it already works on local parts",
)
def to_experts(x: Any, experts: Any, *, mesh: str, parts: int, count: int) -> Any:
    """The rows of all devices that are routed to the ``count`` experts of this one, their experts, and their counts.

    There is place for all rows; those after the received ones have no expert. Counts are by device and expert.
    """
    raise NotImplementedError("it requires the rows of other devices")


def _back(types: Any, attributes: Any, regions: Any) -> Any:
    y, experts, _ = types
    return (TensorType(y.dtype, (*experts.shape, y.shape[-1])),)


@op(name="mesh.from_experts", infer=_back, opaque=True, no_axes="it already works on local parts")
def from_experts(y: Any, experts: Any, counts: Any, *, mesh: str, parts: int, count: int) -> Any:
    """The results of the rows that ``mesh.to_experts`` has sent, for each active expert of a row."""
    raise NotImplementedError("it requires the rows of other devices")


for _op in (
    to_experts,
    from_experts,
    ring_attention,
    cotangent,
    all_reduce,
    all_gather,
    all_to_all,
    reduce_scatter,
    chunk_sum,
):
    _op.no_vjp("collectives are inserted after differentiation")
