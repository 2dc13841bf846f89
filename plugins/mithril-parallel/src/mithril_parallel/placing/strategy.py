"""Sharding strategy: the batch is split over ``data``, weights in pairs over ``model``.

The default for ``model`` is Megatron's. If no operation between two products needs complete rows, the first weight is
split by columns and the second by rows, so that one all-reduce after the second product is the only collective.
The first weight of such a pair is identified by following its product through the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mithril import ops
from mithril.graph import (
    Factors,
    Graph,
    Input,
    Node,
    OpAxes,
    OptionError,
    Value,
    axes_of,
    decompose,
    is_product,
    is_unchanged,
    is_view,
)
from mithril_parallel.mesh import CONTEXT, DATA, MODEL, PIPELINE, Mesh, Split, replicated
from mithril_parallel.placing.propagate import GraphSharding, propagate_node
from mithril_parallel.placing.rules import OpSharding, op_sharding, sizes

LINK = "link/"  # prefix of inputs and outputs that are passed between pipeline stages
WEIGHTS, ACTIVATIONS = "weights", "activations"  # groups in tensor_split_dims


@dataclass
class Strategy:
    """Splits of inputs by name, and for ``unsplit`` inputs (requested or useful, but impossible) the reason."""

    mesh: Mesh
    splits: dict[str, Split] = field(default_factory=dict)
    unsplit: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, rank: int) -> Split:
        return self.splits.get(name, replicated(rank))


def choose(
    graph: Graph,
    mesh: Mesh,
    splits: Mapping[str, int] | None = None,
    *,
    fsdp: bool = False,
    chunked: bool = False,
    uneven: bool = False,
    classes: bool = False,
    experts: Collection[str] = (),
) -> Strategy:
    """Choose splits for the inputs of a graph; ``splits`` (group, name or pattern -> axis) overrides the default.

    With ``fsdp`` parameters are split over ``data``, too: on a mesh without ``model`` along the axis that ``model``
    would split, so that pairs can stay in parts, otherwise along its longest divisible axis. It is always split over
    the stages of a pipeline. With ``chunked`` the axis ``data`` counts chunks of the batch, not devices, and error
    messages say so. With ``uneven`` every device computes a batch whole that cannot be divided, such as the last one of
    an epoch. With ``classes`` the engine computes losses on parts of the classes, so that the last weight is split.
    The parameters ``experts`` are split over ``data`` along their first axis.
    """
    strategy = Strategy(mesh)
    requests = dict(splits or {})
    graph = decompose(graph, lambda node: _has_rule(node) or (classes and node.op is ops.log_softmax))
    _split_batch(graph, strategy, requests, chunked, uneven)
    _split_sequence(graph, strategy, requests)
    if mesh.size(MODEL) > 1:
        _apply_user_splits(graph, strategy, requests)
        if not _has_weight_requests(requests):
            _WeightPairs(graph, strategy, classes).run()
    strategy.splits |= {n: (DATA, *replicated(graph.input(n).value.ndim - 1)) for n in experts}
    _split_slots(graph, strategy)
    if fsdp:
        _split_pairs_over_data(graph, strategy)
        _split_parameters(graph, strategy, DATA)
    _split_parameters(graph, strategy, PIPELINE)
    _split_cotangents(graph, strategy)
    return strategy


def _has_rule(node: Node) -> bool:
    """Whether a node has a sharding rule of its own; otherwise it is decomposed."""
    return not node.op.composite or node.op.elementwise or node.op.declared_axes is not None


def forward_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of the forward pass."""
    nodes, later = [], set[Value | None]()
    for node in graph.nodes:
        # Passes insert nodes without a phase, such as the cast of a gradient: it follows from the operands.
        if node.tags.get("phase") in ("backward", "update") or not later.isdisjoint(node.operands):
            later.update(node.results)
        else:
            nodes.append(node)
    return nodes


# -- the batch ------------------------------------------------------------------------------------------------------
def batch_length(graph: Graph) -> int | None:
    """Return the number of rows of a batch: the length of the first axis that most inputs have, or None."""
    return _most_common([sizes(i.value)[0] for i in graph.with_role("input") if i.value.ndim])


def _most_common(lengths: Sequence[int]) -> int | None:
    return max(lengths, key=lambda n: (lengths.count(n), n), default=None)


