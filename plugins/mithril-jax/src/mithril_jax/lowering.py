"""The lowering table of the JAX backend."""

from __future__ import annotations

import math
from typing import Any

import jax

from mithril import ops
from mithril.backend import (
    NUMPY_NAMES,
    PREDICATES,
    UNARY,
    Call,
    FourierCalls,
    Lowerings,
    axes_text,
    bounds,
    functions,
    indexing,
    integer_cast,
    is_half,
    is_integer,
    operators,
    reduction_identity,
    reductions,
    shared_helpers,
    sliced,
)
from mithril.graph import Node, Value, bfloat16, numel, operation_names
from mithril_jax import blocked_attention, helpers, linear_algebra

table = Lowerings(
    "jax",
    ["import jax", "import jax.numpy as jnp", "from jax import lax"],
    dtype="jnp.{name}",
    scalar="jnp.{name}({value})",
    constant="jnp.asarray({array}, {dtype})",
    reserved={**vars(helpers), **vars(blocked_attention)},
    dialect=helpers.dialect,
    host=helpers.on_host,
)

# -- element-wise -------------------------------------------------------------------------------------------------
operators(table)
_PAIRS = operation_names(
    "maximum", "minimum", "pow", "floordiv", "mod", "atan2", "logical_and", "logical_or", "logical_xor"
)
functions(table, "jnp", (*UNARY, *PREDICATES, "log2", *_PAIRS, "trunc"), NUMPY_NAMES)
table.row("sign", "jnp.where({x} == 0, jnp.zeros_like({x}), jnp.sign({x}))")  # +0 for both zeros
table.rows(
    {
        "neg": "-{x}",
        "erf": "lax.erf({x})",
        "erfinv": "lax.erf_inv({x})",
        "rsqrt": "lax.rsqrt({x})",
        "where": "jnp.where({condition}, {a}, {b})",
    }
)


table.rows(dict.fromkeys(operation_names("floor", "ceil", "round", "trunc"), "{x}"), when=is_integer)
shared_helpers(table)


@table.function("attention", when=lambda node: bool(node.tags.get("cached")))
def _cached_attention(call: Call) -> str:
    scale = call.scale if call.scale is not None else float(call.operand_type("q").shape[3]) ** -0.5
    arrays = ", ".join(call.array(name) for name in ("q", "k", "v", "mask"))
    return f"{call.helper(helpers.cached_attention)}({arrays}, {call.literal(scale)})"


table.helpers(helpers.expert_matmul, helpers.expert_weight_grad)
table.helpers(helpers.sparse_matmul, helpers.sparse_matmul_transposed)
table.helper(helpers.floordiv_float, op="floordiv")
table.helper(helpers.mod_float, op="mod")
if jax.__version_info__ < (0, 10):  # whose XLA returns less than 1 for erf of infinity in a fusion
    table.helper(helpers.saturated_erf, op="erf")


@table.function("clip")
def _clip(call: Call) -> str:
    (low, high), text = bounds(call), str(call.x)
    text = text if low is None else f"jnp.maximum({text}, {low})"
    return text if high is None else f"jnp.minimum({text}, {high})"


@table.function("cast")
def _cast(call: Call) -> str:
    if call.type.dtype.is_bool:
        return f"{call.x} != 0"
    if call.type.dtype.is_integer:
        return integer_cast(call, f"jnp.asarray({call.x}).astype({call.dtype()})")
    return f"jnp.asarray({call.x}).astype({call.dtype()})"


@table.function("bitcast")
def _bitcast(call: Call) -> str:
    return f"lax.bitcast_convert_type({call.array('x')}, {call.dtype()})"


