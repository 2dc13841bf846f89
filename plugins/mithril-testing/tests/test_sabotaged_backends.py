"""Each deliberate mistake of a backend must be found by the kit, each by the test that is there to find it.

The backend computes every operation by its reference, one node after the other; a sabotage is a small change of it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from mithril.backend.arrays import as_numpy
from mithril.backend.base import Backend
from mithril.derivatives import gradients
from mithril.graph import Graph, UnsupportedError, iterate, symbols, to_text
from mithril.graph.core import Op
from mithril.graph.dtypes import dtype as as_dtype, float32
from mithril.graph.evaluation import substitute_sizes
from mithril.graph.guards import bind
from mithril_testing import BackendConformance
from mithril_testing.cases import backend_cases, gradient_graph
from mithril_testing.selection import selected


class Executable:
    source: str | None = None

    def __init__(self, backend, graph: Graph) -> None:
        self.backend, self.graph = backend, graph
        self.calls = 0

    @property
    def lowered(self):
        return frozenset(node.op.name for node, _ in iterate(self.graph))

    def __call__(self, params, inputs):
        self.calls += 1
        with np.errstate(all="ignore"):
            arguments = [(params if i.role == "param" else inputs)[i.name] for i in self.graph.arguments]
            results = self.run(self.graph, arguments)
        return dict(zip(self.graph.output_names, map(np.array, results), strict=True))

    def run(self, graph, arguments):
        values = {i.value: i.data for i in graph.inputs if i.data is not None}
        values.update((i.value, a) for i, a in zip(graph.arguments, arguments, strict=True))
        shapes = {i.name: i.type.shape for i in graph.inputs}
        sizes = bind(shapes, {i.name: values[i.value].shape for i in graph.inputs})
        static = substitute_sizes(graph, sizes)
        for node, fixed in zip(graph.nodes, static.nodes, strict=True):
            operands = [None if v is None else values[v] for v in node.operands]
            results = self.backend.step(self, node, operands, dict(fixed.attributes))
            for v, result in zip(node.results, results, strict=True):
                values[v] = np.asarray(result, v.dtype.numpy)
        return [values[v] for v in graph.outputs]


class Honest(Backend):
    """Right about everything."""

    name = "honest"
    executable = Executable

    def lowers(self, node, options=None):
        return not node.op.composite

    def build(self, graph, options=None):
        self.check(graph)
        return self.executable(self, graph)

    def step(self, program, node, operands, attributes):
        name = node.op.name
        if name in ("if", "while", "scan"):
            return getattr(self, f"do_{name}")(program, node.regions, operands, **attributes)
        returned = self.apply(node.op, operands, attributes)
        return (returned,) if len(node.op.results) == 1 else returned

    def apply(self, op: Op, operands, attributes):
        return op.reference(*operands, **attributes)

    def do_if(self, program, regions, operands):
        return program.run(regions[0 if operands[0] else 1], operands[1:])

    def do_while(self, program, regions, operands, *, states, max_trips):
        current, rest = operands[:states], operands[states:]
        while program.run(regions[0], [*current, *rest])[0]:
            current = program.run(regions[1], [*current, *rest])
        return current

    def do_scan(self, program, regions, operands, *, carries, sequences, length, reverse):
        (region,) = regions
        current, rest = operands[:carries], operands[carries + sequences :]
        rows = []
        for k in reversed(range(length)) if reverse else range(length):
            elements = [x[k] for x in operands[carries : carries + sequences]]
            results = program.run(region, [*current, *elements, *rest])
            current = results[:carries]
            rows.append(results[carries:])
        rows = rows[::-1] if reverse else rows
        types = region.outputs[carries:]
        stacked = [np.array([r[k] for r in rows], v.dtype.numpy) for k, v in enumerate(types)]
        return [*current, *(s.reshape(length, *v.shape) for s, v in zip(stacked, types))]

    def array(self, data, dtype=None):
        return np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)

    def to_numpy(self, array):
        return np.asarray(array)

    def is_array(self, x):
        return isinstance(x, np.ndarray)


# -- ways to go wrong -------------------------------------------------------------------------------------------------
def computing(name: str, wrong: Callable, when: Callable = lambda *_, **__: True):
    """Return a backend that computes one operation wrongly, where a condition of its operands holds."""

    class Wrong(Honest):
        def apply(self, op, operands, attributes):
            if op.name == name and when(*operands, **attributes):
                return wrong(*operands, **attributes)
            return super().apply(op, operands, attributes)

    return Wrong


def after(name: str, change: Callable, when: Callable = lambda *_, **__: True):
    """Return a backend that spoils the right results of one operation."""
    right = selected((name,))[name].reference
    return computing(name, lambda *operands, **attributes: change(right(*operands, **attributes)), when)


def running(method: Callable):
    """Return a backend whose programs are called by ``method(program, call, params, inputs)``."""

    class Wrong(Honest):
        class Called(Executable):
            def __call__(self, params, inputs):
                return method(self, super().__call__, params, inputs)

        executable = Called

    return Wrong


def having(**members):
    """Return a backend with other methods."""
    return type("Wrong", (Honest,), members)


def claiming(base=Honest, **claims):
    """Return a backend with other claims about itself."""
    return type("Wrong", (base,), {"capabilities": property(lambda self: replace(base().capabilities, **claims))})


class Stored(Honest):
    """It keeps programs, as the graph from which the next is built."""

    def dump(self, executable):
        return {"graph": to_text(executable.graph).encode()}

    def revive(self, parts, graph, options):
        return self.build(graph.get(), options)


class Negated(Stored):
    """The program that it kept is another one."""

    def revive(self, parts, graph, options):
        program = super().revive(parts, graph, options)
        return lambda params, inputs: {n: -a for n, a in program(params, inputs).items()}


class Differentiating(Honest):
    """Its framework's gradients are those of the graph, times a factor."""

    factor = 1

    def build_with_gradients(self, graph, output_names, wrt, options=None):
        program = self.build(self.decomposed(gradients(graph, output_names, wrt), options), options)
        return lambda params, inputs: {
            n: a * self.factor if n.startswith("grad/") else a for n, a in program(params, inputs).items()
        }