def _split_batch(graph: Graph, strategy: Strategy, requests: Mapping[str, int], chunked: bool, uneven: bool) -> None:
    parts = strategy.mesh.size(DATA)
    if parts == 1:
        return
    axis = requests.get(ACTIVATIONS, 0)
    inputs = [i for i in graph.with_role("input") if i.value.ndim > axis]
    # activations passed between stages may have the batch in any axis
    model_inputs = [i for i in inputs if not i.name.startswith(LINK)]
    inputs = model_inputs or [i for i in inputs if sizes(i.value)[axis] % parts == 0]
    lengths = [sizes(i.value)[axis] for i in inputs]
    length = _most_common(lengths)
    if length is None:
        return
    if length % parts:
        name = next(i.name for i, n in zip(inputs, lengths, strict=True) if n == length)
        fits = f"use a batch of {parts * max(1, round(length / parts))} (drop_last=True for the end of a DataLoader)"
        if chunked:
            possible = [n for n in range(1, parts) if length % n == 0]
            raise OptionError(
                f"{length} items of input '{name}' cannot be cut into {parts} chunks",
                hint=f"{fits}, or set pipeline_chunks={possible[-1]}",
            )
        if uneven:
            for i in inputs:
                strategy.unsplit[i.name] = f"{length} items of input '{name}' cannot be divided by {parts}"
            return
        raise OptionError(
            f"{length} items of input '{name}' cannot be divided over {parts} devices",
            facts=[f"mesh: {strategy.mesh}"],
            hint=f"{fits}, or fewer devices along '{DATA}'",
        )
    for i, n in zip(inputs, lengths, strict=True):
        if n == length:
            strategy.splits[i.name] = tuple(DATA if k == axis else None for k in range(i.value.ndim))
        elif n > 1:
            strategy.unsplit[i.name] = f"axis {axis} has {n} items, the batch {length}"


def _split_sequence(graph: Graph, strategy: Strategy, requests: Mapping[str, int]) -> None:
    """Split the axis after that of the batch over ``context``: the positions of a sequence."""
    parts = strategy.mesh.size(CONTEXT)
    axis = 1 if requests.get(ACTIVATIONS, 0) == 0 else 0
    inputs = [i for i in graph.with_role("input") if i.value.ndim > max(axis, 1) and sizes(i.value)[axis] > 1]
    if parts == 1 or not inputs:
        return
    lengths = [sizes(i.value)[axis] for i in inputs]
    length = _most_common(lengths)
    assert length is not None
    if length % parts:
        name = next(i.name for i, n in zip(inputs, lengths, strict=True) if n == length)
        raise OptionError(
            f"{length} positions of input '{name}' cannot be divided over {parts} devices",
            facts=[f"mesh: {strategy.mesh}; axis {axis} is the sequence"],
            hint=f"pad sequences to {-(-length // parts) * parts} positions, or use fewer devices along '{CONTEXT}'",
        )
    for i, n in zip(inputs, lengths, strict=True):
        if n == length:
            split = strategy.of(i.name, i.value.ndim)
            strategy.splits[i.name] = tuple(CONTEXT if k == axis else a for k, a in enumerate(split))


# -- tensor_split_dims ----------------------------------------------------------------------------------------------
def _has_weight_requests(requests: Mapping[str, int]) -> bool:
    return any(key != ACTIVATIONS for key in requests)


def _apply_user_splits(graph: Graph, strategy: Strategy, requests: Mapping[str, int]) -> None:
    parts = strategy.mesh.size(MODEL)
    parameters = graph.with_role("param")
    for key, axis in requests.items():
        if key == ACTIVATIONS:
            continue
        matches = [
            i for i in parameters if (key == WEIGHTS and i.value.ndim > 1) or i.name == key or fnmatchcase(i.name, key)
        ]
        if not matches:
            names = [i.name for i in parameters]
            raise OptionError(
                f"tensor_split_dims: no parameter is called '{key}'",
                facts=[f"groups: {WEIGHTS}, {ACTIVATIONS}", f"parameters: {', '.join(names[:8])}"],
                hint=f"pass a group, a name or a pattern such as '{names[0].split('.')[0]}.*'" if names else None,
            )
        for i in matches:
            index = axis + i.value.ndim if axis < 0 else axis
            if not 0 <= index < i.value.ndim:
                raise OptionError(
                    f"tensor_split_dims: '{key}' names axis {axis}, which '{i.name}' does not have",
                    facts=[f"'{i.name}': {i.type}"],
                )
            length = sizes(i.value)[index]
            if length % parts:
                strategy.unsplit[i.name] = f"axis {index} of length {length} cannot be divided by {parts}"
                strategy.splits.pop(i.name, None)
            else:
                strategy.splits[i.name] = tuple(MODEL if k == index else None for k in range(i.value.ndim))


