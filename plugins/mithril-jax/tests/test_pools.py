"""Where the maxima of windows lie is found point by point: a gather makes XLA keep the numbers of all windows."""

from __future__ import annotations

import jax

import mithril as ml
from mithril.ir import Builder


def test_positions_of_maxima_need_no_gather():
    with Builder() as b:
        x = b.input("x", (2, 8, 32, 32))
        at = ml.ops.max_pool_positions(x, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
    executable = ml.JaxBackend().build(b.build({"at": at}))
    program = jax.jit(lambda image: executable({}, {"x": image})).lower(jax.ShapeDtypeStruct((2, 8, 32, 32), "float32"))
    assert "stablehlo.gather" not in program.as_text()
