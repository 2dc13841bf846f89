"""``vectorize=True``: the program of a single example, mapped over the leading axis by ``jax.vmap``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mithril.backend import Forward
from mithril.base import Decisions, Dim, DType, Symbol, UnsupportedError, substitute, symbols
from mithril.ir import Graph, Input

TRIED = 3  # examples of random numbers that a mapped program is compared on


def mapped(forward: Forward, graph: Graph, decisions: Decisions) -> Forward:
    """``forward`` for each example on its own; itself where the number of examples is fixed."""
    size = _batch(graph)
    if size is None:
        decisions.record(
            "ignored",
            "vectorize=True maps over a leading axis of any size, and this program's is fixed: XLA vectorizes it whole "
            "(shapes={'input': [None, ...]} leaves it open)",
        )
        return forward
    made = Mapped(forward, graph, size)
    made.compare()
    return made


def _batch(graph: Graph) -> Dim | None:
    """The leading size that inputs have in common, where it is symbolic."""
    sizes = [i.type.shape[0] for i in graph.with_role("input", "cotangent") if i.type.shape]
    found = [n for n in sizes if isinstance(n, Dim)]
    if not found or any(n != found[0] for n in found):
        return None
    ((monomial, factor), *others) = found[0].terms
    plain = not others and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol)
    return found[0] if plain else None


class Mapped:
    """Outputs with the leading axis are laid side by side; those without, as a weight's gradient, are added up."""

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
        made = jax.vmap(lambda row: self.forward(params, {**rest, **row}))(rows)
        return {name: self._joined(name, x) for name, x in made.items()}

    def _joined(self, name: str, x: Any) -> Any:
        return x.reshape((-1, *x.shape[2:])) if self.side[name] else x.sum(axis=0, dtype=x.dtype)

    def compare(self) -> None:
        """Raise where mapping changes the results, which it does where examples of a batch are mixed."""
        sizes = self._sizes()
        numbers = np.random.default_rng(0)
        arguments = {i.name: _random(i, sizes, numbers) for i in self.graph.arguments}
        params = {i.name: arguments.pop(i.name) for i in self.graph.with_role("param")}
        inputs = arguments
        try:
            expected, found = _cheaply(lambda p, i: (self.forward(p, i), self(p, i)))(params, inputs)
        except (TypeError, ValueError) as error:
            raise self._mixed([str(error).splitlines()[0]]) from None
        for name, x in expected.items():
            if not _same(x, found[name]):
                raise self._mixed([f"output '{name}' is not the same when its examples are computed one by one"])

    def _sizes(self) -> dict[str, int]:
        """A few for the examples, and others for the other unknown sizes, within what is promised of them."""
        sizes = {}
        for k, s in enumerate(symbols(self.size, *(n for i in self.graph.arguments for n in i.type.shape))):
            wanted = max(s.low, TRIED + k)
            sizes[s.name] = wanted if s.high is None else min(s.high, wanted)
        return sizes

    def _mixed(self, facts: Sequence[str]) -> UnsupportedError:
        return UnsupportedError(
            "vectorize=True computes each example on its own, and this model mixes the examples of a batch",
            facts=facts,
            hint="leave vectorize out: XLA vectorizes the program as it is",
        )


def _cheaply(function: Any) -> Any:
    """Jitted for a single run: compiling counts, speed does not."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _mentions(size: Any, wanted: Dim) -> bool:
    return isinstance(size, Dim) and bool({s.name for s in symbols(wanted)} & {s.name for s in symbols(size)})


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
    loose = 5e-2 if a.dtype.itemsize == 2 else 1e-3
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=loose, atol=loose * 0.1, equal_nan=True))
