"""Parameters on disk and from elsewhere: safetensors, and torch-style state dictionaries by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import to_numpy
from mithril.base import InputError, TensorType, closest, files, storable

COUNTERS = ("num_batches_tracked",)  # ends of names in torch's state dictionaries that hold no weights


def save_file(
    tensors: Mapping[str, np.ndarray[Any, Any]], path: str | os.PathLike[str], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file; the old file stays whole until the new one is complete."""
    from safetensors.numpy import save_file as save

    strange = [name for name, a in tensors.items() if not storable(name) or np.asarray(a).dtype.kind in "OUSM"]
    if strange:
        raise InputError(f"{strange[0]!r} cannot be saved: expected arrays of numbers by names that files can hold")
    with files.parts(path) as folder:
        part = folder / "part"
        save({name: np.asarray(a, order="C") for name, a in tensors.items()}, part, dict(metadata))
        files.move(part, path)


def load_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read a safetensors file; a damaged one is a clear error."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file as load

    try:
        import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, which safetensors then can give)

        return dict(load(path))
    except FileNotFoundError:
        raise InputError(f"there is no file '{os.fspath(path)}'") from None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise InputError(f"'{os.fspath(path)}' is no safetensors file that can be read", facts=[str(error)]) from None


def saved_states(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the names of the tensors in a file of ours that are state and no parameters."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return frozenset(json.loads((file.metadata() or {}).get("states", "[]")))


@dataclass
class LoadReport:
    """What became of a state dictionary's entries."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # wanted by the model, not given
    unexpected: list[str] = field(default_factory=list)  # given, not wanted
    ignored: list[str] = field(default_factory=list)  # counters of torch, which change no result
    mismatched: list[str] = field(default_factory=list)  # of another shape

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model was loaded, and every tensor of the dictionary has a place in the model."""
        return not (self.missing or self.mismatched or self.unexpected)

    def __str__(self) -> str:
        rows = [f"loaded {len(self.loaded)} tensors"]
        for name in ("missing", "mismatched", "unexpected"):
            items = getattr(self, name)
            if items:
                rows.append(f"{name}: " + "; ".join(items[:10]) + (f"; ... ({len(items)})" if len(items) > 10 else ""))
        return "\n".join(rows)


def match(
    declared: Mapping[str, TensorType], actual: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray[Any, Any]], LoadReport]:
    """Tensors of a state dictionary that fit the model by name and shape, and a report of the rest."""
    report = LoadReport()
    out: dict[str, np.ndarray[Any, Any]] = {}
    for name, expected in declared.items():
        if name not in actual:
            similar = closest(name, [g for g in actual if g not in declared], 1)
            report.missing.append(name + (f" (is it '{similar[0]}'?)" if similar else ""))
            continue
        array = to_numpy(actual[name])
        if array.shape != expected.shape:
            report.mismatched.append(f"{name}: expected {list(expected.shape)}, got {list(array.shape)}")
            continue
        out[name] = array.astype(expected.dtype.numpy, copy=False)
        report.loaded.append(name)
    for name in actual:
        if name not in declared:
            (report.ignored if name.endswith(COUNTERS) else report.unexpected).append(name)
    return out, report
