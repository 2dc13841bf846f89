"""Layers of one operation each: activations, arithmetic, reductions, comparisons, losses."""

from __future__ import annotations

from inspect import Parameter
from typing import Any, cast

import numpy as np

from mithril.graph import ModelError, operation
from mithril.models.language.layer import Layer, LayerMeta

TERMINALS = {("x",): ("input",), ("a", "b"): ("left", "right")}


class OperationLayer(Layer):
    """A layer of one operation: the operands are its terminals, the attributes its constructor arguments.

    An optional operand, such as a class weight, can also be passed to the constructor by name.
    """

    op_name = ""
    scalars = True

    def __init__(self, *args: Any, in_place: bool = False, **attributes: Any) -> None:
        op = operation(self.op_name)
        if len(args) > len(op.attributes):
            raise ModelError(
                f"{type(self).__name__} takes {len(op.attributes)} arguments, got {len(args)}",
                facts=[f"accepted: {', '.join(op.attributes) or 'none'}, in_place"],
            )
        constants = {n: attributes.pop(n) for n in op.operands if n in op.optional and n in attributes}
        self.constants = {n: _numbers(n, x) for n, x in constants.items() if x is not None}
        values = dict(zip(op.attributes, args, strict=False)) | attributes
        self.op = op
        self.in_place = in_place
        self.attributes = op.complete(values)
        names = TERMINALS.get(op.operands, op.operands)
        optional = [k for k, name in enumerate(op.operands) if name in op.optional]
        self.inputs = tuple(n for k, n in enumerate(names) if k not in optional)
        self.optional = tuple(names[k] for k in optional if op.operands[k] not in self.constants)
        self.outputs = ("output",) if len(op.results) == 1 else op.results

    @classmethod
    def constructor_parameters(cls) -> list[Parameter]:
        """Return the attributes of the operation, its optional operands, and ``in_place``."""
        if not cls.op_name:
            return super().constructor_parameters()
        op = operation(cls.op_name)
        attributes = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in op.__signature__.parameters.values()
                      if p.name in op.attributes]  # fmt: skip
        required = [p for p in attributes if p.default is p.empty]
        optional = [Parameter(n, Parameter.KEYWORD_ONLY, default=None) for n in op.operands if n in op.optional]
        in_place = Parameter("in_place", Parameter.KEYWORD_ONLY, default=False, annotation="bool")
        return [*required, *(p for p in attributes if p not in required), *optional, in_place]

    def expects(self, terminal: str) -> Any:
        return (None, "int32") if terminal == operation(self.op_name).labels else None

    def build(self, *values: Any) -> Any:
        from mithril.graph import Value

        if not any(isinstance(v, Value) for v in values):
            values = (self.context.as_value(values[0]), *values[1:])
        if self.constants:
            names = TERMINALS.get(self.op.operands, self.op.operands)
            operands = dict(zip(self.inputs + self.optional, values, strict=False))
            operands |= {names[self.op.operands.index(n)]: x for n, x in self.constants.items()}
            values = tuple(operands.get(n) for n in names)
        return self.op(*values, **self.attributes)


