"""Emitter of Python modules from graphs: one line per operation, with its layer as a comment."""

from __future__ import annotations

import base64
import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from string import Formatter
from typing import Any, cast

import numpy as np

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.host_rows import CALLED, plugin_expression, reference_expression
from mithril.backend.codegen.lowering_table import LoweringRule, Lowerings
from mithril.backend.codegen.source import CLOSING, SIGNATURE
from mithril.graph import (
    Dim,
    Graph,
    Node,
    Symbol,
    UnsupportedError,
    Value,
    dtype as as_dtype,
    quoted,
    symbols,
    trace,
    types_of,
    visible,
)
from mithril.ops import if_op

_BAD = re.compile(r"[^0-9A-Za-z_]+")
RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"params", "inputs", "outputs", "forward"}


class NameAllocator:
    """An allocator of unique identifiers."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.used = set(RESERVED) | set(reserved)
        self.allocated: set[str] = set()

    def fresh(self, wish: str) -> str:
        """Return an unused identifier similar to ``wish``."""
        stem = _BAD.sub("_", wish).strip("_") or "v"
        if stem[0].isdigit():
            stem = "v" + stem
        name, n = stem, 1
        while name in self.used:
            name, n = f"{stem}_{n}", n + 1
        self.used.add(name)
        self.allocated.add(name)
        return name


ROLES = ("param", "input")  # those that the name of a dictionary shows
FALLBACK = LoweringRule(None, None, view=True)  # the NumPy reference; it may return its argument
UNKNOWN = 64  # assumed value of a symbolic size in estimates
FILE_BYTES = 1 << 14  # constants of at least this size are stored in an array file, not in the text
RELEASE_ELEMENTS = 1 << 10  # values of at least this size are deleted after their last use, if the table says so


def emit(graph: Graph, table: Lowerings, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return the parts of the module for ``render``; ``plugins`` are the parts of plugins that took part."""
    module = Module(table)
    writer = FunctionEmitter(graph, table, module)
    body = writer.function()
    return {
        "backend": table.name,
        "graph": graph,
        "plugins": plugins,
        "imports": [*module.imports, *(["import base64", "import numpy"] if module.constants else [])],
        "helpers": list(module.helpers.values()),
        "constants": [f"{name} = {text}" for name, text in module.constants.items()],
        "arrays": module.arrays,
        "signature": SIGNATURE,
        "body": body,
        "closing": CLOSING,
    }


def render(parts: dict[str, Any]) -> str:
    """Return the text of the module."""
    graph: Graph = parts["graph"]
    body = "\n".join([*parts["body"], *parts["constants"]])
    extra = ["import ml_dtypes"] if "ml_dtypes." in body else []
    blocks = [
        docstring(f"{graph.name}: generated for {parts['backend']}."),
        "\n".join(f"# {visible(line)}" for line in interface(graph)),
        "\n".join([*(f"# {visible(line)}" for line in parts["plugins"]), *dict.fromkeys([*parts["imports"], *extra])]),
    ]
    if any(" = _array(" in line or "(_array(" in line for line in parts["constants"]):
        blocks.append("\n\n" + ARRAY_FROM_TEXT.strip())
    if parts["arrays"]:
        blocks.append("\n\n" + ARRAYS_FROM_FILE.strip())
    blocks += ["\n\n" + text for text in parts["helpers"]]
    if parts["constants"]:
        blocks.append("\n\n" + "\n".join(parts["constants"]))
    function = [
        parts["signature"],
        *("    " + line if line else "" for line in parts["body"]),
        "    " + parts["closing"],
    ]
    blocks.append("\n\n" + "\n".join(function))
    return "\n".join(blocks) + "\n"


def interface(graph: Graph) -> list[str]:
    """Return lines with the names and types of the generated function's arguments and results."""
    kinds = {"params": graph.with_role("param"), "inputs": [i for i in graph.arguments if i.role != "param"]}
    lines = ["forward(params, inputs) takes two dictionaries and returns one:"]
    for kind, inputs in kinds.items():
        lines += [f"  {kind}[{quoted(i.name)}]: {i.type}{'' if i.role in ROLES else ', ' + i.role}" for i in inputs]
    return [*lines, *(f"  result[{quoted(r.name)}]: {r.value.type}" for r in graph.results)]


