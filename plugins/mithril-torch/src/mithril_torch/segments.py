"""A forward graph cut into consecutive segments, one per use of a block: the parts that ``fully_shard`` wraps.

A block is a path of layers such as ``h.0`` whose parameters are stored, gathered and compiled together. Operations
outside all blocks belong to the root, whose path is empty.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from mithril.graph import (
    NOWHERE,
    Dim,
    DType,
    Graph,
    Input,
    Node,
    OptionError,
    Origin,
    Output,
    UnsupportedError,
    Value,
    is_source,
    symbols,
)

ROOT = ""
FREE = " "  # label of operations that depend on no parameter and no state, such as those that build masks


@dataclass(frozen=True)
class Segment:
    """Consecutive operations of one block; ``takes`` and ``gives`` name values that cross its borders.

    The names in its graph are its own, so that the graphs of equal blocks are equal.
    """

    block: str
    graph: Graph
    params: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    shared: tuple[str, ...] = ()  # parameters of the root among ``takes``
    dtypes: tuple[DType, ...] = ()  # of ``gives``
    ends: tuple[str, ...] = ()  # values that no later segment takes
    free: bool = False  # whether it depends on inputs only, so that each stage of a pipeline can repeat it


@dataclass(frozen=True)
class Segmented:
    """The segments of a forward graph in order. ``results`` maps names of results to names of values."""

    segments: tuple[Segment, ...]
    results: Mapping[str, str]


class SegmentCode:
    """The generated function of a segment, whose parameters have names relative to the block.

    Blocks with equal operations share one, so that ``torch.compile`` compiles it once.
    """

    def __init__(self, segment: Segment, forward: Callable[..., dict[str, Any]]) -> None:
        self.takes = tuple(i.name for i in segment.graph.inputs if i.role == "input")
        self.gives = segment.graph.output_names
        self.forward = _importable(forward)
        self.params = [(name, name.split(".")) for name in segment.params]

    def __call__(self, owner: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        params = {}
        for name, path in self.params:
            x = owner
            for part in path:
                # names of the interface of Container hide those of the model, as attributes
                x = x.__getattr__(part) if part.startswith("mithril_") else getattr(x, part)
            params[name] = x
        results = self.forward(params, dict(zip(self.takes, values, strict=True)))
        return tuple([results[name] for name in self.gives])


def load_segments(
    segments: Sequence[Segment], load: Callable[[Graph], Callable[..., dict[str, Any]]]
) -> list[SegmentCode]:
    """Return the functions of the segments; equal source texts without stored arrays become one function."""
    by_text: dict[Any, SegmentCode] = {}
    codes = []
    for segment in segments:
        forward = load(segment.graph)
        key = (forward.__code__.co_filename, tuple(segment.params))  # the file name is a digest of the text
        code = by_text.get(key)
        # Stored arrays are part of the function, so that equal texts may compute with different
        # constants.
        if code is None or "_arrays" in forward.__globals__:
            code = by_text[key] = SegmentCode(segment, forward)
        codes.append(code)
    return codes


_number = itertools.count(1)


def _importable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Register the globals of a generated function as a module: torch.compile imports them by its name."""
    name = f"mithril_generated_{next(_number)}"
    forward.__globals__["__name__"] = name
    module = ModuleType(name)
    module.__dict__.update(forward.__globals__)
    sys.modules[name] = module
    # Without it each compiled model would stay in sys.modules for the life of the process.
    weakref.finalize(forward, sys.modules.pop, name, None)
    return forward


