"""Weights of experts: files have one matrix ``[out, in]`` for each, models also one parameter ``[experts, in, out]``.

A mesh of devices divides such a parameter over its processes; an export as GGUF writes separate matrices
again, and safetensors files keep the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril.graph import InputError

SEPARATE = re.compile(r"(.*\.experts\.)(\d+)\.(\w+\.weight)")
JOINT = re.compile(r"(.*\.experts\.)([A-Za-z_]\w*\.weight)")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts, read on request."""

    parts: tuple[Any, ...]  # of ``safetensors_file.Stored``

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *reversed(self.parts[0].shape))

    def array(self) -> Array:
        """Return a copy of all matrices, transposed."""
        return np.stack([part.array().T for part in self.parts])


def stacked(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint with one stack for the matrices of all experts."""
    result: dict[str, Any] = {}
    groups: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        if match := SEPARATE.fullmatch(name):
            groups.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    for name, parts in groups.items():
        forms = {(part.shape, np.dtype(part.dtype)) for part in parts.values()}
        if sorted(parts) != list(range(len(parts))) or len(forms) > 1:
            shapes = ", ".join(f"{k}: {list(parts[k].shape)}" for k in sorted(parts)[:8])
            raise InputError(f"the experts of '{name}' cannot be stacked", facts=[f"the checkpoint has {shapes}"])
        result[name] = Stack(tuple(parts[k] for k in range(len(parts))))
    return result


def separated(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with one matrix for each expert, under the names of checkpoints."""
    result: dict[str, Any] = {}
    for name, array in parameters.items():
        match = JOINT.fullmatch(name)
        if match is None or len(array.shape) != 3:
            result[name] = array
        else:
            parts = to_numpy(array).swapaxes(1, 2)
            result |= {f"{match[1]}{k}.{match[2]}": np.array(part, order="C") for k, part in enumerate(parts)}
    return result
