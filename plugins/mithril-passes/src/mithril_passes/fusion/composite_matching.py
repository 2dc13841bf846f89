"""Composite matching: primitives that spell out softmax, gelu, norms or attention become that composite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mithril.graph import Graph, Size, Value
from mithril.ops import (
    add,
    attention,
    div,
    erf,
    exp,
    gelu,
    layer_norm,
    linear,
    log,
    log_softmax,
    logsumexp,
    matmul,
    max as max_,
    maximum,
    mean,
    mul,
    relu,
    rms_norm,
    rsqrt,
    sigmoid,
    silu,
    softmax,
    softplus,
    sqrt,
    square,
    sum as sum_,
    tanh,
    transpose,
    var,
)
from mithril.passes import PassContext, Rule, RuleSet, pass_, rule


# -- activations --------------------------------------------------------------------------------------------------
def _gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + erf(x * (1 / math.sqrt(2))))


def _gelu_divided(x: Any) -> Any:
    return 0.5 * x * (1.0 + erf(x / math.sqrt(2)))


def _gelu_late(x: Any) -> Any:
    return x * (0.5 * (1.0 + erf(x / math.sqrt(2))))


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3.0)))


def _gelu_cube(x: Any) -> Any:
    return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _like(x: Value) -> bool:
    return x.dtype.is_float


ACTIVATIONS = [
    *(rule(f, lambda x: gelu(x), exact=False, name="gelu") for f in (_gelu, _gelu_divided, _gelu_late)),
    *(
        rule(f, lambda x: gelu(x, approximate="tanh"), exact=False, name="gelu by tanh")
        for f in (_gelu_tanh, _gelu_cube)
    ),
    rule(lambda x: 1.0 / (1.0 + exp(-x)), lambda x: sigmoid(x), when=_like, exact=False, name="sigmoid"),
    rule(lambda x: x * sigmoid(x), lambda x: silu(x), exact=False, name="silu"),
    rule(lambda x: log(1.0 + exp(x)), lambda x: softplus(x), when=_like, exact=False, name="softplus"),
    rule(lambda x: maximum(x, 0.0), lambda x: relu(x), exact=True, name="relu"),
]


# -- softmax ------------------------------------------------------------------------------------------------------
def _one_axis(*values: Value, axis: Any, **_: Any) -> bool:
    return len(axis) == 1


def _exp_shifted(x: Any, axis: Any) -> Any:
    return exp(x - max_(x, axis=axis, keepdims=True))


def _softmax(x: Any, *, axis: Any = (-1,)) -> Any:
    e = _exp_shifted(x, axis)
    return e / sum_(e, axis=axis, keepdims=True)


def _softmax_plain(x: Any, *, axis: Any = (-1,)) -> Any:
    e = exp(x)
    return e / sum_(e, axis=axis, keepdims=True)


def _log_softmax(x: Any, *, axis: Any = (-1,)) -> Any:
    return x - logsumexp(x, axis=axis, keepdims=True)


def _log_softmax_shifted(x: Any, *, axis: Any = (-1,)) -> Any:
    z = x - max_(x, axis=axis, keepdims=True)
    return z - log(sum_(exp(z), axis=axis, keepdims=True))


SOFTMAX = [
    *(
        rule(f, lambda x, *, axis: softmax(x, axis=axis[0]), when=_one_axis, exact=False, name=name)
        for f, name in ((_softmax, "softmax"), (_softmax_plain, "softmax that overflows"))
    ),
    rule(
        lambda x, *, axis=-1: log(softmax(x, axis=axis)),
        lambda x, *, axis: log_softmax(x, axis=axis),
        exact=False,
        name="log of softmax",
    ),
    *(
        rule(f, lambda x, *, axis: log_softmax(x, axis=axis[0]), when=_one_axis, exact=False, name=name)
        for f, name in ((_log_softmax, "log-softmax by logsumexp"), (_log_softmax_shifted, "log-softmax"))
    ),
]


# -- norms --------------------------------------------------------------------------------------------------------
def _spans(x: Value, *parameters: Value, axes: Any, **_: Any) -> bool:
    """Whether the parameters have the shape of trailing axes that are normalized together."""
    rank = len(x.shape)
    trailing = tuple(axes) == tuple(range(rank - len(axes), rank))
    return trailing and all(tuple(p.shape) == tuple(x.shape[k] for k in axes) for p in parameters)


def _centered(x: Any, axes: Any) -> Any:
    return x - mean(x, axis=axes, keepdims=True)


def _normal_root(x: Any, axes: Any, eps: Any) -> Any:
    return _centered(x, axes) / sqrt(var(x, axis=axes, keepdims=True) + eps)


def _normal_square(x: Any, axes: Any, eps: Any) -> Any:
    c = _centered(x, axes)
    return c / sqrt(mean(square(c), axis=axes, keepdims=True) + eps)


def _normal_product(x: Any, axes: Any, eps: Any) -> Any:
    c = _centered(x, axes)
    return c * rsqrt(mean(c * c, axis=axes, keepdims=True) + eps)


def _normal_var(x: Any, axes: Any, eps: Any) -> Any:
    return _centered(x, axes) * rsqrt(var(x, axis=axes, keepdims=True) + eps)


def _norm_rules() -> list[Rule]:
    out = []
    for normal in (_normal_root, _normal_square, _normal_product, _normal_var):

        def whole(x: Any, w: Any, b: Any, *, axes: Any = (-1,), eps: Any = 1e-5, normal: Any = normal) -> Any:
            return normal(x, axes, eps) * w + b

        def plain(x: Any, *, axes: Any = (-1,), eps: Any = 1e-5, normal: Any = normal) -> Any:
            return normal(x, axes, eps)

        out += [_layer_norm_rule(whole, True), _layer_norm_rule(plain, False)]
    return out


def _layer_norm_rule(before: Any, scaled: bool) -> Rule:
    normal = before.__kwdefaults__["normal"]
    if scaled:
        return rule(
            lambda x, w, b, *, axes=(-1,), eps=1e-5: before(x, w, b, axes=axes, eps=eps, normal=normal),
            lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
            when=_spans,
            exact=False,
            name="layer norm",
        )
    return rule(
        lambda x, *, axes=(-1,), eps=1e-5: before(x, axes=axes, eps=eps, normal=normal),
        lambda x, *, axes, eps: layer_norm(x, axes=axes, eps=eps),
        when=_spans,
        exact=False,
        name="layer norm without parameters",
    )


def _is_vector(x: Value, w: Value, *, axes: Any, eps: Any) -> bool:
    return len(axes) == 1 and _spans(x, w, axes=axes)


NORMS = [
    *_norm_rules(),
    rule(
        lambda x, w, b, *, axes=(-1,), eps=1e-5: layer_norm(x, axes=axes, eps=eps) * w + b,
        lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
        when=_spans,
        exact=False,
        name="parameters of a layer norm",
    ),
    *(
        rule(
            f,
            lambda x, w, *, axes, eps: rms_norm(x, w, axis=axes[0], eps=eps),
            when=_is_vector,
            exact=False,
            name="RMS norm",
        )
        for f in (
            lambda x, w, *, axes=(-1,), eps=1e-6: x * rsqrt(mean(square(x), axis=axes, keepdims=True) + eps) * w,
            lambda x, w, *, axes=(-1,), eps=1e-6: x * rsqrt(mean(x * x, axis=axes, keepdims=True) + eps) * w,
            lambda x, w, *, axes=(-1,), eps=1e-6: x / sqrt(mean(square(x), axis=axes, keepdims=True) + eps) * w,
            lambda x, w, *, axes=(-1,), eps=1e-6: x / sqrt(mean(x * x, axis=axes, keepdims=True) + eps) * w,
        )
    ),
]


# -- products -----------------------------------------------------------------------------------------------------
def _is_weight(x: Value, w: Value, b: Value, *, perm: Any) -> bool:
    return tuple(perm) == (1, 0) and len(b.shape) == 1


def _is_bias(x: Value, w: Value, b: Value) -> bool:
    return len(b.shape) == 1


def _same(a: Size, b: Size) -> bool:
    return a is b or a == b


def _is_attention(q: Value, k: Value, v: Value, *rest: Any, perm: Any, axis: Any = 3, **_: Any) -> bool:
    four = all(len(x.shape) == 4 for x in (q, k, v))
    return four and tuple(perm) == (0, 1, 3, 2) and axis == 3 and _same(q.shape[1], k.shape[1])


PRODUCTS = [
    rule(
        lambda x, w, b, *, perm=(1, 0): matmul(x, transpose(w, perm=perm)) + b,
        lambda x, w, b: linear(x, w, b),
        when=_is_weight,
        exact=False,
        name="linear",
    ),
    rule(
        lambda x, w, b: add(linear(x, w, None), b),
        lambda x, w, b: linear(x, w, b),
        when=_is_bias,
        exact=False,
        name="bias of a linear",
    ),
    *(
        rule(f, after, when=_is_attention, exact=False, name="attention")
        for f, after in (
            (
                lambda q, k, v, *, perm=(0, 1, 3, 2), scale=0.5, axis=-1: matmul(
                    softmax(mul(matmul(q, transpose(k, perm=perm)), scale), axis=axis), v
                ),
                lambda q, k, v, *, scale: attention(q, k, v, scale=scale),
            ),
            (
                lambda q, k, v, *, perm=(0, 1, 3, 2), scale=2.0, axis=-1: matmul(
                    softmax(div(matmul(q, transpose(k, perm=perm)), scale), axis=axis), v
                ),
                lambda q, k, v, *, scale: attention(q, k, v, scale=1.0 / scale),
            ),
            (
                lambda q, k, v, m, *, perm=(0, 1, 3, 2), scale=0.5, axis=-1: matmul(
                    softmax(mul(matmul(q, transpose(k, perm=perm)), scale) + m, axis=axis), v
                ),
                lambda q, k, v, m, *, scale: attention(q, k, v, m, scale=scale),
            ),
            (
                lambda q, k, v, m, *, perm=(0, 1, 3, 2), scale=2.0, axis=-1: matmul(
                    softmax(div(matmul(q, transpose(k, perm=perm)), scale) + m, axis=axis), v
                ),
                lambda q, k, v, m, *, scale: attention(q, k, v, m, scale=1.0 / scale),
            ),
        )
    ),
]

RULES = RuleSet("operator-fusion", [*ACTIVATIONS, *SOFTMAX, *NORMS, *PRODUCTS])


# -- where rules are applied ----------------------------------------------------------------------------------------
# A composite is more stable than its primitives: they differ at infinities and where primitives overflow, often only in
# the gradient. Level high uses the composite; lower levels keep the results of the primitives. At a kink the gradient
# of some composites is another number; before gradients, no level uses these.
EQUAL_GRADIENTS = ("linear", "bias of a linear", "softmax", "log-softmax", "attention")
OTHER_KINKS = ("relu",)
EQUAL_VALUES = (
    *EQUAL_GRADIENTS,
    *OTHER_KINKS,
    *("gelu", "gelu by tanh", "sigmoid", "silu"),
    *("layer norm", "layer norm without parameters", "parameters of a layer norm", "RMS norm"),
)
ANY_WIDTH = ("linear", "bias of a linear", "relu", "gelu", "gelu by tanh", "sigmoid", "silu")


def _has_no_16_bit_operand(*values: Value, **_: Any) -> bool:
    """Whether no operand has 16 bits: there the primitives overflow, while the composite computes in float32."""
    return all(v.dtype.bits >= 32 for v in values)


def _faithful(names: Iterable[str]) -> RuleSet:
    """Return the named rules, restricted to dtypes for which both sides agree for all numbers."""
    rules = [r if r.name in ANY_WIDTH else r.restricted(_has_no_16_bit_operand) for r in RULES.rules if r.name in names]
    return RuleSet(RULES.name, rules)


BEFORE_GRADIENTS, FAITHFUL = _faithful(EQUAL_GRADIENTS), _faithful(EQUAL_VALUES)
STABLE = RuleSet(RULES.name, [r for r in RULES.rules if r.name not in OTHER_KINKS])


@pass_(name="operator-fusion", exact=False, rules=RULES)
def operator_fusion(graph: Graph, context: PassContext) -> Graph:
    """Replace primitives that spell out a composite, as far as the level allows."""
    if context.level == "high":
        rules = STABLE if context.gradients_follow else RULES
    else:
        rules = BEFORE_GRADIENTS if context.gradients_follow else FAITHFUL
    return rules(graph)


__all__ = ["RULES", "operator_fusion"]
