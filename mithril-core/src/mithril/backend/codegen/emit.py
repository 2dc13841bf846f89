"""From a graph to the text of a Python module: one line per operation, the layer's name beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any

import numpy as np

from mithril.backend.codegen.call import Call
from mithril.backend.codegen.host_rows import CALLED, plugin_expression, reference_expression
from mithril.backend.codegen.lowering_table import Lowerings, Row
from mithril.backend.codegen.names import Names
from mithril.backend.codegen.source import CLOSING, SIGNATURE
from mithril.base import Dim, Symbol, UnsupportedError, docstring, dtype as as_dtype, quoted, symbols, visible
from mithril.ir import Graph, Node, Value
from mithril.ops import if_op

FALLBACK = Row(None, None, view=True)  # the reference on the host; it may return its argument
UNKNOWN = 64  # what a symbolic size counts as there
APART = 1 << 14  # bytes: constants from here on do not stand in the text but in an array file beside it
LARGE = 1 << 10  # elements: values from here on are dropped after their last use where the table asks for it


def emit(graph: Graph, table: Lowerings) -> dict[str, Any]:
    """The parts of the module: ``imports``, ``helpers``, ``constants``, the lines of the ``body``; see ``render``."""
    module = Module(table)
    writer = Writer(graph, table, module)
    body = writer.function()
    return {
        "backend": table.name,
        "graph": graph,
        "imports": [*module.imports, *(["import base64", "import numpy"] if module.constants else [])],
        "helpers": list(module.helpers.values()),
        "constants": module.constants,
        "arrays": module.arrays,
        "signature": SIGNATURE,
        "body": body,
        "closing": CLOSING,
    }


def render(parts: dict[str, Any]) -> str:
    """The module's text."""
    graph: Graph = parts["graph"]
    body = "\n".join([*parts["body"], *parts["constants"]])
    extra = ["import ml_dtypes"] if "ml_dtypes." in body else []
    blocks = [
        docstring(f"{graph.name}: generated for {parts['backend']}."),
        "\n".join(dict.fromkeys([*parts["imports"], *extra])),
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


# Written into files that hold constants: an array from its bytes.
ARRAY_FROM_TEXT = '''
def _array(text, dtype, shape):
    """An array from its bytes in base64."""
    return numpy.frombuffer(base64.b64decode(text), numpy.dtype(dtype)).reshape(shape)
'''


# Written into files whose large constants are kept apart: they are there already, or in a file of the same name.
ARRAYS_FROM_FILE = """
if "_arrays" not in globals():
    with numpy.load(__file__.removesuffix(".py") + ".npz") as kept:
        _arrays = dict(kept)
"""


class Module:
    """What stands above the function: helpers and constants, each once."""

    def __init__(self, table: Lowerings) -> None:
        self.table = table
        self.names = Names({*table.reserved, *CALLED, "_array", "_arrays", "base64", "numpy"})
        self.imports = [*table.imports]
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.helpers: dict[str, str] = {}
        self.constants: list[str] = []
        self._known: dict[Any, str] = {}

    def helper(self, function: Callable[..., Any]) -> str:
        """Embed a function in the table's dialect, and before it those it calls."""
        function = self.table.dialect.version(function)
        known = self._known.get(function)
        if known is None:
            text, primitives = self.table.dialect.source(function)
            for needed in (*primitives, *getattr(function, "needs", ())):
                self.helper(needed)
            self.imports += getattr(function, "imports", ())
            known = self._known[function] = function.__name__
            self.names.taken.add(known)
            self.helpers[known] = text
        return known

    def add_import(self, line: str) -> None:
        """Add an import line once."""
        if line not in self.imports:
            self.imports.append(line)

    def imported(self, path: str, wish: str, names: Names) -> str:
        """Return the name under which ``module:attribute`` is imported; no local variable has it."""
        if path not in self._known:
            module, _, name = path.partition(":")
            root, _, rest = name.partition(".")
            alias = names.fresh(wish)
            self.names.taken.add(alias)
            self.imports.append(f"from {module} import {root} as {alias}")
            self._known[path] = f"{alias}.{rest}" if rest else alias
        return self._known[path]

    def another(self, helper: str, names: Names) -> str:
        """A second name for a helper whose own is a local variable's."""
        if (helper, "another") not in self._known:
            name = self._known[helper, "another"] = names.fresh(f"{helper}_of")
            self.helpers[name] = f"{name} = {helper}"
        return self._known[helper, "another"]

    def constant(self, array: np.ndarray[Any, Any], wish: str) -> str:
        """The name of an array that the text holds, or takes by name from the arrays kept beside it."""
        key = id(array)
        if key not in self._known:
            name = self._known[key] = self.names.fresh(wish)
            raw, dtype = np.asarray(array, order="C"), as_dtype(array.dtype)
            half = dtype.name == "bfloat16"  # which neither NumPy's names nor its files know
            bits = raw.view(np.uint16) if half else raw
            if raw.nbytes >= APART:
                self.arrays[name] = bits
                made = f'_arrays["{name}"]'
            else:
                text = base64.b64encode(bits.tobytes()).decode()
                made = f'_array("{text}", "{bits.dtype.name}", {raw.shape!r})'
            if half:
                made += ".view(ml_dtypes.bfloat16)" + ("" if self.table.bfloat16 else ".astype(numpy.float32)")
            text = self.table.constant_template.format(array=made, dtype=self.table.dtype_text(dtype))
            self.constants.append(f"{name} = {text}")
        return self._known[key]


class Writer:
    """Writes one function: the program itself, or a region inside it."""

    def __init__(self, graph: Graph, table: Lowerings, module: Module, outer: Writer | None = None) -> None:
        self.graph = graph
        self.table = table
        self.module = module
        self.outer = outer
        self.names: Names = module.names if outer is None else outer.names
        self.lines: list[str] = []
        self.text: dict[Value, str] = {}
        self.scalars: dict[Value, Node] = {}
        self.symbols: dict[str, Symbol] = {} if outer is None else outer.symbols
        self.sizes: dict[str, str] = {} if outer is None else outer.sizes  # what symbols are called in the text
        for symbol in symbols(*(d for i in graph.inputs for d in i.type.shape)):
            if symbol.name not in self.sizes:
                self.sizes[symbol.name] = self.names.fresh(symbol.name)
        self.step = 0  # which of the nodes is being written
        self.last = {v: k for k, node in enumerate(graph.nodes) for v in node.operands if v is not None}
        self.made = {v for node in graph.nodes for v in node.results}
        self.donated = {i.value for i in graph.inputs if i.tags.get("donated")}
        self.owned = set(self.donated)  # values whose memory is ours to write
        self.bases: dict[Value, set[Value]] = {}  # of a view: the values whose memory it shows
        self.shown: dict[Value, int] = {}  # of such a value: the step that is the last to read one of its views
        self.kept = set(graph.outputs)
        self.shared: set[Value] = set()  # results of regions that may be one of their constants
        self.handed_on: dict[Graph, list[set[Value]]] = {}  # of a region: the values whose memory each output may show

    # -- the whole ---------------------------------------------------------------------------------------------------
    def function(self) -> list[str]:
        """The body of ``forward``, without the last line."""
        prologue = []
        for i in self.graph.inputs:
            if i.data is not None:  # of a weight that was folded into another constant nothing is left
                if i.value in self.last or i.value in self.kept:
                    self.text[i.value] = self.module.constant(i.data, i.name)
                continue
            if i.value not in self.last and i.value not in self.kept and not _sizes_from(i.type.shape):
                continue
            self.text[i.value] = self.names.fresh(i.name)
            source = "params" if i.role == "param" else "inputs"
            prologue.append(f"{self.text[i.value]} = {source}[{quoted(i.name)}]")
        self._nodes()
        results = zip(self.graph.output_names, self._results(), strict=True)
        ending = ["outputs = {" + ", ".join(f"{quoted(name)}: {text}" for name, text in results) + "}"]
        return [*prologue, *self._size_lines(), *self.lines, *ending]

    def _results(self) -> list[str]:
        """Return the expressions of the outputs, copies where memory is an argument's, a constant or returned twice."""
        returned: set[Value] = set()
        texts = []
        for v in self.graph.outputs:
            memory, text = self.bases.get(v, {v}), self.expression(v)
            private = memory <= self.made | self.donated and not memory & returned
            if self.table.copy is not None and v not in self.scalars and not (private and v not in self.shared):
                text = self.table.copy.format(x=text)
            returned |= memory
            texts.append(text)
        return texts

    def region(self, graph: Graph, wish: str, given: Sequence[Value | None] = ()) -> str:
        """A nested function for a region; it sees the sizes of the outer one.

        ``given`` are the arguments where it is called once: memory that dies with the call is its own.
        """
        name = self.names.fresh(wish)
        inner = Writer(graph, self.table, self.module, self)
        inner.owned = {i.value for i, v in zip(graph.arguments, given) if self._dies(v) and given.count(v) == 1}
        arguments = []
        for i in graph.inputs:
            if i.data is not None:
                inner.text[i.value] = self.module.constant(i.data, i.name)
            else:
                inner.text[i.value] = self.names.fresh(i.name)
                arguments.append(inner.text[i.value])
        inner._nodes()
        self.handed_on[graph] = [inner.bases.get(out, {out}) for out in graph.outputs]
        results = ", ".join(inner.expression(v) for v in graph.outputs)
        comma = "," if len(graph.outputs) == 1 else ""
        self.lines.append(f"def {name}({', '.join(arguments)}):")
        self.lines += ["    " + line for line in inner.lines]
        self.lines.append(f"    return ({results}{comma})")
        return name

    def _size_lines(self) -> list[str]:
        """``B = x.shape[0]`` for every symbol the body mentions."""
        lines, known = [], set[str]()
        for i in self.graph.inputs:
            for axis, size in enumerate(i.type.shape):
                found = _sizes_from((size,))
                for symbol, coefficient, constant in found:
                    if symbol.name in self.symbols and symbol.name not in known:
                        known.add(symbol.name)
                        text = f"{self.text[i.value]}.shape[{axis}]"
                        if constant:
                            text = f"({text} - {constant})" if constant > 0 else f"({text} + {-constant})"
                        lines.append(
                            f"{self.sizes[symbol.name]} = {text}" + (f" // {coefficient}" if coefficient != 1 else "")
                        )
        missing = set(self.symbols) - known
        if missing:
            raise UnsupportedError(f"no input's shape gives the size '{sorted(missing)[0]}'", hint="name it in shapes=")
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
        """Write one operation."""
        row = self.table.find(node)
        if row is None and self.table.falls_back(node):
            row = FALLBACK
        if row is None:
            raise UnsupportedError(
                f"backend '{self.table.name}' does not lower '{node.op.name}'", facts=[str(node.origin)]
            )
        operands = [None if v is None else self.expression(v, node) for v in node.operands]
        results = [self.names.fresh(v.name) for v in node.results]
        call = Call(node, operands, results, self)
        donor = self._donor(node) if row.out is not None else None
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
            expression = self.filled(row.out.replace("{out}", self.text[donor]), call)
        elif row.template is not None:
            expression = self.filled(row.template, call)
        else:
            assert row.function is not None
            expression = row.function(call)
        if expression is not None:
            self.line(f"{', '.join(results)} = {expression}", node, note)
        for value, name in zip(node.results, results, strict=True):
            self.text[value] = name
        self._ownership(node, row)

    def filled(self, template: str, call: Call) -> str:
        parts = []
        for text, name, _, _ in Formatter().parse(template):
            parts.append(text)
            if name is not None:
                parts.append(call.field(name))
        return "".join(parts)

    def _ownership(self, node: Node, row: Row) -> None:
        """Fresh results are ours; memory that a view shows is read as long as the view is."""
        if not row.view and not node.regions:
            self.owned.update(node.results)
            return
        if any(i.data is not None for region in node.regions for i in region.inputs):
            self.shared.update(node.results)
        bases = [self._memory(node, k) for k in range(len(node.results))]
        for memory in bases:
            if node.regions or self.kept.intersection(node.results):
                self.owned -= memory
            end = max(self.last.get(v, -1) for v in node.results)
            self.shown.update({base: max(self.shown.get(base, end), end) for base in memory})
        self.bases.update(zip(node.results, bases, strict=True))

    def _memory(self, node: Node, k: int) -> set[Value]:
        """Return the values whose memory the result ``k`` of a view, or of an operation with regions, may show."""
        if node.op is not if_op:
            return {base for v in node.operands if v is not None for base in self.bases.get(v, (v,))}
        memory = {node.results[k]}  # memory that a branch allocates, which several results may share
        for region in node.regions:
            inside = self.handed_on[region]
            memory.update(node.results[j] for j in range(k) if inside[j] & inside[k])
            for i, v in zip(region.arguments, node.operands[1:], strict=True):  # operand 0 is the condition
                if v is not None and i.value in inside[k]:
                    memory |= self.bases.get(v, {v})
        return memory

    def _donor(self, node: Node) -> Value | None:
        """An operand that dies here and whose memory fits the result; best one that came from outside."""
        result = node.result
        if not result.shape:
            return None
        dying = [v for v in node.operands if v is not None and self._dies(v) and v.type == result.type]
        return next((v for v in dying if v not in self.made), dying[0] if dying else None)

    def _dies(self, v: Value | None) -> bool:
        """Whether a value's memory is this function's own and read for the last time now."""
        if v not in self.owned or v in self.kept:
            return False
        return self.last[v] == self.step and self.shown.get(v, self.step) <= self.step

    def _release(self, node: Node) -> None:
        """Drop the names of large values that nothing reads any more, also of those whose memory lives on in others."""
        dead = [
            self.text[v]
            for v in dict.fromkeys(node.operands)
            if v is not None and v in self.made and self.last[v] == self.step and v not in self.kept
            if v in self.text and _large(v)
        ]
        if dead:
            self.lines.append(f"del {', '.join(dead)}")

    # -- text --------------------------------------------------------------------------------------------------------
    def line(self, text: str, node: Node, note: str = "") -> None:
        words = [visible(word) for word in (node.origin.path, note) if word]
        self.lines.append(text + (f"  # {'; '.join(words)}" if words else ""))

    def array(self, value: Value | None) -> str:
        """Return an operand as the text of a typed array, None where it is missing."""
        return "None" if value is None else self.expression(value)

    def expression(self, value: Value, reader: Node | None = None) -> str:
        """How a value is written where it is read; scalars beside an array as plain literals."""
        node = self.scalars.get(value)
        if node is None:
            return self.text[value]
        number, dtype = node.attributes["value"], node.attributes["dtype"]
        if reader is not None and reader.op.elementwise and self.table.is_weak(number, dtype):
            others = [v for v in reader.operands if v is not None and v not in self.scalars and v.dtype is dtype]
            if others:
                text = self.literal(number)
                return f"({text})" if text.startswith("-") else text
        return self.table.scalar_text(number, dtype)

    def literal(self, value: Any, *, plain: bool = False) -> str:
        """Return an attribute as source text; ``plain`` writes dtypes by name, for functions of mithril."""
        self._mention(value)
        return self.table.literal(value, (lambda dtype: repr(dtype.name)) if plain else None, self.sizes)

    def _mention(self, value: Any) -> None:
        if isinstance(value, Dim):
            for symbol in symbols(value):
                self.symbols[symbol.name] = symbol
        elif isinstance(value, (tuple, list)):
            for v in value:
                self._mention(v)

    def imported(self, path: str, wish: str) -> str:
        """Return the name of an object that the module imports."""
        return self.module.imported(path, wish, self.names)

    def helper(self, function: Callable[..., Any]) -> str:
        name = self.module.helper(function)
        if name in self.names.given:
            return self.module.another(name, self.names)
        self.names.taken.add(name)
        return name


def _sizes_from(shape: Any) -> list[tuple[Symbol, int, int]]:
    """Symbols that a shape determines: (symbol, coefficient, constant) of linear sizes."""
    found = []
    for size in shape:
        if isinstance(size, Dim):
            linear = [(m[0], c) for m, c in size.terms if len(m) == 1]
            rest = [m for m, _ in size.terms if len(m) > 1]
            if len(linear) == 1 and not rest and isinstance(linear[0][0], Symbol):
                constant = next((c for m, c in size.terms if not m), 0)
                found.append((linear[0][0], linear[0][1], constant))
    return found


def _large(value: Value) -> bool:
    size = 1
    for d in value.shape:
        size *= d if isinstance(d, int) else UNKNOWN
    return size >= LARGE
