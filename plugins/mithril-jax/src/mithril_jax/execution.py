"""Execution of a generated function: the run options of ``ml.compile``, and the jitted call.

The function is jitted over flat positional arguments and a flat tuple of results: dictionaries cost 20 % more per call,
are returned sorted, and can be donated only as a unit. Calling an ahead-of-time compiled program is slower than
``jax.jit``'s own dispatch, so the jitted function is called; it compiles once per signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import jax

from mithril import ops
from mithril.backend import BuildOptions, Forward, SourceExecutable
from mithril.graph import (
    Decisions,
    Graph,
    Input,
    InputError,
    OptionError,
    TensorType,
    Value,
    cotangent_name,
    iterate,
    result,
    substitute,
    unknown,
)
from mithril_jax import process_config
from mithril_jax.compilation_cache import CacheContext
from mithril_jax.held_weights import HeldCall
from mithril_jax.mesh import mesh_execution
from mithril_jax.mesh.vmap import vectorized

JIT_OPTIONS = ("compiler_options", "donate_argnums", "static_argnums")
LEVELS = {"cpu": "xla_backend_optimization_level", "gpu": "xla_backend_optimization_level", "tpu": "optimization_level"}
# The first removes barriers. The second has small loops emitted as one kernel, by an emitter of jaxlib 0.10.2 that does
# not know barriers.
PASSES_AGAINST_BARRIERS = ("cse_barrier_expander", "small-while-loop-hoisting")
EFFORTS = (9, 19, 29, 39)  # the TPU compiler's values for O0 to O3
PROCESS_FLAGS = {
    "xla_force_host_platform_device_count": "use JaxBackend(device_mesh=...), which simulates devices on the CPU",
    "xla_gpu_cuda_data_dir": None,
}


@dataclass(frozen=True)
class RunOptions:
    """The run options of ``ml.compile`` and of the backend, merged."""

    jit: bool
    compiler: Mapping[str, Any] = field(default_factory=dict)  # options of XLA for this program only
    donated: tuple[int, ...] = ()  # 0: params, 1: inputs
    precision: str | None = None
    vectorize: bool = False
    threads: int | None = None
    platform: str = "cpu"


def read(options: BuildOptions, platform: str) -> RunOptions:
    """Return the run options; raise OptionError if two of them conflict."""
    settings = options.settings
    jax_options = dict(settings["jax_options"])
    jitted = dict(options.jit_options)
    _check_names("jit_options for JAX", jitted, JIT_OPTIONS)
    level = settings["xla_optimization_level"]
    vectorize = settings["vectorize"]
    _unroll(jax_options.get("unroll"))
    running = RunOptions(
        _is_jitted(options, (jax_options, jitted, level, vectorize, settings["pjit"], settings.get("parallelism"))),
        _compiler(jax_options.get("xla_flags"), jitted.get("compiler_options"), level, platform),
        _donated(jax_options.get("donate_argnums"), jitted.get("donate_argnums")),
        _precision(jax_options.get("precision")),
        vectorize,
        options.num_threads,
        platform,
    )
    if jitted.get("static_argnums") not in (None, (), []):
        _static(jitted["static_argnums"], options.decisions)
    if not running.jit:
        _without_jit(running, jitted)
    elif running.compiler:
        _try(tuple(sorted(running.compiler.items())), platform)
    if running.threads is not None and running.threads != process_config.threads() and platform == "cpu":
        options.decisions.record(
            "ignored",
            f"num_threads={running.threads}: XLA has one pool of {process_config.threads()} threads for the process; "
            f"JaxBackend(num_threads={running.threads}) sets it before JAX is first used",
        )
    return running


def _is_jitted(options: BuildOptions, requested: Sequence[Any]) -> bool:
    """Whether XLA compiles the program; by default not with inserted Python, which would run only while tracing."""
    if options.jit is None and options.code_transformers and not any(requested):
        options.decisions.record(
            "choice", "code_transformers: not jitted, so that inserted code runs at each call; jit=True compiles it"
        )
        return False
    return options.jit is not False


def _check_names(description: str, options: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in options:
        if name not in accepted:
            message, facts, hint = unknown(f"key of {description}", name, accepted)
            raise OptionError(message, facts=facts, hint=hint)


def _without_jit(running: RunOptions, jitted: Mapping[str, Any]) -> None:
    conflicts = [
        name
        for name, value in (
            ("xla_optimization_level, xla_flags or compiler_options", running.compiler),
            ("donate_argnums", running.donated),
            ("vectorize", running.vectorize),
            ("jit_options", jitted),
        )
        if value
    ]
    if conflicts:
        raise OptionError(
            f"jit=False conflicts with {conflicts[0]}",
            facts=["without jit there is no XLA program: operations run one at a time"],
            hint="omit one of them",
        )


# -- single options -----------------------------------------------------------------------------------------------
def _compiler(flags: Any, overrides: Any, level: Any, platform: str) -> dict[str, Any]:
    """Return the options for XLA. An unknown flag aborts the process in XLA_FLAGS, but is an error per program."""
    compiler_options = dict(_parsed(flags)) | dict(overrides or {})
    for name in compiler_options:
        if name in PROCESS_FLAGS:
            raise OptionError(
                f"the XLA flag '{name}' applies to the process, not to one program", hint=PROCESS_FLAGS[name]
            )
    if level is None:
        return compiler_options
    if isinstance(level, bool) or not 0 <= level < len(EFFORTS):
        raise OptionError(f"xla_optimization_level={level!r}, expected 0 to {len(EFFORTS) - 1}")
    name = LEVELS[platform]
    effort = EFFORTS[level] if platform == "tpu" else level
    if compiler_options.get(name, effort) != effort:
        raise OptionError(
            f"xla_optimization_level={level} conflicts with the XLA flag {name}={compiler_options[name]}",
            hint="set it in one place",
        )
    return {**compiler_options, name: effort}


def _parsed(flags: Any) -> dict[str, Any]:
    """Parse ``"--xla_a=4 --xla_b"``, a list of such strings, or a dictionary."""
    if flags is None:
        return {}
    if isinstance(flags, Mapping):
        return {str(name).lstrip("-"): value for name, value in flags.items()}
    words = flags.split() if isinstance(flags, str) else [w for part in flags for w in str(part).split()]
    parsed = {}
    for word in words:
        if not word.startswith("--"):
            raise OptionError(f"jax_options: '{word}' is not an XLA flag", hint="write --xla_name=value")
        name, _, value = word[2:].partition("=")
        parsed[name] = _value(value)
    return parsed


def _value(text: str) -> Any:
    if text.lower() in ("", "true", "false"):
        return text.lower() != "false"
    try:
        return int(text)
    except ValueError:
        return text


@lru_cache
def _try(compiler_options: tuple[tuple[str, Any], ...], platform: str) -> None:
    """Compile a trivial program with these options, so that an invalid one is reported early and by name."""
    try:
        # On the platform of the program: each has its own set of options.
        with jax.default_device(jax.devices(platform)[0]):
            jax.jit(lambda: 0, compiler_options=dict(compiler_options)).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            "XLA rejected its options", facts=[str(error).splitlines()[0], f"options: {dict(compiler_options)}"]
        ) from None


def _donated(jax_option: Any, jit_option: Any) -> tuple[int, ...]:
    settings = [n for n in (jax_option, jit_option) if n is not None]
    requests = [tuple(sorted({n} if isinstance(n, int) else set(n))) for n in settings]
    if len(requests) == 2 and requests[0] != requests[1]:
        raise OptionError(
            "donate_argnums of jax_options conflicts with donate_argnums of jit_options",
            facts=[f"{requests[0]} and {requests[1]}"],
            hint="set it in one place",
        )
    if not requests:
        return ()
    if any(n not in (0, 1) for n in requests[0]):
        raise OptionError(f"donate_argnums={requests[0]} is out of range", facts=["0 is params, 1 is inputs"])
    return requests[0]


def _static(static_argnums: Any, decisions: Decisions) -> None:
    indices = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if any(n not in (0, 1) for n in indices):
        raise OptionError(f"static_argnums={indices} is out of range", facts=["0 is params, 1 is inputs"])
    decisions.record(
        "ignored", "jit_options: static_argnums, since params and inputs are arrays; constants= fixes their values"
    )


def _precision(precision: Any) -> str | None:
    if precision is None:
        return None
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    try:
        with jax.default_matmul_precision(name):
            return name  # type: ignore[no-any-return]
    except (ValueError, TypeError):
        raise OptionError(
            f"jax_options: unknown precision {precision!r}",
            facts=["known: default, high, highest, bfloat16, tensorfloat32, float32, and jax.lax.Precision"],
        ) from None


def _unroll(unroll: Any) -> None:
    if unroll is not None and (not isinstance(unroll, int) or unroll < 1):
        raise OptionError(f"jax_options: unroll={unroll!r}, expected an unroll factor of 1 or more")


# -- running ------------------------------------------------------------------------------------------------------
def with_gradient_signature(graph: Graph, of: Sequence[str], wrt: Sequence[str]) -> Graph:
    """Add cotangents to the inputs and gradients to the results of a graph that JAX differentiates."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    cotangents = tuple(Input(Value(cotangent_name(n), outputs[n].type), "cotangent", of=n) for n in of)
    gradients = tuple(result("gradient", name, graph.input(name).value) for name in wrt)
    return graph.replaced(inputs=graph.inputs + cotangents, results=graph.results + gradients)


