"""``mixed_precision``: products in a 16-bit dtype, operations that need range or accuracy in float32.

Parameters stay float32 and are cast where they are used, so that an optimizer updates float32 values; outputs keep
their dtypes. ``traits.precision`` distinguishes three kinds of operations:

* "low" run in the small dtype: products, which take most of the time and accumulate in float32.

* "follow" take the dtype of their operands: data movement and cheap arithmetic.

* "full" stay in float32: exponentials, sums, norms, losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril import Graph, Node, OptionError, Value, dtype as as_dtype, float32, pass_
from mithril.backend import covers
from mithril.graph import DType, is_layout, operation, precision, unknown
from mithril.ops import dequantize, dequantize_groups
from mithril.passes import PassContext, TwoDtypes

SMALL = ("bfloat16", "float16")


@pass_(name="mixed-precision", exact=False, tolerance=0.1)
def mixed_precision(graph: Graph, context: PassContext) -> Graph:
    """Return the graph with casts to the dtype of each operation's kind. Values that are not float32 are unchanged."""
    policy = Policy.of(context)
    return Rewriter(graph, policy).run()


def small_dtype(requested: Any) -> DType:
    """Return a 16-bit dtype by its name."""
    name = str(requested).rpartition(".")[2]
    if name not in SMALL:
        message, facts, hint = unknown("dtype in mixed_precision", name, SMALL)
        raise OptionError(message, facts=facts, hint=hint)
    return as_dtype(name)


def operation_names(names: str | Sequence[str]) -> Sequence[str]:
    """Return a list of names of operations; raise OptionError if one of them does not exist."""
    for name in _names(names):
        operation(name)
    return _names(names)


class Policy:
    """The precision kinds set by the user, and those that operations declare."""

    def __init__(self, setting: Mapping[str, Any], default: str) -> None:
        self.dtype = small_dtype(setting.get("dtype", default))
        self.keep: Sequence[str] = _names(setting.get("keep", ()))
        kinds = dict.fromkeys(operation_names(setting.get("low", ())), "low")
        self.kinds = kinds | dict.fromkeys(operation_names(setting.get("full", ())), "full")

    @staticmethod
    def of(context: PassContext) -> Policy:
        setting = context.option("mixed_precision")
        backend = context.backend
        default = getattr(backend, "precision", None)
        policy = Policy(
            setting if isinstance(setting, Mapping) else {}, default if default == "float16" else "bfloat16"
        )
        if backend is not None:
            backend.require(policy.dtype)
        return policy

    def kind(self, node: Node) -> str:
        """Return ``low``, ``follow`` or ``full``."""
        if any(covers(pattern, node.origin.path) for pattern in self.keep):
            return "full"
        return self.kinds.get(node.op.name) or precision(node)


class Rewriter(TwoDtypes):
    """Rewriter of float32 values, which are converted to the dtype of the policy."""

    def __init__(self, graph: Graph, policy: Policy) -> None:
        super().__init__(graph)
        self.policy = policy
        self.soft: set[Value] = {i.value for i in graph.inputs if i.role in ("param", "constant")}

    def visit(self, node: Node) -> None:
        if self._runs_in_small_dtype(node):
            operands = [
                v if v is None else self.in_small(v) if v.dtype is float32 else self.in_original(v)
                for v in node.operands
            ]
            names = node.results[0].name if len(node.results) == 1 else None
            emitted = self.builder.emit(node.op, operands, node.attributes, node.regions, names)
            for old, new in zip(node.results, emitted, strict=True):
                (self.converted if old.dtype is float32 and new.dtype is self.policy.dtype else self.original)[old] = (
                    new
                )
            self.changed = True
            return
        operands = [None if v is None else self.in_original(v) for v in node.operands]
        results = tuple(Value(self.builder.unique(v.name), v.type) for v in node.results)
        self.builder.nodes.append(node.replaced(operands=tuple(operands), results=results))
        self.original.update(zip(node.results, results, strict=True))
        if node.is_constant:
            self.soft.add(node.result)

    def _runs_in_small_dtype(self, node: Node) -> bool:
        """Whether a node runs in the small dtype, by its kind or because its operands are small."""
        floats = [v for v in node.operands if v is not None and v.dtype is float32]
        if not floats or node.regions or not any(v.dtype is float32 for v in node.results):
            return False
        kind = self.policy.kind(node)
        if kind == "low":
            return not self._reads_quantized(node)
        if kind == "full":
            return False
        firm = [v for v in floats if v not in self.soft]
        return bool(firm) and all(v in self.converted for v in firm)

    def _reads_quantized(self, node: Node) -> bool:
        """Whether a product reads quantized values of 8 or 4 bits, which a 16-bit dtype would replace by numbers."""
        weights = node.operands[1] if len(node.operands) > 1 else None
        while weights is not None and (producer := self.graph.producers.get(weights)) is not None:
            if producer.op in (dequantize, dequantize_groups):
                return True
            weights = producer.operands[0] if is_layout(producer) else None
        return False

    def in_small(self, value: Value) -> Value:
        downcast = self.converted.get(value)
        if downcast is None:
            downcast = self.converted[value] = operation("cast")(self.original[value], dtype=self.policy.dtype)
        return downcast


def _names(names: Any) -> Sequence[str]:
    return (names,) if isinstance(names, str) else tuple(names)
