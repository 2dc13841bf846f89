"""Gradients that a module declares: ``detach`` and ``no_grad`` as an operator, and autograd functions of the user.

Decompositions of ``torch.export`` drop all three, since its graphs are for inference (PyTorch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_library = torch.library.Library("mithril", "FRAGMENT")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", torch.empty_like, "Meta")
_library.impl("stop_gradient", torch.clone, "CPU")
STOP = torch.ops.mithril.stop_gradient.default


def mark_stopped(program: Any) -> None:
    """Enter operators for ``detach`` and for the operands of ``no_grad`` in a program without decompositions."""
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.detach.default and _is_float(node) and not _is_changed(node):
                node.target = STOP
            elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
                _stop_operands(getattr(module, node.args[1].target))
        module.recompile()


def _stop_operands(block: torch.fx.GraphModule) -> None:
    operands = block.graph.find_nodes(op="placeholder")
    for operand in operands:
        # A block writes results to its buffers, which depend on stopped operands only.
        if _is_float(operand) and not _is_changed(operand):
            with block.graph.inserting_after(operands[-1]):
                stopped = block.graph.call_function(STOP, (operand,))
            stopped.meta = dict(operand.meta)
            operand.replace_all_uses_with(stopped, delete_user_cb=lambda user, stopped=stopped: user is not stopped)
    block.recompile()


def _is_float(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _is_changed(node: Any) -> bool:
    """Whether an operator writes to a tensor or to a view of it: those of a copy would be lost."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and (
            schema.is_mutable or (any(r.alias_info for r in schema.returns) and _is_changed(user))
        ):
            return True
    return False


@contextmanager
def user_functions() -> Iterator[dict[Any, None]]:
    """Within this context the dictionary receives the user's autograd functions that run."""
    classes: dict[Any, None] = {}
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "mithril_torch.")):
            classes[cls] = None
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield classes
    finally:
        torch.autograd.Function.apply = original
