"""``MlxKernelFusion``: rows of operations computed at once where a pattern knows how, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.base.decisions import Decisions
from mithril.base.errors import InputError, MithrilError, UnsupportedError
from mithril.ir import Graph
from mithril.ops import activations
from mithril.rewrite import Rule, RuleSet, rule
from mithril_mlx.metal import metal_kernel
from mithril_mlx.mlx_loader import mx
from mithril_mlx.utilities.op_chain import arrays_for, build, chain, known, takes, type_of
from mithril_tools.diff import relative_error

ACTIVATIONS = frozenset(op.name for op in vars(activations).values() if getattr(op, "activation", None))
Implementation = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class FusionPattern:
    """``fused_implementation(arrays)`` computes what ``operations`` compute one after the other.

    An operation may be written as a set of names. With ``repeats`` the last one may follow any number of times. Without
    an implementation the row becomes one kernel. ``tolerance`` is the relative error that still counts as the same.
    """

    name: str
    operations: Sequence[str | frozenset[str]]
    fused_implementation: Implementation | None = None
    repeats: bool = False
    tolerance: float = 1e-4

    def length(self, operations: Sequence[str]) -> int:
        """How many of the first operations it covers; zero where it does not match."""
        if len(operations) < len(self.operations):
            return 0
        if not all(_fits(own, given) for own, given in zip(self.operations, operations, strict=False)):
            return 0
        count = len(self.operations)
        while self.repeats and count < len(operations) and _fits(self.operations[-1], operations[count]):
            count += 1
        return count


def _fits(own: str | frozenset[str], given: str) -> bool:
    return known(given) in own if isinstance(own, frozenset) else known(given) == known(own)


def _addmm(arrays: list[Any]) -> Any:
    x, w, bias = arrays
    return mx.addmm(bias, x, w)


STANDARD = (
    FusionPattern("matmul_add_bias", ("matmul", "add"), _addmm),
    FusionPattern("add_multiply", ("add", "multiply")),
    FusionPattern("activation_chain", (ACTIVATIONS, ACTIVATIONS), repeats=True),
)
# What is left out is the rounding, so results differ by up to half a step: only where somebody asks for it.
QUANTIZE_DEQUANTIZE = FusionPattern(
    "quantize_dequantize", ("quantize", "dequantize"), lambda arrays: arrays[0], tolerance=float("inf")
)


class MlxKernelFusion:
    """Finds patterns in rows of operations, the longest first, and computes them fused.

    A pattern is used for given shapes and dtypes once its results have equalled the unfused ones, for the arrays of
    the call and for negated, random and special ones. What fails or differs is computed one by one, and ``decisions``
    says so. ``eliminate_quantization`` drops quantize-dequantize pairs, which changes results by their rounding.
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
        """Try this pattern before those that are already there."""
        if any(p.name == pattern.name for p in self.patterns):
            raise InputError(f"there is a pattern '{pattern.name}' already")
        if not pattern.operations:
            raise InputError(f"pattern '{pattern.name}' has no operations")
        self.patterns.insert(0, pattern)

    def try_fuse(self, operations: Sequence[str], arrays: Sequence[Any]) -> Any:
        """The result of the operations in a row, or None where no pattern covers any two of them.

        The first operation takes its operands from ``arrays``; each further one the result so far and the next arrays.
        """
        parts = self._cut(operations)
        if all(pattern is None for pattern, _ in parts):
            return None
        rest = list(arrays)
        if len(rest) != arrays_for(operations):
            chain(operations, [type_of(a) for a in rest])  # raises, and says what was expected
        made: Any = None
        for k, (pattern, names) in enumerate(parts):
            count = arrays_for(names) - (k > 0)
            given = ([] if made is None else [made]) + rest[:count]
            del rest[:count]
            made = self._unfused(names, given) if pattern is None else self._fused(pattern, names, given)
        return made

    def _cut(self, operations: Sequence[str]) -> list[tuple[FusionPattern | None, tuple[str, ...]]]:
        """The row as parts, each with its pattern."""
        parts: list[tuple[FusionPattern | None, tuple[str, ...]]] = []
        at = 0
        while at < len(operations):
            takes(operations[at])  # an unknown name is told here
            lengths = [(p.length(operations[at:]), p) for p in self.patterns]
            count, pattern = max(lengths, key=lambda found: found[0], default=(0, None))
            count = max(count, 1)
            parts.append((pattern if count > 1 else None, tuple(operations[at : at + count])))
            at += count
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
                made = self._computed(pattern, names, arrays)
                if key in self._verdicts:
                    return made
                same = self._same(pattern, made, self._unfused(names, arrays))
                self._verdicts[key] = same and all(self._agrees(pattern, names, t) for t in _trials(arrays))
                if self._verdicts[key]:
                    return made
            except Exception as error:  # whatever a pattern's own code, or a compiler, has to say
                self._verdicts[key] = False
                what = error.what if isinstance(error, MithrilError) else f"{type(error).__name__}: {error}"
                self.decisions.record("fallback", f"'{pattern.name}' failed, {', '.join(names)} run one by one: {what}")
        return self._unfused(names, arrays)

    def _agrees(self, pattern: FusionPattern, names: tuple[str, ...], arrays: list[Any]) -> bool:
        return self._same(pattern, self._computed(pattern, names, arrays), self._unfused(names, arrays))

    def _computed(self, pattern: FusionPattern, names: tuple[str, ...], arrays: list[Any]) -> Any:
        if pattern.fused_implementation is not None:
            made = pattern.fused_implementation(arrays)
        else:
            types = tuple(type_of(a) for a in arrays)
            if (names, types) not in self._kernels:
                self._kernels[names, types] = self._kernel(chain(names, types), pattern.name)
            made = self._kernels[names, types](*arrays)
        mx.eval(made)
        return made

    def _kernel(self, graph: Graph, name: str) -> Callable[..., Any]:
        """One kernel: our own text on Metal where it covers the graph, else what MLX compiles."""
        if mx.metal.is_available() and mx.default_device() == mx.gpu:
            try:
                return metal_kernel(graph, name).run
            except UnsupportedError as error:
                self.decisions.record("choice", f"'{name}' is compiled by MLX: {error.what}")
        return build(graph, jit=True)  # type: ignore[no-any-return]

    def _same(self, pattern: FusionPattern, made: Any, expected: Any) -> bool:
        if not isinstance(made, mx.array) or made.shape != expected.shape or made.dtype != expected.dtype:
            what = f"{made.dtype}{list(made.shape)}" if isinstance(made, mx.array) else f"a {type(made).__name__}"
            what = f"it gave {what}, not {expected.dtype}{list(expected.shape)}"
        else:
            reference = _numpy(expected)
            defined = np.isfinite(reference)  # elsewhere the operations themselves give nan or overflow
            error = relative_error(reference[defined], _numpy(made)[defined]) if defined.any() else 0.0
            if error <= pattern.tolerance:
                return True
            what = f"its results differ by {error:.2g}"
        self.decisions.record("fallback", f"'{pattern.name}' is not used: {what}")
        return False

    # -- compiled models ---------------------------------------------------------------------------------------------
    def add_rule(
        self, before: Callable[..., Any], after: Callable[..., Any], *, exact: bool = False, name: str
    ) -> None:
        """A pattern for compiled models: two functions of the same values (see ``ml.rule``)."""
        self._rules.insert(0, rule(before, after, exact=exact, name=name))

    @property
    def rules(self) -> RuleSet:
        """The patterns as a pass: ``ml.compile(model, "mlx", custom_passes=[fusion.rules])``."""
        return RuleSet("mlx-fusion", self._rules)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 30.0, -30.0, 1e-3, -1e-3)


def _trials(arrays: list[Any]) -> Iterator[list[Any]]:
    """Yield arrays of the same types to compare on: negated, random, and special values.

    One set of arrays proves little: ``a + b`` equals ``relu(a) + b`` wherever a is positive. Integers may be indices,
    so only their order changes.
    """
    random = np.random.default_rng(0)
    for kind in ("negated", "random", "special"):
        yield [_trial(a, kind, random) for a in arrays]


def _trial(array: Any, kind: str, random: np.random.Generator) -> Any:
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
