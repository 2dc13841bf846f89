"""The predecessor's ``Model``: layers joined by ``|=`` and ``+=``, whose terminals are edges with local names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from mithril import ModelError
from mithril_compat.language.block import Block, Joining, Leaf
from mithril_compat.language.connection import (
    NOT_GIVEN,
    TBD,
    Connection,
    Constant,
    Tensor,
    apply,
    holds_connections,
)
from mithril_compat.notices import old_name


class Model(Block):
    """A block of other blocks. Names are local to the model; edges are shared with the blocks."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.blocks: list[Block] = []
        self.exposed: list[str] = []
        self.states: list[tuple[Connection, Connection, Any]] = []  # input, output, initial value
        self.is_frozen = False

    # -- joining -----------------------------------------------------------------------------------------------------
    def __ior__(self, other: Block | Joining) -> Self:
        other = other if isinstance(other, Joining) else Joining(other, {})
        self.join(other.model, other.connections)
        return self

    __or__ = __ior__

    def __iadd__(self, other: Block | Joining) -> Self:
        other = other if isinstance(other, Joining) else Joining(other, {})
        block, targets = other.model, dict(other.connections)
        if self.blocks:
            edges = {id(block.edges[key].edge) for key in targets if key in block.edges}
            free = [c for c in distinct(block.cins) if id(c) not in edges]
            if len(free) != 1:
                names = ", ".join(repr(c) for c in free) or "none"
                block._refuse(f"has not exactly one free cin for +=: {names}", "call set_cin(...), or use |=")
            self.join(block, targets, chained=(free[0], self._single("cout", self.couts)))
        else:
            self.join(block, targets)
        return self

    __add__ = __iadd__

    def join(self, block: Block, targets: dict[str, Any], chained: tuple[Connection, Connection] | None = None) -> None:
        """Add a block whose terminals are merged with their targets."""
        if self.is_frozen:
            raise ModelError("the model is frozen and cannot be extended", hint="use it as a block of another model")
        if block.parent is not None:
            raise ModelError(f"{type(block).__name__} already belongs to a model", hint="construct another one")
        targets = {key: self._reached(target) for key, target in targets.items() if target is not NOT_GIVEN}
        read = {id(e) for b in self.blocks for e in free_edges(b)}
        block.parent, block.pending = self, None
        self.blocks.append(block)
        terminals = [(block.edges[key].edge, target) for key, target in targets.items()]
        if chained is not None:
            terminals.append((chained[0].edge, chained[1]))
        couts = [c.edge for c in block.couts]
        produced = {id(leaf.edges[o].edge) for _, leaf in block.leaves() for o in leaf.outputs}
        for edge, target in terminals:
            if id(edge) not in produced and (source := self._edge(target)) is not None:
                self.couts = [c for c in self.couts if c.edge is not source.edge]
            self._merge(edge, target)
        self.cins = distinct([*self.cins, *block.cins])
        self.cins = [c for c in self.cins if c.producer is None and not c.is_valued]
        self.couts = distinct([*self.couts, *(c for c in couts if id(c.edge) not in read or c.edge.exposed)])
        self._adopt_names(block)

    def _edge(self, target: Any) -> Connection | None:
        if isinstance(target, str):
            return self.edges[target].edge if target in self.edges else None
        return target.edge if isinstance(target, Connection) else None

    def _reached(self, target: Any) -> Any:
        """Return a target whose layers belong to this model; tuples with connections become layers."""
        if holds_connections(target):
            target = joined_parts(target)
        if isinstance(target, Connection):
            self.adopt(target)
        return target

    def adopt(self, connection: Connection) -> None:
        """Add the layer that produces a connection, if no model has it yet."""
        producer = connection.edge.producer
        if producer is None:
            return
        outermost = producer.outermost()
        if outermost is self:
            return
        if outermost.pending is not None:
            self.join(outermost, dict(outermost.pending))
        elif self not in ancestors(producer) and outermost is not self.outermost():
            raise ModelError(
                f"{connection!r} belongs to another model", hint="pass it through a terminal of that model"
            )

    def _merge(self, edge: Connection, target: Any) -> None:
        if isinstance(target, str):
            self._name(edge, target)
        elif isinstance(target, Connection):
            target.edge.merge(edge)
            if target.name is not None and target.home is None:
                target.home = self
                self._name(target.edge, target.name)
        else:
            Connection(value=target).edge.merge(edge)

    def _name(self, edge: Connection, name: str) -> None:
        existing = self.edges.get(name)
        if existing is not None:
            existing.edge.merge(edge)
            return
        self.edges[name] = edge

    def _adopt_names(self, block: Block) -> None:
        """Expose the outputs that an IOKey of a call declared."""
        for name, edge in self.edges.items():
            if edge.edge.exposed and edge.edge.producer is not None and name not in self.exposed:
                self.exposed.append(name)

    # -- terminals ---------------------------------------------------------------------------------------------------
    @property
    def input_keys(self) -> list[str]:
        return [name for name, e in self.edges.items() if e.edge.producer is None and not e.is_valued]

    @property
    def output_keys(self) -> list[str]:
        return list(self.exposed)

    @property
    def dag(self) -> list[Block]:
        return self.blocks

    def positional(self) -> tuple[str, ...]:
        return (*self.input_keys, *self.exposed)

    def outputs_in_order(self) -> list[Connection]:
        return [self.edges[name] for name in self.exposed] or list(self.couts)

    def terminal_names(self) -> tuple[str, ...]:
        return (
            *self.edges,
            *(n for c in (*self.cins, *self.couts) if (n := c.edge.origin_name) and n not in self.edges),
        )

    def _targets(self, args: Iterable[Any], keywords: Any) -> dict[str, Any]:
        targets = super()._targets(args, keywords)
        for name in targets:
            if name not in self.edges:  # a usual terminal without a name here
                usual = [c for c in (*self.cins, *self.couts) if c.edge.origin_name == name]
                self.edges[name] = usual[0].edge
        return targets

    def edge_of(self, terminal: str | Connection) -> Connection:
        if isinstance(terminal, Connection):
            self.adopt(terminal)
        return super().edge_of(terminal)

    def leaves(self) -> Iterable[tuple[tuple[str, ...], Leaf]]:
        names = unique_names(self.blocks)
        for block, name in zip(self.blocks, names, strict=True):
            for path, leaf in block.leaves():
                yield (name, *path), leaf

    # -- changes -----------------------------------------------------------------------------------------------------
    def expose_keys(self, *terminals: str | Connection, **named: str | Connection) -> None:
        """Make connections outputs of the model; keywords name them."""
        old_name("expose_keys")
        for terminal in terminals:
            edge = self.edge_of(terminal)
            name = terminal if isinstance(terminal, str) else self._name_of(edge)
            self._expose(edge, name or f"output_{len(self.exposed)}")
        for name, terminal in named.items():
            self._expose(self.edge_of(terminal), name)

    def _name_of(self, edge: Connection) -> str | None:
        return next((name for name, e in self.edges.items() if e.edge is edge), None)

    def expose(self, connection: Connection) -> None:
        """Make a named connection an output."""
        name = self._name_of(connection.edge)
        assert name is not None
        self._expose(connection.edge, name)

    def _expose(self, edge: Connection, name: str) -> None:
        if (before := self._name_of(edge)) not in (None, name):
            self.edges.pop(str(before))
        self.edges[name] = edge
        if name not in self.exposed and edge.producer is not None:
            self.exposed.append(name)

    def rename_key(self, connection: str | Connection, key: str) -> None:
        """Give a connection another name in this model."""
        old_name("rename_key")
        if key in self.edges:
            raise ModelError(f"the model has a terminal '{key}' already")
        edge = self.edge_of(connection)
        before = self._name_of(edge)
        self.edges.pop(str(before), None)
        self.edges[key] = edge
        self.exposed = [key if name == before else name for name in self.exposed]
        edge.origin_name = key

    def merge_connections(self, *connections: str | Connection, name: str | None = None) -> None:
        """Make one connection of several."""
        old_name("merge_connections")
        edges = [self.edge_of(c) for c in connections]
        names = {n for e in edges if (n := self._name_of(e)) is not None}
        if name is not None and name in self.edges and name not in names:
            raise ModelError(f"the model has a terminal '{name}' already", hint="choose another name=")
        if name is None and len(names) > 1:
            listed = ", ".join(sorted(names))
            raise ModelError(f"connections with the names {listed} become one", hint="pass name=")
        for edge in edges[1:]:
            edges[0].merge(edge)
        for old in names:
            self.edges.pop(old)
        label = name or next(iter(names), None)
        if label is not None:
            self.edges[label] = edges[0].edge
            edges[0].edge.origin_name = label
        self.exposed = list(dict.fromkeys(label if n in names and label else n for n in self.exposed))
        self.cins = [c for c in distinct(self.cins) if c.producer is None]

    def bind_state_keys(
        self, input: str | Connection, output: str | Connection, initial_value: Any = NOT_GIVEN
    ) -> None:
        """Make an input the value that an output had in the call before."""
        old_name("bind_state_keys")
        source, result = self.edge_of(input), self.edge_of(output)
        if source.producer is not None or result.producer is None:
            raise ModelError("bind_state_keys takes an input, then an output that a layer produces")
        source.differentiable = False
        initial = Tensor(initial_value) if isinstance(initial_value, Constant) else initial_value
        self.states.append((source, result, source.value if initial is NOT_GIVEN else initial))
        self.couts = [c for c in self.couts if c.edge is not result]
        self.cins = [c for c in self.cins if c.edge is not source]

    def add_constraint(
        self, fn: Callable[..., Any], keys: Iterable[str], type: Any = None, dependencies: Any = None
    ) -> None:
        """Refuse: constraints were functions of the predecessor's solver of shapes."""
        raise ModelError(
            "add_constraint is not offered: its functions update the predecessor's symbolic shapes",
            facts=[f"of: {', '.join(keys)}"],
            hint="declare sizes by set_shapes with equal names, or check them in build of a layer of today",
        )

    def _freeze(self) -> None:
        self.is_frozen = True

    def freeze(self) -> None:
        """Refuse further changes."""
        old_name("freeze")
        self._freeze()

    @classmethod
    def create(cls, *outputs: Connection, name: str | None = None, **named: Connection) -> Model:
        """Return the model that computes these connections."""
        model = cls(name=name)
        for output in (*outputs, *named.values()):
            model.adopt(output)
        for key, output in named.items():
            model._expose(output.edge, key)
        model.couts = distinct([*outputs, *named.values()])
        model._freeze()
        return model

    def summary(self, **shown: Any) -> None:
        """Print the layers; the tables of mithril need shapes: ``compile`` and then ``summary``."""
        for path, leaf in self.leaves():
            print(f"{'.'.join(path)}: {type(leaf).__name__}")


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of connections into a layer that is called with connections."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]

    def call(*args: Any, name: str | None = None, **settings: Any) -> Any:
        inputs = [Connection(key) for key, _ in zip(names, args, strict=False)]
        model = Model.create(function(*inputs, **settings), name=name)
        for key, edge in zip(names, inputs, strict=False):
            model.edges.setdefault(key, edge)
        return model(**dict(zip(names, args, strict=False)))

    return call