def _numbers(name: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as cause:
        raise ModelError(f"{name}={value!r} is not a number or an array of numbers", facts=[str(cause)]) from None


def layer_of(title: str, op_name: str) -> type[OperationLayer]:
    """Create the layer class of an operation."""
    body = {"op_name": op_name, "__doc__": operation(op_name).doc, "__module__": __name__}
    return cast("type[OperationLayer]", LayerMeta(title, (OperationLayer,), body))


# activations
Relu = layer_of("Relu", "relu")
Relu6 = layer_of("Relu6", "relu6")
LeakyRelu = layer_of("LeakyRelu", "leaky_relu")
Elu = layer_of("Elu", "elu")
Selu = layer_of("Selu", "selu")
Gelu = layer_of("Gelu", "gelu")
Silu = layer_of("Silu", "silu")
Mish = layer_of("Mish", "mish")
Sigmoid = layer_of("Sigmoid", "sigmoid")
HardSigmoid = layer_of("HardSigmoid", "hard_sigmoid")
HardSwish = layer_of("HardSwish", "hard_swish")
HardTanh = layer_of("HardTanh", "hard_tanh")
Softplus = layer_of("Softplus", "softplus")
Softsign = layer_of("Softsign", "softsign")
Softmax = layer_of("Softmax", "softmax")
LogSoftmax = layer_of("LogSoftmax", "log_softmax")
Tanh = layer_of("Tanh", "tanh")
Celu = layer_of("Celu", "celu")
Softshrink = layer_of("Softshrink", "softshrink")
LogSigmoid = layer_of("LogSigmoid", "log_sigmoid")
Glu = layer_of("Glu", "glu")
SwiGlu = layer_of("SwiGlu", "swiglu")

# elementwise
Abs = layer_of("Abs", "abs")
Negate = layer_of("Negate", "neg")
Sign = layer_of("Sign", "sign")
Exp = layer_of("Exp", "exp")
Log = layer_of("Log", "log")
Sqrt = layer_of("Sqrt", "sqrt")
Square = layer_of("Square", "square")
Sin = layer_of("Sin", "sin")
Cos = layer_of("Cos", "cos")
Erf = layer_of("Erf", "erf")
Floor = layer_of("Floor", "floor")
Ceil = layer_of("Ceil", "ceil")
Round = layer_of("Round", "round")
Clip = layer_of("Clip", "clip")
Cast = layer_of("Cast", "cast")
Add = layer_of("Add", "add")
Subtract = layer_of("Subtract", "sub")
Multiply = layer_of("Multiply", "mul")
Divide = layer_of("Divide", "div")
FloorDivide = layer_of("FloorDivide", "floordiv")
Modulo = layer_of("Modulo", "mod")
Power = layer_of("Power", "pow")
Maximum = layer_of("Maximum", "maximum")
Minimum = layer_of("Minimum", "minimum")
MatMul = layer_of("MatMul", "matmul")
Where = layer_of("Where", "where")

# comparisons and logic
Equal = layer_of("Equal", "equal")
NotEqual = layer_of("NotEqual", "not_equal")
Less = layer_of("Less", "less")
LessEqual = layer_of("LessEqual", "less_equal")
Greater = layer_of("Greater", "greater")
GreaterEqual = layer_of("GreaterEqual", "greater_equal")
LogicalAnd = layer_of("LogicalAnd", "logical_and")
LogicalOr = layer_of("LogicalOr", "logical_or")
LogicalNot = layer_of("LogicalNot", "logical_not")

# reductions, sorting, rearrangement
PixelShuffle = layer_of("PixelShuffle", "pixel_shuffle")
Normalize = layer_of("Normalize", "normalize")
GridSample = layer_of("GridSample", "grid_sample")
AffineGrid = layer_of("AffineGrid", "affine_grid")
RoiAlign = layer_of("RoiAlign", "roi_align")
NonMaximumSuppression = layer_of("NonMaximumSuppression", "nms")
Sum = layer_of("Sum", "sum")
Mean = layer_of("Mean", "mean")
Prod = layer_of("Prod", "prod")
Max = layer_of("Max", "max")
Min = layer_of("Min", "min")
AnyOf = layer_of("AnyOf", "any")
AllOf = layer_of("AllOf", "all")
Variance = layer_of("Variance", "var")
LogSumExp = layer_of("LogSumExp", "logsumexp")
ArgMax = layer_of("ArgMax", "argmax")
ArgMin = layer_of("ArgMin", "argmin")
CumSum = layer_of("CumSum", "cumsum")
CumProd = layer_of("CumProd", "cumprod")
Sort = layer_of("Sort", "sort")
TopK = layer_of("TopK", "top_k")
OneHot = layer_of("OneHot", "one_hot")

# losses; labels are integers, predictions and targets are floats
CrossEntropy = layer_of("CrossEntropy", "cross_entropy")
BinaryCrossEntropy = layer_of("BinaryCrossEntropy", "binary_cross_entropy")
BinaryCrossEntropyWithLogits = layer_of("BinaryCrossEntropyWithLogits", "binary_cross_entropy_with_logits")
NLLLoss = layer_of("NLLLoss", "nll_loss")
MSELoss = layer_of("MSELoss", "mse_loss")
L1Loss = layer_of("L1Loss", "l1_loss")
HuberLoss = layer_of("HuberLoss", "huber_loss")
SmoothL1Loss = layer_of("SmoothL1Loss", "smooth_l1_loss")
HingeLoss = layer_of("HingeLoss", "hinge_loss")
TripletLoss = layer_of("TripletLoss", "triplet_loss")
ContrastiveLoss = layer_of("ContrastiveLoss", "contrastive_loss")
CosineEmbeddingLoss = layer_of("CosineEmbeddingLoss", "cosine_embedding_loss")
MarginRankingLoss = layer_of("MarginRankingLoss", "margin_ranking_loss")
InfoNCELoss = layer_of("InfoNCELoss", "info_nce_loss")
FocalLoss = layer_of("FocalLoss", "focal_loss")
DiceLoss = layer_of("DiceLoss", "dice_loss")
PoissonNLLLoss = layer_of("PoissonNLLLoss", "poisson_nll_loss")
GaussianNLLLoss = layer_of("GaussianNLLLoss", "gaussian_nll_loss")
CTCLoss = layer_of("CTCLoss", "ctc_loss")
KLDivergence = layer_of("KLDivergence", "kl_div")
CosineSimilarity = layer_of("CosineSimilarity", "cosine_similarity")
