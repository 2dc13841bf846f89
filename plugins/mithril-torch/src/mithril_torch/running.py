"""How a generated function runs: as it is, compiled, or captured; under settings that are restored after each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mithril.errors import OptionError, unknown
from mithril.graph import Graph, iterate
from mithril.runtime.backend import BuildOptions
from mithril.runtime.source_backend import Forward

TORCH_OPTIONS = ("enable_amp", "enable_cudnn", "benchmark_mode", "graph_mode", "script_optimization")
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")  # by script_optimization


@dataclass(frozen=True)
class Running:
    """What ``ml.compile`` and the backend were told, in one form."""

    jit: bool
    compiler: Mapping[str, Any]  # arguments of torch.compile
    capture: bool
    amp: bool
    cudnn: bool | None
    benchmark: bool | None
    threads: int | None
    device: torch.device


def read(
    options: BuildOptions, device: torch.device, *, cudnn_benchmark: bool | None, enable_amp: bool | None
) -> Running:
    """The options that concern running, checked against each other."""
    settings = options.settings
    given = dict(settings.get("torch_options", {}))
    for name in given:
        if name not in TORCH_OPTIONS:
            what, facts, hint = unknown("key of torch_options", name, TORCH_OPTIONS)
            raise OptionError(what, facts=facts, hint=hint)
    dynamo, capture = settings.get("torch_dynamo", False), settings.get("torch_fx", False)
    capture = bool(capture or given.get("graph_mode"))
    jit = options.jit
    if dynamo and jit is False:
        raise OptionError("torch_dynamo=True contradicts jit=False", hint="leave one of them out")
    jit = bool(jit if jit is not None else dynamo)
    compiler = _compiler(options, jit, given.get("script_optimization"))
    if jit and capture:
        raise OptionError(
            "torch_fx=True captures the program for running as it is; jit=True compiles it",
            hint="leave one of them out",
        )
    return Running(
        jit,
        compiler,
        capture,
        bool(_agreed("enable_amp", given.get("enable_amp"), enable_amp)),
        given.get("enable_cudnn"),
        _agreed("benchmark", given.get("benchmark_mode"), cudnn_benchmark),
        options.num_threads,
        device,
    )


def _agreed(what: str, here: bool | None, there: bool | None) -> bool | None:
    if here is not None and there is not None and here != there:
        raise OptionError(f"{what}: torch_options say {here}, the backend says {there}", hint="give it in one place")
    return here if here is not None else there


def _compiler(options: BuildOptions, jit: bool, level: int | None) -> dict[str, Any]:
    given = dict(options.jit_options)
    if level is not None and not (isinstance(level, int) and 0 <= level < len(MODES)):
        raise OptionError(f"torch_options: script_optimization={level!r}, expected 0 to {len(MODES) - 1}")
    if (given or level) and not jit:
        options.decisions.record("ignored", "jit_options and script_optimization mean nothing without jit=True")
        return {}
    if given.get("mode") is not None and level is not None:
        raise OptionError("jit_options' mode and torch_options' script_optimization say the same", hint="give one")
    if level is not None:
        given["mode"] = MODES[level]
        options.decisions.record("choice", f"script_optimization={level} is torch.compile's mode '{MODES[level]}'")
    if given.get("mode") is not None and given.get("options") is not None:
        raise OptionError("jit_options: torch.compile takes mode or options, not both")
    known = ("backend", "mode", "options", "dynamic")
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


def runner(forward: Forward, graph: Graph, running: Running, options: BuildOptions) -> Forward:
    """The function that is called."""
    run: Any = forward
    branching = next((n for n, _ in iterate(graph) if n.op.name in ("if", "while")), None)
    if (running.jit or running.capture) and branching is not None:
        options.decisions.record(
            "fallback",
            f"'{branching.op.name}' depends on values known only at run time: it runs as Python",
            branching.origin,
        )
    elif running.jit:
        symbolic = any(not i.type.is_static for i in graph.inputs)
        run = torch.compile(forward, fullgraph=True, **{"dynamic": symbolic, **running.compiler})
    elif running.capture:
        run = Captured(forward)
    types = {name: v.type.dtype for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    setting = _settings(running)

    if setting is None:

        def call(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                return run(params, inputs)  # type: ignore[no-any-return]

        return call

    def call_with_settings(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad(), setting():
            made = run(params, inputs)
        if running.amp:
            made = {name: x.to(getattr(torch, types[name].name)) if name in types else x for name, x in made.items()}
        return made  # type: ignore[no-any-return]

    return call_with_settings


def _settings(running: Running) -> Callable[[], Any] | None:
    """A context that sets what was asked for and restores it; None where there is nothing to set."""
    cuda = running.device.type == "cuda"
    if running.device.type == "cpu" and not running.amp and running.threads is None:
        return None

    @contextmanager
    def setting() -> Iterator[None]:
        with ExitStack() as stack:
            if running.device.type != "cpu":
                stack.enter_context(running.device)
            if running.amp:
                stack.enter_context(torch.autocast(running.device.type, dtype=torch.bfloat16))
            if cuda and (running.cudnn is not None or running.benchmark is not None):
                enabled = True if running.cudnn is None else running.cudnn
                stack.enter_context(torch.backends.cudnn.flags(enabled=enabled, benchmark=bool(running.benchmark)))
            if running.threads is not None:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(running.threads)
            yield

    return setting


class Captured:
    """The program as a ``torch.fx.GraphModule``, captured at the first call of each set of shapes."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.modules: dict[Any, torch.fx.GraphModule] = {}

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        params, inputs = dict(params), dict(inputs)
        key = tuple((n, x.shape, x.dtype) for given in (params, inputs) for n, x in given.items())
        if key not in self.modules:
            self.modules[key] = make_fx(self.forward)(params, inputs)
        return self.modules[key](params, inputs)  # type: ignore[no-any-return]
