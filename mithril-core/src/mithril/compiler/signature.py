"""Inputs of compiled models: checks, conversions, and the signature of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import Positive, to_numpy
from mithril.graph import (
    Decisions,
    DType,
    DTypeError,
    Guard,
    GuardError,
    InputError,
    Shape,
    Size,
    TensorType,
    bind,
    closest,
    dtype as as_dtype,
    int32,
)
from mithril.plugins import Option


def expanded(shape: tuple[Any, ...], rank: int, axes: Sequence[Any] = ()) -> tuple[Any, ...] | None:
    """Return a declared shape with its ``...`` replaced by ``axes`` (sizes of all axes; default: None) for a rank.

    A shape without ``...`` is returned unchanged; None if the rank has too few axes.
    """
    if ... not in shape:
        return shape
    start = shape.index(...)
    stop = rank - (len(shape) - start - 1)
    if stop < start:
        return None
    middle = tuple(axes[start:stop]) if axes else (None,) * (stop - start)
    return (*shape[:start], *middle, *shape[start + 1 :])


def declared_text(shape: Iterable[Any]) -> str:
    """Return a declared shape as text: ``[B, ..., 5, any]``."""
    return f"[{', '.join('any' if s is None else '...' if s is ... else str(s) for s in shape)}]"


TRAINING_FLAG = "is_training"  # the input that is True in programs for training


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Properties of a model input that are known before the first call."""

    name: str
    shape: Shape | None = None  # None: unknown rank
    dtype: DType | None = None
    where: str = ""  # first layer that uses the input, for messages
    declared: bool = False  # whether the user declared the dtype (types= or IOKey)
    required: bool = True  # False: the model has a default value
    # Names that layers produce: the input may be one of them, misspelled. The order of a set differs between processes.
    produced: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    pattern: tuple[Any, ...] | None = None  # of unknown rank: sizes around ``...``
    sparse: str | None = None  # the format of sparse arrays that calls pass

    @property
    def misspelling(self) -> str | None:
        """The hint that the input may be a misspelled connection, or None without a similar name."""
        similar = closest(self.name, sorted(self.produced), 1)
        return f"no layer produces '{self.name}'; did you mean '{similar[0]}'?" if similar else None

    @property
    def type(self) -> TensorType | None:
        if self.shape is None or self.dtype is None:
            return None
        return TensorType(self.dtype, self.shape)


def known_types(specs: Mapping[str, InputSpec], default: DType) -> dict[str, TensorType] | None:
    """Return the types of all inputs with default dtypes where undeclared, or None if a shape is unknown."""
    types = {}
    for name, spec in specs.items():
        if name == TRAINING_FLAG and spec.shape is None:
            types[name] = TensorType(as_dtype("bool"), ())
        elif spec.shape is None or spec.sparse:  # of sparse arrays, calls decide how many elements are stored
            if spec.required:
                return None
        else:
            types[name] = TensorType(spec.dtype or default, spec.shape)
    return types


def only_input(expected: Iterable[str], name: str) -> str | None:
    """Return the hint for a name that ``build`` gives the only input of a layer, which is "input" for callers."""
    if {*expected} - {TRAINING_FLAG} != {"input"} or closest(name, ["input"], 1):
        return None
    return f"the only input of a layer is 'input'; inputs = ({name!r},) in the class renames it"


def _renaming(expected: Iterable[str], actual: Iterable[str]) -> str | None:
    """Return how to rename the parameters of a model to those of its part, or of a part to those of the model."""
    names, passed = sorted(expected), [*actual]
    for name in passed:  # a training graph around the model, say
        prefix = name.removesuffix(names[0])
        if prefix.endswith(".") and prefix != name and all(prefix + n in passed for n in names):
            return (
                f"these are inside '{prefix[:-1]}' here: "
                f"{{n.removeprefix({prefix!r}): p for n, p in params.items() if n.startswith({prefix!r})}}"
            )
    if passed:
        prefix = names[0].removesuffix(min(passed))
        if prefix.endswith(".") and [prefix + n for n in sorted(passed)] == names:
            return f"the model has them inside '{prefix[:-1]}': {{{prefix!r} + n: p for n, p in params.items()}}"
    return None


def missing_or_unknown(
    kind: str,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    states: Collection[str] = (),
) -> None:
    """Raise InputError unless ``actual`` has exactly the expected names.

    ``params`` may contain misplaced inputs, and ``actual`` misplaced ``states``.
    """
    missing = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    if not missing and not extra:
        return
    facts, hint = [], None
    for name in missing[:8]:
        similar = closest(name, extra, 1)
        facts.append(f"missing: '{name}'" + (f" (similar: '{similar[0]}')" if similar else ""))
    facts += [f"unknown: '{name}'" for name in extra[:8]]
    if len(missing) + len(extra) > 8:
        facts.append(f"({len(missing)} missing, {len(extra)} unknown in total)")
    facts.append("expected: " + (", ".join(list(expected)[:20]) + (", ..." if len(expected) > 20 else "") or "none"))
    if kind == "input":
        hint = only_input(expected, extra[0]) if missing and len(extra) == 1 else None
        hint = next((spec.misspelling for n in missing if (spec := expected[n]).misspelling), hint)
        if misplaced := [n for n in missing if isinstance(params, Mapping) and n in params]:
            hint = f"'{misplaced[0]}' is an input, trainable or not: move it from the parameters to the inputs"
    if missing and kind == "parameter":
        hint = _renaming(expected, actual) or "params = compiled.randomize_params() returns a complete set"
    elif misplaced := [n for n in extra if n in states]:
        hint = f"'{misplaced[0]}' is a state, not a parameter: pass it in state="
    raise InputError(f"the {kind}s do not match the model", facts=facts, hint=hint)


