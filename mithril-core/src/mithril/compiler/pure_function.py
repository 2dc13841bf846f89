"""Compiled models as pure functions, for the automatic differentiation and the transformations of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from mithril.compiler.evaluation import Evaluation
from mithril.compiler.program import Interface, ProgramKey, ProgramKind, Results
from mithril.compiler.signature import array_type, check_shapes, missing_or_unknown
from mithril.graph import InputError, TensorType

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PureProgram:
    """The generated function for one combination of input types, without checks and conversions."""

    types: dict[str, TensorType]
    interface: Interface
    results: Results
    forward: Callable[..., dict[str, Any]]  # of parameters by name, and of inputs and states by name

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ShapeError if the sizes of a call violate the guards of the program."""
        check_shapes(self.interface.guards, self.types, shapes)


class PureFunction:
    """The function that ``CompiledModel.to_function`` returns; it generates code per combination of input types."""

    def __init__(self, evaluation: Evaluation, *, training: bool) -> None:
        if training and evaluation.inference:
            raise InputError("this model was compiled with inference=True: it has no training mode")
        self.evaluation, self.backend, self.training = evaluation, evaluation.backend, training
        self._by_types: dict[tuple[TensorType, ...], PureProgram] = {}
        self._programs: dict[Any, PureProgram] = {}

    def program(self, types: Mapping[str, TensorType]) -> PureProgram:
        """Return the program for these types of inputs, which may contain symbols; generate it on first use."""
        key = tuple(types.values())
        program = self._by_types.get(key)
        if program is None:
            request = ProgramKey(tuple(types.items()), ProgramKind(self.training))
            program = self._by_types[key] = PureProgram(dict(types), *self.evaluation.compiler.differentiable(request))
        return program

    def _program_of(self, arguments: Arrays) -> PureProgram:
        actual = {name: array_type(name, x) for name, x in arguments.items()}
        key = tuple(actual.values())
        program = self._programs.get(key)
        if program is None:
            resolved, concrete = self.evaluation.types(actual)
            for name, t in concrete.items():
                if t.dtype is not actual[name].dtype:
                    raise InputError(
                        f"Type mismatch: expected {t.dtype}, got {actual[name].dtype}",
                        facts=[f"input '{name}'"],
                        hint="a pure function converts nothing: pass arrays of this dtype, or compile for yours: "
                        f"types={{'{name}': '{actual[name].dtype}'}}",
                    )
            program = self.program(resolved if self.backend.capabilities.symbolic else concrete)
            program.check({n: t.shape for n, t in actual.items()})  # type: ignore[misc]
            self._programs[key] = program
        return program

    def converted(self, program: PureProgram, params: Arrays) -> Arrays:
        """Return the parameters as the framework's arrays: ``bind`` keeps those of NumPy."""
        types = program.interface.params
        params = self.evaluation.parameters.needed(params, types)
        missing_or_unknown("parameter", types, params)
        is_array, convert = self.backend.is_array, self.evaluation.parameters.convert
        return {n: x if is_array(x) else convert(n, x, types[n].dtype) for n, x in params.items()}

    @overload
    def __call__(self, params: Arrays, inputs: Any, state: None = None) -> dict[str, Any]: ...
    @overload
    def __call__(self, params: Arrays, inputs: Any, state: Arrays) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def __call__(self, params: Arrays, inputs: Any, state: Arrays | None = None) -> Any:
        """Return the outputs by name; with ``state``, a pair of the outputs and the new state."""
        backend = self.backend
        complete = self.evaluation.with_defaults(inputs, self.training, params)
        arguments = {name: x if backend.is_array(x) else backend.array(x) for name, x in complete.items()}
        program = self._program_of(arguments)
        interface = program.interface
        params = self.converted(program, params)
        if state is None and interface.states:
            raise InputError(
                "the model has a state", hint="pass compiled.initial_state() as third argument, then the returned state"
            )
        states = {} if state is None else {name: state[name] for name in interface.states}
        results = program.forward(params, {**arguments, **states})
        outputs = {name: results[name] for name in program.results.outputs}
        if state is None:
            return outputs
        return outputs, {**state, **{owner: results[n] for owner, n in program.results.states}}
