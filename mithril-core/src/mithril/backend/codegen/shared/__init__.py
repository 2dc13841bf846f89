"""Helper functions shared by the numpy, jax, torch and mlx backends, written in terms of ``xp``; see `Dialect`."""

import inspect

from mithril.backend.codegen.shared import (
    complex_numbers,
    factors,
    indexing,
    integers,
    pooling,
    random_words,
    reductions,
)
from mithril.backend.codegen.shared.dialect import Dialect, xp

# Helpers that all backends of generated Python share: name of the operation, module of the function.
HELPERS = {
    name: function
    for module in (integers, reductions, factors, indexing, pooling, random_words, complex_numbers)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
}

__all__ = [
    "HELPERS",
    "Dialect",
    "complex_numbers",
    "factors",
    "indexing",
    "integers",
    "pooling",
    "random_words",
    "reductions",
    "xp",
]
