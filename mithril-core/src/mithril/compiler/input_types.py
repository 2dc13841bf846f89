"""Types of model inputs before the first call, from declarations, shapes=, types= and hints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mithril.compiler.frontend import Source, TraceRequest
from mithril.compiler.signature import TRAINING_FLAG, InputSpec, declared_text, expanded, known_types, only_input
from mithril.compiler.unused_parts import unused_of
from mithril.graph import (
    Dim,
    DType,
    DTypeError,
    OptionError,
    Shape,
    Size,
    TensorType,
    dtype as as_dtype,
    is_static,
    unknown,
)


def input_specs(source: Source, settings: Mapping[str, Any]) -> dict[str, InputSpec]:
    """Return one spec per input of a call, from the model's declarations and the options."""
    shapes, types, fixed = settings["shapes"], settings["types"], settings["constants"]
    declared, unused = {d.name: d for d in source.inputs}, unused_of(source).inputs
    for option, declarations in (("shapes", shapes), ("types", types)):
        for name in declarations:
            if name not in declared and name not in unused:
                message, facts, hint = unknown(f"input in {option}=", name, list(declared))
                raise OptionError(message, facts=facts, hint=hint or only_input(declared, name))
    batch = _batch_range(settings["hints"])
    specs = {}
    for name, d in declared.items():
        if name in fixed:
            continue
        primal = getattr(d, "primal", "")  # a tangent has the type of its input
        requested = shapes.get(name, shapes.get(primal))
        pattern = _merged(name, _shape(name, d.shape), _shape(primal if name not in shapes else name, requested))
        shape = None if pattern is None or ... in pattern else pattern
        if shape and batch is not None and _is_unbounded(shape[0]):
            shape = (Dim(str(shape[0]), *batch), *shape[1:])
        kind = as_dtype(types.get(name, types.get(primal))) if {name, primal} & {*types} else d.dtype
        free = pattern if shape is None else None
        sparse = getattr(d, "sparse", None)  # declared by models only
        specs[name] = InputSpec(name, shape, kind, d.where, kind is not None, d.required, d.produced, free, sparse)
    return specs


def _is_unbounded(size: Size) -> bool:
    return isinstance(size, Dim) and size.symbol is not None and size.symbol.high is None


def _batch_range(hints: Mapping[str, Any]) -> tuple[int, int] | None:
    bounds = hints.get("input_batch_size_range")
    if bounds is None:
        return None
    if not isinstance(bounds, Sequence) or len(bounds) != 2 or not all(isinstance(n, int) for n in bounds):
        raise OptionError(f"hints: input_batch_size_range={bounds!r} is not a pair of sizes", hint="write (1, 32)")
    low, high = bounds
    if not 0 <= low <= high:
        raise OptionError(f"hints: input_batch_size_range={bounds!r} is empty", hint="write (smallest, largest)")
    return low, high


def _shape(name: str, shape: Any) -> tuple[Any, ...] | None:
    """Convert ints, names, dims and None (a new symbol) to sizes; ``...`` stays."""
    if shape is None:
        return None
    if sum(size is ... for size in shape) > 1:
        raise OptionError(f"shapes: the shape of '{name}' has more than one ...")
    sizes: list[Any] = []
    for axis, size in enumerate(shape):
        if size is None:
            sizes.append(Dim(f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{axis}"))
        elif isinstance(size, str):
            sizes.append(Dim(size))
        elif isinstance(size, Dim) or size is ... or (type(size) is int and size >= 0):
            sizes.append(size)
        else:
            raise OptionError(
                f"shapes: axis {axis} of '{name}' cannot be {size!r}",
                facts=["accepted: an int, a name, a Dim, None for any size, ... for any axes"],
            )
    return tuple(sizes)


def _merged(name: str, declared: tuple[Any, ...] | None, requested: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Merge the shape from the options with the declared shape; raise OptionError if they conflict."""
    if declared is None or requested is None:
        return requested if requested is not None else declared
    model, option = declared, requested
    declared, requested = _fitted(declared, requested), _fitted(requested, declared)
    if len(declared) != len(requested) or any(
        type(a) is int and type(b) is int and a != b for a, b in zip(declared, requested, strict=True)
    ):
        raise OptionError(
            f"shapes: '{name}' conflicts with the model",
            facts=[f"model: {declared_text(model)}", f"shapes=: {declared_text(option)}"],
        )
    return tuple(a if type(a) is int else b for a, b in zip(declared, requested, strict=True))


def _fitted(shape: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape with the axes that its ``...`` has in the other one, if that has a known rank."""
    return shape if any(size is ... for size in other) else expanded(shape, len(other), other) or shape


def check_known_part(
    source: Source, specs: Mapping[str, InputSpec], constants: Mapping[str, Any], default: DType
) -> None:
    """Infer the shapes of the layers that depend on inputs of known shape alone: errors should not wait."""
    fixed = {n: s for n, s in specs.items() if s.shape is not None and is_static(s.shape)}
    optional = {n: s for n, s in specs.items() if n == TRAINING_FLAG or (s.shape is None and not s.required)}
    types = known_types({**fixed, **optional}, default)
    part_of = getattr(source, "known_part", None)  # only of models: other sources know all shapes
    part = part_of({*fixed, *optional, *constants}) if part_of is not None and types else None
    if part is None:
        return
    values = {d.name: constants[d.name] for d in part.inputs if d.name in constants}
    try:
        part.graph(types, TraceRequest(constants=values, dtype=default))
    except DTypeError:
        if all(spec.dtype is not None for spec in fixed.values()):
            raise  # otherwise the first call decides on the dtype


def probe_types(specs: Mapping[str, InputSpec], source: Source, default: DType) -> dict[str, TensorType]:
    """Return input types for inferring parameter shapes, with symbols for unknown sizes.

    An input of unknown rank gets the rank that its first user expects.
    """
    types = dict[str, TensorType]()
    for name, spec in specs.items():
        expected = _expected(name, source)
        kind = spec.dtype or (expected[1] if expected and expected[1] is not None else default)
        if spec.shape is not None:
            types[name] = TensorType(kind, spec.shape)
        elif name == TRAINING_FLAG:
            types[name] = TensorType(as_dtype("bool"), ())
        elif spec.required:
            shape = None if expected is None else expected[0]
            if spec.pattern is not None:  # without a rank that its user expects, ... is one axis
                fits = shape is not None and expanded(spec.pattern, len(shape)) is not None
                rank = len(shape) if fits and shape is not None else len(spec.pattern)
                shape = _shape(name, expanded(spec.pattern, rank))
            if shape is None:
                raise _unknown(spec)
            types[name] = TensorType(kind, shape)
    return types


def _expected(name: str, source: Source) -> tuple[Shape | None, DType | None] | None:
    """Return the shape and dtype that the first user of an input expects."""
    expected = source.expects(name)
    if expected is None:
        return None
    shape, kind = expected
    return None if shape is None else _shape(name, shape), None if kind is None else as_dtype(kind)


def _unknown(spec: InputSpec) -> Exception:
    from mithril.graph import ShapeError

    return ShapeError(
        f"Cannot infer shape for tensor '{spec.name}'",
        facts=[spec.where],
        hint=spec.misspelling
        or f"pass it to ml.compile, shapes={{'{spec.name}': [None, ...]}}, or call the model on data first: "
        f"compiled.randomize_params(inputs={{'{spec.name}': x}})",
    )
