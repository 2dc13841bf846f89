"""The conformance kit is put to the test: each deliberate mistake of a backend must be found by it."""

from __future__ import annotations

import numpy as np
import pytest
from _pytest.outcomes import Failed, XFailed

import mithril.ops
from mithril.backend import Lowerings
from mithril.backend.arrays import as_numpy
from mithril.backend.source_backend import SourceBackend
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import MithrilError
from mithril_testing import BackendConformance
from mithril_testing.cases import backend_cases
from mithril_testing.time_limit import limited


def table(**rows):
    lowerings = Lowerings("tiny", ["import numpy as np"], bfloat16="ml_dtypes.bfloat16")
    lowerings.rows(
        {"tanh": "np.tanh({x})", "add": "{a} + {b}", "mul": "{a} * {b}", "sub": "{a} - {b}", "exp": "np.exp({x})"}
    )
    lowerings.rows({name: row for name, row in rows.items() if row is not None})
    return lowerings


def kit(rows=(), *, ops=("tanh",), xfail=(), **changes):
    """Return a conformance class of a tiny backend with these lowerings."""

    class Tiny(SourceBackend):
        name = "tiny"
        tables = {"portable": table(**dict(rows))}

        def array(self, data, dtype=None):
            array = as_numpy(data, self.dtype)
            return array if dtype is None else array.astype(as_dtype(dtype).numpy)

        def to_numpy(self, array):
            return np.asarray(array)

        def is_array(self, x):
            return isinstance(x, (np.ndarray, np.generic))

    for name, value in changes.items():
        setattr(Tiny, name, value)
    return type("Kit", (BackendConformance,), {"backend": Tiny, "ops": ops, "xfail": dict(xfail)})


def cases(cls):
    return list(backend_cases(cls.make().dtypes, cls.ops))


def run_all(cls, test):
    for case in cases(cls):
        expected_arguments = getattr(getattr(cls, test), "accepts", None)
        if expected_arguments is None or expected_arguments(case):
            getattr(cls(), test)(case)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def test_an_honest_backend_passes():
    cls = kit()
    for test in ("test_forward", "test_gradient", "test_symbolic", "test_same_source_twice"):
        run_all(cls, test)
    cls().test_special_values(mithril.ops.tanh)
    cls().test_broadcast_and_strides(mithril.ops.tanh)
    cls().test_array_helpers()


def test_a_case_without_end_fails():
    with pytest.raises(Failed) as failure, limited(0.05):
        while True:
            pass
    assert str(failure.value) == (
        "the case took more than 0.05 seconds of the processor: find what the engine computes or compiles for so long, "
        "or set case_seconds of the class"
    )


def test_dtypes_of_arrays_that_mithril_does_not_know_are_found():
    class Renamed(np.ndarray):
        dtype = "float of another library"

    cls = kit(array=lambda self, data, dtype=None: np.asarray(data, self.dtype.numpy).view(Renamed))
    with pytest.raises(MithrilError, match="unknown dtype 'float of another library'"):
        cls().test_array_helpers()


def test_a_wrong_function_is_found():
    cls = kit({"tanh": "1 / (1 + np.exp(-{x}))"})
    with pytest.raises(AssertionError, match="elements differ"):
        run_all(cls, "test_forward")


def test_a_result_a_little_off_is_found():
    cls = kit({"tanh": "np.tanh({x}) * np.float32(1.0001)"})
    with pytest.raises(AssertionError):
        run_all(cls, "test_forward")


def test_a_wrong_dtype_is_found():
    cls = kit({"tanh": "np.tanh({x}).astype(np.float64)"})
    with pytest.raises(AssertionError, match="dtype float64, expected"):
        run_all(cls, "test_forward")


def test_a_wrong_shape_is_found():
    cls = kit({"tanh": "np.tanh({x}).T"})
    with pytest.raises(AssertionError, match="shape"):
        run_all(cls, "test_forward")


def test_a_deleted_lowering_is_found():
    cls = kit({}, ops=("sinh",))
    with pytest.raises(MithrilError, match="does not support"):
        run_all(cls, "test_forward")


def test_a_deleted_lowering_that_only_gradients_need_is_found():
    lowerings = table()
    lowerings._rows.pop("mul")
    cls = kit(tables={"portable": lowerings})
    run_all(cls, "test_forward")
    with pytest.raises(MithrilError, match="does not support"):
        run_all(cls, "test_gradient")


def test_falling_back_on_the_reference_is_found():
    lowerings = Lowerings("tiny", ["import numpy as np", "from mithril.ops import tanh as reference"])
    lowerings.row("tanh", "reference({x})")
    cls = kit(tables={"portable": lowerings})
    with pytest.raises(AssertionError, match="the backend ran the reference of 'tanh'"):
        run_all(cls, "test_forward")