def spoil_params(program, call, params, inputs):
    results = call(params, inputs)
    for array in params.values():
        array += 1
    return results


def spoil_inputs_of_rank_4(program, call, params, inputs):
    results = call(params, inputs)
    for array in inputs.values():
        if array.ndim == 4:
            np.exp(array, out=array)
    return results


def run_both(backend, program, regions, operands):
    branches = [program.run(region, operands[1:]) for region in regions]
    return branches[0 if operands[0] else 1]


def scale_params(program, call, params, inputs):
    return call({n: (a * a.dtype.type(1.01)).astype(a.dtype) for n, a in params.items()}, inputs)


def wrong_from(count):
    def method(program, call, params, inputs):
        results = call(params, inputs)
        return results if program.calls < count else {n: np.roll(a, 1) for n, a in results.items()}

    return method


def remember(program, call, params, inputs):
    if not hasattr(program, "first"):
        program.first = call(params, inputs)
    return {n: a.copy() for n, a in program.first.items()}


def remember_by_shape(program, call, params, inputs):
    key = tuple(a.shape for a in (*params.values(), *inputs.values()))
    cached = program.__dict__.setdefault("cached", {})
    return {n: a.copy() for n, a in cached.setdefault(key, call(params, inputs)).items()}


def reuse_buffers(program, call, params, inputs):
    results = call(params, inputs)
    buffers = program.__dict__.setdefault("buffers", {})
    for name, array in results.items():
        buffer = buffers.setdefault((name, array.shape), array)
        buffer[...] = array
        results[name] = buffer
    return results


def noise(program, call, params, inputs):
    rng = program.__dict__.setdefault("rng", np.random.default_rng(0))
    results = call(params, inputs)
    factor = 1.01 if rng.random() < 0.02 else 1.0
    return {n: (a * factor).astype(a.dtype) for n, a in results.items()}


