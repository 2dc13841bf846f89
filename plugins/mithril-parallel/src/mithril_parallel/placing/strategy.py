"""Which parameters and inputs are split, and how: the batch over ``data``, weights in pairs over ``model``.

The default for ``model`` is Megatron's. Of two products with nothing between them that needs whole rows, the first
weight is split by columns and the second by rows, so that one sum after the second is all the exchange there is.
Whether a weight is the first of such a pair is found by following its product through the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mithril.base import OptionError
from mithril.ir import Factors, Graph, Input, Node, OpAxes, Value, decompose, is_product, is_unchanged, is_view
from mithril_parallel.mesh import DATA, MODEL, Mesh, Split, whole
from mithril_parallel.placing.propagate import Placed, step
from mithril_parallel.placing.rules import Passage, passage, sizes

LINK = "link/"  # inputs and outputs of this name go from stage to stage
WEIGHTS, ACTIVATIONS = "weights", "activations"  # groups that tensor_split_dims may name


@dataclass
class Choice:
    """Splits of inputs by name, and what was left whole although it was asked or would have helped, with the reason."""

    mesh: Mesh
    splits: dict[str, Split] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, rank: int) -> Split:
        return self.splits.get(name, whole(rank))


def choose(
    graph: Graph,
    mesh: Mesh,
    splits: Mapping[str, int] | None = None,
    *,
    fsdp: bool = False,
    chunked: bool = False,
) -> Choice:
    """Splits for the inputs of a graph; ``splits`` (group, name or pattern -> axis) overrides the default.

    With ``fsdp`` every parameter is also split over ``data``, along its longest axis that can be. ``chunked``: those
    along ``data`` are no devices but chunks, of which an error speaks then.
    """
    choice = Choice(mesh)
    wanted = dict(splits or {})
    graph = decompose(graph, _has_rule)
    _batch(graph, choice, wanted, chunked)
    if mesh.size(MODEL) > 1:
        _by_hand(graph, choice, wanted)
        if not _explicit(wanted):
            _Pairs(graph, choice).run()
    _slots(graph, choice)
    if fsdp:
        _fully(graph, choice)
    _follow(graph, choice)
    return choice


def _has_rule(node: Node) -> bool:
    """Whether a node's splits are known as it stands; else the nodes of its body are looked at."""
    return not node.op.composite or node.op.elementwise or node.op.declared_axes is not None


def forward_nodes(graph: Graph) -> list[Node]:
    """The nodes that the model itself has; those of its gradients follow them."""
    return [n for n in graph.nodes if n.tags.get("phase") not in ("backward", "update")]


# -- the batch ------------------------------------------------------------------------------------------------------
def _batch(graph: Graph, choice: Choice, wanted: Mapping[str, int], chunked: bool) -> None:
    parts = choice.mesh.size(DATA)
    if parts == 1:
        return
    axis = wanted.get(ACTIVATIONS, 0)
    inputs = [i for i in graph.with_role("input") if i.value.ndim > axis]
    own = [i for i in inputs if not i.name.startswith(LINK)]  # what stages hand on need not have the batch in front
    inputs = own or [i for i in inputs if sizes(i.value)[axis] % parts == 0]
    lengths = [sizes(i.value)[axis] for i in inputs]
    if not lengths:
        return
    length = max(lengths, key=lambda n: (lengths.count(n), n))
    if length % parts:
        named = next(i.name for i, n in zip(inputs, lengths, strict=True) if n == length)
        fits = f"a batch of {parts * max(1, round(length / parts))} (drop_last=True for the end of a DataLoader)"
        if chunked:
            possible = [n for n in range(1, parts) if length % n == 0]
            raise OptionError(
                f"{length} items of input '{named}' cannot be cut into {parts} chunks",
                hint=f"{fits}, or pipeline_chunks={possible[-1]}",
            )
        raise OptionError(
            f"{length} items of input '{named}' cannot be divided over {parts} devices",
            facts=[f"the mesh is {choice.mesh}"],
            hint=f"{fits}, or fewer devices along '{DATA}'",
        )
    for i, n in zip(inputs, lengths, strict=True):
        if n == length:
            choice.splits[i.name] = tuple(DATA if k == axis else None for k in range(i.value.ndim))
        elif n > 1:
            choice.left[i.name] = f"axis {axis} has {n} items, the batch {length}"


