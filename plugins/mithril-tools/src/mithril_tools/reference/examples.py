"""Examples of operations, written from their samples and run when the page is written."""

from __future__ import annotations

import re
import zlib
from math import prod
from typing import Any

import numpy as np

from mithril.graph import Arr, DType, Op, Sample, dtype as as_dtype
from mithril_tools.reference.page import example, run

SMALL = 24  # elements that are written out
PRECISION = "np.set_printoptions(precision=4, suppress=True)"
LONG = re.compile(r"\.\d{5}")


def operation_example(op: Op) -> str:
    """Return code that calls the operation on NumPy arrays, with its output."""
    if not op.samples:
        return ""
    sample = next((s for s in op.samples if 2 <= _elements(s) <= SMALL), min(op.samples, key=_elements))
    seed = zlib.crc32(op.name.encode())
    lines, names = [], []
    for k, spec in enumerate(sample.operands):
        name = op.operand_name(k).replace("[", "").replace("]", "")
        names.append("None" if spec is None else name)
        if spec is not None:
            lines.append(f"{name} = {_array_text(spec, seed + k)}")
    while names and names[-1] == "None":
        names.pop()
    attributes = [f"{name}={_value_text(value)}" for name, value in sample.attributes.items()]
    has_owner = bool(op.name.partition(".")[2])  # 'owner.name': an operation of a plugin
    called = f'operation("{op.name}")' if has_owner else f"ops.{op.name}"
    home = "from mithril.graph import operation" if has_owner else "from mithril import ops"
    call = f"{called}({', '.join([*names, *attributes])})"
    results = ", ".join(op.results)
    show = [f"print({call})"] if len(op.results) == 1 else [f"{results} = {call}", f"print({results}, sep='\\n')"]
    if not op.results:
        show = [f"print(*{call}, sep='\\n')"]
    code = "\n".join([home, "", *lines, *([""] if lines else []), *show])
    if LONG.search(run(f"import numpy as np\n{code}")):
        code = code.replace(home, f"{home}\n\n{PRECISION}", 1)
    if "np." in code:
        code = f"import numpy as np\n\n{code}"
    with np.printoptions():  # the setting ends with the example
        return example(code)


def _elements(sample: Sample) -> int:
    return sum(prod(int(n) for n in spec.shape) for spec in sample.operands if spec is not None)


def _value_text(value: Any) -> str:
    return repr(value.name) if isinstance(value, DType) else repr(value)


def _array_text(spec: Arr, seed: int) -> str:
    """Return an expression of NumPy that creates the array of a sample; small ones are written out."""
    shape = tuple(int(n) for n in spec.shape)
    kind = as_dtype(spec.dtype)
    rng = np.random.default_rng(seed)
    if spec.values is not None:
        values = np.array(spec.values, kind.numpy).reshape(shape)
    elif prod(shape) > SMALL:
        return _random_text(spec, shape, kind)
    elif kind.is_bool:
        values = rng.random(shape) < 0.5
    elif kind.is_integer:
        low = max(int(spec.low), int(kind.limits[0]))
        values = rng.integers(low, int(spec.high) + 1, shape).astype(kind.numpy)
    else:
        values = np.clip(rng.uniform(spec.low, spec.high, shape).round(1), spec.low, spec.high)
    rows = [str(row) for row in values.tolist()] if values.ndim > 1 else [str(values.tolist())]
    separator = ",\n    " if sum(map(len, rows)) > 72 else ", "
    numbers = separator.join(rows).replace("nan", "np.nan").replace("inf", "np.inf")
    if values.ndim > 1:
        numbers = f"[\n    {numbers},\n]" if "\n" in separator else f"[{numbers}]"
    if not values.size:
        return f"np.zeros({shape}, {_dtype_text(kind)})"
    return f"np.array({numbers}, {_dtype_text(kind)})"


def _random_text(spec: Arr, shape: tuple[int, ...], kind: DType) -> str:
    if kind.is_bool:
        return f"np.random.default_rng(0).random({shape}) < 0.5"
    if kind.is_integer:
        return f"np.random.default_rng(0).integers({int(spec.low)}, {int(spec.high) + 1}, {shape}, {_dtype_text(kind)})"
    return f"np.random.default_rng(0).uniform({spec.low}, {spec.high}, {shape}).astype({_dtype_text(kind)})"


def _dtype_text(kind: DType) -> str:
    return "bool" if kind.is_bool else f"np.{kind.name}"
