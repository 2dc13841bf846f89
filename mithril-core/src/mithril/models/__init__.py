"""The model language and the layer library; each name is imported on first use."""

from __future__ import annotations

from typing import Any

from mithril.graph.lazy_exports import lazy_exports

# Module below ``mithril.models`` -> the names it exports.
HOMES = {
    "language.arguments": ("expect_size", "in_and_out"),
    "language.caching": ("limit_positions", "visible_keys", "write_cache"),
    "language.connection": ("snake_case", "Connection", "IOKey"),
    "language.control_flow": ("If", "While"),
    "language.flatten": ("flatten",),
    "language.layer": ("Layer",),
    "language.model": ("Model",),
    "layers.attention": ("MultiHeadAttention", "PositionalEmbedding", "RotaryEmbedding", "SinusoidalEmbedding"),
    "layers.class_metrics": (
        *("BalancedAccuracy", "ClassF1Score", "ClassPrecision", "ClassRecall", "CohenKappa", "LogLoss"),
        *("MatthewsCorrelation", "MeanIoU"),
    ),
    "layers.containers": ("Residual", "Sequential"),
    "layers.convolution": (
        *("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "DepthwiseConv2d"),
    ),
    "layers.linear": ("Embedding", "Linear", "MLP"),
    "layers.metrics": (
        *("AUC", "Accuracy", "BinaryAccuracy", "ConfusionMatrix", "F1Score", "MeanAbsoluteError"),
        *("MeanSquaredError", "Metric", "Perplexity", "Precision", "R2Score", "Recall", "TopKAccuracy"),
    ),
    "layers.mixture": ("MixtureOfExperts",),
    "layers.normalization": (
        *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "LayerNorm"),
        "RMSNorm",
    ),
    "layers.operation_layers": (
        *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Mish", "Sigmoid", "HardSigmoid"),
        *("HardSwish", "HardTanh", "Softplus", "Softsign", "Softmax", "LogSoftmax", "Tanh", "Celu", "Softshrink"),
        *("LogSigmoid", "Glu", "SwiGlu", "PixelShuffle", "Normalize", "Abs", "Negate", "Sign", "Exp", "Log", "Sqrt"),
        *("Square", "Sin", "Cos", "Erf", "Floor", "Ceil", "Round", "Clip", "Cast", "Add", "Subtract", "Multiply"),
        *("Divide", "FloorDivide", "Modulo", "Power", "Maximum", "Minimum", "MatMul", "Where", "Equal", "NotEqual"),
        *("Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "Sum", "Mean"),
        *("Prod", "Max", "Min", "AnyOf", "AllOf", "Variance", "LogSumExp", "ArgMax", "ArgMin", "CumSum", "CumProd"),
        *("Sort", "TopK", "OneHot", "CrossEntropy", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "NLLLoss"),
        *("MSELoss", "L1Loss", "HuberLoss", "KLDivergence", "CosineSimilarity", "SmoothL1Loss", "HingeLoss"),
        *("TripletLoss", "ContrastiveLoss", "CosineEmbeddingLoss", "MarginRankingLoss", "InfoNCELoss", "FocalLoss"),
        *("DiceLoss", "PoissonNLLLoss", "GaussianNLLLoss", "CTCLoss", "GridSample", "AffineGrid", "RoiAlign"),
        "NonMaximumSuppression",
    ),
    "layers.parameter_norms": ("SpectralNorm", "WeightNorm"),
    "layers.pooling": (
        *("MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "AdaptiveAvgPool1d"),
        *("AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "GlobalAvgPool1d", "GlobalAvgPool2d"),
        *("GlobalMaxPool1d", "GlobalMaxPool2d"),
    ),
    "layers.recurrent": ("GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "RNNCell"),
    "layers.regression_metrics": (
        *("AveragePrecision", "BrierScore", "ExplainedVariance", "MaxError", "MeanAbsolutePercentageError"),
        *("MeanSquaredLogError", "RootMeanSquaredError"),
    ),
    "layers.shape_layers": (
        *("Concat", "Dropout", "Flatten", "Identity", "Pad", "PRelu", "Reshape", "Split", "Squeeze", "Stack"),
        *("Transpose", "Unsqueeze", "Upsample"),
    ),
    "layers.transformer": (
        *("TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer"),
    ),
    "layers.wrapper": ("Hooked", "Reparametrization", "Wrapper", "hook", "shared_parameter"),
}
__all__, _load, __dir__ = lazy_exports(__name__, HOMES)


def __getattr__(name: str) -> Any:
    if name in __all__ or name.startswith("_"):
        return _load(name)
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec(f"mithril.models.{name}") is not None:
        return import_module(f"mithril.models.{name}")
    from mithril.graph import unknown

    message, _, hint = unknown("layer", name, __all__)
    raise AttributeError(message + (f"; {hint}" if hint else ""))