# -- by hand --------------------------------------------------------------------------------------------------------
def _explicit(wanted: Mapping[str, int]) -> bool:
    return any(key != ACTIVATIONS for key in wanted)


def _by_hand(graph: Graph, choice: Choice, wanted: Mapping[str, int]) -> None:
    parts = choice.mesh.size(MODEL)
    parameters = graph.with_role("param")
    for key, axis in wanted.items():
        if key == ACTIVATIONS:
            continue
        chosen = [
            i for i in parameters if (key == WEIGHTS and i.value.ndim > 1) or i.name == key or fnmatchcase(i.name, key)
        ]
        if not chosen:
            names = [i.name for i in parameters]
            raise OptionError(
                f"tensor_split_dims: no parameter is called '{key}'",
                facts=[f"groups: {WEIGHTS}, {ACTIVATIONS}", f"parameters: {', '.join(names[:8])}"],
                hint=f"a group, a name or a pattern such as '{names[0].split('.')[0]}.*'" if names else None,
            )
        for i in chosen:
            at = axis + i.value.ndim if axis < 0 else axis
            if not 0 <= at < i.value.ndim:
                raise OptionError(
                    f"tensor_split_dims: '{key}' names axis {axis}, which '{i.name}' does not have",
                    facts=[f"it is {i.type}"],
                )
            length = sizes(i.value)[at]
            if length % parts:
                choice.left[i.name] = f"axis {at} of length {length} cannot be divided by {parts}"
                choice.splits.pop(i.name, None)
            else:
                choice.splits[i.name] = tuple(MODEL if k == at else None for k in range(i.value.ndim))


# -- pairs of weights -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Weight:
    """The weight of a product: its operand, its contracted and its outer axis, and these two in x and the result."""

    slot: int
    inner: int
    outer: int
    x_inner: int
    column: int


def _weights(node: Node) -> list[_Weight]:
    """The operands of a product that can be weights, the usual one first."""
    if not is_product(node) or node.op.composite or len(node.operands) != 2:
        return []
    places = [_place(node.axes, slot) for slot in (1, 0)]
    return [place for place in places if place is not None]


def _place(axes: OpAxes, slot: int) -> _Weight | None:
    """The axes of a weight: the only one that is summed, and the last one that is its own."""
    operands = [[_only(axes, factors) for factors in fs or ()] for fs in axes.operands]
    columns = [_only(axes, factors) for factors in axes.results[0]]
    weight, x = operands[slot], operands[1 - slot]
    inner = [k for k, f in enumerate(weight) if f in axes.reduced and f in x]
    outer = [k for k, f in enumerate(weight) if f is not None and f not in x and f in axes.parallel and f in columns]
    if len(inner) != 1 or not outer:
        return None
    return _Weight(slot, inner[0], outer[-1], x.index(weight[inner[0]]), columns.index(weight[outer[-1]]))


def _transposed(node: Node) -> list[int]:
    """Return the axis of the operand for each axis of the result; nothing where they are not the same axes."""
    (operand,), (result,) = node.axes.operands, node.axes.results
    if operand is None or len(set(operand)) != len(operand) or sorted(operand) != sorted(result):
        return []
    return [operand.index(factors) for factors in result]


def _only(axes: OpAxes, factors: Factors) -> str | None:
    """The factor that an axis is, if it is one."""
    long = [f for f in factors if axes.sizes[f] != 1] or list(factors[-1:])
    return long[0] if len(long) == 1 else None


