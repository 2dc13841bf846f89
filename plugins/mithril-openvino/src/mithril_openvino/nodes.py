"""Operations that take several nodes of OpenVINO; parameters are named like operands and attributes."""

from __future__ import annotations

import itertools
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


def number(value: Any, like: Value) -> Value:
    """Return a constant with the type of another value."""
    return ov.constant(np.asarray(value, dtype_of(like)))


def ints(values: Any) -> Value:
    return ov.constant(np.asarray(values, np.int64))


# -- element-wise -----------------------------------------------------------------------------------------------------
def trunc_(x: Value) -> Value:
    return ov.select(ov.less(x, number(0, x)), ov.ceiling(x), ov.floor(x))


def expm1_(x: Value) -> Value:
    """e**x - 1, by tanh where the difference would cancel."""
    half = ov.tanh(ov.multiply(x, number(0.5, x)))
    one = number(1, x)
    small_result = ov.divide(ov.add(half, half), ov.subtract(one, half))
    return ov.select(ov.less(ov.abs(x), one), small_result, ov.subtract(exp_(x), one))


def log1p_(x: Value) -> Value:
    """log(1 + x), by atanh where the sum would round x."""
    ratio = ov.divide(x, ov.add(x, number(2, x)))
    small_result = ov.multiply(ov.atanh(ratio), number(2, x))
    return ov.select(ov.less(ov.abs(x), number(0.5, x)), small_result, ov.log(ov.add(x, number(1, x))))


def exp_(x: Value) -> Value:
    return keeping_nan(ov.exp(x), x)


def extreme(function: Callable[..., Value], a: Value, b: Value) -> Value:
    return keeping_nan(function(a, b), a, b)


def keeping_nan(y: Value, *operands: Value) -> Value:
    """Return nan where an operand is nan; OpenVINO returns a number there."""
    for x in filter(may_be_nan, operands):
        y = ov.select(is_nan(x), x, y)
    return y


def is_nan(x: Value) -> Value:
    """Return where elements are nan, by a comparison: the CPU joins it with its neighbors, unlike ``ov.is_nan``."""
    return ov.not_equal(x, x)


def may_be_nan(x: Value) -> bool:
    node = result_of(x).get_node()
    return dtype_of(x) == np.float32 and not (node.get_type_name() == "Constant" and np.isfinite(node.data).all())


def clip_(x: Value, low: float | None, high: float | None) -> Value:
    y = x
    for function, bound in ((ov.maximum, low), (ov.minimum, high)):
        if bound is not None:
            y = function(number(bound, x), y)
    return keeping_nan(y, x)


def equal_ints(a: Value, b: Value) -> Value:
    """Compare without the rounding of OpenVINO, which converts integers to float32."""
    return ov.equal(ov.bitwise_xor(a, b), number(0, a))


def less_ints(a: Value, b: Value) -> Value:
    """Compare the upper halves, and where they are equal the lower ones, which are exact in float32."""
    (p, q), (r, s) = ((ov.bitwise_right_shift(x, number(16, x)), ov.bitwise_and(x, number(65535, x))) for x in (a, b))
    return ov.logical_or(ov.less(p, r), ov.logical_and(ov.equal(p, r), ov.less(q, s)))


def cast_(x: Value, dtype: Any) -> Value:
    """Convert; floats become integers within their limits, and nan becomes 0."""
    if dtype == np.bool_:
        return x if dtype_of(x) == np.bool_ else ov.not_equal(x, number(0, x))
    y = ov.convert(x, dtype)
    if dtype != np.int32 or dtype_of(x) != np.float32:
        return y
    for is_outside, value in ((ov.is_nan(x), 0), (ov.less_equal(number(2.0**31, x), x), 2**31 - 1)):
        y = ov.select(is_outside, ov.constant(value, np.int32), y)
    return ov.select(ov.less(x, number(-(2.0**31), x)), ov.constant(-(2**31), np.int32), y)


# -- reductions -------------------------------------------------------------------------------------------------------
def with_nan(y: Value, x: Value, axis: Sequence[int], keepdims: bool) -> Value:
    """Return nan for rows with nan, which OpenVINO ignores."""
    return ov.select(ov.reduce_logical_or(ov.is_nan(x), ints(axis), keepdims), number(np.nan, x), y)