# Emitted into files with constants.
ARRAY_FROM_TEXT = '''
def _array(text, dtype, shape):
    """Return an array from its bytes in base64."""
    return numpy.frombuffer(base64.b64decode(text), numpy.dtype(dtype)).reshape(shape)
'''


# Emitted into files with large constants, which the loader defines, or which are in an array file of the same name.
ARRAYS_FROM_FILE = """
if "_arrays" not in globals():
    with numpy.load(__file__.removesuffix(".py") + ".npz") as arrays:
        _arrays = dict(arrays)
"""


class Module:
    """The module around the function: imports, helpers and constants, each once."""

    def __init__(self, table: Lowerings) -> None:
        self.table = table
        self.reserved = {*table.reserved, *CALLED, "_array", "_arrays", "base64", "numpy"}
        self.names = NameAllocator(self.reserved)
        self.imports = [*table.imports]
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.helpers: dict[str, str] = {}
        self.constants: dict[str, str] = {}  # expressions by name
        self._names: dict[Any, str] = {}

    def helper(self, function: Callable[..., Any]) -> str:
        """Add a function in the dialect of the table, after the functions it calls; return its name."""
        function = self.table.dialect.version(function)
        name = self._names.get(function)
        if name is None:
            text, primitives = self.table.dialect.source(function)
            for needed in (*primitives, *getattr(function, "needs", ())):
                self.helper(needed)
            self.imports += getattr(function, "imports", ())
            name = self._names[function] = function.__name__
            self.names.used.add(name)
            self.helpers[name] = text
        return name

    def add_import(self, line: str) -> None:
        """Add an import line once."""
        if line not in self.imports:
            self.imports.append(line)

    def imported(self, path: str, wish: str, names: NameAllocator) -> str:
        """Import ``module:attribute`` under a name that no local variable has; return this name."""
        if path not in self._names:
            module, _, name = path.partition(":")
            root, _, rest = name.partition(".")
            alias = names.fresh(wish)
            self.names.used.add(alias)
            self.imports.append(f"from {module} import {root} as {alias}")
            self._names[path] = f"{alias}.{rest}" if rest else alias
        return self._names[path]

    def function(self, wish: str, lines: Sequence[str]) -> str:
        """Add a function named ``wish`` once, and return its name; other lines get another one."""
        names = chain([wish], (f"{wish}_{k}" for k in count(1)))
        texts = ((name, "\n".join(lines).replace(wish, name, 1)) for name in names)
        name = next(name for name, text in texts if self.helpers.setdefault(name, text) == text)
        self.names.used.add(name)
        return name

    def another(self, helper: str, names: NameAllocator) -> str:
        """Return a second name for a helper whose name is shadowed by a local variable."""
        if (helper, "another") not in self._names:
            name = self._names[helper, "another"] = names.fresh(f"{helper}_of")
            self.helpers[name] = f"{name} = {helper}"
        return self._names[helper, "another"]

    def constant(self, array: np.ndarray[Any, Any], wish: str) -> str:
        """Add an array, as text or to the array file, and return its name."""
        key = id(array)
        if key not in self._names:
            name = self._names[key] = self.names.fresh(wish)
            raw, dtype = np.asarray(array, order="C"), as_dtype(array.dtype)
            half = dtype.name == "bfloat16"  # unknown to NumPy's dtype names and files
            bits = raw.view(np.uint16) if half else raw
            if raw.nbytes >= FILE_BYTES:
                self.arrays[name] = bits
                source = f'_arrays["{name}"]'
            else:
                text = base64.b64encode(bits.tobytes()).decode()
                source = f'_array("{text}", "{bits.dtype.name}", {raw.shape!r})'
            if half:
                source += ".view(ml_dtypes.bfloat16)" + ("" if self.table.bfloat16 else ".astype(numpy.float32)")
            dtype_text = self.table.dtype_text(dtype)
            self.constants[name] = self.table.constant_template.format(array=source, dtype=dtype_text)
        return self._names[key]