# -- pairs of weights -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _WeightAxes:
    """The axes of a product's weight.

    ``slot`` is its operand, ``inner`` and ``outer`` are its contracted and its outer axis, ``x_inner`` and ``column``
    the corresponding axes of the other operand and of the result.
    """

    slot: int
    inner: int
    outer: int
    x_inner: int
    column: int


def _weight_candidates(node: Node) -> list[_WeightAxes]:
    """Return the axes of the operands that can be weights of a product, the usual operand first."""
    if not is_product(node) or node.op.composite or len(node.operands) != 2:
        return []
    candidates = [_weight_axes(axes_of(node), slot) for slot in (1, 0)]
    return [axes for axes in candidates if axes is not None]


def _weight_axes(axes: OpAxes, slot: int) -> _WeightAxes | None:
    """Return the axes of a weight (its only contracted and its last outer axis); None if ``slot`` has no such axes."""
    operands = [[_single_factor(axes, factors) for factors in fs or ()] for fs in axes.operands]
    columns = [_single_factor(axes, factors) for factors in axes.results[0]]
    weight, x = operands[slot], operands[1 - slot]
    inner = [k for k, f in enumerate(weight) if f in axes.reduced and f in x]
    outer = [k for k, f in enumerate(weight) if f is not None and f not in x and f in axes.parallel and f in columns]
    if len(inner) != 1 or not outer:
        return None
    return _WeightAxes(slot, inner[0], outer[-1], x.index(weight[inner[0]]), columns.index(weight[outer[-1]]))


def _permutation(node: Node) -> list[int]:
    """Return the operand axis of each result axis; an empty list if these are not the same axes."""
    (operand,), (result,) = axes_of(node).operands, axes_of(node).results
    if operand is None or len(set(operand)) != len(operand) or sorted(operand) != sorted(result):
        return []
    return [operand.index(factors) for factors in result]


def _single_factor(axes: OpAxes, factors: Factors) -> str | None:
    """Return the only factor of an axis; None if the axis has several."""
    long = [f for f in factors if axes.sizes[f] != 1] or list(factors[-1:])
    return long[0] if len(long) == 1 else None


