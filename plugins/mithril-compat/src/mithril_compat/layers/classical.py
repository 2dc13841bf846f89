"""Models of classical machine learning: kernels, support vectors, regression, distances, Gaussian processes."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

from mithril import ModelError, Value, ops
from mithril_compat.language.block import WEIGHT, Block, Leaf, block
from mithril_compat.language.connection import TBD, Connection, Constant
from mithril_compat.language.model import Model
from mithril_compat.layers.elementwise import StableReciprocal as _Reciprocal, robust_log, robust_power
from mithril_compat.layers.losses import KLDivergence
from mithril_compat.layers.neural import Linear, linear
from mithril_compat.lowering import fill

TINY = Constant.MIN_POSITIVE_NORMAL


@block()
def L1(input: Any = TBD) -> Any:
    return ops.sum(abs(input))


@block()
def L2(input: Any = TBD) -> Any:
    return ops.sum(ops.square(input)) * 0.5


@block(cins="input")
def QuadraticFormRegularizer(input: Any = TBD, kernel: Any = TBD) -> Any:
    return input @ kernel @ ops.transpose(input) * 0.5


@block(cins="input1 input2")
def RBFKernel(input1: Any = TBD, input2: Any = TBD, l_scale: Any = TBD, sigma: Any = TBD) -> Any:
    distances = ops.sum(ops.square(ops.unsqueeze(input1, axis=1) - ops.unsqueeze(input2, axis=0)), axis=2)
    scale, width = fill(l_scale, (1,)), fill(sigma, (1,))
    return scale * scale * ops.exp(distances * -0.5 / (width * width))


@block(options="robust", cins="input1 input2")
def PolynomialKernel(robust: bool = True, input1: Any = TBD, input2: Any = TBD, poly_coef: Any = TBD,
                     degree: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    base = input1 @ ops.transpose(input2) + fill(poly_coef, ())
    exponent = fill(degree, ())
    return robust_power(base, exponent, TINY.number(program.float_dtype)) if robust else base**exponent


class KernelizedSVM(Model):
    """A linear layer on the values of a kernel, whose outputs are ``kernel`` and ``output``."""

    def __init__(
        self, kernel: Block, weight: Any = TBD, bias: Any = TBD, *, name: str | None = None, **given: Any
    ) -> None:
        super().__init__(name)
        if len(kernel.couts) != 1 or len(kernel.cins) < 2:
            raise ModelError("KernelizedSVM needs a kernel of two inputs and one output")
        inputs = [key for key in kernel.terminal_names() if kernel.edges[key].edge.producer is None]
        targets: dict[str, Any] = {key: Connection(key, value=given.get(key, TBD)) for key in inputs
                                   if not kernel.edges[key].is_valued}  # fmt: skip
        (output,) = (key for key, e in kernel.edges.items() if e.edge is kernel.couts[0].edge)
        self.join(kernel, {**targets, output: "kernel"})
        decision = Linear(1)
        parameters = {key: Connection(key, value=v) for key, v in (("weight", weight), ("bias", bias))}
        self.join(decision, {"input": "kernel", **parameters, "output": "output"})
        for key in ("kernel", "output"):
            self._expose(self.edges[key].edge, key)
        self.cins = [self.edges[key].edge for key in ("input1", "input2") if key in self.edges]
        self.couts = [self.edges["output"].edge]
        self._freeze()


@block(outputs="decision_output output", couts="output")
def LinearSVM(input: Any = TBD, weight: Any = WEIGHT, bias: Any = WEIGHT, *, program: Any) -> Any:
    y = linear(input, weight, bias, 1, program)
    return ops.sign(y), y


@block(outputs="probs_output output", couts="output")
def LogisticRegression(input: Any = TBD, weight: Any = WEIGHT, bias: Any = WEIGHT, *, program: Any) -> Any:
    y = linear(input, weight, bias, 1, program)
    return ops.sigmoid(y), y


def polynomial_features(x: Any, degree: int) -> Any:
    """Return the products of up to ``degree`` columns, without the constant."""
    columns = [None, *(x[:, k] for k in range(x.shape[1]))]
    products = []
    for combination in list(combinations_with_replacement(columns, degree))[1:]:
        factors = [c for c in combination if c is not None]
        products.append(math.prod(factors[1:], start=factors[0]))
    return ops.stack(*products, axis=1)


@block()
def PolynomialFeatures(degree: Any = TBD, input: Any = TBD) -> Any:
    return polynomial_features(input, degree)


@block(options="degree dimension")
def PolynomialRegression(degree: Any, dimension: Any = None, input: Any = TBD, weight: Any = WEIGHT,
                         bias: Any = WEIGHT, *, program: Any) -> Any:  # fmt: skip
    return linear(polynomial_features(input, degree), weight, bias, dimension, program)


# -- distances ---------------------------------------------------------------------------------------------------------
def modified_norm(x: Any) -> Any:
    """Return a norm from 1 to 5, a triangle wave of period 8."""
    inner = ops.mod(x - 1.0, 8.0) / 8.0 - 0.5
    return (1.0 - abs(inner) * 2.0) * 4.0 + 1.0


def distances(left: Any, right: Any, norm: Any) -> Any:
    """Return sums of powers of differences between all rows; no root is taken."""
    return ops.sum(abs(ops.unsqueeze(left, axis=1) - ops.unsqueeze(right, axis=0)) ** norm, axis=2)


@block()
def NormModifier(input: Any = TBD) -> Any:
    return modified_norm(input)


@block(cins="left right")
def DistanceMatrix(left: Any = TBD, right: Any = TBD, norm: Any = TBD) -> Any:
    return distances(left, right, norm)


@block(options="get_final_distance robust", cins="input1 input2")
def EncoderDistanceMatrix(get_final_distance: bool = True, robust: bool = True, input1: Any = TBD, input2: Any = TBD,
                          norm: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    power = modified_norm(fill(norm, ()))
    sums = distances(input1, input2, power)
    if not get_final_distance:
        return sums
    return robust_power(sums, 1.0 / power, TINY.number(program.float_dtype)) if robust else sums ** (1.0 / power)


def _stress(target: Any, predicted: Any, norm: Any, exact: bool, robust: bool, program: Any) -> Any:
    """Return the normalized difference of two matrices of distances, of which ``predicted`` are powers."""
    tiny = TINY.number(program.float_dtype)
    limit = Constant.STABLE_RECIPROCAL_THRESHOLD.number(program.float_dtype)

    def power(x: Any, e: Any) -> Any:
        return robust_power(x, e, tiny) if robust else x**e

    def inverse(x: Any) -> Any:
        return _Reciprocal.function(x, limit)

    p = modified_norm(fill(norm, ()))
    root = inverse(p)
    difference = abs((target if exact else power(target, root)) - power(predicted, root))
    total = ops.sum(power(target, p)) if exact else ops.sum(target)
    return power(ops.sum(power(difference, p)) * inverse(total), root)


@block(options="exact_distances robust", cins="norm pred_distances distances")
def MDSCore(exact_distances: bool = True, robust: bool = True, distances: Any = TBD, pred_distances: Any = TBD,
            norm: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    return _stress(distances, pred_distances, norm, exact_distances, robust, program)


INPUTS = ("distances", "powered_distances", "points")


def _input_kind(kind: str) -> str:
    if kind not in INPUTS:
        raise ModelError(f"input_type='{kind}'", facts=[f"accepted: {', '.join(INPUTS)}"])
    return kind


@block(options="prediction_dim input_type", outputs="output predicted_coords", couts="output predicted_coords",
       cins="coords norm input")  # fmt: skip
def MDS(prediction_dim: Any, input_type: str = "distances", input: Any = TBD, coords: Any = TBD, norm: Any = TBD,
        *, program: Any) -> Any:  # fmt: skip
    exact = _input_kind(input_type) == "distances"
    points = fill(coords, (input.shape[0], prediction_dim))
    p = modified_norm(fill(norm, ()))
    target = distances(input, input, p) if input_type == "points" else input
    return _stress(target, distances(points, points, p), norm, exact, True, program), points


@block()
def TsnePJoint(squared_distances: Any = TBD, target_perplexity: Any = TBD, threshold: Any = Constant.EPSILON,
               *, program: Any) -> Any:  # fmt: skip
    return _joint_probabilities(squared_distances, target_perplexity, threshold, program)


STEPS = 40  # of the bisection of widths: the precision of float32


def _joint_probabilities(squared: Any, perplexity: Any, threshold: Any, program: Any) -> Any:
    """Return the symmetric probabilities of neighbors, with widths by row that yield the perplexity."""
    n = squared.shape[0]
    off_diagonal = 1.0 - ops.eye(n=n, dtype=program.float_dtype)

    def conditional(width: Any) -> Any:
        scores = ops.exp(-(squared - ops.min(squared + (1.0 - off_diagonal) * 1e30, axis=1, keepdims=True))
                         / (width * width * 2.0)) * off_diagonal  # fmt: skip
        return scores / (ops.sum(scores, axis=1, keepdims=True) + threshold)

    def narrowed(bounds: Any, _: Any) -> Any:
        low, high = bounds[0], bounds[1]
        middle = (low + high) * 0.5
        p = conditional(ops.exp(middle))
        entropy = -ops.sum(p * ops.log(p + threshold), axis=1, keepdims=True)
        above = entropy > (ops.log(perplexity) if isinstance(perplexity, Value) else math.log(perplexity))
        return ops.stack(ops.where(above, low, middle), ops.where(above, middle, high), axis=0), entropy

    start = ops.ones(shape=(n, 1), dtype=program.float_dtype)
    bounds, _ = ops.scan(narrowed, ops.stack(start * -10.0, start * 10.0, axis=0), ops.arange(stop=STEPS))
    p = conditional(ops.exp((bounds[0] + bounds[1]) * 0.5))
    return (p + ops.transpose(p)) / (2.0 * n)


@block(options="prediction_dim input_type preplexity calculate_p_joint", outputs="output predicted_coords",
       couts="output predicted_coords", cins="coords input")  # fmt: skip
def TSNE(prediction_dim: Any, input_type: str = "distances", preplexity: float = 20.0,
         calculate_p_joint: bool = False, input: Any = TBD, norm: Any = TBD, coords: Any = TBD,
         p_joint: Any = None, *, program: Any) -> Any:  # fmt: skip
    exact = _input_kind(input_type) == "distances"
    points = fill(coords, (input.shape[0], prediction_dim))
    p = modified_norm(fill(norm, ()))
    target = distances(input, input, p) if input_type == "points" else input
    if calculate_p_joint:
        squared = ops.square(target) if exact else target
        p_joint = _joint_probabilities(squared, preplexity, Constant.EPSILON.number(program.float_dtype), program)
    if p_joint is None:
        raise ModelError("TSNE needs probabilities", hint="pass calculate_p_joint=True, or connect p_joint")
    similarity = (
        1.0 / (1.0 + distances(points, points, p)) * (1.0 - ops.eye(n=input.shape[0], dtype=program.float_dtype))
    )
    divergence = KLDivergence.function(similarity / ops.sum(similarity), p_joint, TINY.number(program.float_dtype))
    return ops.sum(divergence), points


# -- Gaussian processes ------------------------------------------------------------------------------------------------
@block()
def Cholesky(input: Any = TBD) -> Any:
    return ops.cholesky(input)


@block()
def GPRAlpha(label_mu_diff: Any = TBD, L: Any = TBD, K_term: Any = TBD) -> Any:
    return _alpha(label_mu_diff, L, K_term)


def _alpha(difference: Any, factor: Any, matrix: Any) -> Any:
    if factor is None:
        return ops.solve(matrix, difference)
    half = ops.triangular_solve(factor, difference)
    return ops.triangular_solve(factor, half, transposed=True)


@block()
def GPRVOuter(K: Any = TBD, K_term: Any = TBD, L: Any = TBD) -> Any:
    return _explained(K, K_term, L)


def _explained(kernel: Any, matrix: Any, factor: Any) -> Any:
    if factor is None:
        return ops.transpose(kernel) @ ops.solve(matrix, kernel)
    v = ops.triangular_solve(factor, kernel)
    return ops.transpose(v) @ v


@block()
def TransposedDiagonal(input: Any = TBD) -> Any:
    return ops.unsqueeze(ops.diag(input), axis=1)


@block()
def Eigvalsh(K_term: Any = TBD, L: Any = TBD, threshold: Any = Constant.EPSILON) -> Any:
    return ops.diag(L) if L is not None else ops.maximum(ops.eigh(K_term)[0], threshold)


def _gpr_loss(labels: Any, mu: Any, factor: Any, matrix: Any, alpha: Any, robust: bool, tiny: float) -> Any:
    values = ops.diag(factor) if factor is not None else ops.eigh(matrix)[0]
    logs = robust_log(values, tiny) if robust else ops.log(values)
    fit = ops.sum((labels - mu) * alpha) * 0.5
    return fit + ops.sum(logs) + 0.5 * math.log(2.0 * math.pi) * labels.shape[0]


@block(options="robust", cins="labels")
def GPRLoss(robust: bool = False, labels: Any = TBD, mu: Any = TBD, L: Any = TBD, K_term: Any = TBD,
            alpha: Any = TBD, *, program: Any) -> Any:  # fmt: skip
    return _gpr_loss(labels, mu, L, K_term, alpha, robust, TINY.number(program.float_dtype))


@block(outputs="loss confidence prediction", couts="prediction", cins="k")
def GaussProcessRegressionCore(s: Any = TBD, k: Any = TBD, k_star: Any = TBD, mu: Any = TBD, label: Any = TBD,
                               *, program: Any) -> Any:  # fmt: skip
    noise, mean = fill(s, (1,)), fill(mu, label.shape)
    matrix = k + noise * ops.eye(n=k.shape[0], dtype=program.float_dtype)
    factor = ops.cholesky(matrix)
    alpha = _alpha(label - mean, factor, matrix)
    loss = _gpr_loss(label, mean, factor, matrix, alpha, False, 0.0)
    spread = abs(ops.unsqueeze(ops.diag(k_star - _explained(k, matrix, factor)), axis=1))
    return loss, noise + spread, mean + ops.transpose(k) @ alpha


__all__ = [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, (Leaf, Model))]
