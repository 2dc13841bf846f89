"""``compiled.to_module()``: a compiled model as ``torch.nn.Module``, differentiated by PyTorch's autograd."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from mithril.base import InputError, TensorType, UnsupportedError
from mithril.runtime import PureProgram
from mithril_torch.backend import TorchBackend


def to_module(compiled: Any) -> CompiledModule:
    """Return the compiled model as a ``torch.nn.Module`` with its parameters and state.

    Parameters have their names of the model, as in its state dictionary; states are buffers. Values are those bound to
    the compiled model, else initial ones. ``train()`` and ``eval()`` select the mode of dropout and batch norm.
    """
    if not isinstance(compiled.backend, TorchBackend):
        raise UnsupportedError(
            f"to_module() requires the torch backend, but this model was compiled for '{compiled.backend.name}'",
            hint="ml.compile(model, 'torch').to_module(), or compiled.to_function() for jax and mlx",
        )
    types = _types(compiled)
    programs = {False: compiled.to_function().program(types)}
    if not compiled.options["inference"]:
        programs[True] = compiled.to_function(training=True).program(types)
    params = compiled.params if compiled.params is not None else compiled.randomize_params()
    return CompiledModule(programs, compiled.interface, params, compiled.initial_state())


def _types(compiled: Any) -> dict[str, TensorType]:
    """Return the types of the inputs, which must be known before the first call."""
    if compiled.programs:
        return dict(compiled.programs[-1].request.types)
    unknown = next((name for name, spec in compiled.specs.items() if spec.shape is None), None)
    raise InputError(
        f"to_module() requires the shapes of the inputs; that of '{unknown or next(iter(compiled.specs))}' is unknown",
        hint="pass shapes={'" + str(unknown) + "': [None, ...]} to ml.compile, or call the compiled model first",
    )


_number = itertools.count(1)


def _importable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Register the globals of a generated function as a module: torch.compile imports them by its name."""
    name = f"mithril_generated_{next(_number)}"
    forward.__globals__["__name__"] = name
    module = ModuleType(name)
    module.__dict__.update(forward.__globals__)
    sys.modules[name] = module
    weakref.finalize(forward, sys.modules.pop, name, None)
    return forward


class CompiledModule(torch.nn.Module):  # type: ignore[misc]
    """A compiled model as a module; its submodules only hold parameters and buffers.

    ``forward`` takes the inputs in the order of the model, or by name; several outputs are returned as a dictionary.
    """

    def __init__(
        self,
        programs: Mapping[bool, PureProgram],
        interface: Any,
        params: Mapping[str, torch.Tensor],
        states: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self._programs = dict(programs)
        self._forwards = {mode: _importable(p.forward) for mode, p in programs.items()}
        program = programs[False]
        self.input_names = tuple(program.types)
        self.output_names = program.results.outputs
        self._calls: set[Any] = set()  # shapes that passed the checks
        self._params: list[tuple[str, torch.nn.Module, str]] = []
        self._states: list[tuple[str, torch.nn.Module, str]] = []
        for i in interface.with_role("param"):
            owner, name = self._owner(i.name)
            trains = i.type.dtype.is_float and i.tags.get("trainable", True)
            owner.register_parameter(name, torch.nn.Parameter(params[i.name].detach().clone(), requires_grad=trains))
            self._params.append((i.name, owner, name))
        for i in interface.with_role("state"):
            owner, name = self._owner(i.name)
            owner.register_buffer(name, states[i.name].detach().clone())
            self._states.append((i.name, owner, name))
        self.train(True in self._programs)

    def _owner(self, path: str) -> tuple[torch.nn.Module, str]:
        """Return the submodule that holds the tensor of this dotted path, and the last part of the path."""
        owner: torch.nn.Module = self
        *parents, name = path.split(".")
        for part in parents:
            child = owner._modules.get(part)
            if child is None:
                child = torch.nn.Module()
                _register(owner.add_module, part, child, path)
            owner = child
        if hasattr(owner, name):
            raise _clash(path, name)
        return owner, name

    def train(self, mode: bool = True) -> CompiledModule:
        """Select the training mode; a model compiled with ``inference=True`` has none."""
        if mode and True not in self._programs:
            raise InputError(
                "this model was compiled with inference=True: it has no training mode",
                hint="omit inference=True, or train in the mode of inference: module.eval() keeps its gradients",
            )
        super().train(mode)
        return self

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Run the program of the current mode; new states replace the buffers."""
        program = self._programs[self.training]
        inputs = dict(zip(self.input_names, args, strict=False))
        if kwargs or len(inputs) != len(self.input_names) or len(args) != len(self.input_names):
            inputs = self._bound(args, kwargs)
        if not torch.compiler.is_compiling():
            self._check(program, inputs)
        params = {path: getattr(owner, name) for path, owner, name in self._params}
        if self._states:
            for path, owner, name in self._states:
                inputs[path] = getattr(owner, name)
        results = self._forwards[self.training](params, inputs)
        if program.results.states:
            self._keep(results, dict(program.results.states))
        if len(self.output_names) == 1:
            return results[self.output_names[0]]
        return {name: results[name] for name in self.output_names}

    def _keep(self, results: Mapping[str, torch.Tensor], changed: Mapping[str, str]) -> None:
        with torch.no_grad():
            for path, owner, name in self._states:
                if path in changed:
                    getattr(owner, name).copy_(results[changed[path]].detach())

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs by name; ``is_training`` follows the mode of the module."""
        inputs = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        if "is_training" in self.input_names and "is_training" not in inputs:
            inputs["is_training"] = torch.tensor(self.training)
        surplus = [n for n in kwargs if n not in self.input_names or n in self.input_names[: len(args)]]
        if surplus or len(args) > len(self.input_names) or len(inputs) < len(self.input_names):
            raise InputError(
                f"forward expects the inputs {', '.join(self.input_names)}",
                facts=[f"got {len(args)} by position and by name: {', '.join(kwargs) or 'none'}"],
            )
        return inputs

    def _check(self, program: PureProgram, inputs: Mapping[str, Any]) -> None:
        """Check types and sizes, once per combination."""
        key = (self.training, *((x.dtype, x.shape) for x in inputs.values()))
        if key in self._calls:
            return
        for name, t in program.types.items():
            x = inputs[name]
            if not isinstance(x, torch.Tensor) or x.dtype != getattr(torch, t.dtype.name):
                actual = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
                raise InputError(f"Type mismatch: expected {t.dtype}, got {actual}", facts=[f"input '{name}'"])
        program.check({name: tuple(inputs[name].shape) for name in program.types})
        self._calls.add(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Copy the tensors; the generated functions are shared."""
        from copy import deepcopy

        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        shared = {"_programs": self._programs, "_forwards": self._forwards}
        copy.__dict__.update({k: shared.get(k) or deepcopy(v, memo) for k, v in self.__dict__.items()})
        return copy

    def extra_repr(self) -> str:
        """Return the inputs and outputs with their types, for ``print``."""
        program = self._programs[False]
        inputs = ", ".join(f"{name}: {t}" for name, t in program.types.items())
        outputs = ", ".join(f"{name}: {t}" for name, t in program.interface.outputs.items())
        return f"{inputs} -> {outputs}"


def _register(add: Any, name: str, child: torch.nn.Module, path: str) -> None:
    try:
        add(name, child)
    except (KeyError, TypeError):
        raise _clash(path, name) from None


def _clash(path: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"'{path}' cannot name a tensor of a torch module: '{name}' is an attribute of torch.nn.Module",
        hint="rename the layer with name=...",
    )
