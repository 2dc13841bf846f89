"""Convolutions, their gradients and pools: which of their values are images and which are kernels, by their axes."""

from __future__ import annotations

from mithril.ir import Node, OpAxes, Value, is_windowed_product
from mithril_parallel.placing.rules import sizes


def computes_image(node: Node) -> bool:
    """Whether a node is a convolution, or the gradient of its image: examples stay separate."""
    return is_windowed_product(node) and node.axes.rows(0, 0) is not None


def is_kernel_gradient(node: Node) -> bool:
    """Whether a node is the gradient of a convolution's kernel: a product that sums over the examples."""
    return is_windowed_product(node) and node.axes.rows(0, 0) is None


def is_image_gradient(node: Node) -> bool:
    """Whether a node is the gradient of a convolution's image: the larger image, through windows, is its result."""
    return computes_image(node) and any(node.axes.gives(f) for f in _windows(node.axes))


def is_pool(node: Node) -> bool:
    """Whether a node reads or writes through windows and is not a product: pools and their gradients."""
    return not node.regions and not node.op.elementwise and bool(_windows(node.axes)) and not is_windowed_product(node)


def kernel_size(node: Node) -> tuple[int, ...]:
    """Return the sizes of a kernel along the axes of images."""
    return sizes(node.result if is_kernel_gradient(node) else operand(node, 1))[2:]


def image_size(node: Node) -> tuple[int, ...]:
    """Return the sizes of the image that kernels move over."""
    return sizes(node.result if is_image_gradient(node) else operand(node, 0))[2:]


def output_positions(node: Node) -> tuple[int, ...]:
    """Return how often a kernel is laid on along each axis: the image of results, or of their cotangents."""
    return sizes(operand(node, 1) if is_kernel_gradient(node) else node.result)[2:]


def operand(node: Node, k: int) -> Value:
    """Return an operand that is there."""
    v = node.operands[k]
    assert v is not None
    return v


def _windows(axes: OpAxes) -> list[str]:
    return [f for f, role in axes.roles.items() if role.kind == "window"]
