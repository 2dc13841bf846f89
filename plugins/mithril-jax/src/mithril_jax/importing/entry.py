"""``ml.from_jax``: a function of JAX as a model."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from traceback import extract_tb
from typing import Any

import jax
import numpy as np

from mithril.graph import InputError, MithrilError, UnsupportedError
from mithril.models import Model
from mithril_importing.arrays import as_value
from mithril_importing.layers import ImportedLayer
from mithril_importing.model import model_of
from mithril_importing.names import leaf_names, result_names
from mithril_importing.patterns import known_layer
from mithril_jax.importing import custom
from mithril_jax.importing.complex_numbers import is_complex
from mithril_jax.importing.interpreter import Interpreter, require_supported
from mithril_jax.importing.running import Call, run_function
from mithril_jax.importing.scopes import JaxprRun, Names, region_of


def from_jax(
    function: Callable[..., Any],
    *examples: Any,
    params: Any = None,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
) -> Model:
    """Return a function of JAX arrays as a model, traced to a jaxpr for inputs like ``examples``.

    With ``params``, a tree of arrays, the function is ``function(params, *examples)``; its leaves become trainable
    parameters, named by their path. ``dynamic_shapes`` names the open sizes of inputs by axis: ``{"x": {0: "batch"}}``.
    Control flow and custom derivatives are retained, and transformed functions such as ``jax.grad(f)`` are functions.
    """
    if hasattr(function, "apply") and getattr(function, "scope", function) is None:
        raise InputError(
            f"ml.from_jax requires a function, got the Flax module {type(function).__name__} without its variables",
            hint="import its apply: ml.from_jax(module.apply, x, params=variables)",
        )
    names = _names(function, examples, params is not None)
    paths, _ = jax.tree_util.tree_flatten_with_path(dict(enumerate(examples)))
    tails = [(names[path[0].key], *path[1:]) for path, _ in paths]
    inputs = {name: _type(name, x) for name, (_, x) in zip(leaf_names(tails), paths, strict=True)}
    arrays = _parameters(params) if params is not None else {}
    symbols, shapes = _symbolic(inputs, dynamic_shapes or {})
    leaves, tree = jax.tree_util.tree_flatten(examples)
    structures = [
        x if _is_key(x) else jax.ShapeDtypeStruct(shapes[name], kind)
        for x, (name, (_, kind)) in zip(leaves, inputs.items(), strict=True)
    ]
    arguments = jax.tree_util.tree_unflatten(tree, structures)
    arguments = (params, *arguments) if params is not None else arguments
    keys_of_random = frozenset(name for x, name in zip(leaves, inputs, strict=True) if _is_key(x))
    call = Call(jax.tree_util.tree_structure(arguments), tuple(inputs), keys_of_random)
    try:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    except MithrilError:
        raise
    except Exception as error:  # of JAX, or of the function
        raise _not_traced(error) from error
    require_supported(closed.jaxpr)
    _require_real(closed)
    layer = JaxFunction(closed, arrays, tuple(inputs), _output_names(results), symbols, call)
    sizes = {name: [s if isinstance(s, int) else str(s) for s in shapes[name]] for name in inputs}
    return model_of(layer, {name: (sizes[name], str(kind)) for name, (_, kind) in inputs.items()})


def _not_traced(error: Exception) -> UnsupportedError:
    """Return the error for a function that JAX cannot trace, with the user's line."""
    frames = [f for f in extract_tb(error.__traceback__) if not re.search(r"[/\\](jax|mithril_jax)[/\\]", f.filename)]
    lines = str(error).strip().splitlines()
    return UnsupportedError(
        f"JAX cannot trace this function: {type(error).__name__}: {lines[0] if lines else 'without a message'}",
        facts=[f"in {frames[-1].filename}:{frames[-1].lineno}"] if frames else (),
        hint="check that jax.jit(function)(*examples) runs; ml.from_jax(function, *inputs, params=tree) calls "
        "function(tree, *inputs)",
    )


def _require_real(closed: Any) -> None:
    for kind, avals in (("inputs", closed.in_avals), ("results", closed.out_avals)):
        if any(is_complex(a) for a in avals):
            raise UnsupportedError(
                f"complex {kind} of a function cannot be expressed: backends compute with real numbers",
                hint="pass and return jnp.real(x) and jnp.imag(x)",
            )


