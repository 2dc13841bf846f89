"""Attention to a cache, whose last positions are not written yet: reads only the keys that a query may attend to."""
# mypy: ignore-errors

import numpy as np

from mithril.backend.codegen.shared.dialect import needs


def visible(mask):
    """Return the number of keys up to the last one that each row of a batch, or every row, may attend to.

    Rows without such a key see all of them.
    """
    count = mask.shape[-1]
    rows = mask.any((1, 2) if mask.ndim == 4 else tuple(range(mask.ndim - 1))).reshape(-1, count)
    return [n or count for n in np.where(rows, np.arange(1, count + 1), 0).max(1).tolist()]


@needs(visible)
def cached_attention(q, k, v, mask, scale):
    """Return attention in NumPy, with a mask of bools for all keys; each row of a batch reads those that it sees."""
    seen = visible(mask)
    if len(set(seen)) > 1:
        parts = [[x[b : b + 1] for x in (q, k, v, mask)] for b in range(len(seen))]
        return np.concatenate([cached_attention(*part, scale) for part in parts])
    n = max(seen, default=mask.shape[-1])  # of an empty batch: all
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    mask = mask[..., :n].reshape((1,) * (4 - mask.ndim) + mask.shape[:-1] + (n,))
    if mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], heads, shared, *mask.shape[2:])
    else:
        mask = mask[:, :, None]
    rows = (q * q.dtype.type(scale)).reshape(q.shape[0], heads, shared, *q.shape[2:])
    scores = np.matmul(rows, k[:, :, None, :n].swapaxes(-1, -2))
    scores = np.where(mask, scores, q.dtype.type(-np.inf))
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.matmul(scores, v[:, :, None, :n]).reshape(*q.shape[:3], v.shape[3])
