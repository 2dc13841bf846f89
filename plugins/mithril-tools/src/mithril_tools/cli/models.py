"""Commands that take a model, a file or ``file.py:name``: ``compile``, ``diff``, ``explain``, ``export``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mithril.graph import InputError, MithrilError, ModelError, ShapeError, closest

PLACES = "write file.py:name, package.module:name, or the path of a model file or folder"


def load_model(place: str) -> Any:
    """Read a model file or folder, or import a model, a layer, or a function without arguments that returns one."""
    if Path(place).exists() and Path(place).suffix != ".py":
        from mithril.compiler import model_of

        return model_of(place)
    member = load_member(place)
    from mithril.models import Layer, Model

    is_maker = callable(member) and not isinstance(member, (Model, Layer))
    model = _reporting(place, member) if is_maker else member
    if not isinstance(model, (Model, Layer)):
        raise ModelError(
            f"'{place}' is a {type(model).__name__}, no model", hint="name a model, or a function making one"
        )
    return model


def load_member(place: str) -> Any:
    """Import a member of a module."""
    module_name, separator, name = place.rpartition(":")
    if not separator:
        facts = names_in(Path(place)) if Path(place).exists() else ["there is no such file or folder"]
        raise ModelError(f"'{place}' names no model", facts=facts, hint=PLACES)
    module = _reporting(module_name, lambda: _module(module_name))
    if not hasattr(module, name):
        suggestions = closest(name, [n for n in vars(module) if not n.startswith("_")], 1)
        raise ModelError(
            f"'{module_name}' has no '{name}'",
            facts=names_in(Path(module_name)),
            hint=f"did you mean '{suggestions[0]}'?" if suggestions else None,
        )
    return getattr(module, name)


def names_in(path: Path) -> list[str]:
    """Return a fact about the names that a file defines, read without running it."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    names: list[str] = []
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.append(statement.name)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    public = [name for name in dict.fromkeys(names) if not name.startswith("_")]
    return [f"its names: {', '.join(public)}"] if public else []


