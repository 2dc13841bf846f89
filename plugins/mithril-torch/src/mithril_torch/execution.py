"""Execution of a generated function: eager, compiled or captured, with settings restored after each call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mithril.backend import BuildOptions, Forward, LazyGraph
from mithril.derivatives import require_framework_gradients
from mithril.graph import BackendError, GradientError, Graph, Node, OptionError, iterate, unknown
from mithril.ops import if_op, while_op
from mithril.system import Store, files
from mithril_torch.autograd import Differentiated
from mithril_torch.torchscript import LEVELS, Scripted

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")  # indexed by script_optimization


@dataclass(frozen=True)
class RunOptions:
    """The run options of ``ml.compile`` and of the backend, merged."""

    jit: bool
    compiler: Mapping[str, Any]  # arguments of torch.compile
    capture: bool
    script: int | None  # level of TorchScript; None: not scripted
    cudnn: bool | None
    benchmark: bool | None
    threads: int | None
    device: torch.device
    folder: Path | None = None  # cache directory of torch.compile; None for its default


def read(
    options: BuildOptions, device: torch.device, *, cudnn_benchmark: bool | None, enable_amp: bool | None
) -> RunOptions:
    """Return the run options; raise OptionError if two of them conflict."""
    settings = options.settings
    torch_options = settings["torch_options"]
    if enable_amp is False and settings["mixed_precision"]:
        raise OptionError(
            "mixed_precision (or enable_amp in torch_options) conflicts with the backend's enable_amp=False",
            hint="set it in one place",
        )
    dynamo, capture = settings["torch_dynamo"], settings["torch_fx"]
    scripted, jit = bool(torch_options.get("graph_mode")), options.jit
    for other, is_set in {"torch_fx=True": capture, "torch_dynamo=True": dynamo, "jit=True": jit}.items():
        if scripted and is_set:
            raise OptionError(
                f"graph_mode in torch_options conflicts with {other}",
                facts=["graph_mode runs the program as TorchScript"],
                hint=f"omit graph_mode: {other} is PyTorch's newer way",
            )
    if dynamo and jit is False:
        raise OptionError("torch_dynamo=True conflicts with jit=False", hint="omit one of them")
    jit = bool(jit if jit is not None else dynamo)
    level = torch_options.get("script_optimization")
    if level is not None and not (isinstance(level, int) and 0 <= level < len(MODES)):
        raise OptionError(f"torch_options: script_optimization={level!r}, expected 0 to {len(MODES) - 1}")
    compiler = _compiler(options, jit, None if scripted else level)
    return RunOptions(
        jit,
        compiler,
        bool(capture),
        (level if level is not None else 1) if scripted else None,
        torch_options.get("enable_cudnn"),
        _merge("benchmark", torch_options.get("benchmark_mode"), cudnn_benchmark),
        options.num_threads,
        device,
        _inductor_folder(settings) if jit and settings["cache"] else None,
    )


def _inductor_folder(settings: Mapping[str, Any]) -> Path:
    """Return the cache directory of PyTorch's compiler, writable by this user only because it contains code."""
    store = Store(settings["cache_dir"])
    store.secure()
    folder = store.folder / "inductor"
    files.private_folder(folder)
    return folder


def _merge(name: str, option: bool | None, backend_value: bool | None) -> bool | None:
    if option is not None and backend_value is not None and option != backend_value:
        raise OptionError(
            f"{name}={option} in torch_options conflicts with {backend_value} of the backend",
            hint="set it in one place",
        )
    return option if option is not None else backend_value


def _compiler(options: BuildOptions, jit: bool, level: int | None) -> dict[str, Any]:
    jit_options = dict(options.jit_options)
    if (jit_options or level) and not jit:
        options.decisions.record(
            "ignored",
            "jit_options and script_optimization configure torch.compile, which requires jit=True or torch_dynamo=True",
        )
        return {}
    if jit_options.get("mode") is not None and level is not None:
        raise OptionError(
            "mode in jit_options and script_optimization in torch_options set the same thing", hint="omit one of them"
        )
    if level is not None:
        jit_options["mode"] = MODES[level]
        options.decisions.record("choice", f"script_optimization={level} selects torch.compile's mode '{MODES[level]}'")
    if jit_options.get("mode") is not None and jit_options.get("options") is not None:
        raise OptionError("jit_options: torch.compile accepts mode or options, not both")
    accepted = ("backend", "dynamic", "fullgraph", "mode", "options")
    for name in jit_options:
        if name not in accepted:
            message, facts, hint = unknown("key of jit_options for torch", name, accepted)
            raise OptionError(message, facts=facts, hint=hint)
    backend = jit_options.get("backend")
    if isinstance(backend, str):
        possible = torch.compiler.list_backends(exclude_tags=())
        if backend not in possible:
            message, facts, hint = unknown("backend of torch.compile", backend, possible)
            raise OptionError(message, facts=facts, hint=hint)
    return jit_options


