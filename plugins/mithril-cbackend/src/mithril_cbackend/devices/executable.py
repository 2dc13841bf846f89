"""Programs of a device that Python calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.backend import host_function
from mithril.graph import Graph, dtype as as_dtype, iterate
from mithril_cbackend.devices.host import DeviceArray, Host, from_storage, to_storage
from mithril_cbackend.devices.program import Branch, Call, Copy, Count, DeviceProgram, Loop, Run
from mithril_cbackend.graph.foreign import plugin_lowering
from mithril_cbackend.lowering.element.element_reader import shape_of


class DeviceExecutable:
    """Launches with the buffers of constants and temporaries."""

    def __init__(self, program: DeviceProgram, host: Host) -> None:
        self.program, self.host = program, host
        self.plugins: list[str] = []
        self.lowered = frozenset(node.op.name for node, _ in iterate(program.graph)) - program.fallbacks
        self.kernels = host.build(program.launches)
        self.functions = {id(node): host_function(node, plugin_lowering(node)) for node in program.calls}
        self.table: list[Any] = [None] * program.buffers
        for number, size in program.sizes.items():
            self.table[number] = host.allocate(size)
        for number, (value, data) in program.constants.items():
            array = np.asarray(data, value.dtype.numpy)
            self.table[number] = DeviceArray.of(host, array).buffer
        self.types = {i.name: (shape_of(i.value), i.type.dtype.numpy) for i in program.graph.arguments}
        outputs = zip(program.graph.output_names, program.graph.outputs, strict=True)
        self.results = [(name, shape_of(v), v.dtype) for name, v in outputs if name in program.results]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def arena(self) -> int:
        """The bytes of temporaries."""
        return sum(self.program.sizes.values())

    @property
    def source(self) -> str:
        """The text of all kernels."""
        return "\n".join([*(f"// {line}" for line in self.plugins), *(x.text for x in self.program.launches)])

    def on_device(self, name: str, array: Any) -> DeviceArray:
        if isinstance(array, DeviceArray) and array.host is self.host:
            return array
        return DeviceArray.of(self.host, np.asarray(array, self.types[name][1]))

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        program, host = self.program, self.host
        with host.lock:
            arrays = {
                name: self.on_device(name, params[name] if name in params else inputs[name])
                for name in program.arguments
            }
            for name, number in program.arguments.items():
                self.table[number] = arrays[name].buffer
            outputs = {}
            for name, shape, dtype in self.results:
                size = math.prod(shape) * np.dtype(host.model.storage(dtype)).itemsize
                buffer = self.table[program.results[name]] = host.allocate(size)
                outputs[name] = DeviceArray(host, buffer, shape, dtype.numpy)
            for name, state in program.updated.items():
                outputs[name] = arrays[state]
            self.steps(program.steps, 0)
            for number in (*program.arguments.values(), *program.results.values()):
                self.table[number] = None
        return {name: outputs[name] for name in program.graph.output_names}

    # -- steps --------------------------------------------------------------------------------------------------------
    def steps(self, steps: Sequence[Any], turn: int) -> None:
        for step in steps:
            self.RUNS[type(step)](self, step, turn)

    def run(self, step: Run, turn: int) -> None:
        buffers = [self.table[b] for b in step.buffers]
        self.host.launch(self.kernels[step.launch], self.program.launches[step.launch], buffers)

    def copy(self, step: Copy, turn: int) -> None:
        if step.size:
            starts = turn * step.source_stride, turn * step.target_stride
            self.host.copy(self.table[step.source], starts[0], self.table[step.target], starts[1], step.size)

    def call(self, step: Call, turn: int) -> None:
        numbers = iter(step.inputs)
        operands = [None if v is None else self.read(next(numbers), v.dtype, shape_of(v)) for v in step.node.operands]
        results = self.functions[id(step.node)](*operands)
        for number, v, result in zip(step.outputs, step.node.results, results, strict=True):
            data = to_storage(self.host.model, np.asarray(result).reshape(shape_of(v)), v.dtype)
            if data.nbytes:
                self.host.write(self.table[number], data)

    def read(self, number: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        data = np.empty(math.prod(shape), self.host.model.storage(dtype))
        if data.nbytes:
            self.host.read(self.table[number], data)
        array = from_storage(self.host.model, data, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def holds(self, number: int) -> bool:
        return bool(self.read(number, as_dtype("bool"), ()))

    def branch(self, step: Branch, turn: int) -> None:
        self.steps(step.yes if self.holds(step.condition) else step.no, 0)

    def loop(self, step: Loop, turn: int) -> None:
        done = 0
        while step.trips is None or done < step.trips:
            self.steps(step.test, 0)
            if not self.holds(step.condition):
                break
            self.steps(step.body, 0)
            done += 1

    def count(self, step: Count, turn: int) -> None:
        for k in range(step.length):
            self.steps(step.body, step.length - 1 - k if step.reverse else k)

    RUNS: Mapping[type, Callable[..., None]] = {
        Run: run,
        Copy: copy,
        Call: call,
        Branch: branch,
        Loop: loop,
        Count: count,
    }
