"""``python -m mithril_tools.generate [CHECKOUT]``: write the files that are built, and that git ignores.

They are the type stubs of the core, which its build hook writes into wheels, sdists and editable checkouts. With
``--coverage``, in an environment with all backends, also how each backend runs each operation, for the pages of
operations.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mithril_tools.operation_stubs import layers_stub, operations_stub
from mithril_tools.stubs import face_stub, methods_stub, package_stub, registered


def stubs(core: Path) -> dict[Path, str]:
    """Return the texts of the stubs of the folder ``mithril``, by path."""
    packages = sorted(path.parent for path in core.glob("*/__init__.py") if "lazy_exports(" in path.read_text("utf-8"))
    return {
        core / "__init__.pyi": face_stub(),
        core / "compiler/plugin_methods.pyi": methods_stub(registered("methods")),
        core / "ops/__init__.pyi": operations_stub(),
        core / "models/layers/operation_layers.pyi": layers_stub(),
        **{folder / "__init__.pyi": package_stub(f"mithril.{folder.name}") for folder in packages},
    }


def main(arguments: list[str]) -> None:
    folders = [argument for argument in arguments if argument != "--coverage"]
    core = Path(*folders) / "mithril-core" / "src" / "mithril"
    if not core.is_dir():
        raise SystemExit(f"{core} does not exist: name the folder of a clone of the repository")
    texts = stubs(core)
    if "--coverage" in arguments:
        from mithril_tools.reference.operations import COVERAGE, coverage_text  # needs more than a build has

        texts[COVERAGE] = coverage_text()
    for path, text in texts.items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
