"""Kinds of bad plugins: their mistake and their outcome, with code and requirements.

``test_plugin_clashes.py`` installs each of them; ``docs/render.py`` writes the table of ``docs/writing-plugins.md``.
"""

from __future__ import annotations

from typing import NamedTuple

OUTCOMES = {
    "absent": "a decision: not in use",
    "partial": "a decision: partly in use",
    "ignored": "a decision: ignored",
    "error": "an error",
    "observer": "a decision: an observer failed",
    "warning": "a warning",
    "doubtful": "a decision: doubtful",
}


class Bad(NamedTuple):
    """A kind of bad plugin, with one of ``OUTCOMES`` and a pattern of its message."""

    what: str
    outcome: str
    message: str
    code: str
    requires: tuple[str, ...] = ()
    level: str = "none"  # the optimization level of the compilation
    entry: str = "bad-kit"  # the name of the entry point
    version: str = "1.0"


IMPORT = """
from dataclasses import replace
from mithril import FrontendSpec, HardwareTarget, Lowering, Option, OpsSpec, PassSpec, hookimpl
from mithril.ops import cast, exp

"""


def hook(name: str, body: str, parameters: str = "") -> str:
    return f"{IMPORT}def mithril_{name}({parameters}): {body}\n"


def returned(*specs: str) -> str:
    """Return a plugin whose ``mithril_passes`` returns these descriptors."""
    return hook("passes", f"return [{', '.join(specs)}]")


def running(body: str, more: str = "") -> str:
    """Return a plugin with a pass of this body."""
    return (
        returned(f"PassSpec('bad', 'bad_kit_bad_kit_plugin:run', 'fuse', 'low'{more})")
        + f"def run(graph):\n    {body}\n"
    )


REPLACING = """editor = graph.edit()
    node = list(editor.nodes())[-1]
    with editor.before(node):
        y = {}
    editor.replace_value(node.result, y)
    editor.erase_dead(node)
    return editor.freeze()
"""
SAME = returned()


def observing(stage: str) -> str:
    """Return a plugin with an observer whose method ``stage`` has this body."""
    methods = f"    def stage(self, name, graph, start, seconds): {stage}\n"
    methods += "".join(f"    def {name}(self, *arguments): pass\n" for name in ("passed", "end"))
    return hook("observers", "return [Observer()]", "context") + "class Observer:\n" + methods


OBSERVER = "'mithril_{}' of plugin 'bad-kit' .* failed"