def runner(
    forward: Forward, graph: Graph, running: RunOptions, options: BuildOptions, on_host: Callable[[Node], bool]
) -> Forward:
    """Return the function to call; ``on_host`` selects the nodes that run as NumPy references."""
    run: Any = forward
    compiles = running.jit or running.capture or running.script is not None
    branching = _branching(graph) if compiles else None
    called = next((node for node, _ in iterate(graph) if on_host(node)), None) if compiles else None
    # torch.compile and make_fx trace tensors without values, from which NumPy cannot compute.
    if called is not None:
        options.decisions.record(
            "fallback", f"'{called.op.name}' runs on the host: the program runs uncompiled", called.origin
        )
    elif branching is not None:
        options.decisions.record(
            "fallback",
            f"'{branching.op.name}' depends on run-time values: it runs as Python",
            branching.origin,
        )
    elif running.script is not None:
        run = _scripted(forward, graph, running.script, options)
    elif running.jit and not running.capture:
        run = _jitted(forward, dynamic=any(not i.type.is_static for i in graph.inputs), jit_options=running.compiler)
    elif running.capture:
        run = Captured(forward, running.compiler if running.jit else None)
    setting = _settings(running)
    records = _autograd_check(graph, on_host)

    def mode(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """Return whether autograd records the call: it does if one of the arguments requires a gradient."""
        arguments = (*params.values(), *inputs.values())
        # Off where autograd does not record: only then may helpers call kernels without a gradient,
        # such as those of oneDNN.
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in arguments)
        return torch.set_grad_enabled(recorded and not isinstance(forward, Differentiated) and records())

    def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with mode(params, inputs):
            return run(params, inputs)  # type: ignore[no-any-return]

    def call_with_settings(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with mode(params, inputs), setting():  # type: ignore[misc]
            return run(params, inputs)  # type: ignore[no-any-return]

    return call if setting is None else call_with_settings


def _autograd_check(graph: Graph, on_host: Callable[[Node], bool]) -> Callable[[], bool]:
    """Return the check of a call that autograd would record: ``is_differentiable``, without keeping the graph alive.

    A graph holds embedded weights. One read from the cache holds none, and is parsed only if the check is needed.
    """
    if isinstance(graph, LazyGraph):
        return functools.cache(lambda: is_differentiable(graph.get(), on_host))
    failure: GradientError | None = None
    differentiable = False
    try:
        differentiable = is_differentiable(graph, on_host)
    except GradientError as error:
        failure = error.with_traceback(None)  # its frames refer to the graph

    def check() -> bool:
        if failure is not None:
            raise failure.with_traceback(None)
        return differentiable

    return check


def is_differentiable(graph: Graph, on_host: Callable[[Node], bool]) -> bool:
    """Whether autograd may record the program: not if it computes gradients itself.

    Raise GradientError if autograd would silently return other gradients or zeros.
    """
    if graph.with_role("cotangent"):
        return False
    hint = "pass output_gradients= to evaluate, or call it under torch.no_grad()"
    called = next((node for node, _ in iterate(graph) if on_host(node)), None)
    if called is not None:
        raise GradientError(
            f"autograd cannot differentiate '{called.op.name}', which runs as its NumPy reference",
            facts=[str(called.origin)],
            hint=hint,
        )
    require_framework_gradients(graph, "autograd", hint)
    return True


def _branching(graph: Graph) -> Node | None:
    """Return the first ``if`` or ``while`` node; called only when needed, since it parses a cached graph."""
    return next((node for node, _ in iterate(graph) if node.op in (if_op, while_op)), None)


def _jitted(forward: Forward, *, dynamic: bool, jit_options: Mapping[str, Any]) -> Forward:
    """Compile ``forward``; for one that autograd differentiates, compile the function inside."""
    if isinstance(forward, Differentiated):
        return Differentiated(
            _jitted(forward.forward, dynamic=dynamic, jit_options=jit_options), forward.of, forward.wrt
        )
    try:
        # fullgraph: a break in the graph would run the rest eagerly without a word; the program has no
        # reason for one.
        return Compiled(torch.compile(forward, **{"fullgraph": True, "dynamic": dynamic, **jit_options}))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            "torch.compile rejected jit_options", facts=[str(error).splitlines()[0], f"jit_options={jit_options}"]
        ) from None


