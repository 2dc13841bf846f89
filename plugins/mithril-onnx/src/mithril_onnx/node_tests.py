"""The node tests of the ONNX standard over a backend of mithril."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
from onnx.backend.test.loader import load_model_tests

from mithril.graph import MithrilError, UnsupportedError
from mithril_onnx.model import from_onnx
from mithril_onnx.tensors import to_array
from mithril_onnx.values import NotConstantError

# Element types outside the scope: strings, complex numbers, and floats of 8 bits and fewer.
OUTSIDE = {8, 14, 15, 17, 18, 19, 20, 23, 24}


@dataclass
class Outcome:
    """The result of one case: "pass", "wrong" (numbers differ), "unsupported" or "error"."""

    name: str
    status: str
    detail: str = ""


def cases(kind: str = "node", expanded: bool = False) -> Iterator[Any]:
    """Yield the cases whose element types are in scope."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = load_model_tests(kind=kind)
    for case in tests:
        if ("_expanded" in case.name) != expanded or "bernoulli" in case.name:
            continue  # Bernoulli draws numbers of an unnamed generator
        case = _from_files(case) if case.model is None else case
        if case is None:
            continue
        if any(o.domain.startswith("ai.onnx.") and o.domain != "ai.onnx.ml" for o in case.model.opset_import):
            continue
        if any(n.op_type == "ImageDecoder" for n in case.model.graph.node):
            continue
        if not _codes(case.model.graph) & OUTSIDE:
            yield case


def _from_files(case: Any) -> Any:
    """Return a case whose model and data are files, with both loaded; None if they must be downloaded."""
    folder = Path(case.model_dir or "")
    if not (folder / "model.onnx").exists():
        return None
    model = onnx.load(folder / "model.onnx")
    sets = [
        tuple([_tensor(p) for p in sorted(data.glob(f"{kind}_*.pb"), key=_number)] for kind in ("input", "output"))
        for data in sorted(folder.glob("test_data_set_*"))
    ]
    return replace(case, model=model, data_sets=sets)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _tensor(path: Path) -> Any:
    return onnx.TensorProto.FromString(path.read_bytes())


def _codes(graph: Any) -> set[int]:
    """Return the element types of inputs, outputs, initializers and constants of a graph."""
    codes = {t.data_type for t in graph.initializer}
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind = info.type
        while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
            kind = getattr(kind, which).elem_type
        codes.add(kind.tensor_type.elem_type)
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("t"):
                codes.add(a.t.data_type)
            if a.HasField("g"):
                codes |= _codes(a.g)
            if a.name in ("to", "dtype", "output_dtype", "output_datatype"):
                codes.add(a.i)
            if a.strings:
                codes.add(8)
    return codes


def run(case: Any, backend: str, **options: Any) -> Outcome:
    """Run one case, all its data sets."""
    try:
        for arguments, expected in case.data_sets:
            problem = _compare(_results(case.model, arguments, expected, backend, options), expected, case)
            if problem:
                return Outcome(case.name, "wrong", problem)
    except UnsupportedError as error:
        return Outcome(case.name, "unsupported", str(error))
    except MithrilError as error:
        return Outcome(case.name, "error", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(case.name, "error", f"{type(error).__name__}: {error}")
    return Outcome(case.name, "pass")


def _results(model: Any, arguments: Sequence[Any], expected: Sequence[Any], backend: str, options: Any) -> list[Any]:
    import mithril as ml

    values = {i.name: _plain(a) for i, a in zip(model.graph.input, arguments, strict=False)}
    constants = {n: a for n, a in values.items() if a is None or isinstance(a, list)}
    for _ in range(8):
        try:
            imported = from_onnx(model, constants=constants)
            compiled = ml.compile(imported, backend, inference=True, **options)
            called = {n: a for n, a in values.items() if n not in constants}
            results = compiled(dict(zip(imported.inputs, called.values(), strict=True)))
            break
        except NotConstantError as error:
            fresh = [n for n in error.names if n in values and n not in constants]
            if not fresh:
                raise
            constants |= {n: values[n] for n in fresh}
    if not isinstance(results, dict):
        names = list(imported.outputs)
        results = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
    flat = iter([np.asarray(compiled.backend.to_numpy(r)) for r in results.values()])
    return [[next(flat) for _ in e] if isinstance(e, list) else next(flat) for e in map(_plain, expected)]


def _plain(x: Any) -> Any:
    if isinstance(x, onnx.TensorProto):
        return to_array(x)
    if isinstance(x, list):
        return [_plain(e) for e in x]
    if x is None:
        return None
    array = np.asarray(x)
    return (
        array.astype(np.int8)
        if str(array.dtype) in ("int4", "int2")
        else (array.astype(np.uint8) if str(array.dtype) in ("uint4", "uint2") else array)
    )


def _compare(results: Sequence[Any], expected: Sequence[Any], case: Any) -> str:
    for k, (actual, want) in enumerate(zip(results, expected, strict=True)):
        want = _plain(want)
        pairs = zip(actual, want, strict=True) if isinstance(want, list) else [(actual, want)]
        for a, b in pairs:
            if b is None:
                continue
            if a.dtype != b.dtype:
                return f"output {k} has the dtype {a.dtype}, expected {b.dtype}"
            if a.shape != b.shape:
                return f"output {k} has the shape {a.shape}, expected {b.shape}"
            wide_dtype = np.float64 if b.dtype.kind not in "biu" else b.dtype
            tolerance = max(case.atol, _unit(b))
            if not np.allclose(
                a.astype(wide_dtype), b.astype(wide_dtype), rtol=case.rtol, atol=tolerance, equal_nan=True
            ):
                return f"output {k} differs: {a.reshape(-1)[:6]}, expected {b.reshape(-1)[:6]}"
    return ""


def _unit(expected: Any) -> float:
    """Return the unit in the last place of the largest element: the rounding of sums that cancel."""
    if expected.dtype.kind in "biu" or not expected.size:
        return 0.0
    finite = np.abs(expected.astype(np.float64))
    largest = np.max(finite, where=np.isfinite(finite), initial=0.0)
    return float(largest * float(ml_dtypes.finfo(expected.dtype).eps))


def summary(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    counts = dict.fromkeys(("pass", "wrong", "unsupported", "error"), 0)
    for outcome in outcomes:
        counts[outcome.status] += 1
    return counts
