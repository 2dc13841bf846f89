"""Classification of convolutions, their gradients and pools by their axes: which values are images, which kernels."""

from __future__ import annotations

from mithril.graph import Node, OpAxes, Value, axes_of, is_windowed_product
from mithril_parallel.placing.rules import sizes


def computes_image(node: Node) -> bool:
    """Whether a node is a convolution or its gradient with respect to the image: examples stay separate."""
    return is_windowed_product(node) and axes_of(node).rows(0, 0) is not None


def is_kernel_gradient(node: Node) -> bool:
    """Whether a node is a convolution's gradient with respect to the kernel: a product that sums over the examples."""
    return is_windowed_product(node) and axes_of(node).rows(0, 0) is None


def is_image_gradient(node: Node) -> bool:
    """Whether a node is a convolution's gradient with respect to the image, so that windows extend over its result."""
    return computes_image(node) and any(axes_of(node).has_in_result(f) for f in _windows(axes_of(node)))


def is_pool(node: Node) -> bool:
    """Whether a node reads or writes through windows and is not a product: pools and their gradients."""
    return (
        not node.regions and not node.op.elementwise and bool(_windows(axes_of(node))) and not is_windowed_product(node)
    )


def kernel_size(node: Node) -> tuple[int, ...]:
    """Return the spatial sizes of a convolution's kernel."""
    return sizes(node.result if is_kernel_gradient(node) else operand(node, 1))[2:]


def image_size(node: Node) -> tuple[int, ...]:
    """Return the spatial sizes of the image over which the kernel slides."""
    return sizes(node.result if is_image_gradient(node) else operand(node, 0))[2:]


def output_positions(node: Node) -> tuple[int, ...]:
    """Return the number of window positions along each spatial axis: the sizes of the result or of its cotangent."""
    return sizes(operand(node, 1) if is_kernel_gradient(node) else node.result)[2:]


def operand(node: Node, k: int) -> Value:
    """Return an operand that must be present."""
    v = node.operands[k]
    assert v is not None
    return v


def _windows(axes: OpAxes) -> list[str]:
    return [f for f, role in axes.roles.items() if role.kind == "window"]
