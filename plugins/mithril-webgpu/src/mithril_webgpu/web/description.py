"""The data of a site: the description that model.js reads, the weights, and the values that the page checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mithril import __version__
from mithril.graph import dtype as as_dtype
from mithril_cbackend.bundle.export_contents import Contents
from mithril_cbackend.devices.program import Branch, Copy, Count, DeviceProgram, Loop, Run
from mithril_cbackend.devices.wgsl import WEBGPU
from mithril_cbackend.graph.call_layout import packed
from mithril_webgpu.web.program import buffer_sizes, bytes_of

Array = np.ndarray[Any, Any]


def typed(name: str, array: Array) -> dict[str, Any]:
    kind = as_dtype(array.dtype).name
    return {"name": name, "dtype": kind, "shape": list(array.shape), "size": int(array.size)}


class Description:
    """The programs of a site in the terms of model.js, whose buffers of a GPU have numbers."""

    def __init__(self, program: DeviceProgram, contents: Contents) -> None:
        self.program, self.contents = program, contents
        self.inputs = [typed(n, x) for n, x in contents.inputs.items()]
        self.outputs = [typed(n, x) for n, x in contents.results.items()]
        # The C program finds its weights at the beginning, where the same arrays come first.
        arrays = {n: np.asarray(x, order="C") for n, x in contents.blob.items()}
        for k, (v, x) in program.constants.items():
            arrays[constant(k)] = np.asarray(x, v.dtype.numpy, order="C")
        self.weights, offsets = packed(arrays.values())
        self.arrays = dict(zip(arrays, zip(offsets, arrays.values(), strict=True), strict=True))
        self.expected, self.check = packed([*contents.inputs.values(), *contents.results.values()])

    def kernels(self) -> str:
        """Return the text of all kernels, each after a line with its name."""
        return "\n".join(f"// -- {x.name}\n{WEBGPU.program(x.text)}" for x in self.program.launches)

    def values(self, name: str, webassembly: bool) -> dict[str, Any]:
        """Return the contents of model.json."""
        return {
            "name": name,
            "generator": f"mithril {__version__}",
            "inputs": self.inputs,
            "outputs": self.outputs,
            "wasm": webassembly,
            "check": {"runs": self.contents.runs, "offsets": self.check},
            "webgpu": self.webgpu(),
        }

    def webgpu(self) -> dict[str, Any]:
        program, graph = self.program, self.program.graph
        states = {i.name for i in graph.with_role("state")} | {*self.contents.carried}
        stored = [self.stored(n, k, n in states) for n, k in program.arguments.items() if n in self.arrays]
        stored += [self.stored(constant(k), k, False) for k in program.constants]
        carried = self.contents.carried
        return {
            "buffers": buffer_sizes(program),
            "stored": stored,
            "inputs": {x["name"]: program.arguments[x["name"]] for x in self.inputs},
            "outputs": {x["name"]: program.results[x["name"]] for x in self.outputs},
            "flags": [program.results[n] for n in self.contents.flags],
            "launches": [{"name": x.name, "groups": WEBGPU.grid(x.groups)} for x in program.launches],
            "steps": steps(program.steps),
            "next": [
                ["copy", program.results[result], program.arguments[n], bytes_of(graph.input(n).type.shape), 0, 0]
                for n, result in carried.items()
            ],
        }

    def stored(self, name: str, buffer: int, is_state: bool) -> dict[str, Any]:
        offset, array = self.arrays[name]
        kind = as_dtype(array.dtype).name
        return {"buffer": buffer, "offset": offset, "dtype": kind, "size": int(array.size), "state": is_state}


def constant(buffer: int) -> str:
    return f"constant of buffer {buffer}"


def steps(program: Sequence[Any]) -> list[Any]:
    return [step for x in program if (step := described(x)) is not None]


def described(step: Any) -> list[Any] | None:
    """Return a step as model.js performs it; None for a copy of nothing."""
    if isinstance(step, Run):
        return ["run", step.launch, step.buffers]
    if isinstance(step, Copy):
        strides = step.source_stride, step.target_stride
        return ["copy", step.source, step.target, step.size, *strides] if step.size else None
    if isinstance(step, Branch):
        return ["if", step.condition, steps(step.yes), steps(step.no)]
    if isinstance(step, Loop):
        return ["while", step.condition, steps(step.test), steps(step.body), step.trips]
    assert isinstance(step, Count)
    return ["count", step.length, steps(step.body), step.reverse]
