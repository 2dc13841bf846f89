"""Checked calls: defaults, types, conversions and cotangents of the arguments, and the program to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from mithril.backend import Backend, ExactSizesRequired, check_readable, is_sparse, to_numpy
from mithril.compiler.batch_buckets import BucketedExecutable
from mithril.compiler.call_records import CallRecords, Record
from mithril.compiler.parameters import Bound, Parameters
from mithril.compiler.program import Compiler, Program, ProgramKey, ProgramKind
from mithril.compiler.signature import (
    InputSpec,
    array_type,
    as_numpy,
    check_shapes,
    convert_input,
    known_types,
    missing_or_unknown,
    resolve_type,
)
from mithril.compiler.sparse_inputs import check_sparse, padded_parts, stored_elements
from mithril.compiler.unused_parts import unused_inputs
from mithril.compiler.watching import Watched, Watcher, measured, watchers
from mithril.graph import (
    Decisions,
    GuardError,
    InputError,
    MithrilError,
    ModelError,
    ShapeError,
    Size,
    TensorType,
    bind,
    cotangent_name,
    int32,
    substitute,
    symbols,
    unknown,
)

Arrays = Mapping[str, Any]


class Evaluation:
    """The checked calls of one model; ``calls`` records them for repetition."""

    def __init__(
        self,
        model: Watched,
        specs: Mapping[str, InputSpec],
        compiler: Compiler,
        parameters: Parameters,
        calls: CallRecords,
        decisions: Decisions,
        watching: tuple[Watcher, ...],
        *,
        inference: bool,
    ) -> None:
        self.model = model
        self.backend: Backend = model.backend
        self.specs = specs
        self.compiler = compiler
        self.parameters = parameters
        self.calls = calls
        self.decisions = decisions
        self.watching = watching
        self.inference = inference
        declared = [name for name, spec in specs.items() if spec.sparse]
        self.sparse = frozenset(declared if declared and self.backend.multiplies_sparse else ())
        self.reads: dict[tuple[Any, ...], bool] = {}  # training flag and missing inputs -> whether a result reads one
        self.exact: set[ProgramKey] = set()  # requests of symbolic sizes that the backend compiles for each size

    # -- one call ----------------------------------------------------------------------------------------------------
    def evaluate(
        self,
        params: Arrays,
        inputs: Arrays,
        cotangents: Any,
        state: Arrays | None,
        training: bool | None,
        wrt: Collection[str] | None,
        bound: Bound | None,
    ) -> Any:
        """Check a call, convert its arguments, run it, and record it for repetition if possible."""
        self.backend.check_fork()
        train = bool(cotangents is not None if training is None else training)
        if train and self.inference:
            raise InputError("this model was compiled with inference=True: it has no training mode and no gradients")
        actual = self.with_defaults(inputs, train, params)
        differentiated = self._cotangent_names(cotangents, actual, train)
        if wrt is not None and not differentiated:
            raise InputError("wrt= requires output_gradients=", hint="pass output_gradients={'output': array}")
        for name in wrt or ():
            if name in self.specs and self.specs[name].sparse:
                raise InputError(f"sparse input '{name}' has no gradient", hint="declare a dense input")
        kind = ProgramKind(train, differentiated, None if wrt is None or not differentiated else tuple(wrt))
        program, arrays, checked, arguments = self.prepared(actual, params, state, kind, bound)
        if differentiated:
            shapes = {n: tuple((actual if n in self.sparse else arrays)[n].shape) for n in program.types}
            arguments.update(self._cotangents(program, cotangents, differentiated, shapes))
        # The program overwrites states that it updates in place, and the caller keeps its arrays.
        arguments.update({n: self.backend.copied(arguments[n]) for n in program.interface.donated})
        results = self._run(program, checked, arguments)
        # A repeated call skips checks and conversions, so that only calls whose arguments needed none
        # are recorded.
        plain = state is None and not program.interface.states and not self.watching
        if plain and checked is params and isinstance(params, dict) and _are_same(arrays, inputs):
            if not differentiated and not train:
                self.calls.remember_call(program, params, arrays)
            elif differentiated and isinstance(cotangents, Mapping) and (wrt is None or isinstance(wrt, tuple)):
                unchanged = all(arguments[cotangent_name(n)] is cotangents[n] for n in differentiated)
                if unchanged:
                    self.calls.keep_gradients(program, params, arrays, cotangents, training, wrt)
        return _split(results, differentiated, state, program)

    def advance(self, params: Arrays, inputs: Arrays, state: dict[str, Any], bound: Bound | None) -> dict[str, Any]:
        """Run once for a runner, replacing its state: the program overwrites arrays that it updates in place."""
        self.backend.check_fork()
        actual = self.with_defaults(inputs, False, params)
        program, arrays, checked, arguments = self.prepared(actual, params, state, ProgramKind(), bound)
        names, unchanged = program.results, dict(state)
        if program.early is None:
            arguments.update({n: self.backend.copied(arguments[n]) for n in program.interface.donated})
        else:
            program.early.raise_if_violated({**state, **arrays}, self.backend.to_numpy)
            for name in program.interface.donated:
                # A failed run leaves no array that it may have overwritten.
                del unchanged[name], state[name]
        results = self._run(program, checked, arguments)
        state.update({**unchanged, **{owner: results[n] for owner, n in names.states}})
        return {n: results[n] for n in names.outputs}

    def prepared(
        self, arguments: Arrays, params: Arrays, state: Arrays | None, kind: ProgramKind, bound: Bound | None = None
    ) -> tuple[Program, dict[str, Any], Arrays, dict[str, Any]]:
        """Return the program for a call, its inputs as the backend's arrays, its parameters, its other arguments."""
        if bound is not None and bound.arrays is not None and state is not None:
            statistics = bound.arrays.statistics
            if any(state.get(name) is not x for name, x in statistics.items()):
                bound = None  # the statistics are those of the call
        try:
            record = self.program(arguments, kind, bound)
        except ModelError:
            with self.parameters.learning(params) as learned:
                if not learned:
                    raise
                return self._checked(self.program(arguments, kind, bound), arguments, params, state)
        return self._checked(record, arguments, params, state)

    def _checked(
        self, record: Record, arguments: Arrays, params: Arrays, state: Arrays | None
    ) -> tuple[Program, dict[str, Any], Arrays, dict[str, Any]]:
        """Return a program with the converted arguments of a call."""
        program, types = record
        arrays = {n: self._convert(n, arguments[n], t) for n, t in types.items() if n not in self.sparse}
        for name, count in program.request.stored:
            for part, x in padded_parts(arguments[name], count).items():
                dtype = types[name].dtype if part == "values" else int32
                arrays[f"{name}.{part}"] = self._convert(f"{name}.{part}", x, TensorType(dtype, x.shape))
        checked = self.parameters.checked(program, params)
        return program, arrays, checked, {**arrays, **self.parameters.checked_state(program, state, types)}

    def _run(self, program: Program, params: Arrays, inputs: Arrays) -> Mapping[str, Any]:
        watching = (*watchers.get(), *self.watching)
        if not watching:
            results: Mapping[str, Any] = program.call(params, inputs)
            return results
        if program.weights is not None:
            params = program.weights
        buckets = program.bucketed.buckets if program.bucketed is not None else None
        filled = inputs if buckets is None else buckets.pad_batch(self.backend, inputs)
        results = measured(self.model, program, params, filled, watching)
        if program.checked is not None:
            results = program.checked.without_check_outputs(results, filled)
        return results if buckets is None else buckets.trim_batch(self.backend, results, buckets.rows(inputs))

    # -- inputs ------------------------------------------------------------------------------------------------------
    def with_defaults(self, inputs: Arrays, training: bool, params: Arrays | None = None) -> dict[str, Any]:
        """Return the inputs by name, including the training flag if the model has one."""
        if not isinstance(inputs, Mapping):
            if len(self.specs) == 1:
                return {next(iter(self.specs)): inputs}
            raise InputError(
                "inputs must be a dictionary of arrays by name",
                facts=[f"expected: {', '.join(self.specs)}", f"got: {type(inputs).__name__}"],
            )
        arguments = dict(inputs)
        for name in self.compiler.unused.inputs:
            if arguments.pop(name, None) is not None:
                self.decisions.record("choice", f"input '{name}' is ignored: no output depends on it")
        if "is_training" in self.specs:
            arguments.setdefault("is_training", np.asarray(training))
        missing = [n for n, s in self.specs.items() if s.required and n not in arguments]
        if missing and self.specs.keys() >= arguments.keys():
            arguments.update(self._unread(missing, arguments, training))
        expected = {n: s for n, s in self.specs.items() if s.required or n in arguments}
        missing_or_unknown("input", expected, arguments, params)
        return {name: self._readable(name, spec, arguments[name]) for name, spec in expected.items()}

    def _unread(self, missing: Sequence[str], arguments: Arrays, training: bool) -> dict[str, Any]:
        """Return arrays of the declared shapes for missing inputs that no result depends on, else nothing.

        Layers take sizes from such an input, so that programs have it, even if only unselected results read it.
        """
        missing_types = known_types({name: self.specs[name] for name in missing}, self.backend.dtype)
        if missing_types is None:
            return {}
        if (reads := self.reads.get((training, *missing))) is None:
            passed_types = {
                n: resolve_type(self.specs[n], array_type(n, x), self.backend.dtype) for n, x in arguments.items()
            }
            try:
                unread = unused_inputs(
                    self.compiler.probe({**passed_types, **missing_types}, training=training), "input"
                )
            except MithrilError:
                unread = ()  # the message about missing inputs is the better one
            reads = self.reads[training, *missing] = not {*missing} <= {*unread}
            if not reads:
                names = ", ".join(f"'{name}'" for name in missing)
                self.decisions.record("choice", f"these inputs are optional: no output depends on them: {names}")
        if reads:
            return {}
        declared = {n: s for n in arguments if (s := self.specs[n].shape) is not None}
        sizes: dict[str, Size] = {s.name: max(s.low, 1) for t in missing_types.values() for s in symbols(*t.shape)}
        with suppress(GuardError):  # the check of the call has the full message
            sizes |= bind(declared, {n: array_type(n, arguments[n]).shape for n in declared})  # type: ignore[misc]
        return {
            name: np.zeros([int(substitute(n, sizes)) for n in t.shape], t.dtype.numpy)
            for name, t in missing_types.items()
        }

    def _readable(self, name: str, spec: InputSpec, x: Any) -> Any:
        """Check that an array is sparse as declared; where the backend has no products of such arrays, decode it."""
        if spec.sparse is None and not is_sparse(x):
            return x
        check_sparse(name, x, spec.sparse)
        if name in self.sparse:
            return x
        message = f"sparse input '{name}' is decoded: backend '{self.backend.name}' has no products of stored elements"
        self.decisions.record("downgrade", message)
        return x.toarray()

    def needs_params(self, inputs: Any) -> bool:
        """Whether the model has parameters, if necessary for the shapes of these inputs."""
        try:
            return bool(self.parameters.types)
        # Only shapes of inputs tell those of the parameters, or that there are none.
        except ShapeError:
            arguments = self.with_defaults({} if inputs is None else inputs, False)
            types = {n: resolve_type(self.specs[n], array_type(n, x), self.backend.dtype) for n, x in arguments.items()}
            return bool(self.compiler.probe(types).with_role("param"))

    def exact_types(self, inputs: Any) -> dict[str, TensorType]:
        """Return the types that these inputs are converted to, with their sizes."""
        actual = {n: array_type(n, x) for n, x in self.with_defaults(inputs, False).items()}
        resolved = {n: resolve_type(self.specs[n], t, self.backend.dtype) for n, t in actual.items()}
        self._check_declared(resolved, actual)
        return {n: TensorType(t.dtype, actual[n].shape) for n, t in resolved.items()}

    def program(
        self, arguments: Mapping[str, Any], kind: ProgramKind, bound: Bound | None = None
    ) -> tuple[Program, dict[str, TensorType]]:
        """Return the program for these inputs, and the exact types that they are converted to."""
        actual = {name: array_type(name, x) for name, x in arguments.items()}
        binding = bound.number if bound is not None else 0
        stored = tuple((name, stored_elements(arguments[name])) for name in self.sparse if name in arguments)
        key = (tuple(actual.values()), kind, binding, stored)
        cached = self.calls.call(key)
        if cached is not None:
            return cached
        resolved, concrete = self.types(actual)
        request = self.request(resolved, kind, bound, stored)
        symbolic = self.runs_any_size(request)
        recompiles = not symbolic or self.backend.capabilities.recompiles
        is_padded = not kind.of and not stored
        buckets = self.compiler.buckets(kind.training, recompiles=recompiles) if is_padded else None
        types = resolved if symbolic else concrete if buckets is None else buckets.rounded(concrete)
        program = self.program_for(self.request(types, kind, bound, stored))
        runs = program.checked or program.executable
        program.bucketed = None if buckets is None else BucketedExecutable(runs, buckets, self.backend)
        if symbolic:
            check_shapes(program.interface.guards, types, {n: t.shape for n, t in actual.items()})  # type: ignore[misc]
        self.compiler.check_call(program, {n: t.shape for n, t in concrete.items()})  # type: ignore[misc]
        self.calls.remember(key, (program, concrete))
        return program, concrete

    def request(
        self,
        types: Mapping[str, TensorType],
        kind: ProgramKind,
        bound: Bound | None,
        stored: tuple[tuple[str, int], ...] = (),
    ) -> ProgramKey:
        """Return the key of the program, with the binding if its parameters belong to the program."""
        request = ProgramKey(tuple(types.items()), kind, stored=stored)
        if bound is None or not bound.number:
            return request
        of_binding = replace(request, binding=bound.number, constants=bound.constants, bound=bound.arrays)
        return of_binding if of_binding.embeds or self.compiler.folds(of_binding) else request

    def prepare(self, request: ProgramKey) -> None:
        """Compile a program before the first call, if its sizes suffice."""
        if not self.runs_any_size(request) and all(t.is_static for _, t in request.types):
            self.program_for(request)

    def runs_any_size(self, request: ProgramKey) -> bool:
        """Whether the types of a request get one program, not one for each size; it is compiled on the way."""
        if not self.backend.capabilities.symbolic or request in self.exact:
            return False
        try:
            self.program_for(request)
        except ExactSizesRequired as reason:
            self.exact.add(request)
            types = ", ".join(f"{n}: {t}" for n, t in request.types)
            self.decisions.record("fallback", f"one program for each size of {types}: {reason.what}")
            return False
        return True

    def types(self, actual: Mapping[str, TensorType]) -> tuple[dict[str, TensorType], dict[str, TensorType]]:
        """Return the types that inputs of these types are converted to: with declared symbols, and at their sizes."""
        resolved = {name: resolve_type(self.specs[name], t, self.backend.dtype) for name, t in actual.items()}
        self._check_declared(resolved, actual)
        return resolved, {n: TensorType(t.dtype, actual[n].shape) for n, t in resolved.items()}

    def _check_declared(self, resolved: Mapping[str, TensorType], actual: Mapping[str, TensorType]) -> None:
        """Check shapes of the call against declared shapes before compiling."""
        guards: Sequence[Any] = ()
        if not self.backend.capabilities.symbolic and not all(t.is_static for t in resolved.values()):
            # Programs for exact sizes have no guards; the same sizes must be rejected as on other backends.
            with suppress(MithrilError):  # a model that requires exact sizes
                guards = self.compiler.probe(resolved).guards
        check_shapes(guards, resolved, {n: t.shape for n, t in actual.items()})  # type: ignore[misc]

    def program_for(self, request: ProgramKey) -> Program:
        """Return the program for a request, compiled on first use."""
        before = self.calls.num_programs
        program = self.calls.make(request, self.compiler.specialize)
        if self.parameters.input_types is None:
            self.parameters.input_types = dict(request.types)
        if before and self.calls.num_programs > before:
            counts = [f"up to {count} elements of '{n}'" for n, count in request.stored]
            shapes = ", ".join([*(f"{n}: {t}" for n, t in request.types), *counts])
            mode = "training" if request.kind.training else "inference"
            extra = " with gradients" if request.kind.of else ""
            self.decisions.record("specialized", f"program {self.calls.num_programs} for {shapes} ({mode}{extra})")
        return program

    def _convert(self, name: str, x: Any, expected: TensorType) -> Any:
        backend = self.backend
        if backend.is_array(x) and x.dtype == backend.native_dtype(expected.dtype):
            return x
        check_readable(x, f"input '{name}'")
        if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray) and array_type(name, x).dtype is expected.dtype:
            self.decisions.record(
                "cast", f"input '{name}' is converted from a {type(x).__module__.split('.')[0]} array"
            )
            return backend.array(x)
        # Data rarely comes in 16 bits: who asks for them, by precision= or types=, wants it converted.
        is_half = expected.dtype.is_float and expected.dtype.bits == 16
        rounds = is_half or self.parameters.rounds(expected.dtype)
        if rounds and backend.is_array(x) and array_type(name, x).dtype.is_float:
            self.decisions.record("cast", f"input '{name}' is converted to {expected.dtype}")
            return backend.array(x, dtype=expected.dtype)
        array = as_numpy(name, to_numpy(x, f"input '{name}'") if hasattr(x, "dtype") else x)
        return backend.array(convert_input(name, array, expected.dtype, self.decisions, rounds=rounds))

    # -- gradients ---------------------------------------------------------------------------------------------------
    def _cotangent_names(self, cotangents: Any, arguments: Mapping[str, Any], training: bool) -> tuple[str, ...]:
        if cotangents is None:
            return ()
        if isinstance(cotangents, str):
            names = [cotangents]
        elif isinstance(cotangents, Mapping):
            names = list(cotangents)
        else:
            outputs = self._output_names(arguments, training)
            if len(outputs) != 1:
                raise InputError(
                    "output_gradients requires the name of the output",
                    facts=[f"outputs: {', '.join(outputs)}"],
                    hint="output_gradients={'" + outputs[0] + "': g}",
                )
            return tuple(outputs)
        output_names = self._output_names(arguments, training)
        for name in names:
            if name not in output_names:
                message, facts, hint = unknown("output", name, output_names)
                raise InputError(message, facts=facts, hint=hint)
        return tuple(names)

    def _output_names(self, arguments: Mapping[str, Any], training: bool) -> list[str]:
        if self.parameters.input_types is None:
            self.program(arguments, ProgramKind(training))
        return [r.name for r in self.parameters.interface.results if r.role != "state"]

    def _cotangents(
        self,
        program: Program,
        cotangents: Any,
        differentiated: tuple[str, ...],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, Any]:
        sizes = check_shapes(program.interface.guards, program.types, shapes)
        types = program.interface.outputs
        out = {}
        for name in differentiated:
            expected = types[name]
            shape = tuple(int(substitute(d, sizes)) for d in expected.shape)
            if isinstance(cotangents, str) or (
                isinstance(cotangents, Mapping) and isinstance(cotangents[name], (int, float))
            ):
                scale = 1.0 if isinstance(cotangents, str) else float(cotangents[name])
                if shape != ():
                    raise InputError(
                        f"output '{name}' is not a scalar, so its gradient must be an array",
                        facts=[f"shape {list(shape)}"],
                        hint=f"output_gradients={{'{name}': array of that shape}}",
                    )
                out[cotangent_name(name)] = self.backend.array(np.full(shape, scale, expected.dtype.numpy))
                continue
            x = cotangents[name] if isinstance(cotangents, Mapping) else cotangents
            actual = array_type(f"output_gradients['{name}']", x)
            if actual.shape != shape:
                raise InputError(
                    f"the gradient of output '{name}' has shape {list(actual.shape)}, expected {list(shape)}",
                )
            out[cotangent_name(name)] = self._convert(f"output_gradients['{name}']", x, expected)
        return out


def _are_same(arrays: Mapping[str, Any], inputs: Arrays) -> bool:
    """Whether all inputs are unchanged and none was added."""
    return isinstance(inputs, Mapping) and all(x is inputs.get(name) for name, x in arrays.items())


def _split(results: Mapping[str, Any], differentiated: tuple[str, ...], state: Arrays | None, program: Program) -> Any:
    """Return the outputs and, if requested, gradients and new state."""
    names = program.results
    if state is None and names.only_outputs:
        return results
    parts: list[Any] = [{n: results[n] for n in names.outputs}]  # in order, which not every backend preserves
    if differentiated:
        parts.append({owner: results[n] for owner, n in names.gradients})
    if state is not None:
        parts.append({**state, **{owner: results[n] for owner, n in names.states}})
    return parts[0] if len(parts) == 1 else tuple(parts)
