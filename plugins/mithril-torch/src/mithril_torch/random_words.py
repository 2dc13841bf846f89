"""Random words by Threefry in NumPy, where PyTorch computes on the CPU: PyTorch has no arithmetic on uint32.

The helpers that all backends share run where a program is traced, batched, or on a GPU. Both draw the same words.
"""
# mypy: ignore-errors

from __future__ import annotations

import numpy
import torch

from mithril.backend import HELPERS, needs
from mithril_torch.helpers import dialect, reads_values

NUMPY = ("import numpy",)


@needs(imports=NUMPY)
def threefry_words(key, low):
    """Return the two words of each pair (0, low) after twenty rounds; ``low`` is overwritten."""
    first, second = (int(k) for k in key)
    keys = (first, second, first ^ second ^ 0x1BD11BDA)
    high, shifted = numpy.full_like(low, first), numpy.empty_like(low)
    low += numpy.uint32(second)
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            high += low
            numpy.right_shift(low, 32 - r, out=shifted)
            low <<= r
            low |= shifted
            low ^= high
        high += numpy.uint32(keys[(block + 1) % 3])
        low += numpy.uint32((keys[(block + 2) % 3] + block + 1) & 0xFFFFFFFF)
    return high, low


@needs(threefry_words, imports=NUMPY)
def words_on_host(key, shape):
    """Draw uniform 32-bit words, in blocks that fit the cache of a core."""
    words = numpy.empty(shape, numpy.uint32)
    flat, keys = words.reshape(-1), key.numpy()
    for start in range(0, flat.size, 1 << 14):
        high, low = threefry_words(keys, numpy.arange(start, min(start + (1 << 14), flat.size), dtype=numpy.uint32))
        numpy.bitwise_xor(high, low, out=flat[start : start + (1 << 14)])
    return torch.from_numpy(words)


@needs(threefry_words, imports=NUMPY)
def keys_on_host(key, num):
    """Return independent keys as rows."""
    return torch.from_numpy(numpy.stack(threefry_words(key.numpy(), numpy.arange(num, dtype=numpy.uint32)), 1))


@needs(imports=NUMPY)
def folded_on_host(key, data):
    """Mix the key with an integer."""
    first, second = key.tolist()
    keys = (first, second, first ^ second ^ 0x1BD11BDA)
    high, low = first, ((int(data) & 0xFFFFFFFF) + second) & 0xFFFFFFFF
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            high = (high + low) & 0xFFFFFFFF
            low = ((low << r) & 0xFFFFFFFF | (low >> (32 - r))) ^ high
        high = (high + keys[(block + 1) % 3]) & 0xFFFFFFFF
        low = (low + keys[(block + 2) % 3] + block + 1) & 0xFFFFFFFF
    return torch.from_numpy(numpy.array((high, low), numpy.uint32))


ON_HOST = {"random_bits": words_on_host, "split_key": keys_on_host, "fold_in": folded_on_host}


def add_rows(table):
    """Add the lowering rows of random words to ``table``."""
    for name, on_host in ON_HOST.items():
        table.function(name)(_lowering(on_host, dialect.version(HELPERS[name])))


def _lowering(on_host, shared):
    def lower(call):
        op = call.node.op
        arguments = ", ".join([call.array(op.operands[0]), *(call.array(n) for n in op.operands[1:])])
        settings = "".join(f", {call.literal(call.attributes[n])}" for n in op.attributes)
        test = f"{call.helper(reads_values)}({call.array('key')})"
        return f"({call.helper(on_host)} if {test} else {call.helper(shared)})({arguments}{settings})"

    return lower
