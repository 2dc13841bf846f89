"""Interpretation of exported modules: each node of the FX graph becomes operations of ``mithril.ops``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mithril import ops
from mithril.graph import Builder, Dim, MithrilError, ModelError, Origin, UnsupportedError
from mithril_importing.arrays import as_value
from mithril_importing.layers import Run
from mithril_importing.support import counted, missing_lines
from mithril_torch.importing import (  # noqa: F401  # they enter their rows
    complex_numbers,
    draws,
    elementwise,
    indexing,
    linear_algebra,
    norms,
    products,
    recurrent,
    reductions,
    searching,
    shapes,
    special,
    windows,
)
from mithril_torch.importing.program import ROOT, Exported
from mithril_torch.importing.table import IGNORED, ROWS, Row, call, is_tensor, modules_of, name_of
from mithril_torch.importing.types import ExampleSizes, require_recorded_type

shapes.enter_copies()
CHECKS = (  # assertions of torch.export, without results
    *("_assert_tensor_metadata", "_assert_async.msg", "_assert_scalar", "sym_constrain_range"),
    *("_linalg_check_errors", "sym_constrain_range_for_size", "sym_numel", "sym_stride.int", "sym_storage_offset"),
)
SIZES: dict[Any, Callable[..., Any]] = {  # Python's operators on sizes
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.floordiv: operator.floordiv,
    operator.mod: operator.mod,
    operator.neg: operator.neg,
    operator.truediv: operator.truediv,
    operator.getitem: operator.getitem,
    operator.pow: operator.pow,
    math.floor: math.floor,
    math.ceil: math.ceil,
    math.trunc: math.trunc,
    torch.sym_int: int,
    torch.sym_float: float,
}
GUARDS: tuple[Any, ...] = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.not_, torch.sym_not),
)
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
User = Mapping[str, Callable[..., Any]]  # the user's functions of operators


def require_supported(program: Exported, user: User) -> None:
    """Raise UnsupportedError with all operators without a row, the number of their uses and the first line."""
    missing: dict[str, list[str]] = {}
    for module in program.module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op != "call_function":
                    continue
                ordered = node.target is torch.ops.higher_order.with_effects
                target = node.args[1] if ordered else node.target
                if not has_meaning(target, user) or (ordered and name_of(target) not in CHECKS):
                    missing.setdefault(name_of(target), []).append(str(origin_of(node, "")) or "the module")
    if not missing:
        return
    raise UnsupportedError(
        f"{counted(len(missing), 'operator')} of this module cannot be expressed: {', '.join(sorted(missing))}",
        facts=missing_lines(missing),
        hint="ml.from_torch(..., operators={" + repr(min(missing)) + ": function}) supplies a function of mithril.ops",
    )


def has_meaning(target: Any, user: User) -> bool:
    """Whether an operator can be expressed."""
    if target in SIZES or target in GUARDS or target is torch.ops.higher_order.cond:
        return True
    name = name_of(target)
    return name in ROWS or name in complex_numbers.COMPLEX or name in user or name in CHECKS or name == "sym_size.int"


def origin_of(node: Any, path: str) -> Origin:
    """Return the submodule and the user's line of a node."""
    modules = modules_of(node)
    inner = f"{next(reversed(modules.values()))[0] if modules else ''}.".removeprefix(ROOT).rstrip(".")
    full = ".".join(part for part in (path, inner) if part)
    frames = [f for f in FRAME.findall(node.meta.get("stack_trace") or "") if "/torch/" not in f[0]]
    return Origin(full, frames[-1][0], int(frames[-1][1])) if frames else Origin(full)


