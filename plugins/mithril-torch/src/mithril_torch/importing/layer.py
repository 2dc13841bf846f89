"""The layer of an imported module: it interprets the exported program of the current mode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mithril.graph import ModelError
from mithril.models import Layer
from mithril_torch.importing.interpreter import Interpreter, User
from mithril_torch.importing.program import Exported
from mithril_torch.importing.table import array_of, as_value, cast, dtype_name, filled, is_tensor


class TorchModule(Layer):
    """A module exported from PyTorch, in evaluation mode and, if it could be exported, in training mode."""

    def __init__(
        self,
        evaluation: Exported,
        training: Exported | Exception,
        tensors: Mapping[str, torch.Tensor],
        operators: User,
    ) -> None:
        self.evaluation, self.training_program, self.operators = evaluation, training, operators
        self.input_names = tuple(evaluation.inputs)
        self.arrays = {name: array_of(t) for name, t in tensors.items()}
        programs = [p for p in (evaluation, training) if isinstance(p, Exported)]
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
        return (self.digest, self.input_names, self.outputs, dict(self.operators))

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
        values_by_name = dict[str, Any](program.constants)
        for name, value in zip(program.inputs, values, strict=True):
            values_by_name[name] = value
        for placeholder, name in program.params.items():
            array = self.arrays[name]
            values_by_name[placeholder] = self.param(name, array.shape, dtype=str(array.dtype))
        for placeholder, name in program.buffers.items():
            array = self.arrays[name]
            is_state = name in self.state_names
            values_by_name[placeholder] = self.state(name, array.shape, dtype=str(array.dtype)) if is_state else array
        results = Interpreter(program, self, self.operators).run(program.graph, values_by_name, program.module)
        for name, node in program.updates.items():
            self.update_state(name, as_value(results[node]))
        return tuple(_result(r, results) for r in program.results)


def _result(result: Any, values: Mapping[str, Any]) -> Any:
    """Return a result of the module as a value; numbers and sizes become tensors, and None an empty one."""
    name = getattr(result, "name", None)
    value = values[name] if name is not None else getattr(result, "value", result)
    if value is None:
        return as_value(filled((0,), 0, torch.float32))
    if is_tensor(value):
        return as_value(value)
    return as_value(cast(value, "int64" if not isinstance(value, (bool, float)) else str(np.asarray(value).dtype)))
