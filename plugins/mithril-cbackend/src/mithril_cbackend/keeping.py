"""Programs on disk: machine code as a library, which is loaded without TVM's compiler."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mithril.graph.deferred import Deferred
from mithril.runtime.backend import BuildOptions
from mithril_cbackend import loading
from mithril_cbackend.executable import Executable, Written
from mithril_cbackend.layout import Layout
from mithril_cbackend.purpose import purpose
from mithril_cbackend.toolchains import HOST


def dump(executable: Executable) -> dict[str, bytes] | None:
    """The program's parts; None where nothing is installed that links a library."""
    compiler = HOST.compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder) / "code.o", Path(folder) / "code.so"
        executable.code.write_to_file(str(code), "o")
        linked = subprocess.run([compiler, "-shared", "-o", library, code, "-lm"], capture_output=True, check=False)
        if linked.returncode != 0:
            return None
        machine = json.dumps(asdict(executable.machine)).encode()
        return {**executable.layout.dump(), "library": library.read_bytes(), "machine": machine}


def revive(parts: Mapping[str, bytes], graph: Deferred, options: BuildOptions) -> Executable:
    """What ``dump`` gave. Kernels are written again only if somebody wants to see or export them."""
    machine = json.loads(parts["machine"])
    code = loading.load(parts["library"], machine["threads"])

    def write() -> Written:
        from mithril_cbackend import building

        return building.written(graph.get(), machine)

    return Executable(graph, Layout.load(parts), purpose(options.settings), code, write)
