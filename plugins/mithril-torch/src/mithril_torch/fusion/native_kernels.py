"""Composites for which PyTorch has kernels: rows on top of the primitives, with the semantics of each operation."""

from __future__ import annotations

import math
from typing import Any

from mithril.backend import Call, dtype_of
from mithril.graph import Node, Registry, TensorType
from mithril_torch import helpers
from mithril_torch.fusion import (
    attention_gradients,
    batch_statistics,
    foreach,
    image_order,
    in_place,
    norm_gradients,
    packed_kernels,
    paired_ops,
    subgraph_fusion,
)
from mithril_torch.lowering import has_onednn, table
from mithril_torch.random_words import add_rows as add_random_rows

subgraph_fusion.add_rows(table)
paired_ops.add_rows(table)
foreach.add_rows(table)
in_place.add_rows(table)
packed_kernels.add_rows(table)
image_order.add_rows(table)
norm_gradients.add_rows(table)
attention_gradients.add_rows(table)
batch_statistics.add_rows(table)
add_random_rows(table)  # type: ignore[no-untyped-call]  # a module of helpers

UNARY: Registry[str] = Registry(
    "functions of PyTorch",
    {
        "relu": "torch.relu({x})",
        "sigmoid": "torch.sigmoid({x})",
        "silu": "F.silu({x})",
        "mish": "F.mish({x})",
        "elu": "F.elu({x}, {alpha})",
        "celu": "F.celu({x}, {alpha})",
        "selu": "F.selu({x})",
        "leaky_relu": "F.leaky_relu({x}, {slope})",
        "hard_sigmoid": "F.hardsigmoid({x})",
        "hard_swish": "{x} * F.hardsigmoid({x})",
        "log_sigmoid": "F.logsigmoid({x})",
        "softmax": "torch.softmax({x}, {axis})",
        "log_softmax": "torch.log_softmax({x}, {axis})",
        "log2": "torch.log2({x})",
    },
)


def is_float(node: Node) -> bool:
    return bool(dtype_of(node).is_float)


def is_single(node: Node) -> bool:
    return bool(dtype_of(node).name == "float32") and has_onednn()


for _name, _template in UNARY.items():
    table.row(_name, _template, when=is_float)


@table.function("gelu", when=is_float)
def _gelu(call: Call) -> str:
    if call.approximate == "tanh":
        return f'F.gelu({call.array("x")}, approximate="tanh")'
    return f"{call.helper(helpers.gelu)}({call.array('x')})"


# -- linear -------------------------------------------------------------------------------------------------------
ONEDNN = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
    "tanh": ("tanh", ""),
}
ACTIVATION_TEMPLATES = {
    "relu": "torch.relu({y})",
    "gelu_tanh": 'F.gelu({y}, approximate="tanh")',
    "silu": "F.silu({y})",
    "sigmoid": "torch.sigmoid({y})",
    "tanh": "torch.tanh({y})",
}


def _operands(call: Call, *names: str) -> str:
    op = call.node.op
    operands = dict(zip(op.operands, call.node.operands, strict=True))
    return ", ".join("None" if operands[name] is None else call.array(name) for name in names)


def may_pay(x: TensorType, columns: Any) -> bool:
    """Whether a product may be large enough for oneDNN; with static sizes this avoids the check at run time."""
    *rows, inner = x.shape
    sizes = (*rows, inner, columns)
    if not all(isinstance(n, int) for n in sizes):
        return True
    return bool(helpers.exceeds_call_overhead(math.prod(rows), inner, columns))  # type: ignore[no-untyped-call]


@table.function("linear", when=lambda node: is_float(node) and node.attributes["activation"] in ONEDNN)
def _linear(call: Call) -> str:
    operands = _operands(call, "x", "w", "b")
    if is_single(call.node) and may_pay(call.operand_type("x"), call.operand_type("w").shape[0]):
        attribute, algorithm = ONEDNN[call.activation]
        return f'{call.helper(helpers.linear)}({operands}, "{attribute}", "{algorithm}")'
    product = f"F.linear({operands})"
    if call.activation == "gelu":
        return f"{call.helper(helpers.gelu)}({product})"
    return ACTIVATION_TEMPLATES[call.activation].format(y=product) if call.activation != "none" else product


