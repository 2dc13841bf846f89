"""Where values stand in the arena: the best of a few orders of placing them, since it is done once per program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mithril.backend.memory_plan import Buffer, peak_bytes

ORDERS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size, b.start),
    lambda b: (b.start - b.end, -b.size, b.start),
    lambda b: (b.size * (b.start - b.end - 1), b.start),
    lambda b: (b.start, -b.size),
    lambda b: (-b.end, -b.size),
)


def smallest(buffers: list[Buffer]) -> None:
    """A strategy of ``mithril.backend.memory_plan``: offsets for all buffers."""
    if not buffers:
        return
    least = peak_bytes(buffers, max(b.end for b in buffers) + 1)
    best: tuple[int, list[int]] | None = None
    for order in ORDERS:
        numbers = sorted(range(len(buffers)), key=lambda k, order=order: order(buffers[k]))  # type: ignore[misc]
        offsets = placed(buffers, numbers)
        top = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        if best is None or top < best[0]:
            best = top, offsets
        if top == least:
            break
    assert best is not None
    for buffer, offset in zip(buffers, best[1], strict=True):
        buffer.offset = offset


def placed(buffers: Sequence[Buffer], order: Sequence[int]) -> list[int]:
    """Offsets when each buffer in turn goes to the lowest place where it meets none that lives with it."""
    offsets = [0] * len(buffers)
    done: list[int] = []  # by offset
    for k in order:
        buffer, offset = buffers[k], 0
        for j in done:
            other = buffers[j]
            if other.start <= buffer.end and other.end >= buffer.start:
                if offsets[j] - offset >= buffer.size:
                    break
                offset = max(offset, offsets[j] + other.size)
        offsets[k] = offset
        done.append(k)
        done.sort(key=offsets.__getitem__)
    return offsets
