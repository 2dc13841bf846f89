"""``checks=True``: indices outside of what they index are an error, on every backend.

The smallest and the largest index of each look-up become results of the program, which every call looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mithril.dims import Size, numel, substitute, symbols
from mithril.errors import InputError
from mithril.graph import Graph, Node, Value, iterate

PREFIX = "check/"


@dataclass(frozen=True)
class Check:
    """Two results of a program, and what they may be."""

    low: str
    high: str
    size: Size
    op: str
    where: str

    def hold(self, low: int, high: int, sizes: Mapping[str, int]) -> None:
        """Raise where an index is outside."""
        size = int(substitute(self.size, sizes))
        if -size <= low and high < size:
            return
        found = high if high >= size else low
        raise InputError(
            f"index {found} of '{self.op}' lies outside of {size} elements",
            facts=[self.where, f"accepted: {-size} to {size - 1}; negative ones count from the end"],
        )


def with_checks(graph: Graph) -> tuple[Graph, list[Check], bool]:
    """The graph with those results, the checks, and whether something inside of bodies is not looked at."""
    from mithril import ops

    editor = graph.edit()
    checks: list[Check] = []
    extra: dict[str, Value] = {}
    for node in graph.nodes:
        for indices, size in looked_up(node):
            with editor.before(node):
                # With a zero among them, which is always inside, so that there is something even in an empty batch.
                flat = ops.reshape(indices(), shape=(numel(indices().shape),))
                some = ops.concat(flat, ops.full(shape=(1,), value=0, dtype=flat.dtype), axis=0)
                names = f"{PREFIX}{len(checks)}/low", f"{PREFIX}{len(checks)}/high"
                extra |= {names[0]: ops.min(some), names[1]: ops.max(some)}
            checks.append(Check(*names, size, node.op.name, str(node.origin)))
    inside = any(True for node in graph.nodes for region in node.regions for _ in _lookups(region))
    if not checks:
        return graph, checks, inside
    made = editor.freeze()
    return (
        made.replaced(outputs=(*made.outputs, *extra.values()), output_names=(*made.output_names, *extra)),
        checks,
        inside,
    )


def _lookups(graph: Graph) -> Iterator[Node]:
    return (node for node, _ in iterate(graph) if any(True for _ in looked_up(node)))


def looked_up(node: Node) -> Iterator[tuple[Callable[[], Any], Size]]:
    """Indices that an operation reads, as what writes them into the graph, and the size that they index."""
    from mithril import ops

    def operand(k: int) -> Value:
        value = node.operands[k]
        assert value is not None
        return value

    name, given = node.op.name, node.attributes
    if name == "embedding":
        yield lambda: operand(0), operand(1).shape[0]
    elif name in ("take", "take_along_axis"):
        yield lambda: operand(1), operand(0).shape[given["axis"]]
    elif name in ("cross_entropy", "nll_loss") and operand(1).dtype.is_integer:
        ignored = given.get("ignore_index")

        def labels() -> Any:
            return operand(1) if ignored is None else ops.where(operand(1) == ignored, 0, operand(1))

        yield labels, operand(0).shape[given["axis"]]
    elif name in ("gather_nd", "scatter_nd", "scatter_nd_add"):
        first = given.get("batch_dims", 0)
        depth = operand(1).shape[-1]
        for k in range(depth if isinstance(depth, int) else 0):
            yield partial(_component, operand(1), k), operand(0).shape[first + k]


def _component(indices: Value, k: int) -> Any:
    return indices[..., k]


@dataclass(frozen=True)
class Checked:
    """An executable whose results are looked at before anybody gets them."""

    executable: Any
    checks: Sequence[Check]
    types: Mapping[str, Any]
    backend: Any

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.approved(self.executable(params, inputs), inputs)

    def approved(self, results: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The results without those that were only there to be looked at."""
        left = dict(results)
        sizes = self._sizes(inputs)
        for check in self.checks:
            low, high = (int(self.backend.to_numpy(left.pop(name))) for name in (check.low, check.high))
            check.hold(low, high, sizes)
        return left

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        from mithril.dims import bind

        if not any(symbols(check.size) for check in self.checks):
            return {}
        return bind({n: t.shape for n, t in self.types.items()}, {n: tuple(inputs[n].shape) for n in self.types})
