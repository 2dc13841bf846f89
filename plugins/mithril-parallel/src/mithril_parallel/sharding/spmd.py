"""The graph that one device of a mesh runs, with its exchanges as operations.

One walk from the inputs to the outputs. Every value has a split and the axes over which it is a sum still to be made;
what an operation needs otherwise is gathered, cut or summed right before it. Sums stay open through what is linear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mithril import ops
from mithril.base.dtypes import int32
from mithril.base.errors import OperationError, UnsupportedError
from mithril.base.registry import operation
from mithril.base.tensor_type import TensorType
from mithril.ir import Builder, Graph, Input, Node, Output, Value, as_results
from mithril.ir.core import NOWHERE
from mithril.ir.traits import linear_in
from mithril.ops.control_flow import if_op, scan_op
from mithril_parallel.mesh import BLOCKS, Mesh, Split, base, blocks, whole
from mithril_parallel.placing.rules import sizes
from mithril_parallel.sharding.local_rules import Local, is_zero, local, own_places

INDEX = "mesh/"  # inputs of this name hold a device's place along an axis


@dataclass(frozen=True)
class Part:
    """How an output comes together: split along axes of the mesh, and a sum still to be made over others."""

    split: Split
    sums: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sharded:
    """``graph`` is what one device runs. Inputs it has beyond the whole graph's are its places in the mesh."""

    graph: Graph
    mesh: Mesh
    inputs: Mapping[str, Split]
    outputs: Mapping[str, Part]

    @property
    def indices(self) -> dict[str, str]:
        """Inputs that hold the device's place, and along which axis."""
        names = {INDEX + axis: axis for axis in self.mesh.axes}
        return {i.name: names[i.name] for i in self.graph.inputs if i.name in names}


def cut(
    graph: Graph,
    axes: Mapping[str, int],
    inputs: Mapping[str, Split],
    *,
    outputs: Mapping[str, Split] | None = None,
    turns: Sequence[str] = (),
) -> Sharded:
    """Cut ``graph`` for a mesh: ``inputs`` says by name which mesh axis divides which axis of an input.

    ``outputs`` says how results are wanted; the others stay as they come out, split or not. Along the axes ``turns``
    there are no devices but turns that one device takes: all that can be exchanged are sums (``mesh.chunk_sum``), and
    what reads one is done once, after all turns. So is whatever belongs to an optimizer's update.
    """
    mesh = Mesh({name: n for name, n in axes.items() if n > 1})
    return _Walk(graph, mesh, frozenset(turns) & frozenset(mesh.axes)).run(inputs, outputs or {})


