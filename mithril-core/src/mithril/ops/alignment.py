"""Connectionist temporal classification: the likelihood of labels under all their alignments with a sequence."""

from __future__ import annotations

from typing import Any

from mithril.graph import ShapeError, Size, assume, composite, exactly, ints, sample, shape_text
from mithril.ops.activations import log_softmax
from mithril.ops.along_axis import take_along_axis
from mithril.ops.basic import cast, upcast
from mithril.ops.control_flow import scan, stop_gradient
from mithril.ops.creation import full, iota
from mithril.ops.derived_gradients import BY_KERNEL, cotangents
from mithril.ops.elementwise import equal, exp, less, log, maximum, minimum, not_equal, where
from mithril.ops.indexing import wide_positions
from mithril.ops.losses import reduced
from mithril.ops.reduction import mean
from mithril.ops.scatter_reductions import number, positions_within
from mithril.ops.shape import concat, reshape, squeeze, stack, transpose, unsqueeze
from mithril.ops.slicing import narrow

IMPOSSIBLE = -1e30  # a logarithm of 0 whose arithmetic gives no nan


@composite(
    promotes="float",
    promoted=("logits",),
    tolerance=4.0,
    samples=[
        sample((2, 5, 4), ints((2, 2), 1, 3)),
        sample((2, 4, 3), exactly(1, 1, 2, 0, dtype="int32", shape=(2, 2)), exactly(4, 3, dtype="int32"),
               exactly(2, 1, dtype="int32"), reduction="none", label="lengths"),
        sample((1, 3, 3), exactly(0, 1, dtype="int32", shape=(1, 2)), blank=2, reduction="sum", label="blank"),
        sample((1, 2, 3), exactly(1, 1, dtype="int32", shape=(1, 2)), zero_infinity=True, label="impossible"),
    ],
    precision="full",
)  # fmt: skip
def ctc_loss(
    logits,
    labels,
    logit_lengths=None,
    label_lengths=None,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
):
    """Negative log likelihood of ``labels`` [batch, labels] for logits (or log probabilities) [batch, time, classes].

    The lengths [batch] count the valid steps and labels of each row, and are limited to those that exist; no valid
    label is ``blank``. "mean" divides the loss of each row by its number of labels first. Labels without an alignment
    have an infinite loss, 0 with ``zero_infinity``, and no gradient.
    """
    _check(logits.shape, labels.shape, logit_lengths, label_lengths, blank)
    batch, count = labels.shape
    p = transpose(log_softmax(upcast(logits), axis=-1), perm=(1, 0, 2))  # time first
    labels = cast(positions_within(wide_positions(labels), logits.shape[2]), dtype="int32")
    gap = full(shape=(batch, count), value=blank, dtype="int32")
    states = reshape(stack(gap, labels, axis=2), shape=(batch, 2 * count))
    states = concat(states, full(shape=(batch, 1), value=blank, dtype="int32"), axis=1)  # blanks around all labels
    size = 2 * count + 1
    place = iota(shape=(1, size), axis=1, dtype="int32")
    # a label can follow another label directly, without a blank, unless it repeats it
    can_skip = not_equal(states, _shifted(states, 2, blank))
    emissions = take_along_axis(p, _at_each_step(states, p), axis=2)
    start = where(equal(place, 0), full(shape=(batch, size), value=0.0, dtype=p.dtype), IMPOSSIBLE)  # before any step
    steps = iota(shape=(p.shape[0],), dtype="int32")

    def step(alpha: Any, element: Any) -> tuple[Any, None]:
        emission, time = element
        skipped = where(can_skip, _shifted(alpha, 2, IMPOSSIBLE), IMPOSSIBLE)
        following = _log_sum(alpha, _shifted(alpha, 1, IMPOSSIBLE), skipped) + emission
        if logit_lengths is not None:
            valid = less(time, unsqueeze(_limited(logit_lengths, p.shape[0]), axis=(1,)))
            following = where(valid, following, alpha)
        return following, None

    alpha, _ = scan(step, start, (emissions, steps))
    if label_lengths is None:
        lengths = full(shape=(batch,), value=0, dtype="int32") + number(count, labels)
    else:
        lengths = _limited(label_lengths, count)
    last = unsqueeze(lengths * 2, axis=(1,))
    at_blank = take_along_axis(alpha, last, axis=1)
    at_label = where(less(0, last), take_along_axis(alpha, maximum(last - 1, 0), axis=1), IMPOSSIBLE)
    loss = -squeeze(_log_sum(at_blank, at_label), axis=(1,))
    loss = where(less(loss, -IMPOSSIBLE / 2), loss, 0.0 if zero_infinity else float("inf"))
    if reduction == "mean":
        loss = mean(loss / cast(maximum(lengths, 1), dtype=loss.dtype))
        return reduced(loss, "none", logits)
    return reduced(loss, reduction, logits)


