"""Operations on images, boxes and sequences, and losses: their values are those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn, tensor
from torch.nn import functional as F

import mithril as ml
from mithril import ops

generator = np.random.default_rng(7)


def draw(*shape: int) -> Any:
    return generator.normal(size=shape).astype(np.float64)


def close(actual: Any, expected: Tensor, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=tolerance, atol=tolerance)


IMAGE = draw(2, 3, 7, 5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(4, 9), (14, 3), (1, 1)])
@pytest.mark.parametrize("how", [{}, {"align_corners": True}, {"antialias": True}], ids=str)
def test_resize(mode: str, size: tuple[int, int], how: dict[str, bool]) -> None:
    close(ops.resize(IMAGE, size=size, mode=mode, **how), F.interpolate(tensor(IMAGE), size=size, mode=mode, **how))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [False, True])
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    grid = draw(2, 4, 6, 2) * 1.4
    expected = F.grid_sample(tensor(IMAGE), tensor(grid), mode=mode, padding_mode=padding, align_corners=align)
    close(ops.grid_sample(IMAGE, grid, mode=mode, padding_mode=padding, align_corners=align), expected)


@pytest.mark.parametrize("align", [False, True])
def test_grids_and_volumes(align: bool) -> None:
    theta, volume = draw(2, 3, 4), draw(2, 2, 3, 4, 5)
    expected = F.affine_grid(tensor(theta), [2, 2, 3, 2, 4], align_corners=align)
    grid = ops.affine_grid(theta, size=(3, 2, 4), align_corners=align)
    close(grid, expected)
    expected = F.grid_sample(tensor(volume), expected, align_corners=align)
    close(ops.grid_sample(volume, grid, align_corners=align), expected)
    plane = F.affine_grid(tensor(theta[:, :2, :3]), [2, 2, 3, 5], align_corners=align)
    close(ops.affine_grid(theta[:, :2, :3], size=(3, 5), align_corners=align), plane)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ctc_loss_and_its_gradient(reduction: str) -> None:
    logits = draw(4, 9, 6)
    labels = generator.integers(1, 6, (4, 4)).astype(np.int32)
    labels[0] = 2  # repeated labels need blanks between them
    lengths, counts = np.array([9, 5, 8, 2], np.int32), np.array([4, 3, 0, 4], np.int32)  # no alignment of the last
    x = tensor(logits, requires_grad=True)
    log_probabilities = x.log_softmax(-1).transpose(0, 1)
    options: dict[str, Any] = {"reduction": reduction, "zero_infinity": True}
    expected = F.ctc_loss(log_probabilities, tensor(labels), tensor(lengths), tensor(counts), **options)
    close(ops.ctc_loss(logits, labels, lengths, counts, **options), expected)
    expected.sum().backward()
    gradient = ml.grad(lambda z: ops.sum(ops.ctc_loss(z, labels, lengths, counts, **options)))(logits)
    assert x.grad is not None
    close(gradient, x.grad)
    assert np.isinf(ops.ctc_loss(logits, labels, lengths, counts, reduction="none")[3])


def boxes(count: int) -> Any:
    corners = generator.uniform(0, 6, (count, 2))
    return np.concatenate([corners, corners + generator.uniform(0.5, 4, (count, 2))], axis=1)


def test_selected_boxes_overlap_no_better_one() -> None:
    x, scores = boxes(40), generator.permutation(40) / 40
    classes = generator.integers(0, 2, 40).astype(np.int32)
    remaining, expected = list(np.argsort(-scores)), []
    overlap = ops.box_iou(x, x)
    while remaining:
        best = remaining.pop(0)
        if scores[best] > 0.1:
            expected.append(best)
        remaining = [k for k in remaining if overlap[best, k] <= 0.3 or classes[k] != classes[best]]
    options: dict[str, Any] = {"iou_threshold": 0.3, "score_threshold": 0.1}
    indices, count = ops.nms(x, scores, classes, size=30, **options)
    assert int(count) == len(expected)
    assert list(indices[:count]) == expected
    assert set(indices[count:]) <= {-1}
    first, count = ops.nms(x, scores, classes, size=3, **options)
    assert list(first) == expected[:3]
    assert int(count) == 3


def _region(image: Any, box: Any, size: tuple[int, int], samples: int, aligned: bool) -> Any:
    """Average bilinear samples, one position after the other."""
    x1, y1, x2, y2 = box - 0.5 * aligned
    height, width = (y2 - y1, x2 - x1) if aligned else (max(y2 - y1, 1), max(x2 - x1, 1))
    out = np.zeros((image.shape[0], *size))
    for i, j, a, b in np.ndindex(*size, samples, samples):
        y = y1 + height * (i + (a + 0.5) / samples) / size[0]
        x = x1 + width * (j + (b + 0.5) / samples) / size[1]
        if not (-1 <= y <= image.shape[1] and -1 <= x <= image.shape[2]):
            continue
        y, x = min(max(y, 0), image.shape[1] - 1), min(max(x, 0), image.shape[2] - 1)
        top, left = int(y), int(x)
        bottom, right = min(top + 1, image.shape[1] - 1), min(left + 1, image.shape[2] - 1)
        upper = image[:, top, left] * (1 - x + left) + image[:, top, right] * (x - left)
        lower = image[:, bottom, left] * (1 - x + left) + image[:, bottom, right] * (x - left)
        out[:, i, j] += (upper * (1 - y + top) + lower * (y - top)) / samples**2
    return out


@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align(aligned: bool) -> None:
    x, image = boxes(5) * 2, np.array([0, 1, 1, 0, 1], np.int32)
    expected = [_region(IMAGE[k], box * 0.5, (3, 2), 2, aligned) for k, box in zip(image, x, strict=True)]
    actual = ops.roi_align(IMAGE, x, image, size=(3, 2), scale=0.5, samples=2, aligned=aligned)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_regions_average_bilinear_samples() -> None:
    ramp = np.arange(6.0)[:, None] * 10 + np.arange(8.0)
    y = ops.roi_align(ramp[None, None], np.array([[1.0, 1.0, 5.0, 3.0]]), np.array([0]), size=(2, 2))
    np.testing.assert_allclose(y[0, 0], [[17.0, 19.0], [27.0, 29.0]])


A, B, C = draw(6, 5), draw(6, 5), draw(6, 5)
P, T = generator.uniform(0.05, 0.95, (6, 5)), generator.integers(0, 2, (6, 5)).astype(np.float64)
SIGN = np.array([1, -1, 1, 1, -1, -1])
CLASS = np.array([0, 4, 2, -100, 1, 1], np.int32)
WEIGHT = generator.uniform(0.5, 2, 5)


def labels64(x: Any) -> Tensor:
    return tensor(x.astype(np.int64))


LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "cosine": (
        lambda: ops.cosine_embedding_loss(A, B, SIGN, margin=0.1),
        lambda: F.cosine_embedding_loss(tensor(A), tensor(B), tensor(SIGN), margin=0.1),
    ),
    "ranking": (
        lambda: ops.margin_ranking_loss(A[:, 0], B[:, 0], SIGN, margin=0.3),
        lambda: F.margin_ranking_loss(tensor(A[:, 0]), tensor(B[:, 0]), tensor(SIGN), margin=0.3),
    ),
    "nll": (
        lambda: ops.nll_loss(A, CLASS, WEIGHT, ignore_index=-100),
        lambda: F.nll_loss(tensor(A), labels64(CLASS), tensor(WEIGHT), ignore_index=-100),
    ),
    "poisson": (
        lambda: ops.poisson_nll_loss(A, T),
        lambda: F.poisson_nll_loss(tensor(A), tensor(T)),
    ),
    "poisson rates": (
        lambda: ops.poisson_nll_loss(P, T, log_rate=False, reduction="sum"),
        lambda: F.poisson_nll_loss(tensor(P), tensor(T), log_input=False, reduction="sum"),
    ),
    "gaussian": (
        lambda: ops.gaussian_nll_loss(A, B, P, full=True),
        lambda: F.gaussian_nll_loss(tensor(A), tensor(B), tensor(P), full=True),
    ),
    "triplet": (
        lambda: ops.triplet_loss(A, B, C, reduction="sum"),
        lambda: nn.TripletMarginLoss(reduction="sum", eps=0.0)(tensor(A), tensor(B), tensor(C)),
    ),
    "info nce": (
        lambda: ops.info_nce_loss(A, B, temperature=0.2),
        lambda: F.cross_entropy(
            F.normalize(tensor(A)) @ F.normalize(tensor(B)).T / 0.2, labels64(np.arange(6)), reduction="mean"
        ),
    ),
    "focal": (
        lambda: ops.focal_loss(A, T),
        lambda: _focal(tensor(A), tensor(T)),
    ),
}


def _focal(x: Tensor, t: Tensor) -> Tensor:
    p = x.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    return (cross_entropy * (1 - p * t - (1 - p) * (1 - t)) ** 2 * (0.25 * t + 0.75 * (1 - t))).mean()


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    actual, expected = LOSSES[name]
    close(actual(), expected())


def test_losses_by_their_formulas() -> None:
    d = np.sqrt(((A - B) ** 2).sum(1))
    gap = np.maximum(3.0 - d, 0) ** 2
    np.testing.assert_allclose(
        ops.contrastive_loss(A, B, SIGN, margin=3.0, reduction="none"), np.where(SIGN > 0, d**2, gap), rtol=1e-9
    )
    overlap = (2 * (P * T).sum(1) + 1) / (P.sum(1) + T.sum(1) + 1)
    np.testing.assert_allclose(ops.dice_loss(P, T, reduction="none"), 1 - overlap, rtol=1e-12)


@pytest.mark.parametrize("mode", ["constant", "reflect", "symmetric", "wrap", "edge"])
def test_pad_is_that_of_numpy(mode: str) -> None:
    widths = ((1, 1), (0, 0), (6, 2), (1, 4))
    np.testing.assert_array_equal(ops.pad(IMAGE, widths=widths, mode=mode), np.pad(IMAGE, widths, mode))  # type: ignore[call-overload]


def test_negative_padding_removes_elements() -> None:
    image = IMAGE.astype(np.float32)
    y = ml.models.Pad((-1, 2), -1, mode="wrap")(image)
    np.testing.assert_array_equal(y, np.pad(image[..., 1:, 1:-1], ((0, 0), (0, 0), (0, 2), (0, 0)), "wrap"))
    with pytest.raises(ml.ShapeError, match="Pad removes more than all 5 elements of axis 3"):
        ml.models.Pad(-3)(IMAGE)


REFUSED = {
    "mode 'cubic'": lambda: ops.resize(IMAGE, size=(2, 2), mode="cubic"),
    "antialias=True requires": lambda: ops.resize(IMAGE, size=(2, 2), antialias=True),
    "unknown padding_mode 'zero' of grid_sample": lambda: ops.grid_sample(IMAGE, draw(2, 3, 2), padding_mode="zero"),
    r"requires a grid \[batch, ..., 2\], got \[2, 3, 3\]": lambda: ops.grid_sample(IMAGE, draw(2, 3, 3)),
    "got 2 images and 1 grids": lambda: ops.grid_sample(IMAGE, draw(1, 3, 2)),
    r"requires theta \[batch, 2, 3\], got \[2, 3, 4\]": lambda: ops.affine_grid(draw(2, 3, 4), size=(3, 3)),
    "samples=0 must be at least 1": lambda: ops.roi_align(IMAGE, boxes(1), np.zeros(1, int), size=(1, 1), samples=0),
    "nms requires boxes": lambda: ops.nms(IMAGE, draw(2), size=3),
    r"nms requires scores \[3\], got \[2\]": lambda: ops.nms(boxes(3), draw(2), size=3),
    "blank=6 is not a class": lambda: ops.ctc_loss(draw(1, 2, 3), np.ones((1, 1), np.int32), blank=6),
    r"requires label_lengths \[1\], got \[2\]": lambda: ops.ctc_loss(
        draw(1, 2, 3), np.ones((1, 1), np.int32), None, np.ones(2, np.int32)
    ),
    "alpha=2.0 is not a fraction": lambda: ops.focal_loss(A, T, alpha=2),
    "temperature=0.0 must be above 0": lambda: ops.info_nce_loss(A, B, temperature=0),
    "6 rows have only 5 matching rows": lambda: ops.info_nce_loss(A, B[:5]),
    "'nll_loss' expected weight": lambda: ops.nll_loss(A, SIGN, WEIGHT[:4]),
    "too large to mirror 5 elements": lambda: ops.pad(A, widths=((0, 0), (6, 0)), mode="symmetric"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_malformed_calls_are_refused(message: str) -> None:
    with pytest.raises(ml.MithrilError, match=message):
        REFUSED[message]()
