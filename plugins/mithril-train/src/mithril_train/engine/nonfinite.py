"""Locate the first value that is not finite: run the step again and inspect every value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mithril import ops
from mithril.graph import Graph, MithrilError, Node
from mithril_train.step.step import continued, is_finite

if TYPE_CHECKING:
    from mithril_train.engine.engine import Engine


class NotFiniteError(MithrilError):
    """Loss or gradients became nan or infinite."""


def not_finite(engine: Engine, batch: Mapping[str, Any], step: int) -> NotFiniteError:
    """Return the error for a step that was not finite; the carried arrays are those before that step."""
    arrays = {n: engine.backend.to_numpy(engine.arrays[n]) for n in (*engine.parameters, *engine.states)}
    for kind, source in (("the batch", batch), ("the parameters", arrays)):
        bad = next((n for n, x in source.items() if not _finite(engine, x)), None)
        if bad is not None:
            hint = "clean the data" if kind == "the batch" else "it, or its gradient in an earlier step, is too large"
            return NotFiniteError(
                f"step {step}: '{bad}' of {kind} is not finite", facts=_counts(engine, source[bad]), hint=hint
            )
    _, forward, columns = engine.traced(batch, training=True)
    graph = engine.differentiated(forward)
    culprit = _first_bad(engine, graph, batch, columns)
    hint = "a smaller learning_rate, clip_norm=1.0, or loss_scale='dynamic' in 16 bits"
    if culprit is None:
        return NotFiniteError(
            f"step {step}: the norm of all gradients is not finite",
            facts=["every gradient alone is finite, the sum of their squares is not"],
            hint=hint,
        )
    node, operands = culprit
    phase = "the gradient of " if node.tags.get("phase") == "backward" else ""
    location = f"layer '{node.origin.path}'" if node.origin.path else "the loss"
    return NotFiniteError(
        f"step {step}: {phase}{location} is not finite",
        facts=[
            f"first bad value: %{node.result.name} = {node.op.name}, {node.result.type}",
            *(f"it reads {line}" for line in operands),
            f"at {node.origin.file}:{node.origin.line}" if node.origin.file else "",
        ],
        hint=hint,
    )


def _finite(engine: Engine, x: Any) -> bool:
    array = engine._numpy(x) if not isinstance(x, np.ndarray) else x
    return array.dtype.kind in "biu" or bool(np.isfinite(array.astype(np.float64)).all())


def _counts(engine: Engine, x: Any) -> list[str]:
    array = np.asarray(engine._numpy(x), np.float64)
    return [f"{int(np.isnan(array).sum())} nan and {int(np.isinf(array).sum())} infinite values of {array.size}"]


def _first_bad(
    engine: Engine, graph: Graph, batch: Mapping[str, Any], columns: Mapping[str, Any]
) -> tuple[Node, list[str]] | None:
    """Return the first node with a value that is not finite, and the range of its operands."""
    builder = continued(graph)
    watched: list[Node] = []
    # After the passes whose values it watches.
    with builder, builder.at(builder.origin, {"phase": "backward"}):
        flags = {}
        for node in graph.nodes:
            floats = [v for v in node.results if v.dtype.is_float]
            if floats and not node.is_constant:
                sound: Any = None
                for v in floats:
                    one = ops.all(is_finite(v)) if v.shape else is_finite(v)
                    sound = one if sound is None else ops.logical_and(sound, one)
                flags[f"ok/{len(watched)}"] = sound
                watched.append(node)
        sizes = {f"size/{n.result.name}": ops.max(ops.abs(n.result)) for n in watched if n.result.shape}
    checked = builder.build({**flags, **sizes})
    run = engine.compiler.builder.build(checked)
    inputs = {n: engine._converter(n, t.dtype)(batch[n]) for n, t in columns.items()}
    inputs.update(engine._fixed(checked, batch, training=True))
    states = {i.name for i in checked.with_role("state")}
    inputs.update({n: x for n, x in engine.arrays.items() if n in states})
    outputs = run(engine.live(), inputs)
    read = engine.backend.to_numpy
    for k, node in enumerate(watched):
        if not bool(read(outputs[f"ok/{k}"])):
            lines = []
            for v in dict.fromkeys(v for v in node.operands if v is not None and v.dtype.is_float):
                size = outputs.get(f"size/{v.name}")
                if size is not None:
                    lines.append(f"%{v.name}, {v.type}, up to {float(read(size)):.3g}")
            return node, lines
    return None
