"""Metal kernels for element-wise graphs, with one thread per element; the same source also compiles as C++.

Metal and C++ share the language of kernel bodies, so that a kernel can be tested as C++ on machines without Metal.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mithril import ops
from mithril.backend import NameAllocator
from mithril.graph import BackendError, Graph, Node, Registry, TensorType, UnsupportedError, Value, decompose, numel
from mithril_mlx.mlx_loader import mx

THREADS = 256  # of a group
TYPES = {"float32": "float", "float16": "half", "int32": "int", "uint32": "uint", "bool": "bool"}

# Metal expressions. As on every backend, half floats are computed in float and rounded once per operation.
EXPRESSIONS: Registry[str] = Registry(
    "expressions in Metal",
    {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "div": "{0} / {1}",
        "neg": "-{0}",
        "abs": "metal::abs({0})",
        "exp": "metal::exp({0})",
        "log": "metal::log({0})",
        "sqrt": "metal::sqrt({0})",
        "rsqrt": "1 / metal::sqrt({0})",
        "square": "{0} * {0}",
        "reciprocal": "1 / {0}",
        "sin": "metal::sin({0})",
        "cos": "metal::cos({0})",
        "tanh": "metal::tanh({0})",
        "floor": "metal::floor({0})",
        "ceil": "metal::ceil({0})",
        "maximum": "({0} > {1} || {0} != {0}) ? {0} : {1}",
        "minimum": "({0} < {1} || {0} != {0}) ? {0} : {1}",
        "relu": "({0} > 0 || {0} != {0}) ? {0} : 0",
        "sigmoid": "1 / (1 + metal::exp(-{0}))",
        "silu": "{0} / (1 + metal::exp(-{0}))",
        "greater": "{0} > {1}",
        "greater_equal": "{0} >= {1}",
        "less": "{0} < {1}",
        "less_equal": "{0} <= {1}",
        "equal": "{0} == {1}",
        "not_equal": "{0} != {1}",
        "where": "{0} ? {1} : {2}",
    },
)
SHIM = """
#include <cmath>
using half = _Float16;
using uint = unsigned int;
struct uint3 { uint x, y, z; };
namespace metal {
  using std::exp; using std::log; using std::sqrt; using std::sin; using std::cos; using std::tanh;
  using std::floor; using std::ceil; using std::abs;
}
extern "C" void run(%(arguments)s, uint count) {
  for (uint thread = 0; thread < count; ++thread) {
    uint3 thread_position_in_grid = {thread, 0, 0};
%(body)s
  }
}
"""


def covers(node: Node) -> bool:
    """Whether a kernel can hold an operation."""
    float_only = node.op.promotes == "float"
    return (
        node.op.name in EXPRESSIONS
        and not (float_only and not node.result.dtype.is_float)
        and all(v is not None and v.dtype.name in TYPES for v in (*node.operands, node.result))
    )


@dataclass(frozen=True)
class MetalKernel:
    """A Metal kernel: ``source`` is its body, ``run`` computes it on Metal, ``run_as_cpp`` on the CPU."""

    name: str
    inputs: tuple[str, ...]
    output: TensorType
    types: tuple[TensorType, ...]  # of the inputs
    source: str

    @cached_property
    def _metal(self) -> Any:
        return mx.fast.metal_kernel(
            name=self.name, input_names=list(self.inputs), output_names=["out"], source=self.source
        )

    def run(self, *arrays: mx.array) -> mx.array:
        """Compute the result on the GPU."""
        count = int(numel(self.output.shape))
        results: list[mx.array] = self._metal(
            inputs=list(arrays),
            grid=(count, 1, 1),
            threadgroup=(min(THREADS, count), 1, 1),
            output_shapes=[self.output.shape],
            output_dtypes=[getattr(mx, self.output.dtype.name)],
        )
        return results[0]

    def cpp(self) -> str:
        """Return the body in a loop over the threads, as C++."""
        arguments = [f"const {TYPES[t.dtype.name]}* {n}" for n, t in zip(self.inputs, self.types, strict=True)]
        arguments.append(f"{TYPES[self.output.dtype.name]}* out")
        return SHIM % {"arguments": ", ".join(arguments), "body": self.source}

    def run_as_cpp(self, *arrays: Any) -> np.ndarray[Any, Any]:
        """Compute the result with a C++ compiler on this CPU."""
        compiler = shutil.which("g++") or shutil.which("clang++")  # not every clang++ has half floats
        if compiler is None:
            raise BackendError(
                "no C++ compiler is installed", hint="apt install g++, or the command line tools of Xcode"
            )
        contiguous = [np.asarray(a, order="C") for a in arrays]
        out = np.empty(self.output.shape, self.output.dtype.numpy)
        with tempfile.TemporaryDirectory() as folder:
            text, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            text.write_text(self.cpp())
            command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++17", str(text), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BackendError(f"the kernel '{self.name}' is not valid C++", facts=done.stderr.splitlines()[:8])
            run = ctypes.CDLL(str(library)).run
            pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*contiguous, out)]
            run(*pointers, ctypes.c_uint(out.size))
        return out


def metal_kernel(graph: Graph, name: str = "fused") -> MetalKernel:
    """Build the kernel of an element-wise graph with one result; inputs have the result's size or one element."""
    lowered = decompose(graph, lambda node: covers(node) or not node.op.composite)
    result = lowered.outputs[0]
    if len(lowered.outputs) != 1:
        raise UnsupportedError(f"a kernel has one result, and '{graph.name}' has {len(lowered.outputs)}")
    types = [i.type for i in lowered.inputs]
    for t in (*types, *(n.result.type for n in lowered.nodes)):
        if t.shape != result.type.shape and int(numel(t.shape)) != 1:
            raise UnsupportedError(
                f"a kernel works on arrays of one shape, and '{graph.name}' on {t} and {result.type}"
            )
    lines: list[str] = []
    names: dict[Value, str] = {}
    inputs = tuple(f"in{k}" for k in range(len(types)))
    for source, i in zip(inputs, lowered.inputs, strict=True):
        index = "0" if int(numel(i.type.shape)) == 1 else "k"
        names[i.value] = _line(lines, len(names), i.type, f"{source}[{index}]")
    for node in lowered.nodes:
        names[node.result] = _line(lines, len(names), node.result.type, _expression(node, names))
    body = ["uint k = thread_position_in_grid.x;", *lines, f"out[k] = {names[result]};"]
    return MetalKernel(
        NameAllocator().fresh(name), inputs, result.type, tuple(types), "\n".join(f"    {line}" for line in body)
    )


