"""``ml.from_pretrained``: a checkpoint of Hugging Face as a model with its weights."""

from __future__ import annotations

import os
from typing import Any

from mithril.backend import checked
from mithril.compiler import CompiledModel, compile
from mithril.graph import InputError, dtype as as_dtype
from mithril.models import Layer
from mithril_hub.architectures import build, is_native, kind_of
from mithril_hub.checkpoint.checkpoint_weights import matched
from mithril_hub.checkpoint.folder import locate, pooling_of, read_json, tensors_of
from mithril_hub.checkpoint.separate_head import with_separate_head
from mithril_hub.checkpoint.stacked_experts import stacked
from mithril_hub.encoder.text import with_pooling
from mithril_hub.model import parameter_types, with_stacked_experts
from mithril_hub.others.model import imported


@checked()
def from_pretrained(
    source: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    cache: int | None = None,
    revision: str | None = None,
    stack_experts: bool = False,
) -> Layer:
    """Return the model of a Hugging Face folder or repository, with its weights, which stay mapped files.

    ``dtype`` is that of the parameters. With ``cache=n``, decoders keep keys and values of n positions as states, for
    ``ml.generate``. With ``stack_experts`` the weights of a mixture of experts are copied to parameters
    ``[experts, in, out]``, which ``parallelism="expert"`` divides over devices. No code of the repository runs, and
    pickled weights are refused. An encoder of sentence-transformers, whose folder says that it pools by the mean or
    by the first token, has the output ``embedding``, one vector for each text.
    """
    folder = locate(source, revision)
    tensors = tensors_of(folder)
    settings = read_json(folder / "config.json")
    kind = kind_of(settings)
    if not is_native(kind):
        for option, value in (("cache", cache), ("stack_experts", stack_experts or None)):
            if value is not None:
                raise InputError(f"models of the type '{kind}' take no {option}=", hint=f"leave out {option}=")
        return imported(folder, settings, tensors, as_dtype(dtype).name)
    model, roots = build(with_separate_head(settings, tensors), dtype=as_dtype(dtype).name, cache=cache)
    model = with_pooling(model, pooling_of(folder))
    if stack_experts:
        model, tensors = with_stacked_experts(model), stacked(tensors)
    weights = matched(tensors, parameter_types(model), roots, dtype, f"'{folder}'")
    weights.folder = folder
    model.pretrained = weights
    return model


def load(
    path: str | os.PathLike[str],
    *,
    backend: Any = None,
    dtype: str = "float32",
    cache: int | None = None,
    **options: Any,
) -> CompiledModel:
    """Load a folder as a compiled model for inference."""
    return compile(from_pretrained(path, dtype=dtype, cache=cache), backend, **{"inference": True, **options})
