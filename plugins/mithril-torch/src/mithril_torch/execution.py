"""How a generated function runs: as it is, compiled, or captured; under settings that are restored after each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mithril.backend import BuildOptions, Forward
from mithril.base import BackendError, OptionError, Store, files, unknown
from mithril.ir import Graph, Node, iterate
from mithril.ops import if_op, while_op
from mithril_torch.autograd import Differentiated

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")  # by script_optimization


@dataclass(frozen=True)
class Running:
    """What ``ml.compile`` and the backend were told, in one form."""

    jit: bool
    compiler: Mapping[str, Any]  # arguments of torch.compile
    capture: bool
    cudnn: bool | None
    benchmark: bool | None
    threads: int | None
    device: torch.device
    folder: Path | None = None  # where torch.compile keeps what it made; None is its own choice


def read(
    options: BuildOptions, device: torch.device, *, cudnn_benchmark: bool | None, enable_amp: bool | None
) -> Running:
    """The options that concern running, checked against each other."""
    settings = options.settings
    given = dict(settings.get("torch_options", {}))
    if enable_amp is False and settings.get("mixed_precision"):
        raise OptionError(
            "mixed_precision, or torch_options' enable_amp, contradicts what the backend says: enable_amp=False",
            hint="give it in one place",
        )
    dynamo, capture = settings.get("torch_dynamo", False), settings.get("torch_fx", False)
    capture = bool(capture or given.get("graph_mode"))
    jit = options.jit
    if dynamo and jit is False:
        raise OptionError("torch_dynamo=True contradicts jit=False", hint="leave one of them out")
    jit = bool(jit if jit is not None else dynamo)
    compiler = _compiler(options, jit, given.get("script_optimization"))
    return Running(
        jit,
        compiler,
        capture,
        given.get("enable_cudnn"),
        _agreed("benchmark", given.get("benchmark_mode"), cudnn_benchmark),
        options.num_threads,
        device,
        _inductor_folder(settings) if jit and settings.get("cache") else None,
    )


def _inductor_folder(settings: Mapping[str, Any]) -> Path:
    """The part of the cache that PyTorch's compiler keeps itself: code, which only this user may write."""
    store = Store(settings["cache_dir"])
    store.secure()
    folder = store.folder / "inductor"
    files.private_folder(folder)
    return folder


def _agreed(what: str, here: bool | None, there: bool | None) -> bool | None:
    if here is not None and there is not None and here != there:
        raise OptionError(f"{what}: torch_options say {here}, the backend says {there}", hint="give it in one place")
    return here if here is not None else there


def _compiler(options: BuildOptions, jit: bool, level: int | None) -> dict[str, Any]:
    given = dict(options.jit_options)
    if level is not None and not (isinstance(level, int) and 0 <= level < len(MODES)):
        raise OptionError(f"torch_options: script_optimization={level!r}, expected 0 to {len(MODES) - 1}")
    if (given or level) and not jit:
        options.decisions.record(
            "ignored",
            "jit_options and script_optimization are of torch.compile, which jit=True or torch_dynamo=True asks for",
        )
        return {}
    if given.get("mode") is not None and level is not None:
        raise OptionError("jit_options' mode and torch_options' script_optimization say the same", hint="give one")
    if level is not None:
        given["mode"] = MODES[level]
        options.decisions.record("choice", f"script_optimization={level} is torch.compile's mode '{MODES[level]}'")
    if given.get("mode") is not None and given.get("options") is not None:
        raise OptionError("jit_options: torch.compile takes mode or options, not both")
    known = ("backend", "dynamic", "fullgraph", "mode", "options")
    for name in given:
        if name not in known:
            what, facts, hint = unknown("key of jit_options for torch", name, known)
            raise OptionError(what, facts=facts, hint=hint)
    backend = given.get("backend")
    if isinstance(backend, str):
        possible = torch.compiler.list_backends(exclude_tags=())
        if backend not in possible:
            what, facts, hint = unknown("backend of torch.compile", backend, possible)
            raise OptionError(what, facts=facts, hint=hint)
    return given


