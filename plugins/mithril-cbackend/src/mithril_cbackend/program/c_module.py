"""C files of a program: the kernels, the struct of the addresses that they read, and the function that calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mithril.graph import attributes_text, dtype as as_dtype
from mithril_cbackend import tir as t
from mithril_cbackend.c_names import LIBM, identifier
from mithril_cbackend.graph.call_layout import ARENA
from mithril_cbackend.lowering.element.element_reader import is_uniform
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.program.c_printer import (
    ALIASING,
    ATOM,
    ELEMENTS,
    HELPERS,
    HOSTED,
    INCLUDES,
    SUM,
    TWO_OPERANDS,
    TYPES,
    Printer,
)
from mithril_cbackend.program.c_text import c_visible
from mithril_cbackend.program.program import Program
from mithril_cbackend.tir.expr import kind_of
from mithril_cbackend.tir.tvm_api import nodes as n

ARGUMENTS = {**TYPES, "bool": "uint8_t", "bfloat16": "uint16_t"}  # dtype -> element type of an argument
STRUCT = "struct arrays"  # the type of the struct where the program's interface does not define one
_ELEMENT = {ELEMENTS[dtype]: name for dtype, name in TYPES.items()}  # element type of kernels -> of arguments


@dataclass(frozen=True)
class Field:
    """A word of the struct: an address of elements, const if the program only reads them, or a symbolic size."""

    name: str
    element: str
    is_address: bool = True

    @property
    def declaration(self) -> str:
        return f"{self.element} {'*' * self.is_address}{self.name};"


def fields(program: Program) -> dict[int, Field]:
    """Return the fields by slot of the address table; counters of loops have none."""
    roles = {i.name: i.role for i in program.graph.arguments}
    result = {ARENA: Field("arena", "unsigned char")}
    used = {"arena"}

    def add(slot: int, name: str, element: str, is_address: bool = True) -> None:
        while name in used:
            name += "_"
        used.add(name)
        result[slot] = Field(name, element, is_address)

    for name, slot in program.arguments.items():
        argument = program.graph.input(name)
        const = "" if argument.tags.get("donated") else "const "
        add(slot, f"{roles[name]}_{identifier(name)}", const + ARGUMENTS[argument.type.dtype.name])
    for (name, slot), value in zip(program.results, program.graph.outputs, strict=True):
        add(slot, f"result_{identifier(name)}", ARGUMENTS[value.dtype.name])
    for k, (slot, array) in enumerate(program.constants.items()):
        add(slot, f"constant_{k}", f"const {ARGUMENTS[as_dtype(array.dtype).name]}")
    for k, (packed, slot) in enumerate(program.packed.items()):
        add(slot, f"packed_{k}_{identifier(packed.parameter)}", "const void")
    for name, slot in program.sizes.items():
        add(slot, f"size_{identifier(name)}", "int64_t", is_address=False)
    for value, slot in program.places.items():
        add(slot, f"buffer_{identifier(value.name)}", ARGUMENTS[value.dtype.name])
    return result


class DriverPrinter(Printer):
    """Printer of the driver, which passes the addresses of a struct to kernels with these parameters."""

    def __init__(self, program: Program, lanes: int, kernels: dict[str, list[str | None]]) -> None:
        super().__init__(t.Function(program.driver, frozenset(), 0), lanes)
        self.fields = fields(program)
        self.kernels = kernels
        self.counters = set[str]()

    def text(self, name: str) -> str:
        self.statement(self.function.primfunc.body)
        counters = "".join(f"  int64_t {c} = 0;\n" for c in sorted(self.counters))
        body = self.body() or "  (void)self;"
        return f"static void run(const {name} *self) {{\n{counters}{body}\n}}\n"

    def slot(self, x: Any) -> int | None:
        """Return the slot that an expression reads, or None if it reads none."""
        is_slot = isinstance(x, n.Load) and x.source.name == "table" and isinstance(x.indices[0], n.IntImm)
        return int(x.indices[0].value) if is_slot else None

    def counter(self, slot: int) -> str:
        name = f"trip_{slot}"
        self.counters.add(name)
        return name

    def store(self, s: Any) -> None:
        if s.buffer.name == "table":
            self.line(f"{self.counter(int(s.indices[0].value))} = {self.expr(s.value)};")
        else:
            super().store(s)

    def term(self, x: Any) -> tuple[str, int]:
        slot = self.slot(x)
        if slot is None:
            return super().term(x)
        field = self.fields.get(slot)
        if field is None:
            return self.counter(slot), ATOM
        return f"{'(int64_t)(intptr_t)' * field.is_address}self->{field.name}", ATOM

    def call(self, x: Any) -> tuple[str, int]:
        function = str(x.args[0].value) if str(x.op.name).endswith(("call_extern", "call_pure_extern")) else ""
        arguments = list(x.args)[1:]
        if function == "memcpy":
            target, source = (self.pointer(a, "") for a in arguments[:2])
            return f"memcpy({target}, {source}, {int(arguments[2].value)})", ATOM
        if function in self.kernels:
            rows = zip(arguments, self.kernels[function], strict=True)
            texts = [self.pointer(a, p.partition("*")[0].strip()) for a, p in rows if p is not None]
            return f"{function}({', '.join(texts)})", ATOM
        return super().call(x)

    def reinterpreted(self, x: Any) -> str:
        return self.pointer(x, "const void")

    def pointer(self, x: Any, element_type: str) -> str:
        """Return an address of the struct, moved by bytes, as a pointer to elements of a type (any if empty)."""
        if kind_of(x) != "handle":  # a symbolic size
            return self.expr(x)
        address = x.args[0]
        base, offset = (address.a, address.b) if isinstance(address, n.Add) else (address, None)
        slot = self.slot(base)
        if slot is None or slot not in self.fields:
            return super().reinterpreted(x)
        field = self.fields[slot]
        const = "const " if field.element.startswith("const ") else ""
        text = f"self->{field.name}"
        if offset is not None:
            bytes_ = text if slot == ARENA else f"({const}unsigned char *){text}"
            shift = str(int(offset.value)) if isinstance(offset, n.IntImm) else self.expr(offset, SUM)
            text = f"{bytes_} + {shift}"
        element = element_type.removeprefix("const ")
        if not element or (offset is None and _ELEMENT.get(element) == field.element.removeprefix("const ")):
            return text
        return f"({element_type} *){f'({text})' if offset is not None else text}"


def comment(kernel: Kernel) -> str:
    """Return a comment that lists a kernel's operations and the layer that first used it."""
    rows = []
    for node in kernel.nodes:
        if is_uniform(node):
            continue
        names = ", ".join("_" if v is None else v.name for v in node.operands)
        attributes = attributes_text(node.attributes, {})
        results = ", ".join(f"{v.name}: {v.type}" for v in node.results)
        rows.append(f"{results} = {node.op.name}({', '.join(filter(None, [names, attributes]))})")
    if kernel.anchor.origin.path:
        rows.append(f"of layer {kernel.anchor.origin.path}")
    return "/* " + "\n   ".join(map(c_visible, rows)) + " */\n"


