"""Dense layers, embeddings, and layers that wrap others."""

from __future__ import annotations

from typing import Any

from mithril import ops
from mithril_keras.layers.activations import activate
from mithril_keras.table import layer
from mithril_keras.tensor import Tensor
from mithril_keras.weights import Weights


@layer("InputLayer", masks="pass")
def input_layer(weights: Weights, x: Tensor) -> Tensor:
    """Return an input."""
    del weights
    return x


@layer("Identity", "ActivityRegularization", masks="pass")
def identity(weights: Weights, x: Tensor, *, l1: float = 0.0, l2: float = 0.0) -> Tensor:
    """Return the input; penalties belong to the training of Keras."""
    del weights, l1, l2
    return x


@layer("Dense", masks="pass")
def dense(weights: Weights, x: Tensor, *, units: int, activation: Any = None, use_bias: bool = True) -> Tensor:
    """Return a product with a matrix [in, out]."""
    v = weights.cast(x.value)
    y = ops.matmul(v, weights.param("kernel", (v.shape[-1], units)))
    if use_bias:
        y = y + weights.param("bias", (units,))
    return activate(Tensor(y), activation, weights.label)


@layer("EinsumDense")
def einsum_dense(
    weights: Weights, x: Tensor, *, equation: str, output_shape: Any, activation: Any = None, bias_axes: Any = None
) -> Tensor:
    """Return a product by an equation of two operands, such as ``abc,cd->abd``."""
    v = weights.cast(x.value)
    operands, _, result = equation.replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    output_sizes = [output_shape] if isinstance(output_shape, int) else list(output_shape)
    if "..." in equation:
        letters = left.replace("...", ""), result.replace("...", "")
        from_start = left.startswith("...")
    else:
        letters, from_start = (left, result), False
    sizes: dict[str, Any] = {}
    shape = v.shape[-len(letters[0]) :] if from_start else v.shape[: len(letters[0])]
    sizes.update(zip(letters[0], shape, strict=True))
    sizes_at_end = output_sizes if from_start else [v.shape[0], *output_sizes]
    for letter, size in zip(reversed(letters[1]), reversed(sizes_at_end), strict=False):
        if size is not None:
            sizes.setdefault(letter, size)
    y = ops.einsum(v, weights.param("kernel", [sizes[c] for c in right]), equation=equation)
    if bias_axes:
        first = min(letters[1].index(c) for c in bias_axes)
        bias_shape = [sizes[c] if c in bias_axes else 1 for c in letters[1][first:]]
        y = y + weights.param("bias", bias_shape)
    return activate(Tensor(y), activation, weights.label)


@layer("Embedding", masks="own")
def embedding(
    weights: Weights,
    x: Tensor,
    *,
    input_dim: int,
    output_dim: int,
    mask_zero: bool = False,
    input_length: Any = None,
) -> Tensor:
    """Return rows of a table; with ``mask_zero``, index 0 is padding."""
    del input_length
    table = weights.param("embeddings", (input_dim, output_dim))
    indices = ops.cast(x.value, dtype="int32")
    mask = ops.not_equal(x.value, 0) if mask_zero else None
    return Tensor(ops.embedding(indices, table), mask=mask)


@layer("ReversibleEmbedding", masks="own")
def reversible_embedding(
    weights: Weights,
    x: Tensor,
    *,
    input_dim: int,
    output_dim: int,
    tie_weights: bool = True,
    mask_zero: bool = False,
    reverse_dtype: Any = None,
    logit_soft_cap: float | None = None,
    reverse: bool = False,
) -> Tensor:
    """Return rows of a table, or with ``reverse`` the products with its rows."""
    table = weights.param("embeddings", (input_dim, output_dim))
    back = None if tie_weights else weights.param("reverse_embeddings", (output_dim, input_dim))
    if not reverse:
        indices = ops.cast(x.value, dtype="int32")
        return Tensor(ops.embedding(indices, table), mask=ops.not_equal(x.value, 0) if mask_zero else None)
    kernel = ops.transpose(table, perm=(1, 0)) if back is None else back
    kind = kernel.dtype if reverse_dtype is None else reverse_dtype
    logits = ops.matmul(ops.cast(x.value, dtype=kind), ops.cast(kernel, dtype=kind))
    if logit_soft_cap is not None:
        logits = ops.tanh(logits / float(logit_soft_cap)) * float(logit_soft_cap)
    return Tensor(logits)


@layer("Masking", masks="own")
def masking(weights: Weights, x: Tensor, *, mask_value: float = 0.0) -> Tensor:
    """Zeros, and a mask, for steps of which all features have one value."""
    del weights
    valid = ops.any(ops.not_equal(x.value, mask_value), axis=-1, keepdims=True)
    return Tensor(ops.where(valid, x.value, 0.0), mask=ops.squeeze(valid, axis=-1))


@layer("TimeDistributed", masks="pass")
def time_distributed(weights: Weights, x: Tensor, *, layer: Any, mask: Any = None) -> Tensor:
    """Return a layer for each step: the steps become part of the batch."""
    del mask
    from mithril_keras.layers.wrapped import call_wrapped

    v = x.value
    batch, length = v.shape[:2]
    inner = Tensor(ops.reshape(v, shape=(batch * length, *v.shape[2:])))
    y = call_wrapped(weights, "layer", layer, inner).value
    return Tensor(ops.reshape(y, shape=(batch, length, *y.shape[1:])))


@layer("SpectralNormalization")
def spectral_normalization(weights: Weights, x: Tensor, *, layer: Any, power_iterations: int = 1) -> Any:
    """Return the layer within, whose kernel the archive holds; it changes in training only."""
    del power_iterations
    from mithril_keras.layers.wrapped import call_wrapped

    if weights.training:
        raise weights.unsupported("spectral normalization in training", "ml.models.SpectralNorm(layer) trains")
    return call_wrapped(weights, "layer", layer, x)
