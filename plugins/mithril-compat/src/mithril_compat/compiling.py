"""``compile`` with the predecessor's keywords, and the compiled model with its methods."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import mithril as today
from mithril import InputError, ModelError, OptionError
from mithril.graph import closest
from mithril_compat.language.block import Block
from mithril_compat.language.connection import NOT_GIVEN, TBD, Connection, Constant, Tensor, merged_shape
from mithril_compat.language.model import Model
from mithril_compat.lowering import Program, needed
from mithril_compat.naming import all_states, free_inputs, long_names, output_names, short_names
from mithril_compat.notices import old_name

Keys = Iterable[str | Connection]


class PhysicalModel:
    """A compiled model: names of parameters and data are the predecessor's, arrays those of the backend."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __init__(
        self,
        model: Model,
        backend: Any,
        *,
        constant_keys: Mapping[Any, Any],
        data_keys: Keys,
        discard_keys: Keys,
        trainable_keys: Keys,
        shapes: Mapping[Any, Any],
        inference: bool,
        use_short_namings: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.backend = backend
        names = (short_names if use_short_namings else long_names)(model)
        self._names, self._model = names, model
        inputs = {names[id(e)]: e for e in free_inputs(model)}
        results = output_names(model, inputs)
        states = {names[id(s.edge)]: (s, r, v) for s, r, v in all_states(model)}
        constants = {self._key(k, inputs): v for k, v in constant_keys.items()}
        data = {self._key(k, inputs) for k in data_keys}
        trainable = {self._key(k, inputs) for k in trainable_keys}
        discarded = {self._key(k, {**inputs, **results}) for k in discard_keys}
        sizes = {self._key(k, inputs): tuple(v) for k, v in shapes.items()}
        conflicts = (constants.keys() | data) & trainable
        if conflicts:
            raise OptionError(
                f"'{min(conflicts)}' is in trainable_keys, and in constant_keys or data_keys",
                hint="name it in one of them",
            )
        results = {n: e for n, e in results.items() if n not in discarded}
        layers = needed([leaf for _, leaf in model.leaves()], [*results.values(), *(r for _, r, _ in states.values())])
        read = {id(leaf.edges[key].edge) for leaf in layers for key in leaf.input_names}
        inputs = {n: e for n, e in inputs.items() if id(e) in read and n not in states and n not in discarded}
        fixed = constants.keys() | data
        parameters = {n: e for n, e in inputs.items() if n in trainable or (e.differentiable and n not in fixed)}
        buffers = {id(leaf.edges[key].edge) for leaf in layers for key in leaf.statistics if key in leaf.edges}
        statistics = {
            n: e for n, e in inputs.items() if id(e) in buffers and n not in constants and n not in parameters
        }
        trained, parameters = tuple(parameters), {**parameters, **statistics}
        sizes_by_name = {n: merged_shape(e.declared_shape, sizes.pop(n, None)) for n, e in parameters.items()}
        for name, edge in inputs.items():
            if name not in parameters and edge.declared_shape is not None:
                sizes[name] = merged_shape(sizes.get(name), edge.declared_shape) or ()
        self.input_keys = set(inputs) | set(states)
        self.output_keys = sorted(results)
        self._parameters, self._statistics = trained, tuple(statistics)
        self._constants = dict(constants)
        self._has_states = bool(states) or any(leaf.has_states for leaf in layers)
        self._data = tuple(n for n in inputs if n not in parameters and n not in constants)
        arguments = {n: e for n, e in inputs.items() if n not in parameters}
        float_dtype = backend.dtype.numpy
        self._program = Program(layers, arguments, parameters, sizes_by_name, states, results, float_dtype)
        typed = {n: backend.to_numpy(v) if backend.is_array(v) else v for n, v in constants.items()}
        declared = {n: [... if isinstance(k, tuple) else k for k in s] for n, s in sizes.items() if n in arguments}
        self._sizes = {**declared, **{n: v.shape for n, v in typed.items() if hasattr(v, "shape")}}
        with warnings.catch_warnings():  # programs of the predecessor pass jit= to all backends
            warnings.filterwarnings("ignore", ".*reads the option jit", today.OptionWarning)
            self.compiled = today.compile(
                self._program,
                backend,
                constants={n: v for n, v in typed.items() if n in inputs},
                shapes={n: s for n, s in declared.items() if n not in constants},
                inference=inference,
                **options,
            )

    def _key(self, key: str | Connection, keys: Mapping[str, Any]) -> str:
        name = self._names.get(id(key.edge)) if isinstance(key, Connection) else key
        if name is None or name not in keys:
            label = key.key if isinstance(key, Connection) else key
            similar = closest(str(label), list(keys), 1)
            raise InputError(
                f"the model has no key '{label}'",
                facts=[f"keys: {', '.join(keys)}"],
                hint=f"did you mean '{similar[0]}'?" if similar else None,
            )
        return name

    # -- parameters and calls ----------------------------------------------------------------------------------------
    def randomize_params(
        self, excluded_keys: Iterable[str] | None = None, shards: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Any]:
        """Return standard normal arrays for the parameters."""
        excluded = set(excluded_keys or ())
        by_name = self.shapes
        shapes = {n: by_name[n] for n in sorted(self._parameters) if n not in excluded and n in by_name}
        unknown = [n for n, shape in shapes.items() if shape is None or not all(isinstance(s, int) for s in shape)]
        if unknown:
            raise ModelError(
                f"the shape of parameter '{unknown[0]}' is unknown",
                hint="pass shapes= of the inputs to compile, or declare them by set_shapes",
            )
        return {n: self.backend.randn(*shape) for n, shape in shapes.items()}

    @property
    def shapes(self) -> dict[str, Any]:
        """Shapes of inputs, parameters and outputs as far as they are known."""
        try:
            return {n: _plain_shape(s) for n, s in self.compiled.get_shapes().items()}
        except today.ShapeError:
            return {**dict.fromkeys((*self.input_keys, *self.output_keys)), **self._known_shapes()}

    def _known_shapes(self) -> dict[str, Any]:
        """Return the shapes in the part of the program that needs no input of unknown shape, such as a target."""
        program = self._program
        unknown = {id(e.edge) for n, e in program.data.items() if n not in self._sizes}
        layers = []
        for layer in program.leaves:
            if any(id(layer.edges[key].edge) in unknown for key in layer.input_names):
                unknown |= {id(layer.edges[o].edge) for o in layer.outputs}
            else:
                layers.append(layer)
        results = {f"result{k}": layer.edges[layer.outputs[-1]] for k, layer in enumerate(layers)}
        if not results:
            return {}
        read = {id(layer.edges[key].edge) for layer in layers for key in layer.input_names}
        data, parameters = (
            {n: e for n, e in group.items() if id(e.edge) in read} for group in (program.data, program.parameters)
        )
        states = {n: s for n, s in program.states.items() if id(s[1].edge) not in unknown and id(s[0].edge) in read}
        part = Program(layers, data, parameters, program.shapes, states, results, program.float_dtype)
        compiled = today.compile(part, self.backend, shapes={n: self._sizes[n] for n in data})
        return {n: _plain_shape(s) for n, s in compiled.get_shapes().items() if n not in results}

    def get_shapes(self, **settings: Any) -> dict[str, Any]:
        return self.shapes

    @property
    def initial_state_dict(self) -> dict[str, Any]:
        """The first state, to be passed as ``state=``."""
        return self.compiled.initial_state(0)

    def has_grad(self, key: str) -> bool:
        return key in self._parameters

    @property
    def data(self) -> tuple[str, ...]:
        return self._data

    def evaluate(
        self,
        params: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        output_gradients: Any = False,
        state: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return outputs; with ``output_gradients`` also gradients of parameters; with states the next ones, too."""
        arrays = {**(params or {}), **(data or {})}
        arrays = {n: v for n, v in arrays.items() if n not in self._constants}
        if self._has_states and state is None:
            raise InputError("the model has states", hint="pass state=compiled.initial_state_dict")
        weights = {n: v for n, v in arrays.items() if n in self._parameters or n in self._statistics}
        inputs = {n: v for n, v in arrays.items() if n in self._data}
        cotangents = self._cotangents(output_gradients)
        result = self.compiled.evaluate(weights, inputs, cotangents, state=state)
        parts = list(result) if isinstance(result, tuple) else [result]
        parts[0] = {n: self._program.constants.get(n, v) for n, v in parts[0].items()}
        if cotangents is not None:
            parts[1] = {n: v for n, v in parts[1].items() if n in self._parameters}
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _cotangents(self, requested: Any) -> Any:
        if requested is False or requested is None:
            return None
        if requested is not True:
            return dict(requested)
        if "final_cost" not in self.output_keys:
            raise InputError(
                "output_gradients=True requires the output 'final_cost' of a TrainModel",
                facts=[f"outputs: {', '.join(self.output_keys)}"],
                hint="pass output_gradients={'output': array}",
            )
        shape = self.shapes.get("final_cost")
        return {"final_cost": 1.0 if not shape else self.backend.ones(*shape)}

    def summary(self, **shown: Any) -> None:
        """Print the table of the compiled model."""
        print(self.compiled.summary())


def _plain_shape(shape: Iterable[Any]) -> list[Any]:
    return [int(s) if isinstance(s, int) else None for s in shape]


def compile(
    model: Block,
    backend: Any,
    *,
    constant_keys: Mapping[Any, Any] | None = None,
    data_keys: Keys | None = None,
    discard_keys: Keys | None = None,
    trainable_keys: Keys | None = None,
    shapes: Mapping[Any, Any] | None = None,
    inference: bool = False,
    jit: bool = True,
    file_path: str | None = None,
    safe_shapes: bool = True,
    safe_names: bool = True,
    use_short_namings: bool = True,
    **options: Any,
) -> PhysicalModel:
    """Compile a model of the predecessor; further keywords are options of ``mithril.compile``."""
    keywords = {"constant_keys": constant_keys, "data_keys": data_keys, "discard_keys": discard_keys,
                "trainable_keys": trainable_keys}  # fmt: skip
    for keyword, value in keywords.items():
        if value is not None:
            old_name(keyword)
    if isinstance(model, Block) and model.parent is not None:
        raise ModelError("a layer that belongs to a model cannot be compiled alone", hint="construct another one")
    if not isinstance(model, Model):
        around = Model()
        around.join(model, {key: key for key in model.terminal_names() if not model.edges[key].is_valued})
        for output in model.outputs_in_order():
            around.expose(output)
        model.parent = None  # it may be compiled again, or added to a model
        model = around
    finalize = getattr(model, "finalize", None)
    if finalize is not None:
        finalize()
    more = {"file_path": file_path} if file_path is not None else {}
    return PhysicalModel(
        model,
        backend,
        constant_keys=constant_keys or {},
        data_keys=data_keys or (),
        discard_keys=discard_keys or (),
        trainable_keys=trainable_keys or (),
        shapes=shapes or {},
        inference=inference,
        use_short_namings=use_short_namings,
        options={**({} if jit else {"jit": False}), **more, **options},
    )


__all__ = ["NOT_GIVEN", "TBD", "Constant", "PhysicalModel", "Tensor", "compile"]
