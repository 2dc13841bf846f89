"""Constructor calls of layers in today's spelling: names, arguments and terminals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst


class Unchanged(Exception):  # not an error: the reason why a call stays
    """Why a call has no equivalent of today."""


Arguments = dict[str, cst.BaseExpression]


@dataclass(frozen=True)
class Spelling:
    """The equivalent of a layer: ``parameters`` are the predecessor's, in order, with today's name or None for none.

    ``positional`` are those that today takes by position, first. ``terminals`` renames terminals of calls.
    """

    name: str
    parameters: Mapping[str, str | None] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    terminals: Mapping[str, str] = field(default_factory=dict)
    adjust: Callable[[Arguments], None] | None = None


def _flatten(values: Arguments) -> None:
    values.setdefault("start", cst.Integer("0"))  # the default of today is 1


def _gelu(values: Arguments) -> None:
    approximate = values.pop("approximate", None)
    if isinstance(approximate, cst.Name) and approximate.value == "True":
        values["approximate"] = cst.SimpleString('"tanh"')
    elif approximate is not None and not (isinstance(approximate, cst.Name) and approximate.value == "False"):
        raise Unchanged("approximate= is not a literal")


def _no_robust(values: Arguments) -> None:
    if "robust" in values:
        raise Unchanged("robust= continues a function below a threshold; write it with ops.where")


def _convolution(values: Arguments) -> None:
    if "out" not in values or "kernel_size" not in values:
        raise Unchanged("a convolution of today has out_channels and kernel_size")


def _group_norm(values: Arguments) -> None:
    values.setdefault("groups", cst.Integer("32"))
    raise_if_switched(values)


def raise_if_switched(values: Arguments) -> None:
    """Refuse use_scale= and use_bias= where today has one switch, affine=."""
    if values.keys() & {"use_scale", "use_bias"}:
        raise Unchanged("use_scale and use_bias are one switch of today, affine=")


def _variance(values: Arguments) -> None:
    correction = values.get("ddof")
    if isinstance(correction, cst.Float):
        values["ddof"] = cst.Integer(str(int(float(correction.value))))


def _arg(values: Arguments) -> None:
    if "axis" not in values:
        raise Unchanged("without axis= it returned a position in the flattened array")


REDUCTION = {"axis": "axis", "keepdim": "keepdims"}
POOL = {"kernel_size": "kernel_size", "stride": "stride", "padding": "padding", "dilation": "dilation"}
FUNCTION: Mapping[str, str] = {}


def _convolution_spelling(name: str, *more: str) -> Spelling:
    common = ("stride", "padding", "dilation", *more)
    parameters = {"kernel_size": "kernel_size", "out_channels": "out", **dict(zip(common, common, strict=True)),
                  "use_bias": "bias"}  # fmt: skip
    return Spelling(name, parameters, ("out",), adjust=_convolution)


SPELLINGS: dict[str, Spelling] = {
    "Linear": Spelling("Linear", {"dimension": "dimension", "use_bias": "bias"}),
    "Convolution1D": _convolution_spelling("Conv1d"),
    "Convolution2D": _convolution_spelling("Conv2d", "groups"),
    "MaxPool1D": Spelling("MaxPool1d", POOL),
    "MaxPool2D": Spelling("MaxPool2d", POOL),
    "AvgPool2D": Spelling("AvgPool2d", {k: POOL[k] for k in ("kernel_size", "stride", "padding")}),
    "LayerNorm": Spelling("LayerNorm", {"use_scale": "scale", "use_bias": "bias", "eps": "eps"}),
    "GroupNorm": Spelling(
        "GroupNorm",
        {"num_groups": "groups", "use_scale": "use_scale", "use_bias": "use_bias", "eps": "eps"},
        ("groups",),
        adjust=_group_norm,
    ),
    "Embedding": Spelling("Embedding", {"num_embeddings": "vocabulary", "dim": "size"}),
    "Flatten": Spelling("Flatten", {"start_dim": "start", "end_dim": "end"}, adjust=_flatten),
    "Softmax": Spelling("Softmax", {"input": None, "axis": "axis"}),
    "LeakyRelu": Spelling("LeakyRelu", {"slope": "slope"}),
    "Gelu": Spelling("Gelu", {"approximate": "approximate"}, adjust=_gelu),
    "Clamp": Spelling("Clip", {"input": None, "min_val": "low", "max_val": "high"}),
    "Variance": Spelling("Variance", {**REDUCTION, "correction": "ddof"}, adjust=_variance),
    "ArgMax": Spelling("ArgMax", REDUCTION, adjust=_arg),
    "ArgMin": Spelling("ArgMin", REDUCTION, adjust=_arg),
    "Log": Spelling("Log", {"robust": "robust"}, adjust=_no_robust),
    "Sqrt": Spelling("Sqrt", {"robust": "robust"}, adjust=_no_robust),
    "Power": Spelling(
        "Power", {"robust": "robust"}, terminals={"base": "left", "exponent": "right"}, adjust=_no_robust
    ),
    "Divide": Spelling("Divide", terminals={"numerator": "left", "denominator": "right"}),
    "FloorDivide": Spelling("FloorDivide", terminals={"numerator": "left", "denominator": "right"}),
    "Where": Spelling("Where", terminals={"cond": "condition", "input1": "a", "input2": "b"}),
    **{name: Spelling(name, REDUCTION) for name in ("Mean", "Sum", "Max", "Min", "Prod")},
    **{
        old: Spelling(new)
        for old, new in {
            "Absolute": "Abs", "Buffer": "Identity", "Cosine": "Cos", "Exponential": "Exp", "MatrixMultiply": "MatMul",
            "SiLU": "Silu", "Sine": "Sin",
        }.items()
    },
    **{
        name: Spelling(name)
        for name in (
            *("Relu", "Sigmoid", "Softplus", "Tanh", "Sign", "Square", "Floor", "Negate", "Add", "Subtract"),
            *("Minimum", "Maximum", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalNot"),
            *("LogicalAnd", "LogicalOr", "Multiply"),
        )
    },
}  # fmt: skip

# Losses of TrainModel whose mean is a loss of today.
LOSSES = {"SquaredError": "MSELoss", "AbsoluteError": "L1Loss", "HingeLoss": "HingeLoss"}


def rewritten(name: str, call: cst.Call) -> cst.Call:
    """Return a constructor call in today's spelling; raise Unchanged with the reason if there is none."""
    if name not in SPELLINGS:
        raise Unchanged("today has no layer of this meaning")
    spelling = SPELLINGS[name]
    values: Arguments = {}
    keep: list[cst.Arg] = []
    order = list(spelling.parameters)
    for position, argument in enumerate(call.args):
        if argument.star:
            raise Unchanged("* and ** in its arguments")
        key = argument.keyword.value if argument.keyword is not None else _at(order, position)
        if key == "name":
            keep.append(argument)
            continue
        today = spelling.parameters.get(key)
        if today is None:
            raise Unchanged(f"the argument {key}=")
        values[today] = argument.value
    unchanged = name == spelling.name and all(old == new for old, new in spelling.parameters.items() if new in values)
    if unchanged and spelling.adjust is None:
        return call
    if spelling.adjust is not None:
        spelling.adjust(values)
    first = [argument_of(values.pop(key)) for key in spelling.positional if key in values]
    by_name = [argument_of(value, key) for key, value in values.items()]
    return call.with_changes(args=separated([*first, *by_name, *keep]))


def _at(order: Sequence[str], position: int) -> str:
    if position >= len(order):
        raise Unchanged("more arguments by position than today takes")
    return order[position]


def argument_of(value: cst.BaseExpression, keyword: str | None = None) -> cst.Arg:
    """Return an argument as it is written in a call."""
    if keyword is None:
        return cst.Arg(value)
    bare = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(keyword), equal=bare)


def separated(arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Return the arguments with commas between them."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [
        a.with_changes(comma=comma if k + 1 < len(arguments) else cst.MaybeSentinel.DEFAULT)
        for k, a in enumerate(arguments)
    ]
