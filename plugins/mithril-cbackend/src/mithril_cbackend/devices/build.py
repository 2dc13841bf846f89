"""Entry point of a compilation for a device: graph and options to executable."""

from __future__ import annotations

from mithril.backend import BuildOptions
from mithril.graph import Graph
from mithril.system import files
from mithril_cbackend.devices.executable import DeviceExecutable
from mithril_cbackend.devices.host import Host
from mithril_cbackend.devices.model import DeviceModel
from mithril_cbackend.devices.program import DeviceProgram, Emitter
from mithril_cbackend.devices.templates import machine
from mithril_cbackend.graph import sparse_places


def written(graph: Graph, model: DeviceModel, options: BuildOptions) -> DeviceProgram:
    """Return the program of a decomposed graph."""
    return Emitter(sparse_places.checked(graph), machine(model, options.fuses), options.memory_plan != "apart").write()


def build(graph: Graph, host: Host, options: BuildOptions) -> DeviceExecutable:
    executable = DeviceExecutable(written(graph, host.model, options), host)
    executable.plugins = options.plugins
    path = options.source_path(graph)
    if path is not None:
        files.write(path, executable.source, "file_path")
    return executable
