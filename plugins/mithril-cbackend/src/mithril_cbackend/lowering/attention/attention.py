"""Attention as one kernel, whose scores of a block of queries never leave a cache-sized buffer.

Keys and values of a head are packed once. Each block of queries is multiplied with the keys, softmax turns its scores
into weights in place, and the weights are multiplied with the values. Rows are divided by their sums at the end, since
a row of the result is shorter than a row of weights. Packed blocks of keys that are masked for a whole block are
skipped; the remaining weights of zero are multiplied like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mithril.graph import TensorType, Value, float32
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.attention.attention_match import Attention, attention_of
from mithril_cbackend.lowering.attention.blocked_attention import MAX_DECODE_QUERIES, BlockedAttention, Sizes
from mithril_cbackend.lowering.attention.decode_attention import DecodeAttention
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import KernelBuilder, Machine


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """Return one buffer with the parts of all threads."""
    match = attention_of(kernel.producers, kernel.anchor)
    assert match is not None
    elements = sum(Sizes.of(kernel, match, machine).parts(machine).values())
    return [Value("scratch", TensorType(float32, (machine.threads * elements,)))]


def attention(kernel: Kernel, name: str, machine: Machine) -> Any:
    """Lower ``softmax(queries @ keys, ...) @ values``."""
    frame = KernelBuilder(kernel, name, machine)
    match = attention_of(kernel.producers, kernel.anchor)
    assert match is not None
    sizes = Sizes.of(kernel, match, machine)
    few = [Sizes.of(kernel, match, machine, n) for n in range(1, MAX_DECODE_QUERIES + 1)]
    if isinstance(sizes.queries, int) or not few[0].reads_unpacked:
        write(frame, match, sizes)
    else:  # generation continues a sequence by one token, or verifies a few
        write_smallest(frame, match, [*few, sizes])
    return frame.finish()


def write_smallest(frame: KernelBuilder, match: Attention, variants: Sequence[Sizes]) -> None:
    """Write variants for 1, 2, ... queries, and the last one for any number of them."""
    first, *rest = variants
    if not rest:
        write(frame, match, first)
        return
    is_first = t.equal(t.index(rest[-1].queries), first.queries)
    frame.reader.either(is_first, lambda: write(frame, match, first), lambda: write_smallest(frame, match, rest))


def write(frame: KernelBuilder, match: Attention, sizes: Sizes) -> None:
    (DecodeAttention if sizes.reads_unpacked else BlockedAttention)(frame, match, sizes).write()