def test_pretending_to_have_run_is_found():
    """A backend whose executable says it ran less than its graph holds."""
    cls = kit()
    original = cls.make().build

    def build(graph, options=None):
        executable = original(graph, options)
        executable.__class__ = type("Pretender", (type(executable),), {"__slots__": (), "lowered": frozenset()})
        return executable

    cls.make().build = build
    with pytest.raises(AssertionError, match="did not run"):
        run_all(cls, "test_forward")


def test_wrong_special_values_are_found():
    cls = kit({"tanh": "np.where(np.isnan({x}), 0, np.tanh({x})).astype({x}.dtype)"})
    run_all(cls, "test_forward")  # ordinary values are right
    with pytest.raises(AssertionError):
        cls().test_special_values(mithril.ops.tanh)


def test_sizes_baked_in_are_found():
    lowerings = table()

    @lowerings.function("tanh")
    def _(call):
        return f"np.tanh(np.asarray({call.x}, order='C').reshape(-1))[:12].reshape({call.x}.shape)"

    cls = kit(tables={"portable": lowerings})
    with pytest.raises((AssertionError, ValueError)):
        run_all(cls, "test_symbolic")


def test_writing_into_inputs_is_found():
    cls = kit({"exp": "np.exp({x}, out={x})"}, ops=("exp",))
    with pytest.raises(AssertionError, match="was written to"):
        run_all(cls, "test_forward")


def test_text_that_changes_is_found():
    import itertools

    lowerings, counter = table(), itertools.count()

    @lowerings.function("tanh")
    def _(call):
        return f"np.tanh({call.x} + {next(counter)} * 0)"

    cls = kit(tables={"portable": lowerings})
    with pytest.raises(AssertionError):
        run_all(cls, "test_same_source_twice")


def test_a_true_xfail_is_one_and_a_false_one_fails():
    wrong = kit({"tanh": "{x}"}, xfail={"tanh": "identity for the sake of it"})
    with pytest.raises(XFailed):
        run_all(wrong, "test_forward")
    right = kit(xfail={"tanh": "it is said to fail"})
    with pytest.raises((Failed, AssertionError)):
        run_all(right, "test_forward")


def test_an_xfail_needs_a_reason():
    with pytest.raises((Failed, AssertionError, ValueError, MithrilError)):
        run_all(kit({"tanh": "{x}"}, xfail={"tanh": ""}), "test_forward")


def test_wrong_array_helpers_are_found():
    cls = kit(zeros=lambda self, shape, dtype=None: np.ones(shape, np.float32))
    with pytest.raises(AssertionError):
        cls().test_array_helpers()


def test_an_unsupported_dtype_must_be_refused():
    cls = kit(dtypes=frozenset({as_dtype("float32")}), check=lambda self, graph: None)
    with pytest.raises((Failed, AssertionError)):
        cls().test_unsupported_dtype_is_refused()


def test_every_operation_has_cases():
    """Without samples an operation would not be checked."""
    from mithril_testing.selection import core_operations

    controlled = {"if", "while", "scan"}  # need bodies: the kit has graphs of their own for them
    assert [n for n, o in core_operations().items() if not o.samples and n not in controlled] == []


def test_composites_that_run_by_their_bodies_are_checked_with_one_sample():
    """Check code of a backend with all samples; ``--kit-bodies`` and a selection of operations leave nothing out."""

    def checked(cls):
        cases = {name: [c for c in cls.cases() if c.op.name == name] for name in ("softmax", "cumsum")}
        shares = {name: sum(map(cls._is_representative, c)) / len(c) for name, c in cases.items()}
        return {name: shares[name] if cls._is_checked(c[0].op) else "one" for name, c in cases.items()}

    def of_softmax(cls, test):
        return [c.id for c in cls._cases_of(getattr(cls, test)) if c.op.name == "softmax"]

    class Numpy(BackendConformance):
        backend = "numpy"

    class Complete(Numpy):
        _bodies = True

    class Selected(Numpy):
        ops = ("softmax", "cumsum")

    assert checked(Numpy) == {"softmax": "one", "cumsum": 1}
    assert checked(Complete) == checked(Selected) == {"softmax": 1, "cumsum": 1}
    samples = [c.id for c in Numpy.cases() if c.op.name == "softmax" and c.dtype is None]
    assert of_softmax(Numpy, "test_forward") == samples
    assert of_softmax(Numpy, "test_gradient") == ["softmax[0]"]
    for test in ("test_forward", "test_gradient"):
        assert of_softmax(Complete, test) == of_softmax(Selected, test)
        assert {"softmax[0]", "softmax[0-float16]"} <= set(of_softmax(Complete, test))
    assert of_softmax(Numpy, "test_same_source_twice") == []
    assert of_softmax(Complete, "test_same_source_twice") == ["softmax[0]"]
    assert {c.id for c in Numpy._cases_of(Numpy.test_forward)} >= {"cumsum[0]", "cumsum[0-float64]"}
