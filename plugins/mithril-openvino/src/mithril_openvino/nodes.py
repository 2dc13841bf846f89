"""Operations that take several nodes of OpenVINO; parameters are named like operands and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino
import openvino.opset15 as ov

Value = Any  # a node with one result, or one result of a node
Function = Callable[..., Sequence[Value]]


# -- values -----------------------------------------------------------------------------------------------------------
def result_of(x: Value) -> Value:
    """Return the result of a node as an ``Output``, which has a shape and a type."""
    return x if isinstance(x, openvino.Output) else x.output(0)


def shape_of(x: Value) -> tuple[int, ...]:
    return tuple(result_of(x).get_shape())


def dtype_of(x: Value) -> Any:
    return result_of(x).get_element_type().to_dtype()


def ints(values: Any) -> Value:
    return ov.constant(np.asarray(values, np.int64))


# -- operations --------------------------------------------------------------------------------------------------------
def conv_(x: Value, w: Value, stride: Any, padding: Any, dilation: Any, groups: int) -> Value:
    if groups == 1:
        return ov.convolution(x, w, stride, *zip(*padding, strict=True), dilation)
    kernel = reshape_(w, (groups, shape_of(w)[0] // groups, *shape_of(w)[1:]))
    return ov.group_convolution(x, kernel, stride, *zip(*padding, strict=True), dilation)


def conv_input_grad_(g: Value, w: Value, shape: Any, stride: Any, padding: Any, dilation: Any) -> Value:
    sizes = zip(shape[2:], shape_of(g)[2:], shape_of(w)[2:], stride, padding, dilation, strict=True)
    # of the images that give the same result, the one of this size
    extra = [n - ((m - 1) * s - p - q + (k - 1) * d + 1) for n, m, k, s, (p, q), d in sizes]
    return ov.convolution_backprop_data(g, w, stride, None, *zip(*padding, strict=True), dilation, output_padding=extra)


def reshape_(x: Value, shape: Sequence[int]) -> Value:
    if not shape:  # a reshape of a product to rank 0 ends the process, with OpenVINO 2026.4
        return ov.squeeze(x, ints(range(len(shape_of(x))))) if shape_of(x) else x
    return ov.reshape(x, ints(shape), False)


def slice_(x: Value, starts: Any, stops: Any, steps: Any, axes: Any) -> Value:
    return ov.slice(x, ints(starts), ints(stops), ints(steps), ints(axes)) if axes else x


# -- control flow -----------------------------------------------------------------------------------------------------
def if_(then: Function, other: Function, operands: Sequence[Value]) -> list[Value]:
    condition, *values = operands
    node = ov.if_op(result_of(condition))
    (first, yes), (second, no) = (_body(function, values) for function in (then, other))
    node.set_then_body(openvino.Model(yes, first))
    node.set_else_body(openvino.Model(no, second))
    for value, *parameters in zip(values, first, second, strict=True):
        node.set_input(result_of(value), *parameters)
    return [node.set_output(*results) for results in zip(yes, no, strict=True)]


def while_(test: Function, step: Function, operands: Any, states: int, max_trips: int | None) -> list[Value]:
    def stepped(*values: Value) -> list[Value]:
        current = step(*values)
        return [*current, test(*current, *values[states:])[0]]

    return _loop(stepped, test(*operands)[0], operands, states, states, -1 if max_trips is None else max_trips)


def scan_(body: Function, operands: Any, carries: int, sequences: int, length: int, reverse: bool) -> list[Value]:
    end = carries + sequences

    def stepped(*values: Value) -> list[Value]:
        rows = [reshape_(x, shape_of(x)[1:]) for x in values[carries:end]]
        results = body(*values[:carries], *rows, *values[end:])
        return [*results[:carries], *(reshape_(y, (1, *shape_of(y))) for y in results[carries:]), ov.constant(True)]

    def ordered(sequences: Sequence[Value]) -> list[Value]:
        # the concatenated rows of a loop are in the order of its steps
        return [slice_(x, [-1], [-(2**31)], [-1], [0]) if reverse else x for x in sequences]

    operands[carries:end] = ordered(operands[carries:end])
    results = _loop(stepped, ov.constant(True), operands, carries, end, length)
    return [*results[:carries], *ordered(results[carries:])]


def _loop(step: Function, condition: Value, operands: Any, carries: int, end: int, trips: int) -> list[Value]:
    """Return the last carried values, then the rows of all steps; operands from ``carries`` on are read by row."""
    parameters, results = _body(step, operands, range(carries, end))
    if trips == 0:
        empty = [np.empty((0, *shape_of(y)[1:]), dtype_of(y)) for y in results[carries:-1]]
        return [*operands[:carries], *map(ov.constant, empty)]
    loop = ov.loop(ov.constant(trips, np.int32).output(0), result_of(condition))
    loop.set_function(openvino.Model(results, parameters))
    loop.set_special_body_ports([-1, len(results) - 1])
    for k, (parameter, x) in enumerate(zip(parameters, map(result_of, operands), strict=True)):
        if k < carries:
            loop.set_merged_input(parameter, x, results[k].output(0))
        elif k < end:
            loop.set_sliced_input(parameter, x, 0, 1, 1, -1, 0)
        else:
            loop.set_invariant_input(parameter, x)
    stacks = [loop.get_concatenated_slices(y.output(0), 0, 1, 1, -1, 0) for y in results[carries:-1]]
    return [*(loop.get_iter_value(y.output(0), -1) for y in results[:carries]), *stacks]


def _body(function: Function, values: Sequence[Value], rows: range = range(0)) -> tuple[list[Value], list[Value]]:
    """Call the function of a region with parameters like some values, or like one of their rows; return both."""
    shapes = [(1, *shape_of(x)[1:]) if k in rows else shape_of(x) for k, x in enumerate(values)]
    parameters = [ov.parameter(shape, dtype_of(x)) for shape, x in zip(shapes, values, strict=True)]
    return parameters, [ov.result(y) for y in function(*parameters)]


# -- the host ---------------------------------------------------------------------------------------------------------
class HostCall(openvino.Op):  # type: ignore[misc]
    """An operation of the model that calls a function of NumPy arrays."""

    def __init__(self, function: Callable[..., Any], types: Any, inputs: Sequence[Value]) -> None:
        super().__init__(self)
        self.function = function
        self.types = types
        self.set_arguments([result_of(x) for x in inputs])
        self.constructor_validate_and_infer_types()

    def visit_attributes(self, visitor: Any) -> bool:
        """Show which function it is: operations of equal attributes and operands become one."""
        visitor.on_attributes({"function": id(self.function)})
        return True

    def validate_and_infer_types(self) -> None:
        for k, (dtype, shape) in enumerate(self.types):
            stored = np.dtype(np.uint8 if dtype == np.bool_ else dtype)  # as the CPU stores booleans
            self.set_output_type(k, openvino.Type(stored), openvino.PartialShape(list(shape)))

    def clone_with_new_inputs(self, inputs: Sequence[Value]) -> HostCall:
        return HostCall(self.function, self.types, inputs)

    def has_evaluate(self) -> bool:
        return True

    def evaluate(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        for tensor, result in zip(outputs, self.function(*(x.data for x in inputs)), strict=True):
            tensor.data[...] = result
        return True


def on_host(function: Callable[..., Any], types: Any, *operands: Value) -> list[Value]:
    """Call a function of NumPy arrays."""
    dtypes = [dtype_of(x) for x in operands]  # the CPU stores booleans as uint8

    def call(*arrays: Any) -> Any:
        return function(*(a.astype(dtype, copy=False) for a, dtype in zip(arrays, dtypes, strict=True)))

    results = zip(HostCall(call, types, operands).outputs(), types, strict=True)
    return [ov.convert(x, np.bool_) if dtype == np.bool_ else x for x, (dtype, _) in results]


def copied(x: Value) -> Value:
    """Return a copy of an argument, which OpenVINO does not write as a result."""
    return on_host(lambda array: [array], [(dtype_of(x), shape_of(x))], x)[0]
