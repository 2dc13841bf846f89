"""Samples of an operation at sizes beyond every tile and threshold, derived from its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from mithril.graph import Arr, Builder, Graph, MithrilError, Sample, Value, decompose, flops
from mithril_testing.cases import Case, is_primitive

ROWS = 70  # beyond the widest tile in use, 64, and no multiple of a vector
LONG = 5_000  # beyond every block of a reduction
MIXED = (17, 33, 70, 9, 40)  # all sizes at once
ELEMENTS = 40_000  # of one array, at most
WORK = 2e7  # floating-point operations of one case, at most


def grown_cases(case: Case) -> Iterator[Case]:
    """Yield larger forms: all sizes at ``MIXED``, the last of the first operand at ``LONG``, each alone at ``ROWS``.

    Sizes grow alone in the first sample of its ranks, and where they cannot all grow: further samples have other
    attributes, which have thresholds of their own hardly ever.
    Equal sizes grow together, in operands and in attributes that are shapes, so that sizes that must agree still do.
    Forms that the operation refuses are left out.
    """
    shapes = [s.shape for s in case.sample.operands if s is not None]
    sizes = list(dict.fromkeys(int(n) for shape in shapes for n in shape if int(n) > 1))
    mixed = _enlarged(case, dict(zip(sizes, MIXED, strict=False)), "mixed") if len(sizes) > 1 else None
    if mixed is not None:
        yield mixed
    forms: dict[str, Mapping[int, int]] = {}
    if shapes and shapes[0] and int(shapes[0][-1]) > 1:
        forms["long"] = {int(shapes[0][-1]): LONG}
    if mixed is None or all(_ranks(s) != _ranks(case.sample) for s in case.op.samples[: case.number]):
        forms |= {f"{n}-{ROWS}": {n: ROWS} for n in sizes}
    for label, growth in forms.items():
        larger = _enlarged(case, growth, label)
        if larger is not None:
            yield larger


def _ranks(sample: Sample) -> list[int | None]:
    return [None if s is None else len(s.shape) for s in sample.operands]


def _enlarged(case: Case, growth: Mapping[int, int], label: str) -> Case | None:
    operands: list[Arr | None] = []
    for spec in case.sample.operands:
        if spec is None:
            operands.append(None)
            continue
        shape = tuple(growth.get(int(n), int(n)) for n in spec.shape)
        if shape == tuple(spec.shape):
            operands.append(spec)
        elif spec.values is not None or prod(shape) > ELEMENTS:
            return None
        else:
            operands.append(replace(spec, shape=shape))
    attributes = {n: _resized(v, growth) if n == "shape" else v for n, v in case.sample.attributes.items()}
    if prod(attributes.get("shape", ())) > ELEMENTS:
        return None
    backward = case.sample.gradient and label in ("mixed", "long")
    sample = Sample(tuple(operands), attributes, f"{case.sample.label or case.number}-{label}", backward)
    larger = Case(case.op, sample, case.number)
    try:
        graph = larger.graph()
    except MithrilError:
        return None
    return larger if affordable(graph) else None


def affordable(graph: Graph) -> bool:
    """Whether a graph of known sizes is small enough for a check that takes milliseconds."""
    nodes = decompose(graph, is_primitive).nodes
    large = any(prod(map(int, v.shape)) > 10 * ELEMENTS for node in nodes for v in node.results)
    windows = [prod(node.attributes.get("kernel", ())) for node in nodes]
    return not large and max(windows, default=0) <= ROWS and sum(map(_work, nodes)) <= WORK


def _resized(shape: Any, growth: Mapping[int, int]) -> Any:
    return tuple(growth.get(n, n) if isinstance(n, int) else n for n in shape) if isinstance(shape, tuple) else shape


def _work(node: Any) -> int:
    return int(flops(node))  # sizes are known


def join_graphs(parts: Sequence[tuple[str, Graph]], name: str, finish: Any = None) -> Graph:
    """Several graphs as one, inputs and outputs prefixed; ``finish`` is applied to each output."""
    builder = Builder(name.replace(".", "_"))
    with builder:
        outputs: dict[str, Value] = {}
        for prefix, graph in parts:
            arguments = [builder.input(f"{prefix}/{i.name}", i.type.shape, i.type.dtype) for i in graph.arguments]
            results = builder.inline(graph, arguments)
            for output, value in zip(graph.output_names, results, strict=True):
                outputs[f"{prefix}/{output}"] = value if finish is None else finish(value)
    return builder.build(outputs)
