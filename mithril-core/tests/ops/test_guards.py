"""Each assumption that an operation makes about open sizes is a guard of the graph, with its reason."""

from __future__ import annotations

import pytest

import mithril.models  # noqa: F401, registers the operations of layers
from mithril import ops
from mithril.graph import Builder, Dim, operation

M, N = Dim("M"), Dim("N")


FLOAT, INT = "float32", "int32"
CASES = {  # reason: operation, shapes of operands, dtypes of operands, guards
    "operands broadcast together": (ops.add, [(M,), (N,)], FLOAT, ["M == N"]),
    "a reshape keeps the number of elements": (lambda x: ops.reshape(x, shape=(N, 2)), [(M,)], FLOAT, ["M == 2*N"]),
    "an array is broadcast to a shape": (lambda x: ops.broadcast_to(x, shape=(N,)), [(M,)], FLOAT, ["M == N"]),
    "argmax and argmin require a non-empty axis": (lambda x: ops.argmax(x, axis=0), [(M,)], FLOAT, ["1 <= M"]),
    "einsum letter 'i'": (lambda x, y: ops.einsum(x, y, equation="i,i->"), [(M,), (N,)], FLOAT, ["M == N"]),
    "the indexed axis 0 is not empty": (lambda x, k: ops.take(x, k, axis=0), [(M,), (N,)], (FLOAT, INT), ["1 <= M"]),
    "kernel and image have the same number of channels": (
        lambda x, w: ops.conv(x, w), [(2, M, 5, 5), (4, N, 3, 3)], FLOAT, ["N == M"]
    ),
    "groups divide the output channels": (
        lambda x, w: ops.conv(x, w, groups=2), [(2, 6, 5, 5), (M, 3, 3, 3)], FLOAT, ["2 divides M"]
    ),
    "a window fits spatial axis 0": (lambda x, w: ops.conv(x, w), [(2, 3, M, 9), (4, 3, 3, 3)], FLOAT, ["3 <= M"]),
    "a window fits spatial axis 1": (lambda x, w: ops.conv(x, w), [(2, 3, 9, M), (4, 3, 3, 3)], FLOAT, ["3 <= M"]),
    "a slice fits axis 0": (
        lambda x, k: ops.dynamic_slice(x, k, sizes=(2,)), [(M,), (1,)], (FLOAT, INT), ["2 <= M"]
    ),
    "each row has a start": (
        lambda x, u, k: operation("dynamic_update_rows")(x, u, k, axis=1),
        [(M, 4), (M, 2), (N,)], (FLOAT, FLOAT, INT), ["N == M"]
    ),
    "a slice of axis 0 starts within it": (
        lambda x: operation("slice")(x, starts=(M - 5,), stops=(M,), steps=(1,), axes=(0,)), [(M,)], FLOAT, ["0 <= M-5"]
    ),
    "a slice of axis 0 stops within it": (
        lambda x: operation("slice")(x, starts=(0,), stops=(N,), steps=(1,), axes=(0,)), [(M,)], FLOAT, ["N <= M"]
    ),
    "the sizes of a split add up to that of axis 0": (
        lambda x: ops.split(x, sizes=(M, 2), axis=0), [(N,)], FLOAT, ["M+2 == N"]
    ),
    "axis 0 is rolled by at most its size": (lambda x: ops.roll(x, shift=2, axis=0), [(M,)], FLOAT, ["2 <= M"]),
    "axis 0 has an edge": (lambda x: ops.pad(x, widths=((1, 1),), mode="edge"), [(M,)], FLOAT, ["1 <= M"]),
    "axis 0 reflects its own elements": (
        lambda x: ops.pad(x, widths=((2, 0),), mode="reflect"), [(M,)], FLOAT, ["2 <= M-1"]
    ),
    "the weight of 'cross_entropy'": (
        lambda x, t, w: ops.cross_entropy(x, t, w), [(2, M), (2,), (N,)], (FLOAT, INT, FLOAT), ["N == M"]
    ),
    "labels of 'cross_entropy'": (ops.cross_entropy, [(M, 4), (N,)], (FLOAT, INT), ["M == N"]),
    "'mse_loss' compares 'predictions' and 'targets' element by element": (
        ops.mse_loss, [(M,), (N,)], FLOAT, ["M == N"]
    ),
    "'scores' of 'nms'": (lambda x, s: ops.nms(x, s, size=2), [(M, 4), (N,)], FLOAT, ["N == M"]),
    "the batch of 'grid_sample'": (ops.grid_sample, [(M, 3, 4, 4), (N, 2, 2, 2)], FLOAT, ["M == N"]),
    "'label_lengths' of 'ctc_loss'": (
        lambda x, t, n: ops.ctc_loss(x, t, label_lengths=n), [(3, 6, 5), (3, 2), (N,)], (FLOAT, INT, INT), ["N == 3"]
    ),
    "a cotangent has the shape of the result": (
        lambda g, x: operation("max_pool_grad")(g, x, kernel=(2, 2), stride=(2, 2)),
        [(M, 3, 2, 2), (N, 3, 4, 4)], FLOAT,
        ["M == N"],
    ),
    "the cotangent has the shape of the result": (
        lambda g, w: operation("conv_input_grad")(g, w, shape=(2, 3, 5, 5)),
        [(M, 4, 3, 3), (4, 3, 3, 3)], FLOAT, ["M == 2"]
    ),
    "the length of a scan is not negative": (
        lambda s: ops.scan(lambda c, _: (c + 1.0, None), s, length=M - 3)[0], [()], FLOAT, ["0 <= M-3"],
    ),
    "'pos_weight' has the last sizes of the logits": (
        lambda x, t, w: ops.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        [(2, M), (2, M), (N,)], FLOAT, ["M == N"]
    ),
    "the batch of 'ctc_loss'": (ops.ctc_loss, [(M, 6, 5), (N, 2)], (FLOAT, INT), ["M == N"]),
}  # fmt: skip


@pytest.mark.parametrize("reason", CASES)
@pytest.mark.parametrize("_again", ["first", "cached"])
def test_an_assumption_is_a_guard(reason, _again):
    write, shapes, dtypes, guards = CASES[reason]
    dtypes = dtypes if isinstance(dtypes, tuple) else [dtypes] * len(shapes)
    with Builder() as b:
        operands = [b.input(f"x{k}", s, d) for k, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        results = write(*operands)
    graph = b.build({f"y{k}": v for k, v in enumerate(results if isinstance(results, tuple) else (results,))})
    assert [str(g) for g in graph.guards if g.reason == reason] == guards, [(str(g), g.reason) for g in graph.guards]
