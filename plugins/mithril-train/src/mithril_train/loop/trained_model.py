"""The compiled model of a trainer: compiled from a logical model, and usable with any batch size after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mithril.compiler import CompiledModel, Transformed, compile as compile_model, option_registry
from mithril.graph import Dim, MithrilError, OptionError, ShapeError, TensorType, closest
from mithril.models import Layer
from mithril_train.engine.engine import Engine


def compiled_model(
    model: Any, backend: Any, options: Mapping[str, Any], arguments: Sequence[str], hints: Mapping[str, str]
) -> CompiledModel:
    """Return the compiled model of a trainer, whose own `arguments` and `hints` explain unknown options."""
    is_compiled = isinstance(model, CompiledModel)
    if not is_compiled and not isinstance(model, (Layer, Transformed)):
        raise OptionError(f"'{model!r}' is not a model", hint="give a model or a compiled model")
    if not is_compiled and backend is None:
        raise OptionError(
            "Trainer needs a backend, which compiles the model", hint='Trainer(model, optimizer, backend="jax")'
        )
    table = option_registry()
    for name in options:
        if name not in table.by_name and name not in table.aliases:
            suggestions = closest(name, [*arguments, *table.by_name], 1)
            raise OptionError(
                f"Trainer has no argument '{name}', nor ml.compile an option",
                hint=hints.get(name) or (f"did you mean '{suggestions[0]}'?" if suggestions else None),
            )
    if not isinstance(model, CompiledModel):
        return compile_model(model, backend, **options)
    if backend is not None or options:
        option = "backend" if backend is not None else next(iter(options))
        raise OptionError(f"the model is compiled already: '{option}' belongs to ml.compile")
    return model


def prepare(compiled: CompiledModel, engine: Engine) -> None:
    """Compile the first program of a trained model, for any batch size if the backend and the model allow it."""
    types = engine.inputs
    if engine.backend.capabilities.symbolic:
        size = next((t.shape[0] for t in types.values() if t.shape), None)
        batch = Dim("batch")
        opened = {
            n: TensorType(t.dtype, (batch, *t.shape[1:])) if t.shape and t.shape[0] == size else t
            for n, t in types.items()
        }
        try:
            compiled.prepare(opened)
        except MithrilError:
            engine.decisions.record("specialized", f"the model takes batches of {size} only")
        else:
            return
    try:
        _ = compiled.interface  # the batch size is symbolic, so the program can wait for the first call
    except ShapeError:
        compiled.prepare(types)
