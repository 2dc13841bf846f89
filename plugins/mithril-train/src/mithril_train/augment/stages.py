"""``Trainer(augment=...)``: layers that change columns of the batch before the model reads them, in the same graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mithril.compiler import ModelCompiler, compile as compile_model
from mithril.graph import Builder, Graph, OptionError, Output, TensorType, Value, result
from mithril.models import Layer
from mithril_train.step.loss_binding import SAMPLE_WEIGHT

PREFIX = "augment"


@dataclass(frozen=True)
class Stage:
    """The graph of one layer, with the columns that it reads and replaces, in order."""

    graph: Graph
    reads: tuple[str, ...]


class Augmentations:
    """The layers of ``augment=``; the outputs of a layer replace its inputs in order."""

    def __init__(self, layers: Layer | Sequence[Layer], backend: Any, inputs: Sequence[str]) -> None:
        self.layers = [layers] if isinstance(layers, Layer) else list(layers)
        self.inputs = inputs
        self.compilers: list[ModelCompiler] = []
        for layer in self.layers:
            compiler = compile_model(layer, backend).compiler
            assert isinstance(compiler, ModelCompiler)
            self.compilers.append(compiler)

    def stages(self, columns: Mapping[str, TensorType]) -> tuple[list[Stage], dict[str, TensorType]]:
        """Return the graphs for a batch, and the types of its columns after them."""
        types, stages = dict(columns), []
        for compiler in self.compilers:
            terminals = list(compiler.session.specs)
            reads = tuple(self._column(name, types) for name in terminals)
            graph = compiler.pipeline.trace(dict(zip(terminals, (types[n] for n in reads), strict=True)), training=True)
            if graph.with_role("param"):
                raise OptionError(
                    f"augment: '{graph.name}' has parameters", hint="put layers with parameters into the model"
                )
            results = [r for r in graph.results if r.role != "state"]
            types.update((n, r.value.type) for n, r in zip(reads, results, strict=False))
            stages.append(Stage(graph, reads))
        return stages, types

    def _column(self, terminal: str, columns: Mapping[str, TensorType]) -> str:
        """Return the column of a terminal: by name, else the first input of the model or the only target."""
        if terminal in columns:
            return terminal
        targets = [n for n in columns if n not in self.inputs and n != SAMPLE_WEIGHT]
        candidates = targets if terminal == "target" else [n for n in self.inputs if n in columns][:1]
        if len(candidates) != 1 or terminal not in ("input", "target"):
            raise OptionError(
                f"augment reads '{terminal}', which is not in the batch",
                facts=[f"batch: {', '.join(columns)}"],
                hint="name the inputs of the layer after columns of the batch",
            )
        return candidates[0]


def augmented(
    stages: Sequence[Stage], model: Graph, columns: Mapping[str, TensorType]
) -> tuple[Graph, dict[str, Value]]:
    """Return the model's graph behind the stages, and the columns after them by name."""
    builder = Builder(model.name)
    values = {name: builder.input(name, t.shape, t.dtype) for name, t in columns.items()}
    carried: list[Output] = []
    with builder:
        for k, stage in enumerate(stages):
            reads = iter(stage.reads)
            operands = []
            for i in stage.graph.arguments:
                if i.role == "state":
                    name = f"{PREFIX}/{k}/{i.name}"
                    operands.append(builder.input(name, i.type.shape, i.type.dtype, "state", tags=i.tags))
                else:
                    operands.append(values[next(reads)])
            outputs = builder.inline(stage.graph, operands)
            targets = iter(stage.reads)
            for r, value in zip(stage.graph.results, outputs, strict=True):
                if r.role == "state":
                    carried.append(result("state", f"{PREFIX}/{k}/{r.of}", value))
                else:
                    values[next(targets)] = value
        operands = []
        for i in model.arguments:
            if i.role == "input" and i.name in values:
                operands.append(values[i.name])
            else:
                operands.append(builder.input(i.name, i.type.shape, i.type.dtype, i.role, tags=i.tags))
        outputs = builder.inline(model, operands)
    results = [Output(v, r.name, r.role, r.of) for v, r in zip(outputs, model.results, strict=True)]
    return builder.build((*results, *carried)), values
