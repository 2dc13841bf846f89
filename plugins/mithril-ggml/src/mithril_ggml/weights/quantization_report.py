"""Quantization report: bytes and error of each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import format_bytes
from mithril.graph import InputError
from mithril_ggml.program.dynamic_shapes import SizedExecutable
from mithril_ggml.program.executable import GGMLExecutable
from mithril_ggml.weights.packed_weights import values
from mithril_ggml.weights.weight_packing import Packing


@dataclass(frozen=True)
class Row:
    """One weight."""

    name: str
    shape: tuple[int, ...]
    kind: str
    bytes: int
    before: int  # bytes as float32
    error: float  # root mean square of the difference over that of the weight
    repacked: bool


@dataclass(frozen=True)
class QuantizationReport:
    """All weights of a program; print it."""

    rows: tuple[Row, ...]
    unquantized_bytes: int  # bytes of parameters that are not quantized

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.rows) + self.unquantized_bytes

    @property
    def before(self) -> int:
        return sum(r.before for r in self.rows) + self.unquantized_bytes

    def __str__(self) -> str:
        head = ("weight", "shape", "kind", "bytes", "of float32", "error")
        lines = [
            (r.name, "x".join(map(str, r.shape)), r.kind + ("*" if r.repacked else ""), format_bytes(r.bytes),
             f"{r.bytes / r.before:.3f}", f"{r.error:.2e}")
            for r in self.rows
        ]  # fmt: skip
        widths = [max(len(row[k]) for row in (head, *lines)) for k in range(len(head))]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in (head, *lines)]
        ratio = self.bytes / max(self.before, 1)
        total = f"parameters: {format_bytes(self.bytes)}, {ratio:.3f} of {format_bytes(self.before)}"
        star = ["* interleaved for this processor"] if any(r.repacked for r in self.rows) else []
        return "\n".join([*table, total, *star])


def packing_of(compiled: Any) -> tuple[Packing | None, GGMLExecutable | None]:
    """Return the packed weights of a compiled model's latest inference program, and that program."""
    for program in reversed(compiled.programs):
        if program.request.kind.training or program.request.kind.of:
            continue
        executable = program.executable
        if isinstance(executable, SizedExecutable):
            if not executable.programs:
                continue
            executable = executable.programs[-1]
        if isinstance(executable, GGMLExecutable):
            return executable.packing, executable
    return None, None


def quantization_report(compiled: Any, params: Mapping[str, Any] | None = None) -> QuantizationReport:
    """Size and error of each quantized weight of a model compiled for the GGML backend."""
    parameters = dict((params if params is not None else compiled.params) or {})
    for program in compiled.programs:
        parameters |= program.weights or {}  # with names of their own
    packing, executable = packing_of(compiled)
    if executable is None:
        raise InputError(
            "there is no program of the GGML backend for inference yet",
            hint="call the model once, which settles all sizes",
        )
    if parameters is None:
        raise InputError("there are no parameters to report on", hint="quantization_report(compiled, params)")
    packed = packing.packed(dict(parameters)) if packing is not None else {}
    rows = []
    for entry in packing.all_entries if packing is not None else ():
        name = entry.input.name
        packed_array = packed[name]
        original = entry.input.data if entry.input.data is not None else parameters[name]
        exact, approximation = (
            values(np.asarray(original), entry.ternary).astype(np.float64),
            np.asarray(packed_array, np.float64),
        )
        size = float(np.sqrt(np.mean(exact * exact)))
        error = float(np.sqrt(np.mean((exact - approximation) ** 2))) / size if size else 0.0
        rows.append(
            Row(
                name,
                packed_array.shape,
                packed_array.kind.name,
                packed_array.nbytes,
                4 * packed_array.size,
                error,
                entry.repacked,
            )
        )
    unpacked_bytes = sum(int(np.asarray(x).nbytes) for name, x in parameters.items() if name not in packed)
    return QuantizationReport(tuple(rows), unpacked_bytes)