# -- products ---------------------------------------------------------------------------------------------------------
def sides(padding: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [before for before, _ in padding], [after for _, after in padding]


def conv_(x: Value, w: Value, stride: Any, padding: Any, dilation: Any, groups: int) -> Value:
    if groups > 1:
        out, *rest = shape_of(w)
        kernel = reshape_(w, (groups, out // groups, *rest))
        return ov.group_convolution(x, kernel, stride, *sides(padding), dilation)
    return ov.convolution(x, w, stride, *sides(padding), dilation)


def conv_input_grad_(g: Value, w: Value, shape: Any, stride: Any, padding: Any, dilation: Any) -> Value:
    sizes = zip(shape[2:], shape_of(g)[2:], shape_of(w)[2:], stride, padding, dilation, strict=True)
    # of the images that give the same result, the one of this size
    extra = [n - ((m - 1) * s - p - q + (k - 1) * d + 1) for n, m, k, s, (p, q), d in sizes]
    return ov.convolution_backprop_data(g, w, stride, None, *sides(padding), dilation, output_padding=extra)


def conv_weight_grad_(x: Value, g: Value, shape: Any, stride: Any, padding: Any, dilation: Any) -> Value:
    """Return a convolution: rows of the batch are its channels, and strides and dilations change places."""
    swapped = ints([1, 0, *range(2, len(shape))])
    y = ov.convolution(ov.transpose(x, swapped), ov.transpose(g, swapped), dilation, *sides(padding), stride)
    axes = range(2, len(shape))  # the last windows may start past the kernel
    return ov.transpose(slice_(y, [0] * len(axes), [shape[k] for k in axes], [1] * len(axes), axes), swapped)


def max_pool_(x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Value:
    y, has_nan = (
        ov.max_pool(z, stride, dilation, *sides(padding), kernel).output(0)
        for z in (x, ov.convert(is_nan(x), np.float32))
    )
    return ov.select(ov.less(number(0, x), has_nan), number(np.nan, x), y)


# -- shapes -----------------------------------------------------------------------------------------------------------
def reshape_(x: Value, shape: Sequence[int]) -> Value:
    if not shape:  # a reshape of a product to rank 0 ends the process, with OpenVINO 2026.4
        return ov.squeeze(x, ints(range(len(shape_of(x))))) if shape_of(x) else x
    return ov.reshape(x, ints(shape), False)


def slice_(x: Value, starts: Any, stops: Any, steps: Any, axes: Any) -> Value:
    return ov.slice(x, ints(starts), ints(stops), ints(steps), ints(axes)) if axes else x


def flip_(x: Value, axis: Sequence[int]) -> Value:
    return slice_(x, [-1] * len(axis), [-(2**31)] * len(axis), [-1] * len(axis), axis)


def take_(x: Value, indices: Value, axis: int) -> Value:
    """Return elements at positions, which count from the end if negative, and are clamped to the axis."""
    size = shape_of(x)[axis]
    position = ov.select(ov.less(indices, number(0, indices)), ov.add(indices, number(size, indices)), indices)
    return ov.gather(x, clip_(position, 0, size - 1), ints(axis))


# -- control flow -----------------------------------------------------------------------------------------------------
def _body(function: Function, values: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Call the function of a region with parameters like some values; return them and the results."""
    parameters = [ov.parameter(shape_of(x), dtype_of(x)) for x in values]
    return parameters, [ov.result(y) for y in function(*parameters)]


def if_(then: Function, other: Function, operands: Sequence[Value]) -> Any:
    condition, *values = operands
    node = ov.if_op(result_of(condition))
    (first, yes), (second, no) = (_body(function, values) for function in (then, other))
    node.set_then_body(openvino.Model(yes, first))
    node.set_else_body(openvino.Model(no, second))
    for value, *parameters in zip(values, first, second, strict=True):
        node.set_input(result_of(value), *parameters)
    return _results([node.set_output(*results) for results in zip(yes, no, strict=True)])


def while_(test: Function, step: Function, operands: Sequence[Value], states: int, max_trips: int | None) -> Any:
    def stepped(*values: Value) -> list[Value]:
        current = step(*values)
        return [*current, test(*current, *values[states:])[0]]

    parameters, results = _body(stepped, operands)
    loop = _loop(-1 if max_trips is None else max_trips, test(*operands)[0], parameters, results)
    return _results(_carried(loop, operands, parameters, results, states))


def scan_(body: Function, operands: Sequence[Value], carries: int, sequences: int, length: int, reverse: bool) -> Any:
    end = carries + sequences
    if reverse:  # the concatenated rows of a loop are in the order of its steps
        operands = [flip_(x, (0,)) if carries <= k < end else x for k, x in enumerate(operands)]
    rows = [
        ov.parameter((1, *shape_of(x)[1:]), dtype_of(x)) if carries <= k < end else x for k, x in enumerate(operands)
    ]

    def stepped(*values: Value) -> list[Value]:
        elements = [reshape_(x, shape_of(x)[1:]) if carries <= k < end else x for k, x in enumerate(values)]
        results = body(*elements)
        stacked = [reshape_(y, (1, *shape_of(y))) for y in results[carries:]]
        return [*results[:carries], *stacked, ov.constant(True)]

    parameters, results = _body(stepped, rows)
    if length == 0:
        empty = [(0, *shape_of(y)[1:]) for y in results[carries:-1]]
        return _results(
            [*operands[:carries], *(ov.constant(np.empty(n, dtype_of(y))) for n, y in zip(empty, results[carries:]))]
        )
    loop = _loop(length, ov.constant(True), parameters, results)
    for parameter, value in zip(parameters[carries:end], operands[carries:end], strict=True):
        loop.set_sliced_input(parameter, result_of(value), 0, 1, 1, -1, 0)
    invariant_values = [*operands[:carries], *operands[end:]]
    final = _carried(loop, invariant_values, [*parameters[:carries], *parameters[end:]], results, carries)
    stacks = [loop.get_concatenated_slices(y.output(0), 0, 1, 1, -1, 0) for y in results[carries:-1]]
    return _results([*final, *(flip_(y, (0,)) if reverse else y for y in stacks)])


def _loop(trips: int, condition: Value, parameters: list[Value], results: list[Value]) -> Any:
    """Return a loop whose last result is the condition of the next step."""
    loop = ov.loop(ov.constant(trips, np.int32).output(0), result_of(condition))
    loop.set_function(openvino.Model(results, parameters))
    loop.set_special_body_ports([-1, len(results) - 1])
    return loop


def _carried(loop: Any, values: Sequence[Value], parameters: Any, results: Any, count: int) -> list[Value]:
    """Connect the first values with the results of the previous step; return those of the last step."""
    for k, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
        if k < count:
            loop.set_merged_input(parameter, result_of(value), results[k].output(0))
        else:
            loop.set_invariant_input(parameter, result_of(value))
    return [loop.get_iter_value(y.output(0), -1) for y in results[:count]]


def _results(values: list[Value]) -> Any:
    return values[0] if len(values) == 1 else values


# -- the host ---------------------------------------------------------------------------------------------------------
_numbers = itertools.count()


class HostCall(openvino.Op):  # type: ignore[misc]
    """An operation of the model that calls a function of NumPy arrays."""

    def __init__(self, function: Callable[..., Any], types: Any, inputs: Sequence[Value], number: int) -> None:
        super().__init__(self)
        self.function = function
        self.types = types
        self.number = number
        self.set_arguments([result_of(x) for x in inputs])
        self.constructor_validate_and_infer_types()

    def visit_attributes(self, visitor: Any) -> bool:
        """Show a number: operations of equal attributes and operands become one."""
        visitor.on_attributes({"number": self.number})
        return True

    def validate_and_infer_types(self) -> None:
        for k, (dtype, shape) in enumerate(self.types):
            stored = np.dtype(np.uint8 if dtype == np.bool_ else dtype)  # as the CPU stores booleans
            self.set_output_type(k, openvino.Type(stored), openvino.PartialShape(list(shape)))

    def clone_with_new_inputs(self, inputs: Sequence[Value]) -> HostCall:
        return HostCall(self.function, self.types, inputs, self.number)

    def has_evaluate(self) -> bool:
        return True

    def evaluate(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        for tensor, result in zip(outputs, self.function(*(x.data for x in inputs)), strict=True):
            tensor.data[...] = result
        return True


def on_host(function: Callable[..., Any], types: Any, *operands: Value | None) -> list[Value]:
    """Call a function of NumPy arrays; absent operands are None."""
    present = [x for x in operands if x is not None]
    dtypes = [dtype_of(x) for x in present]  # the CPU stores booleans as uint8

    def call(*arrays: Any) -> Any:
        remaining = iter([a.astype(dtype, copy=False) for a, dtype in zip(arrays, dtypes, strict=True)])
        with np.errstate(all="ignore"):
            return function(*(None if x is None else next(remaining) for x in operands))

    results = zip(HostCall(call, types, present, next(_numbers)).outputs(), types, strict=True)
    return [ov.convert(x, np.bool_) if dtype == np.bool_ else x for x, (dtype, _) in results]
