"""The operations of an exported program, nested by the modules that ran them."""

from __future__ import annotations

from typing import Any

import torch

from mithril_importing.regions import Operation, Param, Read, Region, Scope, nested
from mithril_torch.importing.program import ROOT, Exported
from mithril_torch.importing.table import modules_of, name_of


def region_of(program: Exported) -> Region:
    """Return the operations of a program, nested by the modules that ran them."""
    operations: list[Operation] = []
    scopes: tuple[Scope, ...] = ()
    computed = set(program.inputs)
    for node in program.graph.nodes:
        if node.op == "call_function":
            # nodes that torch.export adds have no modules: sizes and assertions, which the operations around them need
            scopes = _scopes(node) if modules_of(node) else scopes
            results = (node.name,) if _is_tensor(node) else ()
            computed.update(results)
            reads = tuple(n.name for n in node.all_input_nodes if n.name in computed)
            kind = name_of(node.target)
            operations.append(Operation(node, scopes, reads, results, kind, _operands(node, program)))
    return nested(operations, [r.name for r in program.results if hasattr(r, "name")])


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _operands(node: Any, program: Exported) -> tuple[Any, ...]:
    def operand(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            return Param(program.params[x.name]) if x.name in program.params else Read(x.name)
        return tuple(x) if isinstance(x, list) else x

    return (*(operand(x) for x in node.args), *node.kwargs.items())


def _scopes(node: Any) -> tuple[Scope, ...]:
    """Return the modules around a node, below the root, as far as each is a part of the one before."""
    scopes: list[Scope] = []
    for call, (path, *_) in modules_of(node).items():
        path = path.removeprefix(ROOT)
        if f"{path}." == ROOT or not path:
            continue
        if scopes and not path.startswith(f"{scopes[-1].path}."):
            break
        scopes.append(Scope(path, call))
    return tuple(scopes)
