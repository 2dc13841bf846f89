"""The base class of the backends of devices: the kernels of the C backend as launches, arrays in their memory."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mithril.backend import Backend, BuildOptions, Capabilities, ExactSizesRequired, PluginLowering, as_numpy
from mithril.graph import BackendError, Graph, Node, dtype as as_dtype, symbols
from mithril_cbackend.devices.host import DeviceArray, Host


class DeviceBackend(Backend):
    """Backend of one kind of device, which a host opens when the first array or program needs it.

    ``device`` selects one of several: "gpu:1" is the second one that the driver lists.
    """

    devices: ClassVar[tuple[str, ...]] = ("gpu",)
    hosts: ClassVar[dict[tuple[str, int], Host]] = {}
    opening: ClassVar[Any] = threading.Lock()

    @classmethod
    @abstractmethod
    def host_type(cls) -> type[Host]:
        """Import and return the class of the devices."""

    @classmethod
    def diagnose(cls) -> Mapping[str, str]:
        """Return the rows that ``mithril doctor`` prints."""
        kind = cls.host_type()
        rows = {f"device {k}": kind.title(d) for k, d in enumerate(kind.devices())}
        return rows or {"devices": f"none: {kind.absence()}"}

    def _device(self, device: str | None) -> str:
        name = super()._device(device)
        number = name.partition(":")[2]
        if number and not (number.isascii() and number.isdigit()):
            raise BackendError(
                f"device of backend '{self.name}': '{number}' is not the number of a device",
                hint=f"pass a position in the list of mithril doctor, such as device='{self.devices[0]}:1'",
            )
        return name

    @property
    def number(self) -> int:
        """The position of the device in the list of the drivers."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def host(self) -> Host:
        """The device, opened once in a process."""
        key = type(self).name, self.number
        if key not in self.hosts:
            with self.opening:
                if key not in self.hosts:
                    self.hosts[key] = self.host_type().opened(self.number)
        return self.hosts[key]

    def host_of(self, options: BuildOptions) -> Host:
        """Return the device that a program is compiled for."""
        return self.host

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, symbolic=False, recompiles=True, memory="arena")

    def branches(self, options: BuildOptions) -> bool:
        return True

    # -- building -----------------------------------------------------------------------------------------------------
    def lowers(self, node: Node, options: BuildOptions | None = None) -> bool:
        from mithril_cbackend.devices.templates import lowers

        return lowers(node)

    def plugin_lowering(self, node: Node, options: BuildOptions | None = None) -> PluginLowering | None:
        from mithril_cbackend.graph import foreign

        return foreign.plugin_lowering(node)

    def falls_back(self, node: Node, options: BuildOptions | None = None) -> bool:
        from mithril_cbackend.graph import fusion

        return not self.lowers(node, options) and fusion.runs_on_host(node)

    def check_options(self, options: BuildOptions) -> None:
        reason = "kernels of devices are generated from loops, not from text"
        options.reject(self.name, ("template_path", "code_transformers"), reason)

    def build(self, graph: Graph, options: BuildOptions | None = None) -> Any:
        from mithril_cbackend.devices.build import build

        self.check(graph)
        options = options or BuildOptions()
        self.check_options(options)
        if any(symbols(*i.type.shape) for i in graph.inputs):
            raise ExactSizesRequired(f"backend '{self.name}' compiles a program for each size")
        return build(graph, self.host_of(options), options)

    # -- memory -------------------------------------------------------------------------------------------------------
    def embedded_weights(self, executable: Any, size: int) -> tuple[Sequence[Any], int]:
        program = getattr(executable, "program", None)  # a program of several backends has none
        if program is None:
            return super().embedded_weights(executable, size)
        return [np.asarray(data) for _, data in program.constants.values()], 0

    def exact_memory(self, executable: Any, sizes: Mapping[str, int]) -> tuple[int, str] | None:
        program = getattr(executable, "program", None)
        if program is None:
            return None
        model = executable.host.model
        results = sum(math.prod(s) * np.dtype(model.storage(d)).itemsize for _, s, d in executable.results)
        return executable.arena + results, "arena"

    def measured_memory(self, run: Callable[[], Any], executable: Any = None) -> int:
        run()
        host = self.host
        self.synchronize()
        before = host.peak = host.allocated
        results = run()
        measured = host.peak - before + getattr(executable, "arena", 0)
        del results
        return measured

    # -- arrays -------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> DeviceArray:
        if isinstance(data, DeviceArray):
            data = data.numpy()
        array = np.array(as_numpy(data, self.dtype), None if dtype is None else as_dtype(dtype).numpy)
        self.require(as_dtype(array.dtype))
        return DeviceArray.of(self.host, array)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, DeviceArray)

    def synchronize(self, value: Any = None) -> None:
        with self.host.lock:
            self.host.finish()
