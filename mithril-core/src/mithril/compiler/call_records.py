"""Records of calls that were checked, and the programs that they use: bounded, the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from typing import Any

from mithril.compiler.bound_weights import rebound
from mithril.compiler.program import BoundArrays, Program, ProgramKey, are_entries
from mithril.graph import Decisions, TensorType, cotangent_name

CALLS = 16  # records of calls for each program that may be kept: these are small

Record = tuple[Program, dict[str, TensorType]]  # the program for a call, and the exact types of its inputs
Last = Callable[[Any, Any], Any]  # gives the results for parameters and inputs that it accepts, else None
LastGradients = Callable[[Any, Any, Any, bool | None, Any], Any]
Kind = tuple[str, Any, Any, Any]  # name, class, shape and dtype of an array
Kinds = tuple[Kind, ...]


def kinds(arrays: Mapping[str, Any]) -> Kinds:
    """Return name, class, shape and dtype of each array."""
    return tuple((name, type(x), x.shape, x.dtype) for name, x in arrays.items())


def are_kinds(rows: Kinds, arrays: Any) -> bool:
    """Whether these are arrays of the same names and kinds. Other objects raise, as do missing names."""
    return len(arrays) == len(rows) and have_kinds(rows, arrays)


def have_kinds(rows: Iterable[Kind], arrays: Any) -> bool:
    """Whether the arrays of these names are of these kinds."""
    for name, kind, shape, dtype in rows:
        x = arrays[name]
        # The dtype of an array is mostly the same object: identity spares the comparison, which takes
        # longer than the rest.
        if type(x) is not kind or x.shape != shape or (x.dtype is not dtype and x.dtype != dtype):
            return False
    return True


# The fast path tests by use, since each test beforehand would cost more than the whole comparison.
# Arguments that it cannot read go to the complete check, which says what is wrong with them.
NO_MATCH = (AttributeError, IndexError, KeyError, TypeError)  # of arguments other than mappings of arrays


FEW = 24  # parameters: comparing more of them by one call of a C function is faster than by a loop
# Commit 76fe65b4: a repeated call takes 0.2 microseconds more than a function
# generated for the program, which the core no longer writes, and took 0.5 more before the closures.
GROUP = 4  # parameters that are compared in one step of the loop


def repeated_call(program: Program, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Last:
    """Return the function for calls like this one, which was checked: it returns None for arguments of other kinds.

    Threads may share it, since it holds its values as constants. Parameters are compared one by one, because another
    may take the place of one in the same dictionary.
    """
    if program.request.binding:
        return _call_of_binding(program, params, inputs)
    if len(inputs) == 1 and params:
        return _call_of_one_input(program, params, inputs)
    run: Callable[[Any, Any], Any] = getattr(program.call, "direct", program.call)
    num_params, input_kinds, param_kinds = len(params), kinds(inputs), kinds(params)
    values = tuple(params.values())

    def results(call_params: Any, call_inputs: Any) -> Any:
        try:
            if not are_kinds(input_kinds, call_inputs) or len(call_params) != num_params:
                return None
            # Trained loops replace all parameters, inference none: identity of all of them is one pass in
            # C, and only if it fails kinds are compared one by one.
            if not all(map(is_, call_params.values(), values)) and not have_kinds(param_kinds, call_params):
                return None
        except NO_MATCH:
            return None
        return run(call_params, call_inputs)

    return results


def _call_of_binding(program: Program, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Last:
    """Return the function for calls of a program that has the parameters of one binding."""
    run: Callable[[Any, Any], Any] = getattr(program.call, "direct", program.call)
    input_kinds, values = kinds(inputs), tuple(params.values())

    def results(call_params: Any, call_inputs: Any) -> Any:
        try:
            if call_params is not params or not are_entries(params, values) or not are_kinds(input_kinds, call_inputs):
                return None
        except NO_MATCH:
            return None
        return run(call_params, call_inputs)

    return results


def _call_of_one_input(program: Program, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Last:
    """Return the function for calls with one input, where each operation of Python counts."""
    run: Callable[[Any, Any], Any] = getattr(program.call, "direct", program.call)
    # Everything that a call reads is local to the closure: an attribute of an object costs a look-up
    # in each call.
    num_params, param_kinds, values = len(params), kinds(params), tuple(params.values())
    ((input_name, input_kind, shape, dtype),) = kinds(inputs)
    pairs = [*params.items()] if num_params <= FEW else []
    # The last pair is repeated to fill the last group: comparing it again is harmless, and the loop
    # has no remainder.
    pairs += pairs[-1:] * (-len(pairs) % GROUP)
    groups: Any = [[part for pair in pairs[k : k + GROUP] for part in pair] for k in range(0, len(pairs), GROUP)]

    def results(call_params: Any, call_inputs: Any) -> Any:
        try:
            x = call_inputs[input_name]
            if type(x) is not input_kind or x.shape != shape or (x.dtype is not dtype and x.dtype != dtype):
                return None
            if len(call_params) != num_params or len(call_inputs) != 1:
                return None
            if not groups:
                if not all(map(is_, call_params.values(), values)) and not have_kinds(param_kinds, call_params):
                    return None
            else:
                for a, x_a, b, x_b, c, x_c, d, x_d in groups:
                    if (
                        call_params[a] is not x_a
                        or call_params[b] is not x_b
                        or call_params[c] is not x_c
                        or call_params[d] is not x_d
                    ):
                        if not have_kinds(param_kinds, call_params):
                            return None
                        break
        except NO_MATCH:
            return None
        return run(call_params, call_inputs)

    return results


def repeated_gradients(
    program: Program,
    params: Mapping[str, Any],
    inputs: Mapping[str, Any],
    cotangents: Mapping[str, Any],
    training: bool | None,
    wrt: tuple[str, ...] | None,
) -> LastGradients:
    """Return the function for calls with gradients like this one: outputs and gradients, or None for other arguments.

    Of all arrays only the kinds count, because parameters are trained.
    """
    run: Callable[[Any, Any], Any] = getattr(program.call, "direct", program.call)
    outputs, gradients = program.results.outputs, program.results.gradients
    param_kinds, input_kinds, slope_kinds = kinds(params), kinds(inputs), kinds(cotangents)
    num_params, num_inputs, num_slopes = len(params), len(inputs), len(cotangents)
    slopes = tuple((name, cotangent_name(name)) for name in cotangents)

    def results(
        call_params: Any, call_inputs: Any, call_cotangents: Any, call_training: bool | None, call_wrt: Any
    ) -> Any:
        try:
            if call_training is not training or call_wrt != wrt or len(call_cotangents) != num_slopes:
                return None
            if len(call_inputs) != num_inputs or len(call_params) != num_params:
                return None
            if not (
                have_kinds(input_kinds, call_inputs)
                and have_kinds(slope_kinds, call_cotangents)
                and have_kinds(param_kinds, call_params)
            ):
                return None
        except NO_MATCH:
            return None
        arguments = {**call_inputs}
        for name, argument in slopes:
            arguments[argument] = call_cotangents[name]
        arrays = run(call_params, arguments)
        first, second = {}, {}
        for name in outputs:
            first[name] = arrays[name]
        for owner, name in gradients:
            second[owner] = arrays[name]
        return first, second

    return results


def reject_call(params: Any, inputs: Any) -> None:
    """Refuse every call: the function before there is a last call."""


def refused_gradients(params: Any, inputs: Any, cotangents: Any, training: bool | None, wrt: Any) -> None:
    """Refuse every call: the function before there is a last call with gradients."""


class CallRecords:
    """Programs by request, records of calls by the types of their inputs, and the last call. Threads may share it."""

    def __init__(self, limit: int, decisions: Decisions, sizes: bool = False) -> None:
        self.limit = limit
        self.sizes = sizes  # whether the backend recompiles a program for each size
        self.num_programs = 0
        self.last: Last = reject_call
        self.last_gradients: LastGradients = refused_gradients
        self._decisions = decisions
        self._lock = threading.RLock()
        self._programs: OrderedDict[ProgramKey, tuple[int, Program]] = OrderedDict()  # with the number of each
        self._calls: OrderedDict[Hashable, Record] = OrderedDict()
        self._making: dict[ProgramKey, threading.Event] = {}
        self.latest_types: tuple[tuple[str, TensorType], ...] = ()  # of the latest program, also after ``drop_bound``

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        """Iterate over the programs in order of creation."""
        with self._lock:
            ordered = sorted(self._programs.values(), key=lambda numbered: numbered[0])
        return iter([program for _, program in ordered])

    def remember_call(self, program: Program, params: Any, inputs: Any) -> None:
        """Store this checked call as the last one; the executable may provide a fast path for repeated calls."""
        repeated = repeated_call(program, params, inputs)
        better = getattr(program.call, "repeated", None)
        self.last = repeated if better is None else partial(self._repeat, program, repeated, params, better)

    def _repeat(
        self, program: Program, repeated: Last, source: Any, better: Callable[..., Last], params: Any, inputs: Any
    ) -> Any:
        """Repeat the last call; the second repetition creates the fast path of the executable."""
        results = repeated(params, inputs)
        # Two equal calls in sequence are probably a loop: only then does the executable write a
        # function for the call. Calls of two shapes in turn wrote one each time: 44 microseconds, 8 now
        # (commit 0caeefa0).
        if results is not None and params is source:
            self.last = better(params, inputs, partial(self._repeat, program, repeated, source, better))
        elif results is not None and isinstance(params, dict):
            self.remember_call(program, params, inputs)
        return results

    def keep_gradients(
        self, program: Program, params: Any, inputs: Any, cotangents: Any, training: bool | None, wrt: Any
    ) -> None:
        """Store this checked call with gradients as the last one."""
        self.last_gradients = repeated_gradients(program, params, inputs, cotangents, training, wrt)

    def forget_last(self) -> None:
        """Discard the last calls, so that the next calls are checked again."""
        self.last, self.last_gradients = reject_call, refused_gradients

    def call(self, key: Hashable) -> Record | None:
        """Return the record of an equivalent call, or None."""
        with self._lock:
            record = self._calls.get(key)
            if record is not None:
                self._calls.move_to_end(key)
                if record[0].request in self._programs:
                    self._programs.move_to_end(record[0].request)
            return record

    def newest_types(self) -> dict[str, TensorType]:
        """Return the input types of the last call, or an empty dictionary before the first call."""
        with self._lock:
            _, types = next(reversed(self._calls.values()), (None, {}))
            return types

    def remember(self, key: Hashable, record: Record) -> None:
        """Store the record of a call, and evict old records."""
        program = record[0]
        with self._lock:
            self._calls[key] = record
            shared = [k for k, (p, _) in self._calls.items() if p is program] if self.sizes else []
            if len(shared) > self.limit:
                self._forget_sizes(program, shared[:-1])
            while len(self._calls) > CALLS * self.limit:
                self._calls.popitem(last=False)

    def _forget_sizes(self, program: Program, keys: list[Hashable]) -> None:
        """Discard the backend's programs for single sizes; sizes in use are recompiled."""
        getattr(program.executable, "forget_sizes", _nothing)()
        for key in keys:
            del self._calls[key]
        self._decisions.record(
            "evicted", f"a program was compiled for more than max_programs={self.limit} sizes, which are evicted"
        )

    def make(self, request: ProgramKey, function: Callable[[ProgramKey], Program]) -> Program:
        """Return the program for a request; concurrent requests wait for the thread that compiles it."""
        while True:
            with self._lock:
                cached = self._programs.get(request)
                if cached is not None:
                    self._programs.move_to_end(request)
                    return cached[1]
                event = self._making.get(request)
                if event is None:
                    ready = self._making[request] = threading.Event()
                    break
            # Outside of the lock, and in a loop: the other thread needs the lock to finish, and if its
            # compilation failed, this thread has to try itself, so that it gets the error of its own
            # call.
            event.wait()
        try:
            program = function(request)
            with self._lock:
                self.num_programs += 1
                self._programs[request] = self.num_programs, program
                self.latest_types = request.types
                self._evict()
            return program
        finally:
            with self._lock:
                del self._making[request]
            ready.set()

    def _evict(self) -> None:
        while len(self._programs) > self.limit:
            request, (number, program) = self._programs.popitem(last=False)
            self.forget_last()  # it may reference the program
            self._drop_calls(lambda other, program=program: other is program)  # type: ignore[misc]
            # Frameworks may reference the executable.
            getattr(program.executable, "forget_sizes", _nothing)()
            inputs = ", ".join(f"{name}: {t}" for name, t in request.types)
            self._decisions.record(
                "evicted", f"program {number} for {inputs} was evicted: the limit is max_programs={self.limit}"
            )

    def clear(self) -> None:
        """Discard all programs and records of calls."""
        with self._lock:
            self.forget_last()
            self.num_programs, self.latest_types = 0, ()
            self._programs.clear()
            self._calls.clear()

    def rebind(self, number: int, arrays: BoundArrays | None) -> None:
        """Give the arrays to programs that read expressions of bound ones; discard those that embed parameters."""
        with self._lock:
            self.forget_last()
            self._drop_calls(lambda program: bool(program.request.binding))
            for request in [r for r in self._programs if r.binding]:
                order, program = self._programs.pop(request)
                if request.bound and arrays and request.bound.statistics.keys() == arrays.statistics.keys():
                    program = rebound(program, number, arrays)
                    self._programs[program.request] = order, program

    def _drop_calls(self, matches: Callable[[Program], bool]) -> None:
        for key in [k for k, (program, _) in self._calls.items() if matches(program)]:
            del self._calls[key]


def _nothing() -> None:
    """Do nothing, for executables without programs for single sizes."""
