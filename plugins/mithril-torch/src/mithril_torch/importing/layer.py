"""The layer of an imported module: it interprets the exported program of the current mode."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mithril.graph import InputError, ModelError
from mithril_importing.arrays import as_value
from mithril_importing.layers import ImportedLayer
from mithril_importing.patterns import known_layer
from mithril_torch.importing.complex_numbers import packed
from mithril_torch.importing.interpreter import Interpreter, User
from mithril_torch.importing.program import Exported
from mithril_torch.importing.regions import region_of
from mithril_torch.importing.running import run_module
from mithril_torch.importing.table import array_of, cast, dtype_name, filled, is_tensor


class TorchModule(ImportedLayer):
    """A module exported from PyTorch, in evaluation mode and, if it could be exported, in training mode."""

    scalars = False

    def __init__(
        self,
        evaluation: Exported,
        training: Exported | Exception,
        tensors: Mapping[str, torch.Tensor],
        operators: User,
    ) -> None:
        programs = [p for p in (evaluation, training) if isinstance(p, Exported)]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        super().__init__("", [region_of(p) for p in programs], known_layer(shapes, dtypes))
        self.evaluation, self.training_program, self.operators = evaluation, training, operators
        self.input_names = tuple(evaluation.inputs)
        self.arrays = {name: array_of(t) for name, t in tensors.items()}
        self.state_names = sorted({name for p in programs for name in p.updates})
        names = {name for p in programs for name in p.params.values()} | set(self.state_names)
        self.pretrained = {name: self.arrays[name] for name in self.arrays if name in names}

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.input_names

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.evaluation.outputs

    @cached_property
    def digest(self) -> str:
        """A digest of the programs and of the tensors that are constants in them."""
        text = hashlib.sha256()
        for program in (self.evaluation, self.training_program):
            if isinstance(program, Exported):
                text.update(str(program.graph).encode())
                for array in program.constants.values():
                    text.update(repr((array.shape, str(array.dtype))).encode() + array.tobytes())
        for name, array in sorted(self.arrays.items()):
            if name not in self.pretrained:
                text.update(repr((name, array.shape, str(array.dtype))).encode() + array.tobytes())
        return text.hexdigest()

    def __fingerprint__(self) -> tuple[Any, ...]:
        return (self.digest, self.input_names, self.outputs, dict(self.operators), tuple(self.layers))

    def expects(self, terminal: str) -> tuple[tuple[Any, ...] | None, Any] | None:
        shape, kind = self.evaluation.inputs[terminal]
        return shape, dtype_name(kind)

    def build(self, *values: Any) -> Any:
        program: Any = self.training_program if self.training else self.evaluation
        if not isinstance(program, Exported):
            raise ModelError(
                "torch.export cannot export this module in training mode",
                facts=str(program).strip().splitlines()[:4],
                hint="compile with inference=True, or import it with ml.from_torch(..., training=False)",
            )
        attributes = {
            n.name: operator.attrgetter(n.target)(program.module) for n in program.graph.find_nodes(op="get_attr")
        }
        arguments = dict(zip(program.inputs, values, strict=True))
        run = Interpreter(program, self, self.operators, {**program.constants, **attributes, **arguments})
        region = self.regions[program is not self.evaluation]
        with run.active():
            run.interpret(self, region, [packed(run.value(name)) for name in region.reads])
            for name, node in program.updates.items():
                if node in run.values:
                    self.update_state(name, as_value(packed(run.values[node])))
            for name in program.params.values():
                if not run.has_declared(name):
                    run.tensor(name)
            return tuple(_result(r, run) for r in program.results)

    def run_source(
        self, source: Any, inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> tuple[Iterator[tuple[str, np.ndarray[Any, Any]]], Mapping[str, np.ndarray[Any, Any]]]:
        """Return the tensors that a module computes for inference, by the node that imports them, and its outputs."""
        if not isinstance(source, torch.nn.Module):
            raise InputError(f"the source of this model is a torch.nn.Module, got {type(source).__name__}")
        return run_module(source, self.evaluation, inputs)

    def buffer(self, name: str) -> Any:
        """Return a buffer of the module: a state if the module changes it."""
        array = self.arrays[name]
        return self.state(name, array.shape, dtype=str(array.dtype)) if name in self.state_names else array


def _result(result: Any, run: Interpreter) -> Any:
    """Return a result of the module as a value; numbers and sizes become tensors, and None an empty one."""
    name = getattr(result, "name", None)
    value = packed(run.value(name) if name is not None else getattr(result, "value", result))
    if value is None:
        return as_value(filled((0,), 0, torch.float32))
    if is_tensor(value):
        return as_value(value)
    return as_value(cast(value, "int64" if not isinstance(value, (bool, float)) else str(np.asarray(value).dtype)))
