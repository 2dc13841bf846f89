"""Attention to a cache, whose last positions are not written yet: reads only the keys that a query may attend to."""
# mypy: ignore-errors

import numpy as np

from mithril.backend.codegen.helper_metadata import needs


def visible(mask):
    """Return the number of keys up to the last one that any query may attend to, all of them if there is none."""
    seen = np.flatnonzero(mask.reshape(-1, mask.shape[-1]).any(0))
    return int(seen[-1]) + 1 if seen.size else mask.shape[-1]


@needs(visible)
def cached_attention(q, k, v, mask, scale):
    """Return attention in NumPy, with a mask of bools for all keys."""
    n = visible(mask)
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
