"""Equivalent variants of an operation. Which is fastest depends on the backend, the sizes and the machine.

Variants that are always faster on a backend are listed in ``Capabilities.prefers``; the others are measured on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from mithril import Node, Value, ops
from mithril.backend import Form
from mithril.graph import is_static
from mithril.ops import ACTIVATIONS, add, dot, linear, matmul, mul, pad, reshape, stack, sum as total, transpose

NARROW = 4  # elements up to which a sum is unrolled into products
TAPS = 32  # of a depthwise kernel: above, a convolution is faster than a sum of shifted images


@dataclass(frozen=True)
class Variant:
    """A variant of an operation: ``make(node, *operands)`` builds it if ``applies(node)``."""

    name: Form
    applies: Callable[[Node], bool]
    make: Callable[..., Any]


WAYS: dict[str, list[Variant]] = {}  # by operation


def variant(name: Form, *ops: str, when: Callable[[Node], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function as another variant of ``ops``."""

    def add_it(make: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            WAYS.setdefault(op, []).append(Variant(name, when, make))
        return make

    return add_it


def variants_of(node: Node) -> list[Variant]:
    """Return the variants that apply to a node."""
    return [w for w in WAYS.get(node.op.name, ()) if w.applies(node)]


def _shape(node: Node, k: int) -> tuple[Any, ...]:
    operand = node.operands[k]
    assert operand is not None
    return tuple(operand.shape)


def _keeps_precision(node: Node) -> bool:
    """Whether unrolled sums keep the precision: in 16 bits each term would be rounded."""
    return bool(node.result.dtype.is_float and node.result.dtype.bits >= 32)


# -- products -----------------------------------------------------------------------------------------------------
def _finished(node: Node, y: Value, b: Value | None) -> Any:
    """Apply the bias and the activation of a ``linear``."""
    y = y if b is None else add(y, b)
    return ACTIVATIONS[node.attributes["activation"]](y)


@variant(Form.MATVEC, "linear", when=lambda node: math.prod(_shape(node, 0)[:-1]) == 1)
def _matvec(node: Node, x: Value, w: Value, b: Value | None) -> Any:
    """Multiply one row: a matrix-vector product."""
    y = _finished(node, matmul(w, reshape(x, shape=(w.shape[1],))), b)
    return reshape(y, shape=node.result.shape)


@variant(Form.TRANSPOSED_WEIGHT, "linear", when=lambda node: True)
def _product(node: Node, x: Value, w: Value, b: Value | None) -> Any:
    return _finished(node, matmul(x, transpose(w, perm=(1, 0))), b)


@variant(Form.FLAT_LINEAR, "linear", when=lambda node: len(_shape(node, 0)) > 2)
def _as_one_matrix(node: Node, x: Value, w: Value, b: Value | None) -> Any:
    """Multiply all rows as one matrix."""
    rows = reshape(x, shape=(math.prod(x.shape[:-1]), x.shape[-1]))
    return reshape(linear(rows, w, b, **node.attributes), shape=node.result.shape)


def _narrow(node: Node) -> bool:
    a, b = _shape(node, 0), _shape(node, 1)
    return len(a) >= 2 and len(b) >= 2 and is_static(a[-1:]) and a[-1] <= NARROW and _keeps_precision(node)


@variant(Form.OUTER_PRODUCTS, "matmul", when=_narrow)
def _outer(node: Node, a: Value, b: Value) -> Any:
    return _sum(mul(a[..., k : k + 1], b[..., k : k + 1, :]) for k in range(a.shape[-1]))


def _sum(terms: Iterator[Value]) -> Any:
    total = next(terms)
    for term in terms:
        total = add(total, term)
    return total


# -- composites ---------------------------------------------------------------------------------------------------
@variant(
    Form.WRITTEN_OUT, "attention", "softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", when=lambda node: True
)
def _written_out(node: Node, *operands: Value | None) -> Any:
    """Decompose a composite, so that the backend can fuse its parts."""
    composite: Any = node.op
    return composite.reference(*operands, **node.attributes)


# -- convolutions of one pixel --------------------------------------------------------------------------------------
def _pointwise(node: Node) -> bool:
    w = node.attributes["shape"] if node.op is ops.conv_weight_grad else _shape(node, 1)
    a = node.attributes
    return a["groups"] == 1 and all(k == 1 for k in w[2:]) and not any(map(any, a["padding"]))


def _unstrided(node: Node) -> bool:
    return _pointwise(node) and all(s == 1 for s in node.attributes["stride"])


def _columns(x: Value) -> Any:
    return reshape(x, shape=(x.shape[0], x.shape[1], math.prod(x.shape[2:])))


@variant(Form.POINTWISE_MATMUL, "conv", when=_pointwise)
def _by_matmul(node: Node, x: Value, w: Value) -> Any:
    stride = node.attributes["stride"]
    if any(s != 1 for s in stride):
        # A kernel of one pixel reads only the pixels that the stride keeps.
        x = x[(slice(None), slice(None), *(slice(None, None, s) for s in stride))]
    y = matmul(reshape(w, shape=w.shape[:2]), _columns(x))
    return reshape(y, shape=node.result.shape)


@variant(Form.POINTWISE_MATMUL, "conv_input_grad", when=_unstrided)
def _input_by_matmul(node: Node, g: Value, w: Value) -> Any:
    y = matmul(transpose(reshape(w, shape=w.shape[:2]), perm=(1, 0)), _columns(g))
    return reshape(y, shape=node.result.shape)


@variant(Form.POINTWISE_MATMUL, "conv_weight_grad", when=_unstrided)
def _weight_by_matmul(node: Node, x: Value, g: Value) -> Any:
    return reshape(dot(_columns(g), _columns(x), contract_a=(0, 2), contract_b=(0, 2)), shape=node.result.shape)


# -- convolutions of each channel on its own --------------------------------------------------------------------------
def _depthwise(node: Node) -> bool:
    a = node.attributes
    x = a["shape"] if node.op is ops.conv_input_grad else _shape(node, 0)
    w = a["shape"] if node.op is ops.conv_weight_grad else _shape(node, 1)
    is_known = is_static((*x[1:], *w, *node.result.shape[2:]))
    return (
        is_known and w[1] == 1 and x[1] == w[0] == a["groups"] and math.prod(w[2:]) <= TAPS and _keeps_precision(node)
    )


def _depthwise_unstrided(node: Node) -> bool:
    if not _depthwise(node):
        return False
    a, kernel = node.attributes, _shape(node, 1)[2:]
    reach = [(k - 1) * d for k, d in zip(kernel, a["dilation"], strict=True)]
    in_bounds = all(p <= r for pair, r in zip(a["padding"], reach, strict=True) for p in pair)
    return in_bounds and all(s == 1 for s in a["stride"])


def _padded(x: Value, padding: Any) -> Any:
    return pad(x, widths=((0, 0), (0, 0), *padding)) if any(map(any, padding)) else x


def _window(x: Value, place: Any, counts: Any, stride: Any, dilation: Any) -> Any:
    """Return the pixels of a padded image that an element of the kernel is multiplied with."""
    steps = zip(place, counts, stride, dilation, strict=True)
    return x[(slice(None), slice(None), *(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in steps))]


def _tap(w: Value, place: Any) -> Any:
    """Return one element of each channel's kernel, shaped to multiply images."""
    return reshape(w[(slice(None), 0, *place)], shape=(1, w.shape[0], *[1] * len(place)))


@variant(Form.DEPTHWISE_SHIFTS, "conv", when=_depthwise)
def _by_shifts(node: Node, x: Value, w: Value) -> Any:
    """Sum shifted images, each multiplied by one element of the kernels."""
    a, counts = node.attributes, node.result.shape[2:]
    image = _padded(x, a["padding"])
    return _sum(
        mul(_window(image, place, counts, a["stride"], a["dilation"]), _tap(w, place))
        for place in product(*map(range, w.shape[2:]))
    )


@variant(Form.DEPTHWISE_SHIFTS, "conv_input_grad", when=_depthwise_unstrided)
def _input_by_shifts(node: Node, g: Value, w: Value) -> Any:
    a, kernel, counts = node.attributes, w.shape[2:], node.result.shape[2:]
    reach = [(k - 1) * d for k, d in zip(kernel, a["dilation"], strict=True)]
    image = _padded(g, [(r - before, r - after) for r, (before, after) in zip(reach, a["padding"], strict=True)])
    ones = (1,) * len(kernel)

    def mirrored(place: Any) -> Any:
        return [k - 1 - p for k, p in zip(kernel, place, strict=True)]

    return _sum(
        mul(_window(image, mirrored(place), counts, ones, a["dilation"]), _tap(w, place))
        for place in product(*map(range, kernel))
    )


@variant(Form.DEPTHWISE_SHIFTS, "conv_weight_grad", when=_depthwise)
def _weight_by_shifts(node: Node, x: Value, g: Value) -> Any:
    a, shape = node.attributes, node.result.shape
    image, axes = _padded(x, a["padding"]), (0, *range(2, len(shape)))
    taps = [
        total(mul(_window(image, place, g.shape[2:], a["stride"], a["dilation"]), g), axis=axes)
        for place in product(*map(range, shape[2:]))
    ]
    return reshape(stack(*taps, axis=1), shape=shape)


def is_measurable(node: Node) -> bool:
    """Whether sizes are static, and the node has no regions and one result."""
    values = [v for v in (*node.operands, *node.results) if v is not None]
    return not node.regions and len(node.results) == 1 and all(is_static(v.shape) for v in values)