class Interpreter(Run):
    """One run over a program; ``layer`` is the root, which supplies random keys."""

    def __init__(self, program: Exported, layer: Any, user: User, values: dict[str, Any]) -> None:
        super().__init__(layer, values)
        self.program, self.layer, self.user = program, layer, user
        self.sizes = ExampleSizes(program.graph, values)
        nodes = [n for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        self.complex_names = {n.name for n in nodes if n.meta["val"].is_complex()}

    def passed(self, name: str) -> Any:
        return complex_numbers.packed(self.values[name])

    def received(self, name: str, value: Any) -> Any:
        return complex_numbers.unpacked(value) if name in self.complex_names else value

    def execute(self, source: Any) -> None:
        self._execute(source, self.value, self.values)

    def value(self, name: str) -> Any:
        """Return a value of the graph; parameters and states are declared where an operation reads them."""
        if name in self.values:
            return self.values[name]
        if name in self.program.params:
            return self.tensor(self.program.params[name])
        if name in self.program.buffers:
            return self.layer.buffer(self.program.buffers[name])
        raise ModelError(
            f"'{name}' of the imported module is not computed: the layer that computed it was replaced",
            hint="replace a layer within or around it",
        )

    def tensor(self, name: str) -> Any:
        """Return a parameter by its name in the module."""
        array = self.layer.arrays[name]
        return self.parameter(name, array.shape, str(array.dtype))

    def _execute(self, node: Any, value: Callable[[str], Any], values: dict[str, Any]) -> None:
        builder = Builder.current()
        operand = complex_numbers.as_operand
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: operand(value(n.name)))
        with builder.at(origin_of(node, self.path), builder.tags):
            values[node.name] = self._checked_call(node, *arguments)

    def _branch(self, module: torch.fx.GraphModule, values: dict[str, Any]) -> None:
        """Run the graph of a branch; ``values`` has those of the placeholders by name, and receives all others."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node.name] = operator.attrgetter(node.target)(module)
            elif node.op == "call_function":
                self._execute(node, values.__getitem__, values)

    def _checked_call(self, node: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a node, which has the type that PyTorch recorded."""
        name = name_of(node.target)
        try:
            result = self._call(node, args, kwargs)
            if node.users and not self.is_changed:
                require_recorded_type(_described(node), result, node.meta.get("val"), self.sizes)
        except MithrilError as error:
            raise error.with_facts(f"in {name} of {origin_of(node, self.path)}") from None
        except Exception as error:
            message = f"{name} is called with arguments that are not supported: {type(error).__name__}: {error}"
            raise UnsupportedError(message, facts=[str(origin_of(node, self.path))]) from error
        return result

    def _call(self, node: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target = node.target
        if target is torch.ops.higher_order.cond:
            return self._cond(*args)
        if target is torch.ops.higher_order.with_effects and name_of(args[1]) in CHECKS:
            return (args[0], None)
        if target in SIZES:
            return _on_sizes(target, node, args)
        if target in GUARDS:
            return None if any(isinstance(a, Dim) or a is None for a in args) else target(*args)
        name = name_of(target)
        if name == "sym_size.int":
            return args[0].shape[args[1]]
        if name in CHECKS:
            return None
        example = node.meta.get("val")
        if name not in self.user and complex_numbers.involves_complex(args, kwargs):
            options = {n: v for n, v in kwargs.items() if n not in IGNORED}
            return complex_numbers.call_complex(
                name, example, args, options, lambda a, k, part: call(ROWS[name], node, a, k, self.layer, part)
            )
        row = Row(self.user[name], "", frozenset()) if name in self.user else ROWS[name]
        return call(row, node, args, kwargs, self.layer, example)

    def _cond(self, predicate: Any, then: Any, otherwise: Any, operands: Any) -> Any:
        """Return the results of the branch that the predicate selects."""

        def branch(module: torch.fx.GraphModule) -> Callable[..., tuple[Any, ...]]:
            def run(*values: Any) -> tuple[Any, ...]:
                names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
                inner = dict(zip(names, values, strict=True))
                self._branch(module, inner)
                results = next(n for n in module.graph.nodes if n.op == "output").args[0]
                return tuple(as_value(inner[r.name]) for r in results)

            return run

        values = [as_value(x) for x in operands]
        return ops.cond(as_value(predicate), branch(then), branch(otherwise), *values)


def _described(node: Any) -> str:
    """Return the name of a node in messages: that of its operator, with the number of one of several results."""
    if node.target is operator.getitem:
        return f"result {node.args[1]} of {name_of(node.args[0].target)}"
    return name_of(node.target)


def _on_sizes(target: Any, node: Any, args: tuple[Any, ...]) -> Any:
    if target is not operator.getitem and any(is_tensor(a) for a in args):
        raise UnsupportedError(f"'{node.name}' computes a size from data", facts=[str(origin_of(node, ""))])
    if target in (torch.sym_int, math.trunc, math.floor, math.ceil) and isinstance(args[0], Dim):
        return args[0]  # sizes are whole
    if target in (torch.sym_float, operator.truediv, operator.pow) and any(isinstance(a, Dim) for a in args):
        raise UnsupportedError(
            f"'{node.name}' computes with a symbolic size as a float",
            facts=[str(origin_of(node, ""))],
            hint="leave this size out of dynamic_shapes",
        )
    return SIZES[target](*args)