def joined_parts(target: Any) -> Any:
    """Return the connection of a tuple, list or slice that contains connections."""
    if isinstance(target, slice):
        return apply("slice", *(joined_parts(part) for part in (target.start, target.stop, target.step)))
    if not holds_connections(target):
        return target
    parts = [joined_parts(part) for part in target]
    return apply("tuple" if isinstance(target, tuple) else "list", *parts, n=len(parts))


def free_edges(block: Block) -> Iterable[Connection]:
    """Yield the edges that the layers of a block read."""
    for _, leaf in block.leaves():
        for key in leaf.input_names:
            yield leaf.edges[key].edge


def ancestors(block: Block) -> list[Block]:
    models: list[Block] = []
    while block.parent is not None:
        block = block.parent
        models.append(block)
    return models


def distinct(connections: Iterable[Connection]) -> list[Connection]:
    return list({id(c.edge): c.edge for c in connections}.values())


def unique_names(blocks: Iterable[Block]) -> list[str]:
    """Return names of blocks: their own, or the class's; equal ones are numbered."""
    stems = [block.name or block.default_name for block in blocks]
    counts: dict[str, int] = {}
    names = []
    for stem in stems:
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        names.append(stem if stems.count(stem) == 1 else f"{stem}_{number}")
    return names


__all__ = ["TBD", "Connection", "Constant", "Model", "Tensor", "functional"]