class _Walk:
    """``made`` maps values of the whole graph to the local ones; ``splits`` and ``open`` say what these are."""

    def __init__(self, graph: Graph, mesh: Mesh, turns: frozenset[str], *, inside: bool = False) -> None:
        self.graph, self.mesh, self.turns = graph, mesh, turns
        self.inside = inside  # a loop, which a turn does to its end
        self.builder = Builder(graph.name)
        self.made: dict[Value, Value] = {}
        self.splits: dict[Value, Split] = {}
        self.open: dict[Value, frozenset[str]] = {}
        self.known: dict[tuple[Value, Split], Value] = {}  # values brought into another split
        self.node: Node | None = None
        self.wanted: dict[Value, Split] = {}
        self.collecting: set[Value] = set()  # carries of a loop that only have something added
        self.once: set[Value] = set()  # what is made after all turns

    def run(
        self, inputs: Mapping[str, Split], outputs: Mapping[str, Split], left_open: Collection[str] = ()
    ) -> Sharded:
        for i in self.graph.inputs:
            self._input(i, inputs.get(i.name))
        self.wanted = {
            v: self._clean(outputs[name])
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)
            if name in outputs
        }
        with self.builder:
            for node in self.graph.nodes:
                self.step(node)
            parts: dict[str, Part] = {}
            values: list[Value] = []
            for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True):
                maker = self.node = self.graph.producers.get(v)
                with self.builder.at(*((maker.origin, maker.tags) if maker is not None else (NOWHERE,))):
                    wanted = self._clean(outputs[name]) if name in outputs else None
                    values.append(self._leaving(v, wanted, name in left_open))
                parts[name] = Part(self.splits[v] if wanted is None else wanted, self.open.get(v, frozenset()))
        given = {i.name: self.splits[i.value] for i in self.graph.inputs if i.role != "constant"}
        made = Graph(
            tuple(self.builder.inputs),
            tuple(self.builder.nodes),
            self.graph.carrying(values),
            self.graph.name,
            tuple(self.builder.guards),
        )
        return Sharded(made, self.mesh, given, parts)

    def _leaving(self, v: Value, wanted: Split | None, left_open: bool) -> Value:
        """An output as it is wanted, or as it comes."""
        if wanted is not None:
            return self.as_split(v, wanted)
        if left_open:
            return self.made[v]
        if any(BLOCKS in a for a in self.splits[v] if a is not None):
            plain = tuple(a if a is not None and BLOCKS not in a else None for a in self.splits[v])
            self.made[v], self.splits[v] = self.as_split(v, plain), plain
        return self.settled(v)

    def _clean(self, split: Split) -> Split:
        return tuple(a if self.mesh.size(a) > 1 else None for a in split)

    def _input(self, i: Input, split: Split | None) -> None:
        if not i.type.is_static:
            raise UnsupportedError(
                f"input '{i.name}' has a size that is not known: {i.type}",
                hint="give its shape as numbers when compiling: devices share work of known size",
            )
        chosen = self._clean(split) if split is not None else whole(len(i.type.shape))
        for k, axis in enumerate(chosen):
            if not self.mesh.divides(axis, sizes(i.value)[k]):
                raise OperationError(f"axis {k} of '{i.name}' cannot be divided by {self.mesh.size(axis)}")
        here = Value(self.builder.unique(i.name), TensorType(i.type.dtype, self.mesh.local(sizes(i.value), chosen)))
        self.builder.inputs.append(replace(i, value=here))
        self.made[i.value], self.splits[i.value] = here, chosen

    # -- one node ----------------------------------------------------------------------------------------------------
    def step(self, node: Node) -> None:
        self.node = node
        with self.builder.at(node.origin, node.tags):
            if node.op is scan_op:
                self._scan(node)
            elif node.op is if_op:
                self._if(node)
            elif self._stays_open(node):
                self._linear(node)
            elif not (self._looked_up(node) or self._row_by_row(node)):
                self._plain(node)

    def _plain(self, node: Node) -> None:
        have = [None if v is None else self.splits[v] for v in node.operands]
        split = any(s is not None and any(s) for s in have)
        found = local(self.graph, node, have, self.mesh) if split else None
        if found is None and split and node.op.composite:
            self._apart(node)
            return
        if any(v in self.open for v in node.operands if v is not None):
            for v in node.operands:
                if v is not None:
                    self.settled(v)
            self._plain(node)  # of which some may be in parts now
            return
        if found is None:
            needs = tuple(None if v is None else whole(v.ndim) for v in node.operands)
            found = Local(needs, tuple(whole(v.ndim) for v in node.results))
        operands = [
            None if v is None or need is None else self.as_split(v, need)
            for v, need in zip(node.operands, found.needs, strict=True)
        ]
        self._emit(node, operands, found)

    def _emit(self, node: Node, operands: Sequence[Value | None], found: Local) -> None:
        if self.turns and self._is_once(node):
            if any(a in self.turns for need in found.needs for a in need or ()):
                raise self._mixed()
            self.once.update(node.results)
        names = [v.name for v in node.results]
        made = self.builder.emit(
            node.op,
            operands,
            {**node.attributes, **found.attributes},
            node.regions,
            names[0] if len(names) == 1 else None,
        )
        for whole_value, value, split in zip(node.results, made, found.gives, strict=True):
            expected = self.mesh.local(sizes(whole_value), split)
            if value.shape != expected:
                raise OperationError(
                    f"the part of %{whole_value.name} that a device makes is {list(value.shape)}, not {list(expected)}",
                    facts=[repr(node), str(node.origin)],
                )
            if found.scale != 1.0:
                value = operation("mul")(value, found.scale)
            for axis, kind in found.joins.items():
                value = self._exchange("all_reduce", value, axis, kind=kind)
            self.made[whole_value], self.splits[whole_value] = value, split
            if found.sums:
                self.open[whole_value] = found.sums

    def _is_once(self, node: Node) -> bool:
        return node.tags.get("phase") == "update" or any(v in self.once for v in node.operands if v is not None)

    def _apart(self, node: Node) -> None:
        """A composite without a rule is taken apart."""
        types = [None if v is None else v.type for v in node.operands]
        body: Graph = node.op.decompose(types, node.attributes)
        stage = Builder(body.name)
        stage.origin, stage.tags = node.origin, node.tags
        results = stage.inline(body, node.operands)
        for i in stage.inputs:
            self._input(i, None)
        outer, self.graph = self.graph, _with_body(self.graph, stage, results)
        for inner in stage.nodes:
            self.step(inner)
        self.graph = outer
        for v, result in zip(node.results, results, strict=True):
            self.made[v], self.splits[v] = self.made[result], self.splits[result]
            if result in self.open:
                self.open[v] = self.open[result]
            if result in self.once:
                self.once.add(v)

    # -- sums still to be made ----------------------------------------------------------------------------------------
    def _stays_open(self, node: Node) -> bool:
        """Whether the sums that operands wait for can as well be made of the result."""
        operands = [v for v in node.operands if v is not None and v not in self.collecting]
        waits = [self.open.get(v, frozenset()) for v in operands]
        if not any(waits) or any(len(self.graph.users.get(v, ())) > 1 for v in operands if v in self.open):
            return False
        if self.turns and self._is_once(node):
            return False
        op = node.op
        if op.name == "cast":
            return operands[0].dtype.is_float and node.result.dtype.is_float
        if op.name == "scatter_nd_add":
            into = operands[0]
            return bool(waits[2]) and not (waits[0] or waits[1]) and is_zero(self.graph, into)
        if op.name == "pad":
            return bool(node.attributes["mode"] == "constant" and node.attributes["value"] == 0)
        if len(operands) == 1:
            return bool(op.linear)
        if op.variadic or op.linear == " ".join(op.operands):  # jointly: all operands wait for the same sums
            same = bool(op.linear) and all(w == waits[0] for w in waits)
            same = same and (not op.elementwise or len({v.type for v in operands}) == 1)
            return same and all(self.splits[v] == self.splits[operands[0]] for v in operands)
        scaled = op.elementwise and len(operands) == 2 and linear_in(node, 0)  # by a number that all devices have
        return bool(scaled and waits[0] and not waits[1] and operands[1].ndim == 0)

    def _linear(self, node: Node) -> None:
        waits = next(self.open[v] for v in node.operands if v in self.open)
        have = [None if v is None else self.splits[v] for v in node.operands]
        found = local(self.graph, node, have, self.mesh)
        assert found is not None
        operands = [
            self.as_split(v, need, closed=False)
            for v, need in zip(node.operands, found.needs, strict=True)
            if v is not None and need is not None
        ]
        self._emit(node, operands, found)
        self.open[node.result] = waits | found.sums

    def settled(self, v: Value) -> Value:
        """The value with its sums made."""
        for axis in sorted(self.open.pop(v, frozenset())):
            wanted = self.wanted.get(v) or self._met(v, axis)
            if wanted is not None and axis in wanted and self.splits[v][wanted.index(axis)] is None:
                k = wanted.index(axis)
                self.made[v] = self._exchange("reduce_scatter", self.made[v], axis, axis=k)
                self.splits[v] = tuple(axis if j == k else a for j, a in enumerate(self.splits[v]))
            else:
                self.made[v] = self._exchange("all_reduce", self.made[v], axis, kind="sum")
            if axis in self.turns:
                self.once.add(v)
        return self.made[v]

    def _met(self, v: Value, axis: str) -> Split | None:
        """The split along an axis of an argument that a value meets element by element: of a gradient's parameter."""
        front, seen = [v], {v}
        while front:
            for node in self.graph.users.get(front.pop(), ()):
                alike = node.op.elementwise
                if not alike and node.op is not if_op:  # in which an optimizer's update may be
                    continue
                for other in node.operands:
                    if other in self.graph.input_of and other.shape == v.shape and axis in self.splits[other]:
                        return self.splits[other]
                following = [r for r in node.results if alike and r.shape == v.shape and r not in seen]
                front += following
                seen.update(following)
        return None

    # -- exchanges ----------------------------------------------------------------------------------------------------
    def as_split(self, v: Value, need: Split, *, closed: bool = True) -> Value:
        """The local value of ``v`` in another split; its sums made unless it is not to be ``closed``."""
        if closed:
            self.settled(v)
        known = self.known.get((v, need))
        if known is not None:
            return known
        value = self.made[v]
        for k, axis in enumerate(self.splits[v]):
            if axis is not None and need[k] != axis:
                value = self._gathered(value, axis, k)
        for k, axis in enumerate(need):
            if axis is not None and self.splits[v][k] != axis:
                value = self._cut(value, axis, k)
        if v not in self.open:
            self.known[v, need] = value
        return value

    def _exchange(self, name: str, value: Value, mesh_axis: str, **attributes: Any) -> Value:
        if mesh_axis not in self.turns:
            op = operation(f"mesh.{name}")
            complete = op.complete({"mesh": mesh_axis, "parts": self.mesh.size(mesh_axis), **attributes})
            return self.builder.emit(op, (value,), op.canonical([value.type], complete))[0]
        if self.inside or attributes.get("kind") != "sum":
            raise self._mixed()
        made: Value = operation("mesh.chunk_sum")(value)
        return made

    def _mixed(self) -> UnsupportedError:
        node = self.node
        return UnsupportedError(
            "this model mixes the examples of a batch, which cannot be cut into chunks",
            facts=[repr(node), str(node.origin)] if node is not None else [],
            hint="pipeline_chunks=1, or leave out what looks at the whole batch: batch normalisation in training, "
            "a loss divided by a sum over the batch",
        )

    def _gathered(self, value: Value, entry: str, k: int) -> Value:
        """The whole along axis ``k`` of what devices have in parts."""
        if blocks(entry) == 1:
            return self._exchange("all_gather", value, entry, axis=k)
        made = self._exchange("all_gather", _taken_apart(value, entry, k), base(entry), axis=k + 1)
        return _joined(made, k)

    def _cut(self, value: Value, entry: str, k: int) -> Value:
        """The part along axis ``k`` of a value that every device has whole."""
        if blocks(entry) > 1:
            return _joined(self._cut(_taken_apart(value, entry, k), base(entry), k + 1), k)
        return self._cut_once(value, entry, k)

    def _cut_once(self, value: Value, mesh_axis: str, k: int) -> Value:
        length = value.shape[k]
        assert isinstance(length, int)
        part = length // self.mesh.size(mesh_axis)
        start = operation("reshape")(self.place(mesh_axis) * part, shape=(1,))
        zero = operation("full")(shape=(1,), value=0, dtype=int32)
        starts = operation("concat")(*[start if j == k else zero for j in range(value.ndim)], axis=0)
        shape = tuple(part if j == k else n for j, n in enumerate(value.shape))
        made: Value = operation("dynamic_slice")(value, starts, sizes=shape)
        return made

    def place(self, mesh_axis: str) -> Value:
        """The device's place along an axis, an input."""
        name = INDEX + mesh_axis
        for i in self.builder.inputs:
            if i.name == name:
                return i.value
        return self.builder.input(name, (), int32)

    # -- a table whose rows are on several devices --------------------------------------------------------------------
    def _looked_up(self, node: Node) -> bool:
        """Each device finds the rows it has, and zeros for others; their sum is the answer."""
        if node.op is not ops.take:
            return False
        table, at = node.operands
        assert table is not None
        assert at is not None
        axis = node.attributes["axis"]
        holder = self.splits[table][axis]
        if holder is None or holder in self.turns or holder in self.splits[at] or not table.dtype.is_float:
            return False
        count = sizes(table)[axis]
        part = count // self.mesh.size(holder)
        where, op = self.splits[at], operation
        outer = {a for a in where if a is not None}
        kept = tuple(None if a in outer else a for a in self.splits[table])
        places = self.as_split(at, where)
        rows = self.as_split(table, kept)
        places = op("where")(op("less")(places, 0), places + count, places)
        places = op("clip")(places, low=0, high=count - 1) - op("cast")(self.place(holder) * part, dtype=places.dtype)
        mine = op("logical_and")(op("greater_equal")(places, 0), op("less")(places, part))
        found = op("take")(rows, op("where")(mine, places, 0), axis=axis)
        mask = op("reshape")(mine, shape=(*[1] * axis, *mine.shape, *[1] * (table.ndim - axis - 1)))
        value = op("where")(mask, found, 0.0)
        self.made[node.result] = value
        self.splits[node.result] = (*kept[:axis], *where, *kept[axis + 1 :])
        self.open[node.result] = frozenset({holder})
        return True

    # -- rows that name their own place -------------------------------------------------------------------------------
    def _row_by_row(self, node: Node) -> bool:
        """Whether places count along split axes (``x[i, places[i]]``): then each device has those it needs."""
        if not _takes_places(node):
            return False
        x, at, *updates = [v for v in node.operands if v is not None]
        own = [] if node.attributes.get("batch_dims") else own_places(self.graph, x, at)
        chosen: dict[int, str] = {}
        for k in own:
            entry = next(
                (a for v in (x, at, *updates) if (a := self.splits[v][k]) is not None and BLOCKS not in a), None
            )
            if entry is not None and entry not in chosen.values():
                chosen[k] = entry
        if not chosen:
            return False
        needs = [tuple(chosen.get(k) for k in range(v.ndim)) for v in (x, at, *updates)]
        operands = [self.as_split(v, need) for v, need in zip((x, at, *updates), needs, strict=True)]
        first = [operation("full")(shape=(1,), value=0, dtype=at.dtype)] * sizes(at)[-1]
        for k, entry in chosen.items():
            start = self.place(entry) * (sizes(x)[k] // self.mesh.size(entry))
            first[k] = operation("reshape")(operation("cast")(start, dtype=at.dtype), shape=(1,))
        operands[1] = operands[1] - operation("concat")(*first, axis=0)
        self._emit(node, operands, Local(tuple(needs), (tuple(chosen.get(k) for k in range(node.result.ndim)),)))
        return True

    # -- branches -----------------------------------------------------------------------------------------------------
    def _if(self, node: Node) -> None:
        """Operands are split as they come; results as both branches leave them. All devices take the same branch."""
        choice, *read = [v for v in node.operands if v is not None]
        for v in read:
            self.settled(v)
        have = [self.splits[v] for v in read]
        made = [self._branch(region, have, ()) for region in node.regions]
        leaving = [[p.split for p in branch.outputs.values()] for branch in made]
        gives = [
            tuple(a if a == b else None for a, b in zip(*both, strict=True)) for both in zip(*leaving, strict=True)
        ]
        if leaving != [gives, gives]:
            made = [self._branch(region, have, gives) for region in node.regions]
        axes = sorted({axis for branch in made for axis in branch.indices.values()})
        regions = tuple(_with_places(branch.graph, axes) for branch in made)
        needs = [whole(choice.ndim), *have]
        operands = [self.as_split(v, need) for v, need in zip((choice, *read), needs, strict=True)]
        places = [self.place(axis) for axis in axes]
        self._emit(node.replaced(regions=regions), [*operands, *places], Local(tuple(needs), tuple(gives)))

    def _branch(self, region: Graph, have: Sequence[Split], gives: Sequence[Split]) -> Sharded:
        numbered = _numbered(region)
        names = {i.name: s for i, s in zip(region.arguments, have, strict=True)}
        wanted = {str(k): s for k, s in enumerate(gives)}
        return _Walk(numbered, self.mesh, self.turns, inside=True).run(names, wanted)

    # -- loops --------------------------------------------------------------------------------------------------------
    def _scan(self, node: Node) -> None:
        """Carries are split as the body leaves them, sequences as they come but for the axis of steps.

        A carry that begins as zeros and only has something added is a sum over devices when the loop has ended.
        """
        carries, sequences = node.attributes["carries"], node.attributes["sequences"]
        body, last = node.regions[0], carries + sequences
        have = [self.splits[v] for v in node.operands if v is not None]
        steps = [(None, *s[1:]) for s in have[carries:last]]
        collected = {
            k for k in _collected(body, carries) if (v := node.operands[k]) is not None and is_zero(self.graph, v)
        }
        entering = list(have[:carries])
        made = self._body(body, entering, steps, have[last:], collected)
        for _ in range(2 * len(self.mesh.axes) + 1):  # zeros come in whole and go round split
            leaving = [made.outputs[str(k)].split for k in range(carries)]
            if leaving == entering:
                break
            entering = leaving
            made = self._body(body, entering, steps, have[last:], collected)
        else:
            entering = [whole(len(s)) for s in entering]
            made = self._body(body, entering, steps, have[last:], collected, entering)
        gives = [made.outputs[str(k)].split for k in range(len(body.outputs))]
        places = [self.place(axis) for axis in made.indices.values()]
        needs = [*entering, *steps, *have[last:]]
        operands = [self.as_split(v, need) for v, need in zip(node.operands, needs, strict=True) if v is not None]
        found = Local(tuple(needs), (*gives[:carries], *((None, *s) for s in gives[carries:])))
        self._emit(node.replaced(regions=(made.graph,)), [*operands, *places], found)
        for k in collected:
            if sums := made.outputs[str(k)].sums:
                self.open[node.results[k]] = sums

    def _body(
        self,
        body: Graph,
        entering: Sequence[Split],
        steps: Sequence[Split],
        rest: Sequence[Split],
        collected: set[int],
        leaving: Sequence[Split] = (),
    ) -> Sharded:
        numbered = _numbered(body)
        walk = _Walk(numbered, self.mesh, self.turns, inside=True)
        walk.collecting = {body.arguments[k].value for k in collected}
        given = [*entering, *(s[1:] for s in steps), *rest]
        names = {i.name: s for i, s in zip(body.arguments, given, strict=True)}
        wanted = {str(k): s for k, s in enumerate(leaving) if k not in collected}
        return walk.run(names, wanted, left_open={str(k) for k in collected})


def _takes_places(node: Node) -> bool:
    """Whether each row of the indices names a place along several axes."""
    axes = node.axes
    if not axes.lookups or node.op.composite:
        return False
    indices = axes.operands[axes.lookups[0][0]]
    role = axes.role(indices[-1][0]) if indices else None
    return role is not None and role.kind == "whole"


def _with_places(branch: Graph, axes: Sequence[str]) -> Graph:
    """The branch with its places along these axes as its last inputs, read or not."""
    names = [INDEX + axis for axis in axes]
    known = {i.name: i for i in branch.inputs if i.name in names}
    places = [known.get(name) or Input(Value(name, TensorType(int32, ()))) for name in names]
    rest = [i for i in branch.inputs if i.name not in known]
    return branch.replaced(inputs=(*rest, *places))


def _collected(body: Graph, carries: int) -> set[int]:
    """The carries that only have something added at each step."""
    found = set()
    for k, (entering, leaving) in enumerate(zip(body.arguments[:carries], body.outputs[:carries], strict=True)):
        node = body.producers.get(leaving)
        if node is not None and node.op is ops.add and body.users.get(entering.value) == (node,):
            found.add(k)
    return found


def _taken_apart(value: Value, entry: str, k: int) -> Value:
    """The value with the blocks of axis ``k`` as an axis of their own."""
    n, count = value.shape[k], blocks(entry)
    assert isinstance(n, int)
    made: Value = operation("reshape")(value, shape=(*value.shape[:k], count, n // count, *value.shape[k + 1 :]))
    return made


def _joined(value: Value, k: int) -> Value:
    shape = (*value.shape[:k], value.shape[k] * value.shape[k + 1], *value.shape[k + 2 :])
    made: Value = operation("reshape")(value, shape=shape)
    return made


def _with_body(graph: Graph, stage: Builder, results: Sequence[Value]) -> Graph:
    """The graph with a composite's body beside it, to look up producers and readers of its values in."""
    return Graph((*graph.inputs, *stage.inputs), (*graph.nodes, *stage.nodes), (*graph.results, *as_results(results)))


def _numbered(region: Graph) -> Graph:
    """The region with its results named by their places."""
    return region.replaced(results=tuple(Output(v, str(k)) for k, v in enumerate(region.outputs)))


__all__ = ["INDEX", "Part", "Sharded", "cut"]
