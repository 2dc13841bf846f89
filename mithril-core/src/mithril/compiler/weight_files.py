"""Weight files: safetensors, and state dictionaries in the style of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mithril.backend import EncodedWeight, to_numpy
from mithril.graph import InputError, Shape, TensorType, closest, float32, parsed_json, visible
from mithril.system import files

COUNTERS = ("num_batches_tracked",)  # name suffixes in torch's state dictionaries that are not weights


def save_file(
    tensors: Mapping[str, np.ndarray[Any, Any]], path: str | os.PathLike[str], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file atomically."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file as save

    strange = [name for name, a in tensors.items() if not files.storable(name) or np.asarray(a).dtype.kind in "OUSM"]
    if strange:
        raise InputError(f"{strange[0]!r} cannot be saved: expected arrays of numbers by names that files can hold")
    with files.parts(path) as folder:
        part = folder / "part"
        try:
            save({name: np.asarray(a, order="C") for name, a in tensors.items()}, part, dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error)) from None
        files.move(part, path)


def load_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read a safetensors file; raise InputError if it is missing or corrupt."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file as load

    try:
        import ml_dtypes  # noqa: F401  (registers bfloat16 in NumPy, which safetensors requires)

        return dict(load(path))
    except FileNotFoundError:
        raise InputError(f"there is no file '{os.fspath(path)}'") from None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise InputError(f"'{os.fspath(path)}' is not a readable safetensors file", facts=[str(error)]) from None


def saved_states(path: str | os.PathLike[str]) -> frozenset[str] | None:
    """Return the names of the state tensors in a file written by ``save``, or None for a file of another program."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        metadata = file.metadata() or {}
    if "states" not in metadata:
        return None
    names = parsed_json(metadata["states"], f"the entry 'states' of '{os.fspath(path)}'")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise InputError(f"the entry 'states' of '{os.fspath(path)}' is not a list of names")
    return frozenset(names)


@dataclass
class LoadReport:
    """The result of loading a state dictionary, by entry."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in the model, not in the dictionary
    unexpected: list[str] = field(default_factory=list)  # in the dictionary, not in the model
    ignored: list[str] = field(default_factory=list)  # torch's counters, which do not affect results
    mismatched: list[str] = field(default_factory=list)  # different shape

    @property
    def complete(self) -> bool:
        """Whether all tensors of the model were loaded and all tensors of the dictionary were used."""
        return not (self.missing or self.mismatched or self.unexpected)

    def __str__(self) -> str:
        rows = [f"loaded {len(self.loaded)} tensors"]
        for name in ("missing", "mismatched", "unexpected"):
            items = getattr(self, name)
            if items:
                rows.append(f"{name}: " + "; ".join(items[:10]) + (f"; ... ({len(items)})" if len(items) > 10 else ""))
        return "\n".join(map(visible, rows))


def match(
    declared: Mapping[str, TensorType],
    actual: Mapping[str, Any],
    on_host: Callable[[Any], np.ndarray[Any, Any]] = to_numpy,
) -> tuple[dict[str, Any], LoadReport]:
    """Return the tensors of a state dictionary that match the model by name and shape, and a report."""
    report = LoadReport()
    out: dict[str, Any] = {}
    for name, expected in declared.items():
        if name not in actual:
            similar = closest(name, [g for g in actual if g not in declared], 1)
            report.missing.append(name + (f" (is it '{similar[0]}'?)" if similar else ""))
            continue
        is_encoded = isinstance(actual[name], EncodedWeight) and expected.dtype is float32
        array = actual[name] if is_encoded else on_host(actual[name])
        if not _fits(array.shape, expected.shape):
            report.mismatched.append(f"{name}: expected {list(expected.shape)}, got {list(array.shape)}")
            continue
        out[name] = array if is_encoded else array.astype(expected.dtype.numpy, copy=False)
        report.loaded.append(name)
    for name in actual:
        if name not in declared:
            (report.ignored if name.endswith(COUNTERS) else report.unexpected).append(name)
    return out, report


def _fits(shape: Shape, expected: Shape) -> bool:
    """Whether sizes are equal; the first call checks those that depend on sizes of its inputs."""
    return len(shape) == len(expected) and all(not isinstance(d, int) or d == n for n, d in zip(shape, expected))
