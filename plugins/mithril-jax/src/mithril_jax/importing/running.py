"""Imported functions run by JAX itself, for comparison with the imported model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mithril.graph import InputError
from mithril_jax.importing.scopes import Names


@dataclass(frozen=True, eq=False)
class Call:
    """How the function is called: the tree of its arguments, of which parameters come first."""

    tree: Any
    inputs: tuple[str, ...]
    random_keys: frozenset[str]  # inputs that are keys of jax.random

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        return self

    def arguments(self, parameters: Sequence[Any], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of the function for arrays by name."""
        leaves = [jax.random.wrap_key_data(inputs[n]) if n in self.random_keys else inputs[n] for n in self.inputs]
        arguments: tuple[Any, ...] = jax.tree_util.tree_unflatten(self.tree, [*parameters, *leaves])
        return arguments


def run_function(
    function: Callable[..., Any], arguments: tuple[Any, ...], imported: Any, names: Names
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of a function with the equations of the imported jaxpr, by the names of variables there."""
    closed = jax.make_jaxpr(function)(*arguments)
    equations = closed.jaxpr.eqns
    if [e.primitive.name for e in equations] != [e.primitive.name for e in imported.eqns]:
        raise InputError(
            "the function traces to other primitives than when it was imported", hint="give the imported function"
        )
    pairs = zip(equations, imported.eqns, strict=True)
    variables = [pair for traced, target in pairs for pair in zip(traced.outvars, target.outvars, strict=True)]
    arrays_by_name = {
        names.of(target): traced for traced, target in variables if names.of(target) and _is_array(traced)
    }
    every = core.ClosedJaxpr(
        closed.jaxpr.replace(outvars=list(arrays_by_name.values()), debug_info=None), closed.consts
    )
    results = core.jaxpr_as_fun(every)(*jax.tree_util.tree_leaves(arguments))
    yield from zip(arrays_by_name, map(np.asarray, results), strict=True)


def _is_array(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind != "c"
