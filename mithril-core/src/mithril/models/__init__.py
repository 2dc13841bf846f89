"""The model language and the layer library; every name is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mithril.models.language.connection import Connection as Connection, IOKey as IOKey
    from mithril.models.language.control_flow import If as If, While as While
    from mithril.models.language.layer import Layer as Layer
    from mithril.models.language.model import Model as Model
    from mithril.models.layers.attention import *  # noqa: F403
    from mithril.models.layers.containers import *  # noqa: F403
    from mithril.models.layers.convolution import *  # noqa: F403
    from mithril.models.layers.linear import *  # noqa: F403
    from mithril.models.layers.metrics import *  # noqa: F403
    from mithril.models.layers.normalization import *  # noqa: F403
    from mithril.models.layers.operation_layers import *  # noqa: F403
    from mithril.models.layers.pooling import *  # noqa: F403
    from mithril.models.layers.recurrent import *  # noqa: F403
    from mithril.models.layers.shape_layers import *  # noqa: F403
    from mithril.models.layers.transformer import *  # noqa: F403

# Module below ``mithril.models`` -> the names it gives.
_HOME = {
    "layers.attention": ("MultiHeadAttention", "PositionalEmbedding", "RotaryEmbedding", "SinusoidalEmbedding"),
    "layers.containers": ("Residual", "Sequential"),
    "language.connection": ("Connection", "IOKey"),
    "language.control_flow": ("If", "While"),
    "layers.convolution": (
        *("Conv1d", "Conv2d", "Conv3d"),
        *("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "DepthwiseConv2d"),
    ),
    "language.layer": ("Layer",),
    "layers.linear": ("Embedding", "Linear", "MLP"),
    "layers.metrics": (
        *("AUC", "Accuracy", "ConfusionMatrix", "F1Score", "MeanAbsoluteError", "MeanSquaredError", "Metric"),
        *("Perplexity", "Precision", "R2Score", "Recall", "TopKAccuracy"),
    ),
    "language.model": ("Model",),
    "layers.normalization": (
        *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d"),
        *("LayerNorm", "RMSNorm"),
    ),
    "layers.operation_layers": (
        *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Mish", "Sigmoid", "HardSigmoid", "HardSwish"),
        *("HardTanh", "Softplus", "Softsign", "Softmax", "LogSoftmax", "Tanh"),
        *("Celu", "Softshrink", "LogSigmoid", "Glu", "SwiGlu", "PixelShuffle", "Normalize"),
        *("Abs", "Negate", "Sign", "Exp", "Log", "Sqrt", "Square", "Sin", "Cos", "Erf", "Floor", "Ceil", "Round"),
        *("Clip", "Cast", "Add", "Subtract", "Multiply", "Divide", "FloorDivide", "Modulo", "Power", "Maximum"),
        *("Minimum", "MatMul", "Where"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot"),
        *("Sum", "Mean", "Prod", "Max", "Min", "AnyOf", "AllOf", "Variance", "LogSumExp", "ArgMax", "ArgMin", "CumSum"),
        *("CumProd", "Sort", "TopK", "OneHot"),
        *("CrossEntropy", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "NLLLoss", "MSELoss", "L1Loss"),
        *("HuberLoss", "KLDivergence", "CosineSimilarity", "SmoothL1Loss", "HingeLoss", "TripletLoss"),
    ),
    "layers.pooling": (
        *("MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d"),
        *("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d"),
        *("GlobalAvgPool1d", "GlobalAvgPool2d", "GlobalMaxPool1d", "GlobalMaxPool2d"),
    ),
    "layers.recurrent": ("GRU", "LSTM", "RNN"),
    "layers.shape_layers": (
        *("Concat", "Dropout", "Flatten", "Identity", "Pad", "PRelu", "Reshape", "Split", "Squeeze", "Stack"),
        *("Transpose", "Unsqueeze", "Upsample"),
    ),
    "layers.transformer": (
        "TransformerDecoder",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerEncoderLayer",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    from importlib import import_module

    module = _MODULE_OF.get(name)
    if module is None:
        if name.startswith("_"):
            raise AttributeError(name)
        from importlib.util import find_spec

        if find_spec(f"mithril.models.{name}") is not None:
            return import_module(f"mithril.models.{name}")
        from mithril.base.errors import unknown

        what, _, hint = unknown("layer", name, list(_MODULE_OF))
        raise AttributeError(what + (f"; {hint}" if hint else ""))
    value = globals()[name] = getattr(import_module(f"mithril.models.{module}"), name)
    return value


def __dir__() -> list[str]:
    """The language and the layers by name."""
    return sorted({*globals(), *__all__})
