"""Calls written out: taken where nothing has changed, left to the checked way otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mithril.backend.fast_path import FEW, quick


def call(params: Any, inputs: Any) -> Any:
    return {"y": sum(x.sum() for x in (*params.values(), *inputs.values()))}


def some(count: int, prefix: str = "w") -> dict[str, Any]:
    return {f"{prefix}.{k}": np.full((2, k + 1), k, np.float32) for k in range(count)}


@pytest.mark.parametrize("count", [0, 1, 2, FEW, FEW + 1, 40])
def test_the_same_parameters_are_taken_and_no_others(count: int) -> None:
    params, inputs = some(count), some(2, "x")
    made = quick(call, params, inputs)
    assert made(params, inputs) == call(params, inputs)
    assert (made(dict(params), inputs) is None) == bool(params)
    params["more"] = np.ones(3)
    assert made(params, inputs) is None
    del params["more"]
    assert made(params, inputs) is not None
    for name, x in list(params.items()):
        params[name] = x.copy()
        assert made(params, inputs) is None
        params[name] = x
    assert made(params, inputs) is not None


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        {},
        3,
        np.zeros((2, 1), np.float32),
        {"x.0": np.zeros((2, 1), np.float32)},
        {**some(2, "x"), "x.2": np.zeros(3)},
        {**some(2, "x"), "x.1": np.zeros((2, 1), np.float32)},
        {**some(2, "x"), "x.1": np.zeros((2, 2))},
        {**some(2, "x"), "x.1": [[0.0, 0.0], [0.0, 0.0]]},
        {**some(2, "x"), "x.1": None},
    ],
)
def test_inputs_of_other_kinds_are_left(inputs: Any) -> None:
    params = some(1)
    made = quick(call, params, some(2, "x"))
    assert made(params, inputs) is None
    assert made(params, dict(reversed(some(2, "x").items()))) is not None


def test_equal_dtypes_that_are_different_objects_are_taken() -> None:
    params: dict[str, Any] = {}
    made = quick(call, params, {"x": np.zeros(3, np.float32)})
    other = np.zeros(3, np.dtype("f4", metadata={"unit": "m"}))
    assert other.dtype is not np.dtype("f4") and made(params, {"x": other}) is not None


def test_errors_of_the_call_are_not_taken_for_other_inputs() -> None:
    def fails(params: Any, inputs: Any) -> Any:
        raise KeyError("inside")

    params: dict[str, Any] = {}
    with pytest.raises(KeyError, match="inside"):
        quick(fails, params, some(1, "x"))(params, some(1, "x"))


def test_an_executable_may_have_a_better_one() -> None:
    class Better:
        def __call__(self, params: Any, inputs: Any) -> Any:
            return call(params, inputs)

        def quick(self, params: Any, inputs: Any, otherwise: Any) -> Any:
            return lambda p, i: "better" if len(i) == 1 else otherwise(p, i)

    params = some(1)
    made = quick(Better(), params, some(2, "x"))
    assert made(params, some(1, "x")) == "better"
    assert made(params, some(2, "x")) == call(params, some(2, "x"))


def test_names_may_be_any_text() -> None:
    inputs = {'it\'s a "name"\n': np.zeros(2), "x0": np.ones(2)}
    params: dict[str, Any] = {"params": np.ones(1)}
    assert quick(call, params, inputs)(params, inputs) == call(params, inputs)