@composite(
    promotes="float",
    promoted=("g", "logits"),
    tolerance=4.0,
    samples=[
        sample((), (2, 5, 4), ints((2, 2), 1, 3), gradient=False),
        sample((2,), (2, 4, 3), exactly(1, 1, 2, 2, dtype="int32", shape=(2, 2)), exactly(4, 3, dtype="int32"),
               exactly(2, 1, dtype="int32"), reduction="none", label="lengths"),
        sample((), (1, 3, 3), exactly(0, 1, dtype="int32", shape=(1, 2)), blank=2, reduction="sum", label="blank"),
        sample((), (1, 2, 3), exactly(1, 1, dtype="int32", shape=(1, 2)), zero_infinity=True, label="impossible",
               gradient=False),
    ],
    precision="full",
)  # fmt: skip
def ctc_loss_grad(
    g,
    logits,
    labels,
    logit_lengths=None,
    label_lengths=None,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
):
    """Cotangent of the logits of ``ctc_loss`` for the cotangent ``g`` of its result."""

    def loss(*operands: Any) -> Any:
        return ctc_loss.reference(*operands, blank=blank, reduction=reduction, zero_infinity=zero_infinity)

    return cotangents(loss, (0,), g, logits, labels, logit_lengths, label_lengths)[0]


@ctc_loss.vjp
def _(g, y, logits, labels, logit_lengths, label_lengths, **attributes):
    return ctc_loss_grad(g, logits, labels, logit_lengths, label_lengths, **attributes), None, None, None


BY_KERNEL.add(ctc_loss)


def _check(logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> None:
    if len(logits) != 3 or len(labels) != 2 or not assume(logits[0], "==", labels[0], "the batch of 'ctc_loss'"):
        raise ShapeError(
            "ctc_loss requires logits [batch, time, classes] and labels [batch, labels], got "
            f"{shape_text(logits)} and {shape_text(labels)}",
            hint="for logits [time, batch, classes] transpose: ops.transpose(x, perm=(1, 0, 2))",
        )
    if isinstance(logits[2], int) and not 0 <= blank < logits[2]:
        raise ShapeError(f"ctc_loss: blank={blank} is not a class", facts=[f"accepted: 0 to {logits[2] - 1}"])
    for name, lengths in (("logit_lengths", logit_lengths), ("label_lengths", label_lengths)):
        if lengths is None:
            continue
        if len(lengths.shape) != 1 or not assume(lengths.shape[0], "==", logits[0], f"'{name}' of 'ctc_loss'"):
            raise ShapeError(f"ctc_loss requires {name} {shape_text(logits[:1])}, got {shape_text(lengths.shape)}")


def _limited(lengths: Any, limit: Size) -> Any:
    lengths = wide_positions(lengths)
    return cast(maximum(minimum(lengths, number(limit, lengths)), 0), dtype="int32")


def _at_each_step(states: Any, p: Any) -> Any:
    """Return the states [batch, states] as indices [time, batch, states]."""
    steps = full(shape=(p.shape[0], 1, 1), value=0, dtype="int32")
    return unsqueeze(states, axis=(0,)) + steps


def _shifted(x: Any, by: int, fill: float) -> Any:
    """Move the elements of each row to the right."""
    head = full(shape=(x.shape[0], by), value=fill, dtype=x.dtype)
    return narrow(concat(head, x, axis=1), 1, 0, x.shape[1])


def _log_sum(*terms: Any) -> Any:
    """Return the logarithm of a sum of exponentials."""
    high = terms[0]
    for term in terms[1:]:
        high = maximum(high, term)
    high = stop_gradient(high)  # the sum does not depend on it
    total = exp(terms[0] - high)
    for term in terms[1:]:
        total = total + exp(term - high)
    return high + log(total)


__all__ = ["ctc_loss", "ctc_loss_grad"]