BAD = (
    Bad(
        "has a version that is not one of PEP 440",
        "doubtful",
        "the version 'newest!' of bad-kit is not valid: expected: a version of PEP 440, such as 1.0",
        SAME,
        version="newest!",
    ),
    Bad("raises at import", "absent", "cannot import .*RuntimeError: boom", "raise RuntimeError('boom')"),
    Bad("ends the process at import", "absent", "SystemExit: 0", "raise SystemExit(0)"),
    Bad("is not valid Python", "absent", "SyntaxError", "def ("),
    Bad(
        "needs a module that is not installed",
        "absent",
        'pip install "absent-module"',
        "import absent_module",
        ("absent-module",),
    ),
    Bad(
        "imports a name that mithril lacks",
        "absent",
        "ImportError: cannot import name",
        "from mithril import NoSuchName",
    ),
    Bad("requires an older core", "absent", "required: mithril-core<0.1", SAME, ("mithril-core<0.1",)),
    Bad("requires a newer core", "absent", "required: mithril-core>=99", SAME, ("mithril-core>=99",)),
    Bad("has a requirement that is none", "absent", "has an invalid requirement", SAME, ("mithril-core>>1",)),
    Bad("requires a newer plugin API", "absent", "requires the plugin API 99", "api_version = 99\n" + SAME),
    Bad("has text as `api_version`", "absent", "requires the plugin API 'one'", "api_version = 'one'\n" + SAME),
    Bad("misspells a hook", "absent", "which is not a hook", "def mithril_pases(): pass"),
    Bad("gives a hook another parameter", "absent", "invalid parameters", hook("passes", "return []", "x")),
    Bad(
        "wraps a hook that returns a list",
        "absent",
        "cannot be wrapped",
        IMPORT + "@hookimpl(wrapper=True)\ndef mithril_passes(): return (yield)\n",
    ),
    *(
        Bad(
            f"raises in `mithril_{name}`",
            "partial",
            f"'mithril_{name}'.* failed: ZeroDivisionError",
            hook(name, "1 / 0"),
        )
        for name in ("backends", "passes", "targets", "options", "ops", "frontends")
    ),
    Bad(
        "raises in `mithril_lowerings`",
        "partial",
        "for the backend 'reference'.*ZeroDivisionError",
        hook("lowerings", "1 / 0", "backend"),
    ),
    *(
        Bad(f"raises in `mithril_{name}`", "observer", OBSERVER.format(name), hook(name, "1 / 0", parameters))
        for name, parameters in (
            ("advise", "options"),
            ("observers", "context"),
            ("compile_begin", "context"),
            ("compile_stage", "context, stage, graph"),
            ("compile_end", "context, result, error"),
        )
    ),
    Bad(
        "returns an observer that raises",
        "observer",
        "'mithril_observers: Observer.stage' of plugin 'bad-kit' .* failed",
        observing("1 / 0"),
    ),
    Bad(
        "returns an observer that changes an attribute of a node",
        "error",
        "'mithril_observers: Observer.stage' of plugin 'bad-kit' .*changed a node of the graph that it observes",
        observing("graph is None or graph.nodes[0].attributes.update(axis=0)"),
    ),
    Bad(
        "changes the operands of a node in `mithril_compile_stage`",
        "error",
        "'mithril_compile_stage' of plugin 'bad-kit' .*changed a node of the graph that it observes",
        hook(
            "compile_stage",
            "graph is None or setattr(graph.nodes[-1], 'operands', ())",
            "context, stage, graph",
        ),
    ),
    Bad(
        "drops the results of the graph in `mithril_compile_stage`",
        "error",
        "'mithril_compile_stage' of plugin 'bad-kit' .*changed the graph that it observes",
        hook(
            "compile_stage",
            "graph is None or object.__setattr__(graph, 'results', ())",
            "context, stage, graph",
        ),
    ),
    Bad(
        "takes the name of the core's plugin",
        "absent",
        "two distributions provide a plugin named 'core'",
        SAME,
        entry="core",
    ),
    Bad(
        "raises in `mithril_amend_pipeline`",
        "error",
        "ZeroDivisionError",
        hook("amend_pipeline", "1 / 0", "draft, target, level"),
        level="low",
    ),
    Bad("raises in `mithril_build`", "error", "ZeroDivisionError", hook("build", "1 / 0", "graph, backend, target")),
    Bad(
        "raises in `mithril_run_pass`",
        "error",
        "ZeroDivisionError",
        IMPORT + "@hookimpl\ndef mithril_run_pass(pass_): 1 / 0\n",
        level="low",
    ),
    Bad("returns a number for a list", "partial", "TypeError: 'int' object is not iterable", hook("ops", "return 3")),
    Bad("returns other objects than descriptors", "partial", "TypeError: expected PassSpec, got int", returned("1")),
    Bad(
        "returns None among descriptors",
        "partial",
        "expected HardwareTarget, got NoneType",
        hook("targets", "return [None]"),
    ),
    Bad(
        "sets an unknown field of a descriptor",
        "warning",
        "ignores the unknown field 'color'",
        running("return graph", ", color='red'"),
    ),
    Bad("names a pass by a number", "partial", "name=3 must be a word", returned("PassSpec(3, 'a:b', 'fuse', 'low')")),
    Bad(
        "names an unknown stage",
        "partial",
        "stage='fusee' is none of",
        returned("PassSpec('p', 'a:b', 'fusee', 'low')"),
    ),
    Bad(
        "names an unknown level",
        "partial",
        "level='lowest' is none of",
        returned("PassSpec('p', 'a:b', 'fuse', 'lowest')"),
    ),
    Bad(
        "orders its pass by an unknown one",
        "ignored",
        "no installed pass has that name",
        running("return graph", ", before=('nothing',)"),
        level="low",
    ),
    Bad(
        "takes the name of a standard pass",
        "ignored",
        "operation-fusion.*not used",
        returned("PassSpec('operation-fusion', 'a:b', 'fuse', 'low')"),
        level="low",
    ),
    Bad(
        "takes the name of an option of the core",
        "ignored",
        "the name belongs to mithril-core",
        hook("options", "return [Option('shapes', int, 1, 'x')]"),
    ),
    Bad(
        "declares an option whose default has another type",
        "partial",
        "the default of the option 'tile' of bad-kit 1.0 has another type: expected int, got '16'",
        hook("options", "return [Option('tile', int, '16', 'x')]"),
    ),
    Bad(
        "declares an option whose type is none",
        "partial",
        r"the type of the option 'tile' of bad-kit 1.0 is none: \[1, 2\]",
        hook("options", "return [Option('tile', [1, 2], 1, 'x')]"),
    ),
    Bad(
        "implements no hook",
        "absent",
        "implements no hook of mithril",
        "def passes(): return []\n",
    ),
    Bad(
        "lowers an unknown operation",
        "partial",
        "lowers an unknown operation 'sofmax'",
        hook("lowerings", "return [Lowering('sofmax', 'a:b')]", "backend"),
    ),
    Bad(
        "gives source text in place of a name",
        "partial",
        "is not of the form",
        hook("lowerings", "return [Lowering('softmax', 'np.ones_like({x})')]", "backend"),
    ),
    Bad(
        "has a pass in a module that does not exist",
        "error",
        "No module named 'absent_module'",
        returned("PassSpec('p', 'absent_module:run', 'fuse', 'low')"),
        level="low",
    ),
    Bad(
        "has a pass that is none",
        "error",
        "pass 'bad' of bad-kit 1.0 is 3, not a pass",
        returned("PassSpec('bad', 'bad_kit_bad_kit_plugin:run', 'fuse', 'low')") + "run = 3\n",
        level="low",
    ),
    Bad(
        "has a pass without parameters",
        "error",
        r"pass 'bad' failed: TypeError: run\(\) takes 0 positional arguments",
        returned("PassSpec('bad', 'bad_kit_bad_kit_plugin:run', 'fuse', 'low')") + "def run(): pass\n",
        level="low",
    ),
    Bad("has a pass that raises", "error", "pass 'bad' failed: ZeroDivisionError", running("1 / 0"), level="low"),
    Bad(
        "has a pass that returns a number", "error", "returned int, expected a graph", running("return 3"), level="low"
    ),
    Bad(
        "has a pass that returns nothing", "error", "returned NoneType, expected a graph", running("pass"), level="low"
    ),
    Bad(
        "has a pass that drops an output",
        "error",
        "changed the graph's inputs or outputs",
        running("return graph.replaced(results=())"),
        level="low",
    ),
    Bad(
        "has a pass that drops nodes which are read",
        "error",
        "returned an invalid graph",
        running("return graph.replaced(nodes=())"),
        level="low",
    ),
    Bad(
        "has a pass that changes a dtype",
        "error",
        "the types differ",
        running(REPLACING.format("cast(node.operands[0], dtype='int32')")),
        level="low",
    ),
    Bad(
        'has a pass that changes values (`verify="numeric"`)',
        "error",
        "bad",
        running(REPLACING.format("exp(node.operands[0])")),
        level="low",
    ),
)
