"""Operations of layers: linear, embedding, dropout, pixel shuffle."""

from __future__ import annotations

from typing import Any

from mithril.graph import Op, OperationError, ShapeError, composite, exactly, ints, product, sample, unknown
from mithril.ops import activations
from mithril.ops.basic import dtype_of
from mithril.ops.creation import full
from mithril.ops.elementwise import greater_equal, tanh, where
from mithril.ops.indexing import scatter_add, take
from mithril.ops.products import matmul
from mithril.ops.random import KEY, uniform
from mithril.ops.reduction import sum
from mithril.ops.shape import reshape, transpose

# The activations of ``linear``: all that declare a gradient, identity, and the approximate gelu.
ACTIVATIONS: dict[str, Any] = {
    "none": lambda x: x,
    **{
        op.activation: op
        for op in (*vars(activations).values(), tanh)
        if isinstance(op, Op) and op.activation and op.gradient
    },
    "gelu_tanh": lambda x: activations.gelu(x, approximate="tanh"),
}
# All activations, by the names that operations, layers and configurations of checkpoints share.
ANY_ACTIVATION: dict[str, Any] = {
    **ACTIVATIONS,
    **{op.activation: op for op in vars(activations).values() if isinstance(op, Op) and op.activation},
    "quick_gelu": lambda x: x * activations.sigmoid(x * 1.702),
}


def _linear_flops(types: Any, results: Any, attributes: Any) -> Any:
    has_bias = len(types) > 2 and types[2] is not None
    return product(results[0].shape) * (types[0].shape[-1] * 2 + has_bias)


@composite(
    promotes="same",
    flops=_linear_flops,
    tolerance=2.0,
    samples=[
        sample((3, 4), (5, 4), (5,)),
        sample((2, 3, 4), (5, 4), None, label="no bias"),
        sample((3, 4), (5, 4), (5,), activation="gelu", label="gelu"),
        sample((4,), (2, 4), (2,), activation="tanh", label="vector"),
        sample((2, 3, 4), (5, 4), (5,), activation="relu", label="relu", gradient=False),
        sample((3, 4), (5, 4), (5,), activation="mish", label="mish"),
    ],
    precision="low",
)
def linear(x, w, b=None, *, activation: str = "none"):
    """activation(x @ w.T + b), with w [out, in]."""
    if len(w.shape) != 2:
        raise ShapeError(f"the weight of linear has rank {len(w.shape)}, expected [out, in]")
    if activation not in ACTIVATIONS:
        message, facts, hint = unknown("activation of linear", activation, list(ACTIVATIONS))
        raise OperationError(message, facts=facts, hint=hint)
    if activation != "none":  # backends have kernels of products with a bias, but of few activations
        return ACTIVATIONS[activation](linear(x, w, b))
    y = matmul(x, transpose(w, perm=(1, 0)))
    return y if b is None else y + b


@linear.vjp
def _(g, y, x, w, b, *, activation):
    """Use one product over all rows for the weight; recompute only activations whose derivative needs their input."""
    g = _activation_gradient(activation, g, y, x, w, b)
    rows = product(x.shape[:-1])
    flat, cotangent = reshape(x, shape=(rows, x.shape[-1])), reshape(g, shape=(rows, w.shape[0]))
    gx = reshape(matmul(cotangent, w), shape=x.shape)
    gw = matmul(transpose(cotangent, perm=(1, 0)), flat)
    return gx, gw, None if b is None else sum(cotangent, axis=0)


def _activation_gradient(activation: str, g: Any, y: Any, x: Any, w: Any, b: Any) -> Any:
    if activation == "none":
        return g
    if activation == "relu":
        return where(greater_equal(0.0, y), 0.0, g)
    if activation == "sigmoid":
        return g * y * (1.0 - y)
    if activation == "tanh":
        return g * (1.0 - y * y)
    inner = linear(x, w, b)
    if activation == "gelu_tanh":
        return activations.gelu.gradient(g, y, inner, approximate="tanh")[0]
    op = ACTIVATIONS[activation]
    return op.gradient(g, y, inner, **op.defaults)[0]


@composite(
    samples=[sample(ints((2, 3), 0, 4), (5, 4)), sample(exactly(1, 4, 4, dtype="int32"), (5, 2), label="repeated")],
    labels="indices",
)
def embedding(indices, table):
    """Rows of a table [entries, size], selected by integer index."""
    if not (dtype_of(indices).is_integer):
        from mithril.graph import DTypeError

        raise DTypeError(
            f"embedding requires integers, got {dtype_of(indices)}", hint="cast them: cast(indices, dtype='int32')"
        )
    if len(table.shape) != 2:
        raise ShapeError(f"the table of embedding has rank {len(table.shape)}, expected [entries, size]")
    return take(table, indices, axis=0)


@embedding.vjp
def _(g, y, indices, table):
    rows = product(indices.shape)
    flat = reshape(g, shape=(rows, table.shape[1]))
    none = full(shape=table.shape, value=0.0, dtype=table.dtype)
    return None, scatter_add(none, reshape(indices, shape=(rows,)), flat, axis=0)


@composite(
    samples=[
        sample((4, 5), KEY, p=0.5, dtypes=False),
        sample((4, 5), KEY, p=0.0, label="none", dtypes=False),
        sample((4, 5), KEY, p=1.0, label="all", dtypes=False),
    ],
    precision="follow",
)
def dropout(x, key, *, p: float):
    """x / (1 - p), with elements set to 0 with probability p; the mask for a key is the same on all backends."""
    return _dropped(x, x, key, p)


def _dropped(x: Any, like: Any, key: Any, p: float) -> Any:
    if not 0.0 <= p <= 1.0:
        raise OperationError(f"dropout p={p} is not a probability", facts=["accepted: 0 to 1"])
    if p == 0.0:
        return x * 1.0
    if p == 1.0:
        return x * 0.0
    mask = greater_equal(uniform(key, shape=tuple(like.shape)), p)
    return where(mask, x * (1.0 / (1.0 - p)), 0.0)


@dropout.vjp
def _(g, y, x, key, *, p):
    return _dropped(g, x, key, p), None


@composite(samples=[sample((1, 8, 2, 3), factor=2)])
def pixel_shuffle(x, *, factor: int):
    """Rearrangement of channels to pixels: [N, C * f * f, H, W] to [N, C, H * f, W * f]."""
    n, c, h, w = x.shape
    y = reshape(x, shape=(n, c // (factor * factor), factor, factor, h, w))
    return reshape(transpose(y, perm=(0, 1, 4, 2, 5, 3)), shape=(n, c // (factor * factor), h * factor, w * factor))