def array_type(name: str, x: Any) -> TensorType:
    """Return the type of an input value."""
    shape, kind = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and kind is not None:
        return TensorType(_dtype_of(name, kind), tuple(int(n) for n in shape))
    array = as_numpy(name, x)
    return TensorType(as_dtype(array.dtype), array.shape)


def _dtype_of(name: str, kind: Any) -> DType:
    try:
        return as_dtype(kind)
    except DTypeError:
        # DataFrames and NumPy hold names of classes as text or objects.
        text = getattr(kind, "kind", "") in ("U", "S", "O", "T")
        hint = f"number the classes: names, {name} = np.unique({name}, return_inverse=True)" if text else ""
        raise InputError(f"input '{name}' has the unsupported dtype {kind}", hint=hint) from None


def as_numpy(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Convert lists and Python numbers to arrays of the default dtypes; raise InputError for other objects."""
    if isinstance(x, np.ndarray):
        return to_numpy(x, f"input '{name}'")
    try:
        array = np.asarray(x)
    # RuntimeError is PyTorch's for tensors with gradients, TypeError for those on other devices.
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"input '{name}' is not an array: {error}", facts=[f"got {type(x).__name__}"]) from None
    if array.dtype == object or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise InputError(
            f"input '{name}' is not an array of numbers",
            facts=[f"got {type(x).__name__} with elements of {array.dtype}"],
            hint="pass an array of the backend, a NumPy array, or nested lists of equal lengths",
        )
    if not isinstance(x, np.generic) and not hasattr(x, "dtype"):  # Python numbers have no dtype
        array = array.astype({"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype), copy=False)
    return array


def convert_input(
    name: str, array: np.ndarray[Any, Any], target: DType, decisions: Decisions, *, rounds: bool = False
) -> np.ndarray[Any, Any]:
    """Cast the array to ``target`` if the cast is lossless or ``rounds`` is set; raise InputError otherwise."""
    source = as_dtype(array.dtype)
    if source is target:
        return array
    if source.is_bool or (source.is_integer and target.is_float) or (rounds and source.is_float and target.is_float):
        decisions.record("cast", f"input '{name}' is converted from {source} to {target}")
        return array.astype(target.numpy)
    if source.is_integer and target.is_integer:
        low, high = target.limits
        if array.size and (int(array.min()) < low or int(array.max()) > high):
            raise InputError(
                f"input '{name}' has values out of range for {target}",
                facts=[f"got {source} from {array.min()} to {array.max()}", f"{target} supports {low} to {high}"],
            )
        decisions.record("cast", f"input '{name}' is converted from {source} to {target}")
        return array.astype(target.numpy)
    raise InputError(
        f"Type mismatch: expected {target}, got {source}",
        facts=[f"input '{name}', shape {list(array.shape)}"],
        hint=f"convert it (x.astype('{target}')), or compile with types={{'{name}': '{source}'}}",
    )


def resolve_type(spec: InputSpec, actual: TensorType, default_float: DType) -> TensorType:
    """Return the type of a program's input: the declared type or, where undeclared, the type of the call."""
    shape: Shape = spec.shape if spec.shape is not None else actual.shape
    if spec.pattern is not None:
        of_rank = expanded(spec.pattern, len(shape), shape)
        if of_rank is None:
            expected = declared_text(spec.pattern)
            raise InputError(f"input '{spec.name}' has {len(shape)} axes", facts=[f"expected {expected}, got {actual}"])
        shape = of_rank
    if spec.dtype is not None and (spec.declared or spec.dtype.is_float == actual.dtype.is_float):
        return TensorType(spec.dtype, shape)
    if actual.dtype.is_float:
        return TensorType(default_float, shape)
    return TensorType(int32 if actual.dtype.name == "int64" else actual.dtype, shape)


def check_shapes(
    guards: Iterable[Guard], types: Mapping[str, TensorType], actual: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Bind the symbolic sizes to those of a call and check the guards."""
    declared = {name: t.shape for name, t in types.items()}
    try:
        values = bind(declared, actual)
    except GuardError as error:
        facts = [f"'{n}': expected {_text(declared[n])}, got {_text(actual[n])}" for n in declared]
        raise InputError(error.what, facts=[*error.facts, *facts], hint=_rank_hint(declared, actual)) from None
    sources = {
        str(size): f"axis {axis} of input '{name}'" for name, s in declared.items() for axis, size in enumerate(s)
    }
    for guard in guards:
        try:
            guard.check(values, sources)
        except GuardError as error:
            raise InputError(error.what, facts=error.facts) from None
    return values


def _rank_hint(declared: Mapping[str, Shape], actual: Mapping[str, tuple[int, ...]]) -> str | None:
    for name, shape in declared.items():
        if len(actual[name]) == len(shape) - 1:
            return f"a batch axis may be missing: inputs['{name}'][None]"
    return None


def _text(shape: tuple[Size, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


CALL_OPTIONS = (
    Option(
        "max_programs",
        Positive,
        64,
        "Maximum number of cached programs for calls with different shapes; the least recently used is evicted.",
        affects="shown",
        example="8",
    ),
    Option("seed", int, 0, "Seed for the initial parameters and random operations.", example="1"),
)