class _WeightPairs:
    """One pass over the forward graph that splits weights in pairs."""

    def __init__(self, graph: Graph, strategy: Strategy, classes: bool = False) -> None:
        self.graph = graph
        self.strategy = strategy
        self.classes = classes
        self.mesh = strategy.mesh
        self.nodes = forward_nodes(graph)
        self.parameters = {i.value: i for i in graph.with_role("param")}
        self.sharding = GraphSharding(self.mesh)
        for i in graph.inputs:
            self.sharding.splits[i.value] = strategy.of(i.name, i.value.ndim)
        self.input_values = {i.value for i in graph.with_role("input", "cotangent", "state")}

    def run(self) -> None:
        for position, node in enumerate(self.nodes):
            if _weight_candidates(node):
                self._split_product(position, node)
            elif node.op.elementwise:
                self._split_bias(node)
            elif axes_of(node).lookups:
                self._split_table(node)
            propagate_node(self.sharding, node)
            if any(v in self.input_values for v in node.operands if v is not None):
                self.input_values.update(node.results)

    def _parameter_chain(self, v: Value) -> tuple[Input | None, list[Node]]:
        """Return the parameter behind ``v``, or None, and the transposes and casts between the two."""
        chain: list[Node] = []
        while v not in self.parameters:
            node = self.graph.producers.get(v)
            if node is None or not is_unchanged(node) or not _permutation(node) or node.operands[0] is None:
                return None, chain
            chain.append(node)
            v = node.operands[0]
        return self.parameters[v], chain

    def _assign_split(self, parameter: Input, chain: list[Node], axis: int) -> bool:
        """Split a parameter so that the result of the chain is split along ``axis``; return whether it was split."""
        for node in chain:
            axis = _permutation(node)[axis]
        if parameter.name in self.strategy.splits:
            return False  # a shared parameter: its first consumer decides
        length = sizes(parameter.value)[axis]
        if not self.mesh.divides(MODEL, length):
            self.strategy.unsplit[parameter.name] = (
                f"axis {axis} of length {length} cannot be divided by {self.mesh.size(MODEL)}"
            )
            return False
        split = tuple(MODEL if k == axis else None for k in range(parameter.value.ndim))
        self.strategy.splits[parameter.name] = self.sharding.splits[parameter.value] = split
        for node in reversed(chain):
            propagate_node(self.sharding, node)
        return True

    def _split_product(self, position: int, node: Node) -> None:
        match = self._find_weight(node)
        if match is None:
            return
        weight_axes, parameter, chain = match
        x, result = node.operands[1 - weight_axes.slot], node.result
        if x is None or parameter.name in self.strategy.splits:
            return
        if self.sharding.splits[x][weight_axes.x_inner] == MODEL:
            self._assign_split(parameter, chain, weight_axes.inner)
            return
        split = tuple(MODEL if k == weight_axes.column else None for k in range(result.ndim))
        if not self.mesh.divides(MODEL, sizes(result)[weight_axes.column]) or self._reaches_row_split(
            position, result, split
        ):
            # This records the reason if it is impossible.
            self._assign_split(parameter, chain, weight_axes.outer)

    def _find_weight(self, node: Node) -> tuple[_WeightAxes, Input, list[Node]] | None:
        """Return the operand of a product that is a parameter: its axes, the parameter and the chain between them."""
        for weight_axes in _weight_candidates(node):
            weight = node.operands[weight_axes.slot]
            assert weight is not None
            parameter, chain = self._parameter_chain(weight)
            if parameter is not None:
                return weight_axes, parameter, chain
        return None

    def _reaches_row_split(self, position: int, result: Value, split: Split) -> bool:
        """Whether a result split by columns reaches only contracting products or outputs without a collective."""
        trial = {result: split}
        reached = result in self.graph.outputs
        for node in self.nodes[position + 1 :]:
            if not any(v in trial for v in node.operands if v is not None):
                continue
            classes = self._classes(node, trial)
            if classes is not None:
                if node.op is ops.log_softmax:
                    trial[node.result] = classes
                reached = True
                continue
            operand_splits = [None if v is None else trial.get(v) or self._split_of(v) for v in node.operands]
            node_sharding = op_sharding(node, operand_splits, self.mesh)
            if self._contracts_weight(node, trial):
                reached = True
                continue
            if node_sharding.sums & {MODEL} or _loses_model_split(operand_splits, node_sharding):
                return False
            for v, result_split in zip(node.results, node_sharding.result_splits, strict=True):
                if MODEL in result_split:
                    trial[v] = result_split
                    reached = reached or v in self.graph.outputs
        return reached

    def _classes(self, node: Node, trial: Mapping[Value, Split]) -> Split | None:
        """Return the split of the operand if the engine computes the operation on parts of classes, else None."""
        x = node.operands[0] if self.classes and node.op in (ops.log_softmax, ops.take_along_axis) else None
        split = trial.get(x) if x is not None else None
        return split if split is not None and split[node.attributes["axis"]] == MODEL else None

    def _split_of(self, v: Value) -> Split:
        return self.sharding.splits.get(v) or replicated(v.ndim)

    def _contracts_weight(self, node: Node, trial: Mapping[Value, Split]) -> bool:
        match = self._find_weight(node)
        if match is None:
            return False
        weight_axes = match[0]
        x = node.operands[1 - weight_axes.slot]
        if x is None or x not in trial or trial[x][weight_axes.x_inner] != MODEL:
            return False
        return self.mesh.divides(MODEL, sizes(x)[weight_axes.x_inner])

    def _split_table(self, node: Node) -> None:
        """Split an embedding table by rows, unless its indices are independent of the model's inputs."""
        ((indices, looked_up, axis), *_) = axes_of(node).lookups
        index_value, table = node.operands[indices], node.operands[looked_up]
        if index_value not in self.input_values or axis != 0 or table is None:
            return
        if axes_of(node).reads_rows(looked_up) != "rows":
            return
        parameter, chain = self._parameter_chain(table)
        if parameter is not None and not chain:
            self._assign_split(parameter, chain, 0)

    def _split_bias(self, node: Node) -> None:
        """Split a parameter like the value with which it is combined element-wise."""
        for v, need in zip(node.operands, self.sharding.op_sharding(node).operand_splits, strict=True):
            if v is None or need is None or MODEL not in need:
                continue
            source = self.graph.producers.get(v)
            # Batch norm reshapes a vector of channels to [1, C, 1, 1].
            if source is not None and is_view(source) and source.operands[0] in self.parameters:
                v = source.operands[0]
                rest = [k for k in need if k is not None]
                need = (MODEL,) if v is not None and v.ndim == 1 and rest == [MODEL] else need
            if v in self.parameters and v is not None and len(need) == v.ndim:
                parameter = self.parameters[v]
                if parameter.name not in self.strategy.splits:
                    self.strategy.splits[parameter.name] = self.sharding.splits[v] = need
                    if source is not None:
                        propagate_node(self.sharding, source)


