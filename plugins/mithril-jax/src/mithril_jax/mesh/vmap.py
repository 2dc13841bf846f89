"""``vectorize=True``: the program for a single example, mapped over the leading axis by ``jax.vmap``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mithril.backend import Forward
from mithril.graph import Decisions, Dim, DType, Graph, Input, Symbol, UnsupportedError, substitute, symbols

TRIED = 3  # number of random examples on which the vectorized program is compared with the original


def vectorized(forward: Forward, graph: Graph, decisions: Decisions) -> Forward:
    """Map ``forward`` over single examples; return ``forward`` itself if the number of examples is static."""
    size = _batch(graph)
    if size is None:
        decisions.record(
            "ignored",
            "vectorize=True maps over a leading axis of symbolic size, but its size is fixed: XLA vectorizes the "
            "program itself (pass shapes={'input': [None, ...]} for a symbolic size)",
        )
        return forward
    function = Vectorized(forward, graph, size)
    function.compare()
    return function


def _batch(graph: Graph) -> Dim | None:
    """Return the symbolic leading size that all inputs share, or None."""
    sizes = [i.type.shape[0] for i in graph.with_role("input", "cotangent") if i.type.shape]
    dims = [n for n in sizes if isinstance(n, Dim)]
    if not dims or any(n != dims[0] for n in dims):
        return None
    ((monomial, factor), *other_terms) = dims[0].terms
    plain = not other_terms and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol)
    return dims[0] if plain else None


class Vectorized:
    """A vectorized function. Outputs with the leading axis are concatenated; others, such as gradients, are summed."""

    def __init__(self, forward: Forward, graph: Graph, size: Dim) -> None:
        self.forward = forward
        self.graph = graph
        self.size = size
        batched = [i for i in graph.with_role("input", "cotangent") if i.type.shape]
        self.rows = {i.name for i in batched if i.type.shape[0] == size}
        types = zip(graph.output_names, graph.outputs, strict=True)
        self.side = {n: bool(v.type.shape) and _mentions(v.type.shape[0], size) for n, v in types}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        rows = {n: x[:, None] for n, x in inputs.items() if n in self.rows}
        rest = {n: x for n, x in inputs.items() if n not in self.rows}
        results = jax.vmap(lambda row: self.forward(params, {**rest, **row}))(rows)
        return {name: self._merge(name, x) for name, x in results.items()}

    def _merge(self, name: str, x: Any) -> Any:
        return x.reshape((-1, *x.shape[2:])) if self.side[name] else x.sum(axis=0, dtype=x.dtype)

    def compare(self) -> None:
        """Raise UnsupportedError if mapping changes the results, as it does if the model mixes examples."""
        sizes = self._sizes()
        numbers = np.random.default_rng(0)
        arguments = {i.name: _random(i, sizes, numbers) for i in self.graph.arguments}
        params = {i.name: arguments.pop(i.name) for i in self.graph.with_role("param")}
        inputs = arguments
        try:
            expected, results = _jit_unoptimized(lambda p, i: (self.forward(p, i), self(p, i)))(params, inputs)
        except (TypeError, ValueError) as error:
            raise self._mixed([str(error).splitlines()[0]]) from None
        for name, x in expected.items():
            if not _same(x, results[name]):
                raise self._mixed([f"output '{name}' is not the same when its examples are computed one at a time"])

    def _sizes(self) -> dict[str, int]:
        """Return small distinct values for the symbolic sizes, within their bounds."""
        sizes = {}
        for k, s in enumerate(symbols(self.size, *(n for i in self.graph.arguments for n in i.type.shape))):
            target = max(s.low, TRIED + k)
            sizes[s.name] = target if s.high is None else min(s.high, target)
        return sizes

    def _mixed(self, facts: Sequence[str]) -> UnsupportedError:
        return UnsupportedError(
            "vectorize=True computes each example separately, but this model mixes the examples of a batch",
            facts=facts,
            hint="omit vectorize: XLA vectorizes the program itself",
        )


def _jit_unoptimized(function: Any) -> Any:
    """Jit without optimization: for a single run only the compile time matters."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _mentions(size: Any, symbolic: Dim) -> bool:
    return isinstance(size, Dim) and bool({s.name for s in symbols(symbolic)} & {s.name for s in symbols(size)})


def _random(i: Input, sizes: Mapping[str, int], numbers: np.random.Generator) -> Any:
    shape = tuple(int(substitute(n, sizes)) for n in i.type.shape)
    return jnp.asarray(_draw(i.type.dtype, shape, numbers))


def _draw(dtype: DType, shape: tuple[int, ...], numbers: np.random.Generator) -> np.ndarray[Any, Any]:
    if dtype.is_float:
        return numbers.uniform(0.1, 1.0, shape).astype(dtype.numpy)
    return numbers.integers(0, 2 if dtype.is_bool else 100, shape).astype(dtype.numpy)


def _same(left: Any, right: Any) -> bool:
    a, b = (np.asarray(x) for x in (left, right))
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "iub":
        return bool((a == b).all())
    rtol = 5e-2 if a.dtype.itemsize == 2 else 1e-3
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=rtol * 0.1, equal_nan=True))
