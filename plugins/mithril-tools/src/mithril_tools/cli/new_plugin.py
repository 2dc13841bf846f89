"""``mithril new-plugin KIND NAME``: write a complete distribution that installs and passes its tests unmodified."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Any

import click

from mithril import __version__
from mithril.system import files

TEMPLATES = Path(__file__).parents[1] / "new_plugin"

# kind: (one-line description, requirements, requirements of its tests, usage)
NUMPY = ["mithril-numpy{core}", "mithril-passes{core}"]
KINDS: dict[str, tuple[str, list[str], list[str], str]] = {
    "analysis": (
        "The analysis {name} for mithril.",
        [],
        NUMPY,
        'It runs on request: `ml.compile(..., optimizations={{"{name}": True}})`; `compiled.decisions` has its report.',
    ),
    "backend": (
        "The {name} backend for mithril.",
        [],
        ["mithril-passes{core}"],
        'It is used by name, `ml.compile(model, "{name}")`, or as `ml.{cls}Backend()`.',
    ),
    "command": (
        "The command `mithril {name}`.",
        ["click>=8.2", "mithril-tools{core}"],
        [],
        "`mithril {name} --help` describes it.",
    ),
    "format": (
        "The file format .{ident} for models of mithril.",
        [],
        NUMPY,
        '`compiled.export("model.{ident}")` writes it, `ml.load("model.{ident}", backend="numpy")` reads it.',
    ),
    "frontend": (
        "The frontend {name} for mithril.",
        [],
        NUMPY,
        "`ml.compile({package}.models.Polynomial((1.0, 2.0)), backend)` compiles its models.",
    ),
    "layer": (
        "The layer {cls} for mithril.",
        [],
        NUMPY,
        "`ml.{cls}(size)`, in models for every backend.",
    ),
    "lowering": (
        "A lowering of softmax for mithril.",
        [],
        NUMPY,
        'Programs of the backend use it; `compiled.decisions.of("plugin")` names it.',
    ),
    "observer": (
        "The observer {name} for mithril.",
        [],
        NUMPY,
        "`logging.basicConfig(level=logging.INFO)`, then `ml.compile(..., {ident}_log=True)`.",
    ),
    "op": (
        "The operation {ident}.soft_clip for mithril.",
        [],
        NUMPY,
        "`from {package}.ops import soft_clip`, then `soft_clip(x)` on values, arrays and connections.",
    ),
    "option": (
        "The option {ident}_limit for mithril.",
        [],
        NUMPY,
        "`ml.compile(..., {ident}_limit=100)` refuses programs with more operations.",
    ),
    "pass": (
        "The {name} pass for mithril.",
        [],
        NUMPY,
        'It runs from level medium on. `optimizations={{"{name}": False}}` leaves it out.',
    ),
    "primitive": (
        "The operation {ident}.sinc for mithril.",
        [],
        NUMPY,
        "`from {package}.ops import sinc`, then `sinc(x)` on values, arrays and connections.",
    ),
    "profiler": (
        "The {name} profiler for mithril.",
        [],
        [],
        '`with mithril.plugins.load_profiler("{name}")() as running: ...`, then `running.summary()`.',
    ),
    "rule": (
        "The rules {name} for mithril.",
        [],
        NUMPY,
        'They run from level medium on. `optimizations={{"{name}": False}}` leaves them out.',
    ),
    "target": (
        "The hardware target {ident} for mithril.",
        [],
        [],
        'It is chosen by `ml.compile(..., target_hardware="{ident}")`.',
    ),
}
OPERATIONS = {"op": "soft_clip", "primitive": "sinc"}  # kind -> operation that it declares


def facts(kind: str, name: str) -> dict[str, Any]:
    """Return the variables of the templates of ``kind``."""
    ident = name.replace("-", "_")
    if keyword.iskeyword(ident):
        ident += "_"
    major, minor = __version__.split(".")[:2]
    words = {
        "name": name,
        "ident": ident,
        "cls": "".join(part.capitalize() for part in name.split("-")),
        "distribution": f"mithril-{name}",
        "package": f"mithril_{name.replace('-', '_')}",
        "core": f">={major}.{minor},<{major}.{int(minor) + 2}",
    }
    summary, requirements, tests, usage = KINDS[kind]
    return words | {
        "kind": kind,
        "summary": summary.format(**words),
        "usage": usage.format(**words),
        "requirements": sorted(line.format(**words) for line in ["mithril-core{core}", *requirements]),
        "test_requirements": sorted(line.format(**words) for line in ["mithril-testing{core}", "pytest>=8", *tests]),
    }


def render(kind: str, words: dict[str, Any]) -> dict[str, str]:
    """Return the text of each generated file by its path inside the distribution."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    files = {}
    for root in (TEMPLATES / "common", TEMPLATES / kind):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                place = path.relative_to(root).as_posix().removesuffix(".j2")
                place = place.replace("PACKAGE", words["package"]).replace("IDENT", words["ident"])
                files[place] = environment.from_string(path.read_text(encoding="utf-8")).render(**words)
    return files


def is_taken(ident: str) -> bool:
    """Whether the core or an installed plugin has an operation of that name."""
    from mithril import plugins
    from mithril.graph import operations

    return ident in operations() or ident in plugins.op_names()


def owner(distribution: str, name: str) -> str | None:
    """Return the mithril distribution or installed plugin that already has this name, or None."""
    from mithril import plugins
    from mithril.plugins import pip_hints

    if distribution in pip_hints.DISTRIBUTIONS:
        return f"mithril's own distribution {distribution}"
    if name in pip_hints.BACKENDS:
        return f"the backend '{name}' of {pip_hints.BACKENDS[name]}"
    return next((f"the installed plugin '{p.name}' of {p.origin}" for p in plugins.found() if p.name == name), None)


@click.command(
    "new-plugin", epilog=f"Kinds: {', '.join(sorted(KINDS))}. The page `mithril docs writing-plugins` shows them."
)
@click.argument("kind", type=click.Choice(sorted(KINDS)), metavar="KIND")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), default=".", help="Parent directory of the new distribution.")
def new_plugin(kind: str, name: str, into: Path) -> None:
    """Write a complete distribution with tests: operation, layer, pass, backend and other kinds.

    KIND is the kind of plugin: an operation composed of others (op) or with a reference of its own (primitive), a pass
    as a function (pass), as rules (rule) or one that only reports (analysis), and so on. NAME is lower-case words
    joined by hyphens; the name of the distribution is mithril-NAME.
    """
    name = name.removeprefix("mithril-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise click.BadParameter("use lower-case letters and digits, and hyphens between words", param_hint="NAME")
    words = facts(kind, name)
    if kind in OPERATIONS and is_taken(operation := f"{words['ident']}.{OPERATIONS[kind]}"):
        raise click.BadParameter(f"there is an operation '{operation}' already", param_hint="NAME")
    if home := owner(words["distribution"], name):
        raise click.BadParameter(f"{home} has that name", param_hint="NAME")
    folder = into / words["distribution"]
    if folder.exists():
        raise click.ClickException(f"{folder} exists already; choose another name, or another folder with --into")
    for place, text in render(kind, words).items():
        click.echo(f"wrote {files.write(folder / place, text)}")
    click.echo(f'\nnext: cd {folder} && pip install -e ".[test]" && pytest')