def _is_product(node: Node) -> bool:
    """Whether ``node`` is a float32 product with an unbatched matrix that may be large enough for oneDNN."""
    a, b = node.operands
    assert a is not None
    assert b is not None
    return is_single(node) and b.type.rank == 2 <= a.type.rank and may_pay(a.type, b.shape[1])


@table.function("matmul", when=_is_product)
def _matmul(call: Call) -> str:
    return f"{call.helper(helpers.matmul)}({call.array('a')}, {call.array('b')})"


# -- norms --------------------------------------------------------------------------------------------------------
def _trailing(node: Node) -> bool:
    operand = node.operands[0]
    assert operand is not None
    rank, axes = operand.type.rank, tuple(node.attributes["axes"])
    return operand.dtype.is_float and axes == tuple(range(rank - len(axes), rank))


@table.function("layer_norm", when=_trailing)
def _layer_norm(call: Call) -> str:
    shape = call.literal(tuple(call.operand_type("x").shape[k] for k in call.axes))
    return f"F.layer_norm({call.array('x')}, {shape}, {_operands(call, 'scale', 'bias')}, {call.literal(call.eps)})"


def _is_last(node: Node) -> bool:
    operand = node.operands[0]
    assert operand is not None
    return operand.dtype.name in ("float32", "float64") and node.attributes["axis"] == operand.type.rank - 1


@table.function("rms_norm", when=_is_last)
def _rms_norm(call: Call) -> str:
    shape = call.literal(call.operand_type("x").shape[-1:])
    return f"F.rms_norm({call.array('x')}, {shape}, {_operands(call, 'scale')}, {call.literal(call.eps)})"


@table.function("batch_norm", when=is_float)
def _batch_norm(call: Call) -> str:
    operands = _operands(call, "x", "mean", "var", "scale", "bias")
    return f"F.batch_norm({operands}, False, 0.0, {call.literal(call.eps)})"


@table.function("group_norm", when=is_float)
def _group_norm(call: Call) -> str:
    x, rest = call.array("x"), _operands(call, "scale", "bias")
    return f"F.group_norm({x}, {call.groups}, {rest}, {call.literal(call.eps)})"


# -- pooling ------------------------------------------------------------------------------------------------------
def _of_images(node: Node) -> bool:
    return is_float(node) and len(node.attributes["kernel"]) == 2


@table.function("max_pool_grad", when=_of_images)
def _max_pool_grad(call: Call) -> str:
    rest = ", ".join(call.literal(call.attributes[n]) for n in ("kernel", "stride", "padding", "dilation"))
    return f"{call.helper(helpers.max_pool_grad)}({call.g}, {call.x}, {rest})"


# -- sequences and images ------------------------------------------------------------------------------------------
@table.function("ctc_loss", when=lambda node: node.operands[0] is not None and node.operands[0].dtype.is_float)
def _ctc_loss(call: Call) -> str:
    operands = _operands(call, "logits", "labels", "logit_lengths", "label_lengths")
    settings = f'{call.blank}, "{call.reduction}", {call.zero_infinity}'
    return f"{call.helper(helpers.ctc)}({operands}, {settings}, {_computed(call)})"


@table.function("ctc_loss_grad", when=is_float)
def _ctc_loss_grad(call: Call) -> str:
    operands = _operands(call, "g", "logits", "labels", "logit_lengths", "label_lengths")
    settings = f'{call.blank}, "{call.reduction}", {call.zero_infinity}'
    return f"{call.helper(helpers.ctc_grad)}({operands}, {settings}, {_computed(call)})"


