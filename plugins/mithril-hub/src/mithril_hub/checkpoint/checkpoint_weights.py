"""The weights of a checkpoint by the parameter names of a model, read one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mithril.graph import InputError, TensorType, dtype as as_dtype
from mithril_hub.checkpoint.safetensors_file import Stored

# Buffers of older files, which no model needs.
BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|position_ids|token_type_ids)")


class CheckpointWeights(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays by parameter name: views of the files, or copies where they are converted or stacked."""

    def __init__(self, tensors: Mapping[str, Stored], dtype: str, names: Mapping[str, str]) -> None:
        self.tensors = dict(tensors)
        self.names = dict(names)  # of the tensors in the files, by parameter
        self.dtype = as_dtype(dtype).numpy
        self.folder: Path | None = None  # of the checkpoint
        self.converted: dict[str, np.ndarray[Any, Any]] = {}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        if name in self.converted:
            return self.converted[name]
        stored = self.tensors[name]
        array = stored.array()
        if array.dtype == self.dtype and isinstance(stored, Stored):
            return array
        array = self.converted[name] = array.astype(self.dtype, copy=False)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def matched(
    tensors: Mapping[str, Stored], types: Mapping[str, TensorType], roots: Sequence[str], dtype: str, source: str
) -> CheckpointWeights:
    """Return the weights of the parameters; raise InputError if the files do not fit the model.

    A file may leave out a root such as ``model.`` of names, or have one in front.
    """
    weights: dict[str, Stored] = {}
    names: dict[str, str] = {}
    wrong: list[str] = []
    for name, t in types.items():
        candidates = [name, *(name.removeprefix(r) for r in roots), *(r + name for r in roots)]
        key = next((c for c in candidates if c in tensors), None)
        if key is None:
            wrong.append(f"missing: '{name}' {list(t.shape)}")
            continue
        names[name] = key
        stored = weights[name] = tensors[key]
        if stored.shape != t.shape:
            wrong.append(f"'{key}' is {list(stored.shape)}, expected {list(t.shape)}")
        elif not as_dtype(np.dtype(stored.dtype)).is_float:
            wrong.append(f"'{key}' has elements of {np.dtype(stored.dtype)}: quantized checkpoints are not supported")
    used = set(names.values())
    blocks = {_block(key) for key in used} - {""}
    surplus = [key for key in tensors if key not in used and _block(key) in blocks and not BUFFERS.fullmatch(key)]
    wrong += [f"unknown: '{key}' {list(tensors[key].shape)}" for key in sorted(surplus)]
    if wrong:
        more = [f"({len(wrong)} in total)"] if len(wrong) > 8 else []
        raise InputError(f"the weights in {source} do not fit its config.json", facts=[*wrong[:8], *more])
    return CheckpointWeights(weights, dtype, names)


def _block(name: str) -> str:
    """Return the path of the layer around the module of a parameter: heads of other tasks are in none."""
    return name.rpartition(".")[0].rpartition(".")[0]
