"""Shared helpers for random words by Threefry, from a key and a counter; equal on every backend."""
# mypy: ignore-errors

from mithril.backend.codegen.shared.dialect import needs, xp


def threefry(key, high, low):
    """Run twenty rounds of Threefry-2x32 over pairs of words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ xp.word(0x1BD11BDA))
    x0, x1 = xp.wrapped(high + keys[0]), xp.wrapped(low + keys[1])
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = xp.wrapped(x0 + x1)
            x1 = (xp.wrapped(x1 << xp.word(r)) | (x1 >> xp.word(32 - r))) ^ x0
        x0 = xp.wrapped(x0 + keys[(block + 1) % 3])
        x1 = xp.wrapped(x1 + (keys[(block + 2) % 3] + xp.word(block + 1)))
    return x0, x1


def counter(key, count):
    """Return the integers from 0 to count - 1 as high and low words."""
    low = xp.words(count, key)
    return xp.zeros_like(low), low


@needs(threefry, counter)
def random_bits(key, shape):
    """Draw uniform 32-bit words."""
    count = 1
    for n in shape:
        count *= n
    a, b = threefry(xp.key_words(key), *counter(key, count))
    return xp.as_words((a ^ b).reshape(shape))


@needs(threefry, counter)
def split_key(key, num):
    """Return independent keys as rows."""
    return xp.as_words(xp.stack(threefry(xp.key_words(key), *counter(key, num)), 1))


@needs(threefry)
def fold_in(key, data):
    """Mix the key with an integer."""
    word = xp.to_word(data)
    return xp.as_words(xp.stack(threefry(xp.key_words(key), xp.zeros_like(word), word)).reshape(2))
