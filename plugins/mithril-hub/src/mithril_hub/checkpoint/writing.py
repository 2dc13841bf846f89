"""``compiled.export(folder, format="huggingface")``: a pretrained model in the form that it came in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mithril.compiler import CompiledModel, Exported, save_file
from mithril.graph import DTypeError, InputError, UnsupportedError, dtype as as_dtype
from mithril.system import files
from mithril_hub.checkpoint.changed_layers import require_layers_of_settings
from mithril_hub.checkpoint.checkpoint_weights import CheckpointWeights
from mithril_hub.checkpoint.folder import INDEX, SINGLE, read_json, tensors_of
from mithril_hub.checkpoint.separate_head import with_separate_head
from mithril_hub.model import Pretrained, parameter_types

# Files of tokenizers, generation and pooling; a pattern names no file that could hold code.
OTHER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*_Pooling/config.json")


def export(
    compiled: CompiledModel,
    path: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
) -> Exported:
    """Write the model as a folder that transformers and ``ml.from_pretrained`` read.

    Parameters are the bound ones if none are given, and ``dtype`` is theirs. Tensors have the names of the checkpoint
    that the model came from, whose configuration and tokenizer are copied. LoRA must be merged before.
    """
    model = compiled.model
    weights = getattr(model, "pretrained", None)
    if not isinstance(weights, CheckpointWeights) or weights.folder is None:
        raise UnsupportedError(
            "only models of ml.from_pretrained are written as folders of Hugging Face",
            facts=[f"the model is {model!r}"],
            hint="export other models as files, as model.onnx; compiled.save('weights.safetensors') saves weights",
        )
    parameters = params if params is not None else compiled.params
    if parameters is None and _has_types_of(weights, model):
        # Nothing is bound before the sizes of the inputs are known, as those of a cache.
        parameters = weights
    if parameters is None:
        raise InputError("there are no parameters to export", hint="compiled.bind(params), or pass params=")
    target = Path(path)
    if (target / INDEX).exists():
        raise InputError(
            f"'{target}' has weights in several files, which '{INDEX}' lists", hint="pass another folder, or empty it"
        )
    arrays = _arrays(compiled, weights, parameters, dtype)
    require_layers_of_settings(model)
    (kind,) = {array.dtype for array in arrays.values()}
    folder = files.write_folder(
        target,
        {
            **_other_files(weights.folder),
            "config.json": _configuration(weights.folder, as_dtype(kind).name),
            SINGLE: partial(_write_tensors, arrays),
        },
    )
    return Exported(folder)


def _has_types_of(weights: CheckpointWeights, model: Any) -> bool:
    types = parameter_types(model) if isinstance(model, Pretrained) else {}
    return {n: t.shape for n, t in types.items()} == {n: x.shape for n, x in weights.tensors.items()}


def _arrays(
    compiled: CompiledModel, weights: CheckpointWeights, parameters: Mapping[str, Any], dtype: str | None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays by the names of the checkpoint; raise InputError if they are not those of its model."""
    missing = [name for name in weights if name not in parameters]
    changed = [name for name in parameters if name not in weights]
    changed += [n for n, x in parameters.items() if n in weights and tuple(x.shape) != weights.tensors[n].shape]
    if missing or changed:
        has_lora = any("lora_" in name for name in changed)
        facts = [f"missing: '{name}'" for name in missing[:4]] + [f"not of the checkpoint: '{n}'" for n in changed[:4]]
        raise InputError(
            "the parameters are not those of the checkpoint that the model came from",
            facts=[*facts, f"{len(missing) + len(changed)} in total"],
            hint="merge LoRA before: params = mithril_lora.merge(model, params), and compile the model again"
            if has_lora
            else "config.json describes the layers of the checkpoint only: export a model with others as a file",
        )
    kind = as_dtype(dtype or weights.dtype)
    if not kind.is_float:
        raise DTypeError(
            f"weights are not stored as {kind}", hint='dtype="bfloat16", "float16", "float32" or "float64"'
        )
    to_numpy = compiled.backend.to_numpy
    arrays = {weights.names[n]: np.asarray(to_numpy(parameters[n])).astype(kind.numpy, copy=False) for n in weights}
    form = getattr(compiled.model, "checkpoint_parameters", None)
    return dict(form(arrays)) if form else arrays


def _write_tensors(arrays: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    save_file(arrays, path, {"format": "pt"})  # transformers refuses files without this entry


def _configuration(folder: Path, dtype: str) -> str:
    """Return the configuration with the dtype of the weights, under the name that the version of its writer uses.

    Of a head with its own weights it says so: transformers 4 reads the configuration only.
    """
    settings = {**with_separate_head(read_json(folder / "config.json"), tensors_of(folder))}
    settings["dtype" if "dtype" in settings else "torch_dtype"] = dtype
    return json.dumps(settings, indent=2) + "\n"


def _other_files(folder: Path) -> dict[str, bytes]:
    paths = {path for pattern in OTHER_FILES for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths) if path.name != INDEX}