def body_text(program: Program, lanes: int, struct: str = STRUCT) -> str:
    """Return all kernels, and the driver as a function of the struct of addresses."""
    pieces = {name: piece for f in program.functions.values() for name, piece in f.pieces.items()}
    parts, arguments = [piece.c for piece in pieces.values()], {}
    for name, function in program.functions.items():
        kernel, printer = program.kernels.get(name), Printer(function, lanes)
        above = comment(kernel) if kernel is not None else ""
        parts.append(above + printer.text(name))
        arguments[name] = printer.arguments
    parts.append(DriverPrinter(program, lanes, arguments).text(struct))
    return "\n".join(parts)


def struct_text(program: Program) -> str:
    """Return the declarations of the struct's fields."""
    listed = fields(program)
    return "".join(f"  {listed[slot].declaration}\n" for slot in sorted(listed))


def prelude(body: str, lanes: int) -> str:
    """Return the beginning of a file: includes, and the helpers that its body uses."""
    used = [text for word, text in HELPERS.items() if re.search(rf"\b{word}\b", body)]
    called = sorted(set(re.findall(rf"\b(?:{'|'.join(LIBM)})f?(?=\()", body)))
    prototypes = "".join(f"{prototype(name)};\n" for name in called)
    return "\n".join([INCLUDES, HOSTED.replace("FUNCTIONS", prototypes), ALIASING, *used]).replace("LANES", str(lanes))


def prototype(name: str) -> str:
    """Return the declaration of a function of the C library's mathematics."""
    plain = name if name in LIBM else name.removesuffix("f")
    element = "double" if plain == name else "float"
    return f"{element} {name}({', '.join([element] * (1 + (plain in TWO_OPERANDS)))})"


def module_text(program: Program, lanes: int) -> str:
    """Return a complete C file."""
    body = body_text(program, lanes)
    return f"{prelude(body, lanes)}\n{STRUCT} {{\n{struct_text(program)}}};\n\n{body}"
