"""Branches and loops on parts: their regions are cut for the splits that operands come in."""

from __future__ import annotations

from collections.abc import Sequence

from mithril.base import TensorType, int32
from mithril.ir import Graph, Input, Node, Output, Value, is_addition
from mithril_parallel.mesh import Split, whole
from mithril_parallel.sharding.local_graph import INDEX, LocalGraph, Sharded
from mithril_parallel.sharding.local_rules import Local, is_zero


def shard_if(local: LocalGraph, node: Node) -> None:
    """Cut both branches for the splits of the operands; results have the splits that both agree on."""
    choice, *read = [v for v in node.operands if v is not None]
    for v in read:
        local.settled(v)
    have = [local.splits[v] for v in read]
    made = [_branch(local, region, have, ()) for region in node.regions]
    leaving = [[p.split for p in branch.outputs.values()] for branch in made]
    gives = [tuple(a if a == b else None for a, b in zip(*both, strict=True)) for both in zip(*leaving, strict=True)]
    if leaving != [gives, gives]:
        made = [_branch(local, region, have, gives) for region in node.regions]
    axes = sorted({axis for branch in made for axis in branch.indices.values()})
    regions = tuple(_with_places(branch.graph, axes) for branch in made)
    needs = [whole(choice.ndim), *have]
    operands = [local.as_split(v, need) for v, need in zip((choice, *read), needs, strict=True)]
    places = [local.place(axis) for axis in axes]
    local.emit(node.replaced(regions=regions), [*operands, *places], Local(tuple(needs), tuple(gives)))


def _branch(local: LocalGraph, region: Graph, have: Sequence[Split], gives: Sequence[Split]) -> Sharded:
    numbered = _numbered(region)
    names = {i.name: s for i, s in zip(region.arguments, have, strict=True)}
    wanted = {str(k): s for k, s in enumerate(gives)}
    return local.region(numbered, names, wanted)


def shard_scan(local: LocalGraph, node: Node) -> None:
    """Cut a loop: carries have the splits that the body gives them, sequences theirs but for the axis of steps.

    A carry that begins as zeros and only has something added is a sum over devices when the loop has ended.
    """
    carries, sequences = node.attributes["carries"], node.attributes["sequences"]
    body, last = node.regions[0], carries + sequences
    have = [local.splits[v] for v in node.operands if v is not None]
    steps = [(None, *s[1:]) for s in have[carries:last]]
    collected = {
        k for k in _collected(body, carries) if (v := node.operands[k]) is not None and is_zero(local.graph, v)
    }
    entering = list(have[:carries])
    made = _body(local, body, entering, steps, have[last:], collected)
    for _ in range(2 * len(local.mesh.axes) + 1):  # zeros come in whole and go round split
        leaving = [made.outputs[str(k)].split for k in range(carries)]
        if leaving == entering:
            break
        entering = leaving
        made = _body(local, body, entering, steps, have[last:], collected)
    else:
        entering = [whole(len(s)) for s in entering]
        made = _body(local, body, entering, steps, have[last:], collected, entering)
    gives = [made.outputs[str(k)].split for k in range(len(body.outputs))]
    places = [local.place(axis) for axis in made.indices.values()]
    needs = [*entering, *steps, *have[last:]]
    operands = [local.as_split(v, need) for v, need in zip(node.operands, needs, strict=True) if v is not None]
    found = Local(tuple(needs), (*gives[:carries], *((None, *s) for s in gives[carries:])))
    local.emit(node.replaced(regions=(made.graph,)), [*operands, *places], found)
    for k in collected:
        if sums := made.outputs[str(k)].sums:
            local.open[node.results[k]] = sums


def _body(
    local: LocalGraph,
    body: Graph,
    entering: Sequence[Split],
    steps: Sequence[Split],
    rest: Sequence[Split],
    collected: set[int],
    leaving: Sequence[Split] = (),
) -> Sharded:
    numbered = _numbered(body)
    given = [*entering, *(s[1:] for s in steps), *rest]
    names = {i.name: s for i, s in zip(body.arguments, given, strict=True)}
    wanted = {str(k): s for k, s in enumerate(leaving) if k not in collected}
    collecting = {body.arguments[k].value for k in collected}
    return local.region(numbered, names, wanted, collecting=collecting, left_open={str(k) for k in collected})


def _with_places(branch: Graph, axes: Sequence[str]) -> Graph:
    """Return a branch with the places along these axes as its last inputs, read or not."""
    names = [INDEX + axis for axis in axes]
    known = {i.name: i for i in branch.inputs if i.name in names}
    places = [known.get(name) or Input(Value(name, TensorType(int32, ()))) for name in names]
    rest = [i for i in branch.inputs if i.name not in known]
    return branch.replaced(inputs=(*rest, *places))


def _collected(body: Graph, carries: int) -> set[int]:
    """Return the carries that only have something added at each step."""
    found = set()
    for k, (entering, leaving) in enumerate(zip(body.arguments[:carries], body.outputs[:carries], strict=True)):
        node = body.producers.get(leaving)
        if node is not None and is_addition(node) and body.users.get(entering.value) == (node,):
            found.add(k)
    return found


def _numbered(region: Graph) -> Graph:
    """Return a region whose results have their positions as names."""
    return region.replaced(results=tuple(Output(v, str(k)) for k, v in enumerate(region.outputs)))
