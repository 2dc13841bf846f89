"""Saved programs, loaded on the machine that has their devices without tracing or compiling."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from mithril.graph import BackendError, InputError
from mithril_targets.tpu import generation

COMPILERS = {"tpu": "libtpu", "nvidia": "jax-cuda12-pjrt"}


def versions(family: str) -> dict[str, str | None]:
    """Return the versions that a serialized program depends on; None for a package that is not installed."""
    return {name: _version(name) for name in ("mithril-tpu", "jaxlib", COMPILERS[family])}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_versions(path: Path, description: Mapping[str, Any]) -> None:
    """Raise if a program was saved with other versions: a serialized program is valid only for its own compiler."""
    family = "tpu" if generation(description["target"]) is not None else "nvidia"
    saved, present = description.get("versions"), versions(family)
    if saved is None:
        raise BackendError(
            f"'{path}' does not say with which versions it was saved",
            hint="compile and save the program again with this version of mithril-tpu",
        )
    different = [name for name, version in saved.items() if present.get(name) != version]
    if different:
        pins = " ".join(f"'{name}=={saved[name]}'" for name in different if saved[name] is not None)
        raise BackendError(
            f"'{path}' was saved with other versions of {', '.join(different)}",
            facts=[f"{name}: saved with {saved[name]}, present is {present.get(name)}" for name in different],
            hint=f"pip install {pins}, or compile program.stablehlo.mlir from the same folder",
        )


class LoadedProgram:
    """A program written by ``AheadProgram.save``; a call transfers its arguments to the program's devices."""

    def __init__(self, description: Mapping[str, Any], compiled: Any) -> None:
        self.metadata = description  # contents of analysis.json
        self.compiled = compiled

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        (where_params, where_inputs), _ = self.compiled.input_shardings
        outputs: dict[str, Any] = self.compiled(
            {name: jax.device_put(params[name], sharding) for name, sharding in where_params.items()},
            {name: jax.device_put(inputs[name], sharding) for name, sharding in where_inputs.items()},
        )
        return outputs


def trees(description: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tree structures of arguments and results, which a serialized program does not contain."""
    arguments = (dict.fromkeys(description["params"], 0), dict.fromkeys(description["inputs"], 0))
    return jax.tree.structure((arguments, {})), jax.tree.structure(dict.fromkeys(description["outputs"], 0))


def load_program(folder: str | os.PathLike[str]) -> LoadedProgram:
    """Load a program saved in a folder; this machine must have its devices."""
    path = Path(folder)
    try:
        description = json.loads((path / "analysis.json").read_text())
        payload = (path / "program.bin").read_bytes()
    except OSError as error:
        raise InputError(f"'{path}' does not contain a saved program", facts=[str(error)]) from error
    _check_versions(path, description)
    platform = "tpu" if generation(description["target"]) is not None else "gpu"
    if jax.default_backend() != platform:
        raise BackendError(
            f"this program was compiled for {description['target']}, which this machine does not have",
            facts=[f"mesh: {description['mesh']}", f"devices of JAX: {', '.join(str(d) for d in jax.devices())}"],
            hint="compile program.stablehlo.mlir from the same folder for other hardware",
        )
    from jax.experimental import serialize_executable

    return LoadedProgram(description, serialize_executable.deserialize_and_load(payload, *trees(description)))
