"""Interpretation of jaxprs: each equation becomes operations of ``mithril.ops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core

from mithril import ops
from mithril.graph import Builder, MithrilError, Origin, UnsupportedError, equal, is_static
from mithril_importing.arrays import arrays_of, as_value, broadcast, reshape
from mithril_importing.complex_numbers import Complex, part_of
from mithril_importing.declared_types import other_type, type_text
from mithril_importing.support import counted, missing_lines
from mithril_jax.importing import complex_numbers, custom, elementwise, indexing, linear_algebra, products, shapes  # noqa: F401  # rows
from mithril_jax.importing.elementwise import threefry
from mithril_jax.importing.table import ROWS, cast

INLINED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_lin", "xla_call")
DECOMPOSED = ("random_gamma",)  # their implementation is a function of other primitives
CONTROL = (
    *("scan", "while", "cond", "reduce", "reduce_window", "custom_linear_solve"),
    *(*custom.CUSTOM, *INLINED, *DECOMPOSED),
)
RANDOM = ("random_wrap", "random_unwrap", "random_bits", "random_split", "random_fold_in", "random_seed")
WITH_GRADIENT = {"relu": ops.relu, "relu6": ops.relu6}  # of jax.nn: their gradient at the kink is that of JAX


def require_supported(jaxpr: Any) -> None:
    """Raise UnsupportedError with all primitives without a row, the number of their uses and the first line."""
    missing: dict[str, list[str]] = {}
    for equation in custom.equations(jaxpr):
        name = equation.primitive.name
        if name not in ROWS and name not in CONTROL and name not in RANDOM and name not in complex_numbers.FUNCTIONS:
            missing.setdefault(name, []).append(str(origin_of(equation, "")) or "the function")
    if not missing:
        return
    raise UnsupportedError(
        f"{counted(len(missing), 'primitive')} of this function cannot be expressed: {', '.join(sorted(missing))}",
        facts=missing_lines(missing),
        hint="replace them in the function",
    )


def origin_of(equation: Any, path: str) -> Origin:
    """Return the user's line of an equation."""
    frame = jax._src.source_info_util.user_frame(equation.source_info.traceback)
    return Origin(path) if frame is None else Origin(path, frame.file_name, frame.start_line)


