"""Attention as one kernel, whose scores of a block of queries never leave a cache-sized buffer.

Keys and values of a head are packed once. Each block of queries is multiplied with the keys, softmax turns its scores
into weights in place, and the weights are multiplied with the values. Rows are divided by their sums at the end, since
a row of the result is shorter than a row of weights. Panels of keys that are masked for a whole block are skipped; the
remaining weights of zero are multiplied like others.
"""

from __future__ import annotations

from typing import Any

from mithril.base import TensorType, float32
from mithril.ir import Value
from mithril_cbackend import tir as t
from mithril_cbackend.lowering.attention.attention_match import Attention, attention_of
from mithril_cbackend.lowering.attention.blocked_attention import BlockedAttention, Sizes
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
    one = Sizes.of(kernel, match, machine, 1)
    if isinstance(sizes.queries, int) or not one.reads_unpacked:
        write(frame, match, sizes)
    else:  # generation continues a sequence token by token
        is_one = t.equal(t.index(sizes.queries), 1)
        frame.reader.either(is_one, lambda: write(frame, match, one), lambda: write(frame, match, sizes))
    return frame.finish()


def write(frame: KernelBuilder, match: Attention, sizes: Sizes) -> None:
    (DecodeAttention if sizes.reads_unpacked else BlockedAttention)(frame, match, sizes).write()
