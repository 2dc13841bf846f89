"""Native entry points of a program: `run`, and `call`, which reads array addresses itself.

``run(table)`` reads every address from the table. ``call(table, input, ..., result, ...)`` gets the inputs as NumPy
objects and reads their fields: it returns 1 and has no effect unless each is an array in C order with the dtype and
shape of the program. The expected class and dtypes follow the addresses in the table. One call thus replaces a dozen
steps of Python, each of which takes as long as a small kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mithril.graph import Graph
from mithril_cbackend import tir as t
from mithril_cbackend.graph.call_layout import CALL, RUN, Layout
from mithril_cbackend.lowering.element.element_reader import shape_of
from mithril_cbackend.program.numpy_abi import CLASS, DATA, DIMENSIONS, DTYPE, FLAGS, IN_C_ORDER, RANK
from mithril_cbackend.program.program import DRIVE


def entries(graph: Graph, layout: Layout) -> Mapping[str, Any]:
    """Return the entry functions by name; ``call`` only for few arrays, since it takes time for each."""
    table = t.number("table")
    code = t.Code()
    code.call(DRIVE, t.int_to_pointer(table))
    code.leave(0)
    functions = {RUN: t.entry(RUN, [table], code.finish())}
    if layout.callable:
        functions[CALL] = call(graph, layout)
    return functions


def call(graph: Graph, layout: Layout) -> Any:
    shapes = {i.name: shape_of(i.value) for i in graph.arguments}
    address = t.number("table")
    objects = [t.number(f"input{k}") for k in range(len(layout.inputs))]
    results = [t.number(f"result{k}") for k in range(len(layout.results))]
    code = t.Code()
    table = code.view("table", "int64", t.int_to_pointer(address))
    for name, slot in layout.sizes.items():
        code.bind(t.size(name), t.cast(t.load(table, slot), "int32"))
    for k, ((name, slot), x) in enumerate(zip(layout.inputs, objects, strict=True)):
        shape = shapes[name]
        words = code.view("words", "int64", t.int_to_pointer(x))
        return_mismatch(code, word(words, CLASS), t.load(table, layout.slots))
        return_mismatch(code, word(words, DTYPE), t.load(table, layout.slots + 1 + k))
        halves = code.view("halves", "int32", t.int_to_pointer(x))
        return_mismatch(code, t.load(halves, RANK // 4), t.const(len(shape), "int32"))
        flag = t.load(halves, FLAGS // 4) & t.const(IN_C_ORDER, "int32")
        return_mismatch(code, flag, t.const(IN_C_ORDER, "int32"))
        if shape:
            sizes = code.view("sizes", "int64", t.int_to_pointer(word(words, DIMENSIONS)))
            for axis, size in enumerate(shape):
                return_mismatch(code, t.load(sizes, axis), t.const(size, "int64"))
        code.store(table, slot, word(words, DATA))
    for (_, slot, _, _), y in zip(layout.results, results, strict=True):
        code.store(table, slot, y)
    code.call(DRIVE, t.int_to_pointer(address))
    code.leave(0)
    return t.entry(CALL, [address, *objects, *results], code.finish())


def word(words: t.Buffer, offset: int) -> t.Expr:
    return t.load(words, offset // 8)


def return_mismatch(code: t.Code, actual: t.Expr, expected: t.Expr) -> None:
    """Return 1 from the generated function if the two values differ."""
    with code.when(t.not_equal(actual, expected)):
        code.leave(1)
