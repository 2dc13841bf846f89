"""Peak memory of programs on the CPU, by a replay of MLX's evaluation (MLX 0.32): its order, donations and releases.

One thread of MLX allocates results and puts operations into a queue, and another computes them. A buffer is released
when the queue has passed the last operation that reads it, and the first thread may be far ahead. The replay assumes
that it always is, as with operations that take longer than to be queued.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mithril.backend import Forward
from mithril.graph import DType, Graph, TensorType, is_recomputed, substitute
from mithril_mlx.mlx_loader import mx

# Constants of MLX 0.32: operations that one task of the queue counts for, tasks that may wait, and arrays that the
# order of evaluation has open at once. A result may take a buffer that is larger by the last one, in bytes.
PER_TASK, TASKS, WIDTH, EXCESS = 10, 10, 20, 16384

RESHAPES = {"Reshape", "Flatten", "Unflatten"}
ELEMENTWISE = set(
    """
    Abs Add ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTan2 ArcTanh AsType BitwiseBinary BitwiseInvert Ceil Cos Cosh Divide
    Equal Erf ErfInv Exp Expm1 Floor Greater GreaterEqual Less LessEqual Log Log1p LogAddExp LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Multiply Negative NotEqual Power Remainder Round Select Sigmoid Sign Sin Sinh Softmax Sqrt
    Square Subtract Tan Tanh
    """.split()  # noqa: SIM905
)


@dataclass(eq=False)
class Buffer:
    """Allocated memory with the number of its holders: arrays, and operations in the queue."""

    size: int
    holders: int = 0


@dataclass(eq=False)
class Array:
    """One array of a trace; ``readers`` counts operations that have not read it, and the caller."""

    shape: tuple[int, ...]
    itemsize: int
    inputs: Sequence[Array] = ()
    name: str = ""
    arguments: Sequence[Any] = ()
    together: Sequence[Array] = ()  # all results of its operation
    readers: int = 0
    buffer: Buffer | None = None
    strides: tuple[int, ...] = ()
    elements: int = 0  # in memory: fewer than ``size`` if it is broadcast
    is_waiting: bool = True  # for its evaluation
    is_number: bool = False  # computed from constants without dimensions

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def is_ordered(self) -> bool:
        """Whether elements are in the order of rows, without gaps."""
        return self.elements == self.size and _fits(self.shape, self.strides, _packed(self.shape))

    @property
    def is_dense(self) -> bool:
        """Whether elements are without gaps, in any order of axes."""
        used = sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if s and n > 1)
        step = 1
        for stride, n in used:
            if stride != step:
                return False
            step *= n
        return step == self.elements


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _fits(shape: Sequence[int], strides: Sequence[int], expected: Sequence[int]) -> bool:
    return all(n == 1 or s == e for n, s, e in zip(shape, strides, expected, strict=True))


def workspace(graph: Graph, forward: Forward, sizes: Mapping[str, int], kind: Callable[[DType], Any]) -> int | None:
    """Return the bytes that a call of a generated function allocates at most; None if it cannot be traced."""
    inputs = graph.arguments
    if not all(i.type.shape == () or math.prod(_numbers(i.type, sizes)) for i in inputs):
        return None

    def results(*arrays: Any) -> list[Any]:
        by_name: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for i, array in zip(inputs, arrays, strict=True):
            by_name[i.role != "param"][i.name] = array
        return list(forward(*by_name).values())

    samples = [mx.zeros(_numbers(i.type, sizes), kind(i.type.dtype)) for i in inputs]  # lazy: without memory
    try:
        traced = _traced(results, samples)
    except (ValueError, RuntimeError):  # of MLX, for operations on the host and decisions by values
        return None
    return _Replay(0 if any(map(is_recomputed, graph.nodes)) else TASKS).run(traced)


def _numbers(type_: TensorType, sizes: Mapping[str, int]) -> list[int]:
    return [int(substitute(d, sizes)) for d in type_.shape]


def _traced(function: Callable[..., Any], arrays: Sequence[Any]) -> list[Array]:
    """Return the results of a function as arrays with their inputs; nothing is computed."""
    arrays_by_key: dict[str, Array] = {}
    outputs: list[str] = []

    def note(entry: Mapping[str, Any]) -> None:
        kind = entry["type"]
        if kind == "inputs":
            for key, shape, dtype in entry["inputs"]:
                arrays_by_key[key] = _outside(shape, dtype.size)
        elif kind == "constants":
            for key, array in entry["constants"]:
                arrays_by_key[key] = _outside(array.shape, array.dtype.size)
                arrays_by_key[key].is_number = not array.shape
        elif kind == "outputs":
            outputs.extend(key for key, *_ in entry["outputs"])
        elif kind == "primitive":
            inputs = [_copy(arrays_by_key[key]) for key, *_ in entry["inputs"]]
            types = [(shape, dtype.size) for _, shape, dtype in entry["outputs"]]
            results = _operation(inputs, entry["name"], entry["arguments"], types)
            arrays_by_key.update(zip((key for key, *_ in entry["outputs"]), results, strict=True))

    mx.export_function(note, function, *arrays)
    return [arrays_by_key[key] for key in outputs]


def _copy(array: Array) -> Array:
    """Return an array of a number for one reader: a trace merges equal ones, but a call computes each of them."""
    if not (array.is_number and array.inputs):
        return array
    return _operation([_copy(a) for a in array.inputs], array.name, array.arguments, [(array.shape, array.itemsize)])[0]


def _operation(
    inputs: Sequence[Array], name: str, arguments: Sequence[Any], types: Iterable[tuple[Sequence[int], int]]
) -> list[Array]:
    """Return the results of an operation."""
    is_number = bool(inputs) and all(a.is_number for a in inputs)
    results = [Array(tuple(s), size, inputs, name, arguments, is_number=is_number) for s, size in types]
    for array in results:
        array.together = results
    return results


def _outside(shape: Sequence[int], itemsize: int) -> Array:
    """Return an array of the caller."""
    buffer = Buffer(0, holders=1)
    size = math.prod(shape)
    return Array(
        tuple(shape), itemsize, readers=1, buffer=buffer, strides=_packed(shape), elements=size, is_waiting=False
    )


def _order(results: list[Array]) -> list[Array]:
    """Return arrays in the order of their evaluation: the reverse of a search by breadth, and by depth where wide."""
    end = Array((), 1, results)
    degree: Counter[Array] = Counter()
    stack: list[tuple[Array, Iterator[Array]]] = [(end, iter(end.inputs))]
    while stack:
        for array in stack[-1][1]:
            is_new = array not in degree
            for sibling in array.together or [array]:
                degree[sibling] += 1
            if is_new:
                stack.append((array, iter(array.inputs)))
                break
        else:
            stack.pop()
    tape, later, i = [end], list[tuple[Array, int]](), 0
    while i < len(tape) or later:
        if i < len(tape):
            array, start = tape[i], 0
            i += 1
        else:
            array, start = later.pop()
        for j in range(start, len(array.inputs)):
            read = array.inputs[j]
            if not read.is_waiting:
                continue
            if len(tape) - i >= WIDTH:
                later.append((array, j))
                break
            for sibling in read.together:
                degree[sibling] -= 1
            if not degree[read]:
                tape.append(read)
    return tape[:0:-1]


@dataclass
class _Replay:
    tasks: int  # that may wait
    now: int = 0
    peak: int = 0
    queued: int = 0
    queue: deque[tuple[int, list[Buffer]]] = field(default_factory=deque)  # with the buffers that an operation holds
    temporaries: list[Buffer] = field(default_factory=list)

    def run(self, results: list[Array]) -> int:
        order = _order(results)
        for array in results:
            array.readers += 1
        for array in order:
            for read in array.inputs:
                read.readers += 1
        for array in order:
            self.evaluate(array)
        return self.peak

    # -- buffers -----------------------------------------------------------------------------------------------------
    def allocated(self, size: int) -> Buffer:
        self.now += size
        self.peak = max(self.peak, self.now)
        return Buffer(size)

    def hold(self, array: Array, buffer: Buffer) -> None:
        buffer.holders += 1
        array.buffer = buffer

    def release(self, buffer: Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self.now -= buffer.size

    def temporary(self, size: int) -> None:
        buffer = self.allocated(size)
        buffer.holders += 1
        self.temporaries.append(buffer)

    # -- evaluation --------------------------------------------------------------------------------------------------
    def evaluate(self, array: Array) -> None:
        self.compute(array)
        array.is_waiting = False
        buffers = {id(b): b for a in (*array.inputs, *array.together) if (b := a.buffer) is not None}
        buffers.pop(id(array.buffer), None)
        for buffer in buffers.values():
            buffer.holders += 1
        self.dispatch([*buffers.values(), *self.temporaries])
        self.temporaries = []
        passed = PER_TASK * (self.queued // PER_TASK - self.tasks)
        while self.queue and self.queue[0][0] <= passed:
            for buffer in self.queue.popleft()[1]:
                self.release(buffer)
        for read in array.inputs:
            read.readers -= 1
            self.drop(read)
        for result in array.together:
            self.drop(result)

    def drop(self, array: Array) -> None:
        """Release the buffer of an array without readers."""
        if not array.readers and array.buffer is not None:
            self.release(array.buffer)
            array.buffer = None

    def dispatch(self, buffers: list[Buffer] | None = None) -> None:
        self.queued += 1
        if buffers:
            self.queue.append((self.queued, buffers))

    def compute(self, array: Array) -> None:
        name, inputs = array.name, array.inputs
        if name in VIEWS:
            VIEWS[name](self, array)
        elif name in RESHAPES:
            self.reshape(array)
        elif name in ELEMENTWISE:
            self.elementwise(array, inputs)
        else:
            for result in array.together:
                self.fresh(result)
            if name in ("Matmul", "AddMM"):
                self.copied_operands(array)
            elif name == "Convolution":
                self.unfolded(array)
            self.dispatch()

    def fresh(self, array: Array) -> None:
        self.hold(array, self.allocated(array.nbytes))
        array.strides, array.elements = _packed(array.shape), array.size

    def view(self, array: Array, strides: Sequence[int], elements: int | None = None) -> None:
        source = array.inputs[0]
        assert source.buffer is not None
        self.hold(array, source.buffer)
        array.strides = tuple(strides)
        array.elements = source.elements if elements is None else elements

    def is_free(self, read: Array, array: Array) -> bool:
        """Whether a result may overwrite an operand."""
        buffer = read.buffer
        assert buffer is not None
        is_last = read.readers == 1 and buffer.holders == 1
        return is_last and read.itemsize == array.itemsize and buffer.size <= array.nbytes + EXCESS

    def elementwise(self, array: Array, inputs: Sequence[Array]) -> None:
        large = [a for a in inputs if a.elements > 1] or list(inputs[:1])
        is_alone = len(inputs) == 1
        is_aligned = all(
            a.strides == large[0].strides and a.is_dense and (is_alone or a.elements == array.size) for a in large
        )
        for read in large:
            if (is_aligned or (read.is_ordered and read.size == array.size)) and self.is_free(read, array):
                assert read.buffer is not None
                self.hold(array, read.buffer)
                array.strides, array.elements = read.strides, read.elements
                break
        else:
            if is_aligned:
                self.hold(array, self.allocated(large[0].elements * array.itemsize))
                array.strides, array.elements = large[0].strides, large[0].elements
            else:
                self.fresh(array)
        self.dispatch()

    def reshape(self, array: Array) -> None:
        source = array.inputs[0]
        strides = _packed(array.shape) if source.is_ordered else _reshaped(source, array.shape)
        if strides is None:
            self.fresh(array)
            self.dispatch()
        else:
            self.view(array, strides)

    def copied_operands(self, array: Array) -> None:
        """Copy operands whose rows and columns are not those of a matrix."""
        for x in array.inputs[:2]:
            rows, columns = x.strides[-2:]
            if (rows, columns) != (x.shape[-1], 1) and (rows, columns) != (1, x.shape[-2]):
                self.temporary(x.nbytes)
                self.dispatch()

    def unfolded(self, array: Array) -> None:
        """Allocate the padded image and its windows, for convolutions that are products."""
        x, w = array.inputs
        _, low, high, dilation, input_dilation, groups, flip = array.arguments
        if any(n != 1 for n in (*dilation, *input_dilation)) or groups != 1:
            return
        padded = [n + a + b for n, a, b in zip(x.shape[1:-1], low, high, strict=True)]
        self.temporary(4 * x.shape[0] * math.prod(padded) * x.shape[-1])
        self.temporary(4 * math.prod(array.shape[:-1]) * math.prod(w.shape[1:]))
        for _ in range(3):
            self.dispatch()
        if w.itemsize != 4 or not w.is_ordered:
            self.temporary(4 * w.size)
            self.dispatch()
        if flip:
            self.temporary(4 * w.size)
            self.dispatch()
            self.dispatch()
        if array.itemsize != 4:
            self.temporary(4 * array.size)
            self.dispatch()


def _reshaped(x: Array, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return strides that give elements of another order a new shape, or None if they have to be copied."""
    if not x.shape:
        return (0,) * len(shape)
    sizes, steps = [x.shape[0]], [x.strides[0]]
    for n, stride in zip(x.shape[1:], x.strides[1:], strict=True):
        if n == 1:
            continue
        if sizes[-1] == 1:
            sizes[-1], steps[-1] = n, stride
        elif steps[-1] == n * stride:
            sizes[-1], steps[-1] = sizes[-1] * n, stride
        else:
            sizes.append(n)
            steps.append(stride)
    strides: list[int] = []
    j = 0
    for n in shape:
        if j < len(sizes) and sizes[j] % n == 0:
            sizes[j] //= n
            strides.append(sizes[j] * steps[j])
            j += sizes[j] == 1
        elif n == 1 and strides:
            strides.append(strides[-1])
        else:
            return None
    return tuple(strides)


