"""Control flow as Python statements, for libraries with eager execution."""

from __future__ import annotations

from collections.abc import Callable

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.lowering_table import Lowerings
from mithril.graph import TensorType


def python_control(table: Lowerings, stack: str, empty: str, row: str = "{x}[{step}]", truth: str = "{x}") -> None:
    """Add rows for ``if``, ``while`` and ``scan``.

    ``stack`` is a template that stacks the list ``{rows}``; ``empty`` is its result for an empty list, with ``{shape}``
    and ``{dtype}``; ``row`` is the element ``{step}`` of the sequence ``{x}``, and
    ``truth`` the condition ``{x}`` as Python reads it.
    """
    table.function("if", view=True)(_if(truth))
    table.function("while", view=True)(_while(truth))
    table.function("scan", view=True)(_scan(stack, empty, row))


def _assigned(names: list[str]) -> str:
    return f"({', '.join(names)},)"


def _if(truth: str) -> Callable[[Call], None]:
    def lower(call: Call) -> None:
        then, other = (call.region(k, call.values[1:]) for k in (0, 1))
        arguments = ", ".join(str(o) for o in call.operands[1:])
        condition = truth.replace("{x}", str(call.operands[0]))
        call.line(f"{_assigned(call.results)} = {then}({arguments}) if {condition} else {other}({arguments})")

    return lower


def _while(truth: str) -> Callable[[Call], None]:
    def lower(call: Call) -> None:
        test, step = call.region(0), call.region(1)
        states, rest = call.operands[: call.states], [str(o) for o in call.operands[call.states :]]
        names = call.results
        arguments = ", ".join([*names, *rest])
        condition = truth.replace("{x}", f"{test}({arguments})[0]")
        call.line(f"{_assigned(names)} = {_assigned([str(s) for s in states])}")
        if call.max_trips is None:
            call.line(f"while {condition}:")
        else:
            call.line(f"for {call.temp('trip')} in range({call.max_trips}):")
            call.line(f"    if not {condition}:")
            call.line("        break")
        call.line(f"    {_assigned(names)} = {step}({arguments})")

    return lower


def _scan(stack: str, empty: str, row: str) -> Callable[[Call], None]:
    def lower(call: Call) -> None:
        body = call.region(0)
        n, m = call.carries, call.sequences
        carries, stacked = call.results[:n], call.results[n:]
        sequences, rest = call.operands[n : n + m], [str(o) for o in call.operands[n + m :]]
        if n:
            call.line(f"{_assigned(carries)} = {_assigned([str(o) for o in call.operands[:n]])}")
        rows = [call.temp(f"{name}_rows") for name in stacked]
        elements = [call.temp(f"{name}_row") for name in stacked]
        for name in rows:
            call.line(f"{name} = []")
        step, length = call.temp("step"), call.literal(call.length)
        call.line(f"for {step} in {f'reversed(range({length}))' if call.reverse else f'range({length})'}:")
        elements_read = [row.replace("{x}", str(s)).replace("{step}", step) for s in sequences]
        arguments = ", ".join([*carries, *elements_read, *rest])
        call.line(f"    {_assigned([*carries, *elements])} = {body}({arguments})")
        for name, element in zip(rows, elements, strict=True):
            call.line(f"    {name}.append({element})")
        for name, result, value in zip(rows, stacked, call.node.results[n:], strict=True):
            if call.reverse:
                call.line(f"{name}.reverse()")
            stacked_rows = stack.replace("{rows}", name)
            call.line(f"{result} = {stacked_rows} if {name} else {_empty(empty, call, value.type)}")

    return lower


def _empty(template: str, call: Call, t: TensorType) -> str:
    return template.replace("{shape}", call.shape(t)).replace("{dtype}", call.dtype(t.dtype))