def repeated_blocks(shapes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the outermost paths of layers that repeat with the same parameters, in order.

    ``shapes`` maps dotted names of parameters to their types.
    """
    blocks: list[str] = []
    depth = max((name.count(".") for name in shapes), default=0)
    for level in range(1, depth + 1):
        contents: dict[str, list[tuple[str, Any]]] = {}
        for name, kind in shapes.items():
            parts = name.split(".")
            if len(parts) > level and block_of(name, blocks) == ROOT:
                contents.setdefault(".".join(parts[:level]), []).append((".".join(parts[level:]), kind))
        signatures = [tuple(c) for c in contents.values()]
        blocks += [path for path, content in contents.items() if signatures.count(tuple(content)) > 1]
    return tuple(dict.fromkeys(b for name in shapes if (b := block_of(name, blocks)) != ROOT))


def block_of(path: str, blocks: Iterable[str]) -> str:
    """Return the block that contains a layer or parameter, or the root."""
    return next((b for b in blocks if path == b or path.startswith(f"{b}.")), ROOT)


def separable(blocks: Sequence[str], graphs: Iterable[Graph]) -> tuple[str, ...]:
    """Return the blocks, those whose parameters one operation reads joined to the layer around them, if any.

    Passes merge products of several layers into one, for example those of queries, keys and values.
    """
    paths = list(blocks)
    for graph in graphs:
        for node in graph.nodes:
            owners = _owners(graph, node, paths)
            if len(owners) > 1:
                names = zip(*(path.split(".") for path in owners), strict=False)
                around = ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, names))
                place = paths.index(owners[0])
                paths[place:place] = [around] if around else []
                paths = [p for p in paths if p == around or not (p in owners or (around and block_of(p, [around])))]
    return tuple(paths)


def _owners(graph: Graph, node: Node, blocks: Iterable[str]) -> list[str]:
    """Return the blocks whose parameters an operation reads."""
    inputs = [graph.input_of.get(v) for v in node.operands if v is not None]
    names = [i.name for i in inputs if i is not None and i.role == "param"]
    return list(dict.fromkeys(b for name in names if (b := block_of(name, blocks)) != ROOT))


def check_blocks(blocks: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the user's blocks; raise OptionError for one without parameters, or inside another."""
    names = list(names)
    for path in blocks:
        if not any(block_of(n, [path]) for n in names):
            raise OptionError(
                f"blocks: no parameter is in a layer '{path}'",
                facts=[f"parameters: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"],
            )
        outer = next((b for b in blocks if b != path and block_of(path, [b])), None)
        if outer is not None:
            raise OptionError(f"blocks: '{path}' is inside '{outer}'", hint="name one of them")
    return tuple(blocks)


def segmented(graph: Graph, blocks: Sequence[str]) -> Segmented:
    """Cut a graph into segments of blocks and of the root."""
    return _Cutter(graph, blocks).run()


class _Cutter:
    def __init__(self, graph: Graph, blocks: Sequence[str]) -> None:
        self.graph, self.blocks = graph, blocks
        self.names: dict[Value, str] = {}  # unique names of values that cross borders
        self.used = {i.name for i in graph.inputs}
        self.sizes: dict[str, Value] = {}  # an argument from whose shape a size can be read
        for i in graph.inputs:
            if i.role != "param":
                self.names[i.value] = i.name
                for name in _plain_sizes(i.value):
                    self.sizes.setdefault(name, i.value)

    def run(self) -> Segmented:
        runs = self._runs()
        readers: dict[Value, int] = {}  # the last run that reads a value
        for k, (_, nodes) in enumerate(runs):
            for v in self._reads(nodes):
                readers[v] = k
        outputs = {v for v in self.graph.outputs if v not in self._sources}
        cut = [self._segment(k, block, nodes, readers, outputs) for k, (block, nodes) in enumerate(runs)]
        extra = [r.value for r in self.graph.results if r.value in self._sources]
        if extra:  # constant results
            nodes = [self._sources[v] for v in dict.fromkeys(extra)]
            outputs.update(extra)
            cut.append(self._segment(len(cut), ROOT, nodes, readers, outputs))
        results = {r.name: self._name(r.value) for r in self.graph.results}
        return Segmented(tuple(_with_ends(cut, set(results.values()))), results)

    # -- order of the operations ----------------------------------------------------------------------------------
    def _runs(self) -> list[tuple[str, list[Node]]]:
        """Order the operations so that each block has as few runs as possible. Sources are repeated in each run."""
        self._sources = {v: node for node in self.graph.nodes if is_source(node) for v in node.results}
        waiting = [node for node in self.graph.nodes if node.results[0] not in self._sources]
        labels = self._labels(waiting)
        ready = {i.value for i in self.graph.inputs} | set(self._sources)
        runs: list[tuple[str, list[Node]]] = []
        while waiting:
            possible = self._possible(waiting, ready, labels)
            # Operations without parameters first: an operation of the root that could run before a block
            # would otherwise cut the block in two.
            label = next((label for label in (FREE, ROOT) if label in possible), next(iter(possible)))
            done = possible[label]
            ready.update(v for node in done for v in node.results)
            finished = set(done)
            waiting = [node for node in waiting if node not in finished]
            runs.append((label, done))
        return runs or [(ROOT, [])]

    def _possible(self, waiting: list[Node], ready: set[Value], labels: Mapping[Node, str]) -> dict[str, list[Node]]:
        """Return for each block the operations that can run before those of any other block."""
        results: dict[str, set[Value]] = {}
        possible: dict[str, list[Node]] = {}
        for node in waiting:
            label = labels[node]
            inner = results.setdefault(label, set())
            if all(v is None or v in ready or v in inner for v in node.operands):
                inner.update(node.results)
                possible.setdefault(label, []).append(node)
        return possible

    def _labels(self, nodes: Iterable[Node]) -> dict[Node, str]:
        dependent = {i.value for i in self.graph.inputs if i.role in ("param", "state")}
        labels = {}
        for node in nodes:
            labels[node] = self._label(node)
            if any(v in dependent for v in node.operands):
                dependent.update(node.results)
            else:
                labels[node] = FREE
        return labels

    def _label(self, node: Node) -> str:
        """Return the block of an operation: that of its parameters, else that of its layer."""
        owners = _owners(self.graph, node, self.blocks)
        # The engine gathers the parameters of one block at a time.
        if len(owners) > 1:
            raise UnsupportedError(
                f"'{node.op.name}' reads parameters of several blocks: {', '.join(owners)}",
                facts=[str(node.origin)],
                hint="pass blocks=[...] to to_module(), with paths that share no operations",
            )
        return next(iter(owners), block_of(node.origin.path, self.blocks))

    # -- one segment ----------------------------------------------------------------------------------------------
    def _reads(self, nodes: Iterable[Node]) -> dict[Value, None]:
        """Return the values that operations read from outside, and sources that they repeat."""
        inner: set[Value] = set()
        reads: dict[Value, None] = {}
        for node in nodes:
            for v in node.operands:
                if v is not None and v not in inner:
                    reads[v] = None
            inner.update(node.results)
        return reads

    def _segment(
        self, k: int, label: str, nodes: list[Node], readers: Mapping[Value, int], outputs: set[Value]
    ) -> Segment:
        block = ROOT if label == FREE else label
        inputs: dict[Value, Input] = {}
        renamed: dict[Value, Value] = {}
        repeated = [self._sources[v] for v in self._reads(nodes) if v in self._sources]
        for v in (*self._reads(nodes), *self._missing_sizes([*repeated, *nodes])):
            if v in self._sources or v in inputs:
                continue
            i = self.graph.input_of.get(v)
            if i is not None and i.role == "constant":
                inputs[v] = i
            elif i is not None and i.role == "param" and block_of(i.name, self.blocks) in (block, ROOT):
                inputs[v] = i if block_of(i.name, self.blocks) == block else replace(i, role="input")
            else:
                renamed[v] = Value(self._name(v), v.type)
                inputs[v] = Input(renamed[v], "input")
        gives = {v: None for node in nodes for v in node.results if v in outputs or readers.get(v, k) > k}
        graph = Graph(
            tuple(inputs.values()),
            tuple(_reading(node, renamed) for node in (*repeated, *(n for n in nodes if n not in repeated))),
            tuple(Output(v, self._name(v)) for v in gives),
            self.graph.name,
        )
        takes = tuple(i.name for i in inputs.values() if i.role == "input")
        names, dtypes = graph.output_names, tuple(v.dtype for v in graph.outputs)
        shared = tuple(i.name for v, i in inputs.items() if i.role == "input" and self._is_parameter(v))
        graph = _relative(graph, block) if block else graph
        return Segment(
            block,
            graph,
            tuple(i.name for i in graph.with_role("param")),
            takes,
            names,
            shared,
            dtypes,
            free=label == FREE,
        )

    def _is_parameter(self, v: Value) -> bool:
        i = self.graph.input_of.get(v)
        return i is not None and i.role == "param"

    def _missing_sizes(self, nodes: Sequence[Node]) -> list[Value]:
        """Return arguments whose shapes tell the sizes that occur in the operations but not in their operands."""
        inner = {v for node in nodes for v in node.results}
        outer = [v for node in nodes for v in node.operands if v is not None and v not in inner]
        bound = {name for v in outer for name in _plain_sizes(v)}
        needed = {s.name: None for node in nodes for s in symbols(*_sizes(node))}
        return [self.sizes[name] for name in needed if name not in bound and name in self.sizes]

    def _name(self, v: Value) -> str:
        if v not in self.names:
            name, n = v.name, 1
            while name in self.used:
                name, n = f"{v.name}_{n}", n + 1
            self.used.add(name)
            self.names[v] = name
        return self.names[v]


def _sizes(node: Node) -> Iterator[Dim]:
    """Yield the symbolic sizes in the attributes and results of an operation."""
    waiting: list[Any] = [*node.attributes.values(), *(v.shape for v in node.results)]
    while waiting:
        x = waiting.pop()
        if isinstance(x, Dim):
            yield x
        elif isinstance(x, (tuple, list)):
            waiting.extend(x)


def _plain_sizes(v: Value) -> list[str]:
    """Return the names of the symbols that are sizes of a value, not only parts of sizes."""
    return [s.name for n in v.shape for s in symbols(n) if str(n) == s.name]


def _relative(graph: Graph, block: str) -> Graph:
    """Return the graph of a block with names that do not depend on its position in the model."""
    values: dict[Value, Value] = {}
    counts: dict[str, int] = {}

    def renamed(v: Value, name: str) -> Value:
        values[v] = Value(name, v.type)
        return values[v]

    def fresh(v: Value, stem: str) -> Value:
        counts[stem] = counts.get(stem, 0) + 1
        return renamed(v, f"{stem}_{counts[stem]}")

    inputs = [
        replace(i, value=renamed(i.value, i.name[len(block) + 1 :]) if i.role == "param" else fresh(i.value, i.role))
        for i in graph.inputs
    ]
    nodes = []
    for node in graph.nodes:
        operands = tuple(v if v is None else values[v] for v in node.operands)
        results = tuple(fresh(v, node.op.name.replace(".", "_")) for v in node.results)
        origin = Origin("block" + node.origin.path[len(block) :]) if block_of(node.origin.path, [block]) else NOWHERE
        nodes.append(node.replaced(operands=operands, results=results, origin=origin))
    outputs = tuple(Output(values[r.value], f"result_{k}") for k, r in enumerate(graph.results))
    return Graph(tuple(inputs), tuple(nodes), outputs, graph.name)


def _reading(node: Node, renamed: Mapping[Value, Value]) -> Node:
    if not any(v in renamed for v in node.operands):
        return node
    return node.replaced(operands=tuple(v if v is None else renamed.get(v, v) for v in node.operands))


def _with_ends(segments: Sequence[Segment], results: set[str]) -> list[Segment]:
    """Add to each segment the values that can be released after it."""
    last = {name: k for k, s in enumerate(segments) for name in s.takes}
    return [
        replace(s, ends=tuple(n for n in s.takes if last[n] == k and n not in results)) for k, s in enumerate(segments)
    ]