class FunctionEmitter:
    """Emitter of one function: ``forward``, or a region nested in it."""

    def __init__(self, graph: Graph, table: Lowerings, module: Module, outer: FunctionEmitter | None = None) -> None:
        self.graph = graph
        self.table = table
        self.module = module
        self.outer = outer
        self.names: NameAllocator = module.names if outer is None else outer.names
        self.lines: list[str] = []
        self.text: dict[Value, str] = {}
        self.scalars: dict[Value, Node] = {}
        self.corrections: tuple[LoweringRule, ...] = () if outer is None else outer.corrections  # being emitted
        self.symbols: dict[str, Symbol] = {} if outer is None else outer.symbols
        self.sizes: dict[str, str] = {} if outer is None else outer.sizes  # symbol -> name in the text
        for symbol in symbols(*(d for i in graph.inputs for d in i.type.shape)):
            if symbol.name not in self.sizes:
                self.sizes[symbol.name] = self.names.fresh(symbol.name)
        self.step = 0  # number of the node being emitted
        self.last = {v: k for k, node in enumerate(graph.nodes) for v in node.operands if v is not None}
        self.produced = {v for node in graph.nodes for v in node.results}
        self.donated = {i.value for i in graph.inputs if i.tags.get("donated")}
        self.owned = set(self.donated)  # values whose buffers the function may overwrite
        self.bases: dict[Value, set[Value]] = {}  # view -> the values whose buffers it aliases
        self.view_end: dict[Value, int] = {}  # aliased value -> the step of the last use of its views
        self.outputs = set(graph.outputs)
        self.shared: set[Value] = set()  # results of regions that may be constants of the region
        self.region_memory: dict[Graph, list[set[Value]]] = {}  # region -> the values that each output may alias

    # -- functions ---------------------------------------------------------------------------------------------------
    def function(self) -> list[str]:
        """Return the body of ``forward``, without the last line."""
        prologue = []
        for i in self.graph.inputs:
            if i.data is not None:  # a constant may be unused, for example after constant folding
                if i.value in self.last or i.value in self.outputs:
                    self.text[i.value] = self.module.constant(i.data, i.name)
                continue
            # An unread input is still read if its shape determines a symbolic size.
            if i.value not in self.last and i.value not in self.outputs and not _sizes_from(i.type.shape):
                continue
            self.text[i.value] = self.names.fresh(i.name)
            source = "params" if i.role == "param" else "inputs"
            prologue.append(f"{self.text[i.value]} = {source}[{quoted(i.name)}]")
        self._nodes()
        results = zip(self.graph.output_names, self._results(), strict=True)
        ending = ["outputs = {" + ", ".join(f"{quoted(name)}: {text}" for name, text in results) + "}"]
        return [*prologue, *self._size_lines(), *self.lines, *ending]

    def _results(self) -> list[str]:
        """Return the expressions of the outputs, with copies of arguments, constants and values returned twice."""
        returned: set[Value] = set()
        texts = []
        for v in self.graph.outputs:
            memory, text = self.bases.get(v, {v}), self.expression(v)
            # A result must share memory neither with an argument nor with another result: the caller may
            # change each of them.
            private = memory <= self.produced | self.donated and not memory & returned
            if self.table.copy is not None and v not in self.scalars and not (private and v not in self.shared):
                text = self.table.copy.format(x=text)
            returned |= memory
            texts.append(text)
        return texts

    def region(self, graph: Graph, wish: str, call_arguments: Sequence[Value | None] = ()) -> str:
        """Emit a nested function for a region, which can use the sizes of the outer function; return its name.

        ``call_arguments`` are the arguments of its only call, if known: it owns the buffers that have no later use.
        """
        name = self.names.fresh(wish)
        inner = FunctionEmitter(graph, self.table, self.module, self)
        inner.owned = {
            i.value
            for i, v in zip(graph.arguments, call_arguments)
            if self._is_last_use(v) and call_arguments.count(v) == 1
        }
        self.lines += inner.definition(name)
        self.region_memory[graph] = [inner.bases.get(out, {out}) for out in graph.outputs]
        return name

    def definition(self, name: str) -> list[str]:
        """Return the lines of a function from the graph's inputs to a tuple of its outputs."""
        arguments = []
        for i in self.graph.inputs:
            if i.data is not None:
                self.text[i.value] = self.module.constant(i.data, i.name)
            else:
                self.text[i.value] = self.names.fresh(i.name)
                arguments.append(self.text[i.value])
        self._nodes()
        results = ", ".join(self.expression(v) for v in self.graph.outputs)
        comma = "," if len(self.graph.outputs) == 1 else ""
        lines = [*self.lines, f"return ({results}{comma})"]
        return [f"def {name}({', '.join(arguments)}):", *("    " + line for line in lines)]

    def _size_lines(self) -> list[str]:
        """Return ``B = x.shape[0]`` for every symbol that the body uses."""
        lines, defined = [], set[str]()
        for i in self.graph.inputs:
            for axis, size in enumerate(i.type.shape):
                linear_sizes = _sizes_from((size,))
                for symbol, coefficient, constant in linear_sizes:
                    if symbol.name in self.symbols and symbol.name not in defined:
                        defined.add(symbol.name)
                        text = f"{self.text[i.value]}.shape[{axis}]"
                        if constant:
                            text = f"({text} - {constant})" if constant > 0 else f"({text} + {-constant})"
                        lines.append(
                            f"{self.sizes[symbol.name]} = {text}" + (f" // {coefficient}" if coefficient != 1 else "")
                        )
        missing = set(self.symbols) - defined
        if missing:
            raise UnsupportedError(
                f"no input shape determines the size '{sorted(missing)[0]}'", hint="pass its value in shapes="
            )
        return lines

    # -- one node ----------------------------------------------------------------------------------------------------
    def _nodes(self) -> None:
        for step, node in enumerate(self.graph.nodes):
            self.step = step
            if node.is_constant:
                self.scalars[node.result] = node
                continue
            self._node(node)
            if self.table.release:
                self._release(node)

    def _node(self, node: Node) -> None:
        """Emit one operation."""
        row = self.table.find(node, self.corrections)
        if row is None and self.table.falls_back(node):
            row = FALLBACK
        if row is None:
            raise self._unsupported(node)
        operands = [None if v is None else self.expression(v, node) for v in node.operands]
        results = [self.names.fresh(v.name) for v in node.results]
        call = Call(node, operands, results, self)
        donor = self._reusable_operand(node) if row.out is not None else None
        note = ""
        expression: str | None
        if row.plugin is not None:
            expression = plugin_expression(row.plugin, call, self)
            note = f"lowering of '{node.op.name}' by {row.plugin.origin}"
        elif row is FALLBACK:
            expression = reference_expression(call, self)
            note = f"fallback: NumPy reference of '{node.op.name}'"
        elif donor is not None:
            assert row.out is not None
            expression = self.fill_template(row.out.replace("{out}", self.text[donor]), call)
        elif row.template is not None:
            expression = self.fill_template(row.template, call)
        elif row.correction is not None:
            expression = self._corrected(row, row.correction, node)
        else:
            assert row.function is not None
            expression = row.function(call)
        if expression is not None:
            self.line(f"{', '.join(results)} = {expression}", node, note)
        for value, name in zip(node.results, results, strict=True):
            self.text[value] = name
        self._ownership(node, row)

    def _unsupported(self, node: Node) -> UnsupportedError:
        """Return the error of a node without a row; a correction may need one of the operation that it corrects."""
        name, facts = node.op.name, [str(node.origin)] if node.origin else []
        remedy = f"add table.row('{name}', ...), or pass host= to Lowerings, which runs its reference"
        if self.corrections and (correction := self.corrections[-1].correction):
            facts.append(f"used by the correction '{correction.__name__}' of {correction.__module__}")
            remedy += "; or leave the correction out"
        return UnsupportedError(f"backend '{self.table.name}' does not lower '{name}'", facts=facts, hint=remedy)

    def _corrected(self, row: LoweringRule, correction: Callable[..., Any], node: Node) -> str:
        """Emit the function of a correction, for the operands that are not numbers, and return its call."""
        numbers = {v: n.attributes["value"] for v, n in self.scalars.items() if node.op.elementwise}
        arrays = [v for v in node.operands if v not in numbers] or list(node.operands)

        def function(*values: Value) -> Any:
            by_operand = numbers | dict(zip(arrays, values, strict=True))
            return correction(*(by_operand[v] for v in node.operands), **node.attributes)

        names = [name for name, v in zip(node.op.operands, node.operands, strict=True) if v in arrays]
        graph = trace(function, types_of(arrays), names)
        wish, corrections = f"corrected_{node.op.name}", (*self.corrections, row)
        inner = FunctionEmitter(graph, self.table, self.module)
        inner.names, inner.corrections = NameAllocator(self.module.reserved), corrections
        lines = inner.definition(wish)
        if inner.symbols:  # variables of this function
            self.corrections = corrections
            name = self.region(graph, wish)
            self.corrections = corrections[:-1]
        else:
            name = self.module.function(wish, lines)
        return f"{name}({', '.join(map(self.array, arrays))})[0]"

    def convert_constant(self, v: Value | None, helper: Callable[..., Any], arguments: Sequence[str]) -> None:
        constants, name = self.module.constants, self.text[cast("Value", v)]
        constants[name] = f"{self.helper(helper)}({', '.join([constants[name], *arguments])})"

    def fill_template(self, template: str, call: Call) -> str:
        parts = []
        for text, name, _, _ in Formatter().parse(template):
            parts.append(text)
            if name is not None:
                parts.append(call.field(name))
        return "".join(parts)

    def _ownership(self, node: Node, row: LoweringRule) -> None:
        """Record ownership of the results: new results are owned, views extend the lifetime of aliased values."""
        if not row.view and not node.regions:
            self.owned.update(node.results)
            return
        if any(i.data is not None for region in node.regions for i in region.inputs):
            self.shared.update(node.results)
        bases = [self._memory(node, k) for k in range(len(node.results))]
        for memory in bases:
            # The caller may read this memory after the function has returned, so nothing may overwrite it.
            if node.regions or self.outputs.intersection(node.results):
                self.owned -= memory
            end = max(self.last.get(v, -1) for v in node.results)
            self.view_end.update({base: max(self.view_end.get(base, end), end) for base in memory})
        self.bases.update(zip(node.results, bases, strict=True))

    def _memory(self, node: Node, k: int) -> set[Value]:
        """Return the values that result ``k`` of a view, or of an operation with regions, may alias."""
        if node.op is not if_op:
            return {base for v in node.operands if v is not None for base in self.bases.get(v, (v,))}
        # The result represents memory allocated in a branch, which several results may share.
        memory = {node.results[k]}
        for region in node.regions:
            aliases = self.region_memory[region]
            memory.update(node.results[j] for j in range(k) if aliases[j] & aliases[k])
            for i, v in zip(region.arguments, node.operands[1:], strict=True):  # operand 0 is the condition
                if v is not None and i.value in aliases[k]:
                    memory |= self.bases.get(v, {v})
        return memory

    def _reusable_operand(self, node: Node) -> Value | None:
        """Return a dead operand whose buffer the result can reuse, preferably a program input, or None."""
        result = node.result
        # NumPy's results of rank 0 are immutable scalars.
        if not result.shape:
            return None
        operands = [v for v in node.operands if v is not None]
        dying = [v for v in operands if self._is_last_use(v) and v.type == result.type]
        # Libraries read a view after they wrote below it.
        memory = {v: self.bases.get(v, {v}) for v in operands}
        dying = [v for v in dying if all(o is v or memory[v].isdisjoint(memory[o]) for o in operands)]
        # An input's buffer first: nothing else can reuse it later, since the caller gave it away.
        return next((v for v in dying if v not in self.produced), dying[0] if dying else None)

    def is_spent(self, v: Value | None) -> bool:
        """Whether ``v`` is a donated input and this is its last use."""
        return v in self.donated and self._is_last_use(v)

    def _is_last_use(self, v: Value | None) -> bool:
        """Whether the function owns the buffer of ``v`` and this is its last use."""
        if v not in self.owned or v in self.outputs:
            return False
        return self.last[v] == self.step and self.view_end.get(v, self.step) <= self.step

    def _release(self, node: Node) -> None:
        """Delete the names of large values after their last use, even if a view still aliases their memory."""
        dead = [
            self.text[v]
            for v in dict.fromkeys(node.operands)
            if v is not None and v in self.produced and self.last[v] == self.step and v not in self.outputs
            if v in self.text and _large(v)
        ]
        if dead:
            self.lines.append(f"del {', '.join(dead)}")

    # -- text --------------------------------------------------------------------------------------------------------
    def line(self, text: str, node: Node, note: str = "") -> None:
        words = [visible(word) for word in (node.origin.path, note) if word]
        self.lines.append(text + (f"  # {'; '.join(words)}" if words else ""))

    def array(self, value: Value | None) -> str:
        """Return the expression of an operand as a typed array, or "None" if it is absent."""
        return "None" if value is None else self.expression(value)

    def expression(self, value: Value, reader: Node | None = None) -> str:
        """Return the expression of a value at a use; scalars combined with an array are untyped literals."""
        node = self.scalars.get(value)
        if node is None:
            return self.text[value]
        number, dtype = node.attributes["value"], node.attributes["dtype"]
        if reader is not None and reader.op.elementwise and self.table.is_weak(number, dtype):
            # Only next to an array of the dtype: two literals would be computed by Python in float64.
            arrays = [v for v in reader.operands if v is not None and v not in self.scalars and v.dtype is dtype]
            if arrays:
                text = self.literal(number)
                return f"({text})" if text.startswith("-") else text
        return self.table.scalar_text(number, dtype)

    def literal(self, value: Any, *, plain: bool = False) -> str:
        """Return an attribute as source text; with ``plain``, dtypes are names, for functions of mithril."""
        self._collect_symbols(value)
        return self.table.literal(value, (lambda dtype: repr(dtype.name)) if plain else None, self.sizes)

    def _collect_symbols(self, value: Any) -> None:
        if isinstance(value, Dim):
            for symbol in symbols(value):
                self.symbols[symbol.name] = symbol
        elif isinstance(value, (tuple, list)):
            for v in value:
                self._collect_symbols(v)

    def imported(self, path: str, wish: str) -> str:
        """Import an object into the module and return its name."""
        return self.module.imported(path, wish, self.names)

    def helper(self, function: Callable[..., Any]) -> str:
        home = self.table.module
        if home is not None and function.__module__ == home.__name__:
            return f"{home.__name__.rpartition('.')[2]}.{function.__name__}"
        name = self.module.helper(function)
        if name in self.names.allocated:
            return self.module.another(name, self.names)
        self.names.used.add(name)
        return name


def _sizes_from(shape: Any) -> list[tuple[Symbol, int, int]]:
    """Return the symbols that a shape determines: (symbol, coefficient, constant) of its linear sizes."""
    linear_sizes = []
    for size in shape:
        if isinstance(size, Dim):
            linear = [(m[0], c) for m, c in size.terms if len(m) == 1]
            rest = [m for m, _ in size.terms if len(m) > 1]
            if len(linear) == 1 and not rest and isinstance(linear[0][0], Symbol):
                constant = next((c for m, c in size.terms if not m), 0)
                linear_sizes.append((linear[0][0], linear[0][1], constant))
    return linear_sizes


def _large(value: Value) -> bool:
    size = 1
    for d in value.shape:
        size *= d if isinstance(d, int) else UNKNOWN
    return size >= RELEASE_ELEMENTS


def docstring(text: str) -> str:
    """Return the text as a docstring for generated Python code."""
    return f'""{quoted(text)}""'