def _scripted(forward: Forward, graph: Graph, level: int, options: BuildOptions) -> Forward:
    """Run ``forward`` as TorchScript, unless it computes gradients."""
    if isinstance(forward, Differentiated) or graph.with_role("cotangent"):
        # Kernels of gradients take lists of bool, for which torch.jit.trace raises RuntimeError (torch 2.13).
        options.decisions.record("fallback", "graph_mode: TorchScript traces no gradients; this program runs as Python")
        return forward
    if level > 1 and not options.inference:
        options.decisions.record("ignored", "script_optimization: levels 2 and 3 are for programs with inference=True")
        level = 1
    options.decisions.record("choice", f"graph_mode: TorchScript, {LEVELS[level]}; deprecated by PyTorch for jit=True")
    return Scripted(forward, level)


class Compiled:
    """A ``torch.compile`` function, compiled lazily once per input signature."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.run(params, inputs)  # type: ignore[no-any-return]
        except Exception as error:
            # Errors of the program itself, such as indices out of range, come through the same call and
            # are not its compiler's.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise BackendError(
                "torch.compile cannot compile this program",
                facts=str(error).strip().splitlines()[:4],
                hint="set jit=False to run the generated code eagerly; compiling for a CPU requires a C++ compiler",
            ) from error


def _settings(running: RunOptions) -> Callable[[], Any] | None:
    """Return a context manager that applies the device and the settings, or None if there are none."""
    # The common case has no context manager to enter in each call.
    if running.device.type == "cpu" and running.threads is None and running.folder is None:
        return None

    @contextmanager
    def setting() -> Iterator[None]:
        with ExitStack() as stack:
            if running.device.type != "cpu":
                stack.enter_context(running.device)
            stack.enter_context(run_settings(running))
            yield

    return setting


@contextmanager
def run_settings(running: RunOptions) -> Iterator[None]:
    """Apply the settings of cuDNN, of the cache of torch.compile and of threads, and restore them afterwards."""
    with ExitStack() as stack:
        if running.device.type == "cuda" and (running.cudnn is not None or running.benchmark is not None):
            enabled = True if running.cudnn is None else running.cudnn
            stack.enter_context(torch.backends.cudnn.flags(enabled=enabled, benchmark=bool(running.benchmark)))
        if running.folder is not None:
            stack.enter_context(_inductor_cache(running.folder))
        if running.threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(running.threads)
        yield


@contextmanager
def _inductor_cache(folder: Path) -> Iterator[None]:
    """Set the directory in which torch.compile caches compiled code, and restore it afterwards."""
    previous = os.environ.get(INDUCTOR)
    os.environ[INDUCTOR] = str(folder)
    try:
        yield
    finally:
        if previous is None:
            del os.environ[INDUCTOR]
        else:
            os.environ[INDUCTOR] = previous


class Captured:
    """A program as a ``torch.fx.GraphModule``, captured at the first call with each set of shapes.

    ``compiler`` holds arguments of ``torch.compile``, which then compiles each module.
    """

    def __init__(self, forward: Forward, compiler: Mapping[str, Any] | None = None) -> None:
        self.forward, self.compiler = forward, compiler
        self.modules: dict[Any, Any] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        params, inputs = dict(params), dict(inputs)
        if torch.is_grad_enabled():  # kernels that were captured without gradients have none
            return self.forward(params, inputs)
        # make_fx records the kernels of the shapes it saw, so that each set of shapes needs a capture.
        key = tuple((n, x.shape, x.dtype) for arguments in (params, inputs) for n, x in arguments.items())
        if key not in self.modules:
            module = make_fx(self.forward)(params, inputs)
            if self.compiler is not None:
                module = _jitted(module, dynamic=False, jit_options=self.compiler)
            self.modules[key] = module
        return self.modules[key](params, inputs)  # type: ignore[no-any-return]
