"""Nodes without a kernel of this backend: plugin kernels, and reference functions called back in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mithril.backend import PluginLowering, applicable, lowering_error_context, plugin_lowerings
from mithril.graph import Node


def plugin_lowering(node: Node) -> PluginLowering | None:
    """Return the lowering that a plugin provides for a node."""
    return applicable(plugin_lowerings("c"), node)


def is_primitive(node: Node) -> bool:
    """Whether the reference of a node computes on arrays: it is not composite and has no regions."""
    op = node.op
    return not op.composite and not node.regions and op.infer_rule is None


def plugin_template(node: Node) -> Callable[..., Any] | None:
    """Return the plugin's function that writes the kernel of a node, ``(kernel, name, machine) -> Function``."""
    lowering = plugin_lowering(node)
    if lowering is None or not lowering.is_writer("kernel"):
        return None
    target, label = lowering.target, lowering.label(node)

    def template(kernel: Any, name: str, machine: Any) -> Any:
        with lowering_error_context(label):
            return target(kernel, name, machine)

    template.__name__ = f"{node.op.name} of {lowering.origin}"
    return template