class Interpreter:
    """A run over a jaxpr; ``sizes`` are the values of its symbolic sizes."""

    def __init__(self, path: str, sizes: Mapping[str, Any], *, is_tangent: bool = False) -> None:
        self.path, self.sizes = path, sizes
        self.is_tangent = is_tangent  # whether custom derivatives are ignored: there are none of the second order

    def closed(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr with its constants."""
        return self.run(closed.jaxpr, [np.asarray(c) for c in closed.consts], arguments)

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> Any:
            return self.literal(atom) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self.results_of(equation, [read(a) for a in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                values[variable] = result
        return [read(a) for a in jaxpr.outvars]

    @staticmethod
    def literal(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def results_of(self, equation: Any, operands: list[Any], *, checks: bool = True) -> Sequence[Any]:
        """Return the results of an equation; with ``checks`` they have the types that JAX recorded."""
        builder = Builder.current()
        with builder.at(origin_of(equation, self.path), builder.tags):
            results = self._equation(equation, operands)
            if checks:
                self._require_avals(equation, results)
        return results

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        # Functions are entered instead: only operations inside them have complex operands.
        if name not in INLINED and any(
            complex_numbers.is_complex(v.aval) for v in (*equation.invars, *equation.outvars)
        ):
            return self._of_complex(equation, operands)
        if name in INLINED:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            return (
                self.closed(inner, operands) if isinstance(inner, core.ClosedJaxpr) else self.run(inner, (), operands)
            )
        if name in DECOMPOSED:
            function = partial(equation.primitive.impl, **params)
            return self.closed(jax.make_jaxpr(function)(*(v.aval for v in equation.invars)), operands)
        if name in custom.CUSTOM:
            return self._custom(equation, operands)
        if name in CONTROL:
            control: dict[str, Any] = {"scan": self._scan, "while": self._while, "cond": self._cond}
            control["reduce"], control["reduce_window"] = self._reduce, self._reduce_window
            control["custom_linear_solve"] = self._linear_solve
            results: Sequence[Any] = control[name](operands, **params)
            return results
        if name in RANDOM:
            return [_random(name, operands, params)]
        if any(_is_key(v.aval) for v in equation.invars) and name in complex_numbers.BOTH_PARTS:
            return [self._of_keys(equation, operands)]
        try:
            result = arrays_of(ROWS[name](*operands, **{n: self._sized(p) for n, p in params.items()}))
        except MithrilError as error:
            raise error.with_facts(f"in {name} of {origin_of(equation, self.path)}") from None
        # The signature of a row lists the parameters that it supports.
        except TypeError as error:
            message = f"'{name}' is called with parameters that are not supported: {error}"
            raise UnsupportedError(message, facts=[str(origin_of(equation, self.path))]) from error
        return result if equation.primitive.multiple_results else [result]

    def _of_keys(self, equation: Any, operands: list[Any]) -> Any:
        """Move keys, each of which is a last axis of two words."""
        params = {n: self._sized(p) for n, p in equation.params.items()}
        words = []
        for k in (0, 1):
            parts = [x[..., k] if _is_key(v.aval) else x for x, v in zip(operands, equation.invars, strict=True)]
            words.append(ROWS[equation.primitive.name](*parts, **params))
        return ops.stack(*words, axis=-1)

    def _require_avals(self, equation: Any, results: Sequence[Any]) -> None:
        """Raise UnsupportedError if a result has another shape or dtype than in JAX."""
        for result, variable in zip(results, equation.outvars, strict=True):
            aval = variable.aval
            if isinstance(variable, core.DropVar) or not isinstance(getattr(aval, "dtype", None), np.dtype):
                continue  # nothing reads the result, or it is a key
            parts, kind = [result], aval.dtype
            if isinstance(result, Complex):
                parts, kind = [result.re, result.im], part_of(kind)
            sizes = self._sized(tuple(aval.shape))
            for x in parts:
                actual = other_type(x, kind, sizes, lambda a, b: equal(a, b) is not False)
                if actual is not None:
                    raise UnsupportedError(
                        f"a result of '{equation.primitive.name}' is {actual}, but in JAX it is "
                        f"{type_text(kind, sizes)}",
                        facts=[str(origin_of(equation, self.path))],
                        hint="please report this error",
                    )

    def _of_complex(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, origin = equation.primitive.name, str(origin_of(equation, self.path))
        if name in CONTROL and name != "custom_linear_solve":
            raise UnsupportedError(
                f"complex numbers in '{name}' cannot be expressed",
                facts=[origin],
                hint="pass their real and imaginary parts",
            )
        try:
            return complex_numbers.apply(equation, operands, {n: self._sized(p) for n, p in equation.params.items()})
        except MithrilError as error:
            raise error.with_facts(f"in {name} of {origin}") from None

    def _sized(self, parameter: Any) -> Any:
        """Return a parameter with symbolic sizes as Dims."""
        if isinstance(parameter, tuple) and type(parameter) is tuple:
            return tuple(self._sized(p) for p in parameter)
        if hasattr(parameter, "_evaluate"):
            return parameter._evaluate(dict(self.sizes))
        return parameter

    # -- control flow ------------------------------------------------------------------------------------------------
    def _scan(
        self, operands: list[Any], jaxpr: Any, length: Any, num_consts: int, num_carry: int, reverse: bool, **_: Any
    ) -> Sequence[Any]:
        consts, rest = operands[:num_consts], operands[num_consts:]
        carry, xs = [as_value(x) for x in rest[:num_carry]], [as_value(x) for x in rest[num_carry:]]
        counter = not carry  # a scan requires a state

        def body(state: Any, elements: Any) -> Any:
            inner = () if counter else state
            results = [as_value(y) for y in self.closed(jaxpr, [*consts, *inner, *(elements or ())])]
            return (state if counter else tuple(results[:num_carry])), tuple(results[num_carry:]) or None

        initial = (as_value(np.int32(0)),) if counter else tuple(carry)
        steps = self._sized(length)
        last, ys = ops.scan(body, initial, tuple(xs) or None, length=steps, reverse=reverse)
        return [*(() if counter else last), *(ys or ())]

    def _while(
        self, operands: list[Any], cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int, **_: Any
    ) -> Sequence[Any]:
        of_condition, rest = operands[:cond_nconsts], operands[cond_nconsts:]
        of_body, state = rest[:body_nconsts], tuple(as_value(x) for x in rest[body_nconsts:])
        return ops.while_loop(  # type: ignore[no-any-return]
            lambda *s: as_value(self.closed(cond_jaxpr, [*of_condition, *_state(s)])[0]),
            lambda *s: tuple(as_value(y) for y in self.closed(body_jaxpr, [*of_body, *_state(s)])),
            state,
        )

    def _cond(self, operands: list[Any], branches: Any, **_: Any) -> Sequence[Any]:
        """Select a branch; more than two are nested."""
        number, *arguments = operands
        if isinstance(number, np.ndarray):
            return self.closed(branches[int(np.clip(int(number), 0, len(branches) - 1))], arguments)
        values = [as_value(x) for x in arguments]

        def branch(k: int) -> Callable[..., Any]:
            return lambda *xs: tuple(as_value(y) for y in self.closed(branches[k], xs))

        def choose(k: int) -> Callable[..., Any]:
            if k == len(branches) - 1:
                return branch(k)
            return lambda *xs: ops.cond(ops.less_equal(cast(number, np.int32), k), branch(k), choose(k + 1), *xs)

        return choose(0)(*values)  # type: ignore[no-any-return]

    # -- reductions by a function, and linear solves -----------------------------------------------------------------
    def _reduce(self, operands: list[Any], jaxpr: Any, dimensions: Any, **_: Any) -> Sequence[Any]:
        count = len(operands) // 2
        order = [*dimensions, *(k for k in range(len(operands[0].shape)) if k not in dimensions)]
        rows = []
        for x in operands[:count]:
            shape = tuple(x.shape[k] for k in order[len(dimensions) :])
            rows.append(reshape(ops.transpose(x, perm=tuple(order)) if order else x, (-1, *shape)))
        return self._combined(jaxpr, rows, operands[count:])

    def _reduce_window(self, operands: list[Any], jaxpr: Any, consts: Any, **windows: Any) -> Sequence[Any]:
        count = len(operands) // 2
        starts = operands[count:]
        rows = [
            ops.stack(*products.elements_of_windows(x, start, **windows), axis=0)
            for x, start in zip(operands[:count], starts, strict=True)
        ]
        return self._combined(core.ClosedJaxpr(jaxpr, consts), rows, starts)

    def _combined(self, jaxpr: Any, rows: list[Any], starts: Sequence[Any]) -> Sequence[Any]:
        """Combine rows by an associative function of elements: halves with each other, then with the start."""
        if not all(is_static(tuple(x.shape)) for x in rows):
            raise UnsupportedError("a reduction by a function requires static sizes")
        length, *rest = rows[0].shape
        xs = [reshape(x, (length, -1)) for x in rows]
        while length > 1:
            half = length // 2
            y = self._on_elements(jaxpr, [*(x[:half] for x in xs), *(x[half : 2 * half] for x in xs)])
            xs = [ops.concat(a, x[2 * half :], axis=0) if length % 2 else a for a, x in zip(y, xs, strict=True)]
            length -= half
        shape = tuple(rows[0].shape[1:])
        initial = [broadcast(reshape(s, (1, 1)), (1, int(np.prod(shape)))) for s in starts]
        results = self._on_elements(jaxpr, [*initial, *xs]) if length else initial
        return [reshape(y, rest) for y in results]

    def _on_elements(self, jaxpr: Any, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a jaxpr of numbers for all elements."""
        shape = tuple(operands[0].shape)
        specs = [jax.ShapeDtypeStruct((int(np.prod(shape)),), v.aval.dtype) for v in jaxpr.jaxpr.invars]
        mapped = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr)))(*specs)
        return [reshape(y, shape) for y in self.closed(mapped, [reshape(x, (-1,)) for x in operands])]

    def _linear_solve(self, operands: list[Any], const_lengths: Any, jaxprs: Any) -> Sequence[Any]:
        """Return the results of the solver; the operations in it have its derivative."""
        before = const_lengths.matvec + const_lengths.vecmat
        solver = operands[before : before + const_lengths.solve]
        return self.closed(jaxprs.solve, [*solver, *operands[sum(const_lengths) :]])

    # -- custom derivatives ------------------------------------------------------------------------------------------
    def _custom(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Return the results of the function, to which terms are added that are 0 and have its custom derivative."""
        if self.is_tangent or not custom.is_users(equation):
            function = WITH_GRADIENT.get(custom.name_of(equation))
            if function is not None:
                return [function(*operands)]
            return self.closed(equation.params["call_jaxpr"], operands)
        frozen = [ops.stop_gradient(as_value(x)) for x in operands]
        results = self.closed(equation.params["call_jaxpr"], frozen)
        moving = [
            ops.where(ops.isfinite(f), ops.sub(as_value(x), f), 0.0)
            for x, f, v in zip(operands, frozen, equation.invars, strict=True)
            if custom.differentiable(v.aval)
        ]
        tangent = Interpreter(self.path, self.sizes, is_tangent=True)
        terms = iter(tangent.closed(custom.tangents(equation), [*frozen, *moving]))
        completed = []
        for y, v in zip(results, equation.outvars, strict=True):
            if custom.differentiable(v.aval):
                term = as_value(next(terms))
                y = ops.add(as_value(y), ops.where(ops.isfinite(term), term, 0.0))
            completed.append(y)
        return completed


def _is_key(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a loop, which are passed one by one or as a tuple."""
    return state[0] if len(state) == 1 and isinstance(state[0], tuple) else state


# -- random numbers -----------------------------------------------------------------------------------------------
def _random(name: str, operands: list[Any], params: Mapping[str, Any]) -> Any:
    """Return keys (pairs of uint32) or bits, equal to those of ``jax.random`` with its default generator."""
    if name in ("random_wrap", "random_unwrap"):
        return operands[0]
    if name == "random_seed":
        seed = cast(operands[0], np.uint32)
        return ops.stack(np.zeros(tuple(seed.shape), np.uint32), seed, axis=-1)
    key = operands[0]
    batch = tuple(key.shape[:-1])  # of keys
    k0, k1 = (reshape(key[..., k], (*batch, 1)) for k in (0, 1))
    if name == "random_fold_in":
        data = cast(operands[1], np.uint32)
        return ops.concat(*threefry(k0, k1, np.zeros(1, np.uint32), reshape(data, (*data.shape, 1))), axis=-1)
    shape = tuple(params["shape"])
    count = int(np.prod(shape))
    halves = threefry(k0, k1, np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    if name == "random_split":
        return reshape(ops.stack(*halves, axis=-1), (*batch, *shape, 2))
    if params["bit_width"] == 64:
        high, low = (cast(x, np.uint64) for x in halves)
        return reshape(ops.bitwise_or(ops.shift_left(high, np.uint64(32)), low), (*batch, *shape))
    bits = cast(ops.bitwise_xor(*halves), np.dtype(f"uint{params['bit_width']}"))
    return reshape(bits, (*batch, *shape))
