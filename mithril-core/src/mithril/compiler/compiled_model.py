"""The compiled model that ``ml.compile`` returns, with the same interface on every backend."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Never, overload

import numpy as np

from mithril.backend import check_call, checked, covers, reject_surplus, require_match, watch
from mithril.compiler.bound_weights import is_built_at_once
from mithril.compiler.call_records import CallRecords
from mithril.compiler.evaluation import Evaluation
from mithril.compiler.model_export import Exported, export
from mithril.compiler.parameters import UNBOUND, UNKNOWN, Parameters
from mithril.compiler.plugin_methods import PluginMethods
from mithril.compiler.plugin_records import inventory
from mithril.compiler.program import BoundArrays, Compiler, Program, ProgramKey, ProgramKind
from mithril.compiler.program_summary import (
    Explanation,
    concrete,
    decision_table,
    explanation,
    named_types,
    request_for,
    title,
)
from mithril.compiler.pure_function import PureFunction
from mithril.compiler.runner import Runner
from mithril.compiler.signature import InputSpec
from mithril.compiler.watching import Watcher, watchers
from mithril.compiler.weight_files import LoadReport
from mithril.graph import (
    Decisions,
    DType,
    Graph,
    InputError,
    MithrilError,
    TensorType,
    UnsupportedError,
    is_static,
    visible,
)
from mithril.system import notebook

if TYPE_CHECKING:
    from mithril.backend import Backend
    from mithril.compiler.memory_report import MemoryReport
    from mithril.passes import PassManager

Arrays = Mapping[str, Any]


class CompiledModel(PluginMethods):
    """A model compiled for one backend. Programs are specialized for the types of inputs and cached."""

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
        self.add_plugin_methods()
        self.backend = backend
        self.watchers = watchers  # watchers of calls, from the observers of the compilation
        if backend.unforkable:
            watch(self)
        self.stages: dict[str, Graph] = {}  # graph after each stage and pass, for save_intermediates=True
        self.decisions = decisions
        self.plugins = inventory(backend.name)  # installed when this model was compiled, present and absent
        self.options = options
        self.name = name
        self.specs = dict(specs)  # properties of inputs that were known before the first call
        self.compiler = compiler
        claims = backend.capabilities
        self._calls = CallRecords(options["max_programs"], decisions, sizes=claims.symbolic and claims.recompiles)
        self._parameters = Parameters(backend, compiler, self._calls, decisions, options)
        self._evaluation = Evaluation(
            self,
            self.specs,
            compiler,
            self._parameters,
            self._calls,
            decisions,
            watchers,
            inference=options["inference"],
        )

    def forked(self) -> None:
        """Check in a child process at every call whether the framework survived the fork."""
        self._calls.forget_last()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a compiled model is neither pickled nor copied: it holds machine code and arrays of its backend",
            hint="pickle the model and compile it there; cache=True makes that quick, save and load carry weights",
        )

    # -- calling -----------------------------------------------------------------------------------------------------
    @overload
    def evaluate(
        self,
        params: Arrays | None = None,
        inputs: Arrays | None = None,
        output_gradients: None = None,
        *,
        state: None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def evaluate(
        self,
        params: Arrays | None = None,
        inputs: Arrays | None = None,
        output_gradients: Any = None,
        *,
        state: Arrays | None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], ...]: ...
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

        ``evaluate(params, inputs)`` returns the outputs by name; ``evaluate(inputs)`` uses the bound parameters.
        With ``output_gradients`` (arrays by output name, one array for a single output, or the name of a scalar output)
        the result is ``(outputs, gradients)``. With ``state``, the new state is the last item. ``training`` sets
        dropout, batch statistics and ``is_training``; by default it is True if gradients are requested.
        """
        if surplus or unknown_names:
            reject_surplus(
                "evaluate", CompiledModel.evaluate, (params, inputs, output_gradients, *surplus), unknown_names
            )
        if inputs is None:
            params, inputs = None, params
        if is_bound := params is None:
            params = self._parameters.passed
        # Most calls repeat the last one, of which a record skips all checks; watchers need the values inside a program.
        if state is None and not watchers.get():
            if output_gradients is not None:
                results = self._calls.last_gradients(params, inputs, output_gradients, training, wrt)
            else:
                results = None if training else self._calls.last(params, inputs)
            if results is not None:
                return results
        bound = self._parameters.current() if is_bound else None
        params = params if bound is None else bound.passed
        if params is UNKNOWN and self._evaluation.needs_params(inputs):
            if not self.bind_pretrained(inputs):
                raise InputError("no parameters are bound to this model", hint=UNBOUND)
            bound = self._parameters.bound
            params = UNKNOWN if bound is None else bound.passed
        # A complete check takes longer than a small program: only unusual arguments get it, for its message.
        usual = state is None or isinstance(state, Mapping), training is None or isinstance(training, (bool, np.bool_))
        if not all(usual) or isinstance(wrt, str) or not isinstance(wrt, Collection | None):
            check_call("evaluate", CompiledModel.evaluate, (), {"state": state, "training": training, "wrt": wrt}, {})
        arguments = {} if params is None else params
        inputs = {} if inputs is None else inputs
        return self._evaluation.evaluate(arguments, inputs, output_gradients, state, training, wrt, bound)

    @overload
    def __call__(
        self,
        inputs: Arrays | None = None,
        output_gradients: None = None,
        *,
        state: None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def __call__(
        self,
        inputs: Arrays | None = None,
        output_gradients: Any = None,
        *,
        state: Arrays | None = None,
        training: bool | None = None,
        wrt: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], ...]: ...
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
        """Run ``evaluate(inputs)`` with bound parameters; if there are none, bind random ones with a warning."""
        if surplus or unknown_names:
            hints = {n: f"pass inputs as a dictionary: compiled({{{n!r}: ...}})" for n in self.specs}
            arguments = (inputs, output_gradients, *surplus)
            reject_surplus("a compiled model", CompiledModel.__call__, arguments, unknown_names, hints)
        if (
            output_gradients is not None
            and isinstance(inputs, Mapping)
            and inputs
            and not inputs.keys() & self.specs.keys()
        ):
            raise InputError(
                "a compiled model takes inputs first, and none of these names is an input",
                facts=[f"first argument: {', '.join(list(inputs)[:8])}", f"inputs: {', '.join(self.specs)}"],
                hint="evaluate(params, inputs) takes parameters; compiled(inputs) uses those of compiled.bind(params)",
            )
        if output_gradients is None and state is None and not training and not watchers.get():
            results = self._calls.last(self._parameters.passed, inputs)
            if results is not None:
                return results
        if self._parameters.bound is None and self._evaluation.needs_params(inputs):
            self._bind_fresh(inputs)
        return self.evaluate(inputs, None, output_gradients, state=state, training=training, wrt=wrt)

    def _bind_fresh(self, inputs: Any) -> None:
        """Bind pretrained parameters, else random ones with a warning; raise InputError if ``strict``."""
        if self.bind_pretrained(inputs):
            return
        if self.decisions.strict:
            raise InputError("no parameters are bound to this model", hint=UNBOUND)
        seed = self.options["seed"]
        self.bind(self.randomize_params())  # the sizes of the inputs are known by now
        params = self.held_params
        drawn = params.keys() - self.compiler.pretrained.keys()
        which = "" if len(drawn) == len(params) else f" for {len(drawn)} of {len(params)} parameters"
        message = f"no parameters are bound: using random parameters of seed {seed}{which}; {UNBOUND}"
        self.decisions.record("assumed", message, warn=True)

    def advance(self, params: Arrays | None, inputs: Arrays, state: dict[str, Any]) -> dict[str, Any]:
        """Run a step for a runner: return the outputs, and replace the arrays of its ``state``."""
        bound = None
        if params is None:
            if self._parameters.bound is None and self._evaluation.needs_params(inputs):
                self._bind_fresh(inputs)
            bound = self._parameters.current()
            params = UNKNOWN if bound is None else bound.passed
        return self._evaluation.advance(params, inputs, state, bound)

    def bound_call(
        self, params: Arrays | None, inputs: Arrays, *, state: Arrays | None = None, training: bool = False
    ) -> tuple[Program, dict[str, Any]]:
        """Return the program of a call without gradients, and all of its arguments by name."""
        values = params if params is not None else self.params or {}
        complete = self._evaluation.with_defaults(inputs, training, values)
        program, _, checked_params, arguments = self._evaluation.prepared(
            complete, values, state, ProgramKind(training)
        )
        return program, {**checked_params, **arguments}

    @checked()
    def to_function(self, *, training: bool = False) -> PureFunction:
        """Return the model as a pure function ``f(params, inputs)`` of the framework's arrays.

        It contains only operations of the framework, so that the framework's own transformations apply: ``jax.grad``,
        ``jax.vmap``, ``torch.func``, ``mx.grad``. Given a state, ``f(params, inputs, state)`` also returns the new one.
        """
        return PureFunction(self._evaluation, training=training)

    def prepare(self, types: Mapping[str, TensorType]) -> None:
        """Compile the inference program for these input types before the first call."""
        self._evaluation.prepare(self._evaluation.request(types, ProgramKind(), self._parameters.bound))

    def awaits_parameters(self, types: Mapping[str, TensorType]) -> bool:
        """Whether the program depends on parameters that are not bound yet; pretrained ones are bound."""
        if self._parameters.folds:
            # Calls that pass parameters need another program than calls with bound ones: either is compiled on demand.
            arrays = BoundArrays({}, dict.fromkeys(self._parameters.fixed_statistics))
            request = ProgramKey(tuple(types.items()), ProgramKind(), binding=1, bound=arrays)
            return not is_built_at_once(self.options) and self.compiler.folds(request)
        is_bound = not self._parameters.static or self.bind_pretrained()
        return not is_bound and bool(self.interface.with_role("param"))

    def defer(self, types: Mapping[str, TensorType]) -> ProgramKey:
        """Compile the program for these input types later: it contains parameters that are not bound yet."""
        self._parameters.input_types = dict(types)
        self._calls.latest_types = tuple(types.items())
        return ProgramKey(self._calls.latest_types, ProgramKind())

    # -- parameters and state ----------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """The model that was compiled."""
        return self.compiler.model

    @property
    def params(self) -> dict[str, Any] | None:
        """The bound parameters."""
        return self._parameters.values

    @property
    def held_params(self) -> Arrays:
        """The arrays that ``bind`` keeps: ``params`` has them in the precision of the backend."""
        bound = self._parameters.bound
        return {} if bound is None else bound.values

    @checked()
    def bind(self, params: Arrays, state: Arrays | None = None, *, release: bool = False) -> CompiledModel:
        """Bind parameters for calls such as ``compiled(inputs)``, and return the model.

        If shapes of parameters depend on inputs of unknown shape, the first call checks them. ``release=True`` moves
        the arrays out of ``params`` to a temporary file one by one, and maps it: only packed weights stay in memory.
        With ``inference=True`` expressions of parameters alone are computed here and not in calls, so that arrays that
        change in place afterwards have to be bound again.
        """
        self._parameters.bind(params, state, release=release)
        return self

    def bind_pretrained(self, inputs: Arrays | None = None) -> bool:
        """Bind the arrays that the model provides, and return whether it provides one for every parameter."""
        self._determine_sizes(inputs)
        return self._parameters.bind_pretrained()

    @checked()
    def initial_state(self, seed: int | None = None) -> dict[str, Any]:
        """Return the initial state: running statistics, random key."""
        return self._parameters.initial_state(seed)

    def state_for(self, inputs: Arrays, seed: int | None) -> dict[str, Any]:
        """Return the initial state for the sizes of these inputs."""
        return self._parameters.state_for(self._evaluation.exact_types(inputs), seed)

    def exact_types(self, inputs: Arrays) -> dict[str, TensorType]:
        """Return the types that these inputs are converted to, with their sizes."""
        return self._evaluation.exact_types(inputs)

    def state_axes(self, types: Mapping[str, TensorType]) -> dict[str, int] | None:
        """Return the axes of the states that count the rows of such inputs, None if their sizes are fixed."""
        return self._parameters.state_axes(types)

    @checked()
    def runner(self, params: Arrays | None = None, *, seed: int | None = None) -> Runner:
        """Return a runner, which owns the state of successive calls: ``runner(inputs)``, ``reset``, ``fork``.

        Without ``params`` it uses the bound parameters.
        """
        return Runner(self, params, seed)

    @checked()
    def randomize_params(self, seed: int | None = None, inputs: Arrays | None = None) -> dict[str, Any]:
        """Return initial parameters: pretrained arrays, and random ones that depend only on the seed.

        ``inputs`` (sample arrays) are required only if shapes of parameters depend on inputs of unknown shape. On a
        mesh each device holds its parts alone if there is a program: with ``shapes=`` or after a call.
        """
        self._determine_sizes(inputs)
        return self._parameters.initial("param", seed, next(reversed(tuple(self._calls)), None))

    def _determine_sizes(self, inputs: Any) -> None:
        """Determine unknown sizes of the interface from sample inputs."""
        if inputs is not None and self._parameters.input_types is None:
            self._evaluation.program(self._evaluation.with_defaults(inputs, False), ProgramKind())
            self._parameters.refresh_interface()

    @checked()
    def save(self, path: str | os.PathLike[str], params: Arrays | None = None, state: Arrays | None = None) -> None:
        """Write parameters (default: the bound ones) and state to a safetensors file."""
        self._parameters.save(path, params, state)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> CompiledModel:
        """Read a file written by ``save`` and bind its parameters; names and shapes must match the model."""
        self._parameters.load(path)
        return self

    @checked()
    def load_state_dict(self, tensors: Arrays, *, strict: bool = True) -> LoadReport:
        """Bind tensors of another framework's state dictionary by name and return a report.

        Names must match the parameters and the running statistics of the model exactly. With ``strict=False``,
        missing ones keep their bound or initial values, and unknown tensors are ignored.
        """
        return self._parameters.load_state_dict(tensors, strict)

    @checked()
    def export(self, path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Exported:
        """Write the model with its parameters to a file or directory, such as ``model.gguf`` or C source.

        The suffix or ``format`` selects the format; ``options`` belong to the format. `mithril plugins` lists formats.
        The result has the ``path``, the size in ``bytes``, and the ``decisions`` on the way.
        """
        return export(self, path, format=format, **options)

    # -- inspection --------------------------------------------------------------------------------------------------
    @property
    def programs(self) -> tuple[Program, ...]:
        """The cached programs, without evicted ones; one that depends on parameters is compiled after ``bind``."""
        bound, types = self._parameters.bound, self._calls.latest_types
        number = bound.number if bound is not None else 0
        is_static = self._parameters.static
        if types and all(is_static and p.request.binding != number for p in self._calls):
            self.prepare(dict(types))
        return tuple(self._calls)

    @property
    def interface(self) -> Graph:
        """The traced graph before any pass, with names, roles and types.

        It is the training graph if there is one, because only that graph has all states, including the random key.
        """
        return self._parameters.interface

    @property
    def graph(self) -> Graph:
        """The graph of the latest program after the passes; before the first program, the traced graph."""
        programs = self.programs
        return programs[-1].graph if programs else self.interface

    @property
    def pipeline(self) -> PassManager:
        """The printable list of passes."""
        return self.compiler.passes()[0]

    @property
    def source(self) -> str | None:
        """The generated source of the latest program, or None if the backend generates none."""
        programs = self.programs
        return programs[-1].executable.source if programs else None

    def get_shapes(self) -> dict[str, list[Any]]:
        """Return the shapes of all named tensors: inputs, parameters, state, intermediate values, outputs."""
        return {name: list(t.shape) for name, t in named_types(self.interface).items()}

    def get_types(self) -> dict[str, DType]:
        """Return the dtypes of all named tensors."""
        return {name: t.dtype for name, t in named_types(self.interface).items()}

    @checked()
    def memory_report(
        self, inputs: Arrays | Mapping[str, Collection[int]] | None = None, *, gradients: bool | None = None
    ) -> MemoryReport:
        """Report bytes per layer and peak memory of the latest program, with or without ``gradients`` if set.

        ``inputs`` (arrays or shapes) set unknown sizes; the default is the sizes of the last call.
        """
        from mithril.compiler.memory_report import memory_report

        return memory_report(self, inputs, gradients=gradients)

    def program_with_params(self) -> Program | None:
        """Return the latest program without gradients whose parameters have the names of the model's."""
        programs = [p for p in self.programs if not p.request.kind.of and not p.request.kind.training]
        if not programs or programs[-1].request.bound is None:
            return programs[-1] if programs else None
        return self._evaluation.program_for(ProgramKey(programs[-1].request.types, ProgramKind()))

    def program_for(self, gradients: bool) -> Program | None:
        """Return the latest program with or without gradients; compile it if the input types are known."""
        programs = self.programs
        matching = [p for p in programs if bool(p.request.kind.of) is gradients]
        if matching or not programs:
            return matching[-1] if matching else None
        return self._evaluation.program_for(request_for(programs, gradients))

    @property
    def last_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs of the last call."""
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
        """Return intermediate values of a call by name: those in ``names``, or all values with user-defined names.

        With ``save_intermediates=True``, also write the values to ``intermediate_dir`` as safetensors.
        """
        from mithril.compiler.capture import capture

        return capture(self, params, inputs, names, state=state, training=training)

    def concrete(self, program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
        """Return the graph of a program at the sizes of its inputs."""
        return concrete(program, shapes, self.compiler)

    def explain(self) -> Explanation:
        """Return the decisions of the compiler and the report of the passes, as a text and as tables of notebooks."""
        return explanation(self.decisions, self.programs)

    def summary(self) -> str:
        """Return a table of the layers outside of training, with the parameters and programs."""
        from mithril.compiler.program_summary import summarize

        return summarize(self, self.compiler.probe(self._parameters.input_types, training=False))

    @checked()
    def count_params(self, pattern: str = "*") -> int:
        """Return the number of elements of the parameters, of those whose names match a pattern: ``"encoder.*"``."""
        graph = self.compiler.probe(self._parameters.input_types, training=False)
        shapes = {i.name: i.type.shape for i in graph.with_role("param")}
        require_match("count_params", "parameter", pattern, shapes)
        counted = {name: shape for name, shape in shapes.items() if covers(pattern, name)}
        if undetermined := [name for name, shape in counted.items() if not is_static(shape)]:
            raise InputError(
                f"the size of parameter '{undetermined[0]}' depends on inputs of unknown shape",
                hint="compile with shapes={...}, or call the model once",
            )
        return sum(math.prod(map(int, shape)) for shape in counted.values())

    def _repr_html_(self) -> str:
        try:
            content = notebook.text(self.summary())
        except MithrilError as error:  # sizes that no call has determined yet
            content = notebook.text(str(error))
        graphs = "".join(
            notebook.folded(f"{title(p.request.kind)} {k}", notebook.text(str(p.executable.graph)))
            for k, p in enumerate(self.programs)
        )
        table = decision_table(self.decisions)
        decisions = notebook.folded(f"{len(self.decisions)} decisions", table) if table else ""
        return notebook.heading(repr(self)[1:-1]) + content + decisions + graphs

    def __repr__(self) -> str:
        count = len(self._calls)
        return visible(f"<CompiledModel '{self.name}' on {self.backend.name}: {count} program{'s'[: count != 1]}>")
