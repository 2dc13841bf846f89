"""How a generated function runs: what ``ml.compile`` was told, and the call made of it.

The function is jitted over flat positional arguments and a flat tuple of results: dictionaries cost a fifth more per
call, come back sorted, and are donated whole or not at all. Calling an ahead-of-time compiled program instead costs
more than ``jax.jit``'s own path, so that is what is called; it compiles once per signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import jax

from mithril import ops
from mithril.backend import BuildOptions, Forward, SourceExecutable
from mithril.base import Decisions, InputError, OptionError, TensorType, substitute, unknown
from mithril.ir import Graph, Input, Value, cotangent_name, iterate, result
from mithril_jax import process_config
from mithril_jax.compilation_cache import Kept
from mithril_jax.mesh import mesh_execution
from mithril_jax.mesh.vmap import mapped

JIT_OPTIONS = ("compiler_options", "donate_argnums", "static_argnums")
LEVELS = {"cpu": "xla_backend_optimization_level", "gpu": "xla_backend_optimization_level", "tpu": "optimization_level"}
BARRIERS_GO = "cse_barrier_expander"
EFFORTS = (9, 19, 29, 39)  # what the TPU's compiler calls O0 to O3
OF_PROCESS = {
    "xla_force_host_platform_device_count": "JaxBackend(device_mesh=...) makes devices of the CPU",
    "xla_gpu_cuda_data_dir": None,
}


@dataclass(frozen=True)
class Running:
    """What ``ml.compile`` and the backend were told, in one form."""

    jit: bool
    compiler: Mapping[str, Any] = field(default_factory=dict)  # options of XLA for this program alone
    donated: tuple[int, ...] = ()  # 0: params, 1: inputs
    precision: str | None = None
    vectorize: bool = False
    threads: int | None = None
    platform: str = "cpu"


def read(options: BuildOptions, platform: str) -> Running:
    """The options that concern running, checked against each other."""
    settings = options.settings
    given = dict(settings.get("jax_options", {}))
    jitted = dict(options.jit_options)
    _known("jit_options for JAX", jitted, JIT_OPTIONS)
    level = settings.get("xla_optimization_level")
    vectorize = bool(settings.get("vectorize", False))
    _unroll(given.get("unroll"))
    running = Running(
        _is_jitted(options, (given, jitted, level, vectorize, settings.get("pjit"), settings.get("parallelism"))),
        _compiler(given.get("xla_flags"), jitted.get("compiler_options"), level, platform),
        _donated(given.get("donate_argnums"), jitted.get("donate_argnums")),
        _precision(given.get("precision")),
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


def _is_jitted(options: BuildOptions, asked: Sequence[Any]) -> bool:
    """Whether XLA compiles the program: the default gives way to inserted Python, which would run while tracing."""
    if options.jit is None and options.code_transformers and not any(asked):
        options.decisions.record(
            "choice", "code_transformers: not jitted, so that inserted code runs at each call; jit=True compiles it"
        )
        return False
    return options.jit is not False


def _known(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            message, facts, hint = unknown(f"key of {what}", name, known)
            raise OptionError(message, facts=facts, hint=hint)


def _without_jit(running: Running, jitted: Mapping[str, Any]) -> None:
    asked = [
        name
        for name, value in (
            ("xla_optimization_level, xla_flags or compiler_options", running.compiler),
            ("donate_argnums", running.donated),
            ("vectorize", running.vectorize),
            ("jit_options", jitted),
        )
        if value
    ]
    if asked:
        raise OptionError(
            f"jit=False contradicts {asked[0]}",
            facts=["without jit there is no XLA program: operations run one after the other"],
            hint="leave one of them out",
        )


# -- single options -----------------------------------------------------------------------------------------------
def _compiler(flags: Any, given: Any, level: Any, platform: str) -> dict[str, Any]:
    """Options for XLA. An unknown flag in the environment kills the process; given per program it is an error."""
    made = dict(_parsed(flags)) | dict(given or {})
    for name in made:
        if name in OF_PROCESS:
            raise OptionError(
                f"the XLA flag '{name}' concerns the whole process, not one program", hint=OF_PROCESS[name]
            )
    if level is None:
        return made
    if isinstance(level, bool) or not 0 <= level < len(EFFORTS):
        raise OptionError(f"xla_optimization_level={level!r}, expected 0 to {len(EFFORTS) - 1}")
    name = LEVELS[platform]
    wanted = EFFORTS[level] if platform == "tpu" else level
    if made.get(name, wanted) != wanted:
        raise OptionError(
            f"xla_optimization_level={level} contradicts the XLA flag {name}={made[name]}", hint="give it in one place"
        )
    return {**made, name: wanted}


def _parsed(flags: Any) -> dict[str, Any]:
    """``"--xla_a=4 --xla_b"``, a list of such, or a dictionary."""
    if flags is None:
        return {}
    if isinstance(flags, Mapping):
        return {str(name).lstrip("-"): value for name, value in flags.items()}
    words = flags.split() if isinstance(flags, str) else [w for part in flags for w in str(part).split()]
    made = {}
    for word in words:
        if not word.startswith("--"):
            raise OptionError(f"jax_options: '{word}' is no XLA flag", hint="write --xla_name=value")
        name, _, value = word[2:].partition("=")
        made[name] = _value(value)
    return made


def _value(text: str) -> Any:
    if text.lower() in ("", "true", "false"):
        return text.lower() != "false"
    try:
        return int(text)
    except ValueError:
        return text


@lru_cache
def _try(given: tuple[tuple[str, Any], ...], platform: str) -> None:
    """Compile the least program with these options, so that a wrong one is said now and by name."""
    try:
        with jax.default_device(jax.devices(platform)[0]):
            jax.jit(lambda: 0, compiler_options=dict(given)).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            "XLA refuses the options given for it", facts=[str(error).splitlines()[0], f"given: {dict(given)}"]
        ) from None


def _donated(here: Any, there: Any) -> tuple[int, ...]:
    found = [tuple(sorted(set((n,) if isinstance(n, int) else tuple(n)))) for n in (here, there) if n is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise OptionError(
            "donate_argnums of jax_options and of jit_options contradict each other",
            facts=[f"{found[0]} and {found[1]}"],
            hint="give it in one place",
        )
    if not found:
        return ()
    if any(n not in (0, 1) for n in found[0]):
        raise OptionError(
            f"donate_argnums={found[0]} names an argument that is not there", facts=["0 is params, 1 is inputs"]
        )
    return found[0]


def _static(given: Any, decisions: Decisions) -> None:
    named = (given,) if isinstance(given, int) else tuple(given)
    if any(n not in (0, 1) for n in named):
        raise OptionError(
            f"static_argnums={named} names an argument that is not there", facts=["0 is params, 1 is inputs"]
        )
    decisions.record(
        "ignored", "jit_options: static_argnums, since params and inputs are arrays; constants= fixes their values"
    )


def _precision(given: Any) -> str | None:
    if given is None:
        return None
    name = given.name.lower() if isinstance(given, jax.lax.Precision) else given
    try:
        with jax.default_matmul_precision(name):
            return name  # type: ignore[no-any-return]
    except (ValueError, TypeError):
        raise OptionError(
            f"jax_options: precision={given!r} is none that JAX knows",
            facts=["known: default, high, highest, bfloat16, tensorfloat32, float32, and jax.lax.Precision"],
        ) from None


def _unroll(given: Any) -> None:
    if given is not None and (not isinstance(given, int) or given < 1):
        raise OptionError(f"jax_options: unroll={given!r}, expected how many steps of a loop to write out: 1 or more")


# -- running ------------------------------------------------------------------------------------------------------
def described(graph: Graph, of: Sequence[str], wrt: Sequence[str]) -> Graph:
    """The names and types of a program that JAX differentiates: cotangents come in, gradients come out."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    cotangents = tuple(Input(Value(cotangent_name(n), outputs[n].type), "cotangent", of=n) for n in of)
    gradients = tuple(result("gradient", name, graph.input(name).value) for name in wrt)
    return graph.replaced(inputs=graph.inputs + cotangents, results=graph.results + gradients)