# -- views -----------------------------------------------------------------------------------------------------------
def _same(replay: _Replay, array: Array) -> None:
    for result, source in zip(array.together, array.inputs, strict=False):
        assert source.buffer is not None
        replay.hold(result, source.buffer)
        result.strides, result.elements = source.strides, source.elements


def _broadcast(replay: _Replay, array: Array) -> None:
    source = array.inputs[0]
    steps = [0 if n == 1 else s for n, s in zip(source.shape, source.strides, strict=True)]
    replay.view(array, [0] * (len(array.shape) - len(steps)) + steps)


def _transposed(replay: _Replay, array: Array) -> None:
    replay.view(array, [array.inputs[0].strides[k] for k in array.arguments[0]])


def _squeezed(replay: _Replay, array: Array) -> None:
    source = array.inputs[0]
    axes = {k % len(source.shape) for k in array.arguments[0]}
    replay.view(array, [s for k, s in enumerate(source.strides) if k not in axes])


def _expanded(replay: _Replay, array: Array) -> None:
    strides = list(array.inputs[0].strides)
    for k in array.arguments[0]:
        strides.insert(k, 1)
    replay.view(array, strides)


def _sliced(replay: _Replay, array: Array) -> None:
    steps = array.arguments[2] if array.name == "Slice" else [1] * len(array.shape)
    for result in array.together:
        source = array.inputs[0]
        assert source.buffer is not None
        replay.hold(result, source.buffer)
        result.strides = tuple(s * n for s, n in zip(source.strides, steps, strict=True))
        result.elements = result.size


def _strided(replay: _Replay, array: Array) -> None:
    strides = array.arguments[1]
    replay.view(array, strides, 1 + sum(s * (n - 1) for n, s in zip(array.shape, strides, strict=True)))


VIEWS: Mapping[str, Callable[[_Replay, Array], None]] = {
    **dict.fromkeys(("Copy", "Depends", "StopGradient", "View"), _same),
    **dict.fromkeys(("Broadcast", "BroadcastAxes"), _broadcast),
    **dict.fromkeys(("Slice", "Split"), _sliced),
    "AsStrided": _strided,
    "Transpose": _transposed,
    "Squeeze": _squeezed,
    "ExpandDims": _expanded,
}
