"""Parameters and state of a compiled model: check, bind, embed in programs, save, load."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from mithril.backend import ALIGNMENT, Backend, EncodedWeight, PairWeight, SparseWeight, to_numpy
from mithril.compiler import weight_files
from mithril.compiler.bound_weights import folds_parameters
from mithril.compiler.call_records import CallRecords
from mithril.compiler.program import BoundArrays, Compiler, Program, are_entries
from mithril.compiler.signature import array_type, missing_or_unknown
from mithril.graph import (
    Decisions,
    DType,
    Graph,
    Input,
    InputError,
    MithrilError,
    ModelError,
    OptionError,
    ShapeError,
    TensorType,
)
from mithril.system import Store


def moved_to_file(params: MutableMapping[str, Any], folder: str | None) -> dict[str, np.ndarray[Any, Any]]:
    """Move arrays out of a mapping to a file without a name, and return them as read-only views of it."""
    target = Store(folder).folder
    places: dict[str, tuple[int, Any, tuple[int, ...]]] = {}
    size = 0
    for name in params:
        array = to_numpy(params[name])
        places[name] = size, array.dtype, array.shape
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as file:
            _reserve(file, target, max(size, 1))  # an empty file cannot be mapped
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for name, (start, _, _) in places.items():
                file.seek(start)
                file.write(np.asarray(to_numpy(params[name]), order="C").reshape(-1).view(np.uint8).data)
                del params[name]
    except OSError as error:
        raise OptionError(
            f"release=True cannot store weights in '{target}': {error.strerror or error}",
            hint="pass cache_dir= with a folder that has enough space",
        ) from None
    return {
        name: np.frombuffer(view, dtype, int(np.prod(shape)), start).reshape(shape)
        for name, (start, dtype, shape) in places.items()
    }


def _reserve(file: IO[bytes], folder: Path, size: int) -> None:
    """Give a file its size and its space, so that a full disk is noticed before the first array is deleted."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    elif shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        file.truncate(size)


Arrays = Mapping[str, Any]
UNKNOWN: dict[str, Any] = {}  # parameters of a call without bound parameters
UNBOUND = "evaluate(params, inputs), or compiled.bind(params) once and then evaluate(inputs)"


@dataclass(frozen=True, eq=False)
class Bound:
    """The arguments of ``bind``. Immutable and replaced atomically, so that a call uses a single binding."""

    values: dict[str, Any]
    passed: dict[str, Any]  # parameters to pass to programs, without embedded ones
    number: int = 0  # counter of bindings whose parameters belong to programs
    constants: Mapping[str, Any] = field(default_factory=dict)  # parameters and statistics to embed, as NumPy arrays
    arrays: BoundArrays | None = None  # parameters and statistics whose expressions are computed in advance