def runner(
    forward: Forward, graph: Graph, running: Running, options: BuildOptions, on_host: Callable[[Node], bool]
) -> Forward:
    """The function that is called; ``on_host`` selects the nodes that run as NumPy references."""
    run: Any = forward
    compiles = running.jit or running.capture
    branching = _branching(graph) if compiles else None
    called = next((node for node, _ in iterate(graph) if on_host(node)), None) if compiles else None
    if called is not None:
        options.decisions.record(
            "fallback", f"'{called.op.name}' runs on the host: the program runs uncompiled", called.origin
        )
    elif branching is not None:
        options.decisions.record(
            "fallback",
            f"'{branching.op.name}' depends on values known only at run time: it runs as Python",
            branching.origin,
        )
    elif running.jit and not running.capture:
        run = _jitted(forward, dynamic=any(not i.type.is_static for i in graph.inputs), given=running.compiler)
    elif running.capture:
        run = Captured(forward, running.compiler if running.jit else None)
    setting = _settings(running)

    def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            return run(params, inputs)  # type: ignore[no-any-return]

    def call_with_settings(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad(), setting():  # type: ignore[misc]
            return run(params, inputs)  # type: ignore[no-any-return]

    return call if setting is None else call_with_settings


def _branching(graph: Graph) -> Node | None:
    """Looked for only where it matters: a program from the cache is text until somebody looks at it."""
    return next((node for node, _ in iterate(graph) if node.op in (if_op, while_op)), None)


def _jitted(forward: Forward, *, dynamic: bool, given: Mapping[str, Any]) -> Forward:
    """The function compiled; of one that PyTorch differentiates, what it differentiates."""
    if isinstance(forward, Differentiated):
        return Differentiated(_jitted(forward.forward, dynamic=dynamic, given=given), forward.of, forward.wrt)
    try:
        return Compiled(torch.compile(forward, **{"fullgraph": True, "dynamic": dynamic, **given}))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            "torch.compile refuses the options given for it", facts=[str(error).splitlines()[0], f"given: {given}"]
        ) from None


class Compiled:
    """A function of ``torch.compile``, which compiles at the first call of its kind."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.run(params, inputs)  # type: ignore[no-any-return]
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise BackendError(
                "torch.compile cannot compile this program",
                facts=str(error).strip().splitlines()[:4],
                hint="jit=False runs the generated code as it is; compiling for a CPU needs a C++ compiler",
            ) from error


def _settings(running: Running) -> Callable[[], Any] | None:
    """A context that sets what was asked for and restores it; None where there is nothing to set."""
    cuda = running.device.type == "cuda"
    if running.device.type == "cpu" and running.threads is None and running.folder is None:
        return None

    @contextmanager
    def setting() -> Iterator[None]:
        with ExitStack() as stack:
            if running.device.type != "cpu":
                stack.enter_context(running.device)
            if cuda and (running.cudnn is not None or running.benchmark is not None):
                enabled = True if running.cudnn is None else running.cudnn
                stack.enter_context(torch.backends.cudnn.flags(enabled=enabled, benchmark=bool(running.benchmark)))
            if running.folder is not None:
                stack.enter_context(_kept_in(running.folder))
            if running.threads is not None:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(running.threads)
            yield

    return setting


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """The folder in which torch.compile looks for what it made in earlier processes."""
    before = os.environ.get(INDUCTOR)
    os.environ[INDUCTOR] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[INDUCTOR]
        else:
            os.environ[INDUCTOR] = before


class Captured:
    """The program as a ``torch.fx.GraphModule``, captured at the first call of each set of shapes.

    With ``compiler``, the arguments of ``torch.compile``, each module is compiled.
    """

    def __init__(self, forward: Forward, compiler: Mapping[str, Any] | None = None) -> None:
        self.forward, self.compiler = forward, compiler
        self.modules: dict[Any, Any] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        params, inputs = dict(params), dict(inputs)
        key = tuple((n, x.shape, x.dtype) for given in (params, inputs) for n, x in given.items())
        if key not in self.modules:
            module = make_fx(self.forward)(params, inputs)
            given = self.compiler
            self.modules[key] = module if given is None else _jitted(module, dynamic=False, given=given)
        return self.modules[key](params, inputs)  # type: ignore[no-any-return]