def runner(
    forward: Forward, graph: Graph, running: Running, options: BuildOptions, shares: mesh_execution.Shares | None = None
) -> Forward:
    """The function that is called."""
    wide = _needs_64_bits(graph)
    inner = _precisely(forward, running.precision)
    if running.vectorize:
        with jax.enable_x64(wide):
            inner = mapped(inner, graph, options.decisions)
    kept = Kept(options.settings, getattr(forward, "forward", forward), running.platform) if _keeps(options) else None
    call: Any = Jitted(inner, graph, running, shares, kept) if running.jit else inner
    if not wide:
        return call  # type: ignore[no-any-return]

    def in_64_bits(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.enable_x64(True):
            return call(params, inputs)  # type: ignore[no-any-return]

    in_64_bits.jitted_call = call  # type: ignore[attr-defined]
    return in_64_bits


def _keeps(options: BuildOptions) -> bool:
    return bool(options.settings.get("cache", False))


def _needs_64_bits(graph: Graph) -> bool:
    values = [i.type.dtype for i in graph.inputs]
    values += [v.dtype for node, _ in iterate(graph) for v in node.results]
    return any(d.bits == 64 for d in values)


def _precisely(forward: Forward, precision: str | None) -> Forward:
    if precision is None:
        return forward

    def with_precision(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        with jax.default_matmul_precision(precision):
            return forward(params, inputs)

    return with_precision


class Jitted:
    """A function of params and inputs, jitted over flat arguments.

    Of donated arguments XLA takes those that have a result of the same type to make of them; the others stay.
    """

    def __init__(
        self,
        forward: Forward,
        graph: Graph,
        running: Running,
        shares: mesh_execution.Shares | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.forward = forward
        self.shares = shares
        self.kept = kept
        self._static = all(i.type.is_static for i in graph.arguments)
        self._met: set[Any] = set()  # shapes that it was compiled for
        self.params = tuple(i.name for i in graph.with_role("param"))
        self.inputs = tuple(i.name for i in graph.arguments if i.role != "param")
        self.results: tuple[str, ...] = ()
        self._params = _getter(self.params)
        self._inputs = _getter(self.inputs)
        arguments: dict[str, Any] = {}
        compiler = _keeping_barriers(graph, running)
        if compiler:
            arguments["compiler_options"] = compiler
        donated = _taken(graph, running.donated, self.params, self.inputs)
        if donated:
            arguments["donate_argnums"] = donated
        if shares is not None:
            arguments["out_shardings"] = shares.results(graph.results)
        self.jitted = jax.jit(self._flat, **arguments)
        self._run = self.jitted if kept is None else self._run_kept

    def _flat(self, *given: Any) -> tuple[Any, ...]:
        n = len(self.params)
        params = dict(zip(self.params, given[:n], strict=True))
        made = self.forward(params, dict(zip(self.inputs, given[n:], strict=True)))
        self.results = tuple(made)
        return tuple(made.values())

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self.shares is not None:
            return self._shared(self.shares, params, inputs)
        try:
            made = self._run(*self._params(params), *self._inputs(inputs))
        except (RuntimeError, ValueError):
            _check_alive({**inputs, **params})
            raise
        return dict(zip(self.results, made, strict=True))

    def forget_sizes(self) -> None:
        """Drop the programs that XLA compiled, one for each size."""
        self.jitted.clear_cache()
        self._met.clear()

    def _run_kept(self, *given: Any) -> tuple[Any, ...]:
        """Calls of new shapes, which compile; and all of a program with unknown sizes."""
        shapes = None if self._static else tuple(x.shape for x in given)
        if shapes in self._met:
            return self.jitted(*given)  # type: ignore[no-any-return]
        assert self.kept is not None
        with self.kept():
            made = self.jitted(*given)
        self._met.add(shapes)
        if self._static:
            self._run = self.jitted
        return made  # type: ignore[no-any-return]

    def _shared(
        self, shares: mesh_execution.Shares, params: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        given = [shares.place(n, params[n], keep=True) for n in self.params]
        given += [shares.place(n, inputs[n], keep=False) for n in self.inputs]
        try:
            made = self._run(*given)
            if shares.simulated:
                # A program begun before the last one ended can starve it of threads, and both wait forever.
                jax.block_until_ready(made)
        except (RuntimeError, ValueError) as error:
            if shares.elsewhere and mesh_execution.STATUS.match(str(error)):
                raise mesh_execution.lost(error) from error
            raise
        return dict(zip(self.results, made, strict=True))

    def placed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters where this program wants them, so that a call need not move them."""
        return dict(params) if self.shares is None else self.shares.placed(params)

    def assemble(self, name: str, shape: tuple[int, ...], read: Callable[[Any], Any]) -> jax.Array | None:
        """A parameter, read region by region; None where there is one device to read it for."""
        return None if self.shares is None else self.shares.assemble(name, shape, read)

    def lower(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """The program for these arguments (arrays or their types) as JAX lowers it, to look at."""
        return self.jitted.lower(*self._params(params), *self._inputs(inputs))


def analysis(executable: Any, sizes: Mapping[str, int]) -> Any:
    """Return XLA's memory analysis of a jitted program for these sizes; None where there is no such program."""
    if not isinstance(executable, SourceExecutable):
        return None  # of several backends, or of a plugin's
    call = getattr(executable.call, "jitted_call", executable.call)
    if not isinstance(call, Jitted) or call.shares is not None:
        return None
    types = {i.name: i.type for i in executable.graph.arguments}

    def abstract(name: str) -> Any:
        shape = tuple(int(substitute(d, sizes)) for d in types[name].shape)
        return jax.ShapeDtypeStruct(shape, types[name].dtype.numpy)

    with jax.enable_x64(call is not executable.call):
        given = [abstract(name) for name in (*call.params, *call.inputs)]
        return call.jitted.lower(*given).compile().memory_analysis()


def _keeping_barriers(graph: Graph, running: Running) -> dict[str, Any]:
    """The options of XLA; on processors it drops barriers early and then merges what they kept apart, unless told."""
    made = dict(running.compiler)
    if running.platform == "cpu" and any(node.op is ops.barrier for node in graph.nodes):
        given = made.get("xla_disable_hlo_passes")
        made["xla_disable_hlo_passes"] = f"{given},{BARRIERS_GO}" if given else BARRIERS_GO
    return made


def _check_alive(given: Mapping[str, Any]) -> None:
    for name, x in given.items():
        if isinstance(x, jax.Array) and x.is_deleted():
            raise InputError(
                f"'{name}' was donated to an earlier call and is gone",
                facts=["donate_argnums lets XLA make results in the memory of arguments"],
                hint="pass on what the call returned, keep a copy, or leave donate_argnums out",
            )


def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda given: tuple(given[n] for n in names)


def _taken(graph: Graph, wanted: Sequence[int], params: Sequence[str], inputs: Sequence[str]) -> tuple[int, ...]:
    """Places of the flat arguments that can become results, one of the same type for each: asked for, or donated."""
    free: list[TensorType] = [v.type for v in graph.outputs]
    by_name = {i.name: i for i in graph.arguments}
    taken = []
    for k, i in enumerate(by_name[name] for name in (*params, *inputs)):
        if ((0 if k < len(params) else 1) in wanted or i.tags.get("donated")) and i.type in free:
            free.remove(i.type)
            taken.append(k)
    return tuple(taken)
