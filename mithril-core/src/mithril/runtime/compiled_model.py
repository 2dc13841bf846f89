"""The compiled model: what ``ml.compile`` returns, the same on every backend."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Never, Protocol

import numpy as np

from mithril import plugins
from mithril.backend import check_call, checked, reject_surplus, watch
from mithril.base import Decisions, DType, InputError, TensorType, UnsupportedError
from mithril.ir import Graph, Input
from mithril.runtime import inspection
from mithril.runtime.batch_buckets import Buckets
from mithril.runtime.call import DEFAULT, Calls
from mithril.runtime.calling import Calling
from mithril.runtime.parameters import UNBOUND, Parameters
from mithril.runtime.program import Kind, Program, Request
from mithril.runtime.signature import InputSpec
from mithril.runtime.watching import Watcher, watchers
from mithril.runtime.weight_files import LoadReport

if TYPE_CHECKING:
    from mithril.backend import Backend
    from mithril.passes import PassContext, PassManager
    from mithril.runtime.memory_report import MemoryReport

Arrays = Mapping[str, Any]
UNKNOWN: dict[str, Any] = {}  # the parameters where none are bound


class Compiler(Protocol):
    """What makes programs on request: ``mithril.compiler.steps.Compiler``."""

    def specialize(self, request: Request) -> Program: ...

    def probe(self, types: Mapping[str, TensorType] | None) -> Graph: ...

    def pipeline(self) -> tuple[PassManager, PassContext]: ...

    def initial(self, inputs: Iterable[Input], seed: int) -> dict[str, np.ndarray[Any, Any]]: ...

    def buckets(self, training: bool) -> Buckets | None: ...

    def lowered(self, request: Request) -> Graph: ...

    def check_call(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None: ...


class CompiledModel:
    """A model made for one backend. Programs are specialized when the shapes of the inputs are known, and kept."""

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
        self.specs = dict(specs)  # what was known of each input before the first call
        self.compiler = compiler
        limit, claims = options.get("max_programs", DEFAULT), backend.capabilities
        self._calls = Calls(limit, decisions, sizes=claims.symbolic and claims.recompiles)
        self._parameters = Parameters(backend, compiler, self._calls, decisions, options)
        inference = bool(options.get("inference"))
        self._calling = Calling(
            self, self.specs, compiler, self._parameters, self._calls, decisions, watchers, inference=inference
        )

    def forked(self) -> None:
        """In a child process: have every call look at whether the framework survived."""
        self._calls.forget_last()

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
            reject_surplus(
                "evaluate", CompiledModel.evaluate, (params, inputs, output_gradients, *surplus), unknown_names
            )
        bound = None
        if inputs is None:
            bound, inputs = self._parameters.bound, params
            params = UNKNOWN if bound is None else bound.passed
        if state is None and not watchers.get():
            results = None
            if output_gradients is not None:
                results = self._calls.last_gradients(params, inputs, output_gradients, training, wrt)
            elif not training:
                results = self._calls.last(params, inputs)
            if results is not None:
                return results
        if params is UNKNOWN and self._calling.needs_params(inputs):
            raise InputError("no parameters are bound to this model", hint=UNBOUND)
        usual = state is None or isinstance(state, Mapping), training is None or isinstance(training, (bool, np.bool_))
        if not all(usual) or isinstance(wrt, str) or not isinstance(wrt, Collection | None):
            check_call("evaluate", CompiledModel.evaluate, (), {"state": state, "training": training, "wrt": wrt}, {})
        arguments = {} if params is None else params
        inputs = {} if inputs is None else inputs
        return self._calling.evaluate(arguments, inputs, output_gradients, state, training, wrt, bound)

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
            reject_surplus(
                "a compiled model", CompiledModel.__call__, (inputs, output_gradients, *surplus), unknown_names
            )
        bound = self._parameters.bound
        if output_gradients is None and state is None and not training and not watchers.get():
            results = self._calls.last(UNKNOWN if bound is None else bound.passed, inputs)
            if results is not None:
                return results
        if bound is None and self._calling.needs_params(inputs):
            self._bind_fresh(inputs)
        return self.evaluate(inputs, None, output_gradients, state=state, training=training, wrt=wrt)

    def _bind_fresh(self, inputs: Any) -> None:
        """Bind fresh parameters at a first call without any, with a warning; under ``strict`` that is an error."""
        if self.decisions.strict:
            raise InputError("no parameters are bound to this model", hint=UNBOUND)
        seed = self.options.get("seed", 0)
        self.bind(self.randomize_params(inputs={} if inputs is None else inputs))
        message = f"no parameters are bound: fresh ones of seed {seed} are used; {UNBOUND}"
        self.decisions.record("assumed", message, warn=True)

    def bound_call(
        self, params: Arrays | None, inputs: Arrays, *, state: Arrays | None = None, training: bool = False
    ) -> tuple[Program, dict[str, Any]]:
        """The program that a call without gradients runs, and all of its arguments by name."""
        values = params if params is not None else self.params or {}
        complete = self._calling.with_defaults(inputs, training, values)
        program, _, checked_params, arguments = self._calling.prepared(complete, values, state, Kind(training))
        return program, {**checked_params, **arguments}

    def prepare(self, types: Mapping[str, TensorType]) -> None:
        """Make the inference program for these input types now, not at the first call."""
        self._calling.made(Request(tuple(types.items()), Kind()))

    # -- parameters and state ----------------------------------------------------------------------------------------
    @property
    def params(self) -> dict[str, Any] | None:
        """The bound parameters."""
        bound = self._parameters.bound
        return None if bound is None else bound.values

    @checked()
    def bind(self, params: Arrays, state: Arrays | None = None) -> CompiledModel:
        """Keep these parameters, so that ``compiled(inputs)`` needs none. Returns the model.

        Where parameters' shapes follow from inputs of unknown shape, the first call checks them.
        """
        self._parameters.bind(params, state)
        return self

    @checked()
    def initial_state(self, seed: int | None = None) -> dict[str, Any]:
        """The state to begin with: running statistics, random key."""
        return self._parameters.initial_state(seed)

    @checked()
    def randomize_params(self, seed: int | None = None, inputs: Arrays | None = None) -> dict[str, Any]:
        """Fresh parameters from the portable generator: one seed gives the same numbers on every backend.

        ``inputs`` (sample arrays) are only needed where the parameters' shapes depend on inputs of unknown shape.
        """
        if inputs is not None and self._parameters.input_types is None:
            self._calling.program(self._calling.with_defaults(inputs, False), Kind())
            self._parameters.see_again()
        return self._parameters.initial("param", seed)

    @checked()
    def save(self, path: str | os.PathLike[str], params: Arrays | None = None, state: Arrays | None = None) -> None:
        """Write parameters (the bound ones if none are given) and state as safetensors."""
        self._parameters.save(path, params, state)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> CompiledModel:
        """Read what ``save`` wrote and bind it. Everything must fit."""
        self._parameters.load(path)
        return self

    @checked()
    def load_state_dict(self, tensors: Arrays, *, strict: bool = True) -> LoadReport:
        """Bind tensors of another framework's state dictionary by name and return a report.

        Every parameter must be there, and every tensor must belong to the model. With ``strict=False`` parameters
        that are missing keep their bound or fresh values, and other tensors are left out.
        """
        return self._parameters.load_state_dict(tensors, strict)

    @checked()
    def export(self, path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Any:
        """Write the model with its parameters for use without this process: ``model.gguf``, a folder of C, ...

        The format is told by the suffix or named; ``options`` are its own. `mithril plugins` lists formats.
        """
        from mithril.runtime.model_files import export

        return export(self, path, format=format, **options)

    # -- inspection --------------------------------------------------------------------------------------------------
    @property
    def programs(self) -> tuple[Program, ...]:
        """The specializations made so far, without those that were evicted."""
        return tuple(self._calls)

    @property
    def interface(self) -> Graph:
        """The graph as traced, before any pass: names, roles and types of everything.

        It is the training graph wherever there is one, because only that knows every state, the random key among them.
        """
        return self._parameters.interface

    @property
    def graph(self) -> Graph:
        """The newest program's graph after the passes; before the first specialization the traced one."""
        programs = self.programs
        return programs[-1].graph if programs else self.interface

    @property
    def pipeline(self) -> PassManager:
        """The passes that programs go through; print it."""
        return self.compiler.pipeline()[0]

    @property
    def source(self) -> str | None:
        """The newest program's generated source, where the backend generates one."""
        programs = self.programs
        return programs[-1].executable.source if programs else None

    def get_shapes(self) -> dict[str, list[Any]]:
        """Shape of every named tensor: inputs, parameters, state, inner results, outputs; unknown sizes are dims."""
        return {name: list(t.shape) for name, t in inspection.named_types(self.interface).items()}

    def get_types(self) -> dict[str, DType]:
        """Dtype of every named tensor."""
        return {name: t.dtype for name, t in inspection.named_types(self.interface).items()}

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
        programs = self.programs
        matching = [p for p in programs if bool(p.request.kind.of) is gradients]
        if matching or not programs:
            return matching[-1] if matching else None
        return self._calling.made(inspection.request_for(programs, gradients))

    @property
    def last_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs of the newest kind of call."""
        return {name: t.shape for name, t in self._calls.newest_types().items()}  # type: ignore[misc]

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
        return inspection.concrete(program, shapes, self.compiler)

    def explain(self) -> str:
        """What was decided on the user's behalf, and what the passes did."""
        return inspection.explanation(self.decisions, self.programs)

    def summary(self) -> str:
        """A table of the parameters and programs."""
        from mithril.runtime.program_summary import summarize

        return summarize(self)

    def __repr__(self) -> str:
        return f"<CompiledModel '{self.name}' on {self.backend.name}: {len(self._calls)} programs>"