class JaxFunction(ImportedLayer):
    """A traced function: it interprets the jaxpr for values of the graph."""

    scalars = False

    def __init__(
        self,
        closed: Any,
        arrays: dict[str, Any],
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        symbols: dict[str, Any],
        call: Call,
    ) -> None:
        self.program, self.call = Traced(closed, tuple(arrays)), call
        shapes = {name: tuple(x.shape) for name, x in arrays.items()}
        super().__init__("", [region_of(closed.jaxpr, self.program.names)], known_layer(shapes))
        self.pretrained = arrays
        self.input_names, self.output_names, self.symbols = input_names, output_names, symbols

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.input_names

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.output_names

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.program.digest, tuple(self.pretrained), self.input_names, self.output_names, tuple(self.layers))

    def build(self, *values: Any) -> Any:
        by_name = dict(zip(self.input_names, values, strict=True))
        sizes = {symbol: by_name[name].shape[axis] for symbol, (name, axis) in self.symbols.items()}
        jaxpr, names = self.program.closed.jaxpr, self.program.names
        arguments = dict(zip(map(names.of, jaxpr.invars[len(self.pretrained) :]), values, strict=True))
        constants = dict(zip(map(names.of, jaxpr.constvars), map(np.asarray, self.program.closed.consts), strict=True))
        interpreter = Interpreter(self.context.path, sizes)
        run = JaxprRun(self, {**constants, **arguments}, interpreter, names, self.pretrained)
        with run.active():
            run.interpret(self, self.regions[0], [run.values[name] for name in self.regions[0].reads])
            for name in self.pretrained:
                if not run.has_declared(name):
                    run.tensor(name)
            return tuple(as_value(run.read(v)) for v in jaxpr.outvars)

    def run_source(
        self, source: Any, inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> tuple[Iterator[tuple[str, np.ndarray[Any, Any]]], Mapping[str, np.ndarray[Any, Any]]]:
        """Return the arrays that a function computes, by the variable that imports them, and its results."""
        if not callable(source):
            raise InputError(f"the source of this model is a function, got {type(source).__name__}")
        arguments = self.call.arguments(list(self.pretrained.values()), inputs)
        results = source(*arguments)
        outputs = dict(zip(_output_names(results), map(np.asarray, jax.tree_util.tree_leaves(results)), strict=True))
        return run_function(source, arguments, self.program.closed.jaxpr, self.program.names), outputs


class Traced:
    """A jaxpr with its digest, whose first arguments are parameters."""

    def __init__(self, closed: Any, parameters: tuple[str, ...]) -> None:
        self.closed, self.names = closed, Names(closed.jaxpr, parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        return self  # nothing modifies it

    @cached_property
    def digest(self) -> str:
        """A digest of the jaxpr, of its constants and of the custom derivatives, which its text does not contain."""
        text = hashlib.sha256(str(self.closed.jaxpr).encode())
        for constant in map(np.asarray, self.closed.consts):
            text.update(repr((constant.shape, str(constant.dtype))).encode() + constant.tobytes())
        for equation in custom.equations(self.closed.jaxpr):
            if equation.primitive.name in custom.CUSTOM and custom.is_users(equation):
                text.update(str(custom.tangents(equation)).encode())
        return text.hexdigest()


# -- names --------------------------------------------------------------------------------------------------------
def _names(function: Callable[..., Any], examples: tuple[Any, ...], has_params: bool) -> list[str]:
    """Return the names of the positional arguments, those of the function where it has any."""
    try:
        parameters = [
            p.name for p in inspect.signature(function).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
    except (TypeError, ValueError):
        parameters = []
    parameters = parameters[1:] if has_params else parameters
    return [parameters[k] if k < len(parameters) else f"x{k}" for k in range(len(examples))]


def _parameters(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the leaves of a tree by their paths; Flax's variables hold their arrays in an attribute."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path[:-1] if [getattr(k, "name", "") for k in path[-1:]] in HELD else path for path, _ in leaves]
    names = leaf_names((path or ("params",) for path in paths), ".")
    return {name: np.asarray(x) for name, (_, x) in zip(names, leaves, strict=True)}


HELD = (["value"], ["raw_value"])


def _output_names(results: Any) -> tuple[str, ...]:
    return result_names(path for path, _ in jax.tree_util.tree_flatten_with_path(results)[0])


# -- types --------------------------------------------------------------------------------------------------------
def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _type(name: str, x: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of an example; a key is two numbers."""
    if _is_key(x):
        return (*x.shape, 2), np.dtype("uint32")
    if isinstance(x, (bool, int, float, np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
        aval = jax.eval_shape(lambda a: a, x)
        return tuple(aval.shape), np.dtype(aval.dtype)
    raise InputError(
        f"example '{name}' is a {type(x).__name__}, not an array", hint="bind other arguments by functools.partial"
    )


def _symbolic(
    inputs: Mapping[str, tuple[tuple[int, ...], Any]], dynamic_shapes: Mapping[str, Mapping[int, str]]
) -> tuple[dict[str, tuple[str, int]], dict[str, tuple[Any, ...]]]:
    """Return where each symbol is found, and the shapes of inputs with symbolic sizes."""
    unknown = [name for name in dynamic_shapes if name not in inputs]
    if unknown:
        raise InputError(
            f"dynamic_shapes names '{unknown[0]}', which is not an example", facts=[f"inputs: {', '.join(inputs)}"]
        )
    names = sorted({size for axes in dynamic_shapes.values() for size in axes.values()})
    wrong = [name for name in names if not name.isidentifier()]
    if wrong:
        raise UnsupportedError(f"'{wrong[0]}' cannot name a size", hint="use an identifier")
    sizes = dict(zip(names, jax.export.symbolic_shape(", ".join(names)), strict=True)) if names else {}
    places: dict[str, tuple[str, int]] = {}
    shapes: dict[str, tuple[Any, ...]] = {}
    for name, (shape, _) in inputs.items():
        axes = dynamic_shapes.get(name, {})
        shapes[name] = tuple(sizes[axes[k]] if k in axes else n for k, n in enumerate(shape))
        for axis, size in axes.items():
            places.setdefault(size, (name, axis))
    return places, shapes