class _Pairs:
    """One walk over the forward graph."""

    def __init__(self, graph: Graph, choice: Choice) -> None:
        self.graph = graph
        self.choice = choice
        self.mesh = choice.mesh
        self.nodes = forward_nodes(graph)
        self.parameters = {i.value: i for i in graph.with_role("param")}
        self.placed = Placed(self.mesh)
        for i in graph.inputs:
            self.placed.splits[i.value] = choice.of(i.name, i.value.ndim)
        self.given = {i.value for i in graph.with_role("input", "cotangent", "state")}

    def run(self) -> None:
        for at, node in enumerate(self.nodes):
            if _weights(node):
                self._product(at, node)
            elif node.op.elementwise:
                self._bias(node)
            elif node.axes.lookups:
                self._table(node)
            step(self.placed, node)
            if any(v in self.given for v in node.operands if v is not None):
                self.given.update(node.results)

    def _chain(self, v: Value) -> tuple[Input | None, list[Node]]:
        """Return a parameter with the transposes and casts between it and its reader."""
        chain: list[Node] = []
        while v not in self.parameters:
            node = self.graph.producers.get(v)
            if node is None or not is_unchanged(node) or not _transposed(node) or node.operands[0] is None:
                return None, chain
            chain.append(node)
            v = node.operands[0]
        return self.parameters[v], chain

    def _assign(self, parameter: Input, chain: list[Node], axis: int) -> bool:
        """Split a parameter so that what the chain makes of it is split along ``axis``."""
        for node in chain:
            axis = _transposed(node)[axis]
        if parameter.name in self.choice.splits:
            return False  # shared, and its first reader chose
        length = sizes(parameter.value)[axis]
        if not self.mesh.divides(MODEL, length):
            self.choice.left[parameter.name] = (
                f"axis {axis} of length {length} cannot be divided by {self.mesh.size(MODEL)}"
            )
            return False
        split = tuple(MODEL if k == axis else None for k in range(parameter.value.ndim))
        self.choice.splits[parameter.name] = self.placed.splits[parameter.value] = split
        for node in reversed(chain):
            step(self.placed, node)
        return True

    def _product(self, at: int, node: Node) -> None:
        found = self._weight(node)
        if found is None:
            return
        place, parameter, chain = found
        x, result = node.operands[1 - place.slot], node.result
        if x is None or parameter.name in self.choice.splits:
            return
        if self.placed.splits[x][place.x_inner] == MODEL:
            self._assign(parameter, chain, place.inner)
            return
        split = tuple(MODEL if k == place.column else None for k in range(result.ndim))
        if not self.mesh.divides(MODEL, sizes(result)[place.column]) or self._leads_to_rows(at, result, split):
            self._assign(parameter, chain, place.outer)  # or say why it cannot be

    def _weight(self, node: Node) -> tuple[_Weight, Input, list[Node]] | None:
        """The operand of a product that is a parameter."""
        for place in _weights(node):
            weight = node.operands[place.slot]
            assert weight is not None
            parameter, chain = self._chain(weight)
            if parameter is not None:
                return place, parameter, chain
        return None

    def _leads_to_rows(self, at: int, result: Value, split: Split) -> bool:
        """Whether a result split by columns reaches only products that contract it, or the outputs, undisturbed."""
        trial = {result: split}
        reached = result in self.graph.outputs
        for node in self.nodes[at + 1 :]:
            if not any(v in trial for v in node.operands if v is not None):
                continue
            have = [None if v is None else trial.get(v) or self._known(v) for v in node.operands]
            found = passage(node, have, self.mesh)
            if self._contracts_weight(node, trial):
                reached = True
                continue
            if found.sums & {MODEL} or _loses(have, found):
                return False
            for v, given in zip(node.results, found.gives, strict=True):
                if MODEL in given:
                    trial[v] = given
                    reached = reached or v in self.graph.outputs
        return reached

    def _known(self, v: Value) -> Split:
        return self.placed.splits.get(v) or whole(v.ndim)

    def _contracts_weight(self, node: Node, trial: Mapping[Value, Split]) -> bool:
        found = self._weight(node)
        if found is None:
            return False
        place = found[0]
        x = node.operands[1 - place.slot]
        if x is None or x not in trial or trial[x][place.x_inner] != MODEL:
            return False
        return self.mesh.divides(MODEL, sizes(x)[place.x_inner])

    def _table(self, node: Node) -> None:
        """A table of embeddings is split by its rows, unless the places looked up are the same for every input."""
        ((indices, looked_up, axis), *_) = node.axes.lookups
        where, table = node.operands[indices], node.operands[looked_up]
        if where not in self.given or axis != 0 or table is None or node.axes.reads_rows(looked_up) != "rows":
            return
        parameter, chain = self._chain(table)
        if parameter is not None and not chain:
            self._assign(parameter, chain, 0)

    def _bias(self, node: Node) -> None:
        """A parameter that meets a split value element by element is split like it."""
        for v, need in zip(node.operands, self.placed.passage(node).needs, strict=True):
            if v is None or need is None or MODEL not in need:
                continue
            source = self.graph.producers.get(v)
            # Batch norm gives a vector of channels the shape [1, C, 1, 1].
            if source is not None and is_view(source) and source.operands[0] in self.parameters:
                v = source.operands[0]
                rest = [k for k in need if k is not None]
                need = (MODEL,) if v is not None and v.ndim == 1 and rest == [MODEL] else need
            if v in self.parameters and v is not None and len(need) == v.ndim:
                parameter = self.parameters[v]
                if parameter.name not in self.choice.splits:
                    self.choice.splits[parameter.name] = self.placed.splits[v] = need
                    if source is not None:
                        step(self.placed, source)