def _reporting(name: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; turn its exceptions into an error that names the line."""
    try:
        return run()
    except MithrilError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        location = [f"at {frames[-1].filename}:{frames[-1].lineno}"] if len(frames) > 2 else []
        hint = PLACES if isinstance(error, ImportError) else None
        raise ModelError(
            f"'{name}' cannot be loaded: {type(error).__name__}: {error}", facts=location, hint=hint
        ) from error


def _module(name: str) -> Any:
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, "")
        return importlib.import_module(name)
    if not path.is_file():
        raise ModelError(f"there is no file '{path}'")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _pairs(words: tuple[str, ...], label: str) -> dict[str, str]:
    out = {}
    for text in words:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise InputError(f"--{label} {text}: expected NAME=VALUE", hint=f"--{label} input=2,3")
        out[name] = value
    return out


def _shapes(words: tuple[str, ...]) -> dict[str, list[Any]]:
    pairs = _pairs(words, "shape").items()
    return {
        name: [_size(part, f"{name}={sizes}") for part in sizes.split(",")] if sizes else [] for name, sizes in pairs
    }


def _size(text: str, shape: str) -> Any:
    word = text.strip()
    if word == "None" or word.isidentifier():
        return None if word == "None" else word
    if not word.isdecimal():
        raise InputError(
            f"--shape {shape}: '{text}' is not a size",
            facts=["expected: numbers, and words for sizes that stay open"],
            hint="--shape input=2,3 or --shape input=batch,3",
        )
    return int(word)


def _keywords(words: tuple[str, ...], label: str) -> dict[str, Any]:
    """Return arguments of NAME=VALUE; values are literals of Python, and text otherwise."""
    out: dict[str, Any] = {}
    for name, text in _pairs(words, label).items():
        try:
            out[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            out[name] = text
    return out


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands with a model accept."""
    for option in (
        click.argument("model"),
        click.option("--option", "more", multiple=True, metavar="NAME=VALUE", help="Any other keyword of ml.compile."),
        click.option(
            "--shape", "shapes", multiple=True, metavar="NAME=2,3", help="Shape of an input; a name means any size."
        ),
        click.option("--type", "types", multiple=True, metavar="NAME=int32", help="Dtype of an input."),
        click.option(
            "--level", type=click.Choice(["none", "low", "medium", "high"]), default="medium", show_default=True
        ),
    ):
        command = option(command)
    return command


def program_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that can compile for training."""
    flag = click.option("--inference", is_flag=True, help="Compile without gradients and dropout.")
    return flag(model_options(command))


def compile_options(
    shapes: tuple[str, ...], types: tuple[str, ...], level: str, more: tuple[str, ...], inference: bool = True
) -> Any:
    return {
        "shapes": _shapes(shapes),
        "types": _pairs(types, "type"),
        "optimization_level": level,
        "inference": inference,
        **_keywords(more, "option"),
    }


@click.command("compile")
@program_options
@click.option("--backend", default="numpy", show_default=True, help="Backend to compile for.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Write the generated source to this file instead of printing it."
)
@click.option("--summary", is_flag=True, help="Print the table of layers instead of the source.")
def compile_command(model: str, backend: str, out: str | None, summary: bool, **options: Any) -> None:
    """Compile MODEL and print the generated program."""
    import mithril as ml

    settings = compile_options(**options)
    if out:
        settings["file_path"] = out
    compiled = ml.compile(load_model(model), backend, **settings)
    if not compiled.programs:
        raise InputError(f"the interface is {compiled.interface!r}", hint="give all shapes: --shape NAME=2,3")
    if summary:
        click.echo(compiled.summary())
    elif out:
        click.echo(f"written: {out}")
    else:
        click.echo(compiled.source if compiled.source is not None else str(compiled.graph))


@click.command("export")
@model_options
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--backend", help="Backend that writes the program; by default the first one of the format.")
@click.option("--format", "form", metavar="NAME", help="File format; by default that of the suffix, C for a folder.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An argument of the format.")
@click.option(
    "--params", type=click.Path(exists=True, dir_okay=False), help="File of parameters, as compiled.save writes."
)
@click.option("--seed", type=int, help="Export random parameters, for tests of speed.")
def export_command(
    target: Path,
    backend: str | None,
    form: str | None,
    settings: tuple[str, ...],
    params: str | None,
    seed: int | None,
    **options: Any,
) -> None:
    """Write MODEL with its parameters as TARGET: a folder of C, an ONNX or GGUF file, a page for browsers."""
    import mithril as ml
    from mithril import plugins
    from mithril.backend import format_bytes

    form = form or ("c" if not target.suffix else None)
    backend = backend or next(iter(plugins.format_of(str(target), form).spec.backends), "numpy")
    compiled = ml.compile(load_model(options.pop("model")), backend, **compile_options(**options))
    if params is not None:
        compiled.load(params)
    elif seed is not None:
        compiled.bind(compiled.randomize_params(seed=seed))
    elif compiled.interface.with_role("param") and not compiled.bind_pretrained():
        raise InputError("the model has no values of its parameters", hint="--params FILE, or --seed 0 for random ones")
    compiled.export(target, format=form, **_keywords(settings, "set"))
    files = [file for file in ([target] if target.is_file() else target.rglob("*")) if file.is_file()]
    size = format_bytes(sum(file.stat().st_size for file in files))
    click.echo(f"{target}: {len(files)} file{'s'[: len(files) > 1]}, {size}")


@click.command("explain")
@program_options
@click.option("--backend", default="numpy", show_default=True, help="Backend to compile for.")
@click.option("--rule", "rule_name", help="Rule or pass to explain.")
def explain_command(model: str, backend: str, rule_name: str | None, **options: Any) -> None:
    """Show the decisions of compiling MODEL, the effect of each pass, and why a fusion did not fire."""
    import mithril as ml

    compiled = ml.compile(load_model(model), backend, **compile_options(**options))
    if rule_name is None:
        click.echo(compiled.explain())
        return
    graph = compiled.programs[0].traced if compiled.programs else compiled.interface
    explained: dict[str, list[str]] = {}  # several rules may have the same name
    for one in _rules(compiled, rule_name):
        explained.setdefault(one.name, []).extend(f"  {line}" for line in one.explain(graph))
    for name, lines in explained.items():
        click.echo("\n".join([f"{name}: " + ("" if lines else "nowhere to begin"), *dict.fromkeys(lines)]))


def _rules(compiled: Any, name: str) -> list[Any]:
    """Return the rules with this name, or those of the pass with this name."""
    sets = [p.rules for p in compiled.pipeline.passes if p.rules is not None]
    matches = [r for s in sets for r in s.rules if name in (r.name, s.name)]
    if not matches:
        names = sorted({n for s in sets for n in (s.name, *(r.name for r in s.rules))})
        suggestions = closest(name, names, 3)
        raise InputError(
            f"no pass or rule is named '{name}'", facts=[f"closest: {', '.join(suggestions or names[:8])}"]
        )
    return matches


@click.command("diff")
@program_options
@click.option("--backends", default="", help="Backends to compare, the reference first: numpy,jax. All by default.")
@click.option("--across", type=click.Choice(["backends", "passes"]), default="backends", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Seed of the parameters and the inputs.")
@click.option(
    "--reproducer",
    type=click.Path(file_okay=False),
    help="Directory for a reproducer of the first operation that differs.",
)
@click.option("--source", help="The source of an imported MODEL, to compare with: a file, or file.py:name.")
def diff_command(
    model: str, backends: str, across: Any, seed: int, reproducer: str | None, source: str | None, **options: Any
) -> None:
    """Run MODEL on several backends, after each pass, or next to its source, and report the first op that differs."""
    import mithril as ml
    from mithril import plugins

    settings = compile_options(**options)
    instance = load_model(model)
    listed = [name for name in backends.split(",") if name]
    if source is not None:
        original = source if Path(source).exists() else load_member(source)
        inputs = random_inputs(instance, settings, seed)
        selected: list[str | None] = [*listed] or [None]
        reports = [ml.verify(instance, original, inputs, backend=name) for name in selected]
        click.echo("\n".join(str(report) for report in reports))
        if not all(reports):
            raise SystemExit(1)
        return
    names = listed or sorted(plugins.backends(), key=lambda n: (n != "numpy", n))
    if across == "passes":
        names = names[:1]
    report = ml.diff(
        instance,
        names,
        random_inputs(instance, settings, seed),
        seed=seed,
        across=across,
        reproducer=reproducer,
        **settings,
    )
    click.echo(str(report))
    if not report:
        raise SystemExit(1)


def random_inputs(model: Any, overrides: dict[str, Any], seed: int) -> dict[str, Any]:
    """Draw random arrays for the inputs, of the given or declared shapes; unknown sizes become small ones."""
    import numpy as np

    from mithril.compiler import TRAINING_FLAG, input_specs, probe_types, resolve_options, source_of
    from mithril.graph import float32, substitute, symbols

    source = source_of(model, outputs=None, inference=overrides["inference"])
    try:
        types = probe_types(input_specs(source, resolve_options(overrides)), source, float32)
    except ShapeError as error:
        raise InputError(error.what, facts=error.facts, hint="--shape NAME=2,3 for each input") from None
    rng = np.random.default_rng(seed)
    unknown = symbols(*(n for t in types.values() for n in t.shape))
    sizes = {s.name: min(max(s.low, 2 + k), s.high if s.high is not None else 2 + k) for k, s in enumerate(unknown)}
    out: dict[str, Any] = {}
    for name, t in types.items():
        if name == TRAINING_FLAG:
            continue
        shape = [int(substitute(n, sizes)) for n in t.shape]
        if t.dtype.is_float:
            out[name] = rng.standard_normal(shape).astype(t.dtype.numpy)
        elif t.dtype.is_bool:
            out[name] = rng.random(shape) < 0.5
        else:
            out[name] = rng.integers(0, 4, shape).astype(t.dtype.numpy)
    return out
