"""Conformance of a backend: constants, folded constants, scalars, parameters and states behave as arguments do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mithril.compiler import compile
from mithril.graph import ALL, Builder, DType, MithrilError, Value, dtype as as_dtype, operation
from mithril.models import Layer, Model

SHAPES: dict[str, tuple[int, ...]] = {
    "rank0": (),
    "single": (1,),
    "empty": (0, 2),
    "rank1": (5,),
    "rank2": (2, 3),
    "large": (3, 6000),  # beyond 2**14 bytes in every dtype: kept in a file next to the source
}


class ConstantsConformance:
    """A part of ``BackendConformance``: for each dtype a model that holds an array of every shape in every role."""

    @pytest.mark.filterwarnings("ignore::mithril.graph.errors.OptionWarning")  # not every backend reads jit
    @pytest.mark.parametrize("way", ["plain", "optimized", "cached"])
    @pytest.mark.parametrize("dtype", [d.name for d in ALL])
    def test_constants(self, dtype: str, way: str, tmp_path: Path) -> None:
        """Require the same value, dtype and shape in every role, or an error that names the backend."""
        backend, kind = self.make(), as_dtype(dtype)  # type: ignore[attr-defined]
        layer = EveryRole(kind)
        options: dict[str, Any] = {"optimization_level": "medium"}
        if way == "plain":
            options = {"optimization_level": "none", "jit": self.jit}  # type: ignore[attr-defined]
        if way == "cached":
            options |= {"cache": True, "cache_dir": tmp_path}

        def run() -> dict[str, np.ndarray[Any, Any]]:
            model = Model()
            model |= layer(x="x", **{name: name for name in layer.outputs})
            compiled = compile(model, backend, shapes={"x": [2]}, **options)
            params = {name: backend.array(a) for name, a in layer.params.items()}
            state = {name: backend.array(a) for name, a in layer.states.items()}
            results, after = compiled.evaluate(params, {"x": np.zeros(2, np.float32)}, state=state)
            return {n: backend.to_numpy(a) for n, a in {**results, **after}.items()}

        if kind not in backend.dtypes:
            with pytest.raises(MithrilError, match=f"(?i){backend.name}"):
                run()
            return
        actual = run()
        if way == "cached":
            actual = run()
        wrong = [
            text for name, expected in layer.expected().items() if (text := difference(name, actual[name], expected))
        ]
        assert not wrong, f"{len(wrong)} of {len(actual)} results differ:\n" + "\n".join(wrong)


class EveryRole(Layer):
    """Gives an array of every shape in every role: returned unchanged, and as an operand."""

    inputs = ("x",)

    def __init__(self, kind: DType) -> None:
        self.kind = kind
        self.arrays = {label: values(kind, shape) for label, shape in SHAPES.items()}
        self.params = {f"every_role.param_{label}": reversed_elements(a) for label, a in self.arrays.items()}
        self.states = {f"every_role.state_{label}": a for label, a in self.arrays.items()}
        self.outputs = ("seen", *(name for name in self.expected() if name not in self.states))

    def build(self, x: Value) -> tuple[Value, ...]:
        larger = operation("logical_or" if self.kind.is_bool else "maximum")
        builder, results = Builder.current(), {"seen": x}
        for label, array in self.arrays.items():
            constant, other, number = builder.constant(array), builder.constant(reversed_elements(array)), first(array)
            param = self.param(f"param_{label}", array.shape, dtype=self.kind)
            state = self.state(f"state_{label}", array.shape, dtype=self.kind)
            results |= {
                f"constant_{label}": constant,
                f"folded_{label}": larger(operation("reshape")(constant, shape=(1, *array.shape)), other),
                f"operand_{label}": larger(param, constant),
                f"filled_{label}": operation("full")(shape=array.shape, value=number, dtype=self.kind),
                f"scalar_{label}": larger(param, builder.constant(number, self.kind)),
                f"param_{label}": param,
                f"state_{label}": state,
            }
            self.update_state(f"state_{label}", larger(state, param))
        return tuple(results.values())

    def expected(self) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the results and the next state with NumPy."""
        larger: Any = np.logical_or if self.kind.is_bool else np.errstate(invalid="ignore")(np.maximum)
        results: dict[str, np.ndarray[Any, Any]] = {}
        for label, array in self.arrays.items():
            other, number = reversed_elements(array), first(array)
            results |= {
                f"constant_{label}": array,
                f"folded_{label}": larger(array[None], other),
                f"operand_{label}": larger(other, array),
                f"filled_{label}": np.full(array.shape, number, array.dtype),
                f"scalar_{label}": larger(other, np.array(number, array.dtype)),
                f"param_{label}": other,
                f"state_{label}": array,
                f"every_role.state_{label}": larger(array, other),
            }
        return results


def values(kind: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return numbers that a narrower dtype would change, starting with another one for each rank."""
    if kind.is_bool:
        numbers = np.array([True, False, False])
    elif kind.is_integer:
        low, high = kind.limits
        numbers = np.array([high - 1, low, 5, high // 3, low + 1], kind.numpy)
    else:
        numbers = np.array([0.1, -0.0, -np.inf, 1 / 3, np.nan, 1 + 2.0**-40], kind.numpy)
    return np.resize(np.roll(numbers, -len(shape)), shape)


def reversed_elements(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of the same dtype and shape with the elements in the opposite order."""
    return array.ravel()[::-1].reshape(array.shape).copy()


def first(array: np.ndarray[Any, Any]) -> Any:
    """Return the first element as a Python number."""
    return array.ravel()[0].item() if array.size else array.dtype.type(0).item()


def difference(name: str, actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str:
    """Return one line about a result that differs in dtype, shape, value or sign of zero, else nothing."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{name}: got {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
    equal = actual == expected
    if as_dtype(expected.dtype).is_float:
        equal = np.where(np.isnan(expected), np.isnan(actual), equal & (np.signbit(actual) == np.signbit(expected)))
    if np.all(equal):
        return ""
    index = np.unravel_index(int(np.argmin(equal)), equal.shape)
    return f"{name}: got {actual[index]!r}, expected {expected[index]!r} at {[int(i) for i in index]}"