class Parameters:
    """The parameters and the state of one model."""

    def __init__(
        self, backend: Backend, source: Compiler, calls: CallRecords, decisions: Decisions, options: Mapping[str, Any]
    ) -> None:
        self.backend = backend
        self.source = source
        self.calls = calls
        self.decisions = decisions
        self.seed: int = options["seed"]
        self.static = options["static_inference"]
        self.folds = folds_parameters(backend, options, decisions)
        self.reads_quantized = self.static and not options["backend_map"]
        self.folder: str | None = options["cache_dir"]
        self.bound: Bound | None = None
        self.passed: Arrays = UNKNOWN  # those of `bound`, which repeated calls read at once
        self.state: dict[str, Any] | None = None
        self.is_state_bound = False  # whether the user passed it
        self.input_types: dict[str, TensorType] | None = None  # of the first program
        self._interface: Graph | None = None

    # -- names and types ---------------------------------------------------------------------------------------------
    @property
    def interface(self) -> Graph:
        """The traced graph; the training graph if there is one, because only that graph has all states."""
        if self._interface is None:
            self._interface = self.source.probe(self.input_types)
        return self._interface

    def refresh_interface(self) -> None:
        """Discard the interface, as the types of inputs are now known."""
        self._interface = None

    def _learn(self, arrays: Arrays) -> bool:
        """Let layers take sizes that are unknown so far from parameters; return whether they may do so."""
        if self._interface is not None or self.input_types is not None or not isinstance(arrays, Mapping):
            return False
        try:
            # False: where a size is unknown, the property raises an error.
            return self.interface is None
        except (ModelError, ShapeError):
            return self.source.learn({n: tuple(x.shape) for n, x in arrays.items() if hasattr(x, "shape")})

    @contextmanager
    def learning(self, arrays: Arrays) -> Iterator[bool]:
        """Within this context layers take unknown sizes from the arrays, and afterwards, too, unless it fails.

        The value is False if they take none.
        """
        learned = self._learn(arrays)
        try:
            yield learned
        except MithrilError as error:
            if learned:
                self.source.learn({})
                self.refresh_interface()
                self.input_types = None
                self.calls.clear()
            if learned and isinstance(error, (ModelError, ShapeError)):
                raise error.with_facts(f"tensors: {', '.join(map(str, [*arrays][:8]))}") from None
            raise

    @property
    def types(self) -> dict[str, TensorType]:
        return {i.name: i.type for i in self.interface.with_role("param")}

    @property
    def state_types(self) -> dict[str, TensorType]:
        return {i.name: i.type for i in self.interface.with_role("state")}

    @property
    def statistics(self) -> dict[str, TensorType]:
        """The states that results outside of training depend on but do not change, such as running means."""
        graph = self.source.probe(self.input_types, training=False)
        changed = {r.of for r in graph.results_of("state")}
        return {i.name: i.type for i in graph.with_role("state") if i.name not in changed}

    @property
    def fixed_statistics(self) -> dict[str, TensorType]:
        """Those of them whose sizes no call determines."""
        return {n: t for n, t in self.statistics.items() if t.is_static}

    def needed(self, arrays: Arrays, expected: Collection[str]) -> Arrays:
        """Return the arrays without those that belong to a part of the model that no output depends on."""
        return self.source.unused.left_out(arrays, expected, self.decisions)

    # -- values of a call --------------------------------------------------------------------------------------------
    def checked(self, program: Program, params: Arrays) -> Arrays:
        """Return the converted parameters, or the same mapping if no conversion is needed."""
        expected = program.interface.params
        if program.weights is not None:
            return params  # ``bind`` checked them
        if not isinstance(params, Mapping):
            raise InputError(f"params must be a dictionary of arrays by name, got {type(params).__name__}")
        params = self.needed(params, expected)
        missing_or_unknown("parameter", expected, params, states=program.interface.states)
        converted = self._converted("parameter", expected, params)
        return converted if any(converted[name] is not params[name] for name in expected) else params

    def _converted(self, noun: str, expected: Mapping[str, TensorType], arrays: Arrays) -> dict[str, Any]:
        """Return arrays of the backend with the shapes and dtypes that are expected."""
        converted: dict[str, Any] = {}
        for name, t in expected.items():
            shape = getattr(arrays[name], "shape", None)
            if shape is None or tuple(shape) != t.shape:
                raise InputError(
                    f"{noun} '{name}' has shape {_shape(arrays[name])}, expected {list(t.shape)}",
                    facts=[f"expected {t}"],
                )
            converted[name] = self.convert(name, arrays[name], t.dtype)
        return converted

    def checked_state(self, program: Program, state: Arrays | None, types: Mapping[str, TensorType]) -> Arrays:
        """Return the state for a call with inputs of these types, converted to the types of the program."""
        expected = program.interface.states
        if not expected:
            return {}
        if state is None:
            if program.request.kind.training:
                self.decisions.record(
                    "assumed",
                    "training without state=: every call starts from the initial state (same dropout, old statistics)",
                )
            state = self._initial_state_of(program, types)
        _check_complete(expected, state)
        if program.bucketed is None:
            for name, shape in program.state_shapes(types).items():
                if tuple(np.shape(state[name])) != shape:
                    raise InputError(
                        f"state '{name}' has shape {_shape(state[name])}, expected {list(shape)}",
                        facts=[f"for input '{n}' of shape {list(t.shape)}" for n, t in types.items()],
                        hint="runner.reset(), or runner.fork(rows) for other rows: a state belongs to its batch",
                    )
        return {name: self.convert(name, state[name], t.dtype) for name, t in expected.items()}

    def _initial_state_of(self, program: Program, types: Mapping[str, TensorType]) -> Arrays:
        """Return the bound or initial state of a call without one, with the sizes of its inputs if they are open."""
        try:
            state = self.initial_state()
        except ShapeError:
            # A state with the open size of a batch has no initial value before a call tells it.
            return self.state_for(types, None)
        shapes = program.state_shapes(types)
        has_sizes = self.is_state_bound or all(n in state and np.shape(state[n]) == s for n, s in shapes.items())
        return state if has_sizes or program.bucketed is not None else self.state_for(types, None)

    def rounds(self, dtype: DType) -> bool:
        """Whether floats of all sizes are converted to this dtype, the precision of the backend."""
        return self.backend.precision is not None and dtype is self.backend.dtype

    def _is_rounded(self, name: str, x: Any, expected: DType) -> bool:
        """Whether a float is converted to the precision of the backend, which is a decision."""
        actual = array_type(name, x).dtype
        if not (self.rounds(expected) and actual.is_float):
            return False
        if actual is not expected:
            self.decisions.record("cast", f"parameters are converted from {actual} to {expected}")
        return True

    def convert(self, name: str, x: Any, expected: DType) -> Any:
        """Return an array of the backend; only floats are converted to another dtype, its precision."""
        backend = self.backend
        if backend.is_array(x) and x.dtype == backend.native_dtype(expected):
            return x
        if self._is_rounded(name, x, expected):
            return backend.array(x, dtype=expected)
        actual, array = array_type(name, x).dtype, to_numpy(x, f"parameter '{name}'")
        if actual is not expected:
            raise InputError(
                f"Type mismatch: expected {expected}, got {actual}",
                facts=[f"parameter '{name}', shape {list(array.shape)}"],
                hint=f"convert it, for example params['{name}'].astype('{expected}')",
            )
        return backend.array(array)

    # -- values of the model -----------------------------------------------------------------------------------------
    def initial(self, role: str, seed: int | None, program: Program | None = None) -> dict[str, Any]:
        """Return initial parameters or states; those of a program on several devices are drawn region by region."""
        self.backend.check_fork()
        return self._drawn(self.interface.with_role(role), seed, program)

    def _drawn(self, inputs: Iterable[Input], seed: int | None, program: Program | None = None) -> dict[str, Any]:
        start, arrays = self.seed if seed is None else seed, {}
        for i in inputs:
            read = partial(self._region, i, start)
            array = None if program is None else program.assembled(i.name, read)
            arrays[i.name] = self.backend.array(read()) if array is None else array
        return arrays

    def _region(self, i: Input, seed: int, index: Any = None) -> np.ndarray[Any, Any]:
        return self.source.initial([i], seed, index)[i.name]

    def initial_state(self, seed: int | None = None) -> dict[str, Any]:
        """Return the initial state: a new one with ``seed``, otherwise always the same."""
        if seed is not None:
            return self.initial("state", seed)
        if self.state is None:
            self.state = self.initial("state", None)
        return self.state

    def bind_pretrained(self) -> bool:
        """Bind pretrained arrays if the model provides one for every parameter."""
        try:
            names = {i.name for i in self.interface.with_role("param")}
        except ShapeError:  # the first call determines the sizes of the inputs
            return False
        if not names or not names <= self.source.pretrained.keys():
            return False
        arrays = self.source.initial(self.interface.with_role("param"), self.seed)
        # Views of a mapped file are not copied where the backend takes NumPy arrays.
        backend = self.backend
        is_bound = {name: backend.is_array(x) or isinstance(x, EncodedWeight) for name, x in arrays.items()}
        self.bind({name: x if is_bound[name] else backend.array(x) for name, x in arrays.items()})
        return True

    def state_for(self, types: Mapping[str, TensorType], seed: int | None) -> dict[str, Any]:
        """Return the initial state for inputs of these types; without a seed, statistics are those of the binding."""
        states = self._states(types)
        bound = (self.state or {}) if seed is None else {}
        statistics = {n: bound[n] for n in self.fixed_statistics if n in bound} if bound else {}
        drawn = self._drawn([i for i in states if i.name not in statistics], seed)
        # A runner replaces its arrays in place: the binding keeps its own.
        return drawn | {i.name: self.backend.copied(statistics[i.name]) for i in states if i.name in statistics}

    def _states(self, types: Mapping[str, TensorType]) -> list[Input]:
        """Return the states of training and those of other calls, such as caches of generation."""
        graphs = [self.source.probe(types, training=training) for training in (True, False)]
        return list({i.name: i for graph in graphs for i in graph.with_role("state")}.values())

    def state_axes(self, types: Mapping[str, TensorType]) -> dict[str, int] | None:
        """Return the axes of the states that count the rows of inputs of these types, None if their sizes are fixed."""
        rows = Counter(t.shape[0] for t in types.values() if t.shape).most_common(1)
        if not rows:
            return {}
        batch = rows[0][0]
        # The axes that grow with one row more are those of the rows.
        more = {
            n: TensorType(t.dtype, (batch + 1, *t.shape[1:])) if t.shape[:1] == (batch,) else t
            for n, t in types.items()
        }
        try:
            shapes = [{i.name: i.type.shape for i in self._states(t)} for t in (types, more)]
        except MithrilError:
            return None
        return {
            name: k
            for name, shape in shapes[0].items()
            for k, (size, larger) in enumerate(zip(shape, shapes[1][name], strict=True))
            if size != larger
        }

    def bind(self, params: Arrays, state: Arrays | None = None, *, release: bool = False) -> None:
        """Bind parameters; ``inference`` computes their expressions, ``static_inference`` embeds them in programs."""
        with self.learning(params):
            self._bind(params, state, release)

    def _bind(self, params: Arrays, state: Arrays | None, release: bool) -> None:
        if release:
            self._check_release(params)
        try:
            expected = self.types
        except ShapeError:
            if self.static:
                raise
            expected = {}
            values = self._readable(params)  # the first call checks them
        else:
            needed = self.needed(params, expected)
            missing_or_unknown("parameter", expected, needed, states=self.state_types)
            if release:
                for name in params.keys() - needed.keys():
                    del params[name]  # type: ignore[attr-defined]  # a MutableMapping
                self._check_shapes(params)
                # Quantized weights of GGUF files are views of these files already (ca1532e8).
                quantized = {n: params.pop(n) for n in expected if self._reads(params[n])}  # type: ignore[attr-defined]
                params = {**moved_to_file(params, self.folder), **quantized}  # type: ignore[arg-type]  # a MutableMapping
            else:
                params = needed
            params = self._readable(params)
            values = {name: self._bindable(name, x, expected[name].dtype) for name, x in params.items()}
        if state is not None:
            self.state, self.is_state_bound = dict(state), True
        if self.static:
            bound = self._baked(values, params)
        elif self.folds and expected:
            bound = self._folded(values, expected)
        else:
            bound = Bound(values, values)
        self._replace(bound)

    def _replace(self, bound: Bound) -> None:
        self.bound = bound
        self.passed = bound.passed
        self.calls.rebind(bound.number, bound.arrays)

    def current(self) -> Bound | None:
        """Return the binding, for whose replaced entries expressions are computed again."""
        bound = self.bound
        if bound is None or bound.arrays is None or are_entries(bound.values, bound.arrays.originals):
            return bound
        expected = self.types
        missing_or_unknown("parameter", expected, bound.values)
        self._replace(self._folded(bound.values, expected))
        return self.bound

    def _folded(self, values: dict[str, Any], expected: Mapping[str, TensorType]) -> Bound:
        """Return a binding for programs that read expressions of its parameters."""
        converted = self._converted("parameter", expected, values)
        arrays = BoundArrays(converted, self._converted_statistics(), tuple(values.values()))
        return Bound(values, values, self._next_number(), arrays=arrays)

    def _bindable(self, name: str, x: Any, expected: DType) -> Any:
        """Return an array to bind; with embedded parameters, programs round it themselves, and keep the result."""
        if not self.rounds(expected) or (self.static and self._is_rounded(name, x, expected)):
            return x
        return self.convert(name, x, expected)

    @property
    def values(self) -> dict[str, Any] | None:
        """The bound parameters, in the precision of the backend."""
        if self.bound is None or not self.static or self.backend.precision is None:
            return None if self.bound is None else self.bound.values
        types = self.types
        return {
            name: self.convert(name, x, types[name].dtype) if self.rounds(types[name].dtype) else x
            for name, x in self.bound.values.items()
        }

    def _baked(self, values: dict[str, Any], params: Arrays) -> Bound:
        """Return a binding for programs with embedded parameters and state."""
        self._check_shapes(params)
        statistics = self.statistics  # other states change from call to call
        state = {n: x for n, x in self.initial_state().items() if n in statistics} if statistics else {}
        return Bound(
            values,
            {},
            self._next_number(),
            {n: x if self._reads(x) else self._on_host(x) for n, x in (*params.items(), *state.items())},
        )

    def _on_host(self, x: Any) -> np.ndarray[Any, Any]:
        """Return an array of any framework as NumPy; the backend joins one of its own that is on several devices."""
        is_own = self.backend.is_array(x) and not isinstance(x, np.ndarray)
        return self.backend.to_numpy(x) if is_own else to_numpy(x)

    def _converted_statistics(self) -> dict[str, Any]:
        expected = self.fixed_statistics
        try:
            state = self.initial_state() if expected else {}
        except ShapeError:  # other states have open sizes
            state = self._drawn([i for i in self.interface.with_role("state") if i.name in expected], None)
        _check_complete(expected, state)
        return self._converted("state", expected, state)

    def _next_number(self) -> int:
        return 1 if self.bound is None else self.bound.number + 1

    def _reads(self, x: Any) -> bool:
        """Whether programs read the quantized values of a weight."""
        return self.reads_quantized and isinstance(x, EncodedWeight) and self.backend.reading_quantized(x) is not None

    def _readable(self, params: Arrays) -> dict[str, Any]:
        """Decode the weights whose quantized values no program reads."""
        array, encoded = self.backend.array, EncodedWeight
        decoded = {n: array(x) for n, x in params.items() if isinstance(x, encoded) and not self._reads(x)}
        sparse = [n for n in decoded if isinstance(params[n], SparseWeight | PairWeight)]
        if sparse:
            reason = f"backend '{self.backend.name}' reads no such format" if self.static else "static_inference is off"
            self.decisions.record("downgrade", f"sparse weights are decoded, because {reason}: {', '.join(sparse)}")
        return {**params, **decoded}

    def _check_shapes(self, params: Arrays) -> None:
        for name, t in self.types.items():
            shape = tuple(getattr(params[name], "shape", ()))
            if shape != t.shape:
                raise InputError(f"parameter '{name}' has shape {list(shape)}, expected {list(t.shape)}")

    def _check_release(self, params: Arrays) -> None:
        """Check that the caller's parameters can be moved to a file that is mapped."""
        if not self.static:
            raise InputError("bind(release=True): calls read the parameters themselves", hint="static_inference=True")
        if not self.backend.is_array(np.empty(0, np.float32)):
            message = (
                f"bind(release=True): the arrays of backend '{self.backend.name}' are not NumPy's, which can be mapped"
            )
            raise InputError(message, hint="omit release=True")
        if not isinstance(params, MutableMapping):
            raise InputError(f"bind(release=True) takes arrays out of a dictionary, got {type(params).__name__}")

    # -- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str], params: Arrays | None, state: Arrays | None) -> None:
        """Write parameters (default: the bound ones) and state as safetensors."""
        values = params if params is not None else self.values
        if values is None:
            raise InputError("there are no parameters to save", hint="call save(path, params), or bind(params) first")
        values = self.needed(values, self.types)
        missing_or_unknown("parameter", self.types, values)
        states = (state if state is not None else self.state) or {}
        tensors = {name: self.backend.to_numpy(x) for name, x in (*values.items(), *states.items())}
        weight_files.save_file(tensors, path, {"format": "mithril", "states": json.dumps(sorted(states))})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Bind the tensors of a file; names and shapes must match."""
        tensors = weight_files.load_file(path)
        with self.learning(tensors):
            self._load(path, tensors)

    def _load(self, path: str | os.PathLike[str], tensors: Arrays) -> None:
        states = self.state_types
        tensors = self.needed(tensors, self.types.keys() | states.keys())
        # An inference model has less state than the training model.
        saved = weight_files.saved_states(path)
        read = {n: t for n, t in tensors.items() if n not in (saved or ()) or n in states}
        params, report = weight_files.match(self.types, {n: t for n, t in read.items() if n not in states})
        # A file written by mithril may contain no state.
        required = {} if saved is not None else self.statistics
        declared = {**required, **{n: t for n, t in states.items() if n in tensors}}
        states_loaded, state_report = weight_files.match(declared, tensors)
        report.mismatched += state_report.mismatched
        report.missing += state_report.missing
        if not report.complete:
            raise _mismatch_error(f"'{os.fspath(path)}'", report, "safetensors.numpy.load_file(path)")
        self._bind_loaded(params, states_loaded)

    def load_state_dict(self, tensors: Arrays, strict: bool) -> weight_files.LoadReport:
        """Bind the tensors whose names and shapes match the model."""
        with self.learning(tensors):
            return self._load_state_dict(tensors, strict)

    def _load_state_dict(self, tensors: Arrays, strict: bool) -> weight_files.LoadReport:
        expected, states = self.types, self.state_types
        tensors = self.needed(tensors, expected.keys() | states.keys())
        declared = {**expected, **self.statistics, **{n: t for n, t in states.items() if n in tensors}}
        arrays, report = weight_files.match(declared, tensors, self._on_host)
        if strict and not report.complete:
            raise _mismatch_error("the state dictionary", report, "tensors")
        base: Arrays = self.values or {}
        if not base and expected.keys() - arrays:
            base = self.initial("param", None)
        params = {n: self._loaded(arrays[n]) if n in arrays else base[n] for n in expected}
        self._bind_loaded(params, {n: arrays[n] for n in states if n in arrays})
        return report

    def _bind_loaded(self, params: Arrays, states: Arrays) -> None:
        loaded = {n: self.backend.array(x) for n, x in states.items()}
        self.bind(
            {n: x if self.backend.is_array(x) else self._loaded(x) for n, x in params.items()},
            {**self.initial_state(), **loaded} if self.state_types else None,
        )

    def _loaded(self, x: Any) -> Any:
        return x if isinstance(x, EncodedWeight) else self.backend.array(x)


def _mismatch_error(subject: str, report: weight_files.LoadReport, tensors: str) -> InputError:
    return InputError(
        f"{subject} does not match this model",
        facts=str(report).splitlines(),
        hint=f"rename or remove tensors, or compiled.load_state_dict({tensors}, strict=False) to load those that match",
    )


def _check_complete(expected: Iterable[str], state: Arrays) -> None:
    missing = [n for n in expected if n not in state]
    if missing:
        raise InputError(
            "the state does not match the model",
            facts=[f"missing: {', '.join(missing[:8])}"],
            hint="start with compiled.initial_state() and pass the state that evaluate returns",
        )


def _shape(x: Any) -> list[int] | str:
    shape = getattr(x, "shape", None)
    return list(shape) if shape is not None else f"none: it is a {type(x).__name__}"
