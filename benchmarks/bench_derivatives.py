"""Rows and derivatives against ``jax.vmap``, ``jax.jvp``, ``jax.jacobian`` and ``jax.hessian`` of the same function.

``python benchmarks/bench_derivatives.py``: microseconds of processor time on one thread, the best of many interleaved
rounds, and the largest difference of values, relative to the largest value. Both sides are compiled by ``jax.jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import mithril as ml
from mithril import ops

RNG = np.random.default_rng(0)
WIDTH, HIDDEN, OUT, BATCH = 32, 64, 8, 256


def weights() -> dict[str, Any]:
    shapes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, HIDDEN), "w3": (HIDDEN, OUT)}
    return {n: (RNG.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for n, s in shapes.items()}


W = weights()
X = RNG.normal(size=(WIDTH,)).astype(np.float32)
T = RNG.normal(size=(WIDTH,)).astype(np.float32)
ROWS = RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def network(x: Any, w1: Any, w2: Any, w3: Any) -> Any:
    return ops.softmax(ops.tanh(ops.gelu(x @ w1) @ w2) @ w3)


def reference(x: Any, w1: Any, w2: Any, w3: Any) -> Any:
    return jax.nn.softmax(jnp.tanh(jax.nn.gelu(x @ w1, approximate=False) @ w2) @ w3)


def energy(*values: Any) -> Any:
    return ops.sum(ops.square(network(*values)))


def reference_energy(*values: Any) -> Any:
    return jnp.sum(jnp.square(reference(*values)))


def graph(function: Callable[..., Any]) -> ml.Graph:
    with ml.Builder() as b:
        y = function(b.input("x", (WIDTH,)), *[b.input(n, w.shape) for n, w in W.items()])
    return b.build({"y": y})


def cases() -> dict[str, tuple[ml.Graph, str, dict[str, Any], Callable[..., Any], tuple[Any, ...]]]:
    """Return for each row: our graph, the output and the inputs that count, and JAX's function and arguments."""
    forward, scalar = graph(network), graph(energy)
    shared = dict.fromkeys(W)
    x = {"x": X, **W}
    rows = {"x": ROWS, **W}
    axes = (0, *[None] * len(W))
    by_rows = ml.vmap(ml.jacobian(forward, wrt="x"), shared, size=BATCH)
    per_sample = ml.vmap(ml.grad(scalar, wrt="w2"), shared, size=BATCH)
    gradient = jax.grad(reference_energy)

    def product(x: Any, t: Any, *w: Any) -> Any:
        return jax.jvp(lambda x: gradient(x, *w), (x,), (t,))[1]

    def forward_product(x: Any, t: Any, *w: Any) -> Any:
        return jax.jvp(lambda x: reference(x, *w), (x,), (t,))[1]

    w = tuple(W.values())
    tangent = {"tangent/x": T}
    return {
        "vmap, 256 rows": (ml.vmap(forward, shared, size=BATCH), "y", rows, jax.vmap(reference, axes), (ROWS, *w)),
        "gradients by w2 of 256 rows": (
            per_sample, "grad/w2", rows, jax.vmap(jax.grad(reference_energy, 2), axes), (ROWS, *w),
        ),
        "jvp": (ml.jvp(forward, wrt="x"), "tangent/y", x | tangent, forward_product, (X, T, *w)),
        "jacobian": (ml.jacobian(forward, wrt="x"), "jacobian/y/x", x, jax.jacobian(reference), (X, *w)),
        "jacobians of 256 rows": (by_rows, "jacobian/y/x", rows, jax.vmap(jax.jacobian(reference), axes), (ROWS, *w)),
        "hvp": (ml.hvp(scalar, wrt="x"), "hvp/x", x | tangent, product, (X, T, *w)),
        "hessian by x": (ml.hessian(scalar, wrt="x"), "hessian/x", x, jax.hessian(reference_energy), (X, *w)),
        "hessian by w3": (
            ml.hessian(scalar, wrt="w3"), "hessian/w3", x, jax.hessian(reference_energy, 3), (X, *w),
        ),
    }  # fmt: skip


def difference(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def main() -> None:
    harness.arguments(__doc__)
    print(f"{'':30} {'mithril':>9} {'jax':>9} {'ratio':>6} {'difference':>11}")
    for name, (transformed, output, inputs, function, arguments) in cases().items():
        compiled = ml.compile(transformed, "jax", outputs=[output])
        device_inputs: Mapping[str, Any] = {n: jnp.asarray(v) for n, v in inputs.items()}
        jitted = jax.jit(function)
        values = tuple(jnp.asarray(a) for a in arguments)
        error = difference(compiled.evaluate({}, device_inputs)[output], jitted(*values))
        ways = {
            "mithril": lambda c=compiled, p=device_inputs, o=output: c.evaluate({}, p)[o].block_until_ready(),
            "jax": lambda f=jitted, v=values: f(*v).block_until_ready(),
        }
        best = harness.interleaved(ways)
        ratio = best["mithril"] / best["jax"]
        print(f"{name:30} {best['mithril'] * 1e6:9.1f} {best['jax'] * 1e6:9.1f} {ratio:6.2f} {error:11.1e}")


if __name__ == "__main__":
    main()
