"""Write a conda recipe for each distribution, from its pyproject.toml and its sdist.

``conda_recipes.py OUTPUT [DIST]`` writes ``OUTPUT/NAME/recipe.yaml``, each of which builds the sdist in ``DIST``. It
needs py-rattler-build, whose parser and renderer check every recipe.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

from audit_distributions import DISTRIBUTIONS, ROOT

NAMES = {"torch": "pytorch", "importlib-metadata": "importlib_metadata", "apache-tvm": "tvm"}  # on conda-forge
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?\s*(?P<bounds>[^;]*)(;.*)?")


def required(text: str) -> str:
    """Return the conda form of a requirement: conda has no extras and no markers."""
    match = REQUIREMENT.fullmatch(text)
    if match is None:
        raise SystemExit(f"the requirement {text!r} has another form than NAME[EXTRA] BOUNDS")
    name = match["name"].lower()
    return f"{NAMES.get(name, name)} {match['bounds'].replace(' ', '')}".strip()


def recipe(folder: Path, version: str, dist: Path) -> dict[str, Any]:
    """Return the recipe of a distribution."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = "mithril" if folder.name == "mithril-core" else project["name"].replace("-", "_")
    python = f"python {project['requires-python']}"
    scripts = [f"{name} = {target}" for name, target in project.get("scripts", {}).items()]
    return {
        "package": {"name": project["name"], "version": version},
        "source": {"path": str(dist / f"{project['name'].replace('-', '_')}-{version}.tar.gz")},
        "build": {
            "noarch": "python",
            "script": "${{ PYTHON }} -m pip install . -vv --no-deps --no-build-isolation",
            **({"python": {"entry_points": scripts}} if scripts else {}),
        },
        "requirements": {
            "host": [python, "pip", "hatchling >=1.27"],
            "run": [python, *map(required, project["dependencies"])],
        },
        "tests": [{"python": {"imports": [module], "pip_check": False}}],  # conda has other names
        "about": {
            "summary": project["description"],
            "license": project["license"],
            "license_file": "LICENSE",
        },
    }


def main(output: str, dist: str = "dist") -> None:
    from rattler_build import Stage0Recipe  # type: ignore[import-not-found]

    version = runpy.run_path(str(ROOT / "mithril-core/src/mithril/graph/version.py"))["__version__"]
    for folder in DISTRIBUTIONS:
        target = Path(output) / folder.name / "recipe.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        # every document of JSON is one of YAML
        target.write_text(json.dumps(recipe(folder, version, Path(dist).absolute()), indent=2) + "\n", encoding="utf-8")
        (variant,) = Stage0Recipe.from_file(target).render()
        print(f"{target}: {variant.recipe.package.name} {variant.recipe.package.version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
