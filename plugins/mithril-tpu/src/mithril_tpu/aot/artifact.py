"""Saved programs, loaded on the machine that has their devices without tracing or compiling."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from mithril.base import BackendError, InputError
from mithril_targets.tpu import generation


class LoadedProgram:
    """A program written by ``AheadProgram.save``; a call transfers its arguments to the program's devices."""

    def __init__(self, metadata: Mapping[str, Any], compiled: Any) -> None:
        self.metadata = metadata  # contents of analysis.json
        self.compiled = compiled

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        (where_params, where_inputs), _ = self.compiled.input_shardings
        outputs: dict[str, Any] = self.compiled(
            {name: jax.device_put(params[name], sharding) for name, sharding in where_params.items()},
            {name: jax.device_put(inputs[name], sharding) for name, sharding in where_inputs.items()},
        )
        return outputs


def trees(metadata: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tree structures of arguments and results, which a serialized program does not contain."""
    arguments = (dict.fromkeys(metadata["params"], 0), dict.fromkeys(metadata["inputs"], 0))
    return jax.tree.structure((arguments, {})), jax.tree.structure(dict.fromkeys(metadata["outputs"], 0))


def load_program(folder: str | os.PathLike[str]) -> LoadedProgram:
    """Load a program saved in a folder; this machine must have its devices."""
    path = Path(folder)
    try:
        metadata = json.loads((path / "analysis.json").read_text())
        payload = (path / "program.bin").read_bytes()
    except OSError as error:
        raise InputError(f"'{path}' does not contain a saved program", facts=[str(error)]) from error
    platform = "tpu" if generation(metadata["target"]) is not None else "gpu"
    if jax.default_backend() != platform:
        raise BackendError(
            f"this program was compiled for {metadata['target']}, which this machine does not have",
            facts=[f"mesh: {metadata['mesh']}", f"devices of JAX: {', '.join(str(d) for d in jax.devices())}"],
            hint="compile program.stablehlo.mlir from the same folder for other hardware",
        )
    from jax.experimental import serialize_executable

    return LoadedProgram(metadata, serialize_executable.deserialize_and_load(payload, *trees(metadata)))
