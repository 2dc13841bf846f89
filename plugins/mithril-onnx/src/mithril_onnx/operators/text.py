"""TfIdfVectorizer on integers."""

from __future__ import annotations

import numpy as np

from mithril import ops
from mithril.graph import UnsupportedError
from mithril_onnx.table import operator


@operator
def TfIdfVectorizer(
    x, *, max_gram_length, max_skip_count, min_gram_length, mode, ngram_counts, ngram_indexes, pool_int64s=None,
    pool_strings=None, weights=None,
):  # fmt: skip
    """Count each n-gram of the pool by comparing it with all windows of every allowed skip."""
    if pool_int64s is None:
        raise UnsupportedError("TfIdfVectorizer of strings is not supported")
    rows = x if x.ndim == 2 else ops.unsqueeze(x, axis=(0,))
    length = rows.shape[1]
    if type(length) is not int:
        raise UnsupportedError("TfIdfVectorizer requires a static length")
    width = max(ngram_indexes) + 1
    columns: list[tuple[int, np.ndarray | None]] = []
    place = 0
    bounds = [*ngram_counts, len(pool_int64s)]
    for n in range(1, len(ngram_counts) + 1):
        grams = np.asarray(pool_int64s[bounds[n - 1] : bounds[n]]).reshape(-1, n)
        for row in grams:
            columns.append((place, row if min_gram_length <= n <= max_gram_length else None))
            place += 1
    out = [None] * width
    for position, gram in columns:  # None: an n-gram that is not counted
        count = None
        if gram is not None:
            for skip in range(max_skip_count + 1) if len(gram) > 1 else (0,):
                reach = (len(gram) - 1) * (skip + 1) + 1
                if reach > length:
                    continue
                hit = None
                for k, item in enumerate(gram):
                    start = k * (skip + 1)
                    part = ops.slice(rows, starts=(start,), stops=(start + length - reach + 1,), steps=(1,), axes=(1,))
                    is_equal = ops.equal(part, np.asarray(item, x.dtype.numpy))
                    hit = is_equal if hit is None else ops.logical_and(hit, is_equal)
                num_hits = ops.sum(ops.cast(hit, dtype="float32"), axis=1)
                count = num_hits if count is None else count + num_hits
        if count is None:
            count = ops.full(shape=(rows.shape[0],), value=0.0)
        weight = 1.0 if weights is None else weights[position]
        if mode == "TF":
            value = count
        else:
            value = ops.where(ops.greater(count, 0.0), 1.0 if mode == "IDF" else count, 0.0) * weight
        index = ngram_indexes[position]
        out[index] = value if out[index] is None else out[index] + value
    zero = ops.full(shape=(rows.shape[0],), value=0.0)
    y = ops.stack(*[zero if v is None else ops.cast(v, dtype="float32") for v in out], axis=1)
    return y if x.ndim == 2 else ops.squeeze(y, axis=(0,))
