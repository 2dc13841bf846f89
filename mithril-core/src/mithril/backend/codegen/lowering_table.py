"""Lowering tables: the Python expression for each operation of a backend."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.shared import HELPERS, Dialect
from mithril.backend.plugin_lowering import PluginLowering
from mithril.graph import BackendError, Dim, DType, Node, Op, OperationError, Registry, int32, operation_name, quoted

When = Callable[[Node], bool]
Function = Callable[[Call], str | None]

PLAIN = Dialect()


@dataclass(frozen=True, slots=True)
class LoweringRule:
    """A rule that lowers an operation, by an expression template or a function of the call."""

    template: str | None
    function: Function | None
    when: When | None = None  # predicate on nodes
    out: str | None = None  # template that writes into {out}
    view: bool = False  # the result may alias an operand
    plugin: PluginLowering | None = None  # lowering of a plugin, instead of template and function
    correction: Callable[..., Any] | None = None  # function in operations, instead of template and function


class Lowerings:
    """A lowering table. Rows for composites are optional: without one, the composite is decomposed.

    ``{x}`` in a template is the operand x, ``{axis}`` the attribute axis, ``{dtype}`` and ``{shape}`` the result's.
    """

    def __init__(
        self,
        name: str,
        imports: Iterable[str],
        *,
        dtype: str = "np.{name}",
        boolean: str = "bool_",
        scalar: str = "np.{name}({value})",
        bfloat16: str | None = None,
        signed: bool = False,
        constant: str = "{array}",
        copy: str | None = None,
        reserved: Iterable[str] = (),
        dialect: Dialect = PLAIN,
        release: bool = False,
        numbers: bool = True,
        module: ModuleType | None = None,
        host: Callable[..., Any] | None = None,
        parent: Lowerings | None = None,
    ) -> None:
        self.name = name
        home = [] if module is None else ["from {0} import {2}".format(*module.__name__.rpartition("."))]
        self.imports = tuple(dict.fromkeys([*imports, *home]))
        self.dtype_template = dtype  # expression of the dtype {name}
        self.boolean = boolean  # the library's name of the dtype bool
        self.scalar_template = scalar  # expression of the scalar {value} of the dtype {name}
        self.bfloat16 = bfloat16  # expression of the dtype bfloat16, if NumPy's extension dtype replaces it
        self.signed = signed  # integer literals are signed: those from 2**63 on are written in two's complement
        self.constant_template = constant  # expression that converts the NumPy array {array}
        self.dialect = dialect  # the dialect of shared helpers
        self.reserved = frozenset((*reserved, *dialect.functions, *HELPERS)) | self._imported()
        self.copy = copy  # expression that copies the array {x}, or None if arrays are immutable
        self.release = release  # delete large values after their last use
        self.numbers = numbers  # whether operands can be plain numbers, which the library promotes to their neighbors
        self.module = module  # the generated file imports it, and calls its functions there
        self.host = host  # helper ``(function, types, *arrays)`` that calls a function of NumPy arrays
        rows = parent._rows if parent is not None else {}
        self._is_copied = False
        self._rows: Registry[tuple[LoweringRule, ...]] = Registry(f"lowering to {name}", rows)

    # -- writing rows ------------------------------------------------------------------------------------------------
    def row(
        self, op: Op | str, template: str, *, when: When | None = None, out: str | None = None, view: bool = False
    ) -> None:
        """Lower ``op`` by an expression template."""
        self._add(op, LoweringRule(template, None, when, out, view))

    def rows(
        self, templates: Mapping[Op | str, str] | Mapping[str, str], *, when: When | None = None, view: bool = False
    ) -> None:
        """Lower several operations by expression templates."""
        for op, template in templates.items():
            self.row(op, template, when=when, view=view)

    def function(self, *ops: Op | str, when: When | None = None, view: bool = False) -> Callable[[Function], Function]:
        """Lower ``ops`` by the decorated function of the call, which returns an expression or emits lines."""

        def add(function: Function) -> Function:
            for op in ops:
                self._add(op, LoweringRule(None, function, when, None, view))
            return function

        return add

    def helper(
        self,
        function: Callable[..., Any],
        *,
        op: Op | str | None = None,
        when: When | None = None,
        view: bool = False,
    ) -> None:
        """Lower ``op``, by default the operation of the function's name (of ``abs_``: abs), by a call of the function.

        The names of its parameters select the operands and attributes to pass. The generated file contains the source
        of the function, unless it is one of the table's ``module``.
        """
        function = self.dialect.version(function)
        parameters = [p.name for p in signature(function).parameters.values() if p.default is p.empty]

        def call_it(call: Call) -> str:
            return f"{call.helper(function)}({', '.join(call.argument(n) for n in parameters)})"

        self.function(op or function.__name__.removesuffix("_"), when=when, view=view)(call_it)

    def helpers(self, *functions: Callable[..., Any], when: When | None = None, view: bool = False) -> None:
        """Lower several operations by functions of the same names."""
        for function in functions:
            self.helper(function, when=when, view=view)

    def correct(self, *functions: Callable[..., Any], when: When | None = None) -> None:
        """Lower the operations of these names by functions of values, in terms of operations.

        In such a function, the operation of its name means the rows that the table has without it.
        """
        for function in functions:
            row = LoweringRule(None, None, when, view=True, correction=function)  # which may return its argument
            self._add(function.__name__.removesuffix("_"), row)

    def _add(self, op: Op | str, row: LoweringRule) -> None:
        """Add a row. Those with a condition and corrections are tried first, the latest first; others replace them."""
        op = operation_name(op)
        if self._is_copied:
            raise BackendError(
                f"a row for '{op}' is added to the lowerings to {self.name} after extend() copied them",
                hint="import the module of the row before the module that extends the table",
            )
        existing = self._rows.get(op, ())
        if row.when is not None or row.correction is not None:
            self._rows[op] = (row, *existing)
        else:
            self._rows[op] = (*(r for r in existing if r.when is not None), row)

    def extend(self, lowerings: Mapping[str, Sequence[PluginLowering]] = MappingProxyType({})) -> Lowerings:
        """Return a copy extended by lowerings of plugins, which take precedence."""
        self._is_copied = True
        table = Lowerings(
            self.name,
            self.imports,
            copy=self.copy,
            dtype=self.dtype_template,
            boolean=self.boolean,
            scalar=self.scalar_template,
            bfloat16=self.bfloat16,
            signed=self.signed,
            constant=self.constant_template,
            reserved=self.reserved,
            dialect=self.dialect,
            release=self.release,
            numbers=self.numbers,
            module=self.module,
            host=self.host,
            parent=self,
        )
        for op, offers in lowerings.items():
            # a kernel may return its argument, so its result counts as a view
            rows = [LoweringRule(None, None, when=offer.applies, view=True, plugin=offer) for offer in offers]
            table._rows[op] = (*rows, *table._rows.get(op, ()))
        return table

    def _imported(self) -> frozenset[str]:
        return frozenset(word for line in self.imports for word in line.replace(",", " ").split())

    # -- reading -----------------------------------------------------------------------------------------------------
    def find(self, node: Node, without: Collection[LoweringRule] = ()) -> LoweringRule | None:
        """Return the row that lowers a node, or None; ``without`` are corrections that use it."""
        for row in self._rows.get(node.op.name, ()):
            if row not in without and (row.when is None or row.when(node)):
                return row
        return None

    def lowers(self, node: Node) -> bool:
        return self.find(node) is not None or node.is_constant

    def falls_back(self, node: Node) -> bool:
        """Whether a node without a lowering runs as its NumPy reference."""
        op = node.op
        is_plain = not op.composite and not node.regions and op.infer_rule is None
        return self.host is not None and is_plain and self.find(node) is None and not node.is_constant

    @property
    def ops(self) -> frozenset[str]:
        return frozenset(self._rows)

    # -- text of values ----------------------------------------------------------------------------------------------
    def _name(self, dtype: DType) -> str:
        return self.boolean if dtype.is_bool else dtype.name

    def dtype_text(self, dtype: DType) -> str:
        if dtype.name == "bfloat16" and self.bfloat16 is not None:
            return self.bfloat16
        return self.dtype_template.format(name=self._name(dtype))

    def literal(
        self,
        value: Any,
        dtype_text: Callable[[DType], str] | None = None,
        sizes: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return an attribute as Python text; ``sizes`` maps symbols to names in the text."""
        text = dtype_text or self.dtype_text
        if isinstance(value, DType):
            return text(value)
        if isinstance(value, (tuple, list)):
            parts = [self.literal(v, dtype_text, sizes) for v in value]
            return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, Dim):
            return size_text(value, sizes)
        if self.signed and isinstance(value, int) and value >= 1 << 63:
            value -= 1 << 64
        if isinstance(value, str):
            return quoted(value)
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        raise OperationError(f"an attribute of the type {type(value).__name__} cannot be written as source")

    def is_weak(self, number: Any, dtype: DType) -> bool:
        """Whether a plain Python number combined with an array of this dtype is exact and preserves the dtype."""
        if not self.numbers:
            return False
        if dtype.is_integer and isinstance(number, int):
            return number == int32.limits[0] or abs(number) <= int32.limits[1]
        return dtype.name != "bfloat16" or self.bfloat16 is None

    def scalar_text(self, value: Any, dtype: DType) -> str:
        """Return a typed scalar as source text."""
        if dtype.name == "bfloat16" and self.bfloat16 is not None:
            return f"{self.bfloat16}({self.literal(value)})"
        return self.scalar_template.format(name=self._name(dtype), value=self.literal(value))


def size_text(size: Dim, names: Mapping[str, str]) -> str:
    """Return the source text of a symbolic size; ``max`` and ``min`` are functions only if called, else symbols."""
    return re.sub(r"[^\W\d]\w*(?!\w|\()", lambda word: names.get(word[0], word[0]), str(size))


class ArrayKernel(Protocol):
    """A kernel: parameters are named like operands and attributes; returns an array, or a tuple of all results."""

    def __call__(self, *arguments: Any, **attributes: Any) -> Any: ...


class TextWriter(Protocol):
    """A writer of Python: returns an expression, or None after writing lines that assign to ``call.results``."""

    def __call__(self, call: Call) -> str | None: ...


class Condition(Protocol):
    """A predicate of the node, for ``Lowering(when=)``."""

    def __call__(self, node: Node, /) -> bool: ...
