"""The compiled model: what ``ml.compile`` returns, the same on every backend."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never, Protocol

import numpy as np

from mithril import plugins
from mithril.backend import Quick, check_call, checked, never, quick, refuse, to_numpy, watch
from mithril.base import Decisions, DType, InputError, MithrilError, ShapeError, TensorType, UnsupportedError, unknown
from mithril.ir import Graph, Input, cotangent_name
from mithril.runtime import weight_files
from mithril.runtime.batch_buckets import Bucketed, Buckets
from mithril.runtime.program import FastGradients, Kind, Program, Request
from mithril.runtime.programs import DEFAULT, Programs
from mithril.runtime.signature import (
    InputSpec,
    adapt,
    array_type,
    as_numpy,
    check_shapes,
    missing_or_unknown,
    settle,
)
from mithril.runtime.watching import Watcher, measured, watchers

if TYPE_CHECKING:
    from mithril.backend import Backend
    from mithril.passes import PassContext, PassManager
    from mithril.runtime.memory_report import MemoryReport

Arrays = Mapping[str, Any]


class Compiler(Protocol):
    """What makes programs on request: ``mithril.compiler.steps.Compiler``."""

    def specialise(self, request: Request) -> Program: ...

    def probe(self, types: Mapping[str, TensorType] | None) -> Graph: ...

    def pipeline(self) -> tuple[PassManager, PassContext]: ...

    def initial(self, inputs: Iterable[Input], seed: int) -> dict[str, np.ndarray[Any, Any]]: ...

    def buckets(self, training: bool) -> Buckets | None: ...

    def lowered(self, request: Request) -> Graph: ...

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None: ...


UNBOUND = "evaluate(params, inputs), or compiled.bind(params) once and then evaluate(inputs)"


class CompiledModel:
    """A model made for one backend. Programs are specialised when the shapes of the inputs are known, and kept."""

    def __init__(
        self,
        backend: Backend,
        specs: Mapping[str, InputSpec],
        compiler: Compiler,
        *,
        decisions: Decisions,
        options: Mapping[str, Any],
        name: str = "model",
        watchers: tuple[Watcher, ...] = (),
    ) -> None:
        self.backend = backend
        self.watchers = watchers  # of its calls, from the observers of its compilation
        if backend.unforkable:
            watch(self)
        self.stages: dict[str, Graph] = {}  # of save_intermediates=True: the graph after each stage and pass
        self.decisions = decisions
        self.options = options
        self.name = name
        self._specs = dict(specs)
        self.compiler = compiler
        limit, claims = options.get("max_programs", DEFAULT), backend.capabilities
        self._programs = Programs(limit, decisions, sizes=claims.symbolic and claims.recompiles)
        self._quick: Quick = never
        self._seen: tuple[Any, Any, Any] = (None, None, None)  # the last call that could have been quick
        self._fast_gradients: FastGradients | None = None
        self._bound: dict[str, Any] | None = None
        self._given: dict[str, Any] = {}  # what calls without parameters pass as such
        self._binding = 0  # counts bind() where parameters are baked in
        self._baked: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        self._interface: Graph | None = None
        self._types: dict[str, TensorType] | None = None  # of the first program's inputs
        self._inference = bool(options.get("inference"))

    def forked(self) -> None:
        """In a child process: have every call look at whether the framework survived."""
        self._quick, self._fast_gradients = never, None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a compiled model is neither pickled nor copied: it holds machine code and arrays of its backend",
            hint="pickle the model and compile it there; cache=True makes that quick, save and load carry weights",
        )

    # -- calling -----------------------------------------------------------------------------------------------------
    def evaluate(
        self,
        params: Arrays | None = None,
        inputs: Arrays | None = None,
        output_gradients: Any = None,
        *surplus: Never,
        state: Arrays | None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
        **unknown_names: Never,
    ) -> Any:
        """Run the model.

        ``evaluate(params, inputs)`` gives the outputs by name; ``evaluate(inputs)`` does so with bound parameters.
        ``output_gradients`` (arrays by output name, one array for a single output, or the name of a scalar output)
        gives ``(outputs, gradients)``. With ``state`` the new state comes last. ``training`` decides dropout, batch
        statistics and ``is_training``; left out, it is True exactly where gradients are asked for.
        """
        if surplus or unknown_names:
            refuse("evaluate", CompiledModel.evaluate, (params, inputs, output_gradients, *surplus), unknown_names)
        binding, bound = 0, inputs is None
        if bound:
            binding, params, inputs = self._binding, self._given, params
        if output_gradients is None and state is None and not training and not watchers.get():
            made = self._quick(params, inputs)
            if made is not None:
                return made
        slopes = output_gradients
        if (
            (fast := self._fast_gradients) is not None
            and slopes is not None
            and state is None
            and fast.accepts(params, inputs, slopes, training, wrt)
            and not watchers.get()
        ):
            return fast.run(params, inputs, slopes)
        if bound and self._bound is None and self._needs_params(inputs):
            raise InputError("no parameters are bound to this model", hint=UNBOUND)
        given = params if params is not None else {}
        inputs = {} if inputs is None else inputs
        return self._evaluate(given, inputs, output_gradients, state, training, wrt, binding)

    def _needs_params(self, inputs: Any) -> bool:
        """Whether the model has parameters; where that depends on shapes, those of the inputs of this call tell."""
        try:
            return bool(self._param_types())
        except ShapeError:
            given = self._with_defaults({} if inputs is None else inputs, False)
            types = {n: settle(self._specs[n], array_type(n, x), self.backend.dtype) for n, x in given.items()}
            return bool(self.compiler.probe(types).with_role("param"))

    def _bind_fresh(self, inputs: Any) -> None:
        """Bind fresh parameters at a first call without any, with a warning; under ``strict`` that is an error."""
        if self.decisions.strict:
            raise InputError("no parameters are bound to this model", hint=UNBOUND)
        seed = self.options.get("seed", 0)
        self.bind(self.randomize_params(inputs={} if inputs is None else inputs))
        message = f"no parameters are bound: fresh ones of seed {seed} are used; {UNBOUND}"
        self.decisions.record("assumed", message, warn=True)

    def __call__(
        self,
        inputs: Arrays | None = None,
        output_gradients: Any = None,
        *surplus: Never,
        state: Arrays | None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
        **unknown_names: Never,
    ) -> Any:
        """``evaluate(inputs)`` with bound parameters; without any, fresh ones are bound, with a warning."""
        if surplus or unknown_names:
            refuse("a compiled model", CompiledModel.__call__, (inputs, output_gradients, *surplus), unknown_names)
        if output_gradients is None and state is None and not training and not watchers.get():
            made = self._quick(self._given, inputs)
            if made is not None:
                return made
        if self._bound is None and self._needs_params(inputs):
            self._bind_fresh(inputs)
        return self.evaluate(inputs, None, output_gradients, state=state, training=training, wrt=wrt)

    def _evaluate(
        self,
        params: Arrays,
        inputs: Arrays,
        cotangents: Any,
        state: Arrays | None,
        training: bool | None,
        wrt: Collection[str] | None,
        binding: int = 0,
    ) -> Any:
        self.backend.check_fork()
        usual = state is None or isinstance(state, Mapping), training is None or isinstance(training, (bool, np.bool_))
        if not all(usual) or isinstance(wrt, str) or not isinstance(wrt, Collection | None):
            check_call("evaluate", CompiledModel.evaluate, (), {"state": state, "training": training, "wrt": wrt}, {})
        train = bool(cotangents is not None if training is None else training)
        if train and self._inference:
            raise InputError("this model was compiled with inference=True: it has no training mode and no gradients")
        given = self._with_defaults(inputs, train, params)
        of = self._cotangent_names(cotangents, given, train)
        kind = Kind(train, of, None if wrt is None or not of else tuple(wrt))
        program, arrays, checked, call = self._prepared(given, params, state, kind, binding)
        if of:
            call.update(self._cotangents(program, cotangents, of, arrays))
        results = self._run(program, checked, call)
        plain = state is None and not program.interface.states and not self.watchers
        if plain and self._is_native(arrays, inputs) and checked is params and isinstance(params, dict):
            same = isinstance(cotangents, Mapping) and all(call[cotangent_name(n)] is cotangents[n] for n in of)
            if of and same and (wrt is None or isinstance(wrt, tuple)):
                self._fast_gradients = FastGradients(program, params, arrays, cotangents, training, wrt)
            elif not of and not train:
                seen = program, params or None, [x.shape for x in arrays.values()]
                if all(a is b for a, b in zip(seen[:2], self._seen[:2], strict=True)) and seen[2] == self._seen[2]:
                    self._quick = quick(program.call, params, arrays)  # only for what comes again: it takes its time
                self._seen = seen
        return self._split(results, of, state, program)

    def _prepared(
        self, given: Arrays, params: Arrays, state: Arrays | None, kind: Kind, binding: int = 0
    ) -> tuple[Program, dict[str, Any], Arrays, dict[str, Any]]:
        """The program for a call, its inputs as the backend's arrays, and what it is called with."""
        program, types = self._program(given, kind, binding)
        arrays = {name: self._convert(name, given[name], t) for name, t in types.items()}
        checked = self._check_params(program, params)
        return program, arrays, checked, {**arrays, **self._check_state(program, state)}

    def bound_call(
        self, params: Arrays | None, inputs: Arrays, *, state: Arrays | None = None, training: bool = False
    ) -> tuple[Program, dict[str, Any]]:
        """The program that a call without gradients runs, and all of its arguments by name."""
        chosen = params if params is not None else self._bound or {}
        given = self._with_defaults(inputs, training, chosen)
        program, _, checked, call = self._prepared(given, chosen, state, Kind(training))
        return program, {**checked, **call}

    def _run(self, program: Program, params: Arrays, inputs: Arrays) -> Mapping[str, Any]:
        watching = (*watchers.get(), *self.watchers)
        if not watching:
            made: Mapping[str, Any] = program.call(params, inputs)
            return made
        buckets = program.bucketed.buckets if program.bucketed is not None else None
        given = inputs if buckets is None else buckets.filled(self.backend, inputs)
        made = measured(self, program, params, given, watching)
        if program.checked is not None:
            made = program.checked.approved(made, given)
        return made if buckets is None else buckets.cut(self.backend, made, buckets.rows(inputs))

    def _split(self, results: Mapping[str, Any], of: tuple[str, ...], state: Arrays | None, program: Program) -> Any:
        names = program.results
        if state is None and names.only_outputs:
            return results
        parts: list[Any] = [{n: results[n] for n in names.outputs}]  # in order: not every backend keeps it
        if of:
            parts.append({input: results[n] for input, n in names.gradients})
        if state is not None:
            parts.append({**state, **{own: results[n] for own, n in names.states}})
        return parts[0] if len(parts) == 1 else tuple(parts)

    # -- inputs ------------------------------------------------------------------------------------------------------
    def _with_defaults(self, inputs: Arrays, training: bool, params: Arrays | None = None) -> dict[str, Any]:
        if not isinstance(inputs, Mapping):
            if len(self._specs) == 1:
                return {next(iter(self._specs)): inputs}
            raise InputError(
                "inputs must be a dictionary of arrays by name",
                facts=[f"expected: {', '.join(self._specs)}", f"got: {type(inputs).__name__}"],
            )
        given = dict(inputs)
        if "is_training" in self._specs:
            given.setdefault("is_training", np.asarray(training))
        wanted = {n: s for n, s in self._specs.items() if s.required or n in given}
        missing_or_unknown("input", wanted, given, params)
        return {name: given[name] for name in wanted}

    def _program(self, given: Mapping[str, Any], kind: Kind, binding: int = 0) -> tuple[Program, dict[str, TensorType]]:
        """The program for these inputs, and the exact types they are converted to."""
        actual = {name: array_type(name, x) for name, x in given.items()}
        key = (tuple(actual.values()), kind, binding)
        known = self._programs.call(key)
        if known is not None:
            return known
        settled = {name: settle(self._specs[name], t, self.backend.dtype) for name, t in actual.items()}
        self._check_declared(settled, actual)
        concrete = {n: TensorType(t.dtype, actual[n].shape) for n, t in settled.items()}
        buckets = self.compiler.buckets(kind.training) if not kind.of else None
        symbolic = self.backend.capabilities.symbolic
        types = settled if symbolic else concrete if buckets is None else buckets.rounded(concrete)
        program = self._make(Request(tuple(types.items()), kind, binding, self._baked if binding else {}))
        runs = program.checked or program.executable
        program.bucketed = None if buckets is None else Bucketed(runs, buckets, self.backend)
        if symbolic:
            check_shapes(program.interface.guards, types, {n: t.shape for n, t in actual.items()})  # type: ignore[misc]
        self.compiler.check_call(program, {n: t.shape for n, t in concrete.items()})  # type: ignore[misc]
        self._programs.remember(key, (program, concrete))
        return program, concrete

    def _check_declared(self, settled: Mapping[str, TensorType], actual: Mapping[str, TensorType]) -> None:
        """Given shapes against declared ones, before anything is compiled for them."""
        guards: Sequence[Any] = ()
        if not self.backend.capabilities.symbolic and not all(t.is_static for t in settled.values()):
            # What is compiled for exact sizes has no guards; sizes must fit nevertheless as on other backends.
            with suppress(MithrilError):  # a model that only exact sizes decide
                guards = self.compiler.probe(settled).guards
        check_shapes(guards, settled, {n: t.shape for n, t in actual.items()})  # type: ignore[misc]

    def _make(self, request: Request) -> Program:
        before = self._programs.made
        program = self._programs.make(request, self.compiler.specialise)
        self._types = self._types or dict(request.types)
        if before and self._programs.made > before:
            shapes = ", ".join(f"{n}: {t}" for n, t in request.types)
            what = "training" if request.kind.training else "inference"
            extra = " with gradients" if request.kind.of else ""
            self.decisions.record("specialised", f"program {self._programs.made} for {shapes} ({what}{extra})")
        return program

    def prepare(self, types: Mapping[str, TensorType]) -> None:
        """Make the inference program for these input types now, not at the first call."""
        self._make(Request(tuple(types.items()), Kind()))

    def _convert(self, name: str, x: Any, wanted: TensorType) -> Any:
        backend = self.backend
        if backend.is_array(x) and x.dtype == backend.native_dtype(wanted.dtype):
            return x
        if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray) and array_type(name, x).dtype is wanted.dtype:
            self.decisions.record("cast", f"input '{name}' comes as {type(x).__module__.split('.')[0]} array")
            return backend.array(x)
        rounds = self._rounds(wanted.dtype)
        if rounds and backend.is_array(x) and array_type(name, x).dtype.is_float:
            self.decisions.record("cast", f"input '{name}' is converted to {wanted.dtype}, the backend's precision")
            return backend.array(x, dtype=wanted.dtype)
        given = as_numpy(name, to_numpy(x) if hasattr(x, "dtype") else x)
        return backend.array(adapt(name, given, wanted.dtype, self.decisions, rounds=rounds))

    def _rounds(self, wanted: DType) -> bool:
        """Whether floats of any size become ``wanted``: the precision that was asked for."""
        return self.backend.precision is not None and wanted is self.backend.dtype

    def _is_native(self, arrays: Mapping[str, Any], inputs: Arrays) -> bool:
        return isinstance(inputs, Mapping) and all(arrays[name] is inputs.get(name) for name in arrays)

    # -- parameters and state ----------------------------------------------------------------------------------------
    def _check_params(self, program: Program, params: Arrays) -> Arrays:
        wanted = program.interface.params
        if not isinstance(params, Mapping):
            raise InputError(f"params must be a dictionary of arrays by name, got {type(params).__name__}")
        missing_or_unknown("parameter", wanted, params)
        out: dict[str, Any] = {}
        changed = False
        for name, t in wanted.items():
            x = params[name]
            shape = getattr(x, "shape", None)
            if shape is None or tuple(shape) != t.shape:
                raise InputError(
                    f"parameter '{name}' has shape {_shape(x)}, expected {list(t.shape)}",
                    facts=[f"expected {t}"],
                )
            out[name] = self._convert_param(name, x, t.dtype)
            changed = changed or out[name] is not x
        return out if changed else params

    def _convert_param(self, name: str, x: Any, wanted: DType) -> Any:
        backend = self.backend
        if backend.is_array(x) and x.dtype == backend.native_dtype(wanted):
            return x
        given = array_type(name, x).dtype
        if self._rounds(wanted) and given.is_float:
            self.decisions.record("cast", f"parameters given as {given} are converted to {wanted}")
            return backend.array(x, dtype=wanted)
        array = to_numpy(x)
        if given is not wanted:
            raise InputError(
                f"Type mismatch: expected {wanted}, got {given}",
                facts=[f"parameter '{name}', shape {list(array.shape)}"],
                hint=f"convert it, for example params['{name}'].astype('{wanted}')",
            )
        return backend.array(array)

    def _check_state(self, program: Program, state: Arrays | None) -> Arrays:
        wanted = program.interface.states
        if not wanted:
            return {}
        if state is None:
            if program.request.kind.training:
                self.decisions.record(
                    "assumed",
                    "training without state=: every call starts from the initial state (same dropout, old statistics)",
                )
            state = self.initial_state()
        missing = [n for n in wanted if n not in state]
        if missing:
            raise InputError(
                "the state does not fit the model",
                facts=[f"missing: {', '.join(missing[:8])}"],
                hint="start from compiled.initial_state() and pass on what evaluate returns",
            )
        return {name: self._convert_param(name, state[name], t.dtype) for name, t in wanted.items()}

    @checked()
    def initial_state(self, seed: int | None = None) -> dict[str, Any]:
        """The state to begin with: running statistics, random key."""
        if self._state is None or seed is not None:
            made = self._initialise("state", seed)
            if seed is not None:
                return made
            self._state = made
        return self._state

    @checked()
    def randomize_params(self, seed: int | None = None, inputs: Arrays | None = None) -> dict[str, Any]:
        """Fresh parameters from the portable generator: one seed gives the same numbers on every backend.

        ``inputs`` (sample arrays) are only needed where the parameters' shapes depend on inputs of unknown shape.
        """
        if inputs is not None and self._types is None:
            self._program(self._with_defaults(inputs, False), Kind())
            self._interface = None
        return self._initialise("param", seed)

    def _initialise(self, role: str, seed: int | None) -> dict[str, Any]:
        self.backend.check_fork()
        start = self.options.get("seed", 0) if seed is None else seed
        made = self.compiler.initial(self.interface.with_role(role), start)
        return {name: self.backend.array(array) for name, array in made.items()}

    @checked()
    def bind(self, params: Arrays, state: Arrays | None = None) -> CompiledModel:
        """Keep these parameters, so that ``compiled(inputs)`` needs none. Returns the model.

        Where parameters' shapes follow from inputs of unknown shape, the first call checks them.
        """
        try:
            wanted = self._param_types()
        except ShapeError:
            if self.options.get("static_inference"):
                raise
            self._bound = self._given = dict(params)
        else:
            self._keep(wanted, params)
        if state is not None:
            self._state = dict(state)
        if self.options.get("static_inference"):
            self._bake(wanted, params)
        self._quick, self._fast_gradients = never, None
        return self

    def _keep(self, wanted: Mapping[str, TensorType], params: Arrays) -> None:
        missing_or_unknown("parameter", wanted, params)
        self._bound = self._given = {
            name: self._convert_param(name, x, wanted[name].dtype) if self._rounds(wanted[name].dtype) else x
            for name, x in params.items()
        }

    def _bake(self, wanted: Mapping[str, TensorType], params: Arrays) -> None:
        """From now on, calls without parameters run programs that have these, and the state, inside."""
        for name, t in wanted.items():
            shape = tuple(getattr(params[name], "shape", ()))
            if shape != t.shape:
                raise InputError(f"parameter '{name}' has shape {list(shape)}, expected {list(t.shape)}")
        self._binding += 1
        self._given = {}
        kept = self.initial_state() if self.interface.with_role("state") else {}
        self._baked = {n: to_numpy(x) for n, x in (*params.items(), *kept.items())}
        self._programs.drop_bound()

    @property
    def params(self) -> dict[str, Any] | None:
        """The bound parameters."""
        return self._bound

    def _param_types(self) -> dict[str, TensorType]:
        return {i.name: i.type for i in self.interface.with_role("param")}

    @property
    def interface(self) -> Graph:
        """The graph as traced, before any pass: names, roles and types of everything.

        It is the training graph wherever there is one, because only that knows every state, the random key among them.
        """
        if self._interface is None:
            self._interface = self.compiler.probe(self._types)
        return self._interface

    # -- gradients ---------------------------------------------------------------------------------------------------
    def _cotangent_names(self, cotangents: Any, given: Mapping[str, Any], training: bool) -> tuple[str, ...]:
        if cotangents is None:
            return ()
        if isinstance(cotangents, str):
            names = [cotangents]
        elif isinstance(cotangents, Mapping):
            names = list(cotangents)
        else:
            outputs = self._output_names(given, training)
            if len(outputs) != 1:
                raise InputError(
                    "output_gradients must say which output each belongs to",
                    facts=[f"outputs: {', '.join(outputs)}"],
                    hint="output_gradients={'" + outputs[0] + "': g}",
                )
            return tuple(outputs)
        known = self._output_names(given, training)
        for name in names:
            if name not in known:
                what, facts, hint = unknown("output", name, known)
                raise InputError(what, facts=facts, hint=hint)
        return tuple(names)

    def _output_names(self, given: Mapping[str, Any], training: bool) -> list[str]:
        if self._types is None:
            self._program(given, Kind(training))
        return [r.name for r in self.interface.results if r.role != "state"]

    def _cotangents(
        self, program: Program, given: Any, of: tuple[str, ...], arrays: Mapping[str, Any]
    ) -> dict[str, Any]:
        sizes = check_shapes(program.interface.guards, program.types, {n: tuple(a.shape) for n, a in arrays.items()})
        types = program.interface.outputs
        out = {}
        for name in of:
            expected = types[name]
            shape = _concrete(expected, sizes)
            if isinstance(given, str) or (isinstance(given, Mapping) and isinstance(given[name], (int, float))):
                scale = 1.0 if isinstance(given, str) else float(given[name])
                if shape != ():
                    raise InputError(
                        f"output '{name}' is no scalar, so its gradient needs an array",
                        facts=[f"shape {list(shape)}"],
                        hint=f"output_gradients={{'{name}': array of that shape}}",
                    )
                out[cotangent_name(name)] = self.backend.array(np.full(shape, scale, expected.dtype.numpy))
                continue
            x = given[name] if isinstance(given, Mapping) else given
            found = array_type(f"output_gradients['{name}']", x)
            if found.shape != shape:
                raise InputError(
                    f"the gradient of output '{name}' has shape {list(found.shape)}, expected {list(shape)}",
                )
            out[cotangent_name(name)] = self._convert(f"output_gradients['{name}']", x, expected)
        return out

    # -- what is known -----------------------------------------------------------------------------------------------
    @property
    def programs(self) -> tuple[Program, ...]:
        """The specialisations made so far, without those that were evicted."""
        return tuple(self._programs)

    @property
    def specs(self) -> Mapping[str, InputSpec]:
        """What was known of each input before the first call."""
        return self._specs

    @property
    def graph(self) -> Graph:
        """The newest program's graph after the passes; before the first specialisation the traced one."""
        return self.programs[-1].graph if self._programs else self.interface

    @property
    def pipeline(self) -> PassManager:
        """The passes that programs go through; print it."""
        return self.compiler.pipeline()[0]

    @property
    def source(self) -> str | None:
        """The newest program's generated source, where the backend generates one."""
        return self.programs[-1].executable.source if self._programs else None

    def get_shapes(self) -> dict[str, list[Any]]:
        """Shape of every named tensor: inputs, parameters, state, inner results, outputs; unknown sizes are dims."""
        return {name: list(t.shape) for name, t in self._named().items()}

    def get_types(self) -> dict[str, DType]:
        """Dtype of every named tensor."""
        return {name: t.dtype for name, t in self._named().items()}

    def _named(self) -> dict[str, TensorType]:
        """Inputs, what the user named inside, outputs; names that operations gave themselves are left out."""
        graph = self.interface
        found = {i.name: i.type for i in graph.arguments}
        for node in graph.nodes:
            stem = node.op.name.rpartition(".")[2]
            found.update((v.name, v.type) for v in node.results if v.name.rstrip("0123456789_") != stem)
        found.update((r.name, r.type) for r in graph.results if r.role != "state")
        return found

    def __getattr__(self, name: str) -> Any:
        """Methods that plugins add: ``Export(name, loads, on="CompiledModel")``."""
        return partial(plugins.extension("CompiledModel", name), self)

    @checked()
    def memory_report(
        self, inputs: Arrays | Mapping[str, Collection[int]] | None = None, *, gradients: bool | None = None
    ) -> MemoryReport:
        """Bytes per layer and at the peak, of the newest program; ``gradients`` asks for that with, or without, them.

        ``inputs`` (arrays or shapes) fix unknown sizes; without, those of the last call do.
        """
        from mithril.runtime.memory_report import memory_report

        return memory_report(self, inputs, gradients=gradients)

    def program_for(self, gradients: bool) -> Program | None:
        """Return the newest program with gradients or without, and compile it where input types are known."""
        known = [p for p in self.programs if bool(p.request.kind.of) is gradients]
        if known or not self.programs:
            return known[-1] if known else None
        newest = self.programs[-1].request
        of = tuple(n for n, t in self.programs[-1].interface.outputs.items() if t.dtype.is_float)
        return self._make(Request(newest.types, Kind(True, of) if gradients else Kind()))

    @property
    def last_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs of the newest kind of call."""
        types = self._programs.newest_types()
        return {name: t.shape for name, t in types.items()}  # type: ignore[misc]

    @checked()
    def capture(
        self,
        params: Arrays | None,
        inputs: Arrays,
        names: Collection[str] | None = None,
        *,
        state: Arrays | None = None,
        training: bool = False,
    ) -> dict[str, Any]:
        """Values inside the model at run time, by name; all that have names of their own, unless ``names`` says which.

        With ``save_intermediates=True`` and ``intermediate_dir`` they are also written there as safetensors.
        """
        from mithril.runtime.capture import capture

        return capture(self, params, inputs, names, state=state, training=training)

    def concrete(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
        """The graph that a program runs, with the sizes that its inputs have."""
        graph: Graph = program.executable.graph
        static = all(v.type.is_static for node in graph.nodes for v in node.results)
        if static and all(shapes.get(name, t.shape) == t.shape for name, t in program.request.types):
            return graph
        types = tuple((name, TensorType(t.dtype, shapes.get(name, t.shape))) for name, t in program.request.types)
        return self.compiler.lowered(replace(program.request, types=types))

    def explain(self) -> str:
        """What was decided on the user's behalf, and what the passes did."""
        parts = [str(self.decisions)]
        for program in self.programs:
            types, kind = ", ".join(f"{n}: {t}" for n, t in program.request.types), program.request.kind
            what = f", gradients of {', '.join(kind.of)}" if kind.of else ", training" if kind.training else ""
            title = f"program for {types}{what}"
            parts.append(f"{title}:\n{program.report}" if program.report is not None else title)
        return "\n\n".join(parts)

    def summary(self) -> str:
        """A table of the parameters and programs."""
        from mithril.runtime.program_summary import summarise

        return summarise(self)

    def __repr__(self) -> str:
        return f"<CompiledModel '{self.name}' on {self.backend.name}: {len(self._programs)} programs>"

    # -- weights -----------------------------------------------------------------------------------------------------
    @checked()
    def save(self, path: str | os.PathLike[str], params: Arrays | None = None, state: Arrays | None = None) -> None:
        """Write parameters (the bound ones if none are given) and state as safetensors."""
        chosen = params if params is not None else self._bound
        if chosen is None:
            raise InputError("there are no parameters to save", hint="save(path, params), or bind(params) before")
        missing_or_unknown("parameter", self._param_types(), chosen)
        tensors = {name: self.backend.to_numpy(x) for name, x in chosen.items()}
        kept = state if state is not None else self._state
        for name, x in (kept or {}).items():
            tensors[name] = self.backend.to_numpy(x)
        weight_files.save_file(tensors, path, {"format": "mithril", "states": json.dumps(sorted(kept or {}))})

    @checked()
    def export(self, path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Any:
        """Write the model with its parameters for use without this process: ``model.gguf``, a folder of C, ...

        The format is told by the suffix or named; ``options`` are its own. `mithril plugins` lists formats.
        """
        from mithril.runtime.model_files import export

        return export(self, path, format=format, **options)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> CompiledModel:
        """Read what ``save`` wrote and bind it. Everything must fit."""
        tensors = weight_files.load_file(path)
        states = {i.name: i.type for i in self.interface.with_role("state")}
        saved = weight_files.saved_states(path)  # a model for inference has less state than the one that was trained
        read = {n: t for n, t in tensors.items() if n not in saved or n in states}
        params, report = weight_files.match(self._param_types(), {n: t for n, t in read.items() if n not in states})
        states_loaded, state_report = weight_files.match({n: t for n, t in states.items() if n in tensors}, tensors)
        report.mismatched += state_report.mismatched
        if not report.complete:
            raise _unfit(f"'{os.fspath(path)}'", report, "safetensors.numpy.load_file(path)")
        array = self.backend.array
        state = {**self.initial_state(), **{n: array(a) for n, a in states_loaded.items()}} if states else None
        return self.bind({n: array(a) for n, a in params.items()}, state)

    @checked()
    def load_state_dict(self, tensors: Arrays, *, strict: bool = True) -> weight_files.LoadReport:
        """Bind tensors of another framework's state dictionary by name and return a report.

        Every parameter must be there, and every tensor must belong to the model. With ``strict=False`` parameters
        that are missing keep their bound or fresh values, and other tensors are left out.
        """
        wanted = self._param_types()
        states = {i.name: i.type for i in self.interface.with_role("state")}
        found, report = weight_files.match({**wanted, **{n: t for n, t in states.items() if n in tensors}}, tensors)
        if strict and not report.complete:
            raise _unfit("the state dictionary", report, "tensors")
        base = self._bound if self._bound is not None else self.randomize_params()
        array = self.backend.array
        params = {n: array(found[n]) if n in found else base[n] for n in wanted}
        state = {**self.initial_state(), **{n: array(found[n]) for n in states if n in found}} if states else None
        self.bind(params, state)
        return report


def _unfit(subject: str, report: weight_files.LoadReport, tensors: str) -> InputError:
    return InputError(
        f"{subject} does not fit this model",
        facts=str(report).splitlines(),
        hint=f"rename or remove tensors, or compiled.load_state_dict({tensors}, strict=False) for those that fit",
    )


def _shape(x: Any) -> list[int] | str:
    shape = getattr(x, "shape", None)
    return list(shape) if shape is not None else f"none: it is a {type(x).__name__}"


def _concrete(t: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    from mithril.base import substitute

    return tuple(int(substitute(d, sizes)) for d in t.shape)
