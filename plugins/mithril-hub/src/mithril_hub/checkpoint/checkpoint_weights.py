"""The weights of a checkpoint by the parameter names of a model, read one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mithril.base import InputError, TensorType, dtype as as_dtype
from mithril_hub.checkpoint.safetensors_file import Stored

# Buffers that older files hold and no model needs, and heads for training.
BUFFERS = re.compile(
    r".*(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|attention\.(bias|masked_bias)|position_ids|token_type_ids)"
)


class CheckpointWeights(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays by parameter name: views of the files, converted to the dtype of the model where it differs."""

    def __init__(self, tensors: Mapping[str, Stored], dtype: str) -> None:
        self.tensors = dict(tensors)
        self.dtype = dtype

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        array = self.tensors[name].array()
        return array.astype(as_dtype(self.dtype).numpy, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __fingerprint__(self) -> tuple[Any, ...]:
        rows = (f"{name} {s.file} {s.begin} {s.file.stat().st_mtime_ns}" for name, s in self.tensors.items())
        return (self.dtype, *sorted(rows))

    def __deepcopy__(self, memo: Any) -> CheckpointWeights:
        return self  # nothing in it changes


def matched(
    tensors: Mapping[str, Stored], types: Mapping[str, TensorType], roots: Sequence[str], dtype: str, source: str
) -> CheckpointWeights:
    """Return the weights of the parameters; raise InputError if the files do not fit the model.

    A file may leave out a root such as ``model.`` of names, or have one in front.
    """
    found: dict[str, Stored] = {}
    used: set[str] = set()
    wrong: list[str] = []
    for name, t in types.items():
        candidates = [name, *(name.removeprefix(r) for r in roots if r), *(r + name for r in roots)]
        key = next((c for c in candidates if c in tensors), None)
        if key is None:
            wrong.append(f"missing: '{name}' {list(t.shape)}")
            continue
        used.add(key)
        found[name] = tensors[key]
        if tensors[key].shape != t.shape:
            wrong.append(f"'{key}' is {list(tensors[key].shape)}, expected {list(t.shape)}")
        elif not as_dtype(np.dtype(tensors[key].dtype)).is_float:
            wrong.append(f"'{key}' has elements of {np.dtype(tensors[key].dtype)}: quantized checkpoints are not read")
    if wrong:
        more = [f"({len(wrong)} in total)"] if len(wrong) > 8 else []
        raise InputError(f"the weights in {source} do not fit its config.json", facts=[*wrong[:8], *more])
    return CheckpointWeights(found, dtype), sorted(set(tensors) - used)
