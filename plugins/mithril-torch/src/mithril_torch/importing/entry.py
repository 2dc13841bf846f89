"""``ml.from_torch``: a PyTorch module as a model."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from traceback import extract_tb
from typing import Any

import numpy as np
import torch

from mithril.graph import Decisions, InputError, MithrilError, UnsupportedError, unknown
from mithril.models import Model
from mithril_importing.model import model_of
from mithril_torch.importing.gradients import user_functions
from mithril_torch.importing.interpreter import FRAME, has_meaning, require_supported
from mithril_torch.importing.layer import TorchModule
from mithril_torch.importing.program import Exported, export
from mithril_torch.importing.table import dtype_name


def from_torch(
    module: Any,
    example_inputs: Any,
    *,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    training: bool = True,
    operators: Mapping[str, Callable[..., Any]] | None = None,
    outputs: Sequence[str] | None = None,
) -> Model:
    """Return a ``torch.nn.Module`` as a model with its weights, exported by ``torch.export``.

    ``example_inputs`` is a tensor, a tuple of positional or a dictionary of named arguments. ``dynamic_shapes`` names
    the open sizes of inputs by axis: ``{"x": {0: "batch"}}``, or in the order of the arguments, as ``torch.export``
    takes them. Parameters keep the module's names; buffers that the training mode changes are states. With
    ``training=False``, the evaluation mode is used for training, too.
    ``operators`` maps names of operators, such as ``"torchvision::nms"``, to functions of ``mithril.ops``.
    ``outputs`` names submodules, such as ``["layer2", "layer4"]``: their results become the outputs of the model, and
    operators that only other results need are left out.
    """
    if isinstance(module, (str, os.PathLike)):
        raise InputError(
            f"'{os.fspath(module)}' cannot be imported: a file of a whole module runs code when it is loaded",
            hint="create the module, load its weights by module.load_state_dict(torch.load(path, weights_only=True)), "
            "and call ml.from_torch(module, example_inputs)",
        )
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"ml.from_torch requires a torch.nn.Module, got {type(module).__name__}",
            hint="call the class first" if isinstance(module, type) else "wrap a function in a torch.nn.Module",
        )
    _require_submodules(module, outputs or ())
    args, kwargs = _arguments(example_inputs)
    shapes, names = _dynamic(module, args, kwargs, {} if dynamic_shapes is None else dynamic_shapes)
    user = dict(operators or {})
    arguments = (args, kwargs, shapes, names, outputs or (), lambda target: has_meaning(target, user))
    with user_functions() as functions:
        try:
            evaluation = _exported(module, False, *arguments)
        except MithrilError:
            raise
        except Exception as error:  # of torch.export, which has many classes of errors, or of the module
            raise _not_exported(error) from error
        trained: Exported | Exception = evaluation
        if training:
            try:
                trained = _exported(module, True, *arguments)
            except UnsupportedError:
                raise
            except Exception as error:
                # Some modules can be exported in evaluation alone: calls that train raise this error.
                trained = error
    if functions:
        listed = ", ".join(f"{f.__module__}.{f.__qualname__}" for f in functions)
        Decisions().record(
            "ignored",
            f"gradients of the model are derivatives of its forward operations: the backward of {listed} is not "
            "imported; where it differs, use y + (x - y).detach() in the module, which has the value of x and the "
            "gradient of y",
        )
    for program in (evaluation, trained):
        if isinstance(program, Exported):
            require_supported(program, user)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    layer = TorchModule(evaluation, trained, tensors, user)
    return model_of(layer, {name: (shape, dtype_name(kind)) for name, (shape, kind) in evaluation.inputs.items()})


def _not_exported(error: Exception) -> UnsupportedError:
    """Return the error for a module that torch.export rejects, with the user's line."""
    frames = FRAME.findall(str(error)) + [(f.filename, f.lineno) for f in extract_tb(error.__traceback__)]
    frames = [f for f in frames if not re.search(r"[/\\](torch|mithril_torch)[/\\]", f[0])]
    lines = str(error).strip().splitlines()
    return UnsupportedError(
        f"torch.export cannot export this module: {type(error).__name__}: {lines[0] if lines else 'without a message'}",
        facts=[f"in {frames[-1][0]}:{frames[-1][1]}"] if frames else (),
        hint="check that module(*example_inputs) runs, and compute sizes and branches from shapes instead of from "
        "elements of tensors",
    )


def _require_submodules(module: torch.nn.Module, outputs: Sequence[str]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for name in outputs:
        if name not in names:
            message, facts, hint = unknown("submodule in outputs=", name, names)
            raise InputError(message, facts=facts, hint=hint)


def _exported(module: torch.nn.Module, training: bool, *arguments: Any) -> Exported:
    """Export one mode of a module, and restore the modes of all its submodules."""
    modes = {m: m.training for m in module.modules()}
    try:
        module.train(training)
        with warnings.catch_warnings(), _without_reports():
            warnings.simplefilter("ignore")
            return export(module, *arguments)
    finally:
        for m, mode in modes.items():
            m.training = mode


@contextmanager
def _without_reports() -> Iterator[None]:
    """Discard the complete graph that PyTorch prints for a module that it rejects: the error has the line."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, printed = log.level, io.StringIO()
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(printed):
            yield
    finally:
        log.setLevel(level)
        sys.stderr.write(printed.getvalue().partition("\n\n\ndef forward(")[0])  # the text of the module itself


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), {name: _tensor(x) for name, x in example_inputs.items()}
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, (str, bytes)):
        return tuple(_tensor(x) for x in example_inputs), {}
    return (_tensor(example_inputs),), {}


def _tensor(x: Any) -> Any:
    return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x


def _dynamic(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any] | Sequence[Any],
) -> tuple[Any, dict[Any, str]]:
    """Return the dynamic shapes for torch.export, and the names of open sizes by input and axis."""
    from inspect import signature

    parameters = list(signature(module.forward).parameters)
    arguments = [*parameters[: len(args)], *kwargs]
    if not isinstance(dynamic_shapes, Mapping):  # by position, as torch.export takes them too
        if len(dynamic_shapes) > len(arguments):
            raise InputError(
                f"dynamic_shapes has {len(dynamic_shapes)} items for {len(arguments)} example inputs",
                facts=[f"inputs: {', '.join(arguments)}"],
            )
        dynamic_shapes = dict(zip(arguments, dynamic_shapes, strict=False))
    unknown = [name for name in dynamic_shapes if name not in arguments]
    if unknown:
        raise InputError(
            f"dynamic_shapes names '{unknown[0]}', which is not an example input",
            facts=[f"inputs: {', '.join(arguments)}"],
        )
    names: dict[Any, str] = {}
    shapes: dict[str, Any] = {}
    for name in arguments:
        axes = dynamic_shapes.get(name)
        if axes is None:
            shapes[name] = None
            continue
        pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes)
        shapes[name] = {}
        for axis, size in pairs:
            if size is not None:
                names[name, axis] = size if isinstance(size, str) else getattr(size, "__name__", str(size))
                shapes[name][axis] = torch.export.Dim.AUTO
    return (shapes if any(v for v in shapes.values()) else None), names
