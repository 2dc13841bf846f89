"""Attention as one kernel: scores of a block of queries stay in a buffer as small as a cache, and never leave it.

One head after the other: keys and values are copied to panels once, then each block of queries is multiplied with the
keys, its scores become weights in place, and the weights are multiplied with the values. The division by a row's sum
waits until then: a row of the result is shorter than one of weights. Keys that no query of a block sees are left out,
as many panels of them as there are; weights of zero that remain are multiplied like others.
"""

from __future__ import annotations

from typing import Any

from mithril.base import TensorType, float32
from mithril.ir import Value
from mithril_cbackend.lowering.attention.attention_match import attention_of
from mithril_cbackend.lowering.attention.blocked_attention import BlockedAttention, Sizes
from mithril_cbackend.lowering.attention.decode_attention import DecodeAttention
from mithril_cbackend.lowering.element.kernel import Kernel
from mithril_cbackend.lowering.element.kernel_builder import Frame, Machine


def scratch(kernel: Kernel, machine: Machine) -> list[Value]:
    """One buffer for all parts of all threads."""
    match = attention_of(kernel.producers, kernel.anchor)
    assert match is not None
    elements = sum(Sizes.of(kernel, match, machine).parts(machine).values())
    return [Value("scratch", TensorType(float32, (machine.threads * elements,)))]


def attention(kernel: Kernel, name: str, machine: Machine) -> Any:
    """``softmax(queries @ keys, ...) @ values``."""
    frame = Frame(kernel, name, machine)
    match = attention_of(kernel.producers, kernel.anchor)
    assert match is not None
    sizes = Sizes.of(kernel, match, machine)
    (DecodeAttention if sizes.in_place else BlockedAttention)(frame, match, sizes).write()
    return frame.finish()