def _has_sampler(node: Node) -> bool:
    """Whether PyTorch samples such images: in two or three dimensions, bicubic in two."""
    grid = node.operands[-1]
    rank = grid.type.rank if grid is not None else 0
    return is_float(node) and (rank == 4 or (rank == 5 and node.attributes["mode"] != "bicubic"))


@table.function("grid_sample", when=_has_sampler)
def _grid_sample(call: Call) -> str:
    settings = f'"{call.mode}", "{call.padding_mode}", {call.align_corners}'
    return f"{call.helper(helpers.sampled)}({_operands(call, 'x', 'grid')}, {settings}, {_computed(call)})"


@table.function("grid_sample_grad", when=_has_sampler)
def _grid_sample_grad(call: Call) -> str:
    settings = f'"{call.mode}", "{call.padding_mode}", {call.align_corners}'
    return f"{call.helper(helpers.sampled_grads)}({_operands(call, 'g', 'x', 'grid')}, {settings}, {_computed(call)})"


def _computed(call: Call) -> str:
    """Return the dtype in which a float result is computed."""
    return "torch.float64" if call.type.dtype.name == "float64" else "torch.float32"


# -- attention ----------------------------------------------------------------------------------------------------
def _attends(node: Node) -> bool:
    """Whether the causal mask leaves every query a key: without one PyTorch returns 0 instead of nan."""
    queries, keys = (v.type.shape[2] for v in node.operands[:2] if v is not None)
    never_masked = queries == keys or (isinstance(queries, int) and isinstance(keys, int) and queries <= keys)
    return is_float(node) and (never_masked or not node.attributes["causal"])


@table.function("attention", when=_attends)
def _attention(call: Call) -> str:
    mask = call.node.operands[3]
    operands = _operands(call, "q", "k", "v")
    scale = call.literal(call.scale)
    if mask is not None and call.node.tags.get("cached"):
        options = "".join(f", {option}" for option in _sharing(call))
        return f"{call.helper(helpers.cached_attention)}({operands}, {_mask(call, mask)}, {scale}{options})"
    if mask is None:
        y, name = attention(call), None
    else:
        name = call.temp("mask")
        call.line(f"{name} = {_mask(call, mask)}")
        y = attention(call, name)
    if call.causal or (mask is not None and mask.dtype.is_bool):
        operand = "None" if mask is None else call.array("mask")
        y = f"{call.helper(helpers.without_hidden)}({y}, {operands}, {operand}, {call.causal}, {scale})"
    return y if name is None else f"{call.helper(helpers.nan_where_masked)}({y}, {name})"


def attention(call: Call, mask_name: str | None = None) -> str:
    """Emit PyTorch's attention kernel with its own semantics; ``mask_name`` holds the combined mask, if any."""
    q, k = call.operand_type("q"), call.operand_type("k")
    mask = call.node.operands[3]
    square = q.shape[2] == k.shape[2]
    parts = [_operands(call, "q", "k", "v")]
    if mask is not None or (call.causal and not square):
        parts.append(f"attn_mask={mask_name or _mask(call, mask)}")
    elif call.causal:
        parts.append("is_causal=True")
    scale = [] if call.scale is None else [f"scale={call.literal(call.scale)}"]
    return f"F.scaled_dot_product_attention({', '.join([*parts, *scale, *_sharing(call)])})"


def _sharing(call: Call) -> list[str]:
    """Return the keyword for heads that share keys."""
    return ["enable_gqa=True"] * (call.operand_type("q").shape[1] != call.operand_type("k").shape[1])


def _mask(call: Call, mask: Any) -> str:
    """Emit one mask that combines the operand ``mask`` with the causal mask."""
    mask_code = "None" if mask is None else call.array("mask")
    if not call.causal:
        needs_cast = not mask.dtype.is_bool and mask.dtype is not call.type.dtype
        return f"{mask_code}.to({call.dtype()})" if needs_cast else mask_code
    n, m = (call.literal(call.operand_type(name).shape[2]) for name in ("q", "k"))
    return f"{call.helper(helpers.causal_mask)}({mask_code}, {n}, {m}, {call.array('q')})"
