"""Attention of long sequences in blocks of queries and keys, so that no array of the scores of all positions exists.

The source of these functions is copied into generated files. The forward pass carries the maximum and the sum of each
row, and the gradient computes the scores of a block again.
"""
# mypy: ignore-errors

import jax
import jax.numpy as jnp
from jax import lax

from mithril.backend import needs


def attention_blocks(q, k, v, mask, causal, scale, ahead):
    """Return the operands in groups of heads, and functions of numbers of blocks.

    The first query is ``ahead`` positions after the first key.
    """
    # Positions of a block: of 128 to 1024 the quickest on a CPU, whose cache holds the scores.
    size = 128
    batch, heads, queries, features = q.shape
    groups, keys = k.shape[1], k.shape[2]
    rows, columns = min(size, queries), min(size, keys)
    sum_dtype = jnp.promote_types(q.dtype, jnp.float32)

    def padded(x, block):
        return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, -x.shape[-2] % block), (0, 0)))

    q = padded(q, rows).reshape(batch, groups, heads // groups, -1, features)
    k, v = padded(k, columns), padded(v, columns)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        shared = mask.shape[1] == 1
        mask = mask.reshape(mask.shape[0], 1 if shared else groups, 1 if shared else heads // groups, *mask.shape[2:])
        fill = [(0, 0)] * 3 + [
            (0, -n % b if n > 1 else 0) for n, b in zip(mask.shape[3:], (rows, columns), strict=True)
        ]
        mask = jnp.pad(mask, fill)

    def part(x, first, count):
        return lax.dynamic_slice_in_dim(x, first, count, x.ndim - 2)

    def scores(i, j):
        a, b = part(q, i * rows, rows), part(k, j * columns, columns)
        s = jnp.einsum("bghqd,bgkd->bghqk", a * jnp.asarray(scale, a.dtype), b, preferred_element_type=sum_dtype)
        row = i * rows + jnp.arange(rows)[:, None] + ahead
        column = j * columns + jnp.arange(columns)
        if mask is not None:
            sizes = [
                (f * n, n) if m > 1 else (0, 1) for f, n, m in zip((i, j), (rows, columns), mask.shape[3:], strict=True)
            ]
            seen = lax.dynamic_slice(mask, (0, 0, 0, *(f for f, _ in sizes)), (*mask.shape[:3], *(n for _, n in sizes)))
            s = jnp.where(seen, s, -jnp.inf)
        allowed = (column < keys) & (row >= column if causal else True)
        return jnp.where(allowed, s, -jnp.inf)

    def first_row(j):
        """Return the first block of queries that reads the j-th block of keys."""
        return jnp.clip((j * columns - ahead) // rows, 0, None) if causal else 0

    def last_column(i):
        """Return the number of blocks of keys that the i-th block of queries reads."""
        count = k.shape[2] // columns
        return jnp.clip(((i + 1) * rows - 1 + ahead) // columns + 1, 0, count) if causal else count

    return q, k, v, part, scores, (rows, columns), first_row, last_column


@needs(attention_blocks)
def attention_and_sums(q, k, v, mask, causal, scale, ahead):
    """Return attention, and the logarithms of the sums of its exponentials."""
    q5, _, v5, part, scores, (rows, columns), _, last_column = attention_blocks(q, k, v, mask, causal, scale, ahead)
    sum_dtype = jnp.promote_types(q.dtype, jnp.float32)

    def of_rows(i):
        def add(j, carried):
            y, highest, total = carried
            s = scores(i, j)
            maximum = jnp.maximum(highest, jnp.max(s, -1, keepdims=True))
            shift = jnp.where(maximum == -jnp.inf, 0, maximum)  # rows that have seen no key yet
            p, factor = jnp.exp(s - shift), jnp.exp(highest - shift)
            values = part(v5, j * columns, columns)
            part_y = jnp.einsum("bghqk,bgkd->bghqd", p.astype(v5.dtype), values, preferred_element_type=sum_dtype)
            return y * factor + part_y, maximum, total * factor + jnp.sum(p, -1, keepdims=True)

        shape = (*q5.shape[:3], rows)
        start = (
            jnp.zeros((*shape, v.shape[3]), sum_dtype),
            jnp.full((*shape, 1), -jnp.inf, sum_dtype),
            jnp.zeros((*shape, 1), sum_dtype),
        )
        y, highest, total = lax.fori_loop(0, last_column(i), add, start)
        return y / total, highest + jnp.log(total)

    y, logs = lax.map(of_rows, jnp.arange(q5.shape[3] // rows))

    def joined(x):  # [blocks, batch, groups, heads of a group, rows, size]
        x = jnp.moveaxis(x, 0, 3).reshape(*q.shape[:2], -1, x.shape[-1])
        return x[:, :, : q.shape[2]]

    return joined(y).astype(q.dtype), joined(logs)


@needs(attention_blocks)
def cotangents_of_blocks(g, y, logs, q, k, v, mask, causal, scale, ahead):
    """Return the cotangents of queries, keys and values, given the logarithms of the sums of all keys."""
    q5, k5, v5, part, scores, (rows, columns), first_row, _ = attention_blocks(q, k, v, mask, causal, scale, ahead)
    sum_dtype = jnp.promote_types(q.dtype, jnp.float32)

    def in_blocks(x):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % rows), (0, 0)))
        return x.reshape(*q5.shape[:4], x.shape[3])

    g5, logs5 = in_blocks(g), in_blocks(logs)
    total = in_blocks(jnp.sum(g.astype(sum_dtype) * y.astype(sum_dtype), -1, keepdims=True))

    def of_columns(gq, j):
        keys, values = (part(x, j * columns, columns) for x in (k5, v5))

        def add(i, carried):
            gq, gk, gv = carried
            a, c = part(q5, i * rows, rows), part(g5, i * rows, rows)
            p = jnp.exp(scores(i, j) - part(logs5, i * rows, rows))
            t = jnp.einsum("bghqd,bgkd->bghqk", c, values, preferred_element_type=sum_dtype)
            s = (p * (t - part(total, i * rows, rows)) * scale).astype(a.dtype)
            gv = gv + jnp.einsum("bghqk,bghqd->bgkd", p.astype(c.dtype), c, preferred_element_type=sum_dtype)
            gk = gk + jnp.einsum("bghqk,bghqd->bgkd", s, a, preferred_element_type=sum_dtype)
            part_q = part(gq, i * rows, rows) + jnp.einsum(
                "bghqk,bgkd->bghqd", s, keys, preferred_element_type=sum_dtype
            )
            return lax.dynamic_update_slice_in_dim(gq, part_q, i * rows, 3), gk, gv

        zeros = (jnp.zeros(keys.shape, sum_dtype), jnp.zeros(values.shape, sum_dtype))
        gq, gk, gv = lax.fori_loop(first_row(j), q5.shape[3] // rows, add, (gq, *zeros))
        return gq, (gk, gv)

    gq, parts = lax.scan(of_columns, jnp.zeros(q5.shape, sum_dtype), jnp.arange(k5.shape[2] // columns))
    gk, gv = (
        jnp.moveaxis(x, 0, 2)
        .reshape(*operand.shape[:2], -1, operand.shape[3])[:, :, : operand.shape[2]]
        .astype(operand.dtype)
        for x, operand in zip(parts, (k, v), strict=True)
    )
    return gq.reshape(*q.shape[:2], -1, q.shape[3])[:, :, : q.shape[2]].astype(q.dtype), gk, gv


@needs(attention_and_sums, cotangents_of_blocks)
def blocked_attention_grad(g, y, q, k, v, mask, causal, scale):
    """Return the cotangents of queries, keys and values."""
    ahead = k.shape[2] - q.shape[2]
    _, logs = attention_and_sums(q, k, v, mask, causal, scale, ahead)
    return cotangents_of_blocks(g, y, logs, q, k, v, mask, causal, scale, ahead)


@needs(attention_and_sums, blocked_attention_grad)
def blocked_attention(q, k, v, mask, causal, scale):
    """Return attention, which JAX differentiates by ``blocked_attention_grad``."""

    def forward(q, k, v):
        y, _ = attention_and_sums(q, k, v, mask, causal, scale, k.shape[2] - q.shape[2])
        return y, (y, q, k, v)

    def backward(saved, g):
        return blocked_attention_grad(g, *saved, mask, causal, scale)

    attention = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attention.defvjp(forward, backward)
    return attention(q, k, v)


# -- positions in parts ------------------------------------------------------------------------------------------------
def around_ring(visit, state, carried):
    """Call ``visit(state, carried, distance)`` for the keys of each device, which pass around the axis ``model``."""
    parts, device = lax.axis_size("model"), lax.axis_index("model")
    ring = [(k, (k + 1) % parts) for k in range(parts)]
    for step in range(parts):
        state, carried = visit(state, carried, device - (device - step) % parts)
        carried = jax.tree.map(lambda x: lax.ppermute(x, "model", ring), carried)
    return state, carried


@needs(attention_and_sums, around_ring)
def ring_sums(q, k, v, causal, scale):
    """Return attention of the queries of this device to the keys of all, and the logarithms of the sums."""

    def visit(state, carried, distance):
        y, logs = state
        part, of_part = attention_and_sums(q, *carried, None, causal, scale, distance * q.shape[2])
        total = jnp.logaddexp(logs, of_part)
        shift = jnp.where(total == -jnp.inf, 0, total)
        part = jnp.where(of_part == -jnp.inf, 0, part)  # keys after all queries
        return (y * jnp.exp(logs - shift) + part * jnp.exp(of_part - shift), total), carried

    sum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    start = jnp.zeros((*q.shape[:3], v.shape[3]), sum_dtype), jnp.full((*q.shape[:3], 1), -jnp.inf, sum_dtype)
    (y, logs), _ = around_ring(visit, start, (k, v))
    return y.astype(q.dtype), logs


def on_positions(function):
    """Return the function of arrays whose positions are split over the axis ``model``, as a function of a device."""
    split = jax.sharding.PartitionSpec(None, None, "model")
    return jax.shard_map(function, in_specs=split, out_specs=split, axis_names={"model"}, check_vma=False)


@needs(ring_sums, on_positions)
def ring_attention(q, k, v, causal, scale):
    """Return attention whose positions are split; keys and values of grouped heads travel once for each group."""
    return on_positions(lambda *qkv: ring_sums(*qkv, causal, scale)[0])(q, k, v)


@needs(ring_sums, cotangents_of_blocks, around_ring, on_positions)
def ring_attention_grad(g, y, q, k, v, causal, scale):
    """Return the cotangents of queries, keys and values; those of keys and values travel with them."""

    def on_device(g, y, q, k, v):
        _, logs = ring_sums(q, k, v, causal, scale)

        def visit(gq, carried, distance):
            k, v, gk, gv = carried
            parts = cotangents_of_blocks(g, y, logs, q, k, v, None, causal, scale, distance * q.shape[2])
            return gq + parts[0], (k, v, gk + parts[1], gv + parts[2])

        gq, (_, _, gk, gv) = around_ring(visit, jnp.zeros_like(q), (k, v, jnp.zeros_like(k), jnp.zeros_like(v)))
        return gq, gk, gv

    return on_positions(on_device)(g, y, q, k, v)