def runner(
    forward: Forward,
    graph: Graph,
    running: RunOptions,
    options: BuildOptions,
    shardings: mesh_execution.ArgumentShardings | None = None,
) -> Forward:
    """Return the function to call."""
    uses_64_bits = _needs_64_bits(graph)
    inner = with_precision(forward, running.precision)
    if running.vectorize:
        with jax.enable_x64(uses_64_bits):
            inner = vectorized(inner, graph, options.decisions)
    cache = None
    if options.settings["cache"]:
        cache = CacheContext(options.settings, getattr(forward, "generated", (forward,)), running.platform)
    call: Any = Jitted(inner, graph, running, shardings, cache) if running.jit else inner
    # JAX truncates 64-bit types unless the setting is on when a function is traced and when it is
    # called; programs without them do not pay for the context.
    if not uses_64_bits:
        return call  # type: ignore[no-any-return]

    def in_64_bits(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.enable_x64(True):
            return call(params, inputs)  # type: ignore[no-any-return]

    in_64_bits.jitted_call = call  # type: ignore[attr-defined]
    return in_64_bits


def _needs_64_bits(graph: Graph) -> bool:
    values = [i.type.dtype for i in graph.inputs]
    values += [v.dtype for node, _ in iterate(graph) for v in node.results]
    return any(d.bits == 64 for d in values)


def with_precision(forward: Forward, precision: str | None) -> Forward:
    if precision is None:
        return forward

    def in_precision(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.default_matmul_precision(precision):
            return forward(params, inputs)

    return in_precision


class Jitted:
    """A function of params and inputs, jitted over flat arguments.

    A donated argument is consumed only if there is a result of the same type that can reuse its buffer.
    """

    def __init__(
        self,
        forward: Forward,
        graph: Graph,
        running: RunOptions,
        shardings: mesh_execution.ArgumentShardings | None = None,
        cache: CacheContext | None = None,
    ) -> None:
        self.forward = forward
        self.shardings = shardings
        self.cache = cache
        self._static = all(i.type.is_static for i in graph.arguments)
        self._compiled_shapes: set[Any] = set()  # argument shapes
        self.params = tuple(i.name for i in graph.with_role("param"))
        self.inputs = tuple(i.name for i in graph.arguments if i.role != "param")
        self.results: tuple[str, ...] = ()
        self._params = _getter(self.params)
        self._inputs = _getter(self.inputs)
        arguments: dict[str, Any] = {}
        self.compiler_options = dict(running.compiler)
        if running.platform == "cpu":
            self.compiler_options = keeping_barriers(graph, self.compiler_options)
        if self.compiler_options:
            arguments["compiler_options"] = self.compiler_options
        donated = _donatable(graph, running.donated, self.params, self.inputs)
        if donated:
            arguments["donate_argnums"] = donated
        if shardings is not None:
            arguments["out_shardings"] = shardings.results(graph.results)
        self.jitted = jax.jit(self._flat, **arguments)
        self._run = self.jitted if cache is None else self._run_cached

    def _flat(self, *arguments: Any) -> tuple[Any, ...]:
        n = len(self.params)
        params = dict(zip(self.params, arguments[:n], strict=True))
        inputs = dict(zip(self.inputs, arguments[n:], strict=True))
        with nullcontext() if self.shardings is None else self.shardings.context():
            results = self.forward(params, inputs)
        # Written while tracing: names are strings, which a jitted function cannot return.
        self.results = tuple(results)
        return tuple(results.values())

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self.shardings is not None:
            return self._run_sharded(self.shardings, params, inputs)
        try:
            results = self._run(*self._params(params), *self._inputs(inputs))
        # JAX's own error for a deleted buffer names neither the argument nor the option that donated
        # it.
        except (RuntimeError, ValueError):
            _check_alive({**inputs, **params})
            raise
        return dict(zip(self.results, results, strict=True))

    def forget_sizes(self) -> None:
        """Discard the compiled programs, one for each size."""
        self.jitted.clear_cache()
        self._compiled_shapes.clear()

    def _run_cached(self, *arguments: Any) -> tuple[Any, ...]:
        """Call with the compilation cache if these shapes are not compiled yet."""
        shapes = None if self._static else tuple(x.shape for x in arguments)
        if shapes in self._compiled_shapes:
            return self.jitted(*arguments)  # type: ignore[no-any-return]
        assert self.cache is not None
        with self.cache():
            results = self.jitted(*arguments)
        self._compiled_shapes.add(shapes)
        # One set of shapes: later calls need neither the look-up nor the cache.
        if self._static:
            self._run = self.jitted
        return results  # type: ignore[no-any-return]

    def _run_sharded(
        self, shardings: mesh_execution.ArgumentShardings, params: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        arguments = [shardings.place(n, params[n], keep=True) for n in self.params]
        arguments += [shardings.place(n, inputs[n], keep=False) for n in self.inputs]
        with mesh_execution.explained(shardings.is_remote):
            results = self._run(*arguments)
            if shardings.simulated:
                # a program started before the previous one ended can starve it of threads: both would deadlock
                jax.block_until_ready(results)
        return shardings.carried(dict(zip(self.results, results, strict=True)))

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with the shardings of this program, so that a call need not transfer them."""
        return dict(params) if self.shardings is None else self.shardings.placed(params)

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> jax.Array | None:
        """Read a parameter region by region; return None for a single device."""
        return None if self.shardings is None else self.shardings.assemble(name, shape, read)

    def lower(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """Return the program that JAX lowers for these arguments (arrays or their types)."""
        return self.jitted.lower(*self._params(params), *self._inputs(inputs))


def analysis(executable: Any, sizes: Mapping[str, int]) -> Any:
    """Return XLA's memory analysis of a jitted program for these sizes, or None for other programs."""
    if not isinstance(executable, SourceExecutable):
        return None  # a partitioned program, or one of a plugin
    call = getattr(executable.call, "jitted_call", executable.call)
    if not isinstance(call, Jitted) or call.shardings is not None:
        return None
    types = {i.name: i.type for i in executable.graph.arguments}
    weights = executable.call.weights if isinstance(executable.call, HeldCall) else {}

    def abstract(name: str) -> Any:
        if name in weights:
            return jax.ShapeDtypeStruct(weights[name].shape, weights[name].dtype)
        shape = tuple(int(substitute(d, sizes)) for d in types[name].shape)
        return jax.ShapeDtypeStruct(shape, types[name].dtype.numpy)

    with jax.enable_x64(_needs_64_bits(executable.graph)):
        arguments = [abstract(name) for name in (*call.params, *call.inputs)]
        return call.jitted.lower(*arguments).compile().memory_analysis()


def keeping_barriers(graph: Graph, compiler_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options of XLA for CPUs that keep the barriers of the graph, which CSE and fusion would cross."""
    options = dict(compiler_options or {})
    if any(node.op is ops.barrier for node, _ in iterate(graph)):
        disabled = options.get("xla_disable_hlo_passes")
        options["xla_disable_hlo_passes"] = ",".join(filter(None, [disabled, *PASSES_AGAINST_BARRIERS]))
    return options


def _check_alive(arguments: Mapping[str, Any]) -> None:
    for name, x in arguments.items():
        if isinstance(x, jax.Array) and x.is_deleted():
            raise InputError(
                f"'{name}' was donated to an earlier call and is deleted",
                facts=["donate_argnums allows XLA to reuse the buffers of arguments for results"],
                hint="pass the returned arrays instead, keep a copy, or omit donate_argnums",
            )


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arrays: tuple(arrays[n] for n in names)


def _donatable(graph: Graph, requested: Sequence[int], params: Sequence[str], inputs: Sequence[str]) -> tuple[int, ...]:
    """Return the flat arguments to donate: one of matching type per result, but no weight of the program itself."""
    free: list[TensorType] = [v.type for v in graph.outputs]
    by_name = {i.name: i for i in graph.arguments}
    donated = []
    for k, i in enumerate(by_name[name] for name in (*params, *inputs)):
        # Other programs share this weight.
        if "held_order" in i.tags:
            continue
        if ((0 if k < len(params) else 1) in requested or i.tags.get("donated")) and i.type in free:
            free.remove(i.type)
            donated.append(k)
    return tuple(donated)
