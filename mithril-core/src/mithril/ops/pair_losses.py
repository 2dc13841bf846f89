"""Losses of embeddings that compare pairs: contrastive, cosine, ranking, and InfoNCE."""

from __future__ import annotations

from typing import Any

from mithril.graph import OperationError, ShapeError, bools, composite, exactly, expect_paired, sample, shape_text
from mithril.ops.basic import cast, dtype_of, upcast
from mithril.ops.creation import iota
from mithril.ops.elementwise import greater, maximum, sqrt, where
from mithril.ops.losses import cosine_similarity, cross_entropy, reduced
from mithril.ops.norms import normalize
from mithril.ops.products import matmul
from mithril.ops.reduction import sum
from mithril.ops.shape import transpose

SIGNS = exactly(1.0, -1.0, 1.0)


def _expect_rows(op: str, a: Any, b: Any, labels: Any) -> None:
    """Raise ShapeError unless both embeddings have the same shape, and each row has a label."""
    expect_paired(op, {"a": a.shape, "b": b.shape}, scalar=False)
    expect_paired(op, {"rows of a": a.shape[:-1], "labels": labels.shape}, scalar=False)


def _is_match(labels: Any) -> Any:
    return labels if dtype_of(labels).is_bool else greater(labels, 0)


@composite(
    promotes="float",
    promoted=("a", "b"),
    samples=[sample((3, 4), (3, 4), bools((3,))), sample((3, 4), (3, 4), SIGNS, margin=4.0, label="signs")],
    precision="full",
)
def contrastive_loss(a, b, labels, *, margin: float = 1.0, reduction: str = "mean"):
    """d^2 for pairs that match (labels above 0), else max(0, margin - d)^2, with the distance d of rows of a and b."""
    _expect_rows("contrastive_loss", a, b, labels)
    difference = upcast(a) - upcast(b)
    square = sum(difference * difference, axis=-1)
    gap = maximum(margin - sqrt(square + 1e-12), 0.0)
    return reduced(where(_is_match(labels), square, gap * gap), reduction, a)


@composite(
    promotes="float",
    promoted=("a", "b"),
    samples=[sample((3, 4), (3, 4), SIGNS), sample((3, 4), (3, 4), bools((3,)), margin=0.2, label="bools")],
    precision="full",
)
def cosine_embedding_loss(a, b, labels, *, margin: float = 0.0, reduction: str = "mean"):
    """1 - cos(a, b) for pairs that match (labels above 0), else max(0, cos(a, b) - margin)."""
    _expect_rows("cosine_embedding_loss", a, b, labels)
    cosine = cosine_similarity(upcast(a), upcast(b))
    return reduced(where(_is_match(labels), 1.0 - cosine, maximum(cosine - margin, 0.0)), reduction, a)


@composite(promotes="float", promoted=("a", "b"), samples=[sample((3,), (3,), SIGNS, margin=0.5)])
def margin_ranking_loss(a, b, labels, *, margin: float = 0.0, reduction: str = "mean"):
    """max(0, margin - label * (a - b)): a label of 1 ranks a higher, -1 ranks b higher."""
    expect_paired("margin_ranking_loss", {"a": a.shape, "b": b.shape, "labels": labels.shape}, scalar=False)
    difference = upcast(a) - upcast(b)
    sign = cast(labels, dtype=dtype_of(difference))
    return reduced(maximum(margin - sign * difference, 0.0), reduction, a)


@composite(
    promotes="float",
    tolerance=4.0,
    samples=[
        sample((3, 4), (3, 4), temperature=0.5),
        sample((3, 4), (3, 4), temperature=0.5, symmetric=True, label="symmetric"),
        sample((2, 3), (4, 3), temperature=1.0, reduction="none", label="more keys"),
    ],
    precision="full",
)
def info_nce_loss(a, b, *, temperature: float = 0.07, symmetric: bool = False, reduction: str = "mean"):
    """Cross entropy of the cosine similarities of a [n, size] and b [m, size]: row k of a matches row k of b.

    Rows of b beyond those of a are further negatives. ``symmetric`` averages with the loss of b against a.
    """
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ShapeError(f"info_nce_loss requires two matrices, got {shape_text(a.shape)} and {shape_text(b.shape)}")
    if not temperature > 0.0:
        raise OperationError(f"info_nce_loss: temperature={temperature} must be above 0")
    if symmetric:
        expect_paired("info_nce_loss", {"a": a.shape, "b": b.shape}, scalar=False)
    elif isinstance(a.shape[0], int) and isinstance(b.shape[0], int) and a.shape[0] > b.shape[0]:
        raise ShapeError(f"info_nce_loss: {a.shape[0]} rows have only {b.shape[0]} matching rows")
    left, right = normalize(upcast(a), axis=-1), normalize(upcast(b), axis=-1)
    logits = matmul(left, transpose(right, perm=(1, 0))) * (1.0 / temperature)
    labels = iota(shape=(a.shape[0],), dtype="int32")
    losses = cross_entropy(logits, labels, reduction="none")
    if symmetric:
        losses = (losses + cross_entropy(transpose(logits, perm=(1, 0)), labels, reduction="none")) * 0.5
    return reduced(losses, reduction, a)


__all__ = ["contrastive_loss", "cosine_embedding_loss", "info_nce_loss", "margin_ranking_loss"]