def hand_out_arguments(program, call, params, inputs):
    results = call(params, inputs)
    cached = {id(i.value): (params if i.role == "param" else inputs)[i.name] for i in program.graph.arguments}
    return {
        n: cached.get(id(v), results[n]) for n, v in zip(program.graph.output_names, program.graph.outputs, strict=True)
    }


def same_array_twice(program, call, params, inputs):
    results, seen = call(params, inputs), {}
    pairs = zip(program.graph.output_names, program.graph.outputs, strict=True)
    return {n: seen.setdefault(id(v), results[n]) for n, v in pairs}


def hand_out_constants(program, call, params, inputs):
    results = call(params, inputs)
    if not hasattr(program, "data"):
        program.data = {i.value: np.array(i.data) for i in program.graph.inputs if i.data is not None}
    for n, v in zip(program.graph.output_names, program.graph.outputs, strict=True):
        results[n] = program.data.get(v, results[n])
    return results


def first_sizes(program, call, params, inputs):
    results = call(params, inputs)
    shapes = program.__dict__.setdefault("shapes", {n: a.shape for n, a in results.items()})
    return {n: np.resize(a, shapes[n]) for n, a in results.items()}


def compute(seconds=0.05):
    """Use the processor as a compiler does."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def slow_sizes(program, call, params, inputs, work=compute):
    shapes = program.__dict__.setdefault("compiled", set())
    key = tuple(a.shape for a in inputs.values())
    if key not in shapes:
        work()
    shapes.add(key)
    return call(params, inputs)


def slow_build(self, graph, options=None):
    compute()
    return Honest.build(self, graph, options)


def compile_elsewhere():
    """Run a compiler in a process."""
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.05: pass"], check=True)


def wait():
    """Wait, as on a machine where others compute."""
    time.sleep(0.05)


def for_one_size(self, graph, options=None):
    if symbols(*(d for i in graph.inputs for d in i.type.shape)):
        raise UnsupportedError("all sizes must be known")
    return Honest.build(self, graph, options)


def add_an_input(program, call, params, inputs):
    results = call(params, inputs)
    inputs["extra"] = 0
    return results


def one_more(program, call, params, inputs):
    results = call(params, inputs)
    return {**results, "extra": next(iter(results.values()))}


def turned_names(program, call, params, inputs):
    results = call(params, inputs)
    return dict(zip(results, reversed(list(results.values())), strict=True))


def numbers(program, call, params, inputs):
    return {n: a.item() if a.ndim == 0 else a for n, a in call(params, inputs).items()}


def half_sum(x, *, axis, keepdims=False):
    total = np.zeros(np.sum(x, axis=axis, keepdims=keepdims).shape, x.dtype)
    for row in np.moveaxis(x, axis[0], 0):
        total = (total + (np.expand_dims(row, axis[0]) if keepdims else row)).astype(x.dtype)
    return total


def is_half_row(x, *, axis, keepdims=False, **_):
    return x.dtype.itemsize == 2 and len(axis) == 1 and x.dtype.kind not in "iu"


def backwards_scan(self, program, regions, operands, *, reverse, **rest):
    return Honest.do_scan(self, program, regions, operands, reverse=False, **rest)


def once_more(self, program, regions, operands, *, states, max_trips):
    current = Honest.do_while(self, program, regions, operands, states=states, max_trips=max_trips)
    return program.run(regions[1], [*current, *operands[states:]])


def share(self, data, dtype=None):
    array = as_numpy(data, self.dtype)
    return array if dtype is None else array.astype(as_dtype(dtype).numpy)


def ignore_strides(self, data, dtype=None):
    array = Honest.array(self, data, dtype)
    source = np.asarray(data)
    packed = source.ndim == 2 and source.flags.f_contiguous and not source.flags.c_contiguous
    return source.ravel("K").reshape(source.shape) if packed else array


def refuse_read_only(self, data, dtype=None):
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        raise ValueError("buffer source array is read-only")
    return Honest.array(self, data, dtype)


def drawn(function):
    """Random numbers of another kind."""

    def draw(self, kind, shape, dtype):
        right = Honest._draw(self, kind, shape, dtype)
        return function(self, kind, right).astype(right.dtype)

    return having(_draw=draw)


counter = itertools.count()


class ChangingText(Executable):
    @property
    def source(self):
        return f"# number {next(counter)}"


class ImportingText(Executable):
    source = "import numpy\nimport mithril.graph as ir\n"


class Pretending(Executable):
    lowered = frozenset()


class Helped(Honest):
    def apply(self, op, operands, attributes):
        return op.evaluate(operands, attributes)


def truncated(x, *, dtype):
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def rising(x, *, axis, descending=False):
    order = np.argsort(x[..., ::-1] if axis == x.ndim - 1 else x, axis=axis)
    return np.take_along_axis(x[..., ::-1] if axis == x.ndim - 1 else x, order, axis)


def last_tie(x, *, axis, keepdims=False):
    index = x.shape[axis] - 1 - np.argmax(np.flip(x, axis), axis=axis, keepdims=keepdims)
    return index.astype(np.int32)


def wide(*operands, **_):
    return operands[0].ndim > 1 and operands[0].shape[0] > 8


def is_(kind):
    return lambda x, *_, **__: x.dtype == np.dtype(kind)


def to(target, source):
    return lambda x, *, dtype: dtype.name == target and x.dtype.name == source


Sabotage = tuple[Callable[[], type[Backend]], str]
SABOTAGES: Mapping[str, Sabotage] = {
    # programs and their calls
    "parameters are written to": (lambda: running(spoil_params), "repeated_calls:add"),
    "parameters are scaled": (lambda: running(scale_params), "repeated_calls:add"),
    "inputs of rank 4 are written to": (lambda: running(spoil_inputs_of_rank_4), "ranks:4"),
    "the second call is wrong": (lambda: running(wrong_from(2)), "repeated_calls:exp"),
    "the hundredth call is wrong": (lambda: running(wrong_from(100)), "repeated_calls_agree"),
    "the first results for ever": (lambda: running(remember), "repeated_calls:exp"),
    "results remembered by shape": (lambda: running(remember_by_shape), "parameters_and_other_values"),
    "results in buffers used again": (lambda: running(reuse_buffers), "repeated_calls:exp"),
    "noise in some calls": (lambda: running(noise), "repeated_calls_agree"),
    "an argument as result": (lambda: running(hand_out_arguments), "results_alias_nothing"),
    "one array as two results": (lambda: running(same_array_twice), "results_alias_nothing"),
    "a constant as result": (lambda: running(hand_out_constants), "results_alias_nothing"),
    "the first call's sizes": (lambda: running(first_sizes), "symbolic:tanh"),
    "a dictionary of arguments is changed": (lambda: running(add_an_input), "forward:tanh"),
    "one result too many": (lambda: running(one_more), "forward:tanh"),
    "results under each other's names": (lambda: running(turned_names), "forward:split"),
    "numbers for arrays": (lambda: running(numbers), "forward:tanh"),
    "text that changes": (lambda: having(executable=ChangingText), "same_source_twice:tanh"),
    "text that imports mithril": (lambda: having(executable=ImportingText), "same_source_twice:tanh"),
    "values of one dtype": (lambda: after("tanh", lambda y: y * 2, is_("float64")), "forward:tanh"),
    "values of a gradient": (lambda: after("exp", lambda y: y * 2), "gradient:exp"),
    "operations it says it did not run": (lambda: having(executable=Pretending), "forward:tanh"),
    "operations computed by their references": (lambda: Helped, "forward:tanh"),
    "a dtype it has not": (
        lambda: having(dtypes=frozenset({float32}), check=lambda self, graph: None),
        "unsupported_dtype_is_refused",
    ),
    # values
    "exp for more than 8 rows": (
        lambda: after("exp", lambda y: y * 2, lambda x: len(x.shape) and len(x) > 8),
        "special_values:exp",
    ),
    "more than 4,096 elements": (
        lambda: after("tanh", lambda y: y * 2, lambda x: x.size > 4096),
        "special_values:tanh",
    ),
    "a little off": (lambda: after("exp", lambda y: y * (1 + 3e-5)), "special_values:exp"),
    "tanh beyond 4": (
        lambda: computing("tanh", lambda x: np.where(abs(x) > 4, np.sign(x), np.tanh(x))),
        "special_values:tanh",
    ),
    "expm1 inexact near 0": (lambda: computing("expm1", lambda x: np.exp(x) - x.dtype.type(1)), "special_values:expm1"),
    "log1p inexact near 0": (lambda: computing("log1p", lambda x: np.log(x + x.dtype.type(1))), "special_values:log1p"),
    "round half up": (lambda: computing("round", lambda x: np.floor(x + 0.5)), "special_values:round"),
    "the sign of -0": (lambda: after("neg", lambda y: y + y.dtype.type(0)), "special_values:neg"),
    "maximum drops nan": (lambda: computing("maximum", np.fmax, is_("float32")), "special_values:maximum"),
    "float64 computed in float32": (
        lambda: computing("sin", lambda x: np.sin(x.astype(np.float32)), is_("float64")),
        "special_values:sin",
    ),
    "int64 cut to 32 bits": (
        lambda: computing("add", lambda a, b: (a + b).astype(np.int32), is_("int64")),
        "special_values:add",
    ),
    "uint64 compared as signed": (
        lambda: computing("less", lambda a, b: a.astype(np.int64) < b.astype(np.int64), is_("uint64")),
        "special_values:less",
    ),
    "int32 saturates": (
        lambda: computing("add", lambda a, b: np.clip(a.astype(np.int64) + b, -(2**31), 2**31 - 1), is_("int32")),
        "special_values:add",
    ),
    "floordiv truncates": (lambda: computing("floordiv", lambda a, b: np.trunc(a / b)), "special_values:floordiv"),
    "shifts by more than the width": (
        lambda: computing("shift_left", lambda a, b: a << (b & 31), is_("int32")),
        "special_values:shift_left",
    ),
    "where by multiplication": (
        lambda: computing("where", lambda c, a, b: c * a + (~c) * b, lambda c, a, b: a.dtype.kind == "f"),
        "special_values:where",
    ),
    "strides": (
        lambda: computing("exp", lambda x: np.exp(x.ravel("K").reshape(x.shape))),
        "broadcast_and_strides:exp",
    ),
    "read-only operands": (lambda: having(array=refuse_read_only), "broadcast_and_strides:exp"),
    # reductions, orders, products, movements
    "max drops nan": (
        lambda: computing("max", lambda x, *, axis, keepdims: np.nanmax(x, axis=axis, keepdims=keepdims)),
        "special_rows:float32",
    ),
    "argmax of the last tie": (lambda: computing("argmax", last_tie), "special_rows:float32"),
    "an order that is not stable": (lambda: computing("sort", rising), "special_rows:float32"),
    "the sum of nothing": (
        lambda: after("sum", lambda y: y + y.dtype.type(1), lambda x, **_: x.size == 0),
        "special_rows:float32",
    ),
    "16-bit sums": (lambda: computing("sum", half_sum, is_half_row), "accumulation:float16"),
    "16-bit means": (
        lambda: computing(
            "mean", lambda x, **a: (half_sum(x, **a) / x.shape[a["axis"][0]]).astype(x.dtype), is_half_row
        ),
        "accumulation:bfloat16",
    ),
    "products deeper than 64": (
        lambda: computing(
            "matmul", lambda a, b: a[..., :64] @ b[..., :64, :], lambda a, b: a.shape[-1] > 64 and b.ndim > 1
        ),
        "sizes_beyond_tiles:matmul",
    ),
    "columns beyond 65": (
        lambda: after("sum", lambda y: y * y.dtype.type(1.001), lambda x, **_: x.shape[-1:] > (65,)),
        "sizes_beyond_tiles:sum",
    ),
    "more than 8 rows of products": (lambda: after("matmul", lambda y: y + 1, wide), "sizes_beyond_tiles:matmul"),
    "sums of int8 in 64 bits that saturate": (
        lambda: computing(
            "sum",
            lambda x, *, axis, keepdims=False: np.clip(np.sum(x, axis=axis, keepdims=keepdims), -128, 127),
            is_("int8"),
        ),
        "integers",
    ),
    "transposes of rank 5": (lambda: after("transpose", lambda y: y[::-1], lambda x, **_: x.ndim == 5), "ranks:5"),
    "sums of rank 6": (lambda: after("sum", lambda y: y * 2, lambda x, **_: x.ndim == 6), "ranks:6"),
    "rank 0": (lambda: after("exp", lambda y: y * 2, lambda x: x.ndim == 0), "ranks:0"),
    "padding at the wrong end": (
        lambda: computing(
            "pad", lambda x, *, widths, mode, value: np.pad(x, [w[::-1] for w in widths], constant_values=value)
        ),
        "ranks:2",
    ),
    # casts
    "casts that round": (
        lambda: computing(
            "cast",
            lambda x, *, dtype: np.rint(x).clip(-(2.0**31), 2.0**31 - 1).astype(np.int32),
            to("int32", "float64"),
        ),
        "casts",
    ),
    "casts that saturate": (
        lambda: computing("cast", lambda x, *, dtype: np.clip(x, -128, 127).astype(np.int8), to("int8", "int32")),
        "casts",
    ),
    "nan as the smallest integer": (
        lambda: computing(
            "cast",
            lambda x, *, dtype: np.where(np.isnan(x), -(2**31), np.nan_to_num(x).clip(-(2.0**31), 2.0**31 - 1)).astype(
                np.int32
            ),
            to("int32", "float64"),
        ),
        "casts",
    ),
    "bfloat16 cut off": (lambda: computing("cast", truncated, to("bfloat16", "float32")), "casts"),
    # control flow
    "always the first branch": (
        lambda: having(do_if=lambda self, program, regions, operands: program.run(regions[0], operands[1:])),
        "control_flow",
    ),
    "scans in one direction": (lambda: having(do_scan=backwards_scan), "control_flow"),
    "loops that run once more": (lambda: having(do_while=once_more), "control_flow"),
    # arrays
    "array() shares memory": (lambda: having(array=share), "arrays_of_views"),
    "array() reads memory as it lies": (lambda: having(array=ignore_strides), "arrays_of_views"),
    "zeros of another dtype": (
        lambda: having(zeros=lambda self, shape, dtype=None: np.zeros(tuple(shape))),
        "array_helpers",
    ),
    "ones are zeros": (
        lambda: having(ones=lambda self, shape, dtype=None: np.zeros(tuple(shape), np.float32)),
        "array_helpers",
    ),
    "arange of floats": (
        lambda: having(arange=lambda self, *a, dtype=None: np.arange(*a).astype(np.float32)),
        "array_helpers",
    ),
    "a family of other devices": (lambda: claiming(family="gpu", families=("gpu",)), "claim_families"),
    "a family that it does not compile for": (lambda: claiming(families=("gpu",)), "claim_families"),
    "programs run elsewhere": (lambda: claiming(local=False), "claim_local"),
    "donated arrays stay": (lambda: claiming(donates=True), "claim_donates"),
    "both sides of a branch run": (
        lambda: having(branches=lambda self, options: True, do_if=run_both),
        "claim_branches",
    ),
    "indices are not checked": (lambda: claiming(checks_indices=True), "claim_checks_indices"),
    "no gradients of its own": (lambda: claiming(autodiff="native"), "claim_autodiff"),
    "gradients that it does not claim": (lambda: Differentiating, "claim_autodiff"),
    "gradients by a factor": (
        lambda: type("Doubling", (claiming(Differentiating, autodiff="native"),), {"factor": 2}),
        "claim_autodiff",
    ),
    "nothing is kept": (lambda: claiming(keeps="source"), "claim_keeps"),
    "more is kept": (lambda: Stored, "claim_keeps"),
    "a graph as source": (lambda: claiming(Stored, keeps="source"), "claim_keeps"),
    "a graph as machine code": (lambda: claiming(Stored, keeps="binary"), "claim_keeps"),
    "another program is revived": (lambda: claiming(Negated, keeps="graph"), "claim_keeps"),
    "values are not freed": (lambda: claiming(memory="frees"), "claim_memory"),
    "no arena": (lambda: claiming(memory="arena"), "claim_memory"),
    "no compiler that plans": (lambda: claiming(memory="library"), "claim_memory"),
    "no replay": (lambda: claiming(memory="replayed"), "claim_memory"),
    "an arena of another size": (
        lambda: type("Wrong", (claiming(memory="arena"),), {"exact_memory": lambda *_: (1 << 30, "arena")}),
        "claim_memory",
    ),
    "an estimate that is too small": (
        lambda: type("Wrong", (claiming(estimate_error=(-0.05, 0.05)),), {"is_view": lambda *_: True}),
        "claim_estimate_error",
    ),
    "an estimate that is too large": (
        lambda: type("Wrong", (claiming(estimate_error=(-0.9, 0.05)),), {"workspace": lambda *_: 1 << 28}),
        "claim_estimate_error",
    ),
    "one size per program": (lambda: having(build=for_one_size), "claim_symbolic"),
    "any size, without a claim": (lambda: claiming(symbolic=False), "claim_symbolic"),
    "the results of the first size": (lambda: running(first_sizes), "claim_symbolic"),
    "sizes that are not compiled": (lambda: claiming(recompiles=True), "claim_recompiles"),
    "sizes that are compiled, without a claim": (lambda: running(slow_sizes), "claim_recompiles"),
    "sizes that a process compiles, without a claim": (
        lambda: running(partial(slow_sizes, work=compile_elsewhere)),
        "claim_recompiles",
    ),
    "programs that are compiled slowly, without a claim": (
        lambda: type("Slow", (claiming(symbolic=False),), {"build": slow_build}),
        "claim_recompiles",
    ),
    "threads are not started": (lambda: claiming(threads=True), "claim_threads"),
    "one identity for all": (lambda: having(identity=lambda self: ("one",)), "identity"),
    "an identity of each object": (lambda: having(identity=lambda self: (id(self), self.dtype)), "identity"),
    "use changes the identity": (lambda: having(identity=lambda self: (self.dtype, self._drawn)), "identity"),
    "randn is uniform": (
        lambda: drawn(
            lambda b, kind, x: (
                np.random.default_rng(b._seed * 1000 + b._drawn).uniform(-1.7, 1.7, x.shape) if kind == "normal" else x
            )
        ),
        "random_helpers",
    ),
    "randn is shifted": (lambda: drawn(lambda b, kind, x: x + 0.2 if kind == "normal" else x), "random_helpers"),
    "rand is normal": (lambda: drawn(lambda b, kind, x: x**2 if kind == "uniform" else x), "random_helpers"),
    "the seed is ignored": (lambda: having(set_seed=lambda self, seed: setattr(self, "_drawn", 0)), "random_helpers"),
    "the same numbers again": (
        lambda: having(
            _draw=lambda self, kind, shape, dtype: (setattr(self, "_drawn", 0), Honest._draw(self, kind, shape, dtype))[
                1
            ]
        ),
        "random_helpers",
    ),
}


def kit(backend, joins=False):
    return type("Kit", (BackendConformance,), {"backend": backend, "joins": joins})()


def test_waiting_does_not_count_as_compilation():
    kit(running(partial(slow_sizes, work=wait))).test_claim_recompiles()


def run(backend, test: str, joins: bool = False, first: int = 0) -> None:
    """Run one test of the kit: ``name``, ``name:argument`` or ``name:operation``, from its ``first`` case on."""
    name, _, argument = test.partition(":")
    conformance, method = kit(backend, joins), getattr(BackendConformance, f"test_{name}")
    if not argument:
        method(conformance)
    elif name == "ranks":
        method(conformance, int(argument))
    elif name in ("special_rows", "accumulation"):
        method(conformance, argument)
    elif name in ("forward", "gradient", "symbolic", "same_source_twice"):
        accepts = getattr(method, "accepts", lambda case: True)
        for case in itertools.islice(backend_cases(conformance.make().dtypes, [argument]), first, None):
            if accepts(case):
                method(conformance, case)
    else:
        method(conformance, selected((argument,))[argument])


def is_joined(test: str) -> bool:
    return test.startswith(("forward", "gradient"))


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_found(name, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # with it the kit cannot count threads, and skips
    build, test = SABOTAGES[name]
    try:
        with pytest.raises((Exception, pytest.fail.Exception)):  # a crash is found, too
            run(build(), test)
    except pytest.skip.Exception as skipped:  # it would skip this test, as if nothing had to be found
        if not sys.platform.startswith("linux"):
            raise  # no threads to count
        pytest.fail(f"the kit skipped it: {skipped}")


@pytest.mark.parametrize("name", [name for name, (_, test) in SABOTAGES.items() if is_joined(test)])
def test_sabotage_is_found_in_joined_samples(name):
    """Expect an error as of single programs, from the second case on: the first is a program of its own in any case."""
    build, test = SABOTAGES[name]
    errors = []
    for joins in (False, True):
        with pytest.raises((Exception, pytest.fail.Exception)) as caught:
            run(build(), test, joins, first=1)
        errors.append(caught.value)
    assert type(errors[1]) is type(errors[0]), errors


HONEST = sorted({test for _, test in SABOTAGES.values()})


@pytest.mark.parametrize(
    ("test", "joins"), [*((t, False) for t in HONEST), *((t, True) for t in HONEST if is_joined(t))]
)
def test_honest_backend_passes(test, joins):
    run(Honest, test, joins)


def outcomes(backend, operation: str) -> dict[str, str]:
    """Return the errors of the joined samples of an operation."""
    conformance = kit(backend, joins=True)
    type(conformance).ops = (operation,)
    errors = {}
    for case in conformance.cases()[1:]:
        try:
            conformance.test_forward(case)
        except Exception as error:
            errors[case.id] = str(error)
    return errors


def test_a_sample_that_fails_in_a_joined_program_is_the_only_one_to_fail():
    """Build each sample alone after the failure of the joined program, which is built once."""
    sizes = []

    def build(self, graph, options=None):
        sizes.append(len(graph.nodes))
        if any(node.result.dtype.name == "float64" for node in graph.nodes):
            raise RuntimeError("no registers left")
        return Honest.build(self, graph, options)

    errors = outcomes(having(build=build), "tanh")
    assert list(errors) == ["tanh[0-float64]"]
    assert errors["tanh[0-float64]"] == "no registers left"
    assert sum(size > 1 for size in sizes) == 1


def test_programs_that_fail_only_if_they_are_joined_are_reported():
    def build(self, graph, options=None):
        if len(graph.nodes) > 1:
            raise RuntimeError("no registers left")
        return Honest.build(self, graph, options)

    errors = outcomes(having(build=build), "tanh")
    assert len(errors) > 2
    assert set(errors.values()) == {"samples of tanh run alone, but not as one program: no registers left"}


def test_with_ops_a_gradient_that_needs_other_rows_is_skipped_and_one_that_lacks_its_own_fails():
    """Check a table that is written row by row: the gradient of max calls cast, whose row comes later."""

    class Partial(Honest):
        name = "partial"
        rows = frozenset(selected(None)) - {"cast"}

        def lowers(self, node, options=None):
            return super().lowers(node, options) and node.op.name in self.rows

    def outcome(ops):
        conformance = type("Kit", (BackendConformance,), {"backend": Partial, "ops": ops})()
        cases = backend_cases(conformance.make().dtypes, ["max"])
        case = next(c for c in cases if c.sample.gradient and c.dtype is None)
        try:
            conformance.start(gradient_graph(case.graph()))
        except pytest.skip.Exception as skipped:  # it would skip this test, too
            return f"skipped: {skipped}"
        except UnsupportedError as error:
            return error.what
        return "accepted"

    assert outcome(("max",)) == "skipped: also needs rows for: cast"
    for ops in (("max", "cast"), None):  # a row that is promised, and a table that is said to be complete
        assert outcome(ops) == "backend 'partial' does not support 1 operation: cast"
