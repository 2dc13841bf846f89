"""JAX's own cases of its primitives: each is imported and compared with JAX.

``python benchmarks/operators_jax.py --backend numpy --cases 4 [GROUP ...]`` prints one line per case, evenly chosen in
each group, and the totals on standard error.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from collections import Counter, defaultdict
from typing import Any

import jax
import numpy as np

import mithril as ml
from mithril.graph import MithrilError

jax.config.update("jax_enable_x64", True)  # before the cases are made
from jax._src.internal_test_util.test_harnesses import all_harnesses  # noqa: E402

TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-6}
UP_TO_SIGN = frozenset({"eigh", "svd", "qr", "eig"})  # vectors of these factorizations are defined up to signs


def groups() -> dict[str, list[Any]]:
    """Return the cases that JAX itself runs on the CPU, by primitive."""
    cases_of = defaultdict(list)
    for case in all_harnesses:
        if case.filter("cpu"):
            cases_of[case.group_name].append(case)
    return dict(cases_of)


def evenly(cases: list[Any], count: int) -> list[Any]:
    step = max(len(cases) / count, 1.0)
    return [cases[int(k * step)] for k in range(min(count, len(cases)))]


def check(case: Any, backend: str) -> str:
    """Return ``equal``, or the class of the difference and its reason."""
    arguments = case.dyn_args_maker(np.random.RandomState(0))
    try:
        expected = jax.tree_util.tree_leaves(jax.jit(case.dyn_fun)(*arguments))
    except Exception as error:
        return f"jax: {type(error).__name__}: {first_line(error)}"
    leaves, tree = jax.tree_util.tree_flatten(tuple(arguments))
    try:
        pairs = [np.iscomplexobj(x) for x in leaves]
        function = _of_real_parts(case.dyn_fun, tree, pairs)
        values = [
            np.stack([np.real(x), np.imag(x)], -1) if p else np.asarray(x) for x, p in zip(leaves, pairs, strict=True)
        ]
        model = ml.from_jax(function, *values)
        compiled = ml.compile(model, backend, inference=True, optimization_level="low")
        results = compiled.evaluate(dict(zip(model.inputs, values, strict=True))).values()
    except MithrilError as error:
        return f"refused: {first_line(error)}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {first_line(error)}"
    for number, (value, reference) in enumerate(zip(map(np.asarray, results), map(_real, expected), strict=True)):
        if number and not case.params.get("is_stable", True):
            break  # the order of equal keys is not defined
        problem = difference(case.group_name, value, reference)
        if problem:
            return f"wrong: result {number}: {problem}"
    return "equal"


def _real(x: Any) -> Any:
    """Return the array of a result; complex numbers are pairs, and keys their bits."""
    x = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    x = np.asarray(x)
    return np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x


def _of_real_parts(function: Any, tree: Any, pairs: list[bool]) -> Any:
    """Return the function of pairs of reals for complex operands and results, which models have not."""

    def run(*values: Any) -> list[Any]:
        operands = [jax.lax.complex(v[..., 0], v[..., 1]) if p else v for v, p in zip(values, pairs, strict=True)]
        results = jax.tree_util.tree_leaves(function(*jax.tree_util.tree_unflatten(tree, operands)))
        return [
            jax.numpy.stack([r.real, r.imag], -1)
            if jax.numpy.issubdtype(r.dtype, np.complexfloating)
            else jax.random.key_data(r)
            if jax.numpy.issubdtype(r.dtype, jax.dtypes.prng_key)
            else r
            for r in results
        ]

    names = (f"x{k}" for k in range(len(pairs)))
    run.__signature__ = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return run


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["without a message"]
    return lines[0][:300]


def difference(name: str, value: Any, reference: Any) -> str:
    """Return the difference of two results, or an empty text."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return f"{value.dtype}{value.shape}, in JAX {reference.dtype}{reference.shape}"
    relative = TOLERANCE.get(str(reference.dtype), 0.0)
    absolute = max(relative / 10, 1e-6) if relative else 0.0
    if relative:
        value, reference = value.astype(np.float64), reference.astype(np.float64)
    if name in UP_TO_SIGN:
        value, reference = np.abs(value), np.abs(reference)
    if name == "cholesky":
        value, reference = np.tril(value), np.tril(reference)  # the other triangle is not defined
    differs = ~np.isclose(value, reference, rtol=relative, atol=absolute, equal_nan=True)
    if not differs.any():
        return ""
    place = tuple(int(k) for k in np.argwhere(differs)[0])
    return f"{differs.sum()} of {differs.size}, at {place} {value[place]} for {reference[place]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--cases", type=int, default=4)
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    totals: Counter[str] = Counter()
    for name, cases in groups().items():
        if settings.groups and name not in settings.groups:
            continue
        for case in evenly(cases, settings.cases):
            result = check(case, settings.backend)
            totals[result.split(":")[0]] += 1
            print(f"{case.fullname[:150]}: {result}", flush=True)
    print(dict(totals), file=sys.stderr)


if __name__ == "__main__":
    main()
