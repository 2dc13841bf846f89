"""The page of a layer: arguments, terminals, the source of its body, and an example with its summary."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import mithril.models as models
from mithril.graph import operation
from mithril.models import Layer
from mithril_tools.reference.page import (
    Page,
    call_block,
    default_text,
    example,
    fence,
    first_line,
    prose,
    sections,
    table,
)
from mithril_tools.reference.sources import source_of

IMAGE, LINE, VOLUME, SEQUENCE = [2, 3, 8, 8], [2, 3, 8], [1, 3, 4, 4, 4], [2, 5, 8]
CLASSES = {"logits": [4, 3], "labels": [4]}
SCORES = {"predictions": [6], "labels": [6]}
TARGETS = {"predictions": [4, 2], "targets": [4, 2]}
BOTH = {"input": SEQUENCE, "memory": [2, 7, 8]}
PAIR = {"input0": [2, 3], "input1": [2, 3]}

# Layer -> its construction in the example, and the shapes of its inputs (a list: of the only one).
EXAMPLES: dict[str, tuple[str, list[int] | dict[str, list[int]]]] = {
    "AUC": ("AUC()", SCORES),
    "Accuracy": ("Accuracy()", CLASSES),
    "AdaptiveAvgPool1d": ("AdaptiveAvgPool1d(2)", LINE),
    "AdaptiveAvgPool2d": ("AdaptiveAvgPool2d(2)", IMAGE),
    "AdaptiveMaxPool1d": ("AdaptiveMaxPool1d(2)", LINE),
    "AdaptiveMaxPool2d": ("AdaptiveMaxPool2d((2, 1))", IMAGE),
    "AvgPool1d": ("AvgPool1d(2)", LINE),
    "AvgPool2d": ("AvgPool2d(2)", IMAGE),
    "AvgPool3d": ("AvgPool3d(2)", VOLUME),
    "BatchNorm1d": ("BatchNorm1d()", LINE),
    "BatchNorm2d": ("BatchNorm2d(3)", IMAGE),
    "BatchNorm3d": ("BatchNorm3d(3)", VOLUME),
    "AveragePrecision": ("AveragePrecision()", SCORES),
    "BalancedAccuracy": ("BalancedAccuracy(3)", CLASSES),
    "BinaryAccuracy": ("BinaryAccuracy(threshold=0.5)", SCORES),
    "BrierScore": ("BrierScore()", SCORES),
    "ClassF1Score": ("ClassF1Score(3)", CLASSES),
    "ClassPrecision": ("ClassPrecision(3)", CLASSES),
    "ClassRecall": ("ClassRecall(3)", CLASSES),
    "CohenKappa": ("CohenKappa(3)", CLASSES),
    "ExplainedVariance": ("ExplainedVariance()", TARGETS),
    "LogLoss": ("LogLoss()", {"probabilities": [4, 3], "labels": [4]}),
    "MatthewsCorrelation": ("MatthewsCorrelation(3)", CLASSES),
    "MaxError": ("MaxError()", TARGETS),
    "MeanAbsolutePercentageError": ("MeanAbsolutePercentageError()", TARGETS),
    "MeanIoU": ("MeanIoU(3)", CLASSES),
    "MeanSquaredLogError": ("MeanSquaredLogError()", TARGETS),
    "RootMeanSquaredError": ("RootMeanSquaredError()", TARGETS),
    "Concat": ("Concat(axis=0)", PAIR),
    "ConfusionMatrix": ("ConfusionMatrix(3)", CLASSES),
    "Conv1d": ("Conv1d(3, 4, kernel_size=3, padding=1)", LINE),
    "Conv2d": ("Conv2d(3, 4, kernel_size=3, padding=1)", IMAGE),
    "Conv3d": ("Conv3d(3, 4, kernel_size=2, stride=2)", VOLUME),
    "ConvTranspose1d": ("ConvTranspose1d(3, 4, kernel_size=2, stride=2)", LINE),
    "ConvTranspose2d": ("ConvTranspose2d(3, 4, kernel_size=2, stride=2)", IMAGE),
    "ConvTranspose3d": ("ConvTranspose3d(3, 4, kernel_size=2, stride=2)", VOLUME),
    "DepthwiseConv2d": ("DepthwiseConv2d(3, kernel_size=3, padding=1)", IMAGE),
    "Dropout": ("Dropout(0.1)", [2, 8]),
    "Embedding": ("Embedding(100, 8)", [2, 5]),
    "F1Score": ("F1Score()", SCORES),
    "Flatten": ("Flatten()", IMAGE),
    "GRUCell": ("GRUCell(8, 16)", [2, 8]),
    "GRU": ("GRU(8, 16)", SEQUENCE),
    "GlobalAvgPool1d": ("GlobalAvgPool1d()", LINE),
    "GlobalAvgPool2d": ("GlobalAvgPool2d()", IMAGE),
    "GlobalMaxPool1d": ("GlobalMaxPool1d()", LINE),
    "GlobalMaxPool2d": ("GlobalMaxPool2d()", IMAGE),
    "GroupNorm": ("GroupNorm(2, 4)", [2, 4, 8, 8]),
    "Identity": ("Identity()", [2, 8]),
    "InstanceNorm1d": ("InstanceNorm1d(3, affine=True)", LINE),
    "InstanceNorm2d": ("InstanceNorm2d(3, affine=True)", IMAGE),
    "LSTMCell": ("LSTMCell(8, 16)", [2, 8]),
    "LSTM": ("LSTM(8, 16)", SEQUENCE),
    "LayerNorm": ("LayerNorm(8)", SEQUENCE),
    "Linear": ("Linear(16)", [2, 8]),
    "MLP": ('MLP([32, 10], activation="gelu")', [2, 8]),
    "MaxPool1d": ("MaxPool1d(2)", LINE),
    "MaxPool2d": ("MaxPool2d(3, stride=2, padding=1)", IMAGE),
    "MaxPool3d": ("MaxPool3d(2)", VOLUME),
    "MeanAbsoluteError": ("MeanAbsoluteError()", TARGETS),
    "MeanSquaredError": ("MeanSquaredError()", TARGETS),
    "MixtureOfExperts": ("MixtureOfExperts(4, 16)", SEQUENCE),
    "MultiHeadAttention": ("MultiHeadAttention(8, heads=2, causal=True)", {"query": SEQUENCE}),
    "PRelu": ("PRelu()", [2, 8]),
    "Pad": ("Pad(1, (0, 2))", IMAGE),
    "Perplexity": ("Perplexity()", CLASSES),
    "PositionalEmbedding": ("PositionalEmbedding(64)", SEQUENCE),
    "Precision": ("Precision()", SCORES),
    "R2Score": ("R2Score()", TARGETS),
    "RMSNorm": ("RMSNorm(8)", SEQUENCE),
    "RNNCell": ("RNNCell(8, 16)", [2, 8]),
    "RNN": ("RNN(8, 16)", SEQUENCE),
    "Recall": ("Recall()", SCORES),
    "Reshape": ("Reshape(2, 4)", [3, 8]),
    "Residual": ("Residual(MLP([16, 8]))", [2, 8]),
    "RotaryEmbedding": ("RotaryEmbedding()", [2, 2, 5, 8]),
    "Sequential": ("Sequential(Linear(16), Relu(), Linear(4))", [2, 8]),
    "SinusoidalEmbedding": ("SinusoidalEmbedding()", SEQUENCE),
    "SpectralNorm": ("SpectralNorm(Linear(16))", [2, 8]),
    "Split": ("Split(2)", [2, 8]),
    "Squeeze": ("Squeeze(1)", [2, 1, 8]),
    "Stack": ("Stack(axis=0)", PAIR),
    "TopKAccuracy": ("TopKAccuracy(2)", CLASSES),
    "TransformerDecoder": ("TransformerDecoder(2, 8, heads=2)", BOTH),
    "TransformerDecoderLayer": ("TransformerDecoderLayer(8, heads=2)", BOTH),
    "TransformerEncoder": ("TransformerEncoder(2, 8, heads=2)", SEQUENCE),
    "TransformerEncoderLayer": ("TransformerEncoderLayer(8, heads=2)", SEQUENCE),
    "Transpose": ("Transpose(0, 2, 1)", SEQUENCE),
    "Unsqueeze": ("Unsqueeze(1)", [2, 8]),
    "Upsample": ("Upsample(2)", IMAGE),
    "WeightNorm": ("WeightNorm(Conv2d(4, kernel_size=3))", IMAGE),
}
NO_EXAMPLE = {
    "Layer",
    "Metric",
    "Model",
    "If",
    "While",
    "Wrapper",
    "Reparametrization",
    "Hooked",
}  # base classes and containers


def layer_classes() -> dict[str, type[Layer]]:
    """Return the layers of the library by name."""
    classes = {name: getattr(models, name) for name in dir(models)}
    return {n: c for n, c in sorted(classes.items()) if isinstance(c, type) and issubclass(c, Layer)}


def layer_pages() -> Iterator[Page]:
    """Yield the page of each layer."""
    for name, cls in layer_classes().items():
        group = cls.__module__.rpartition(".")[2].replace("_", " ")
        yield Page("layer", name, first_line(cls.__doc__), partial(layer_text, cls), group)


def layer_text(cls: type[Layer]) -> str:
    """Return the page of a layer."""
    op_name = getattr(cls, "op_name", "")
    operation_link = f"\n\nThe operation [{op_name}](../operations/{op_name}.md) as a layer." if op_name else ""
    head = f"{call_block(cls.__name__, cls)}\n\n{prose(cls.__doc__)}{operation_link}"
    body = "" if op_name or "build" not in vars(cls) else fence(source_of(vars(cls)["build"]))
    parts = (
        ("Arguments", _arguments(cls)),
        ("Terminals", _terminals(cls)),
        ("Example", layer_example(cls)),
        ("Meaning", body),
    )
    return f"{head}\n\n{sections(parts)}"


def _arguments(cls: type[Layer]) -> str:
    rows = []
    for p in inspect.signature(cls).parameters.values():
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        accepts = "" if p.annotation is p.empty else f"`{p.annotation}`"
        rows.append((f"`{stars}{p.name}`", accepts, "" if p.default is p.empty else default_text(p.default)))
    return table(("name", "accepts", "default"), rows)


def _terminals(cls: type[Layer]) -> str:
    if not construction(cls):
        return ""  # a base class or a container: its terminals are those of its content
    layer = _instance(cls)
    rows = [("inputs", layer.inputs), ("optional inputs", layer.optional), ("parameters that a connection can replace",
            layer.weights), ("outputs", layer.outputs)]  # fmt: skip
    return table(("terminals", "names"), [(kind, ", ".join(f"`{n}`" for n in names)) for kind, names in rows if names])


def _instance(cls: type[Layer]) -> Any:
    return eval(construction(cls), dict(layer_classes()))


def construction(cls: type[Layer]) -> str:
    """Return the construction of a layer in its example, or nothing for base classes and containers."""
    op_name = getattr(cls, "op_name", "")
    if cls.__name__ in EXAMPLES or not op_name:
        return EXAMPLES.get(cls.__name__, ("", []))[0]
    sample = operation(op_name).samples[0]
    values = [f"{n}={getattr(v, 'name', v)!r}" for n, v in sample.attributes.items()]
    return f"{cls.__name__}({', '.join(values)})"


def layer_with_inputs(cls: type[Layer]) -> tuple[Any, dict[str, list[int]], dict[str, str]]:
    """Return the layer of the example, the shapes of its inputs, and their dtypes other than float32."""
    name, layer = cls.__name__, _instance(cls)
    if name in EXAMPLES:
        declared = EXAMPLES[name][1]
        shapes = declared if isinstance(declared, dict) else {layer.inputs[0]: declared}
        return layer, shapes, {n: "int32" for n in shapes if n == "labels" or name == "Embedding"}
    specs = (s for s in operation(getattr(cls, "op_name", "")).samples[0].operands if s is not None)
    kinds = dict(zip(layer.inputs, specs, strict=False))
    types = {n: s.dtype for n, s in kinds.items() if s.dtype != "float32"}
    return layer, {n: list(s.shape) for n, s in kinds.items()}, types


def layer_example(cls: type[Layer]) -> str:
    """Return a model of this layer and its summary: the shapes of parameters and outputs."""
    call = construction(cls)
    if not call:
        return ""
    _, shapes, types = layer_with_inputs(cls)
    names = sorted({"Model", *(n for n in layer_classes() if f"{n}(" in call)})
    shown = f"shapes={shapes}" + (f", types={types}" if types else "")
    bindings = ", ".join(f'{n}="{n}"' for n in shapes)
    code = [
        f"from mithril.models import {', '.join(names)}",
        "",
        "model = Model()",
        f"model |= {call}({bindings})",
        f"print(model.summary({shown}))".replace("'", '"'),
    ]
    return example("\n".join(code))
