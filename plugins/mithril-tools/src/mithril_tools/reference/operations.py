"""The page of an operation: everything that its declaration says, and an example."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mithril.graph import Arr, Builder, MithrilError, Op, Sample, TensorType, dtype as as_dtype, operation, operations
from mithril_tools.reference.examples import operation_example
from mithril_tools.reference.guides import semantics_of
from mithril_tools.reference.page import Page, call_block, default_text, fence, first_line, prose, sections, table
from mithril_tools.reference.sources import source_of

COVERAGE = Path(__file__).with_name("coverage.json")
DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")
FAMILIES = {"nn": "linear and lookup", "pool": "pooling", "basic": "constants and casts"}
SPECIAL = (-np.inf, -1.0, -0.5, 0.0, 0.5, 1.0, np.inf, np.nan)
PAIRS = ((1.0, 0.0), (0.0, 0.0), (-1.0, 0.0), (np.inf, np.inf), (np.inf, 0.0), (np.nan, 1.0), (1.0, np.nan))
PROMOTION: dict[str | None, str] = {
    "same": "The operands are promoted to a common dtype.",
    "float": "The operands are promoted to a common floating-point dtype.",
}
ACCEPTS = {
    "Axis": "an axis; negative ones count from the end",
    "Axes": "one axis, a tuple of axes, or None for all; negative ones count from the end",
    "Ints": "an integer or a tuple of integers",
    "Pairs": "a tuple of pairs of sizes",
    "Shape": "a tuple of sizes",
    "Size": "an integer or a symbolic size",
    "number": "a number or a bool",
    "DType": "a dtype or its name",
}


def operation_pages() -> Iterator[Page]:
    """Yield the page of each operation, those of installed plugins included."""
    from mithril import plugins

    for name in plugins.op_names():
        operation(name)
    for name, op in sorted(operations().items()):
        yield Page("operation", name, first_line(op.doc), partial(operation_text, op), family(op))


def family(op: Op) -> str:
    """Return the group of an operation: the file that declares it."""
    file = Path(op.declared_at.rpartition(":")[0])
    if file.parent.parts[-2:] != ("mithril", "ops"):
        return "of plugins"
    return FAMILIES.get(file.stem) or file.stem.replace("_", " ").removesuffix(" ops")


def operation_text(op: Op) -> str:
    """Return the page of an operation."""
    kind = "A composite: composed of other operations." if op.composite else "A primitive."
    activation = f' Layers that take an activation call it `"{op.activation}"`.' if op.activation else ""
    head = f"{call_block(op.name, op)}\n\n{prose(op.doc)}\n\n{kind}{activation}"
    parts = (
        ("Operands and attributes", _arguments(op)),
        ("Example", operation_example(op)),
        ("Meaning", fence(source_of(op.reference, op.name))),
        ("Types", _types(op)),
        ("Axes", _axes(op)),
        ("Gradient", _gradient(op)),
        ("Special values", _special_values(op)),
        ("Backends", _backends(op)),
    )
    return f"{head}\n\n{sections(parts)}"


def _arguments(op: Op) -> str:
    rows = []
    for name in op.operands:
        accepts = "any number of arrays" if op.variadic else "an array"
        rows.append((f"`{name}`", "operand", accepts, "`None`" if name in op.optional else ""))
    for a in op.attributes.values():
        plain = a.annotation.removesuffix(" | None")
        accepts = ACCEPTS.get(plain, f"`{plain}`") + (" or None" if plain != a.annotation and plain != "Axes" else "")
        rows.append((f"`{a.name}`", "attribute", accepts, default_text(a.default) if a.name in op.defaults else ""))
    text = table(("name", "kind", "accepts", "default"), rows)
    if len(op.results) > 1:
        text += f"\n\nResults: {', '.join(f'`{r}`' for r in op.results)}."
    return text


# -- types --------------------------------------------------------------------------------------------------------
def _types(op: Op) -> str:
    rows = []
    for sample in op.samples[:6]:
        types = [None if s is None else TensorType(as_dtype(s.dtype), tuple(s.shape)) for s in sample.operands]
        results = infer(op, types, sample.attributes)
        call = op.call_text(types, sample.attributes).removeprefix("in ")
        rows.append((f"`{call}`", f"`{results}`"))
    dtypes = _dtype_rows(op)
    parts = [
        table(("call", "result"), rows) if rows else "",
        " ".join(filter(None, [PROMOTION.get(op.promotes), *_rules(op)])),
        table(("dtype of the operand", "of the result"), dtypes) if dtypes else "",
    ]
    return "\n\n".join(filter(None, parts))


def infer(op: Op, types: Sequence[TensorType | None], attributes: dict[str, Any]) -> str:
    """Return the result types of a call, after promotion, or the reason why it is refused."""
    try:
        with Builder("call") as builder:
            operands = [None if t is None else builder.input(f"x{k}", t.shape, t.dtype) for k, t in enumerate(types)]
            result = op(*operands, **attributes)
    except MithrilError as error:
        return f"refused: {error.what}"
    results = result if isinstance(result, tuple | list) else (result,)
    return ", ".join(str(getattr(r, "type", r)) for r in results)


def _rules(op: Op) -> list[str]:
    """Return the documented rules of a primitive; those of a composite follow from its body."""
    if op.composite and op.shape_rule is None:
        return ["Shapes and dtypes follow from the body."]
    if op.infer_rule is not None:
        return [f"Types: {first_line(op.infer_rule.__doc__) or 'a rule of the operation infers them.'}"]
    texts = []
    for kind, rule in (("Shape", op.shape_rule), ("Dtype", op.dtype_rule)):
        summary = first_line(getattr(rule, "__doc__", "")).removeprefix("Return ").rstrip(".")
        if summary:
            texts.append(f"{kind}: {summary[0].lower()}{summary[1:]}.")
    return texts


def _dtype_rows(op: Op) -> list[tuple[str, str]]:
    """Return the result dtypes for operands of each dtype; the other operands keep theirs."""
    sample = next((s for s in op.samples if any(spec is not None for spec in s.operands)), None)
    if sample is None:
        return []
    base = next(spec.dtype for spec in sample.operands if spec is not None)
    by_result: dict[str, list[str]] = {}
    for name in DTYPES:
        result = infer(op, [_with_dtype(spec, base, name) for spec in sample.operands], sample.attributes)
        shown = result if result.startswith("refused") else ", ".join(_dtypes_of(result))
        by_result.setdefault(shown, []).append(name)
    unchanged = [
        n for n, shown in ((n, r) for r, names in by_result.items() for n in names) if as_dtype(n).short == shown
    ]
    rows = [(", ".join(f"`{n}`" for n in unchanged), "the same dtype")] if len(unchanged) > 1 else []
    for shown, names in by_result.items():
        rest = [n for n in names if len(unchanged) < 2 or n not in unchanged]
        if rest:
            rows.append((", ".join(f"`{n}`" for n in rest), shown if shown.startswith("refused") else f"`{shown}`"))
    return rows


def _with_dtype(spec: Arr | None, base: str, name: str) -> TensorType | None:
    if spec is None:
        return None
    return TensorType(as_dtype(name if spec.dtype == base else spec.dtype), tuple(spec.shape))


def _dtypes_of(types: str) -> list[str]:
    return [part.partition("[")[0] for part in types.replace("], ", "]\0").split("\0")]


# -- axes, gradient, special values ----------------------------------------------------------------------------------
def _axes(op: Op) -> str:
    if op.no_axes:
        return f"None are declared: {op.no_axes}."
    if op.elementwise:
        return "`... -> ...`: element by element, with broadcasting."
    if isinstance(op.declared_axes, str):
        return f"`{op.declared_axes}`"
    if callable(op.declared_axes):
        return f"Computed for each call: {first_line(op.declared_axes.__doc__) or 'by a rule of the operation.'}"
    return "They follow from the body." if op.composite else "None are declared: every axis needs the whole operand."


def _gradient(op: Op) -> str:
    if op.gradient is not None:
        kind = "It deliberately differs from the derivative.\n\n" if op.surrogate else ""
        return kind + fence(source_of(op.gradient, "vjp"))
    if op.gradient_reason:
        return f"None: {op.gradient_reason}."
    if op.region_gradient is not None:
        return "Derived from the gradients of the regions."
    return "Derived from the body." if op.composite else "None."


def _special_values(op: Op) -> str:
    parts = []
    computed = _computed_values(op)
    if computed:
        parts.append(computed)
    rows = semantics_of(op.name)
    if rows:
        parts.append("From [semantics](../../semantics.md):\n\n" + table(("subject", "meaning"), rows))
    return "\n\n".join(parts)


def _computed_values(op: Op) -> str:
    """Return the results of an element-wise operation of floats at infinities, nan and zeros."""
    sample = next(iter(op.samples), None)
    if not op.elementwise or op.variadic or sample is None or not 1 <= len(sample.operands) <= 2:
        return ""
    if any(spec is None or spec.dtype != "float32" for spec in sample.operands):
        return ""
    values = np.array(SPECIAL if len(sample.operands) == 1 else PAIRS, np.float32)
    columns = [values] if values.ndim == 1 else list(values.T)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = np.asarray(op(*columns, **_attributes(op, sample)))
    rows = [
        (*(f"`{column[k]:g}`" for column in columns), f"`{result[k] if result.dtype == bool else f'{result[k]:.4g}'}`")
        for k in range(len(values))
    ]
    return table((*op.operands, "result"), rows)


def _attributes(op: Op, sample: Sample) -> dict[str, Any]:
    """Return the attributes that have no default, from a sample."""
    return {n: v for n, v in sample.attributes.items() if n not in op.defaults}


# -- backends --------------------------------------------------------------------------------------------------------
@cache
def recorded_coverage() -> dict[str, dict[str, str]]:
    """Return how each of mithril's own backends runs each operation, where `nox -s generate` has recorded it."""
    recorded: dict[str, dict[str, str]] = json.loads(COVERAGE.read_text("utf-8")) if COVERAGE.exists() else {}
    return recorded


def _backends(op: Op) -> str:
    states = recorded_coverage().get(op.name)
    if states is not None and set(states.values()) == {"no samples"}:
        return "No samples are declared, from which the way that a backend runs it could be derived."
    if states is None:
        return f"`mithril backends --coverage NAME` shows how an installed backend runs `{op.name}`."
    return table(tuple(states), [tuple(states.values())])


def coverage_text() -> str:
    """Return the text of ``coverage.json``: the answers of the installed backends of the project."""
    from mithril import plugins
    from mithril.plugins import pip_hints
    from mithril_tools.cli.coverage import coverage

    names = [n for n, e in plugins.backends().items() if e.plugin.distribution in pip_hints.DISTRIBUTIONS]
    states: dict[str, dict[str, str]] = {}
    for backend in sorted(names):
        for row in coverage(backend):
            states.setdefault(row["operation"], {})[backend] = row["state"]
    lines = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(states.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
