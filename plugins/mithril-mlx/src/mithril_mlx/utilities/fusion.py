"""``MlxKernelFusion``: sequences of operations that are fused by patterns, with verified results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import CheckedType
from mithril.graph import Decisions, Graph, InputError, MithrilError, UnsupportedError, operations
from mithril.passes import Rule, RuleSet, rule
from mithril_mlx.metal import metal_kernel
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.op_chain import arity, arrays_for, build, canonical_name, chain, type_of
from mithril_tools.diff import relative_error

ACTIVATIONS = frozenset(name for name, op in operations().items() if op.activation is not None)
Implementation = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class FusionPattern:
    """A fusion pattern: ``fused_implementation(arrays)`` replaces the sequence ``operations``.

    An element of ``operations`` may be a set of names. With ``repeats`` the last one may occur any number of times.
    Without an implementation the sequence is compiled to one kernel. ``tolerance`` is the accepted relative error.
    """

    name: str
    operations: Sequence[str | frozenset[str]]
    fused_implementation: Implementation | None = None
    repeats: bool = False
    tolerance: float = 1e-4

    def length(self, operations: Sequence[str]) -> int:
        """Return the number of leading operations that the pattern covers; 0 if it does not match."""
        if len(operations) < len(self.operations):
            return 0
        if not all(
            _fits(pattern_op, operation) for pattern_op, operation in zip(self.operations, operations, strict=False)
        ):
            return 0
        count = len(self.operations)
        while self.repeats and count < len(operations) and _fits(self.operations[-1], operations[count]):
            count += 1
        return count


def _fits(pattern_op: str | frozenset[str], operation: str) -> bool:
    return (
        canonical_name(operation) in pattern_op
        if isinstance(pattern_op, frozenset)
        else canonical_name(operation) == canonical_name(pattern_op)
    )


def _addmm(arrays: list[Any]) -> Any:
    x, w, bias = arrays
    return mx.addmm(bias, x, w)


STANDARD = (
    FusionPattern("matmul_add_bias", ("matmul", "add"), _addmm),
    FusionPattern("add_multiply", ("add", "multiply")),
    FusionPattern("activation_chain", (ACTIVATIONS, ACTIVATIONS), repeats=True),
)
# Removing the rounding changes results by up to half a step, so this is only done on request.
QUANTIZE_DEQUANTIZE = FusionPattern(
    "quantize_dequantize", ("quantize", "dequantize"), lambda arrays: arrays[0], tolerance=float("inf")
)


class MlxKernelFusion(metaclass=CheckedType):
    """Fusion of operation sequences by patterns, the longest match first.

    A pattern is used for given shapes and dtypes after its results have equaled those of the separate operations, for
    the arrays of the call and for negated, random and special ones. A pattern that fails or differs is not used, and
    ``decisions`` records it. ``eliminate_quantization`` removes quantize-dequantize pairs, which changes results by
    their rounding.
    """

    def __init__(self, *, eliminate_quantization: bool = False) -> None:
        self.patterns: list[FusionPattern] = [*STANDARD, *([QUANTIZE_DEQUANTIZE] * eliminate_quantization)]
        self.decisions = Decisions()
        self._rules: list[Rule] = [*RULES, *([ELIMINATE] * eliminate_quantization)]
        self._rows: dict[Any, Callable[..., Any]] = {}  # unfused, by operations and types
        self._kernels: dict[Any, Callable[..., Any]] = {}  # one kernel, by operations and types
        self._verdicts: dict[Any, bool] = {}

    # -- rows of operations ------------------------------------------------------------------------------------------
    def add_pattern(self, pattern: FusionPattern) -> None:
        """Add a pattern that takes precedence over the existing ones."""
        if any(p.name == pattern.name for p in self.patterns):
            raise InputError(f"there is a pattern '{pattern.name}' already")
        if not pattern.operations:
            raise InputError(f"pattern '{pattern.name}' has no operations")
        self.patterns.insert(0, pattern)

    def try_fuse(self, operations: Sequence[str], arrays: Sequence[Any]) -> Any:
        """Compute the operations in sequence, or return None if no pattern covers two of them.

        The first operation takes its operands from ``arrays``; the others the previous result and the next arrays.
        """
        parts = self._split_into_patterns(operations)
        if all(pattern is None for pattern, _ in parts):
            return None
        rest = list(arrays)
        if len(rest) != arrays_for(operations):
            # Raises an error that lists the expected names.
            chain(operations, [type_of(a) for a in rest])
        result: Any = None
        for k, (pattern, names) in enumerate(parts):
            count = arrays_for(names) - (k > 0)
            arguments = ([] if result is None else [result]) + rest[:count]
            del rest[:count]
            result = self._unfused(names, arguments) if pattern is None else self._fused(pattern, names, arguments)
        return result

    def _split_into_patterns(self, operations: Sequence[str]) -> list[tuple[FusionPattern | None, tuple[str, ...]]]:
        """Split the sequence into parts, each with its pattern or None."""
        parts: list[tuple[FusionPattern | None, tuple[str, ...]]] = []
        index = 0
        while index < len(operations):
            arity(operations[index])  # raises for an unknown name
            lengths = [(p.length(operations[index:]), p) for p in self.patterns]
            count, pattern = max(lengths, key=lambda found: found[0], default=(0, None))
            count = max(count, 1)
            parts.append((pattern if count > 1 else None, tuple(operations[index : index + count])))
            index += count
        return parts

    def _unfused(self, names: tuple[str, ...], arrays: list[Any]) -> Any:
        types = tuple(type_of(a) for a in arrays)
        if (names, types) not in self._rows:
            self._rows[names, types] = build(chain(names, types), jit=False)
        return self._rows[names, types](*arrays)

    def _fused(self, pattern: FusionPattern, names: tuple[str, ...], arrays: list[Any]) -> Any:
        key = (pattern.name, names, tuple(type_of(a) for a in arrays))
        if self._verdicts.get(key, True):
            try:
                result = self._computed(pattern, names, arrays)
                if key in self._verdicts:
                    return result
                is_equal = self._results_agree(pattern, result, self._unfused(names, arrays))
                self._verdicts[key] = is_equal and all(self._agrees(pattern, names, t) for t in _trials(arrays))
                if self._verdicts[key]:
                    return result
            except Exception as error:  # any exception of the pattern's code or of a compiler
                self._verdicts[key] = False
                message = error.what if isinstance(error, MithrilError) else f"{type(error).__name__}: {error}"
                self.decisions.record(
                    "fallback", f"'{pattern.name}' failed, {', '.join(names)} run one by one: {message}"
                )
        return self._unfused(names, arrays)

    def _agrees(self, pattern: FusionPattern, names: tuple[str, ...], arrays: list[Any]) -> bool:
        return self._results_agree(pattern, self._computed(pattern, names, arrays), self._unfused(names, arrays))

    def _computed(self, pattern: FusionPattern, names: tuple[str, ...], arrays: list[Any]) -> Any:
        if pattern.fused_implementation is not None:
            result = pattern.fused_implementation(arrays)
        else:
            types = tuple(type_of(a) for a in arrays)
            if (names, types) not in self._kernels:
                self._kernels[names, types] = self._kernel(chain(names, types), pattern.name)
            result = self._kernels[names, types](*arrays)
        mx.eval(result)
        return result

    def _kernel(self, graph: Graph, name: str) -> Callable[..., Any]:
        """Build one kernel: generated Metal code if it covers the graph, else mx.compile."""
        if mx.metal.is_available() and mx.default_device() == mx.gpu:
            try:
                return metal_kernel(graph, name).run
            except UnsupportedError as error:
                self.decisions.record("choice", f"'{name}' is compiled by MLX: {error.what}")
        return build(graph, jit=True)  # type: ignore[no-any-return]

    def _results_agree(self, pattern: FusionPattern, result: Any, expected: Any) -> bool:
        if not isinstance(result, mx.array) or result.shape != expected.shape or result.dtype != expected.dtype:
            description = (
                f"{result.dtype}{list(result.shape)}" if isinstance(result, mx.array) else f"a {type(result).__name__}"
            )
            description = f"it gave {description}, not {expected.dtype}{list(expected.shape)}"
        else:
            reference = _numpy(expected)
            defined = np.isfinite(reference)  # otherwise the operations themselves give nan or overflow
            error = relative_error(reference[defined], _numpy(result)[defined]) if defined.any() else 0.0
            if error <= pattern.tolerance:
                return True
            description = f"its results differ by {error:.2g}"
        self.decisions.record("fallback", f"'{pattern.name}' is not used: {description}")
        return False

    # -- compiled models ---------------------------------------------------------------------------------------------
    def add_rule(
        self, before: Callable[..., Any], after: Callable[..., Any], *, exact: bool = False, name: str
    ) -> None:
        """Add a pattern for compiled models: two functions of the same values (see ``ml.rule``)."""
        self._rules.insert(0, rule(before, after, exact=exact, name=name))

    @property
    def rules(self) -> RuleSet:
        """The patterns as a pass: ``ml.compile(model, "mlx", custom_passes=[fusion.rules])``."""
        return RuleSet("mlx-fusion", self._rules)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 30.0, -30.0, 1e-3, -1e-3)


def _trials(arrays: list[Any]) -> Iterator[list[Any]]:
    """Yield arrays of the same types for comparison: negated, random, and special values.

    One set of arrays is not enough: ``a + b`` equals ``relu(a) + b`` wherever a is positive. Integers may be indices,
    so only their order changes.
    """
    random = np.random.default_rng(0)
    for kind in ("negated", "random", "special"):
        yield [_random_like(a, kind, random) for a in arrays]


def _random_like(array: Any, kind: str, random: np.random.Generator) -> Any:
    if not isinstance(array, mx.array):
        return array
    if not mx.issubdtype(array.dtype, mx.floating):
        flat = np.array(array).reshape(-1)
        return mx.array(random.permutation(flat).reshape(array.shape)).astype(array.dtype)
    if kind == "negated":
        return -array
    values = random.normal(0.0, 3.0, array.size) if kind == "random" else random.choice(SPECIAL, array.size)
    return mx.array(values.reshape(array.shape).astype(np.float32)).astype(array.dtype)


def _numpy(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _rules() -> tuple[list[Rule], Rule]:
    from mithril.ops import cast, dequantize, linear, matmul, quantize, transpose

    product = rule(
        lambda x, w, b: matmul(x, w) + b,
        lambda x, w, b: linear(x, transpose(w, perm=(1, 0)), b),
        exact=False,
        name="matmul_add_bias",
        when=lambda x, w, b: (len(w.shape) == 2 and len(b.shape) == 1) or "the weights have two axes, the bias one",
    )
    rounding = rule(
        lambda x, scale: dequantize(quantize(x, scale), scale),
        lambda x, scale: cast(x, dtype=scale.dtype),
        exact=False,
        name="quantize_dequantize",
    )
    return [product], rounding


RULES, ELIMINATE = _rules()
