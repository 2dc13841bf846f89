"""Programs on disk: machine code as a shared library, which is loaded without TVM's compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mithril.backend import BuildOptions, LazyGraph
from mithril_cbackend import cpu_info, module_loader
from mithril_cbackend.compile_target import resolve_target
from mithril_cbackend.graph.call_layout import Layout
from mithril_cbackend.program.any_size import AnySizeExecutable
from mithril_cbackend.program.arena_plan import ArenaPlan
from mithril_cbackend.program.executable import Executable, LoweredProgram


def dump(executable: Executable) -> dict[str, bytes | bytearray] | None:
    """Serialize a program, or return None if it cannot be cached."""
    in_process = bool(executable.host_steps)  # the machine code holds addresses of this process
    if in_process or callable(executable.machine.plan):
        return None
    library = executable.library or module_loader.shared_library(executable.code)
    executable.library = None
    if library is None:
        return None
    machine = json.dumps(asdict(executable.machine)).encode()
    parts = {**executable.layout.dump(), "library": library, "machine": machine}
    return {**parts, "arena": executable.arena_plan.dump()} if isinstance(executable, AnySizeExecutable) else parts


def revive(parts: Mapping[str, Any], graph: LazyGraph, options: BuildOptions) -> Executable:
    """Load a dumped program. Kernels are generated again only for ``source`` and for export."""
    machine = json.loads(parts["machine"])
    cpu_info.enable_tiles()
    code = module_loader.load(parts["library"], machine["threads"])

    def write() -> LoweredProgram:
        from mithril_cbackend.program import compile_graph

        return compile_graph.lower_again(graph.get(), machine)

    arguments = graph, Layout.load(parts), resolve_target(options.settings), code, write
    if "arena" in parts:
        executable: Executable = AnySizeExecutable(ArenaPlan.load(parts["arena"]), *arguments)
    else:
        executable = Executable(*arguments)
    executable.plugins = options.plugins
    if options.file_path is not None:
        from mithril_cbackend.program import compile_graph

        compile_graph.write_source(executable, graph.get(), options)
    return executable
