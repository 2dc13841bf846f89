"""Calls that were checked: run at once where nothing has changed, left to the checks otherwise."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mithril.compiler import Program, ProgramKey, ProgramKind, Results
from mithril.compiler.call_records import CallRecords, reject_call, repeated_call, repeated_gradients
from mithril.graph import Decisions


def total(params: Any, inputs: Any) -> Any:
    return {"y": sum(x.sum() for x in (*params.values(), *inputs.values()))}


def some(count: int, prefix: str = "w") -> dict[str, Any]:
    return {f"{prefix}.{k}": np.full((2, k + 1), k, np.float32) for k in range(count)}


def program(call: Any = total, binding: int = 0) -> Any:
    return SimpleNamespace(call=call, request=SimpleNamespace(binding=binding), results=Results(("y",)))


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_parameters_of_the_same_kinds_are_taken_and_no_others(count: int) -> None:
    params, inputs = some(count), some(2, "x")
    call = repeated_call(program(), params, inputs)
    assert call(params, inputs) == call(dict(params), inputs) == total(params, inputs)
    params["more"] = np.ones(3)
    assert call(params, inputs) is None
    del params["more"]
    for name, x in list(params.items()):
        params[name] = x + 1
        assert call(params, inputs) == total(params, inputs)
        for other in (x[:1], x.astype(np.float64), None, 3.0):
            params[name] = other
            assert call(params, inputs) is None
        params[name] = x


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
    call = repeated_call(program(), params, some(2, "x"))
    assert call(params, inputs) is None
    assert call(params, dict(reversed(some(2, "x").items()))) is not None


def test_equal_dtypes_that_are_different_objects_are_taken() -> None:
    call = repeated_call(program(), {}, {"x": np.zeros(3, np.float32)})
    other = np.zeros(3, np.dtype("f4", metadata={"unit": "m"}))
    assert other.dtype is not np.dtype("f4")
    assert call({}, {"x": other}) is not None


def test_errors_of_the_program_are_not_taken_for_other_inputs() -> None:
    def fails(params: Any, inputs: Any) -> Any:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        repeated_call(program(fails), {}, some(1, "x"))({}, some(1, "x"))


def test_a_program_with_parameters_inside_is_only_for_its_binding() -> None:
    """Refuse a call that began before ``bind`` and was kept after it."""
    passed: dict[str, Any] = {}
    call = repeated_call(program(binding=1), passed, some(1, "x"))
    assert call(passed, some(1, "x")) is not None
    assert call({}, some(1, "x")) is None


def test_gradients_are_taken_for_the_same_kinds_and_modes() -> None:
    def both(params: Any, inputs: Any) -> Any:
        return {"y": inputs["x.0"], "grad/w.0": inputs["grad/y"]}

    result = program(both)
    result.results = Results(("y",), (("w.0", "grad/w.0"),))
    params, inputs, slopes = some(1), some(1, "x"), {"y": np.ones(2, np.float32)}
    call = repeated_gradients(result, params, inputs, slopes, None, ("w.0",))
    outputs, gradients = call(some(1), inputs, slopes, None, ("w.0",))
    assert outputs == {"y": inputs["x.0"]}
    assert gradients == {"w.0": slopes["y"]}
    assert call(params, inputs, slopes, True, ("w.0",)) is None
    assert call(params, inputs, slopes, None, None) is None
    assert call(params, inputs, {"y": np.ones(3, np.float32)}, None, ("w.0",)) is None
    assert call(params, inputs, "y", None, ("w.0",)) is None


def test_an_executable_may_have_a_better_function() -> None:
    class Better:
        def __call__(self, params: Any, inputs: Any) -> Any:
            return total(params, inputs)

        def repeated(self, params: Any, inputs: Any, otherwise: Any) -> Any:
            return lambda p, i: "better" if p is params else otherwise(p, i)

    params, inputs, calls = some(1), some(2, "x"), CallRecords(4, Decisions())
    calls.remember_call(program(Better()), params, inputs)
    other_signatures = [some(1) for _ in range(3)]
    for p in (*other_signatures, params):
        assert calls.last(p, inputs) == total(p, inputs)  # nothing comes again: none is made
    assert [calls.last(params, inputs) for _ in range(3)] == [total(params, inputs), "better", "better"]
    assert calls.last(other_signatures[0], inputs) == total(params, inputs)
    assert calls.last(other_signatures[0], inputs) == total(params, inputs)
    assert calls.last(None, inputs) is None


def made(number: int) -> Program:
    nothing: Any = None
    return Program(
        ProgramKey((), ProgramKind(wrt=(str(number),))),
        nothing,
        nothing,
        nothing,
        total,
        Results(("y",)),
        backend=nothing,
    )


def test_an_evicted_program_is_not_kept_by_the_last_call() -> None:
    calls = CallRecords(2, Decisions())
    for number in range(3):
        one = calls.make(made(number).request, lambda request, n=number: made(n))  # type: ignore[misc]
        calls.remember_call(one, {}, {})
        assert calls.last is not reject_call
    calls.make(made(9).request, lambda request: made(9))
    assert calls.last is reject_call
    assert len(calls) == 2


def test_threads_see_one_call_or_another_never_a_mixture() -> None:
    """Two threads alternately store calls of different programs; each result belongs to the arguments."""
    calls = CallRecords(4, Decisions())
    small, large = {"x": np.zeros(1, np.float32)}, {"x": np.zeros(2, np.float32)}
    programs = [program(lambda p, i: ("small", len(i["x"]))), program(lambda p, i: ("large", len(i["x"])))]
    wrong: list[Any] = []

    def run(which: int, inputs: Any) -> None:
        expected = (("small", 1), ("large", 2))[which]
        for _ in range(3000):
            record = calls.last({}, inputs)
            if record is None:
                calls.remember_call(programs[which], {}, inputs)
            elif record != expected:
                wrong.append(record)

    threads = [threading.Thread(target=run, args=arguments) for arguments in ((0, small), (1, large))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