def _loses(have: list[Split | None], found: Passage) -> bool:
    """Whether some operand must give up its split along ``model``."""
    return any(
        (h is not None and n is not None and MODEL in h and h != n and [a for a in n if a == MODEL] != [MODEL])
        or (h is not None and n is not None and any(a == MODEL and n[k] != MODEL for k, a in enumerate(h)))
        for h, n in zip(have, found.needs, strict=True)
    )


# -- what is kept for a parameter; parameters over ``data`` ----------------------------------------------------------
def _slots(graph: Graph, choice: Choice) -> None:
    """An optimizer's values of a parameter, which are named after it, are split like it."""
    parameters = {i.name: i.type.shape for i in graph.with_role("param")}
    for name, shape in parameters.items():
        owner = name
        while owner not in choice.splits and "/" in owner:
            owner = owner.partition("/")[2]
        if owner in choice.splits and parameters.get(owner) == shape:
            choice.splits[name] = choice.splits[owner]


def _fully(graph: Graph, choice: Choice) -> None:
    parts = choice.mesh.size(DATA)
    for i in graph.with_role("param"):
        split = choice.of(i.name, i.value.ndim)
        lengths = sizes(i.value)
        fits = [k for k, n in enumerate(lengths) if split[k] is None and n >= parts and n % parts == 0]
        if fits and parts > 1 and DATA not in split:
            chosen = max(fits, key=lambda k: (lengths[k], -k))
            choice.splits[i.name] = tuple(DATA if k == chosen else a for k, a in enumerate(split))


# -- what follows from the rest -------------------------------------------------------------------------------------
def _follow(graph: Graph, choice: Choice) -> None:
    """Cotangents are split like the outputs they belong to."""
    cotangents = graph.with_role("cotangent")
    if not cotangents:
        return
    placed = Placed(choice.mesh)
    for i in graph.inputs:
        placed.splits[i.value] = choice.of(i.name, i.value.ndim)
    for node in forward_nodes(graph):
        step(placed, node)
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    for i in cotangents:
        value = outputs.get(i.of)
        if value is not None and value in placed.splits and i.value.ndim == value.ndim:
            choice.splits[i.name] = placed.splits[value]
