"""Composite matching: primitives that spell out softmax, gelu, norms or attention become that composite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mithril.graph import Graph, Value, is_static
from mithril.ops import (
    add,
    cast,
    dot,
    erf,
    erfc,
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
    neg,
    reciprocal,
    relu,
    rms_norm,
    rsqrt,
    sigmoid,
    silu,
    softmax,
    softplus,
    sqrt,
    square,
    stop_gradient,
    sum as sum_,
    tanh,
    transpose,
    var,
)
from mithril.passes import PassContext, Rule, RuleSet, pass_, rule
from mithril_passes.fusion.attention_forms import ATTENTION, transposed

# -- activations --------------------------------------------------------------------------------------------------
ROOT = math.sqrt(2 / math.pi)
HALVES: tuple[Callable[[Any, Any], Any], ...] = (  # half the product, as it is associated
    lambda x, s: 0.5 * x * s,
    lambda x, s: x * (0.5 * s),
    lambda x, s: 0.5 * (x * s),
)
ERFS: tuple[Callable[[Any], Any], ...] = (
    lambda x: 1.0 + erf(x * (1 / math.sqrt(2))),
    lambda x: 1.0 + erf(x / math.sqrt(2)),
    lambda x: erfc(neg(x) * (1 / math.sqrt(2))),  # as JAX writes it
    lambda x: erfc(neg(x) / math.sqrt(2)),
    lambda x: erfc(x * (-1 / math.sqrt(2))),
)
TANHS: tuple[Callable[[Any], Any], ...] = (
    lambda x: 1.0 + tanh(ROOT * (x + 0.044715 * x**3.0)),
    lambda x: 1.0 + tanh(ROOT * (x + 0.044715 * (x * x * x))),
    lambda x: 1.0 + tanh(ROOT * (x + 0.044715 * (square(x) * x))),
)


def _gelu_rules(sums: Sequence[Callable[[Any], Any]], name: str, approximate: str) -> list[Rule]:
    def of(half: Callable[[Any, Any], Any], total: Callable[[Any], Any]) -> Rule:
        after = functools.partial(gelu, approximate=approximate)
        return rule(lambda x: half(x, total(x)), lambda x: after(x), exact=False, name=name)

    return [of(half, total) for total in sums for half in HALVES]


def _like(x: Value) -> bool:
    return x.dtype.is_float


ACTIVATIONS = [
    *_gelu_rules(ERFS, "gelu", "none"),
    *_gelu_rules(TANHS, "gelu by tanh", "tanh"),
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


def _softmax_stopped(x: Any, *, axis: Any = (-1,)) -> Any:
    e = exp(x - stop_gradient(max_(x, axis=axis, keepdims=True)))
    return e / sum_(e, axis=axis, keepdims=True)


def _softmax_plain(x: Any, *, axis: Any = (-1,)) -> Any:
    e = exp(x)
    return e / sum_(e, axis=axis, keepdims=True)


def _log_softmax(x: Any, *, axis: Any = (-1,)) -> Any:
    return x - logsumexp(x, axis=axis, keepdims=True)


def _log_softmax_shifted(x: Any, *, axis: Any = (-1,)) -> Any:
    z = x - max_(x, axis=axis, keepdims=True)
    return z - log(sum_(exp(z), axis=axis, keepdims=True))


def _log_softmax_stopped(x: Any, *, axis: Any = (-1,)) -> Any:
    z = x - stop_gradient(max_(x, axis=axis, keepdims=True))
    return z - log(sum_(exp(z), axis=axis, keepdims=True))


SOFTMAX = [
    *(
        rule(f, lambda x, *, axis: softmax(x, axis=axis[0]), when=_one_axis, exact=False, name=name)
        for f, name in (
            (_softmax, "softmax"),
            (_softmax_stopped, "softmax"),
            (_softmax_plain, "softmax that overflows"),
        )
    ),
    rule(
        lambda x, *, axis=-1: log(softmax(x, axis=axis)),
        lambda x, *, axis: log_softmax(x, axis=axis),
        exact=False,
        name="log of softmax",
    ),
    *(
        rule(f, lambda x, *, axis: log_softmax(x, axis=axis[0]), when=_one_axis, exact=False, name=name)
        for f, name in (
            (_log_softmax, "log-softmax by logsumexp"),
            (_log_softmax_shifted, "log-softmax"),
            (_log_softmax_stopped, "log-softmax"),
        )
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


VARIANCES: tuple[Callable[[Any, Any, Any], Any], ...] = (  # of x, and of c, which is x without its mean
    lambda x, c, axes: var(x, axis=axes, keepdims=True),
    lambda x, c, axes: mean(square(c), axis=axes, keepdims=True),
    lambda x, c, axes: mean(c * c, axis=axes, keepdims=True),
)
Quotient = Callable[[Any, Any], Any]
QUOTIENTS: tuple[Quotient, ...] = (lambda x, v: x / sqrt(v), lambda x, v: x * rsqrt(v))


def _spread_rule(variance: Callable[[Any, Any, Any], Any]) -> Rule:
    """Return the rule for a layer norm as TensorFlow writes it, by its functions for batch norm."""

    def before(x: Any, w: Any, b: Any, *, axes: Any = (-1,), eps: Any = 1e-5) -> Any:
        m = mean(x, axis=axes, keepdims=True)
        factor = rsqrt(variance(x, x - m, axes) + eps) * w
        return x * factor + (b - m * factor)

    return rule(
        before,
        lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
        when=_spans,
        exact=False,
        name="layer norm",
    )


def _layer_norm_rules(variance: Callable[[Any, Any, Any], Any], quotient: Quotient) -> list[Rule]:
    def normal(x: Any, axes: Any, eps: Any) -> Any:
        c = _centered(x, axes)
        return quotient(c, variance(x, c, axes) + eps)

    return [
        rule(
            lambda x, w, b, *, axes=(-1,), eps=1e-5: normal(x, axes, eps) * w + b,
            lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
            when=_spans,
            exact=False,
            name="layer norm",
        ),
        rule(
            lambda x, *, axes=(-1,), eps=1e-5: normal(x, axes, eps),
            lambda x, *, axes, eps: layer_norm(x, axes=axes, eps=eps),
            when=_spans,
            exact=False,
            name="layer norm without parameters",
        ),
    ]


def _rms_norm_rules(quotient: Quotient) -> list[Rule]:
    def root(x: Any, axes: Any, eps: Any) -> Any:
        return mean(square(x), axis=axes, keepdims=True) + eps

    return [
        rule(
            lambda x, *, axis=(-1,), eps=1e-6: quotient(x, root(x, axis, eps)),
            lambda x, *, axis, eps: rms_norm(x, axis=axis[0], eps=eps),
            when=_one_axis,
            exact=False,
            name="RMS norm",
        ),
        rule(
            lambda x, w, *, axes=(-1,), eps=1e-6: quotient(w, root(x, axes, eps)) * x,
            lambda x, w, *, axes, eps: rms_norm(x, w, axis=axes[0], eps=eps),
            when=_is_vector,
            exact=False,
            name="RMS norm by scaled parameters",
        ),
    ]


def _is_vector(x: Value, w: Value, *, axes: Any, eps: Any) -> bool:
    return len(w.shape) == 1 and tuple(axes) == (len(x.shape) - 1,)


NORMS = [
    *(_spread_rule(variance) for variance in VARIANCES[1:]),
    *(r for variance in VARIANCES for quotient in QUOTIENTS for r in _layer_norm_rules(variance, quotient)),
    rule(
        lambda x, w, b, *, axes=(-1,), eps=1e-5: layer_norm(x, axes=axes, eps=eps) * w + b,
        lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
        when=_spans,
        exact=False,
        name="parameters of a layer norm",
    ),
    *(r for quotient in QUOTIENTS for r in _rms_norm_rules(quotient)),
    rule(
        lambda x, w, *, axis=-1, eps=1e-6: rms_norm(x, axis=axis, eps=eps) * w,
        lambda x, w, *, axis, eps: rms_norm(x, w, axis=axis, eps=eps),
        when=lambda x, w, *, axis, eps: _is_vector(x, w, axes=(axis,), eps=eps),
        exact=False,
        name="parameters of an RMS norm",
    ),
]


# -- products -----------------------------------------------------------------------------------------------------
def _is_weight(x: Value, w: Value, *, perm: Any) -> bool:
    return tuple(perm) == (1, 0)


def _is_bias(x: Value, w: Value, b: Value) -> bool:
    return len(b.shape) == 1


def _mean_of(x: Value, *, axes: Any, n: float) -> bool:
    count = math.prod(x.shape[a] for a in axes) if is_static(x.shape) else 0
    return x.dtype.is_float and count > 0 and math.isclose(n, count, rel_tol=1e-6)


def _mean_by(x: Value, *, axes: Any, n: float) -> bool:
    return n > 0 and _mean_of(x, axes=axes, n=1.0 / n)


def _is_product(a: Value, b: Value, *, ca: Any, cb: Any, ba: Any, bb: Any) -> bool:
    """Whether a contraction has the axes of a product of matrices, or of all rows of a by one matrix."""
    one, batch = len(ca) == len(cb) == 1, len(a.shape) == len(b.shape) == len(ba) + 2
    return one and (batch or (len(b.shape) == 2 and not ba and tuple(ca) == (len(a.shape) - 1,)))


def _product(a: Any, b: Any, *, ca: Any, cb: Any, ba: Any, bb: Any) -> Any:
    rows = [k for k in range(len(a.shape)) if k not in (*ba, *ca)]
    (column,) = (k for k in range(len(b.shape)) if k not in (*bb, *cb))
    left, right = (*ba, *rows, *ca), (*bb, *cb, column)
    return matmul(transposed(a, left), transposed(b, right))


PRODUCTS = [
    rule(
        lambda x, w, *, perm=(1, 0): matmul(x, transpose(w, perm=perm)),
        lambda x, w: linear(x, w),
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
    rule(
        lambda x, *, axes=(-1,), n=3.0: sum_(x, axis=axes, keepdims=True) / n,
        lambda x, *, axes: mean(x, axis=axes, keepdims=True),
        when=_mean_of,
        exact=False,
        name="mean",
    ),
    rule(
        lambda x, *, axes=(-1,), n=1 / 3: sum_(x, axis=axes, keepdims=True) * n,
        lambda x, *, axes: mean(x, axis=axes, keepdims=True),
        when=_mean_by,
        exact=False,
        name="mean",
    ),
    rule(
        lambda a, b, *, ca=(1,), cb=(0,), ba=(), bb=(): dot(a, b, contract_a=ca, contract_b=cb, batch_a=ba, batch_b=bb),
        _product,
        when=_is_product,
        exact=False,
        name="product",
    ),
    rule(lambda x: x**2.0, lambda x: square(x), exact=False, name="second power"),
    *(
        rule(root, lambda x: rsqrt(x), exact=False, name="reciprocal of a root")
        for root in (lambda x: 1.0 / sqrt(x), lambda x: reciprocal(sqrt(x)))
    ),
]


# -- computations in float32 between casts --------------------------------------------------------------------------
def _is_narrow(x: Value, *parameters: Value, kind: Any, **_: Any) -> bool:
    """Whether all operands have the dtype of the result, of 16 bits."""
    return x.dtype.is_float and x.dtype.bits == 16 and all(v.dtype is kind for v in (x, *parameters))


def _wide(x: Any) -> Any:
    return cast(x, dtype="float32")


def _between_casts(before: Callable[..., Any], after: Callable[..., Any], name: str) -> Rule:
    return rule(before, after, when=_is_narrow, exact=False, name=name)


CASTS = [  # the composites compute 16 bits in float32 themselves
    _between_casts(
        lambda x, *, kind="bfloat16", axis=-1: cast(softmax(_wide(x), axis=axis), dtype=kind),
        lambda x, *, axis: softmax(x, axis=axis),
        "softmax between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", axis=-1: cast(log_softmax(_wide(x), axis=axis), dtype=kind),
        lambda x, *, axis: log_softmax(x, axis=axis),
        "log-softmax between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", axes=(-1,), eps=1e-5: cast(layer_norm(_wide(x), axes=axes, eps=eps), dtype=kind),
        lambda x, *, axes, eps: layer_norm(x, axes=axes, eps=eps),
        "layer norm between casts",
    ),
    _between_casts(
        lambda x, w, b, *, kind="bfloat16", axes=(-1,), eps=1e-5: cast(
            layer_norm(_wide(x), _wide(w), _wide(b), axes=axes, eps=eps), dtype=kind
        ),
        lambda x, w, b, *, axes, eps: layer_norm(x, w, b, axes=axes, eps=eps),
        "layer norm with parameters between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", axis=-1, eps=1e-6: cast(rms_norm(_wide(x), axis=axis, eps=eps), dtype=kind),
        lambda x, *, axis, eps: rms_norm(x, axis=axis, eps=eps),
        "RMS norm between casts",
    ),
    _between_casts(
        lambda x, w, *, kind="bfloat16", axis=-1, eps=1e-6: cast(
            rms_norm(_wide(x), _wide(w), axis=axis, eps=eps), dtype=kind
        ),
        lambda x, w, *, axis, eps: rms_norm(x, w, axis=axis, eps=eps),
        "RMS norm with parameters between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", approximate="none": cast(gelu(_wide(x), approximate=approximate), dtype=kind),
        lambda x, *, approximate: gelu(x, approximate=approximate),
        "activation between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16": cast(silu(_wide(x)), dtype=kind), lambda x: silu(x), "activation between casts"
    ),
    _between_casts(
        lambda x, *, kind="bfloat16": cast(sigmoid(_wide(x)), dtype=kind),
        lambda x: sigmoid(x),
        "activation between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", axis=(-1,), keepdims=True: cast(
            mean(_wide(x), axis=axis, keepdims=keepdims), dtype=kind
        ),
        lambda x, *, axis, keepdims: mean(x, axis=axis, keepdims=keepdims),
        "reduction between casts",
    ),
    _between_casts(
        lambda x, *, kind="bfloat16", axis=(-1,), keepdims=True: cast(
            sum_(_wide(x), axis=axis, keepdims=keepdims), dtype=kind
        ),
        lambda x, *, axis, keepdims: sum_(x, axis=axis, keepdims=keepdims),
        "reduction between casts",
    ),
]

RULES = RuleSet("operator-fusion", [*ACTIVATIONS, *SOFTMAX, *NORMS, *PRODUCTS, *ATTENTION, *CASTS])


# -- where rules are applied ----------------------------------------------------------------------------------------
# A composite is more stable than its primitives: they differ at infinities and where primitives overflow, often only in
# the gradient. Level high uses the composite; lower levels keep the results of the primitives. At a kink the gradient
# of some composites is another number; before gradients, no level uses these.
FORMS = (
    "product",
    "mean",
    "second power",
    "reciprocal of a root",
    "reduction between casts",
)  # parts of composites, rewritten before them
EQUAL_GRADIENTS = (
    *FORMS,
    *("linear", "bias of a linear", "softmax", "log-softmax", "attention"),
    *("softmax between casts", "log-softmax between casts", "activation between casts"),
    *("attention with a mask", "attention of scaled queries", "attention to repeated heads"),
    "weights on the right",
)
OTHER_KINKS = ("relu",)
EQUAL_VALUES = (
    *EQUAL_GRADIENTS,
    *OTHER_KINKS,
    *("gelu", "gelu by tanh", "sigmoid", "silu"),
    *("attention to selected keys", "guarded weights"),  # gradients of rows without keys differ
    *("layer norm", "layer norm without parameters", "parameters of a layer norm"),
    *("RMS norm", "RMS norm by scaled parameters", "parameters of an RMS norm"),
    *("layer norm between casts", "layer norm with parameters between casts"),
    *("RMS norm between casts", "RMS norm with parameters between casts"),
)
ANY_WIDTH = (
    *dict.fromkeys(r.name for r in CASTS),
    *("product", "second power", "linear", "bias of a linear"),
    *("relu", "gelu", "gelu by tanh", "sigmoid", "silu"),
)


def _has_range_of_float32(*values: Value, **_: Any) -> bool:
    """Whether no operand is a float16: there the primitives overflow, while the composite computes in float32."""
    return not any(v.dtype.name == "float16" for v in values)


def _faithful(names: Iterable[str]) -> RuleSet:
    """Return the named rules, restricted to dtypes for which both sides agree for all numbers."""
    rules = [r if r.name in ANY_WIDTH else r.restricted(_has_range_of_float32) for r in RULES.rules if r.name in names]
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
    forms = RuleSet(rules.name, [r for r in rules.rules if r.name in FORMS])
    return rules(forms(graph))


__all__ = ["RULES", "operator_fusion"]
