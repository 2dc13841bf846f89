"""Adds the files that are built to the distributions: type stubs, and the registry of names."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Generated(BuildHookInterface[Any]):
    """A wheel is built from the repository, where the files are written, or from an sdist, which holds them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root, repository = Path(self.root), Path(self.root).parent
        tools = repository / "plugins" / "mithril-tools" / "src"
        if not tools.is_dir():
            if not (root / "src/mithril/__init__.pyi").exists():
                raise FileNotFoundError(f"{root} is neither in a clone of the repository nor a complete sdist")
            return
        # An isolated build finds its packages through PYTHONPATH.
        path = os.pathsep.join(filter(None, [str(root / "src"), str(tools), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "MITHRIL_DISABLE_PLUGINS": "*"}
        subprocess.run([sys.executable, "-m", "mithril_tools.generate", str(repository)], env=environment, check=True)
        if version != "editable":
            target = "src/mithril" if self.target_name == "sdist" else "mithril"
            build_data["force_include"][str(repository / "registry.json")] = f"{target}/plugins/registry.json"