def _loses_model_split(operand_splits: list[Split | None], node_sharding: OpSharding) -> bool:
    """Whether an operand loses its split along ``model``."""
    return any(
        (h is not None and n is not None and MODEL in h and h != n and [a for a in n if a == MODEL] != [MODEL])
        or (h is not None and n is not None and any(a == MODEL and n[k] != MODEL for k, a in enumerate(h)))
        for h, n in zip(operand_splits, node_sharding.operand_splits, strict=True)
    )


# -- optimizer slots; parameters over ``data`` -----------------------------------------------------------------------
def _split_slots(graph: Graph, strategy: Strategy) -> None:
    """Split an optimizer's slots like their parameter, after which they are named."""
    parameters = {i.name: i.type.shape for i in graph.with_role("param")}
    for name, shape in parameters.items():
        owner = name
        while owner not in strategy.splits and "/" in owner:
            owner = owner.partition("/")[2]
        if owner in strategy.splits and parameters.get(owner) == shape:
            strategy.splits[name] = strategy.splits[owner]


def _split_pairs_over_data(graph: Graph, strategy: Strategy) -> None:
    mesh = strategy.mesh
    if mesh.size(MODEL) > 1 or mesh.size(PIPELINE) > 1 or mesh.size(DATA) == 1:
        return
    pairs = Strategy(Mesh({MODEL: mesh.size(DATA)}))
    _WeightPairs(graph, pairs).run()
    _split_slots(graph, pairs)
    for i in graph.with_role("param"):
        if i.name in pairs.splits and i.name not in strategy.splits:
            strategy.splits[i.name] = tuple(DATA if axis == MODEL else axis for axis in pairs.splits[i.name])


def _split_parameters(graph: Graph, strategy: Strategy, over: str) -> None:
    parts = strategy.mesh.size(over)
    for i in graph.with_role("param"):
        split = strategy.of(i.name, i.value.ndim)
        lengths = sizes(i.value)
        fits = [k for k, n in enumerate(lengths) if split[k] is None and n >= parts and n % parts == 0]
        if fits and parts > 1 and over not in split:
            longest = max(fits, key=lambda k: (lengths[k], -k))
            strategy.splits[i.name] = tuple(over if k == longest else a for k, a in enumerate(split))


# -- cotangents -----------------------------------------------------------------------------------------------------
def _split_cotangents(graph: Graph, strategy: Strategy) -> None:
    """Split cotangents like their outputs."""
    cotangents = graph.with_role("cotangent")
    if not cotangents:
        return
    sharding = GraphSharding(strategy.mesh)
    for i in graph.inputs:
        sharding.splits[i.value] = strategy.of(i.name, i.value.ndim)
    for node in forward_nodes(graph):
        propagate_node(sharding, node)
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    for i in cotangents:
        value = outputs.get(i.of)
        if value is not None and value in sharding.splits and i.value.ndim == value.ndim:
            strategy.splits[i.name] = sharding.splits[value]