# -- reductions ---------------------------------------------------------------------------------------------------
@table.function("sum", "prod")
def _sum(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    name = call.node.op.name
    if is_half(call.node):
        return f"jnp.{name}({call.x}, axis={axes_text(call)}, dtype=jnp.float32{keepdims}).astype({call.dtype()})"
    return f"jnp.{name}({call.x}, axis={axes_text(call)}, dtype={call.dtype()}{keepdims})"


@table.function("mean")
def _mean(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    if is_half(call.node):
        return f"jnp.mean({call.x}, axis={axes_text(call)}, dtype=jnp.float32{keepdims}).astype({call.dtype()})"
    return f"jnp.mean({call.x}, axis={axes_text(call)}{keepdims})"


@table.function("max", "min")
def _extreme(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    name = call.node.op.name
    start = reduction_identity(call, "-jnp.inf", "jnp.inf")
    # The maximum of uint64 exceeds the range of weakly typed Python integers.
    if call.type.dtype.name == "uint64":
        start = f"{call.dtype()}({start})"
    return f"jnp.{name}({call.x}, axis={axes_text(call)}{keepdims}, initial={start})"


@table.function("any", "all")
def _logic(call: Call) -> str:
    keepdims = ", keepdims=True" if call.keepdims else ""
    return f"jnp.{call.node.op.name}({call.x}, axis={axes_text(call)}{keepdims})"


table.rows(
    {
        "argmax": "jnp.argmax({x}, axis={axis}, keepdims={keepdims}).astype(jnp.int32)",
        "argmin": "jnp.argmin({x}, axis={axis}, keepdims={keepdims}).astype(jnp.int32)",
    }
)


@table.function("cumsum", "cumprod")
def _running(call: Call) -> str:
    start = 0 if call.node.op is ops.cumsum else 1
    flags = f"{call.axis}, {call.reverse}, {call.exclusive}"
    return f"{call.helper(reductions.running)}({call.x}, jnp.{call.node.op.name}, {start}, {flags})"


# -- products -----------------------------------------------------------------------------------------------------
@table.function("matmul")
def _matmul(call: Call) -> str:
    if is_half(call.node):
        return f"jnp.matmul({call.a}, {call.b}, preferred_element_type=jnp.float32).astype({call.dtype()})"
    return f"jnp.matmul({call.a}, {call.b})"


LARGE_WEIGHT = 512 * 512  # elements; for smaller ones a second row costs more than float32


def _is_large_row(x: Value | None, w: Value | None) -> bool:
    """Whether one row is multiplied by the rows of a large bfloat16 matrix."""
    assert x is not None
    assert w is not None
    size = numel(w.shape)
    is_row = w.ndim == 2 and all(n == 1 for n in x.shape[:-1])
    return is_row and w.dtype is bfloat16 and isinstance(size, int) and size >= LARGE_WEIGHT


def _multiplies_large_vector(node: Node) -> bool:
    matrix, x = node.operands
    assert x is not None
    return x.ndim == 1 and _is_large_row(x, matrix)


@table.function("matmul", when=_multiplies_large_vector)
def _matrix_and_vector(call: Call) -> str:
    return f"{call.helper(helpers.product_of_row)}({call.b}, {call.a})"


def _contracts_large_row(node: Node) -> bool:
    x, w = node.operands
    assert x is not None
    contracted = (tuple(node.attributes["contract_a"]), tuple(node.attributes["contract_b"]))
    return contracted == ((x.ndim - 1,), (1,)) and _is_large_row(x, w)


@table.function("dot", when=_contracts_large_row)
def _dot_of_row(call: Call) -> str:
    return f"{call.helper(helpers.product_of_row)}({call.a}, {call.b})"


@table.function("dot")
def _dot(call: Call) -> str:
    contract = f"({call.literal(call.contract_a)}, {call.literal(call.contract_b)})"
    batch = f"({call.literal(call.batch_a)}, {call.literal(call.batch_b)})"
    accumulator = ", preferred_element_type=jnp.float32" if is_half(call.node) else ""
    text = f"lax.dot_general({call.a}, {call.b}, ({contract}, {batch}){accumulator})"
    return f"{text}.astype({call.dtype()})" if accumulator else text


for _lower in linear_algebra.FUNCTIONS:
    table.function(_lower.__name__)(_lower)

for _name, _transform in FourierCalls(module="jnp.fft", complex_array="lax.complex({re}, {im})").functions():
    table.function(_name)(_transform)


# -- shapes -------------------------------------------------------------------------------------------------------
table.rows(
    {
        "reshape": "jnp.reshape({x}, {shape})",
        "transpose": "jnp.transpose({x}, {perm})",
        "broadcast_to": "jnp.broadcast_to({x}, {shape})",
        "flip": "jnp.flip({x}, {axis})",
        "concat": "jnp.concatenate([{xs}], axis={axis})",
        "full": "jnp.full({shape}, {value}, {dtype})",
        "tril": "jnp.tril({x}, {k})",
        "triu": "jnp.triu({x}, {k})",
        "size_value": "jnp.asarray({value}, {dtype})",
        "stop_gradient": "lax.stop_gradient({x})",  # for gradients of JAX; those of the graph end here themselves
    }
)


@table.function("barrier")
def _barrier(call: Call) -> str:
    operands = ", ".join(str(x) for x in call.operands)
    return f"lax.optimization_barrier(({operands},))" + ("[0]" if len(call.results) == 1 else "")


@table.function("iota")
def _iota(call: Call) -> str:
    if call.type.dtype.is_bool:
        return f"lax.broadcasted_iota(jnp.int32, {call.shape()}, {call.axis}) != 0"
    return f"lax.broadcasted_iota({call.dtype()}, {call.shape()}, {call.axis})"


@table.function("pad")
def _pad(call: Call) -> str:
    if call.mode == "constant":
        return f"jnp.pad({call.x}, {call.literal(call.widths)}, constant_values={call.literal(call.value)})"
    return f"{call.helper(indexing.pad_inside)}({call.x}, {call.literal(call.widths)}, {call.mode!r})"


@table.function("slice")
def _slice(call: Call) -> str:
    return sliced(call)


@table.function("argsort", "sort")
def _sort(call: Call) -> str:
    order = f"{call.helper(indexing.argsort)}({call.x}, {call.axis}, {call.descending})"
    if call.node.op is ops.argsort:
        return f"{order}.astype(jnp.int32)"
    return f"jnp.take_along_axis({call.x}, {order}, {call.axis})"


# -- windows ------------------------------------------------------------------------------------------------------
table.helpers(
    helpers.conv,
    helpers.conv_input_grad,
    helpers.conv_weight_grad,
)


def is_wide(node: Node) -> bool:
    """Whether windows have many elements: one slice per element would be slow to compile."""
    return math.prod(node.attributes["kernel"]) > 64


table.helper(helpers.max_pool_positions_reduce_window, op="max_pool_positions", when=is_wide)
table.helper(helpers.max_pool_grad, op="max_pool_grad", when=lambda node: not is_wide(node))


def kernel_exceeds_image(node: Node) -> bool:
    """Whether the kernel exceeds the image, where XLA's convolutions on a CPU are up to 300x slower."""
    shape = node.attributes.get("shape", ())
    image = shape if node.op is ops.conv_input_grad else _shape_of(node, 0)
    kernel = shape if node.op is ops.conv_weight_grad else _shape_of(node, 1)
    pairs = zip(image[2:], kernel[2:], strict=True)
    return any(isinstance(n, int) and isinstance(k, int) and k > n for n, k in pairs)


def _shape_of(node: Node, k: int) -> tuple[Any, ...]:
    operand = node.operands[k]
    assert operand is not None
    return tuple(operand.shape)


def _is_miscompiled(node: Node) -> bool:
    """Whether XLA would end the process, or read outside of its arrays, in a gradient with respect to an image.

    Exchanging image and kernel, it takes windows of 2 by steps of 2 without padding for groups. And where the
    convolution's padding exceeds the kernel, the gradient's is negative, which its CPU kernels do not support.
    """
    attributes, kernel = node.attributes, _shape_of(node, 1)[2:]
    windows = zip(kernel, attributes["stride"], attributes["dilation"], attributes["padding"], strict=True)
    return any(
        (k == 2 and step == 2 and d == 1 and padding[0] == 1) or max(padding) > d * (k - 1)
        for k, step, d, padding in windows
        if isinstance(k, int)
    )


def _needs_im2col(node: Node) -> bool:
    return kernel_exceeds_image(node) or _is_miscompiled(node)


table.helper(helpers.conv_im2col, op="conv", when=kernel_exceeds_image)
table.helper(helpers.conv_input_grad_im2col, op="conv_input_grad", when=_needs_im2col)
table.helper(helpers.conv_weight_grad_im2col, op="conv_weight_grad", when=kernel_exceeds_image)


# -- control flow -------------------------------------------------------------------------------------------------
def _assigned(names: list[str]) -> str:
    return f"({', '.join(names)},)"


@table.function("if")
def _if(call: Call) -> None:
    then, other = call.region(0), call.region(1)
    captures = "".join(f", {o}" for o in call.operands[1:])
    call.line(f"{_assigned(call.results)} = lax.cond({call.operands[0]}, {then}, {other}{captures})")


@table.function("while")
def _while(call: Call) -> None:
    test, step, state = call.region(0), call.region(1), call.temp("state")
    rest = "".join(f", {o}" for o in call.operands[call.states :])
    states = ", ".join(f"jnp.asarray({o})" for o in call.operands[: call.states])
    if call.max_trips is None:
        call.line(
            f"{_assigned(call.results)} = lax.while_loop("
            f"lambda {state}: {test}(*{state}{rest})[0], lambda {state}: {step}(*{state}{rest}), ({states},))"
        )
        return
    n = call.states
    call.line(
        f"{_assigned([*call.results, call.temp('trips')])} = lax.while_loop("
        f"lambda {state}: ({state}[{n}] < {call.max_trips}) & {test}(*{state}[:{n}]{rest})[0], "
        f"lambda {state}: (*{step}(*{state}[:{n}]{rest}), {state}[{n}] + 1), ({states}{', ' if n else ''}0))"
    )


def with_differentiable_loops(base: Lowerings) -> Lowerings:
    """Extend the table by bounded loops as scans whose steps do nothing once the condition is false."""
    extended = base.extend()
    extended.function("while")(_unbounded_while)
    extended.function("while", when=lambda node: node.attributes["max_trips"] is not None)(_bounded_while)
    return extended


def _unbounded_while(call: Call) -> None:
    _while(call)
    mark = call.imported("mithril_jax.unbounded_loops:without_gradient", "without_gradient")
    call.line(f"{_assigned(call.results)} = {mark}({', '.join(call.results)})")


def _bounded_while(call: Call) -> None:
    test, step, state = call.region(0), call.region(1), call.temp("state")
    rest = "".join(f", {o}" for o in call.operands[call.states :])
    states = ", ".join(f"jnp.asarray({o})" for o in call.operands[: call.states])
    call.line(
        f"{_assigned(call.results)} = lax.scan(lambda {state}, _: (lax.cond({test}(*{state}{rest})[0], "
        f"lambda *{state}: {step}(*{state}{rest}), lambda *{state}: {state}, *{state}), None), "
        f"({states},), None, length={call.max_trips})[0]"
    )


def _scan(call: Call, unroll: int = 1) -> None:
    body, n, m = call.region(0), call.carries, call.sequences
    carry, element, step = call.temp("carry"), call.temp("element"), call.temp("step")
    rest = "".join(f", {o}" for o in call.operands[n + m :])
    start = ", ".join(f"jnp.asarray({o})" for o in call.operands[:n])
    xs = ", ".join(str(o) for o in call.operands[n : n + m])
    call.line(f"def {step}({carry}, {element}):")
    call.line(f"    {step}_results = {body}(*{carry}, *{element}{rest})")
    call.line(f"    return {step}_results[:{n}], {step}_results[{n}:]")
    carries, stacked = call.results[:n], call.results[n:]
    left = f"({', '.join(carries)}{',' if carries else ''})"
    right = f"({', '.join(stacked)}{',' if stacked else ''})"
    arguments = f"{step}, ({start}{',' if start else ''}), ({xs}{',' if xs else ''})"
    options = f"length={call.literal(call.length)}, reverse={call.reverse}"
    if unroll != 1:
        options += f", unroll={unroll}"
    call.line(f"{left}, {right} = lax.scan({arguments}, {options})")


table.function("scan")(_scan)


def with_rows_by_device(base: Lowerings) -> Lowerings:
    """Extend the table by products of experts for meshes that divide batches: a sort of all rows would gather them."""
    extended = base.extend()
    extended.helper(helpers.expert_matmul_by_device, op="expert_matmul")
    extended.helper(helpers.expert_weight_grad_by_device, op="expert_weight_grad")
    return extended


# Elements of the scores of a head from which attention runs in blocks: 0.81 of the time at 512 positions on a CPU, 0.35
# at 2048 (benchmarks/bench_long_attention.py).
LONG = 512 * 512


def _is_long(node: Node) -> bool:
    """Whether attention runs in blocks: its scores need much memory, and each query sees a key."""
    q, k, mask = (node.operands[node.op.operands.index(name)] for name in ("q", "k", "mask"))
    assert q is not None
    assert k is not None
    queries, keys = q.shape[2], k.shape[2]
    if node.tags.get("cached"):  # reads the part of a cache that is visible
        return False
    if not (isinstance(queries, int) and isinstance(keys, int)) or queries * keys < LONG:
        return False
    return (mask is None or mask.dtype.is_bool) and (queries <= keys or not node.attributes["causal"])


def _blocked_attention(call: Call) -> str:
    function = getattr(blocked_attention, f"blocked_{call.node.op.name}")
    scale = call.scale if call.scale is not None else float(call.operand_type("q").shape[3]) ** -0.5
    arrays = ", ".join(call.array(name) if call.operands[k] else "None" for k, name in enumerate(call.node.op.operands))
    return f"{call.helper(function)}({arrays}, {call.causal}, {call.literal(scale)})"


def with_blocked_attention(base: Lowerings) -> Lowerings:
    """Return the table with attention of long sequences in blocks."""
    extended = base.extend()
    extended.function("attention", "attention_grad", when=_is_long)(_blocked_attention)
    return extended


def _is_ring(node: Node, parts: int) -> bool:
    """Whether keys pass around a ring: without a mask, for as many queries as keys that the devices can divide."""
    q, k, mask = (node.operands[node.op.operands.index(name)] for name in ("q", "k", "mask"))
    assert q is not None
    assert k is not None
    return mask is None and isinstance(q.shape[2], int) and q.shape[2] == k.shape[2] and q.shape[2] % parts == 0


def _ring_attention(call: Call) -> str:
    function = getattr(blocked_attention, f"ring_{call.node.op.name}")
    scale = call.scale if call.scale is not None else float(call.operand_type("q").shape[3]) ** -0.5
    arrays = ", ".join(call.array(name) for name in call.node.op.operands[:-1])
    return f"{call.helper(function)}({arrays}, {call.causal}, {call.literal(scale)})"


def with_ring_attention(base: Lowerings, parts: int) -> Lowerings:
    """Return the table with attention whose positions are split into parts."""
    extended = base.extend()
    extended.function("attention", "attention_grad", when=lambda node: _is_ring(node, parts))(_ring_attention)
    return extended


def with_unroll(base: Lowerings, steps: int) -> Lowerings:
    """Extend the table by a scan that is unrolled ``steps`` times."""
    extended = base.extend()
    extended.function("scan")(lambda call: _scan(call, steps))
    return extended