def _line(lines: list[str], number: int, t: TensorType, expression: str) -> str:
    kind = TYPES.get(t.dtype.name)
    if kind is None:
        raise UnsupportedError(f"a kernel cannot compute with {t.dtype}")
    lines.append(f"{kind} v{number} = {kind}({expression});")
    return f"v{number}"


def _expression(node: Node, names: dict[Value, str]) -> str:
    if node.is_constant:
        return _literal(node.attributes["value"], node.result.type)
    if node.op is ops.cast and not (_is_float(node.operands) and not node.result.dtype.is_float):
        return names[node.operands[0]]  # type: ignore[index]
    if not covers(node):
        raise UnsupportedError(f"a kernel has no '{node.op.name}'", facts=[str(node.origin)])
    half = any(v is not None and v.dtype.name == "float16" for v in node.operands)
    operands = [f"float({names[v]})" if half else names[v] for v in node.operands if v is not None]
    return EXPRESSIONS[node.op.name].format(*operands)


def _is_float(operands: Sequence[Value | None]) -> bool:
    return any(v is not None and v.dtype.is_float for v in operands)


def _literal(value: Any, t: TensorType) -> str:
    if t.dtype.is_bool:
        return "true" if value else "false"
    if not t.dtype.is_float:
        return str(int(value))
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return {"inf": "HUGE_VALF", "-inf": "-HUGE_VALF"}.get(str(number), "NAN")
    return f"{number!r}f"
